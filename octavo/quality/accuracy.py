"""What an FP8 cache costs a model: every variant of the cache beside the 16-bit one, over the same text, in step.

A variant is a format, a granularity of scales and a precision of prefill. Results are one dict of plain numbers and
strings: what `octavo accuracy` prints and writes, and what a report is made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..bench.accuracy_file import SCHEMA
from ..errors import InvalidInput
from . import passes, retrieval
from .load import LoadedModel, check_context, context_of, measured
from .text import Windows
from .trial import SIXTEEN


@dataclass(frozen=True)
class Variant:
    """One FP8 cache: what `enable` is told. k_scale, v_scale: by layer, or None."""

    kv_dtype: str
    granularity: str
    precision: str
    k_scale: Any = field(default=None, compare=False)
    v_scale: Any = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """In tables: "fp8_e4m3 tensor fast"."""
        return f"{self.kv_dtype} {self.granularity} {self.precision}"


class Subject:
    """A model with a twin per variant, and one with the 16-bit cache, which the others are compared with."""

    def __init__(self, loaded: LoadedModel, variants: Sequence[Variant], device: torch.device) -> None:
        from ..integrations import transformers as plugin

        model, sixteen = measured(loaded, device)
        self.loaded = loaded
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.variants = list(dict.fromkeys(variants))
        self._sixteen = passes.twin(model)
        self.sixteen = plugin.enable(self._sixteen, kv_cache_dtype=sixteen)
        self._twins = [passes.twin(model) for _ in self.variants]
        self.handles = [
            plugin.enable(
                twin,
                kv_cache_dtype=v.kv_dtype,
                scale_granularity=v.granularity,
                precision=v.precision,
                k_scale=v.k_scale,
                v_scale=v.v_scale,
            )
            for twin, v in zip(self._twins, self.variants, strict=True)
        ]
        self.context = context_of(model)

    def sides(self) -> list[passes.Side]:
        """The 16-bit side first, then a side a variant."""
        made = [passes.Side(SIXTEEN, self._sixteen, lambda caches: self.sixteen.new_cache())]
        for variant, twin, handle in zip(self.variants, self._twins, self.handles, strict=True):
            made.append(passes.Side(variant.name, twin, lambda caches, handle=handle: handle.new_cache()))
        return made

    def text(
        self, text: Windows, chunk: int = 128, tail: int = 32, advance: Callable[[int], None] = lambda tokens: None
    ) -> dict[str, Any]:
        """{"text", "sides", "layers"}: figures of every side, and of every variant its error by layer and head."""
        check_context(self.context, text.tokens.shape[1])
        for handle in self.handles:
            handle.reset_stats()
            handle.record_error = True
        try:
            found = passes.score_windows(self.sides(), text.tokens, chunk=chunk, tail=tail, advance=advance)
        finally:
            for handle in self.handles:
                handle.record_error = False
        bad = [name for of in (found.losses, found.kl) for name, values in of.items() if not values.isfinite().all()]
        if bad:
            raise InvalidInput(f"the model's losses must be finite; the {bad[0]} side gives NaN or infinity")
        return {
            "text": {
                "source": text.source,
                "digest": text.digest,
                "windows": text.tokens.shape[0],
                "length": text.tokens.shape[1],
                "chunk": chunk,
                "tail": tail,
            },
            "sides": passes.figures(found, SIXTEEN),
            "layers": {
                variant.name: [
                    {"layer": layer, **stats, "heads": handle.head_stats[layer]}
                    for layer, stats in handle.stats.items()
                ]
                for variant, handle in zip(self.variants, self.handles, strict=True)
            },
        }

    def retrieval(
        self, contexts: Sequence[int], trials: int, advance: Callable[[int], None] = lambda tokens: None
    ) -> list[dict[str, Any]]:
        """Pass keys given back at each context; see `retrieval.measure`."""
        for context in contexts:
            check_context(self.context, context)
        return retrieval.measure(self.sides(), self.loaded.tokenizer, contexts, trials, advance=advance)

    def describe(self) -> dict[str, Any]:
        """The parts of the result that are known before anything runs."""
        return {
            "schema": SCHEMA,
            "model": {
                "name": self.loaded.name,
                "source": self.loaded.source,
                "parameters": self.loaded.parameters,
                "layers": len(self.sixteen.specs),
                "dtype": self.dtype,
            },
            "variants": [
                {
                    "name": variant.name,
                    "kv_dtype": variant.kv_dtype,
                    "scale_granularity": variant.granularity,
                    "precision": variant.precision,
                    "scaled": variant.k_scale is not None,
                    "bytes_per_token": handle.bytes_per_token,
                    "backends": sorted({p.backend for c in handle.choices.values() for p in (c.prefill, c.decode)}),
                }
                for variant, handle in zip(self.variants, self.handles, strict=True)
            ],
            "bytes_per_token_16_bit": self.sixteen.bytes_per_token,
        }


def variants(
    kv_dtypes: Sequence[str],
    granularities: Sequence[str],
    precisions: Sequence[str],
    scales: Callable[[str, str], tuple[Any, Any] | None],
) -> list[Variant]:
    """Every combination; scales(kv_dtype, granularity) -> (k, v) by layer or None, not asked for token_head."""
    made = []
    for kv_dtype in kv_dtypes:
        for granularity in granularities:
            found = None if granularity == "token_head" else scales(kv_dtype, granularity)
            k, v = found or (None, None)
            made += [Variant(kv_dtype, granularity, precision, k, v) for precision in precisions]
    return made


def calibrated(model: Any, tokens: torch.Tensor) -> Callable[[str, str], tuple[Any, Any]]:
    """scales(kv_dtype, granularity) of least squared error over `tokens` [windows, length], for `variants`."""
    from .calibrate import calibrate

    def scales(kv_dtype: str, granularity: str) -> tuple[Any, Any]:
        layers = calibrate(model, tokens, kv_dtype=kv_dtype, granularity=granularity)
        k, v = ([torch.tensor(layer[side]["scale"]) for layer in layers] for side in ("k", "v"))
        return k, v

    return scales


def from_file(path: Any) -> Callable[[str, str], tuple[Any, Any] | None]:
    """scales(kv_dtype, granularity) of a file of `octavo calibrate`, for its own format and granularity; else None."""
    from .calibrate import load_scales, made_for

    found = load_scales(path)
    of = made_for(path, found)
    return lambda kv_dtype, granularity: found if (kv_dtype, granularity) == of else None
