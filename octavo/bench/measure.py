"""Measure one case on one backend: right first, on sampled rows against fp64, then timed; a record either way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from ..attention import Attention
from ..cache import PagedCache
from ..choose import choose
from ..errors import InvalidInput, Unsupported
from ..formats import FORMATS, TORCH_DTYPES, cast
from ..layouts import shapes
from ..ops import cache_backend
from ..testing.compare import errors
from ..testing.inputs import Batch, slots_of
from .cases import Case
from .records import Record
from .roofline import Ceilings
from .timing import sets_needed, time_calls

_SAMPLED_ROWS = 16
_MAX_SETS = 16


def measure(
    case: Case,
    backend: str,
    device: torch.device | str,
    *,
    run: str,
    ceilings: Ceilings | None = None,
    env: dict[str, str] | None = None,
    seconds: float = 0.2,
) -> Record:
    """A record of `case` on `backend`: errors of sampled rows and the time of a call, or why there is none.

    backend: a name, or "auto" for what is chosen, whose name the record then has. A result
    whose sampled rows are not near fp64 is an error, not a time. Refusals are records too.
    """
    device = torch.empty(0, device=device).device
    fields = {
        "case": case.name,
        "op": case.op,
        "backend": _name(case, backend, device),
        "run": run,
        "spec": asdict(case.spec),
        "bytes": case.work.bytes,
        "flops": case.work.flops,
        "ceiling": {k: v for k, v in asdict(ceilings or Ceilings()).items() if v is not None},
        "env": env or {},
    }
    try:
        if case.op == "append":
            calls, rel, rel_bf16 = _append_calls(case, backend, device), None, None
        else:
            calls, rel, rel_bf16 = _attention_calls(case, backend, device)
    except (Unsupported, InvalidInput, torch.cuda.OutOfMemoryError) as error:
        return Record(**fields, error=f"{type(error).__name__}: {error}")
    if rel is not None and not rel < 1:
        return Record(**fields, rel_err=rel, rel_err_bf16=rel_bf16, error=f"wrong: relative error {rel:.3g}")
    timing = time_calls(calls, device, seconds=seconds)
    return Record(
        **fields,
        rel_err=rel,
        rel_err_bf16=rel_bf16,
        timing=timing.method,
        us=round(timing.us, 3),
        us_p20=round(timing.us_p20, 3),
        us_p80=round(timing.us_p80, 3),
    )


def _name(case: Case, backend: str, device: torch.device) -> str:
    if backend != "auto":
        return backend
    if case.op == "append":
        return cache_backend(device, "append")
    choice = choose(case.spec, device)
    return (choice.prefill if case.op == "prefill" else choice.decode).backend


def random_cache(case: Case, sets: int, device: torch.device) -> tuple[PagedCache, list[torch.Tensor]]:
    """A cache of random elements for `sets` disjoint batches of the case, and a shuffled page table for each."""
    spec = case.spec
    counts = torch.tensor([-(-n // spec.page_size) for n in case.seq_lens])
    pages_per_set = int(counts.sum())
    num_pages = pages_per_set * sets
    cache = PagedCache.allocate(spec, num_pages, device)
    for memory in (cache.k,) if spec.mla else (cache.k, cache.v):
        format = FORMATS[spec.kv_dtype]
        block = max(1, (1 << 26) // max(1, memory[0].numel()))
        for start in range(0, num_pages, block):  # in blocks: the fp32 normals of the whole pool may not fit
            part = memory[start : start + block]
            part.copy_(cast(torch.randn(part.shape, device=device), format))
    order = torch.randperm(num_pages, dtype=torch.int32)
    width, starts = int(counts.max()), counts.cumsum(0) - counts
    column = torch.arange(width)
    index = starts[:, None] + torch.minimum(column[None], counts[:, None] - 1)
    return cache, [order[index + i * pages_per_set].contiguous().to(device) for i in range(sets)]


def _sets(case: Case, device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    k_shape, v_shape = shapes(case.spec, sum(-(-n // case.spec.page_size) for n in case.seq_lens))
    memory = torch.Size(k_shape).numel() + torch.Size(v_shape).numel()
    free = torch.cuda.mem_get_info(device)[0]
    fitting = max(1, int(0.7 * free) // max(1, memory * case.spec.kv_itemsize))
    return min(_MAX_SETS, fitting, sets_needed(case.work.bytes, l2))


def _attention_calls(case: Case, backend: str, device: torch.device) -> tuple[list[Callable[[], object]], float, float]:
    spec, rows = case.spec, sum(case.query_lens)
    cache, tables = random_cache(case, _sets(case, device), device)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *case.query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    shape = (rows, spec.num_q_heads, spec.value_dim)
    decodes = len(case.seq_lens) if case.op in ("decode", "verify") else 0
    workspace: torch.Tensor | None = None
    calls: list[Callable[[], object]] = []
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for table in tables:  # an Attention a data set: a plan holds its page table, and one graph holds every run
        attn = Attention(
            spec,
            max_batch=len(case.seq_lens),
            max_query_tokens=rows,
            max_context=max(case.seq_lens),
            device=device,
            workspace=workspace,
            backend=backend,
        )
        workspace = attn.workspace
        attn.plan(seq_lens, table, starts, num_decodes=decodes, max_query_len=max(case.query_lens))
        q = _query(case, rows, device)
        out = torch.empty(shape, dtype=TORCH_DTYPES[spec.out_dtype], device=device)
        calls.append(lambda attn=attn, q=q, out=out: attn.run(q, cache, out=out))
        first = first or (q, out)
    assert first is not None
    q, out = first
    out.view(torch.uint8).fill_(0xFF)  # NaN: a row that is not written shows
    calls[0]()
    found = errors(*_sampled(case, q, cache, tables[0], out))
    return calls, found.rel, found.rel_bf16


def _query(case: Case, rows: int, device: torch.device) -> torch.Tensor:
    q = torch.randn(rows, case.spec.num_q_heads, case.spec.head_dim, device=device)
    format = FORMATS[case.spec.query_dtype]
    return cast(q, format).view(format.dtype)


def _sampled(
    case: Case, q: torch.Tensor, cache: PagedCache, table: torch.Tensor, out: torch.Tensor
) -> tuple[Batch, torch.Tensor]:
    """Some rows of the case, each a sequence of its own whose one row is the last; and what was computed for them."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor(case.query_lens).cumsum(0)
    rows = torch.randperm(int(ends[-1]), generator=generator)[:_SAMPLED_ROWS].sort().values
    sequences = torch.searchsorted(ends, rows, right=True)
    from_end = ends[sequences] - 1 - rows
    lens = torch.tensor(case.seq_lens)[sequences] - from_end
    device = q.device
    batch = Batch(
        spec=replace(case.spec, max_query_len=1),
        q=q[rows.to(device)],
        cache=cache,
        seq_lens=lens.to(device, torch.int32),
        page_table=table[sequences.to(device)],
        query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        k=torch.empty(0),
        v=torch.empty(0),
        arguments={},
    )
    return batch, out[rows.to(device)]


def _append_calls(case: Case, backend: str, device: torch.device) -> list[Callable[[], object]]:
    """Appends of the case's tokens into different pages each; the backend is the one that the device's caches use."""
    spec = case.spec
    cache, tables = random_cache(case, _sets(case, device), device)
    if backend not in ("auto", cache.append_backend):
        raise InvalidInput(f"append on {device} runs on {cache.append_backend}", backend)
    calls: list[Callable[[], object]] = []
    tokens = sum(case.query_lens)
    for table in tables:
        k, v = (
            torch.randn(tokens, spec.num_kv_heads, d, device=device).bfloat16() for d in (spec.head_dim, spec.value_dim)
        )
        slots = slots_of(table, spec.page_size, case.query_lens)
        calls.append(lambda k=k, v=v, slots=slots: cache.append(k, v, slots))
    return calls
