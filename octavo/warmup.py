"""Compile what a plan needs before the first request: run every shape of call that serving makes, on little data.

Kernels are compiled for classes of shapes, so the calls differ in batch size, in rows, in whether the host knows which
sequences decode; and for whether a cache has scales, so both are made. What is compiled stays in Triton's cache on
disk: a process that starts later with the same plan compiles nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .attention import Attention
from .cache import PagedCache
from .choose import Choice
from .errors import InvalidInput
from .formats import TORCH_DTYPES
from .indexer import IndexerCache, mqa_logits, paged_mqa_logits, topk_indices
from .spec import AttentionSpec, IndexerSpec, positive

Call = Callable[[], object]


@dataclass
class Warmed:
    """What a warm-up did: kernels compiled and kernels found in Triton's cache, by name, calls made, seconds."""

    compiled: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0


@contextmanager
def watched() -> Iterator[Warmed]:
    """Counts what Triton compiles and what it takes from its cache within the block; nothing where there is no Triton.

    A kernel that this process has loaded already is neither.
    """
    found = Warmed()
    started = time.perf_counter()
    try:
        from triton import knobs
    except ImportError:
        yield found
        found.seconds = time.perf_counter() - started
        return
    before = knobs.compilation.listener

    def listen(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        (found.cached if cache_hit else found.compiled).append(str(metadata.get("name", src)))
        if before is not None:
            before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before
        found.seconds = time.perf_counter() - started


def sizes(most: int) -> list[int]:
    """Sizes whose calls differ: 1, 3 (a multiple of nothing), every power of two up to `most`, `most` and one less."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return sorted({*powers, min(3, most), most, max(1, most - 1)})


def warm(
    choice: Choice,
    device: torch.device | str,
    *,
    max_batch: int = 256,
    max_query_tokens: int = 8192,
    max_context: int = 131072,
    advance: Callable[[], None] = lambda: None,
) -> Warmed:
    """Run what serving runs with `choice` (append, decode, prefill, mixed batches) up to these bounds.

    `advance` is told of every call. Raises whatever a kernel that does not compile or launch raises.
    """
    made = calls(choice, torch.device(device), max_batch, max_query_tokens, max_context)
    return run_all(made, torch.device(device), advance)


def check_bounds(rows: int, max_batch: int, max_query_tokens: int, max_context: int) -> None:
    """Raise InvalidInput for bounds that are not positive or do not hold `rows` query rows of one sequence."""
    for name, value in (("max_batch", max_batch), ("max_query_tokens", max_query_tokens), ("max_context", max_context)):
        positive(name, value)
    if max_query_tokens < rows:
        needed = f"max_query_tokens must hold one sequence's {rows} rows of a decode step"
        raise InvalidInput(needed, max_query_tokens)


def run_all(made: list[Call], device: torch.device, advance: Callable[[], None] = lambda: None) -> Warmed:
    """Make the calls, one after the other, and tell what was compiled for them."""
    with watched() as found:
        for call in made:
            call()
            found.calls += 1
            advance()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return found


def indexer_calls(
    spec: IndexerSpec,
    device: torch.device,
    max_batch: int,
    max_query_tokens: int,
    max_context: int,
    backend: str | None = None,
) -> list[Call]:
    """What serving runs of an indexer: append, paged logits and top-k of a step, logits of a run of keys."""
    check_bounds(spec.max_query_len, max_batch, max_query_tokens, max_context)
    cache = IndexerCache.allocate(1, spec.head_dim, spec.page_size, spec.scale_format, device)
    heads, dim, n = spec.num_heads, spec.head_dim, spec.max_query_len
    width = -(-max_context // spec.page_size)
    keys = min(max_context, 4096)
    out_dtype = TORCH_DTYPES[spec.out_dtype]

    def query(*rows: int) -> torch.Tensor:
        return torch.zeros(*rows, heads, dim, device=device).to(torch.float8_e4m3fn)

    def append(tokens: int) -> None:
        slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        cache.append(torch.zeros(tokens, dim, dtype=torch.bfloat16, device=device), slots, backend=backend)

    def decode(batch: int) -> None:
        lens = torch.ones(batch, dtype=torch.int32, device=device)
        table = torch.zeros(batch, width, dtype=torch.int32, device=device)
        out = torch.empty(batch * n, max_context, dtype=out_dtype, device=device)
        weights = torch.zeros(batch * n, heads, device=device)
        for fill in (None, float("-inf")):
            paged_mqa_logits(
                query(batch, n), cache, weights, lens, table, max_context, out=out, fill=fill, backend=backend
            )
        topk_indices(out, lens.repeat_interleave(n), spec.top_k, backend=backend)

    def prefill(rows: int) -> None:
        starts = torch.zeros(rows, dtype=torch.int32, device=device)
        k, scale = query(keys)[:, 0].contiguous(), torch.ones(keys, device=device)
        weights = torch.zeros(rows, heads, device=device)
        logits = mqa_logits(query(rows), k, scale, weights, starts, starts + 1, backend=backend)
        topk_indices(logits, starts + 1, spec.top_k, backend=backend)

    made: list[Call] = [partial(append, tokens) for tokens in sizes(max_query_tokens)]
    made += [partial(decode, batch) for batch in sizes(max_batch) if batch * n <= max_query_tokens]
    return made + [partial(prefill, rows) for rows in sizes(max_query_tokens)]


def calls(choice: Choice, device: torch.device, max_batch: int, max_query_tokens: int, max_context: int) -> list[Call]:
    """The calls of `warm`: over one page that every sequence shares, with as many rows as a step has."""
    check_bounds(choice.spec.max_query_len, max_batch, max_query_tokens, max_context)
    spec = choice.spec
    rows = spec.max_query_len
    batches = [b for b in sizes(max_batch) if b * rows <= max_query_tokens]
    attention = Attention(
        spec,
        max_batch=max_batch + 1,
        max_query_tokens=max_query_tokens + rows,
        max_context=max_context,
        device=device,
        backend=choice.prefill.backend if choice.prefill.backend == choice.decode.backend else None,
    )
    width = -(-max_context // spec.page_size)
    steps: list[tuple[list[int], int | None]] = []
    for batch in batches:
        steps += [([n] * batch, batch) for n in dict.fromkeys((rows, 1))] + [([rows] * batch, None)]
    for tokens in sizes(max_query_tokens):
        steps += [([tokens], 0), ([tokens - tokens // 2, tokens // 2], 0)]
        if tokens > rows:
            steps += [([rows, tokens], 1), ([rows, tokens], None)]
    made: list[Call] = []
    for cache in _caches(spec, device):
        made += [_append(cache, tokens, device) for tokens in sizes(max_query_tokens)]
        made += [_step(attention, cache, *step, width) for step in steps]
    return made


def _caches(spec: AttentionSpec, device: torch.device) -> list[PagedCache]:
    """Caches of one page: without scales, and with them, which an engine may have even where all are 1."""
    caches = [PagedCache.allocate(spec, 1, device)]
    if spec.fp8 and caches[0].k_scale is None:
        caches.append(PagedCache.allocate(spec, 1, device, k_scale=1.0, v_scale=1.0))
    return caches


def _append(cache: PagedCache, tokens: int, device: torch.device) -> Call:
    spec = cache.spec
    dtype = TORCH_DTYPES[spec.query_dtype] if spec.query_dtype != "fp8_e4m3" else torch.bfloat16

    def call() -> None:
        k = torch.zeros(tokens, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)
        v = None if spec.mla else torch.zeros(tokens, spec.num_kv_heads, spec.value_dim, dtype=dtype, device=device)
        cache.append(k, v, torch.full((tokens,), -1, dtype=torch.int64, device=device))

    return call


def _step(attention: Attention, cache: PagedCache, rows: list[int], num_decodes: int | None, width: int) -> Call:
    """Plan and run of sequences with `rows` new rows each, of which their one page holds what fits."""
    spec, device = attention.spec, attention.device

    def call() -> None:
        starts = torch.tensor([0, *rows], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        lens = torch.tensor([min(n, spec.page_size) for n in rows], dtype=torch.int32, device=device)
        table = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
        longest = max(rows) if num_decodes is not None else None
        attention.plan(lens, table, starts, num_decodes=num_decodes, max_query_len=longest)
        q = torch.zeros(sum(rows), spec.num_q_heads, spec.head_dim, device=device).to(TORCH_DTYPES[spec.query_dtype])
        attention.run(q, cache, **_arguments(spec, sum(rows), device))

    return call


def _arguments(spec: AttentionSpec, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What run takes beside the query, as the spec wants."""
    found = {}
    if spec.query_dtype == "fp8_e4m3":
        found["q_scale"] = torch.ones((), device=device)
    if spec.out_dtype == "fp8_e4m3":
        found["out_scale"] = torch.ones((), device=device)
    if spec.sinks:
        found["sinks"] = torch.zeros(spec.num_q_heads, device=device)
    if spec.lse:
        found["lse"] = torch.empty(rows, spec.num_q_heads, device=device)
    return found
