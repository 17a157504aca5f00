"""torch's scaled_dot_product_attention over the same elements widened to bf16, dense, for scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...errors import Unsupported
from ...formats import FORMATS
from ..cases import Case
from ..sides import AttentionInputs, Side


def cudnn(case: Case, inputs: AttentionInputs) -> Side:
    """By cuDNN."""
    return _side(case, inputs, SDPBackend.CUDNN_ATTENTION)


def flash(case: Case, inputs: AttentionInputs) -> Side:
    """By torch's FlashAttention-2."""
    return _side(case, inputs, SDPBackend.FLASH_ATTENTION)


def _side(case: Case, inputs: AttentionInputs, backend: SDPBackend) -> Side:
    spec, (rows, *_) = case.spec, case.query_lens
    reasons = []
    if set(case.query_lens) != {rows} or set(case.seq_lens) != {rows}:
        reasons.append("whole prompts of one length: its mask is causal from the top left")
    if spec.window or spec.softcap or spec.sinks or spec.lse or spec.mla or case.appends:
        reasons.append("no window, softcap, sinks, lse, latent cache or append")
    if reasons:
        raise Unsupported(f"SDPA is measured for {'; '.join(reasons)}", reasons)
    format, batch = FORMATS[spec.kv_dtype], len(case.seq_lens)

    def heads(x: torch.Tensor) -> torch.Tensor:  # [B, n, H, D] -> [B, H, n, D]
        return x.transpose(1, 2).contiguous()

    def one(index: int, q: torch.Tensor, out: list[torch.Tensor]) -> Callable[[], object]:
        query = heads(q.to(torch.bfloat16).unflatten(0, (batch, rows)))
        k, v = (heads(x[:, :rows].view(format.dtype).to(torch.bfloat16)) for x in inputs.tokens(index))

        def run() -> None:
            with sdpa_kernel(backend):
                out[:] = [
                    scaled_dot_product_attention(
                        query, k, v, is_causal=spec.causal, scale=spec.softmax_scale, enable_gqa=True
                    )
                ]

        return run

    out: list[torch.Tensor] = []  # of the last call: SDPA makes its output itself
    runs = [one(i, q, out if i == 0 else []) for i, q in enumerate(inputs.queries)]

    def check() -> tuple[float, float | None]:
        return inputs.errors(out[0].transpose(1, 2).flatten(0, 1))

    return Side(runs, None, check, {"layout": "dense", "page_size": None, "kv_dtype": "bfloat16"})
