"""Batches to test attention with: ragged lengths, shuffled pages, tables with garbage beyond a sequence's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..attention import Attention
from ..cache import PagedCache
from ..calls import AttentionCall
from ..formats import FORMATS, TORCH_DTYPES, cast
from ..spec import AttentionSpec


@dataclass
class Batch:
    """One step's tensors and a filled cache.

    Attributes:
        spec, q, cache, seq_lens, page_table, query_starts: as `octavo.attention` takes them.
        k, v: what was appended, in order of the sequences: [sum of lengths, Hk, D] and [.., Hk, Dv].
        arguments: sinks, q_scale, out_scale, as spec wants.
    """

    spec: AttentionSpec
    q: torch.Tensor
    cache: PagedCache
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    arguments: dict[str, torch.Tensor]

    def run(self, backend: str | None = None, attention: Attention | None = None, **plan: int | None) -> torch.Tensor:
        """Plan and run; a poisoned output first, so that a row that is not written shows. lse is kept as `self.lse`."""
        spec, rows = self.spec, self.q.shape[0]
        attention = attention or self.attention(backend)
        attention.plan(self.seq_lens, self.page_table, self.query_starts, **plan)
        out = torch.empty(
            rows, spec.num_q_heads, spec.value_dim, dtype=TORCH_DTYPES[spec.out_dtype], device=self.q.device
        )
        out.view(torch.uint8).fill_(0xFF)
        self.lse = torch.full((rows, spec.num_q_heads), float("nan"), device=self.q.device) if spec.lse else None
        return attention.run(self.q, self.cache, out=out, lse=self.lse, **self.arguments)

    def call(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        workspace: torch.Tensor,
        num_decodes: int | None = None,
        max_query_len: int | None = None,
    ) -> AttentionCall:
        """What `octavo.ops` hands a backend for this batch."""
        given = self.arguments
        return AttentionCall(
            self.spec,
            self.q,
            self.cache.bytes(),
            self.seq_lens,
            self.page_table,
            self.query_starts,
            given.get("q_scale"),
            given.get("out_scale"),
            given.get("sinks"),
            workspace,
            out,
            lse,
            num_decodes,
            max_query_len,
        )

    def attention(self, backend: str | None = None) -> Attention:
        """An Attention that fits this batch, its workspace filled with 0xFF."""
        made = Attention(
            self.spec,
            max_batch=max(1, self.seq_lens.shape[0]),
            max_query_tokens=max(1, self.q.shape[0]),
            max_context=self.page_table.shape[1] * self.spec.page_size,
            device=self.q.device,
            backend=backend,
        )
        made.workspace.fill_(0xFF)
        return made

    def with_spec(self, **changes: object) -> Batch:
        """The same tensors under a spec with `changes` that do not concern the cache."""
        return replace(self, spec=replace(self.spec, **changes))  # type: ignore[arg-type]


def slots_of(page_table: torch.Tensor, page_size: int, seq_lens: Sequence[int]) -> torch.Tensor:
    """Slots of every token of every sequence, in order: int64 [sum of seq_lens]."""
    slots = [
        page_table[b, torch.arange(n, device=page_table.device) // page_size].to(torch.int64) * page_size
        + torch.arange(n, device=page_table.device) % page_size
        for b, n in enumerate(seq_lens)
    ]
    return torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)


def page_table_for(
    seq_lens: Sequence[int], page_size: int, generator: torch.Generator, spare_pages: int = 3
) -> tuple[torch.Tensor, int]:
    """A table int32 [B, max pages] of shuffled pages, garbage beyond each sequence's; and the pool's size in pages."""
    counts = [-(-n // page_size) for n in seq_lens]
    num_pages = max(1, sum(counts) + spare_pages)
    order = torch.randperm(num_pages, generator=generator, dtype=torch.int32, device="cpu")
    width = max(1, max(counts, default=1) + 1)
    garbage = torch.tensor([-1, 2**31 - 1, num_pages, -(2**31)], dtype=torch.int32, device="cpu")
    table = garbage[torch.randint(0, 4, (len(seq_lens), width), generator=generator, device="cpu")]
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[start : start + count]
        start += count
    return table, num_pages


def make_batch(
    spec: AttentionSpec,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    device: str | torch.device | None = None,
    seed: int = 0,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    amplitude: float = 1.0,
) -> Batch:
    """Normal queries, keys and values times `amplitude`, appended to a fresh cache through shuffled pages.

    Deterministic in `seed`, and the same on every device; device None is torch's default device.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    table, num_pages = page_table_for(seq_lens, spec.page_size, generator)
    tokens, rows = sum(seq_lens), sum(query_lens)
    source = torch.float32 if "float32" in (spec.kv_dtype, spec.query_dtype) else torch.bfloat16

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cpu") * amplitude).to(source)

    k, v = normal(tokens, spec.num_kv_heads, spec.head_dim), normal(tokens, spec.num_kv_heads, spec.value_dim)
    q = normal(rows, spec.num_q_heads, spec.head_dim)
    arguments: dict[str, torch.Tensor] = {}
    if spec.query_dtype == "fp8_e4m3":
        arguments["q_scale"] = torch.tensor(0.25, device=device)
        q = cast(q.float() / 0.25, FORMATS["fp8_e4m3"]).view(torch.float8_e4m3fn)
    else:
        q = q.to(TORCH_DTYPES[spec.query_dtype])
    if spec.out_dtype == "fp8_e4m3":
        arguments["out_scale"] = torch.tensor(1 / 64, device=device)
    if spec.sinks:
        arguments["sinks"] = torch.randn(spec.num_q_heads, generator=generator, device="cpu").to(device)
    cache = PagedCache.allocate(spec, num_pages, device, k_scale, v_scale)
    table = table.to(device)
    k, v = k.to(device), v.to(device)
    cache.append(k, None if spec.mla else v, slots_of(table, spec.page_size, seq_lens))
    starts = torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(list(seq_lens), dtype=torch.int32, device=device)
    return Batch(spec, q.to(device), cache, lens, table, starts, k, v, arguments)
