"""Scores over logits and per-token losses: pure functions of tensors, with intervals.

Losses are in nats. An interval is a percentile bootstrap over windows, which are what was sampled from the text: tokens
of one window are not independent, so resampling tokens would give an interval that is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import InvalidInput

RESAMPLES = 10_000
SEED = 20_240_229


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; the interval is None where one window alone was scored."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """The three numbers by name, for records and --json."""
        return asdict(self)


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log p(target) in fp32 [...] of `logits` [..., vocabulary] of any float dtype and `targets` int64 [...]."""
    logs = logits.to(torch.float32)
    picked = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return logs.logsumexp(-1) - picked


def kl_divergence(logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(softmax(logits) || softmax(other)) in fp32 nats [...], of two [..., vocabulary] tensors.

    Rounding can make a divergence of nearly equal distributions a little negative; such a value is returned as 0.
    """
    p = logits.to(torch.float32).log_softmax(-1)
    q = other.to(torch.float32).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)


def same_top(logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether both put the same token first, bool [...]; of equal logits the lower index counts."""
    return logits.argmax(-1) == other.argmax(-1)


def perplexity(losses: torch.Tensor) -> Estimate:
    """exp of the mean loss of `losses` [windows, tokens], with its bootstrap interval over windows."""
    return bootstrap(lambda means: means.mean(-1).exp(), losses)


def relative_change(losses: torch.Tensor, other: torch.Tensor) -> Estimate:
    """Perplexity of `other` over that of `losses`, minus 1; both [windows, tokens] over the same text.

    The interval is of paired resamples: the same windows on both sides, so that how hard a window is cancels.
    """
    if losses.shape != other.shape:
        raise InvalidInput("both sides must have scored the same windows", f"{list(losses.shape)}, {list(other.shape)}")
    return bootstrap(lambda means: means.mean(-1).exp() - 1.0, other.to(torch.float64) - losses.to(torch.float64))


def mean(values: torch.Tensor) -> Estimate:
    """The mean of `values` [windows, tokens], with its bootstrap interval over windows."""
    return bootstrap(lambda means: means.mean(-1), values)


def bootstrap(statistic: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> Estimate:
    """`statistic` of the window means [windows] and its 95 % percentile interval over RESAMPLES resamples of windows.

    `statistic` maps [..., windows] to [...]. Windows have one length, so the mean of their means is the mean over
    tokens. The resamples are the same in every call with the same number of windows.
    """
    if values.ndim != 2 or not values.numel():
        raise InvalidInput("values must be [windows, tokens] with at least one of each", list(values.shape))
    means = values.detach().to("cpu", torch.float64).mean(1)
    value = float(statistic(means))
    count = means.shape[0]
    if count < 2:
        return Estimate(value)
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    low, high = torch.quantile(statistic(means[drawn]), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)


def quantiles(values: torch.Tensor, at: tuple[float, ...] = (0.5, 0.9, 0.99)) -> dict[str, float]:
    """Quantiles of all elements by name (``p50`` ...), and their largest as ``max``."""
    flat = values.detach().to("cpu", torch.float64).flatten().sort().values
    # Sorted and indexed: torch.quantile refuses more than 16 million elements.
    found = {f"p{q * 100:g}": float(flat[min(len(flat) - 1, math.ceil(q * len(flat)) - 1)]) for q in at}
    return {**found, "max": float(flat[-1])}


def log_histogram(values: torch.Tensor, low: float, high: float, bins: int) -> tuple[list[float], list[int]]:
    """Counts of `values` in `bins` bins of equal ratio from `low` to `high` -> (edges [bins + 1], counts [bins]).

    What lies outside is counted in the first or last bin, so the counts add up to the number of elements.
    """
    edges = torch.logspace(math.log10(low), math.log10(high), bins + 1, dtype=torch.float64)
    flat = values.detach().to("cpu", torch.float64).flatten()
    index = (torch.bucketize(flat, edges, right=True) - 1).clamp(0, bins - 1)
    return edges.tolist(), torch.bincount(index, minlength=bins).tolist()


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many first elements of two sequences are equal: of two greedy answers, the tokens until they part."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
