"""append against the reference, bit for bit: what the interpreter's tests and the GPU's share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.cache import PagedCache
from octavo.calls import AppendCall
from octavo.formats import FORMATS
from octavo.layouts import shapes
from octavo.reference.append import append as reference_append
from octavo.spec import AttentionSpec


def spec_of(layout="leaf", kv_dtype="fp8_e4m3", granularity="tensor", *, heads, dim, dim_v=None, page, mla=False):
    """A spec by what append looks at: `heads` KV heads of `dim` and `dim_v`, pages of `page` tokens."""
    return AttentionSpec(
        heads,
        heads,
        dim,
        dim_v,
        kv_dtype=kv_dtype,
        layout=layout,
        scale_granularity=granularity,
        page_size=page,
        mla=mla,
    )


@dataclass(frozen=True)
class Case:
    """One append.

    Attributes:
        x: dtype of k and v. rows: T.
        slots: prompt (runs over whole shuffled pages), shifted (the same, starting 8 slots into a page), decode
            (shuffled single slots), holes (prompt with -1 and slots outside the pool).
        values: usual (normal numbers), huge (those, infinities and the largest), wild (all bit patterns, extreme
            scales), edges (products of the scale and a rounding boundary).
        form: contiguous, fused (slices of one projection's output) or transposed (last dimension not contiguous).
        padded: pages, and where the layout has it slots, lie apart in pools that are larger.
        scales: given; False is None.
    """

    spec: AttentionSpec
    x: torch.dtype = torch.bfloat16
    rows: int = 70
    slots: str = "prompt"
    values: str = "usual"
    form: str = "contiguous"
    padded: bool = False
    scales: bool = True

    def __str__(self) -> str:
        s = self.spec
        parts = [
            s.layout,
            s.kv_dtype,
            s.scale_granularity,
            f"{s.num_kv_heads}x{s.head_dim}/{s.value_dim}",
            f"p{s.page_size}",
        ]
        parts += [str(self.x).removeprefix("torch."), str(self.rows), self.slots, self.values, self.form]
        return "-".join(parts + ["padded"] * self.padded + ["unscaled"] * (not self.scales) + ["mla"] * s.mla)


def compare(case: Case, append: Callable[[AppendCall], None], device: str, seed: int = 0) -> list[str]:
    """What differs between `append` on `device` and the reference on the CPU, of bytes, scales and counters.

    The whole pools are compared, so a byte written beside a slot shows.
    """
    spec = case.spec
    generator = torch.Generator().manual_seed(seed)
    pages = -(-case.rows // spec.page_size) + 3
    capacity = pages * spec.page_size
    slots = _slots(case, pages, generator)
    scales = _scales(case, generator)
    k = _values(case, spec.head_dim, scales[0], generator)
    v = None if spec.mla else _values(case, spec.value_dim, scales[1], generator)
    pools = _pools(case, pages, generator)

    expected = _cache(case, [p.clone() for p in pools], scales, "cpu")
    inside = torch.where((slots < 0) | (slots >= capacity), -1, slots)
    reference_append(AppendCall(spec, k, v, inside, expected.bytes(), expected.counters))
    expected.counters[0] = int((inside != slots).sum())

    got = _cache(case, [p.to(device) for p in pools], scales, device)
    there = [None if t is None else _as_form(case, t.to(device)) for t in (k, v)]
    append(AppendCall(spec, there[0], there[1], slots.to(device), got.bytes(), got.counters))

    found = []
    want, have = expected.bytes(), got.bytes()
    for name in ("k_pool", "v_pool"):  # from the first to the last byte of the cache, what lies between included
        wrong = _unequal(getattr(want, name), getattr(have, name).cpu())
        if wrong:
            found.append(f"{name}: {wrong} elements")
    for name in ("k_scale", "v_scale"):
        scale, other = getattr(want, name), getattr(have, name)
        if scale is not None and not torch.equal(scale, other.cpu()):
            found.append(f"{name}: {int((scale != other.cpu()).sum())} elements")
    if got.counters.tolist() != expected.counters.tolist():
        found.append(f"counters: {got.counters.tolist()}, not {expected.counters.tolist()}")
    return found


def _unequal(want: torch.Tensor, have: torch.Tensor) -> int:
    """Elements that differ as bits; a NaN of a 16-bit cache equals any NaN."""
    if want.dtype == torch.uint8:
        return int((want != have).sum())
    bits = torch.int16 if want.itemsize == 2 else torch.int32
    return int(((want.view(bits) != have.view(bits)) & ~(want.isnan() & have.isnan())).sum())


def _slots(case: Case, pages: int, generator: torch.Generator) -> torch.Tensor:
    size = case.spec.page_size
    order = torch.randperm(pages, generator=generator)
    prompt = (order[:, None] * size + torch.arange(size)).flatten()
    if case.slots == "shifted":
        return prompt[8 : 8 + case.rows].clone()
    slots = prompt[: case.rows].clone()
    if case.slots == "decode":
        slots = torch.randperm(pages * size, generator=generator)[: case.rows]
    if case.slots == "holes":
        slots[::7] = -1
        outside = torch.tensor([pages * size, pages * size + 5, -2, 2**40, -(2**63)])[: max(0, case.rows - 2)]
        slots[2 : 2 + len(outside)] = outside
    return slots


def _scales(case: Case, generator: torch.Generator) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    spec = case.spec
    if not case.scales or not spec.fp8 or spec.scale_granularity == "token_head":
        return None, None
    shape = () if spec.scale_granularity == "tensor" else (spec.num_kv_heads,)
    k = torch.rand(shape, generator=generator) * 0.05 + 1e-3
    if case.values == "wild":
        k = k * 2.0**-130  # subnormal: no reciprocal in fp32
    v = torch.rand(shape, generator=generator) + 0.5
    if case.values == "wild":
        v = v * 2.0**126  # with a subnormal one
    return k, None if spec.mla else v


def _values(case: Case, dim: int, scale: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    """k or v [rows, Hk, dim], contiguous, on the CPU."""
    shape = (case.rows, case.spec.num_kv_heads, dim)
    if case.values == "wild":
        bits = torch.int32 if case.x == torch.float32 else torch.int16
        limits = torch.iinfo(bits)
        x = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=bits).view(case.x)
        x[0] = 0.0  # a row of zeros; one of the smallest magnitudes, whose scale is the floor
        x[-1] = torch.finfo(case.x).tiny / 2
        return x
    x = torch.randn(shape, generator=generator)
    if case.values == "huge":
        x[::5, 0, 1] = torch.finfo(case.x).max
        x[1::5, 0, 1] = torch.finfo(case.x).min
        x[32:40, 0, 2] = float("inf")
    if case.values == "edges":
        mantissa = 1 + torch.arange(64) / 64  # every code and midpoint of both formats, and between
        boundaries = (mantissa[:, None] * 2.0 ** torch.arange(-20, 18)).flatten()
        pick = torch.randint(0, boundaries.numel(), shape, generator=generator)
        factor = torch.ones(()) if scale is None else scale
        x = boundaries[pick] * (factor[:, None] if factor.dim() else factor) * x.sign()
        limit = torch.finfo(case.x).max
        x = x.clamp(-limit, limit)
    return x.to(case.x)


def _as_form(case: Case, x: torch.Tensor) -> torch.Tensor:
    """The same values with the strides of case.form."""
    if case.form == "fused":
        rows, heads, dim = x.shape
        whole = torch.full((rows + 1, 3 * heads + 1, dim), float("nan"), dtype=x.dtype, device=x.device)
        whole[:rows, heads : 2 * heads] = x
        return whole[:, heads : 2 * heads]
    if case.form == "transposed":
        return x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return x


def _pools(case: Case, pages: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Memory of K and of V, filled with random bytes; [2 pages, ..., 2 slots or heads, ...] where padded."""
    made = []
    for shape in shapes(case.spec, pages)[: 1 if case.spec.mla else 2]:
        if case.padded:
            inner = shape[1:] if case.spec.layout == "leaf" else (2 * shape[1], *shape[2:])
            shape = (2 * pages, *inner)
        storage = FORMATS[case.spec.kv_dtype].storage
        count = torch.Size(shape).numel() * torch.empty((), dtype=storage).itemsize
        made.append(torch.randint(0, 100, (count,), generator=generator, dtype=torch.uint8).view(storage).view(shape))
    return made


def _cache(case: Case, pools: list[torch.Tensor], scales: tuple, device: str) -> PagedCache:
    views = pools
    if case.padded:
        views = [p[::2] if case.spec.layout == "leaf" else p[::2, ::2] for p in pools]
    k_scale, v_scale = (None if s is None else s.to(device) for s in scales)
    v = None if case.spec.mla else views[1]
    return PagedCache.view(case.spec, views[0], v, k_scale=k_scale, v_scale=v_scale)
