"""Measure a case of the indexer on octavo's backends and on peers: right first, then timed, as measure.py does.

`IndexerInputs` is what all sides share. A peer's `prepare(case, inputs)` returns a `Side` whose calls[i] works on data
set i, and whose check is `lambda: inputs.errors(out)` for the logits or indices that calls[0] has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..device import Device
from ..indexer import IndexerCache, mqa_logits, paged_mqa_logits, topk_indices
from ..indexer_calls import IndexBytes, LogitsCall, PagedLogitsCall
from ..indexer_choose import choose_operation
from ..reference import mqa_logits as reference
from ..reference.index_append import decode_scale
from ..reference.topk import topk_indices as reference_topk
from .indexer_cases import IndexerCase
from .measure import cell, record_of
from .peers import PEERS
from .records import Record
from .roofline import Ceilings
from .sides import Side
from .timing import sets_needed

_MAX_SETS = 16
_BLOCK = 1 << 13  # pages after which contents repeat
_SAMPLED = 4  # sequences, or rows, that are compared with fp64
WRONG = 0.01  # a relative error that no rounding explains
OPERATION = {"append": "index_append", "topk": "topk"}


class IndexerInputs:
    """Tensors of `sets` data sets that together exceed the L2 cache, the same for every side.

    Attributes:
        case, device: of what, where. sets: how many; one where it is compact, for compiling alone.
        paged: cache (IndexerCache over all sets), seq_lens int32 [B], tables (int32 [B, pages], one a set), queries
            (e4m3 [B, n, H, D]) and weights (fp32 [B n, H]), one a set, max_context.
        mqa_logits: queries (e4m3 [S, H, D]), weights [S, H], keys (e4m3 [T, D]), key_scales (fp32 [T]), one a set;
            starts and ends int32 [S].
        topk: logits ([R, N], one a set), lens int32 [R].
        append: cache, keys (bf16 [T, D], one a set) and slots (int64 [T], one a set).
    """

    def __init__(self, case: IndexerCase, device: torch.device | str, *, compact: bool = False) -> None:
        self.case, self.device = case, torch.empty(0, device=device).device
        self.sets = 1 if compact else self._sets()
        torch.manual_seed(0)
        {
            "paged_mqa_logits": self._paged,
            "mqa_logits": self._ragged,
            "topk": self._topk,
            "append": self._append,
        }[case.op]()

    def out(self) -> torch.Tensor:
        """Room for the logits or indices of one data set."""
        case, spec = self.case, self.case.spec
        if case.op == "topk":
            return torch.empty((len(case.lens), spec.top_k), dtype=torch.int32, device=self.device)
        rows = len(case.lens) * (spec.max_query_len if case.op == "paged_mqa_logits" else 1)
        width = max(case.lens)
        return torch.empty((rows, width), dtype=getattr(torch, spec.out_dtype), device=self.device)

    def errors(self, out: torch.Tensor) -> tuple[float, None]:
        """Relative error (Frobenius) to fp64 of sampled rows of `out` for data set 0.

        Of top-k, the share of wrong rows; of append, the error to what the reference writes (`out` is not looked at).
        """
        case = self.case
        if case.op == "append":
            return self._append_errors(), None
        rows = torch.randperm(len(case.lens), generator=torch.Generator().manual_seed(1))[:_SAMPLED].sort().values
        there = rows.to(self.device)
        if case.op == "topk":
            want = torch.empty((len(rows), case.spec.top_k), dtype=torch.int32, device=self.device)
            reference_topk(self.logits[0][there], self.lens[there], want)
            return float((out[there] != want).any(1).double().mean()), None
        want = torch.full(
            (len(rows) * case.spec.max_query_len, out.shape[1]), float("nan"), device=self.device
        ).double()
        if case.op == "mqa_logits":
            got = out[there]
            part = (self.queries[0][there], self.keys[0], self.key_scales[0], self.weights[0][there])
            call = LogitsCall(*part, self.starts[there], self.ends[there], want, None, False)
            reference.mqa_logits(call, torch.float64)
        else:
            batch, n = len(case.lens), case.spec.max_query_len
            got = out.view(batch, n, -1)[there].flatten(0, 1)
            call = PagedLogitsCall(
                self.queries[0][there],
                IndexBytes(self.cache.pages, self.cache.scale_format),
                self.weights[0].view(batch, n, -1)[there].flatten(0, 1),
                self.seq_lens[there],
                self.tables[0][there],
                max(case.lens),
                want,
                None,
            )
            reference.paged_mqa_logits(call, torch.float64)
        seen = ~want.isnan()
        difference = got.double()[seen] - want[seen]
        return float(difference.norm() / want[seen].norm()), None

    def _append_errors(self) -> float:
        """Of the keys that data set 0 has written, to those that the reference writes."""
        own, k = self.cache, self.keys[0]
        want = IndexerCache.allocate(
            -(-len(k) // own.page_size), own.head_dim, own.page_size, own.scale_format, own.device
        )
        want.append(k, torch.arange(len(k), device=self.device), backend="reference")
        page = torch.arange(want.num_pages, dtype=torch.int32, device=self.device)
        exact = want.gather(page, len(k))
        memory = IndexBytes(own.pages, own.scale_format)
        at, offset = self.slots[0] // own.page_size, self.slots[0] % own.page_size
        scale = decode_scale(memory.scales()[at, offset], own.scale_format)
        got = memory.keys()[at, offset].view(torch.float8_e4m3fn).float() * scale[:, None]
        return float((got - exact).norm() / exact.norm())

    def _sets(self) -> int:
        if self.device.type != "cuda":
            return 2
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        memory = self.case.work.bytes + 4 * self.case.pairs
        fitting = max(1, int(0.6 * torch.cuda.mem_get_info(self.device)[0]) // max(1, memory))
        return min(_MAX_SETS, fitting, sets_needed(self.case.work.bytes, l2))

    def _pool(self, num_pages: int) -> None:
        """A cache of random keys: a block of pages, over and over."""
        spec = self.case.spec
        block = min(num_pages, _BLOCK)
        source = IndexerCache.allocate(block, spec.head_dim, spec.page_size, spec.scale_format, self.device)
        for first in range(0, block, 1024):
            tokens = min(1024, block - first) * spec.page_size
            slots = first * spec.page_size + torch.arange(tokens, device=self.device)
            source.append(torch.randn(tokens, spec.head_dim, device=self.device), slots)
        pages = torch.empty((num_pages, *source.pages.shape[1:]), dtype=torch.uint8, device=self.device)
        for first in range(0, num_pages, block):
            part = pages[first : first + block]
            part.copy_(source.pages[: len(part)])
        self.cache = IndexerCache.view(pages, spec.scale_format)

    def _paged(self) -> None:
        case, spec, size = self.case, self.case.spec, self.case.spec.page_size
        counts = torch.tensor([-(-n // size) for n in case.lens])
        per_set, width = int(counts.sum()), int(counts.max())
        self._pool(per_set * self.sets)
        order = torch.randperm(per_set * self.sets, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        starts = counts.cumsum(0) - counts
        index = starts[:, None] + torch.minimum(torch.arange(width), counts[:, None] - 1)
        self.tables = [order[index + i * per_set].to(self.device) for i in range(self.sets)]
        batch, n = len(case.lens), spec.max_query_len
        self.queries = [self._e4m3(batch, n, spec.num_heads, spec.head_dim) for _ in range(self.sets)]
        self.weights = [torch.randn(batch * n, spec.num_heads, device=self.device) for _ in range(self.sets)]
        self.seq_lens = torch.tensor(case.lens, dtype=torch.int32, device=self.device)
        self.max_context = max(case.lens)

    def _ragged(self) -> None:
        case, spec, rows = self.case, self.case.spec, len(self.case.lens)
        self.queries = [self._e4m3(rows, spec.num_heads, spec.head_dim) for _ in range(self.sets)]
        self.weights = [torch.randn(rows, spec.num_heads, device=self.device) for _ in range(self.sets)]
        self.keys = [self._e4m3(case.keys, spec.head_dim) for _ in range(self.sets)]
        self.key_scales = [torch.rand(case.keys, device=self.device) + 0.5 for _ in range(self.sets)]
        self.starts = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.ends = torch.tensor(case.lens, dtype=torch.int32, device=self.device)

    def _topk(self) -> None:
        case = self.case
        dtype = getattr(torch, case.spec.out_dtype)
        shape = (len(case.lens), case.keys)
        self.logits = [torch.randn(shape, device=self.device).to(dtype) for _ in range(self.sets)]
        self.lens = torch.tensor(case.lens, dtype=torch.int32, device=self.device)

    def _append(self) -> None:
        case, spec = self.case, self.case.spec
        self._pool(-(-case.keys * self.sets // spec.page_size))
        order = torch.randperm(case.keys * self.sets, device=self.device)
        self.slots = [part.contiguous() for part in order.split(case.keys)]
        self.keys = [torch.randn(case.keys, spec.head_dim, device=self.device).bfloat16() for _ in range(self.sets)]

    def _e4m3(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(torch.float8_e4m3fn)


def indexer_side(case: IndexerCase, backend: str, inputs: IndexerInputs) -> Side:
    """octavo's own kernels of `backend` ("auto": what is chosen); Unsupported where it cannot."""
    name = None if backend == "auto" else backend
    choose_operation(case.spec, Device.of(inputs.device), OPERATION.get(case.op, case.op), name)
    if case.op == "append":
        calls = [_call(inputs.cache.append, k, s, backend=name) for k, s in zip(inputs.keys, inputs.slots, strict=True)]
        return Side(calls, None, lambda: inputs.errors(torch.empty(0)))
    outs = [inputs.out() for _ in range(inputs.sets)]
    calls = []
    for i, out in enumerate(outs):
        function: Callable[..., Any]
        if case.op == "topk":
            function, arguments = topk_indices, (inputs.logits[i], inputs.lens, case.spec.top_k)
        elif case.op == "mqa_logits":
            keys = (inputs.keys[i], inputs.key_scales[i])
            function, arguments = mqa_logits, (inputs.queries[i], *keys, inputs.weights[i], inputs.starts, inputs.ends)
        else:
            batch = (inputs.cache, inputs.weights[i], inputs.seq_lens, inputs.tables[i], inputs.max_context)
            function, arguments = paged_mqa_logits, (inputs.queries[i], *batch)
        calls.append(_call(function, *arguments, out=out, backend=name))
    return Side(calls, outs[0], lambda: inputs.errors(outs[0]))


def _side(case: IndexerCase, name: str, inputs: IndexerInputs) -> Side:
    if name in PEERS:
        return PEERS[name].prepare(case, inputs)  # pyright: ignore[reportArgumentType]
    return indexer_side(case, name, inputs)


def _call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Callable[[], object]:
    return lambda: function(*arguments, **keywords)


def measure(
    case: IndexerCase,
    backend: str,
    device: torch.device | str,
    *,
    run: str,
    ceilings: Ceilings | None = None,
    env: dict[str, str] | None = None,
    seconds: float = 0.2,
    inputs: IndexerInputs | None = None,
) -> Record:
    """A record of `case` on `backend` (octavo's or a peer's name, or "auto"): error and time, or why there is none."""
    device = torch.empty(0, device=device).device
    name = backend_name(case, backend, device)
    return record_of(
        cell(case, name, run, ceilings, env),
        lambda: _side(case, backend, inputs or IndexerInputs(case, device)),
        device,
        seconds,
        WRONG,
    )


def backend_name(case: IndexerCase, backend: str, device: torch.device) -> str:
    """What a record of `backend` is called: itself, or for "auto" what octavo chooses for the case."""
    if backend != "auto":
        return backend
    return choose_operation(case.spec, Device.of(device), OPERATION.get(case.op, case.op)).backend


def compare(
    case: IndexerCase, backends: Sequence[str], device: torch.device | str, **arguments: Any
) -> Iterator[Record]:
    """A record of `case` for each of `backends` over the same inputs, one after the other."""
    try:
        inputs = IndexerInputs(case, device)
    except RuntimeError:  # too large for the memory: `measure` meets the same and makes a record of it
        inputs = None
    for backend in backends:
        yield measure(case, backend, device, inputs=inputs, **arguments)
