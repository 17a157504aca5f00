"""What a cache's format costs: the error of appended tokens as they read back from the pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..cache import PagedCache
from ..formats import FORMATS
from .pages import Step


@dataclass
class CacheError:
    """Sums over everything added, for one layer; k and v by the keys "k" and "v".

    Attributes:
        tokens: how many. error, power: squares of the errors and of the values, float64 [Hk].
        saturated: elements beyond the format's range, int64 [Hk]. amax: largest magnitudes, fp32 [Hk].
    """

    tokens: int = 0
    error: dict[str, torch.Tensor] = field(default_factory=dict)
    power: dict[str, torch.Tensor] = field(default_factory=dict)
    saturated: dict[str, torch.Tensor] = field(default_factory=dict)
    amax: dict[str, torch.Tensor] = field(default_factory=dict)

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
        """Count new and read, fp32 [tokens, Hk, D]."""
        spec, scaled, beyond = cache.spec, new, torch.zeros_like(new, dtype=torch.bool)
        if spec.fp8 and spec.scale_granularity != "token_head":  # a token's own scale fits it
            scale = cache.k_scale if name == "k" else cache.v_scale
            if scale is not None:
                scaled = new / (scale[:, None] if scale.dim() else scale)
            beyond = scaled.abs() > FORMATS[spec.kv_dtype].max
        for sums, of_call in (
            (self.error, (new - read).double().square().sum((0, 2))),
            (self.power, new.double().square().sum((0, 2))),
            (self.saturated, beyond.sum((0, 2))),
        ):
            sums[name] = sums[name] + of_call.cpu() if name in sums else of_call.cpu()
        largest = new.abs().amax((0, 2)).cpu()
        self.amax[name] = torch.maximum(self.amax[name], largest) if name in self.amax else largest

    def as_dict(self) -> dict[str, float]:
        """k_rel_err, v_rel_err, k_saturated, v_saturated, k_amax, v_amax, tokens."""
        found: dict[str, float] = {"tokens": self.tokens}
        for name in ("k", "v"):
            there = name in self.power
            power = float(self.power[name].sum()) if there else 0.0
            found[f"{name}_rel_err"] = (float(self.error[name].sum()) / power) ** 0.5 if power else 0.0
            found[f"{name}_saturated"] = int(self.saturated[name].sum()) if there else 0
            found[f"{name}_amax"] = float(self.amax[name].max()) if there else 0.0
        return found

    def by_head(self) -> dict[str, list[float]]:
        """The same by head, without tokens: a list of Hk numbers each; empty lists before anything was added."""
        found: dict[str, list[float]] = {}
        for name in ("k", "v"):
            there = name in self.power
            error = (self.error[name] / self.power[name].clamp_min(1e-300)).sqrt() if there else torch.zeros(0)
            found[f"{name}_rel_err"] = error.tolist()
            found[f"{name}_saturated"] = self.saturated[name].tolist() if there else []
            found[f"{name}_amax"] = self.amax[name].tolist() if there else []
        return found
