"""The indexer's cells of the support table: every operation on every backend against the reference on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..device import Device
from ..indexer import IndexerCache, mqa_logits, paged_mqa_logits, topk_indices
from ..indexer_choose import choose_operation
from ..spec import IndexerSpec

# The bound that DeepGEMM's own tests hold their kernels to, beside the reference over the same bytes.
MOST_DIFFERENCE = 5e-6
LENGTHS = (0, 100, 700, 64)
SPECS = (
    IndexerSpec(num_heads=64, head_dim=128, top_k=64),
    IndexerSpec(num_heads=32, head_dim=128, scale_format="pow2", max_query_len=2, top_k=64),
    IndexerSpec(num_heads=16, head_dim=64, page_size=16, max_query_len=3, top_k=64),
    IndexerSpec(num_heads=128, head_dim=128, page_size=128, max_query_len=4, top_k=64),
    IndexerSpec(num_heads=64, head_dim=128, scale_format="ue8m0", top_k=64),
)
OPERATIONS = ("index_append", "paged_mqa_logits", "mqa_logits", "topk")


@dataclass(frozen=True)
class Inputs:
    """A step's tensors on a CPU: keys and their slots, queries, weights, lengths, a page table with garbage beyond."""

    keys: torch.Tensor
    slots: torch.Tensor
    queries: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    pages: int

    @classmethod
    def of(cls, spec: IndexerSpec) -> Inputs:
        """The same for the same spec."""
        generator = torch.Generator().manual_seed(spec.num_heads)
        counts = [-(-n // spec.page_size) for n in LENGTHS]
        pages = sum(counts) + 2
        order = torch.randperm(pages, generator=generator, dtype=torch.int32)
        table = torch.full((len(LENGTHS), max(counts) + 1), -1, dtype=torch.int32)
        slots, start = [], 0
        for row, (count, length) in enumerate(zip(counts, LENGTHS, strict=True)):
            table[row, :count] = order[start : start + count]
            t = torch.arange(length)
            slots.append(table[row].long()[t // spec.page_size] * spec.page_size + t % spec.page_size)
            start += count
        rows = len(LENGTHS) * spec.max_query_len
        queries = torch.randn(len(LENGTHS), spec.max_query_len, spec.num_heads, spec.head_dim, generator=generator)
        return cls(
            torch.randn(sum(LENGTHS), spec.head_dim, generator=generator).bfloat16(),
            torch.cat(slots),
            queries.to(torch.float8_e4m3fn),
            torch.rand(rows, spec.num_heads, generator=generator),
            torch.tensor(LENGTHS, dtype=torch.int32),
            table,
            pages,
        )

    def cache(self, spec: IndexerSpec, device: torch.device, backend: str | None) -> IndexerCache:
        """The keys, appended on `device`."""
        made = IndexerCache.allocate(self.pages, spec.head_dim, spec.page_size, spec.scale_format, device)
        made.append(self.keys.to(device), self.slots.to(device), backend=backend)
        return made

    def run_of_keys(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For `mqa_logits`: the keys in e4m3, their scales, where each row of queries starts and ends among them."""
        keys = self.keys.float().clamp(-8, 8).to(torch.float8_e4m3fn)
        rows = torch.arange(self.weights.shape[0], dtype=torch.int32)
        return keys, torch.linspace(0.5, 2.0, len(keys)), rows * 3, (rows * 43).clamp_max(len(keys))


def cells(quick: bool) -> list[tuple[str, str, Callable[[str | None, torch.device], list[str]]]]:
    """(operation, spec in words, faults(backend or None, device)) of every cell."""
    return [
        (operation, _words(spec), _faults(operation, spec))
        for spec in (SPECS[:1] if quick else SPECS)
        for operation in OPERATIONS
    ]


def _words(spec: IndexerSpec) -> str:
    rows = f", {spec.max_query_len} rows a sequence" if spec.max_query_len > 1 else ""
    return f"{spec.num_heads} heads of {spec.head_dim}, pages of {spec.page_size}, {spec.scale_format} scales{rows}"


def _faults(operation: str, spec: IndexerSpec) -> Callable[[str | None, torch.device], list[str]]:
    def faults(backend: str | None, device: torch.device) -> list[str]:
        name = choose_operation(
            spec, Device.of(device), operation, backend
        ).backend  # refused before any tensor is made
        found = _compare(operation, spec, name, device)
        return [f"{operation}: {found}"] if found else []

    return faults


def _compare(operation: str, spec: IndexerSpec, backend: str, device: torch.device) -> str:
    """What differs from the reference on a CPU; nothing where it is right."""
    given, cpu = Inputs.of(spec), torch.device("cpu")
    here = given.cache(spec, cpu, "reference")
    if operation == "index_append":
        same = torch.equal(given.cache(spec, device, backend).pages.cpu(), here.pages)
        return "" if same else "other bytes than the reference's"
    if operation == "topk":
        logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
        logits[1, ::7] = logits[1, 0]  # ties
        lens = torch.tensor([3000, 2000, 64, 3, 0], dtype=torch.int32)
        got = topk_indices(logits.to(device), lens.to(device), spec.top_k, backend=backend).cpu()
        return "" if torch.equal(got, topk_indices(logits, lens, spec.top_k, backend="reference")) else "other indices"
    if operation == "paged_mqa_logits":
        width = given.page_table.shape[1] * spec.page_size
        both = [
            paged_mqa_logits(
                given.queries.to(on),
                given.cache(spec, on, "reference"),
                given.weights.to(on),
                given.seq_lens.to(on),
                given.page_table.to(on),
                width,
                fill=float("-inf"),
                backend=name,
            ).cpu()
            for on, name in ((device, backend), (cpu, "reference"))
        ]
    else:
        keys, scales, starts, ends = given.run_of_keys()
        tensors = (given.queries.flatten(0, 1), keys, scales, given.weights, starts, ends)
        both = [
            mqa_logits(*(t.to(on) for t in tensors), fill=float("-inf"), backend=name).cpu()
            for on, name in ((device, backend), (cpu, "reference"))
        ]
    return difference(*both)


def difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong with logits beside those to expect; nothing where they are right."""
    seen = want.isfinite()
    if not torch.equal(got.isfinite(), seen):
        return "finite where it should not be, or not where it should"
    a, b = got[seen].double(), want[seen].double()
    difference = float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum().clamp_min(1e-300)) if len(a) else 0.0
    return "" if difference <= MOST_DIFFERENCE else f"difference of {difference:.2e}, over {MOST_DIFFERENCE:.0e}"
