"""What a cache's format costs: the error of appended tokens as they read back from the pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..cache import PagedCache
from ..formats import FORMATS
from ._pages import Step


@dataclass
class CacheError:
    """Sums over everything added, for one layer; k and v by the keys "k" and "v"."""

    tokens: int = 0
    error: dict[str, float] = field(default_factory=lambda: {"k": 0.0, "v": 0.0})
    power: dict[str, float] = field(default_factory=lambda: {"k": 0.0, "v": 0.0})
    saturated: dict[str, int] = field(default_factory=lambda: {"k": 0, "v": 0})
    amax: dict[str, float] = field(default_factory=lambda: {"k": 0.0, "v": 0.0})

    def add(self, cache: PagedCache, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> None:
        """Compare the rows of k [B * T, Hk, D] and v that `step` appended with what the pages hold; synchronises."""
        if step.rows is not None:
            k, v = k[step.rows], None if v is None else v[step.rows]
        v = k[..., : cache.spec.value_dim] if v is None else v
        start = 0
        for row, (count, length) in enumerate(zip(step.counts, step.lengths, strict=True)):
            if count:
                stored = cache.gather(step.page_table[row], length)
                for name, new, read in (("k", k, stored[0]), ("v", v, stored[1])):
                    self._add(name, new[start : start + count].float(), read[length - count :], cache)
            start += count
        self.tokens += start

    def _add(self, name: str, new: torch.Tensor, read: torch.Tensor, cache: PagedCache) -> None:
        self.error[name] += float((new - read).double().square().sum())
        self.power[name] += float(new.double().square().sum())
        self.amax[name] = max(self.amax[name], float(new.abs().max()))
        spec = cache.spec
        if spec.fp8 and spec.scale_granularity != "token_head":  # a token's own scale fits it
            scale = cache.k_scale if name == "k" else cache.v_scale
            if scale is not None:
                new = new / (scale[:, None] if scale.dim() else scale)
            self.saturated[name] += int((new.abs() > FORMATS[spec.kv_dtype].max).sum())

    def as_dict(self) -> dict[str, float]:
        """k_rel_err, v_rel_err, k_saturated, v_saturated, k_amax, v_amax, tokens."""
        found: dict[str, float] = {"tokens": self.tokens}
        for name in ("k", "v"):
            found[f"{name}_rel_err"] = (self.error[name] / self.power[name]) ** 0.5 if self.power[name] else 0.0
            found[f"{name}_saturated"] = self.saturated[name]
            found[f"{name}_amax"] = self.amax[name]
        return found
