"""Sides of a comparison: one implementation of a case each, over the same inputs, ready to be checked and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..attention import Attention
from ..cache import PagedCache
from ..errors import InvalidInput
from ..formats import FORMATS, TORCH_DTYPES, cast
from ..spec import AttentionSpec
from ..testing.compare import errors, exact, plain_bf16
from ..testing.inputs import Batch
from .cases import Case
from .timing import sets_needed

_MAX_SETS = 16
_SAMPLED_ROWS = 16
_SAMPLED_BYTES = 4 << 30  # of keys and values that the sampled rows see, a copy of which is held for fp64
_LARGEST_PAGE = 128  # of any side; a side's page size divides it, or is the case's own
_PERIODS = 1021  # largest pages after which contents repeat: a prime, so that sequences do not
_COMPACT_PERIODS = 16  # the same where nothing is timed: more than one page, and a multiple of 16 of them
_LOUD = 100.0  # amplitude of appended values: one token among 131,072 that is missing is seen in the result


@dataclass(frozen=True)
class Side:
    """One implementation of a case.

    Attributes:
        calls: the work over one data set each; a graph captures them, so they neither synchronise nor allocate what
            they keep.
        out: what calls[0] writes; it is poisoned before the check. None: nothing is poisoned.
        check: errors of what calls[0] has written to fp64 on sampled rows, and plain bf16's: (rel, rel_bf16); None
            where nothing is checked.
        as_run: fields of the record's spec that differ from the case's: layout, page_size, kv_dtype, ...
    """

    calls: list[Callable[[], object]]
    out: torch.Tensor | None = None
    check: Callable[[], tuple[float, float | None]] | None = None
    as_run: dict[str, Any] = field(default_factory=dict)


class AttentionInputs:
    """What all sides of an attention or append case compute over, whatever their layout and page size.

    Token t of sequence b in data set s holds elements (s B + b) stride + t of an endless stream that repeats after
    `period` tokens: gigabytes of distinct memory are filled at the speed of a copy, and every side, and fp64, knows the
    contents of every token. Values are stored elements; scales are 1.

    Attributes:
        case, device: of what, where. sets: data sets, together larger than the L2 cache.
        compact: for compiling alone: one set, whose sequences share a few pages.
        seq_lens, query_starts: int32 [B], [B + 1] on the device.
        queries: [rows, Hq, D] of spec.query_dtype, one a set.
        new: (k [rows, Hk, D], v [rows, Hk, Dv]) in bf16, one a set: what an appending case, or a case of append, writes
            to the last query_lens tokens of each sequence; V is loud.
        k, v: the stream as stored: [period, Hk, D], [period, Hk, Dv].
        sinks: fp32 [Hq] where the spec has them.
    """

    def __init__(self, case: Case, device: torch.device | str, *, compact: bool = False) -> None:
        self.case, self.device, self.compact = case, torch.empty(0, device=device).device, compact
        self._kept: tuple[Hashable, Any] | None = None
        spec, batch = case.spec, len(case.seq_lens)
        unit = math.lcm(spec.page_size, _LARGEST_PAGE)
        self.stride = -(-max(case.seq_lens) // unit) * unit
        self.sets = 1 if compact else self._sets()
        self.period = unit * _COMPACT_PERIODS if compact else min(unit * _PERIODS, self.stride * batch * self.sets)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=self.device)
        self.query_starts = torch.tensor([0, *case.query_lens], dtype=torch.int32, device=self.device).cumsum(
            0, dtype=torch.int32
        )
        rows, heads = sum(case.query_lens), spec.num_kv_heads
        self.k = self._stored(self.period, heads, spec.head_dim)
        self.v = self.k[..., : spec.value_dim] if spec.mla else self._stored(self.period, heads, spec.value_dim)
        self.sinks = torch.randn(spec.num_q_heads, device=self.device) if spec.sinks else None
        self.queries = [self._query(rows) for _ in range(self.sets if case.op != "append" else 0)]
        self.new = [self._new(rows) for _ in range(self.sets if case.appends or case.op == "append" else 0)]

    def paged(self, page_size: int, *streams: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Pools of shuffled pages for all sets, and a page table int32 [B, most pages] for each set.

        streams: the period's tokens as pages in the side's own layout, [period / page_size, ...], one for each pool.
        """
        case, batch = self.case, len(self.case.seq_lens)
        self._kept = None  # two layouts' pools may not fit
        if self.stride % page_size or self.period % page_size:
            raise InvalidInput(f"page_size must divide {_LARGEST_PAGE} or be the case's", page_size)
        counts = torch.tensor([-(-n // page_size) for n in case.seq_lens]).repeat(self.sets)
        starts, width = counts.cumsum(0) - counts, int(counts.max())
        column = torch.arange(width)
        held = column[None] < counts[:, None]
        stream_page = torch.arange(batch * self.sets)[:, None] * (self.stride // page_size) + column
        if self.compact:
            return list(streams), [(stream_page % (self.period // page_size)).to(self.device, torch.int32)]
        stream_page = stream_page[held]
        order = torch.randperm(len(stream_page), generator=torch.Generator().manual_seed(0))
        source = torch.empty_like(order)
        source[order] = stream_page % (self.period // page_size)
        source = source.to(self.device)
        index = starts[:, None] + torch.minimum(column, counts[:, None] - 1)
        tables = order[index].to(self.device, torch.int32).split(batch)
        return [_rows(stream, source) for stream in streams], [table.contiguous() for table in tables]

    def cache(self, spec: AttentionSpec) -> tuple[PagedCache, list[torch.Tensor]]:
        """octavo's cache of all sets in the layout and page size of `spec`, and a page table for each set.

        The last one made is kept, for the next of octavo's backends; not where calls write to it, which would hide from
        the check a side that does not.
        """
        if self.case.appends or self.case.op == "append":
            return self._cache(spec)
        if self._kept is None or self._kept[0] != spec:
            self._kept = None
            self._kept = (spec, self._cache(spec))
        return self._kept[1]

    def _cache(self, spec: AttentionSpec) -> tuple[PagedCache, list[torch.Tensor]]:
        size = spec.page_size
        stream = PagedCache.view(
            replace(spec, layout="nhd"),
            self.k.unflatten(0, (-1, size)),
            None if spec.mla else self.v.unflatten(0, (-1, size)),
        ).convert(spec.layout)
        pools = [pool for pool in (stream.memory.k_pool, stream.memory.v_pool) if pool is not None]
        pages, tables = self.paged(size, *(pool.view(stream.num_pages, -1) for pool in pools))
        num_pages = pages[0].shape[0]
        if spec.layout == "leaf":
            split = spec.page_size * spec.head_dim
            both = pages[0].view(num_pages, spec.num_kv_heads, -1)
            k, v = both[..., :split].unflatten(-1, stream.k.shape[2:]), both[..., split:]
            return PagedCache.view(spec, k, v.unflatten(-1, stream.v.shape[2:])), tables
        k = pages[0].view(num_pages, *stream.k.shape[1:])
        return PagedCache.view(spec, k, None if spec.mla else pages[1].view(num_pages, *stream.v.shape[1:])), tables

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored k [B, stride, Hk, D] and v [B, stride, Hk, Dv] of set `index`, sequence after sequence."""
        batch = len(self.case.seq_lens)
        at = torch.arange(index * batch * self.stride, (index + 1) * batch * self.stride, device=self.device)
        return tuple(x[at % self.period].unflatten(0, (batch, -1)) for x in (self.k, self.v))  # type: ignore[return-value]

    def slots(self, table: torch.Tensor, page_size: int) -> torch.Tensor:
        """Slots int64 [rows] of the last query_lens tokens of each sequence, by a page table."""
        pairs = [
            (b, length - n + i)
            for b, (length, n) in enumerate(zip(self.case.seq_lens, self.case.query_lens, strict=True))
            for i in range(n)
        ]
        sequence, position = torch.tensor(pairs, device=self.device).unbind(1)
        return table[sequence, position // page_size].to(torch.int64) * page_size + position % page_size

    def errors(self, out: torch.Tensor) -> tuple[float, float]:
        """Relative errors to fp64 of `out` [rows, Hq, Dv], attention over set 0, on sampled rows; and plain bf16's."""
        batch, rows, expected = self._sample
        found = errors(batch, out[rows], expected)
        return found.rel, found.rel_bf16

    @cached_property
    def _sample(self) -> tuple[Batch, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Some rows of set 0, each a sequence of its own that ends with it; which; what fp64 and plain bf16 give."""
        case, spec = self.case, replace(self.case.spec, layout="nhd", max_query_len=1)
        size = spec.page_size
        count = min(_SAMPLED_ROWS, max(2, _SAMPLED_BYTES // (self.stride * spec.bytes_per_token)))
        ends = torch.tensor(case.query_lens).cumsum(0)
        rows = torch.randperm(int(ends[-1]), generator=torch.Generator().manual_seed(0))[:count].sort().values
        sequences = torch.searchsorted(ends, rows, right=True)
        lens = torch.tensor(case.seq_lens)[sequences] - (ends[sequences] - 1 - rows)
        at = sequences[:, None] * self.stride + torch.arange(self.stride)
        stored = [x[(at % self.period).to(self.device)] for x in ((self.k,) if spec.mla else (self.k, self.v))]
        if case.appends:
            for x, new in zip(stored, self.new[0], strict=False):
                for i, b in enumerate(sequences.tolist()):
                    n, length = case.query_lens[b], case.seq_lens[b]
                    end = int(ends[b])
                    x[i, length - n : length] = cast(new[end - n : end].float(), FORMATS[spec.kv_dtype])
        pages = [x.view(-1, size, *x.shape[2:]) for x in stored]
        cache = PagedCache.view(spec, pages[0], None if spec.mla else pages[1])
        table = torch.arange(cache.num_pages, dtype=torch.int32, device=self.device).view(len(rows), -1)
        rows = rows.to(self.device)
        batch = Batch(
            spec=spec,
            q=self.queries[0][rows],
            cache=cache,
            seq_lens=lens.to(self.device, torch.int32),
            page_table=table,
            query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=self.device),
            k=torch.empty(0),
            v=torch.empty(0),
            arguments={} if self.sinks is None else {"sinks": self.sinks},
        )
        return batch, rows, (exact(batch)[0], plain_bf16(batch))

    def _sets(self) -> int:
        if self.device.type != "cuda":
            return 2
        memory = self.stride * len(self.case.seq_lens) * self.case.spec.bytes_per_token
        fitting = max(1, int(0.7 * torch.cuda.mem_get_info(self.device)[0]) // memory)
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(_MAX_SETS, fitting, sets_needed(self.case.work.bytes, l2))

    def _stored(self, *shape: int) -> torch.Tensor:
        format = FORMATS[self.case.spec.kv_dtype]
        return cast(torch.randn(shape, device=self.device), format).view(format.storage)

    def _query(self, rows: int) -> torch.Tensor:
        spec = self.case.spec
        format = FORMATS[spec.query_dtype]
        return cast(torch.randn(rows, spec.num_q_heads, spec.head_dim, device=self.device), format).view(format.dtype)

    def _new(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.case.spec
        k, v = (
            torch.randn(rows, spec.num_kv_heads, dim, device=self.device).bfloat16()
            for dim in (spec.head_dim, spec.value_dim)
        )
        return k, v * _LOUD


def _rows(stream: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """stream[index] along dimension 0, in words of 8 bytes where rows have whole ones."""
    flat = stream.reshape(stream.shape[0], -1).view(torch.uint8)
    words = flat if flat.shape[1] % 8 else flat.view(torch.int64)
    return words.index_select(0, index).view(stream.dtype).view(len(index), *stream.shape[1:])


def octavo_side(case: Case, backend: str, inputs: AttentionInputs) -> Side:
    """octavo's own kernels of `backend` ("auto": what is chosen); Unsupported or InvalidInput where it cannot."""
    cache, tables = inputs.cache(case.spec)
    if case.op == "append":
        if backend not in ("auto", cache.append_backend):
            raise InvalidInput(f"append on {inputs.device} runs on {cache.append_backend}", backend)
        return Side(_appends(case, inputs, cache, tables))
    spec, rows = case.spec, sum(case.query_lens)
    decodes = len(case.seq_lens) if case.op in ("decode", "verify") else 0
    workspace: torch.Tensor | None = None
    runs: list[Callable[[], object]] = []
    outs = []
    for q, table in zip(inputs.queries, tables, strict=True):  # a plan holds its page table: an Attention a set
        attn = Attention(
            spec,
            max_batch=len(case.seq_lens),
            max_query_tokens=rows,
            max_context=max(case.seq_lens),
            device=inputs.device,
            workspace=workspace,
            backend=None if backend == "auto" else backend,
        )
        workspace = attn.workspace
        attn.plan(inputs.seq_lens, table, inputs.query_starts, num_decodes=decodes, max_query_len=max(case.query_lens))
        out = torch.empty(
            rows, spec.num_q_heads, spec.value_dim, dtype=TORCH_DTYPES[spec.out_dtype], device=inputs.device
        )
        outs.append(out)
        runs.append(lambda attn=attn, q=q, out=out: attn.run(q, cache, sinks=inputs.sinks, out=out))
    calls = in_turn(_appends(case, inputs, cache, tables), runs) if case.appends else runs
    return Side(calls, outs[0], lambda: inputs.errors(outs[0]))


def in_turn(first: list[Callable[[], object]], then: list[Callable[[], object]]) -> list[Callable[[], object]]:
    """Calls that do one of `first` and the one of `then` over the same data set."""

    def both(a: Callable[[], object], b: Callable[[], object]) -> None:
        a()
        b()

    return [lambda a=a, b=b: both(a, b) for a, b in zip(first, then, strict=True)]


def _appends(
    case: Case, inputs: AttentionInputs, cache: PagedCache, tables: list[torch.Tensor]
) -> list[Callable[[], object]]:
    def one(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Callable[[], object]:
        return lambda: cache.append(k, None if case.spec.mla else v, slots)

    return [
        one(k, v, inputs.slots(table, case.spec.page_size)) for (k, v), table in zip(inputs.new, tables, strict=True)
    ]
