"""flashinfer's kernels: XQA and FA2 decode over an e4m3 or a bf16 cache, FA3 prefill over an e4m3 one.

Its append takes what is stored: new keys and values are cast, for an e4m3 cache, and then appended. FA3 takes e4m3
queries: they are cast by a scale of 1, one launch, as engines do with a calibrated scale. Plans are made outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import Unsupported
from ...formats import TORCH_DTYPES
from ..cases import Case
from ..sides import AttentionInputs, Side, in_turn

XQA_PAGE, FA2_PAGE, FA3_PAGE = 64, 64, 64
_WORKSPACE = 1 << 30


@dataclass
class _Pages:
    """The cache as flashinfer takes it: K and V pools, and of each set its table, and page ids in one row."""

    kv: tuple[torch.Tensor, torch.Tensor]
    layout: str
    page_size: int
    tables: list[torch.Tensor]
    indices: list[torch.Tensor]
    indptr: torch.Tensor
    last_page_len: torch.Tensor


def _pages(inputs: AttentionInputs, layout: str, page_size: int) -> _Pages:
    def stream(x: torch.Tensor) -> torch.Tensor:
        pages = x.unflatten(0, (-1, page_size))
        return pages.transpose(1, 2).contiguous() if layout == "HND" else pages

    (k, v), tables = inputs.paged(page_size, stream(inputs.k), stream(inputs.v))
    counts = torch.tensor([-(-n // page_size) for n in inputs.case.seq_lens])
    held = (torch.arange(int(counts.max())) < counts[:, None]).to(inputs.device)
    stored = TORCH_DTYPES[inputs.case.spec.kv_dtype]
    return _Pages(
        (k.view(stored), v.view(stored)),
        layout,
        page_size,
        tables,
        [table[held] for table in tables],
        torch.cat([torch.zeros(1), counts.cumsum(0)]).to(inputs.device, torch.int32),
        torch.tensor([(n - 1) % page_size + 1 for n in inputs.case.seq_lens], dtype=torch.int32, device=inputs.device),
    )


def _check(case: Case, *taken: str, sixteen_bits: bool = False) -> None:
    """Unsupported for what is not set up here; taken: fields of the spec that the kernel takes as they are."""
    spec, stored = case.spec, ("fp8_e4m3", "bfloat16") if sixteen_bits else ("fp8_e4m3",)
    wanted = {
        "query_dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "scale_granularity": "tensor",
        "window": None,
        "softcap": None,
        "sinks": False,
        "lse": False,
        "mla": False,
        "head_dim_v": spec.head_dim,
    }
    found = {name: getattr(spec, name) for name in wanted if name not in taken}
    reasons = [
        f"measured with {name} {wanted[name]}; it is {found[name]}" for name in found if found[name] != wanted[name]
    ]
    if spec.kv_dtype not in stored:
        reasons.append(f"measured with kv_dtype {' or '.join(stored)}; it is {spec.kv_dtype}")
    if reasons:
        raise Unsupported(f"flashinfer is not set up for {case.name}", reasons)


def _appends(case: Case, inputs: AttentionInputs, pages: _Pages) -> list[Callable[[], object]]:
    from flashinfer.page import append_paged_kv_cache

    starts = torch.arange(len(case.seq_lens), device=inputs.device)
    lens = torch.tensor(case.query_lens, device=inputs.device)
    sequence = starts.repeat_interleave(lens).to(torch.int32)
    row = torch.arange(len(sequence), device=inputs.device, dtype=torch.int32)
    position = inputs.seq_lens[sequence] - lens[sequence].int() + row - inputs.query_starts[sequence]

    def one(new: tuple[torch.Tensor, torch.Tensor], indices: torch.Tensor) -> Callable[[], object]:
        both = torch.stack(new)
        stored = both if both.dtype == pages.kv[0].dtype else torch.empty_like(both, dtype=pages.kv[0].dtype)

        def append() -> None:
            if stored is not both:
                stored.copy_(both)
            append_paged_kv_cache(
                stored[0],
                stored[1],
                sequence,
                position,
                pages.kv,
                indices,
                pages.indptr,
                pages.last_page_len,
                kv_layout=pages.layout,
            )

        return append

    return [one(new, indices) for new, indices in zip(inputs.new, pages.indices, strict=True)]


def _side(
    case: Case, inputs: AttentionInputs, pages: _Pages, runs: list[Callable[[], object]], out: torch.Tensor
) -> Side:
    calls = in_turn(_appends(case, inputs, pages), runs) if case.appends else runs
    return Side(calls, out, lambda: inputs.errors(out), {"layout": pages.layout.lower(), "page_size": pages.page_size})


def _outs(case: Case, inputs: AttentionInputs) -> list[torch.Tensor]:
    spec = case.spec
    return [
        torch.empty(q.shape[0], spec.num_q_heads, spec.value_dim, dtype=TORCH_DTYPES[spec.out_dtype], device=q.device)
        for q in inputs.queries
    ]


def _window_left(case: Case) -> int:
    """How many tokens before its own a row sees; -1: all."""
    return -1 if case.spec.window is None else case.spec.window - 1


def xqa(case: Case, inputs: AttentionInputs) -> Side:
    """TensorRT-LLM's XQA by flashinfer.decode: over an e4m3 cache, query and P are cast to e4m3 inside."""
    _check(case, "window", "sinks", sixteen_bits=True)
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    pages, outs = _pages(inputs, "HND", XQA_PAGE), _outs(case, inputs)
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=inputs.device)
    lens = inputs.seq_lens.view(torch.uint32)

    def one(q: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        return lambda: xqa_batch_decode_with_kv_cache(
            q,
            pages.kv,
            workspace,
            table,
            lens,
            max(case.seq_lens),
            bmm1_scale=case.spec.scale,
            bmm2_scale=1.0,
            window_left=_window_left(case),
            out=out,
            sinks=inputs.sinks,
            kv_layout="HND",
        )

    runs = [one(*each) for each in zip(inputs.queries, pages.tables, outs, strict=True)]
    return _side(case, inputs, pages, runs, outs[0])


def fa2(case: Case, inputs: AttentionInputs) -> Side:
    """FA2 decode on tensor cores: e4m3 keys and values are widened to bf16 in registers."""
    _check(case, "window", sixteen_bits=True)
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    spec, pages, outs = case.spec, _pages(inputs, "NHD", FA2_PAGE), _outs(case, inputs)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=inputs.device)

    def one(q: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=pages.indptr.clone(),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=pages.last_page_len.clone(),
            backend="fa2",
        )
        wrapper.plan(
            pages.indptr,
            indices,
            pages.last_page_len,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            pages.page_size,
            window_left=_window_left(case),
            q_data_type=torch.bfloat16,
            kv_data_type=pages.kv[0].dtype,
            o_data_type=torch.bfloat16,
            sm_scale=spec.scale,
        )
        return lambda: wrapper.run(q, pages.kv, out=out)

    runs = [one(*each) for each in zip(inputs.queries, pages.indices, outs, strict=True)]
    return _side(case, inputs, pages, runs, outs[0])


def fa3(case: Case, inputs: AttentionInputs) -> Side:
    """FA3 prefill with e4m3 queries, keys and values; the cast of the queries is counted."""
    _check(case)
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    spec, pages, outs = case.spec, _pages(inputs, "NHD", FA3_PAGE), _outs(case, inputs)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=inputs.device)
    ones = [torch.ones(n, device=inputs.device) for n in (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)]

    def one(q: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=inputs.query_starts.clone(),
            paged_kv_indptr_buf=pages.indptr.clone(),
            paged_kv_indices_buf=indices.clone(),
            paged_kv_last_page_len_buf=pages.last_page_len.clone(),
            backend="fa3",
        )
        wrapper.plan(
            inputs.query_starts,
            pages.indptr,
            indices,
            pages.last_page_len,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            pages.page_size,
            causal=spec.causal,
            sm_scale=spec.scale,
            q_data_type=torch.float8_e4m3fn,
            kv_data_type=torch.float8_e4m3fn,
            o_data_type=torch.bfloat16,
        )
        stored = torch.empty_like(q, dtype=torch.float8_e4m3fn)

        def run() -> None:
            stored.copy_(q)
            wrapper.run(stored, pages.kv, *ones, out=out)

        return run

    runs = [one(*each) for each in zip(inputs.queries, pages.indices, outs, strict=True)]
    return _side(case, inputs, pages, runs, outs[0])
