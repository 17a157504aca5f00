"""The same text through one model with several caches, in step, so that their logits are compared where they arise.

A window is fed in chunks and, at its end, token by token: every chunk after the first attends to what the cache holds,
and the last tokens are decode steps of one row per sequence. Logits are reduced to a few numbers per token at once; no
more than one chunk of them is held per side.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from . import score

# Logits held at once per side: 64 Mi elements are 256 MiB in fp32. A GPU has more memory, and few rows leave it idle.
MOST_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 28}


@dataclass(frozen=True)
class Side:
    """One of the models compared: a name, a model (``twin`` makes copies) and what makes an empty cache for it.

    new_cache is called with the caches of the sides before it, by name: a side may follow another.
    """

    name: str
    model: Any
    new_cache: Callable[[dict[str, Any]], Any]


@dataclass
class Scores:
    """Per-token results by side, fp32 or bool [windows, length - 1] on the CPU; kl and same_top against the first.

    top: whether the text's token is the one that the side puts first.
    """

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    top: dict[str, torch.Tensor] = field(default_factory=dict)
    kl: dict[str, torch.Tensor] = field(default_factory=dict)
    same_top: dict[str, torch.Tensor] = field(default_factory=dict)


def twin(model: Any) -> Any:
    """A copy of `model` with its own config and modules and the same weights in memory."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in shared})


def cache_keyword(model: Any) -> str:
    """The forward argument that takes the cache: ``cache`` where this transformers has it, else ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def pieces(length: int, chunk: int, tail: int) -> list[tuple[int, int]]:
    """(start, end) of each forward over a window: chunks of at most `chunk` tokens, the last `tail` one by one."""
    body = max(length - tail, min(length, chunk))
    cuts = [*range(0, body, chunk), *range(body, length + 1)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


@torch.inference_mode()
def score_windows(
    sides: Sequence[Side],
    tokens: torch.Tensor,
    *,
    chunk: int = 128,
    tail: int = 32,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Scores:
    """Losses of every side over `tokens` [windows, length], and divergence and agreement against the first side.

    `advance` is told the tokens scored per forward, counted once per side.
    """
    windows, length = tokens.shape
    vocabulary = sides[0].model.config.get_text_config().vocab_size
    most = MOST_LOGITS[sides[0].model.device.type]
    batch = max(1, min(windows, most // (min(chunk, length) * vocabulary)))
    parts: list[Scores] = [
        _score_batch(sides, tokens[first : first + batch], pieces(length, chunk, tail), advance)
        for first in range(0, windows, batch)
    ]
    joined = Scores()
    for name in (side.name for side in sides):
        for kind in ("losses", "top", "kl", "same_top"):
            found = [getattr(part, kind)[name] for part in parts if name in getattr(part, kind)]
            if found:
                getattr(joined, kind)[name] = torch.cat(found)
    return joined


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Decode steps on a CPU: products of a few rows are so short that threads cost more in waiting than they share.

    Measured on two cores with another process on one of them: 8 rows by 576 x 1536 take 1.8 to 7 ms on two threads,
    0.2 ms on one.
    """
    threads = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _score_batch(
    sides: Sequence[Side], tokens: torch.Tensor, cuts: list[tuple[int, int]], advance: Callable[[int], None]
) -> Scores:
    length = tokens.shape[1]
    caches: dict[str, Any] = {}
    for side in sides:
        caches[side.name] = side.new_cache(caches)
    rows: dict[tuple[str, str], list[torch.Tensor]] = {}
    for start, end in cuts:
        base = None
        targets = tokens[:, start + 1 : min(end + 1, length)]
        scored = targets.shape[1]  # the window's last token has nothing to predict
        for side in sides:
            device = side.model.device
            ids = tokens[:, start:end].to(device)
            with _one_thread(device.type == "cpu" and end - start == 1):
                found = side.model(ids, use_cache=True, **{cache_keyword(side.model): caches[side.name]})
            logits = found.logits[:, :scored]
            rows.setdefault(("losses", side.name), []).append(score.token_losses(logits, targets.to(device)).cpu())
            rows.setdefault(("top", side.name), []).append((logits.argmax(-1) == targets.to(device)).cpu())
            if base is None:
                base = logits
            else:
                rows.setdefault(("kl", side.name), []).append(score.kl_divergence(base, logits).cpu())
                rows.setdefault(("same_top", side.name), []).append(score.same_top(base, logits).cpu())
            advance(ids.numel())
    part = Scores()
    for (kind, name), found in rows.items():
        getattr(part, kind)[name] = torch.cat(found, 1)
    return part


def figures(found: Scores, base: str) -> dict[str, Any]:
    """Of every side: perplexity and how often the text's token comes first; against `base`: change, KL and agreement.

    Each with its interval; perplexity's change is of paired windows.
    """
    sides: dict[str, Any] = {}
    for name, losses in found.losses.items():
        sides[name] = {
            "perplexity": score.perplexity(losses).as_dict(),
            "top": score.mean(found.top[name].float()).as_dict(),
        }
        if name != base:
            sides[name] |= {
                "change": score.relative_change(found.losses[base], losses).as_dict(),
                "kl": score.mean(found.kl[name]).as_dict(),
                "kl_quantiles": score.quantiles(found.kl[name]),
                "same_top": score.mean(found.same_top[name].float()).as_dict(),
            }
    return sides
