"""Inputs of the indexer's kernels and what has to come out, for the interpreter and for a GPU.

A comparison returns what is wrong in words, so that a test says `== []`. Logits are compared with the reference in
fp64 over the same bytes. The bound of one is (D + H + 4) 2^-24 times the sum of absolute terms, for fp32 sums, and a
backend's own LOSS of the same sum; then the output's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from octavo.indexer_calls import SCALE_BYTES, IndexAppendCall, IndexBytes, LogitsCall, PagedLogitsCall
from octavo.reference.index_append import index_append as reference_append
from octavo.reference.mqa_logits import mqa_logits as reference_ragged
from octavo.reference.mqa_logits import paged_mqa_logits as reference_paged
from octavo.reference.topk import topk_indices as reference_topk

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
# Of e4m3 products tensor cores keep about 14 bits in each of D / 32 steps; gluon also rounds a score to 8 bits.
LOSS = {"reference": 0.0, "triton": 4 * 2.0**-13, "gluon": 2.0**-8 + 4 * 2.0**-13}
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(frozen=True)
class AppendCase:
    """rows of `dtype` with holes and slots outside the pool; wild: any bits."""

    dim: int = 128
    page_size: int = 64
    scale_format: str = "fp32"
    dtype: torch.dtype = torch.bfloat16
    rows: int = 37
    wild: bool = True
    strided: bool = False

    def __str__(self) -> str:
        words = [self.rows, self.dim, self.page_size, self.scale_format, str(self.dtype).removeprefix("torch.")]
        return "-".join(map(str, words + ["wild"] * self.wild + ["strided"] * self.strided))


def compare_append(case: AppendCase, append: Callable[[IndexAppendCall], None], device: str) -> list[str]:
    """What differs from the reference's pool, byte by byte, and counters."""
    generator = torch.Generator().manual_seed(case.rows)
    pages = -(-case.rows // case.page_size) + 2
    capacity = pages * case.page_size
    pool = torch.randint(0, 256, (pages, case.page_size, 1, case.dim + SCALE_BYTES), generator=generator)
    pool = torch.nn.functional.pad(pool.to(torch.uint8).flatten(1), (0, 12), value=0xAB)  # a page stride of its own
    slots = torch.randperm(capacity, generator=generator)[: case.rows]
    slots[::7] = -1
    outside = torch.tensor([capacity, capacity + 5, -2, 2**40, -(2**63)])[: max(0, case.rows - 2)]
    slots[2 : 2 + len(outside)] = outside
    k = torch.randn(case.rows, case.dim, generator=generator)
    if case.wild:
        bits = torch.int32 if case.dtype == torch.float32 else torch.int16
        limits = torch.iinfo(bits)
        k = torch.randint(limits.min, limits.max, k.shape, generator=generator, dtype=bits).view(case.dtype)
        k[-1] = torch.finfo(case.dtype).tiny / 2
    k = k.to(case.dtype)
    k[0] = 0
    k[1 % case.rows] = 448.0  # a scale of exactly one

    def cache(flat: torch.Tensor) -> IndexBytes:
        shape = (pages, case.page_size, 1, case.dim + SCALE_BYTES)
        inner = case.dim + SCALE_BYTES
        return IndexBytes(flat.as_strided(shape, (flat.stride(0), inner, inner, 1)), case.scale_format)

    want, counted = pool.clone(), torch.zeros(2, dtype=torch.int32)
    inside = torch.where((slots < 0) | (slots >= capacity), -1, slots)
    reference_append(IndexAppendCall(k, inside, cache(want), counted))
    counted[0] = int((inside != slots).sum())
    there = k.to(device)
    have, counters = pool.to(device), torch.zeros(2, dtype=torch.int32, device=device)
    if case.strided:
        there = there.t().contiguous().t()
    append(IndexAppendCall(there, slots.to(device), cache(have), counters))
    found = []
    if not torch.equal(have.cpu(), want):
        found.append(f"{int((have.cpu() != want).sum())} bytes")
    if counters.tolist() != counted.tolist():
        found.append(f"counters {counters.tolist()}, not {counted.tolist()}")
    return found


@dataclass(frozen=True)
class PagedCase:
    """Sequences of `lens` tokens, n rows each. lens_form: vector [B], matrix [B, n], strided (a slice of a larger one).

    Garbage: page ids beyond each length, one page in the middle of the longest that is not in the pool, and NaN in
    every byte that no token owns. The page table has a row more than the batch.
    """

    lens: tuple[int, ...] = (0, 1, 63, 64, 65, 200)
    heads: int = 64
    dim: int = 128
    n: int = 1
    page_size: int = 64
    scale_format: str = "fp32"
    lens_form: str = "vector"
    out: torch.dtype = torch.float32
    fill: float | None = -INF
    max_context: int = 256
    hole: bool = False
    strided: bool = False

    def __str__(self) -> str:
        words = [f"b{len(self.lens)}", f"{self.n}x{self.heads}", f"d{self.dim}", f"page{self.page_size}"]
        words += [self.scale_format, self.lens_form, str(self.out).removeprefix("torch."), str(self.fill)]
        return "-".join(words + [f"ctx{self.max_context}"] + ["hole"] * self.hole + ["strided"] * self.strided)


def paged_call(case: PagedCase, device: str) -> PagedLogitsCall:
    """The call, its output full of NaN and wider than max_context."""
    generator = torch.Generator().manual_seed(7)
    batch, size, dim = len(case.lens), case.page_size, case.dim
    width = max(1, -(-max(case.lens, default=0) // size)) + 1
    num_pages = batch * width + 3
    order = torch.randperm(num_pages, generator=generator).to(torch.int32)
    table = torch.tensor(GARBAGE, dtype=torch.int32)[
        torch.randint(0, len(GARBAGE), (batch + 1, width), generator=generator)
    ]
    pages = torch.full((num_pages, size, 1, dim + SCALE_BYTES), 0x7F, dtype=torch.uint8)
    cache = IndexBytes(pages, case.scale_format)
    for row, length in enumerate(case.lens):
        used = -(-length // size)
        table[row, :used] = order[row * width : row * width + used]
        t = torch.arange(length)
        slots = table[row].long()[t // size] * size + t % size
        k = torch.randn(length, dim, generator=generator) * 2.0 ** torch.randint(
            -3, 4, (length, 1), generator=generator
        )
        reference_append(IndexAppendCall(k, slots, cache, torch.zeros(2, dtype=torch.int32)))
        if case.hole and used > 2:
            table[row, 1] = GARBAGE[row % len(GARBAGE)]
    q = torch.randn(batch, case.n, case.heads, dim, generator=generator).to(E4M3)
    weights = torch.randn(batch * case.n, case.heads, generator=generator)
    lens = torch.tensor(case.lens, dtype=torch.int32)
    if case.lens_form != "vector":
        least = torch.arange(case.n, dtype=torch.int32) * 3
        lens = (lens[:, None] - least).clamp(min=-4)
    if case.lens_form == "strided":
        whole = torch.full((batch, 3 * case.n), 10**6, dtype=torch.int32, device=device)
        whole[:, ::3] = lens.to(device)
        lens = whole[:, ::3]
    out = torch.full((batch * case.n, case.max_context + 24), NAN, dtype=case.out, device=device)
    q, weights = q.to(device), weights.to(device)
    if case.strided:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        weights = weights.t().contiguous().t()
    there = IndexBytes(pages.to(device), case.scale_format)
    return PagedLogitsCall(q, there, weights, lens.to(device), table.to(device), case.max_context, out, case.fill)


def compare_paged(case: PagedCase, paged: Callable[[PagedLogitsCall], None], device: str, loss: float) -> list[str]:
    """What is wrong with the logits; loss: one of LOSS."""
    call = paged_call(case, device)
    paged(call)
    here = replace(paged_call(case, "cpu"), out=torch.full(call.out.shape, NAN, dtype=torch.float64))
    reference_paged(here, torch.float64)
    weights, out = here.weights.abs(), torch.full_like(here.out, NAN)
    absolute = replace(here, q=_absolute(here.q), weights=weights, out=out, fill=None)
    absolute.cache.keys()[:] &= 0x7F
    reference_paged(absolute, torch.float64)
    return _differences(call.out, here.out, absolute.out, case.dim, case.heads, loss)


@dataclass(frozen=True)
class RaggedCase:
    """Rows over ranges of one run of keys: causal ones, or any, empty, backwards and beyond the keys among them."""

    rows: int = 21
    keys: int = 200
    heads: int = 64
    dim: int = 128
    causal: bool = False
    compressed: bool = False
    out: torch.dtype = torch.float32
    fill: float | None = -INF
    width: int = 200

    def __str__(self) -> str:
        words = [f"{self.rows}x{self.keys}", f"h{self.heads}", f"d{self.dim}", str(self.out).removeprefix("torch.")]
        words += [str(self.fill), f"w{self.width}"] + ["causal"] * self.causal + ["compressed"] * self.compressed
        return "-".join(words)


def ragged_call(case: RaggedCase, device: str) -> LogitsCall:
    """The call, its output full of NaN."""
    generator = torch.Generator().manual_seed(9)
    if case.causal:
        starts = torch.zeros(case.rows, dtype=torch.int64)
        ends = case.keys - case.rows + 1 + torch.arange(case.rows)
    else:
        starts = torch.randint(-9, case.keys + 9, (case.rows,), generator=generator)
        ends = torch.randint(-9, case.keys + 90, (case.rows,), generator=generator)
        starts[::3] = torch.randint(0, 30, starts[::3].shape, generator=generator)
    q = torch.randn(case.rows, case.heads, case.dim, generator=generator).to(E4M3)
    k = torch.randn(case.keys, case.dim, generator=generator).to(E4M3)
    k_scale = torch.rand(case.keys, generator=generator) + 0.5
    weights = torch.randn(case.rows, case.heads, generator=generator)
    out = torch.full((case.rows, case.width), NAN, dtype=case.out)
    return LogitsCall(
        q=q.to(device),
        k=k.to(device),
        k_scale=k_scale.to(device),
        weights=weights.to(device),
        starts=starts.to(device, torch.int32),
        ends=ends.to(device, torch.int32),
        out=out.to(device),
        fill=case.fill,
        compressed=case.compressed,
    )


def compare_ragged(case: RaggedCase, ragged: Callable[[LogitsCall], None], device: str, loss: float) -> list[str]:
    """What is wrong with the logits; loss: one of LOSS."""
    call = ragged_call(case, device)
    ragged(call)
    here = replace(ragged_call(case, "cpu"), out=torch.full(call.out.shape, NAN, dtype=torch.float64))
    reference_ragged(here, torch.float64)
    absolute = replace(
        here,
        q=_absolute(here.q),
        k=_absolute(here.k),
        weights=here.weights.abs(),
        out=torch.full_like(here.out, NAN),
        fill=None,
    )
    reference_ragged(absolute, torch.float64)
    return _differences(call.out, here.out, absolute.out, case.dim, case.heads, loss)


def _absolute(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.uint8) & 0x7F).view(E4M3)


def _differences(
    out: torch.Tensor, want: torch.Tensor, absolute: torch.Tensor, dim: int, heads: int, loss: float
) -> list[str]:
    """Where `out` is not `want`: NaN and infinities must be the same, numbers within the bound."""
    got = out.cpu().double()
    found = []
    special = ~want.isfinite()
    alike = torch.where(want.isnan(), got.isnan(), got == want)
    if not alike[special].all():
        found.append(f"{int((~alike & special).sum())} of {int(special.sum())} columns that no row sees, or infinities")
    unit = (dim + heads + 4) * 2.0**-24 + loss
    if out.dtype == torch.bfloat16:
        unit += 2.0**-8
    wrong = ~special & ~((got - want).abs() <= unit * absolute.nan_to_num(0.0, 0.0, 0.0) + 1e-37)
    if wrong.any():
        worst = ((got - want).abs() / absolute)[wrong].max()
        found.append(f"{int(wrong.sum())} logits beyond {unit:.2e}, the worst {float(worst):.2e}")
    seen = ~special & (want != 0)
    if seen.any() and out.dtype == torch.float32 and not wrong.any():
        a, b = got[seen], want[seen]
        difference = float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())  # the measure of DeepGEMM's own tests
        if not difference < 5e-6:
            found.append(f"difference {difference:.2e} to the quantised reference")
    return found


@dataclass(frozen=True)
class TopkCase:
    """Rows of numbers of one kind: normal, ties, zeros (most of them equal), sorted, infinities, wide, equal."""

    rows: int
    width: int
    k: int
    kind: str = "normal"
    dtype: torch.dtype = torch.float32
    full: bool = False

    def __str__(self) -> str:
        words = [f"{self.rows}x{self.width}", f"k{self.k}", self.kind, str(self.dtype).removeprefix("torch.")]
        return "-".join(words + ["full"] * self.full)


def topk_logits(case: TopkCase) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, N] with some NaN (but for kind normal) and lens, the first of them the whole width."""
    generator = torch.Generator().manual_seed(case.width)
    x = torch.randn(case.rows, case.width, generator=generator)
    if case.kind == "ties":
        x = x.round()
    elif case.kind == "zeros":
        x = x.clamp_min(0) * (torch.rand(x.shape, generator=generator) < 0.1)
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, x, -x)  # of either sign
    elif case.kind == "sorted":
        x = x.sort(1).values
    elif case.kind == "infinities":
        x[:, ::7] = INF
        x[:, 1::3] = -INF
    elif case.kind == "wide":
        x = x * torch.exp(40 * torch.randn(x.shape, generator=generator))
    elif case.kind == "equal":
        x = torch.full_like(x, -1.5)
    if case.kind != "normal":
        x[torch.rand(x.shape, generator=generator) < 0.03] = NAN
    lens = torch.randint(0, case.width + 3, (case.rows,), generator=generator, dtype=torch.int32)
    lens[0] = case.width
    if case.full:
        lens[:] = case.width
    elif case.rows > 1:
        lens[1] = -3
    return x.to(case.dtype), lens


def planted_rows(
    rows: int, width: int, k: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of which an estimate leaves the wrong number, size being too many; their lengths; and what each should be.

    In turn 0: numbers in plenty follow the k-th; 1: they equal it; 2: the largest come in blocks, the first always
    sampled among them, and are fewer than k. A sample may have so many of these blocks that it takes them for enough.
    """
    generator = torch.Generator().manual_seed(width + k)
    x = -torch.rand(rows, width, generator=generator)
    kinds = torch.arange(rows) % 3
    for row, kind in zip(x, kinds.tolist(), strict=True):
        run, above, equal = ((1, k + k // 32, size), (1, k // 2, size + size // 8), (8, k - 8, 0))[kind]
        blocks = torch.randperm(width // run, generator=generator)
        blocks = blocks.roll(-int(blocks.argmin()))
        places = (blocks[:, None] * run + torch.arange(run)).flatten()
        row[places[:above]] = 2 + torch.rand(above, generator=generator)
        row[places[above : above + equal]] = 1.0
    return x.to(dtype), torch.full((rows,), width, dtype=torch.int32), kinds


def compare_topk(case: TopkCase, topk: Callable[..., None], device: str) -> list[str]:
    """What differs from the reference: it must be nothing."""
    logits, lens = topk_logits(case)
    want = torch.full((case.rows, case.k), 78, dtype=torch.int32)
    reference_topk(logits, lens, want)
    padded = torch.full((case.rows, case.width + 5), INF, dtype=case.dtype, device=device)  # a row stride of its own
    padded[:, : case.width] = logits.to(device)
    out = torch.full((case.rows, 2 * case.k), 77, dtype=torch.int32, device=device)
    topk(padded[:, : case.width], lens.to(device), out[:, ::2])
    got = out.cpu()
    found = [] if (got[:, 1::2] == 77).all() else ["columns beside the result were written"]
    wrong = (got[:, ::2] != want).any(1).nonzero().flatten().tolist()
    return found + [f"row {row} of length {int(lens[row])}" for row in wrong[:5]]
