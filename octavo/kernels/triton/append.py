"""append: quantise new keys and values and write them to their slots, in one launch, in every layout.

A program takes `rows` rows and `block` elements of one head of K or of V. What it makes explicit:

* Bytes are stored, never read: a program touches only what its rows own. In the leaf layout a token's V is head_dim_v
  single bytes a page apart. Where all rows of a program are the consecutive slots of an aligned group, a thread stores
  16 of them at once. Else they are stored as bytes, a warp's lanes along the tokens, so that bytes which are neighbours
  leave in one transaction; along the elements where each sequence gets one token, so that at least sectors do.
* The result equals octavo.formats bit for bit. An IEEE division of each element costs more than the memory traffic, so
  x takes x * RN(1 / scale) and a correction by the exact remainder; `_divide` says why that gives the same byte. What
  it does not hold for (NaN, infinity, huge x, extreme scales) is looked for once a program and made to fit.
* Casts are the hardware's from sm_89 on and integer arithmetic elsewhere, also under Triton's interpreter, whose own
  cast is wrong where rounding carries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...calls import AppendCall, CacheBytes
from ...device import FP8_DOT, Device, device_of
from ...formats import FORMATS
from ...spec import AttentionSpec
from ..constants import CompileTime
from ._aot import example_strides
from ._plan import INTERPRETED
from ._tiles import bf16_bits, float32, token_of_column

# Where a kernel may be launched while the one before it ends (PTX, griddepcontrol).
DEPENDENT_LAUNCH = ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants of the kernel: one `tl.constexpr` argument.

    Attributes:
        rows, block: rows and elements of a program. num_warps: Triton's launch option.
        heads: KV heads. dim, dim_v: elements of a head; dim_v is 0 where only K is written (MLA).
        few: programs of the smaller tile. page_size, leaf: of the cache.
        kv: dtype of the cache, octavo's name.
        scales, scales_v: tensor, head, token_head, or none.
        hardware_cast: the compiler converts fp32 to FP8 for this device.
        interpreted: under Triton's interpreter, where tl.fma rounds twice.
        dependents_early: lets a kernel after it that waits for its end be launched at once. It is not launched early
            itself: after a kernel that fills the SMs its programs would start where that ends first, many on few SMs.
    """

    rows: int
    block: int
    num_warps: int
    heads: int
    dim: int
    dim_v: int
    few: bool
    page_size: int
    leaf: bool
    kv: str
    scales: str
    scales_v: str
    hardware_cast: bool
    interpreted: bool
    dependents_early: bool

    @property
    def blocks(self) -> int:
        """Programs a tile and head of K has."""
        return -(-self.dim // self.block)

    @property
    def blocks_v(self) -> int:
        """Programs a tile and head of V has."""
        return -(-self.dim_v // self.block)


class Side(NamedTuple):
    """K or V: the new elements, the pool they go to, their scales, and the strides of each in elements."""

    x: Any
    x_row: int
    x_head: int
    x_dim: int
    pool: Any
    offset: int
    page: int
    head: int
    slot: int
    scale: Any
    scale_page: int
    scale_head: int
    scale_slot: int


def append(call: AppendCall) -> None:
    """Write call.k and call.v [T, Hk, D] to call.slots as octavo.reference.append defines it for a GPU.

    One launch, no allocation, no synchronisation; slots outside the pool are skipped and counted.
    """
    if call.slots.shape[0] == 0:
        return
    device = call.k.device
    arguments, programs = launch(call, device_of(device))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _append[(programs,)](**arguments)


def launch(call: AppendCall, device: Device) -> tuple[dict[str, Any], int]:
    """The kernel's arguments on `device` and the number of programs; they follow from shapes, strides and dtypes."""
    cache, strides, rows = call.cache, call.cache.strides, call.slots.shape[0]
    c = _constants(call.spec, rows, device, cache.k_scale is not None, cache.v_scale is not None)
    k_memory = (cache.k_pool, strides.k_offset, strides.k_page, strides.k_head, strides.k_slot)
    v_memory = (cache.v_pool, strides.v_offset, strides.v_page, strides.v_head, strides.v_slot)
    k = Side(call.k, *call.k.stride(), *k_memory, *_scale(cache.k_scale, call.counters))
    v = k if call.v is None else Side(call.v, *call.v.stride(), *v_memory, *_scale(cache.v_scale, call.counters))
    arguments = {
        "k": k,
        "v": v,
        "slots": call.slots,
        "slots_stride": call.slots.stride(0),
        "counters": call.counters,
        "rows": rows,
        "capacity": strides.num_pages * call.spec.page_size,
        "c": c,
        "num_warps": c.num_warps,
    }
    return arguments, triton.cdiv(rows, c.rows) * c.heads * (c.blocks + c.blocks_v)


def tile_of(spec: AttentionSpec, rows: int, device: Device) -> tuple[int, int, int]:
    """(rows, elements, warps) of a program: 32 x 128 and 4 warps; where those would be few 16 x 32 and one warp, or 4
    in the leaf layout, whose single bytes more warps store sooner.

    32 elements a thread in the one, 16 or 4 in the other: 64 a thread leaves too few warps to hide the memory's
    latency. In the leaf layout the rows are at least 16, a group of token columns, and divide the page, so that an
    aligned tile lies in one page. With token_head scales a program sees whole heads.
    """
    dims = (spec.head_dim,) if spec.mla else (spec.head_dim, spec.value_dim)
    whole = triton.next_power_of_2(max(dims))
    split = spec.scale_granularity != "token_head" or not spec.fp8
    if _few(spec, rows, device):
        block = 32 if split and not any(dim % 32 for dim in dims) else whole
        return 16, block, max(1, min(8, 16 * block // (128 if spec.layout == "leaf" else 512)))
    block = whole if not split or any(dim % 64 for dim in dims) else 64 if any(dim % 128 for dim in dims) else 128
    tile = min(32, max(16 if spec.layout == "leaf" else 1, 8192 // block))
    return tile, block, max(1, min(8, tile * block // 1024))


def _few(spec: AttentionSpec, rows: int, device: Device) -> bool:
    """Whether the larger tiles would be too few to fill the device."""
    return triton.cdiv(rows, 16) * spec.num_kv_heads * (1 if spec.mla else 2) < 8 * device.num_sms


@lru_cache(maxsize=1024)
def _constants(spec: AttentionSpec, rows: int, device: Device, k_scaled: bool, v_scaled: bool) -> Constants:
    tile, block, warps = tile_of(spec, rows, device)
    few = _few(spec, rows, device)
    return Constants(
        rows=tile,
        block=block,
        num_warps=warps,
        heads=spec.num_kv_heads,
        dim=spec.head_dim,
        dim_v=0 if spec.mla else spec.value_dim,
        few=few,
        page_size=spec.page_size,
        leaf=spec.layout == "leaf",
        kv=spec.kv_dtype,
        scales=spec.scale_granularity if spec.fp8 and k_scaled else "none",
        scales_v=spec.scale_granularity if spec.fp8 and v_scaled else "none",
        hardware_cast=device.arch in FP8_DOT and not INTERPRETED,
        interpreted=INTERPRETED,
        dependents_early=device.arch in DEPENDENT_LAUNCH and not INTERPRETED,
    )


def _scale(scale: torch.Tensor | None, unused: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """A scale tensor and its strides by page, head and slot; 0 where one scale serves all."""
    if scale is None or scale.dim() == 0:
        return unused if scale is None else scale, 0, 0, 0
    return (scale, 0, scale.stride(0), 0) if scale.dim() == 1 else (scale, *scale.stride())


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The launches to compile ahead of time for `device` (octavo.testing.aot says what they are)."""
    llama: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    for label, rows, dtype, fields in (
        ("leaf e4m3 tensor 8192", 8192, torch.bfloat16, {**llama}),
        ("leaf e5m2 head 256", 256, torch.float16, {**llama, "kv_dtype": "fp8_e5m2", "scale_granularity": "head"}),
        (
            "nhd e4m3 token_head 8192",
            8192,
            torch.bfloat16,
            {**llama, "layout": "nhd", "scale_granularity": "token_head"},
        ),
        ("hnd bf16 8192", 8192, torch.float32, {**llama, "layout": "hnd", "kv_dtype": "bfloat16"}),
        (
            "mla e4m3 unscaled 64",
            64,
            torch.bfloat16,
            {"num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "mla": True, "layout": "nhd"},
        ),
    ):
        spec = AttentionSpec(**fields)
        arguments, _ = launch(_example(spec, rows, dtype), device)
        yield label, _append, arguments


def _example(spec: AttentionSpec, rows: int, dtype: torch.dtype, pages: int = 2) -> AppendCall:
    """A call over tensors without memory, as a cache of `PagedCache.allocate` makes it."""
    heads, size, storage = spec.num_kv_heads, spec.page_size, FORMATS[spec.kv_dtype].storage
    k = torch.empty(rows, heads, spec.head_dim, dtype=dtype, device="meta")
    v = None if spec.mla else torch.empty(rows, heads, spec.value_dim, dtype=dtype, device="meta")
    scale_shape = {"tensor": (), "head": (heads,), "token_head": (pages, heads, size)}[spec.scale_granularity]
    scale = torch.empty(scale_shape, device="meta") if spec.fp8 and not spec.mla else None
    pool = torch.empty(pages * heads * size * (spec.head_dim + spec.value_dim), dtype=storage, device="meta")
    slots = torch.empty(rows, dtype=torch.int64, device="meta")
    counters = torch.empty(2, dtype=torch.int32, device="meta")
    return AppendCall(spec, k, v, slots, CacheBytes(pool, pool, example_strides(spec, pages), scale, scale), counters)


@triton.jit(do_not_specialize=["rows", "capacity"])
def _append(k, v, slots, slots_stride, counters, rows, capacity, c: tl.constexpr):
    """Rows [tile * c.rows, + c.rows) and c.block elements of one head of K or V; k and v are `Side`s, c `Constants`."""
    if c.dependents_early:
        gdc_launch_dependents()
    program = tl.program_id(0)
    head = program % c.heads  # fastest: programs that run together read whole rows of the input
    piece = (program // c.heads) % (c.blocks + c.blocks_v)
    first = (program // (c.heads * (c.blocks + c.blocks_v))).to(tl.int64) * c.rows
    if c.blocks_v == 0 or piece < c.blocks:
        _write(k, slots, slots_stride, counters, rows, capacity, first, head, piece, False, c)
    else:
        _write(v, slots, slots_stride, counters, rows, capacity, first, head, piece - c.blocks, True, c)
    if (head == 0) & (piece == 0):
        _count_skipped(slots, slots_stride, counters, rows, capacity, first, c)


@triton.jit
def _write(
    side,
    slots,
    slots_stride,
    counters,
    rows,
    capacity,
    first,
    head,
    piece,
    VALUE: tl.constexpr,  # whether the side is V
    c: tl.constexpr,
):
    """Quantise and store rows [first, + c.rows) of `head`, elements [piece * c.block, + c.block)."""
    DIM: tl.constexpr = c.dim_v if VALUE else c.dim
    SCALES: tl.constexpr = c.scales_v if VALUE else c.scales
    TRANSPOSED: tl.constexpr = VALUE and c.leaf
    head = head.to(tl.int64)
    column = tl.arange(0, c.rows)
    # Rows are taken in the order of leaf columns, so that an aligned tile's columns are contiguous.
    row = first + (token_of_column(column) if TRANSPOSED else column)
    there = row < rows
    slot = tl.load(slots + row * slots_stride, mask=there, other=-1)
    scale = 1.0
    if SCALES == "tensor" or SCALES == "head":
        scale = tl.load(side.scale + head * side.scale_head)
    first_slot, before = slot, slot
    if TRANSPOSED:
        first_slot = tl.load(slots + first * slots_stride)
        if c.few:
            before = tl.load(slots + (row - 1) * slots_stride, mask=there & (row > 0), other=-1)
    dim = (piece * c.block + tl.arange(0, c.block)).to(tl.int64)
    read = side.x + head * side.x_head + row[:, None] * side.x_row + dim[None, :] * side.x_dim
    if DIM % c.block == 0:
        x = tl.load(read, mask=there[:, None], other=0.0)  # [rows, block]
    else:
        x = tl.load(read, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)

    # Here, where its branch keeps the load of the scale among those above: ptxas would wait for it after the elements.
    inverse = tl.div_rn(1.0, scale) if SCALES == "tensor" or SCALES == "head" else scale

    live = (slot >= 0) & (slot < capacity)
    owned = tl.where(live, slot, 0)
    page, offset = owned // c.page_size, owned % c.page_size
    scale_at = side.scale + page * side.scale_page + head * side.scale_head + offset * side.scale_slot  # [rows]
    start = side.pool + side.offset + head * side.head
    if TRANSPOSED:
        in_order = tl.sum((live & (slot == first_slot + row - first)).to(tl.int32), 0) == c.rows
        # As where each sequence gets one token: most do not lie beside the token before them.
        scattered = tl.sum((live & (slot == before + 1)).to(tl.int32), 0) <= c.rows // 2 if c.few else False
        # Quantised in each branch: done once before them, the compiler does it twice, in the layout of each store.
        if in_order & (first_slot % c.rows == 0):
            stored = _stored(x, scale, inverse, scale_at, live, counters, side.pool.dtype.element_ty, SCALES, c)
            start += (first_slot // c.page_size) * side.page + tl.multiple_of(first_slot % c.page_size, 16)
            tl.store(start + column[:, None] + dim[None, :] * c.page_size, stored, mask=(dim < DIM)[None, :])
        elif scattered:
            stored = _stored(x, scale, inverse, scale_at, live, counters, side.pool.dtype.element_ty, SCALES, c)
            across = start + dim[:, None] * c.page_size + (page * side.page + _column_of_token(offset))[None, :]
            tl.store(across, tl.trans(stored), mask=(dim < DIM)[:, None] & live[None, :])
        else:
            stored = _stored(x, scale, inverse, scale_at, live, counters, side.pool.dtype.element_ty, SCALES, c)
            written = start + (page * side.page + _column_of_token(offset))[:, None] + dim[None, :] * c.page_size
            tl.store(written, stored, mask=live[:, None] & (dim < DIM)[None, :])
    else:
        stored = _stored(x, scale, inverse, scale_at, live, counters, side.pool.dtype.element_ty, SCALES, c)
        written = start + (page * side.page + offset * side.slot)[:, None] + dim[None, :]
        tl.store(written, stored, mask=live[:, None] & (dim < DIM)[None, :])


@triton.jit
def _count_skipped(slots, slots_stride, counters, rows, capacity, first, c: tl.constexpr):
    """Add the rows of a tile whose slot is neither -1 nor in the pool to counters[0]."""
    row = first + tl.arange(0, c.rows)
    slot = tl.load(slots + row * slots_stride, mask=row < rows, other=-1)
    skipped = tl.sum(((slot < -1) | (slot >= capacity)).to(tl.int32), 0)
    if skipped > 0:
        tl.atomic_add(counters, skipped, sem="relaxed")


@triton.jit
def _stored(x, scale, inverse, scale_at, live, counters, dtype: tl.constexpr, SCALES: tl.constexpr, c: tl.constexpr):
    """x [rows, block] as stored elements; token_head: the scales are made and written to scale_at [rows]."""
    if c.kv == "fp8_e4m3" or c.kv == "fp8_e5m2":
        stored, scale = _quantise(float32(x), scale, inverse, live, counters, x.dtype.primitive_bitwidth, SCALES, c)
        if SCALES == "token_head":
            tl.store(scale_at, scale, mask=live)
        return stored
    else:
        return _cast(x, dtype, c)


@triton.jit
def _quantise(x, scale, inverse, live, counters, BITS: tl.constexpr, SCALES: tl.constexpr, c: tl.constexpr):
    """x fp32 [rows, block], of BITS bits before, / scale -> (uint8, scale); token_head makes the scale, [rows]."""
    LARGEST: tl.constexpr = 448.0 if c.kv == "fp8_e4m3" else 57344.0
    size = tl.sum(tl.abs(x))  # not below any |x|; infinite or NaN where any is
    finite = size < float("inf")
    if SCALES == "token_head":
        amax = tl.max(tl.abs(x), 1)
        if finite == 0:
            amax = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), 1)
        scale = tl.where(amax > 0, tl.maximum(tl.div_rn(amax, LARGEST), 2.0**-126), 1.0)
        inverse = tl.div_rn(1.0, scale)
    if SCALES == "none" or c.interpreted:
        if finite == 0:
            x = _without_nan(x, live, counters)
        if SCALES == "token_head":
            x = tl.div_rn(x, scale[:, None])
        elif SCALES != "none":
            x = tl.div_rn(x, scale)
    else:
        divisor = scale[:, None] if SCALES == "token_head" else scale
        factor = inverse[:, None] if SCALES == "token_head" else inverse
        least = tl.min(scale, 0) if SCALES == "token_head" else scale
        most = tl.max(scale, 0) if SCALES == "token_head" else scale
        usual = (size < 2.0**40 * least) & (least > 2.0**-60) & (most < 2.0**60)
        if usual == 0:
            # Powers of two that bring the scale near 1, and an x within 2^20 of it: what is lost saturates or is 0.
            shift = tl.where(divisor < 2.0**-60, 2.0**64, tl.where(divisor > 2.0**60, 2.0**-64, 1.0))
            divisor *= shift
            factor = tl.div_rn(1.0, divisor)
            limit = 2.0**20 * divisor
            x = tl.minimum(tl.maximum(_without_nan(x, live, counters) * shift, -limit), limit)
        x = _divide(x, divisor, factor, BITS)
    if c.hardware_cast:
        target: tl.constexpr = tl.float8e4nv if c.kv == "fp8_e4m3" else tl.float8e5
        stored = x.to(target).to(tl.uint8, bitcast=True)
    else:
        stored = _fp8_bits(x, c.kv == "fp8_e4m3")
    return stored, scale


@triton.jit
def _without_nan(x, live, counters):
    """x with NaN as 0, those of live rows counted."""
    nans = tl.sum(((x != x) & live[:, None]).to(tl.int32))
    if nans > 0:
        tl.atomic_add(counters + 1, nans, sem="relaxed")
    return tl.where(x == x, x, 0.0)


@triton.jit
def _divide(x, s, y, BITS: tl.constexpr):
    """What rounds to the same FP8 as RN(x / s), from y = RN(1 / s), for x of BITS bits and |x / s| up to 2^40.

    With q0 = RN(x y) and r = q0 s - x, exact, q = RN(q0 - r y) is RN of Q (1 + d), Q = x / s, |d| <= 2^-46. The same
    from q instead of q0 is RN(Q), as q is less than an ulp off (Markstein's theorem). For x of 16 bits q will do:
    it differs from RN(Q) only if a midpoint m of fp32 lies between, and the byte only if m is half an ulp beside a
    rounding boundary B of the format. With s an integer of 24 bits, B of 5 and x of 8 or 11, |Q - m| <= 2^-46 Q asks
    for s = N 2^20 + e with e B = -N, |e| <= 8, N <= 16: B = 16, s = 2^24 - 1, and there q is RN(Q) by calculation.
    r is q0 s - x and not x - q0 s to keep the sign of a zero.
    """
    minus_x, minus_y = x * -1.0, y * -1.0  # Triton's own -x is 0 - x, an instruction
    q = x * y
    q = tl.fma(tl.fma(q, s, minus_x), minus_y, q)
    if BITS > 16:
        q = tl.fma(tl.fma(q, s, minus_x), minus_y, q)
    return q


@triton.jit
def _cast(x, dtype: tl.constexpr, c: tl.constexpr):
    """x as 16- or 32-bit numbers, nearest even."""
    if x.dtype == dtype:
        return x
    elif dtype == tl.bfloat16 and not c.hardware_cast:
        return bf16_bits(float32(x)).to(tl.bfloat16, bitcast=True)
    else:
        return float32(x).to(dtype)


@triton.jit
def _fp8_bits(x, E4M3: tl.constexpr):
    """fp32, not NaN -> e4m3 or e5m2 as uint8: nearest even, saturating, subnormals included, by integer arithmetic."""
    if E4M3:
        SHIFT: tl.constexpr = 20  # bits of fp32's significand that go
        REBIAS: tl.constexpr = (127 - 7) << 3
        LARGEST: tl.constexpr = 0x43E00000  # 448
        NORMAL: tl.constexpr = 0x3C800000  # 2^-6
        UNIT: tl.constexpr = 0x46800000  # 2^14, where fp32 is spaced like the format's subnormals, 2^-9
    else:
        SHIFT: tl.constexpr = 21
        REBIAS: tl.constexpr = (127 - 15) << 2
        LARGEST: tl.constexpr = 0x47600000  # 57344
        NORMAL: tl.constexpr = 0x38800000  # 2^-14
        UNIT: tl.constexpr = 0x43000000  # 2^7; spacing 2^-16
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    normal = ((size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT) - REBIAS
    unit = tl.full(x.shape, UNIT, tl.uint32)
    small = (size.to(tl.float32, bitcast=True) + unit.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True) - unit
    return (tl.where(size < NORMAL, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _column_of_token(token):
    """octavo.layouts.leaf_column."""
    return (token // 16) * 16 + ((token >> 1) & 3) * 4 + ((token >> 3) & 1) * 2 + (token & 1)
