"""What a kernel knows when it is compiled, and the tuples it is handed: made of a spec and a device, once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from ... import tuning
from ...calls import AttentionCall, CacheBytes
from ...device import Device
from ...spec import AttentionSpec
from ..constants import CompileTime

INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants of an attention kernel: one `tl.constexpr` argument.

    Attributes:
        rows, tokens: of a tile; rows are query rows times query heads of one KV head.
        num_warps, num_stages, max_registers: Triton's launch options, the last as maxnreg.
        group: query heads per KV head.
        dim, dim_padded, dim_v, dim_v_padded: elements of a head, and the power of two above.
        page_size, leaf: of the cache. one_page: a tile lies on one page.
        query, kv, out: dtypes of the spec.
        scales: tensor, head, token_head, or none for a 16-bit cache.
        dot_k, dot_v: what the two products multiply: fp8, fp16 or bf16.
        p_bits, p_most: P of a product is at most p_most = 2^p_bits.
        softmax_scale, softcap, window, max_query_len, batch_invariant: of the spec.
        settle_v: V is converted where it was loaded, see `settled`.
        fp8_casts: the device converts e4m3. interpreted: Triton's interpreter runs the kernel.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    group: int
    dim: int
    dim_padded: int
    dim_v: int
    dim_v_padded: int
    page_size: int
    leaf: bool
    one_page: bool
    query: str
    kv: str
    out: str
    scales: str
    dot_k: str
    dot_v: str
    p_bits: float
    p_most: float
    softmax_scale: float
    softcap: float | None
    window: int | None
    max_query_len: int
    batch_invariant: bool
    settle_v: bool
    fp8_casts: bool
    interpreted: bool


# Where accumulators lie in tensor memory, a pass pipelines loops that cannot predicate the assembly of `settled`.
TENSOR_MEMORY = ("sm_100", "sm_103")


def constants(spec: AttentionSpec, device: Device, tile: tuning.Tile, prefill: bool, fp8_dot: bool) -> Constants:
    """Constants of a kernel of `spec` on `device` in tiles of `tile`; fp8_dot: whether e4m3 is multiplied as it is."""
    sixteen_bit = "bf16" if spec.kv_dtype == "bfloat16" else "fp16"
    # FP8 products take V in rows of tokens, which the leaf layout has; fp16 products take it in any order.
    dot_v = "fp8" if fp8_dot and spec.layout == "leaf" else sixteen_bit
    fp8_casts = device.fp8_dot and not INTERPRETED
    settle_v = spec.fp8 and spec.layout != "leaf" and not (prefill and device.arch in TENSOR_MEMORY)
    p_bits = 8 if dot_v == "fp8" else 0
    return Constants(
        rows=tile.rows,
        tokens=tile.tokens,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        max_registers=tile.max_registers,
        group=spec.group_size,
        dim=spec.head_dim,
        dim_padded=tuning.padded(spec.head_dim),
        dim_v=spec.value_dim,
        dim_v_padded=tuning.padded(spec.value_dim),
        page_size=spec.page_size,
        leaf=spec.layout == "leaf",
        one_page=spec.page_size % tile.tokens == 0,
        query=spec.query_dtype,
        kv=spec.kv_dtype,
        out=spec.out_dtype,
        scales=spec.scale_granularity if spec.fp8 else "none",
        dot_k="fp8" if fp8_dot else sixteen_bit,
        dot_v=dot_v,
        p_bits=float(p_bits),
        p_most=float(1 << p_bits),
        softmax_scale=spec.scale,
        softcap=spec.softcap,
        window=spec.window,
        max_query_len=spec.max_query_len,
        batch_invariant=spec.batch_invariant,
        settle_v=settle_v and not INTERPRETED,
        fp8_casts=fp8_casts,
        interpreted=INTERPRETED,
    )


@lru_cache(maxsize=1024)
def decode_constants(spec: AttentionSpec, device: Device, rows: int) -> Constants:
    """Constants of decode for sequences of at most `rows` query rows."""
    return constants(spec, device, tuning.decode_tile(spec, device, rows), prefill=False, fp8_dot=False)


@lru_cache(maxsize=1024)
def prefill_constants(spec: AttentionSpec, device: Device) -> Constants:
    """Constants of prefill: FP8 products where the device has them and `spec.precision` allows an e4m3 query and P."""
    fp8_dot = device.fp8_dot and spec.kv_dtype == "fp8_e4m3" and spec.precision == "fast"
    return constants(spec, device, tuning.prefill_tile(spec, device, fp8_dot), prefill=True, fp8_dot=fp8_dot)


# Arguments that Triton must not specialise on. It would, whatever is asked, on what is inside a tuple.
BOUNDS = ["size", "capacity", "total_rows", "num_decodes", "table_row", "num_pages"]


@lru_cache(maxsize=64)
def target_of(device: torch.device) -> Device:
    """The facts of a GPU; of a nominal, small one under the interpreter, where there is none."""
    return replace(Device.named("h200"), num_sms=4) if device.type == "cpu" else Device.detect(device)


class Batch(NamedTuple):
    """The sequences of a call, as kernels read them."""

    seq_lens: Any
    page_table: Any
    query_starts: Any


class Query(NamedTuple):
    """The query and its strides in elements."""

    q: Any
    scale: Any
    q_row: int
    q_head: int
    scale_head: int


class Memory(NamedTuple):
    """A cache: pools, scales, and strides in elements."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    k_offset: int
    k_page: int
    k_head: int
    k_slot: int
    v_offset: int
    v_page: int
    v_head: int
    v_slot: int
    k_scale_strides: tuple[int, ...]
    v_scale_strides: tuple[int, ...]


class Output(NamedTuple):
    """Where results go, and what enters at the end."""

    out: Any
    lse: Any
    scale: Any
    sinks: Any
    out_row: int
    out_head: int
    out_dim: int
    lse_row: int
    lse_head: int
    sink_head: int


def batch_of(call: AttentionCall) -> tuple[Batch, dict[str, int]]:
    """The sequences of `call`, and the arguments `BOUNDS` of a kernel."""
    table = call.page_table
    capacity = min(table.shape[1] * call.spec.page_size, 2**31 - 2**16)  # tile arithmetic past the end stays in int32
    decodes = -1 if call.num_decodes is None else call.num_decodes
    num_pages = call.cache.strides.num_pages
    bounds = (call.seq_lens.shape[0], capacity, call.q.shape[0], decodes, table.stride(0), num_pages)
    return Batch(call.seq_lens, table, call.query_starts), dict(zip(BOUNDS, bounds, strict=True))


def query_of(call: AttentionCall) -> Query:
    """The query of `call`."""
    q, scale = call.q, call.q_scale
    scale_head = scale.stride(0) if scale is not None and scale.numel() > 1 else 0
    return Query(as_bytes(q), scale, q.stride(0), q.stride(1), scale_head)


def memory_of(cache: CacheBytes) -> Memory:
    """The bytes of `cache`."""
    k_scale, v_scale = cache.k_scale, cache.v_scale
    return Memory(
        cache.k_pool,
        cache.v_pool,
        k_scale,
        v_scale,
        *cache.strides[1:],
        () if k_scale is None else k_scale.stride(),
        () if v_scale is None else v_scale.stride(),
    )


def output_of(call: AttentionCall) -> Output:
    """The results of `call`."""
    lse, sinks = call.lse, call.sinks
    lse_row, lse_head = (0, 0) if lse is None else lse.stride()
    return Output(
        as_bytes(call.out),
        lse,
        call.out_scale,
        sinks,
        *call.out.stride(),
        lse_row,
        lse_head,
        0 if sinks is None else sinks.stride(0),
    )


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor as uint8, which every GPU can load and store."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
