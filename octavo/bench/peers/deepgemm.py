"""DeepGEMM's FP8 MQA logits, paged (one or two query rows a sequence on Hopper) and over a run of keys.

It allocates its result. Its schedule, made once a step for all layers, is made outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...errors import Unsupported
from ..indexer_cases import IndexerCase
from ..indexer_measure import IndexerInputs
from ..sides import Side

PAGE = 64


def logits(case: IndexerCase, inputs: IndexerInputs) -> Side:
    """The side of a case of either form."""
    calls = _paged(case, inputs) if case.op == "paged_mqa_logits" else _ragged(inputs)

    def check() -> tuple[float, None]:
        return inputs.errors(calls[0]().contiguous())

    return Side([*calls], None, check)


def _paged(case: IndexerCase, inputs: IndexerInputs) -> list[Callable[[], torch.Tensor]]:
    import deep_gemm  # pyright: ignore[reportMissingImports]

    if case.spec.page_size != PAGE or case.spec.scale_format == "ue8m0":
        raise Unsupported(f"deepgemm cannot run {case.name}", [f"it takes pages of {PAGE} with fp32 scales"])
    n = case.spec.max_query_len
    lens = inputs.seq_lens[:, None] - n + 1 + torch.arange(n, dtype=torch.int32, device=inputs.device)
    sms = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, sms)

    def call(i: int) -> Callable[[], torch.Tensor]:
        step = (lens, inputs.tables[i], schedule, inputs.max_context, False)
        return lambda: deep_gemm.fp8_paged_mqa_logits(inputs.queries[i], inputs.cache.pages, inputs.weights[i], *step)

    return [call(i) for i in range(inputs.sets)]


def _ragged(inputs: IndexerInputs) -> list[Callable[[], torch.Tensor]]:
    import deep_gemm  # pyright: ignore[reportMissingImports]

    def call(i: int) -> Callable[[], torch.Tensor]:
        keys = inputs.keys[i], inputs.key_scales[i]
        spans = inputs.starts, inputs.ends, False
        return lambda: deep_gemm.fp8_mqa_logits(inputs.queries[i], keys, inputs.weights[i], *spans)

    return [call(i) for i in range(inputs.sets)]
