"""A side's perplexity beside exact attention's over the very bytes that the side wrote, in one SGLang engine.

Two engines do not write the same bytes. Where layers compute in 16 bits, two equally exact attentions leave hidden
states that differ by a rounding, and some keys and values then fall to another FP8 neighbour, 6 to 12 % away. In
SmolLM2-135M between attention in fp32 and in fp64 not a byte of layer 0 differs, 6 % of layer 2's values, 44 % of layer
10's and 64 % of the last one's, and over 8,000 tokens such perplexities scatter by 0.2 %. So each window is read twice
by one engine: first as the side does it, then as a request of another name, whose attention is a plain softmax in fp64
over copies of what the first request stored (_same_bytes_backend.py). Its queries are its own, of hidden states that
exact attention made.

`register` is the plug-in that the side's engine loads in place of octavo's own: the backends of NAMES are octavo's with
that second reading, and nothing of octavo's integration knows of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

NAMES = {"same-bytes": "fast", "same-bytes-exact": "exact"}  # backend's name: precision of prefill
ENTRY = "octavo.bench.engines.same_bytes:register"
WRITES, READS = "writes-", "reads-"  # request ids begin so: it stores bytes, it attends to those of the other
EACH = 8  # windows that are read before what was found is left
# One request at a time and nothing found in a cache of prefixes; the second reading needs lengths on the host.
OPTIONS = {
    "disable_prefill_cuda_graph": True,
    "disable_decode_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
}


def register() -> None:
    """Add octavo's own backends, and NAMES, to SGLang's."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from ...integrations import sglang as plugin

    for name, precision in NAMES.items():
        register_attention_backend(name)(_factory(precision))
    plugin.NAMES.update(NAMES)  # the pages are leaf pages where both halves' names are octavo's
    plugin.register()  # adds them to the choices too


def _factory(precision: str) -> Any:
    def create(runner: Any) -> Any:
        """What SGLang calls with its ModelRunner once the model and the KV pool are there."""
        from ._same_bytes_backend import SameBytesBackend

        return SameBytesBackend(runner, precision)

    return create


def measure(engine: Any, windows: list[list[int]], leave: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Both perplexities over `windows`, and by how much the side's is above exact attention's.

    leave: is given what was found so far, each EACH windows.
    """
    read: dict[str, list[list[float]]] = {WRITES: [], READS: []}
    for index, window in enumerate(windows):
        if index and index % EACH == 0:
            leave(figures(read[WRITES], read[READS]))
        for name, found in read.items():
            found.append(_losses(engine, window, f"{name}{index}"))
    return figures(read[WRITES], read[READS])


def figures(own: list[list[float]], exact: list[list[float]]) -> dict[str, Any]:
    """What the losses of windows by token, in nats, say of a side and of exact attention.

    The change's interval and standard error are of paired windows; token_deviation is the standard deviation of a
    token's difference.
    """
    import torch

    from ...quality import score

    ours, theirs = torch.tensor(own, dtype=torch.float64), torch.tensor(exact, dtype=torch.float64)
    differences = ours - theirs
    count = len(own)
    return {
        "perplexity": ours.mean().exp().item(),
        "exact_perplexity": theirs.mean().exp().item(),
        "change": score.relative_change(theirs, ours).as_dict(),
        "standard_error": differences.mean(1).std().item() / math.sqrt(count) if count > 1 else None,
        "token_deviation": differences.std().item(),
        "scored_tokens": ours.numel(),
        "window_losses": ours.mean(1).tolist(),
        "exact_window_losses": theirs.mean(1).tolist(),
    }


def _losses(engine: Any, window: list[int], name: str) -> list[float]:
    """Losses of each token of `window` but the first, read by the request `name`."""
    answer = engine.generate(
        input_ids=window,
        sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        rid=name,
    )
    found = answer["meta_info"]
    losses = [-entry[0] for entry in found["input_token_logprobs"][1:]]
    if found["id"] != name or found["cached_tokens"] or len(losses) != len(window) - 1:
        raise RuntimeError(
            f"{name} was to be read whole: {len(losses)} tokens of {len(window)} were scored, "
            f"{found['cached_tokens']} came from a cache, and the request was named {found['id']}"
        )
    return losses
