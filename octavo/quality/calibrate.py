"""Scales of an FP8 KV cache from real text: what a model's keys and values are, and what each choice of scale costs.

The text goes through the model twice. First the largest magnitudes and a histogram of each head are kept; then every
candidate scale is tried on the same keys and values, so that each error told is one that was measured. FP8 is a
floating-point format: inside its range the error hardly depends on the scale, and 1.0 is often as good as any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..configs import read_json
from ..errors import InvalidInput, Unsupported
from ..formats import FORMATS, Format, check_scale, dequantise, quantise

SCHEMA = 1
METHODS = ("mse", "percentile", "amax")
GRANULARITIES = ("tensor", "head")
STEPS = 13  # candidates below the largest magnitude, each 2^-1/2 of the one before: down to 1/64 of it
AS_GOOD = 1.05  # scale 1.0 is as good if no error is larger than this times the chosen one's
# The histogram's bins: 32 an octave from 2^-40 to 2^24, so that a percentile is known to 2.2 %.
_OCTAVES, _FIRST, _PER_OCTAVE = 64, -40, 32


@dataclass
class Extent:
    """Magnitudes of one layer's keys or values by head.

    Attributes:
        amax: fp32 [Hk]. counts: int64 [Hk, bins] of |x| by its logarithm; zeros are counted in the first.
    """

    amax: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Extent:
        """Of x fp32 [Hk, tokens, D]."""
        flat = x.abs().flatten(1)
        bins = ((flat.log2() - _FIRST) * _PER_OCTAVE).floor().clamp(0, _OCTAVES * _PER_OCTAVE - 1)
        bins = torch.where(flat > 0, bins, 0.0).to(torch.int64)
        counts = torch.zeros(x.shape[0], _OCTAVES * _PER_OCTAVE, dtype=torch.int64, device=x.device)
        counts.scatter_add_(1, bins, torch.ones_like(bins))
        return cls(flat.amax(1).cpu(), counts.cpu())

    def __add__(self, other: Extent) -> Extent:
        return Extent(torch.maximum(self.amax, other.amax), self.counts + other.counts)

    def merged(self) -> Extent:
        """All heads as one."""
        return Extent(self.amax.amax(0, keepdim=True), self.counts.sum(0, keepdim=True))

    def percentile(self, percent: float) -> torch.Tensor:
        """fp32 [Hk]: the upper edge of the bin that holds it, at most amax."""
        total = self.counts.sum(1, keepdim=True).double()
        reached = self.counts.cumsum(1).double() >= total * (percent / 100)
        index = reached.to(torch.int8).argmax(1)
        return torch.minimum(torch.exp2((index + 1.0) / _PER_OCTAVE + _FIRST).float(), self.amax)


@dataclass
class Tally:
    """What candidates cost on one layer's keys or values.

    Attributes:
        scales: fp32 [candidates, Hk or 1]. squared: of the errors, float64, of that shape. saturated: int64, likewise.
        norm: squares of the elements, float64 [Hk or 1]. elements: how many, of each head or of all.
    """

    scales: torch.Tensor
    squared: torch.Tensor
    saturated: torch.Tensor
    norm: torch.Tensor
    elements: int = 0

    @classmethod
    def of(cls, scales: torch.Tensor) -> Tally:
        """An empty one."""
        zeros = torch.zeros(scales.shape, dtype=torch.float64)
        return cls(scales, zeros, zeros.to(torch.int64), torch.zeros(scales.shape[1], dtype=torch.float64))

    def add(self, x: torch.Tensor, format: Format) -> None:
        """Count x fp32 [Hk, tokens, D]."""
        x = x.reshape(self.scales.shape[1], -1)
        self.elements += x.shape[1]
        self.norm += x.double().square().sum(1).cpu()
        for i, scale in enumerate(self.scales.to(x.device)):
            column = scale[:, None]
            error = dequantise(quantise(x, column, format), column, format) - x
            self.squared[i] += error.double().square().sum(1).cpu()
            # By a tensor quotient, as the cast divides: what lies above the largest number is what is clipped.
            self.saturated[i] += ((x / column).abs() > format.max).sum(1).cpu()

    def error(self, index: torch.Tensor) -> float:
        """Relative error (Frobenius) over all heads, of candidate index[h] for head h."""
        picked = self.squared.gather(0, index[None])[0]
        return float((picked.sum() / self.norm.sum().clamp_min(1e-300)).sqrt())

    def clipped(self, index: torch.Tensor) -> float:
        """Share of elements outside the range."""
        return float(self.saturated.gather(0, index[None]).sum()) / max(1, self.elements * self.norm.numel())


@dataclass
class Calibration:
    """Scales and what they cost.

    Attributes:
        kv_dtype, granularity, method, percentile: as asked.
        layers: of each layer {"layer", "k", "v"}; a side has "scale" (a number, or one a head), "amax", "rel_err",
            "clipped", "rel_err_at_1" and "clipped_at_1".
        text: source, digest, windows, length. sensitivity: of each layer {"layer", "kl"}; empty where not measured.
    """

    kv_dtype: str
    granularity: str
    method: str
    percentile: float
    model: str
    text: dict[str, Any]
    layers: list[dict[str, Any]]
    sensitivity: list[dict[str, Any]] = field(default_factory=list)

    @property
    def one_is_as_good(self) -> bool:
        """Whether scale 1.0 clips nothing and errs no more than AS_GOOD times as much in any layer."""
        return all(
            side["clipped_at_1"] == 0 and side["rel_err_at_1"] <= AS_GOOD * side["rel_err"]
            for layer in self.layers
            for side in (layer["k"], layer["v"])
        )

    @property
    def sixteen_bit_layers(self) -> list[int]:
        """The few layers that carry at least half of the loss when layers are stored in FP8 one at a time.

        Few: at most a tenth of the layers, at least one. Empty where the loss is spread wider than that.
        """
        order = sorted(self.sensitivity, key=lambda one: -one["kl"]["value"])
        total = sum(max(0.0, one["kl"]["value"]) for one in order)
        most, carried, picked = max(1, len(order) // 10), 0.0, []
        for one in order[:most]:
            picked.append(one["layer"])
            carried += max(0.0, one["kl"]["value"])
            if total > 0 and carried >= total / 2:
                return sorted(picked)
        return []

    def as_dict(self) -> dict[str, Any]:
        """The file's content."""
        return {
            "schema": SCHEMA,
            "kv_cache_dtype": self.kv_dtype,
            "scale_granularity": self.granularity,
            "method": self.method,
            "percentile": self.percentile if self.method == "percentile" else None,
            "model": self.model,
            "text": self.text,
            "layers": self.layers,
            "sensitivity": self.sensitivity,
            "one_is_as_good": self.one_is_as_good,
            "sixteen_bit_layers": self.sixteen_bit_layers,
        }


def load_scales(path: str | Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(k_scale, v_scale) of a calibration file, one fp32 tensor a layer: arguments of integrations.transformers.enable.

    Raises InvalidInput for a file that is none, and for a scale that is not finite and positive.
    """
    path = Path(path)
    content = read_json(path)
    layers = content.get("layers")
    if content.get("schema") != SCHEMA or not isinstance(layers, list) or not layers:
        raise InvalidInput(f"{path} must be a file of octavo calibrate, schema {SCHEMA}", repr(content.get("schema")))
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for number, layer in enumerate(layers):
        for name, scales in zip("kv", sides, strict=True):
            try:
                scale = torch.tensor(layer[name]["scale"], dtype=torch.float32)
            except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
                what = f"{type(error).__name__}: {error}"
                raise InvalidInput(f"{path}: layer {number} must have a {name} scale", what) from error
            check_scale(f"{path}: {name} scale of layer {number}", scale, tuple(scale.shape))
            scales.append(scale)
    return sides


def made_for(path: str | Path, found: tuple[list[torch.Tensor], list[torch.Tensor]]) -> tuple[str, str]:
    """(kv_dtype, granularity) that the scales of a calibration file were made for; `found`: what load_scales read."""
    content = read_json(Path(path))
    kv_dtype, granularity = content.get("kv_cache_dtype", "fp8_e4m3"), content.get("scale_granularity")
    return kv_dtype, granularity if granularity in GRANULARITIES else "head" if found[0][0].dim() else "tensor"


def keys_and_values(model: Any, tokens: torch.Tensor) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of each window of `tokens` [windows, length]: every layer's keys (rotated, as caches keep them) and values.

    fp32 [Hk, length, D] and [Hk, length, Dv].
    """
    from transformers import DynamicCache

    from .passes import cache_keyword

    for row in tokens:
        cache = DynamicCache()
        model(row[None].to(model.device), use_cache=True, **{cache_keyword(model): cache})
        yield [(layer.keys[0].float(), layer.values[0].float()) for layer in cache.layers]  # type: ignore[union-attr]


@torch.inference_mode()
def calibrate(
    model: Any,
    tokens: torch.Tensor,
    *,
    kv_dtype: str = "fp8_e4m3",
    granularity: str = "tensor",
    method: str = "mse",
    percentile: float = 99.99,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """The layers of a `Calibration` over `tokens` int64 [windows, length]; `advance` is told the tokens of each pass.

    method: amax (the largest magnitude becomes the largest number), percentile (that magnitude does; what is above is
    clipped), mse (the one of those and of STEPS - 1 smaller scales whose squared error is least; 1.0 too).
    """
    check_plain(model)
    format, length = FORMATS[kv_dtype], tokens.shape[1]
    extents: list[list[Extent]] = []
    for found in keys_and_values(model, tokens):
        new = [[Extent.of(x) for x in pair] for pair in found]
        if extents:
            new = [[a + b for a, b in zip(*pairs, strict=True)] for pairs in zip(extents, new, strict=True)]
        extents = new
        advance(length)
    _check_finite(extents)
    tallies = [[Tally.of(_candidates(e, format, granularity, percentile)) for e in pair] for pair in extents]
    for found in keys_and_values(model, tokens):
        for pair, of in zip(found, tallies, strict=True):
            for x, tally in zip(pair, of, strict=True):
                tally.add(x, format)
        advance(length)
    sides = [
        [_side(tally, extent, method, granularity) for tally, extent in zip(*both, strict=True)]
        for both in zip(tallies, extents, strict=True)
    ]
    return [{"layer": i, "k": k, "v": v} for i, (k, v) in enumerate(sides)]


# Candidates in a Tally, by place.
_AT_ONE, _AT_PERCENTILE, _AT_AMAX = 0, 1, 2


def _candidates(extent: Extent, format: Format, granularity: str, percentile: float) -> torch.Tensor:
    """fp32 [candidates, Hk or 1]: 1.0, the percentile's, then amax's and smaller ones."""
    extent = extent.merged() if granularity == "tensor" else extent
    full = torch.where(extent.amax > 0, extent.amax, format.max) / format.max
    part = torch.where(extent.amax > 0, extent.percentile(percentile), format.max) / format.max
    smaller = [full * 2.0 ** (-i / 2) for i in range(STEPS)]
    return torch.stack([torch.ones_like(full), part, *smaller]).clamp_min(2.0**-126)


def _check_finite(extents: list[list[Extent]]) -> None:
    for layer, pair in enumerate(extents):
        for name, extent in zip(("keys", "values"), pair, strict=True):
            if not bool(extent.amax.isfinite().all()):
                raise InvalidInput(f"the model's keys and values must be finite; {name} of layer {layer} are not")


def _side(tally: Tally, extent: Extent, method: str, granularity: str) -> dict[str, Any]:
    one = torch.full_like(tally.norm, _AT_ONE, dtype=torch.int64)
    index = {
        "mse": tally.squared.argmin(0),
        "percentile": torch.full_like(one, _AT_PERCENTILE),
        "amax": torch.full_like(one, _AT_AMAX),
    }[method]
    scale = tally.scales.gather(0, index[None])[0].tolist()
    return {
        "scale": scale if granularity == "head" else scale[0],
        "amax": float(extent.amax.max()),
        "rel_err": tally.error(index),
        "clipped": tally.clipped(index),
        "rel_err_at_1": tally.error(one),
        "clipped_at_1": tally.clipped(one),
    }


def has_latent(model: Any) -> bool:
    """Whether the model's cache holds a latent (MLA). Unsupported for a model that octavo does not run."""
    from ..integrations.transformers_models import attending

    return attending(model).family.mla


def check_plain(model: Any) -> None:
    """Raise Unsupported for a model whose cache is a latent: its scale is of the latent, which no layer returns."""
    if has_latent(model):
        raise Unsupported("calibration", ["needs keys and values of their own; found latent attention (MLA)"])


@torch.inference_mode()
def sensitivity(
    model: Any,
    tokens: torch.Tensor,
    layers: list[dict[str, Any]],
    kv_dtype: str,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """The divergence, in nats a token, that each layer alone adds when its keys and values are stored with its scales.

    -> [{"layer", "kl": {value, low, high}}]; the interval is over the windows of `tokens` [windows, length].
    """
    from transformers import DynamicCache

    from . import score
    from .passes import cache_keyword

    keyword, rows = cache_keyword(model), []
    for row in tokens:
        ids = row[None].to(model.device)
        base = model(ids, use_cache=True, **{keyword: DynamicCache()}).logits
        advance(ids.numel())
        found = []
        for layer in layers:
            cache = rounding_cache(len(layers), layer, FORMATS[kv_dtype])
            logits = model(ids, use_cache=True, **{keyword: cache}).logits
            found.append(score.kl_divergence(base, logits)[0].cpu())
            advance(ids.numel())
        rows.append(torch.stack(found))
    by_layer = torch.stack(rows, 1)  # [layers, windows, tokens]
    return [{"layer": i, "kl": score.mean(kl).as_dict()} for i, kl in enumerate(by_layer)]


def rounding_cache(count: int, rounded: dict[str, Any], format: Format) -> Any:
    """A transformers cache of `count` layers, of which one gives back its keys and values as `format` stores them."""
    from transformers.cache_utils import Cache, DynamicLayer

    class RoundingLayer(DynamicLayer):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            stored = (
                _stored(x, rounded[side]["scale"], format) for x, side in ((key_states, "k"), (value_states, "v"))
            )
            return super().update(*stored, *args, **kwargs)

    return Cache(layers=[(RoundingLayer if i == rounded["layer"] else DynamicLayer)() for i in range(count)])


def _stored(x: torch.Tensor, scale: Any, format: Format) -> torch.Tensor:
    column = torch.tensor(scale, dtype=torch.float32, device=x.device).reshape(-1, 1, 1)
    return dequantise(quantise(x, column, format), column, format).to(x.dtype)
