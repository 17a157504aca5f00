"""The demo's measurements: one model with a 16-bit and an FP8 cache, answering and reading the same text.

Every side is a twin of the model: its own config, the same weights. Results are one dict of plain numbers and strings,
the only source of what `octavo demo` prints, of its JSON and of its report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidInput
from . import exact, passes, score
from .load import LoadedModel, check_context, context_of, measured
from .text import Windows

PROMPTS = (
    "What is 15% of 4800?",
    "Write a Python function that reverses a string.",
    "What is the capital of Japan, and what is it known for?",
)
# Of the perplexity: how far FP8 may be from 16-bit, and paged attention from exact attention over the same numbers.
FORMAT_LIMIT = 0.015
KERNEL_LIMIT = 0.001
JUDGED_TOKENS = 4096

SIXTEEN, FP8, EXACT, STOCK = "16-bit", "fp8", "exact", "stock"


@dataclass(frozen=True)
class Size:
    """How much is measured: windows of `length` tokens in chunks, the last `tail` one by one; tokens of an answer."""

    windows: int = 8
    length: int = 1024
    chunk: int = 128
    tail: int = 32
    answer: int = 48


QUICK = Size(windows=2, length=128, chunk=32, tail=16, answer=12)


class Trial:
    """A model with its two paged caches enabled.

    Attributes:
        handle, handle16: octavo's handles of the FP8 and of the 16-bit side. exact_why_not: why no exact side, or None.
    """

    def __init__(self, loaded: LoadedModel, kv_dtype: str, device: torch.device) -> None:
        from ..integrations import transformers as plugin

        model, sixteen = measured(loaded, device)
        self.loaded = loaded
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.stock, self._fp8, self._sixteen = model, passes.twin(model), passes.twin(model)
        self.handle = plugin.enable(self._fp8, kv_cache_dtype=kv_dtype)
        self.handle16 = plugin.enable(self._sixteen, kv_cache_dtype=sixteen)
        self.exact_why_not = self._exact_why_not()

    def _exact_why_not(self) -> str | None:
        if any(spec.mla for spec in self.handle.specs):
            return "not measured for latent attention, whose keys and values are made from the stored latent"
        return None

    def sides(self) -> list[passes.Side]:
        """The sides that text is scored with, the one that others are compared with first."""
        from transformers import DynamicCache

        found = [
            passes.Side(SIXTEEN, self._sixteen, lambda caches: self.handle16.new_cache()),
            passes.Side(FP8, self._fp8, lambda caches: self.handle.new_cache()),
        ]
        if self.exact_why_not is None:
            model = passes.twin(self.stock)
            exact.enable_exact(model)
            found.append(passes.Side(EXACT, model, lambda caches: exact.following_cache(caches[FP8])))
        found.append(passes.Side(STOCK, self.stock, lambda caches: DynamicCache(config=self.stock.config)))
        return found

    def describe(self) -> dict[str, Any]:
        """The parts of the result that are known before anything runs: model, cache and plan."""
        spec = self.handle.specs[0]
        per_token, per_token_16 = self.handle.bytes_per_token, self.handle16.bytes_per_token
        return {
            "model": {
                "name": self.loaded.name,
                "source": self.loaded.source,
                "parameters": self.loaded.parameters,
                "layers": len(self.handle.specs),
                "dtype": self.dtype,
            },
            "cache": {
                "kv_dtype": spec.kv_dtype,
                "layout": spec.layout,
                "page_size": spec.page_size,
                "scale_granularity": spec.scale_granularity,
                "bytes_per_token": per_token,
                "bytes_per_token_16_bit": per_token_16,
                "tokens_per_gib": 2**30 // per_token,
                "tokens_per_gib_16_bit": 2**30 // per_token_16,
            },
            "plan": self.handle.plan,
            "plans": [choice.as_dict() for choice in self.handle.choices.values()],
        }

    @torch.inference_mode()
    def answer(self, prompt: str, tokens: int, advance: Callable[[], None]) -> dict[str, Any]:
        """The greedy answers of both caches to `prompt`, of at most `tokens` tokens each."""
        tokenizer = self.loaded.tokenizer
        if getattr(tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        ids = inputs["input_ids"].to(self.stock.device)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        said: list[list[int]] = []
        for model in (self._sixteen, self._fp8):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=pad,
            )
            said.append(out[0, ids.shape[1] :].tolist())
            advance()
        texts = [printable(tokenizer.decode(one, skip_special_tokens=True).strip()) for one in said]
        same = score.common(*said)
        return {
            "prompt": prompt,
            "text_16_bit": texts[0],
            "text_fp8": texts[1],
            "tokens_16_bit": len(said[0]),
            "tokens_fp8": len(said[1]),
            "same_tokens": same,
            "same_characters": parting(*texts),
        }

    def score(self, text: Windows, size: Size, advance: Callable[[int], None]) -> dict[str, Any]:
        """Perplexity, divergence and agreement of every side over `text`, and the cache's error by layer."""
        check_context(context_of(self.stock), size.length)
        self.handle.record_error = True
        found = passes.score_windows(self.sides(), text.tokens, chunk=size.chunk, tail=size.tail, advance=advance)
        self.handle.record_error = False
        for name, losses in found.losses.items():
            if not bool(losses.isfinite().all()):
                raise InvalidInput(f"the model's losses must be finite; the {name} side gives NaN or infinity")
        return {
            "text": {
                "source": text.source,
                "names": list(text.names),
                "digest": text.digest,
                "windows": text.tokens.shape[0],
                "length": text.tokens.shape[1],
                "chunk": size.chunk,
                "tail": size.tail,
                "scored_tokens": found.losses[SIXTEEN].numel(),
            },
            "quality": {"sides": passes.figures(found, SIXTEEN), "exact_why_not": self.exact_why_not, **_spread(found)},
            "layers": [{"layer": layer, **stats} for layer, stats in self.handle.stats.items()],
            "checks": self._checks(found),
        }

    def _checks(self, found: passes.Scores) -> list[dict[str, Any]]:
        """What must hold: of the format for the demo's own model in e4m3, of the kernels always. None: not judged."""
        from .smollm2 import NAME

        enough = found.losses[SIXTEEN].numel() >= JUDGED_TOKENS
        checks = []
        if self.loaded.name == NAME and self.handle.specs[0].kv_dtype == "fp8_e4m3":
            change = score.relative_change(found.losses[SIXTEEN], found.losses[FP8]).value
            name = "FP8 perplexity against the 16-bit one"
            checks.append(_check(name, change, FORMAT_LIMIT, enough))
        if EXACT in found.losses:
            change = score.relative_change(found.losses[EXACT], found.losses[FP8]).value
            name = "FP8 perplexity against exact attention over the same FP8 bytes"
            checks.append(_check(name, change, KERNEL_LIMIT, enough or self.dtype == "float32"))
        return checks


def _check(name: str, change: float, limit: float, judged: bool) -> dict[str, Any]:
    return {"name": name, "change": change, "limit": limit, "passed": abs(change) <= limit if judged else None}


def _spread(found: passes.Scores) -> dict[str, Any]:
    """The FP8 side's per-token KL: counts from 1e-7 nats to 10, eight bins a decade, and means along the window."""
    kl = found.kl[FP8]
    edges, counts = score.log_histogram(kl, 1e-7, 10.0, 64)
    step = math.ceil(kl.shape[1] / 16)
    means = [float(part.double().mean()) for part in kl.split(step, dim=1)]
    return {
        "kl_histogram": {"edges": edges, "counts": counts},
        "kl_by_position": {"tokens_per_mean": step, "means": means},
    }


def parting(one: str, other: str) -> int:
    """Where two texts part: the characters up to the first word that differs, or all of them."""
    if one == other:
        return len(one)
    at = score.common(one, other)
    while at and not one[at - 1].isspace():
        at -= 1
    return at


def printable(text: str) -> str:
    """`text` without control characters, which could move a terminal's cursor; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def headline(results: dict[str, Any]) -> dict[str, float]:
    """The few numbers a reader asks for first: FP8's change of perplexity, agreement, mean KL, and bytes kept."""
    fp8, cache = results["quality"]["sides"][FP8], results["cache"]
    return {
        "change": fp8["change"]["value"],
        "same_top": fp8["same_top"]["value"],
        "kl": fp8["kl"]["value"],
        "bytes_share": cache["bytes_per_token"] / cache["bytes_per_token_16_bit"],
        "worst_error": max((max(s["k_rel_err"], s["v_rel_err"]) for s in results["layers"]), default=math.nan),
    }
