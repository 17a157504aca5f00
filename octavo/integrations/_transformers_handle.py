"""What `enable` returns: the pages, plans and statistics of one model, and the attention of one layer over them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..attention import Attention
from ..cache import PagedCache
from ..choose import Choice
from ..errors import InvalidInput
from ..plan_text import layer_ranges
from ..spec import AttentionSpec
from ._cache_error import CacheError
from .pages import PagePool, Step
from .transformers_models import absorb_output, absorb_query

if TYPE_CHECKING:
    from ._transformers_cache import PagedKVCache, PagedLayer


class Handle:
    """What `enable` returns.

    Attributes:
        specs: of each layer. choices: the plan of each kind. pool: the pages.
        record_error: measure what the format costs; `stats` tells.
        windowed: whether any layer has a window.
        keyword: the argument that the model's forward takes a cache by.
        hooks, stock_attention, model: what `disable` needs.
        handed: layers whose update had no keyword dict to reach the attention function by.
        lock, holder: held during a forward pass, and by which thread.
    """

    def __init__(
        self, specs: list[AttentionSpec], choices: dict[AttentionSpec, Choice], pool: PagePool, backend: str | None
    ) -> None:
        self.specs, self.choices, self.pool = specs, choices, pool
        self.record_error = False
        self.errors = [CacheError() for _ in specs]
        self.keyword = ""
        self.hooks: list[Any] = []
        self.stock_attention = ""
        self.model: Callable[[], Any] = lambda: None
        self.windowed = any(spec.window is not None for spec in specs)
        self._backend = backend
        self._attentions: dict[AttentionSpec, Attention] = {}
        self.handed: dict[int, PagedLayer] = {}
        self.lock = threading.Lock()
        self.holder: int | None = None

    @property
    def caches(self) -> list[PagedCache]:
        """The PagedCache of each layer; others after the pool has grown."""
        return self.pool.caches

    @property
    def plan(self) -> str:
        """The plan table of each layer kind, as `octavo explain` prints it."""
        parts = []
        for spec, choice in self.choices.items():
            layers = tuple(layer for layer, of_layer in enumerate(self.specs) if of_layer == spec)
            parts.append(f"layer{'s' if len(layers) > 1 else ''} {layer_ranges(layers)}\n{choice}")
        return "\n\n".join(parts)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers' caches."""
        return sum(spec.bytes_per_token for spec in self.specs)

    @property
    def stats(self) -> dict[int, dict[str, float]]:
        """Of what was appended while record_error was True, by layer: k_rel_err, v_rel_err (root of squared error over
        squared value), k_saturated, v_saturated (elements beyond the format's range), k_amax, v_amax, tokens."""
        return {layer: error.as_dict() for layer, error in enumerate(self.errors)}

    @property
    def head_stats(self) -> dict[int, dict[str, list[float]]]:
        """`stats` by layer and head, without tokens: each name has a list of Hk numbers."""
        return {layer: error.by_head() for layer, error in enumerate(self.errors)}

    def reset_stats(self) -> None:
        """Start `stats` anew."""
        self.errors = [CacheError() for _ in self.specs]

    def new_cache(self) -> PagedKVCache:
        """An empty cache to pass to successive forward calls of the model; generate makes its own."""
        from ._transformers_cache import PagedKVCache

        return PagedKVCache(self.pool, self.windowed, self.handed)

    def begin(self, cache: PagedKVCache, step: Step, num_decodes: int) -> None:
        """The next forward pass with `cache` is one row [1, T] that holds the T new tokens of several sequences.

        step: whose tokens, and where they go; its pages are the caller's business, as are the positions that forward is
        given. num_decodes: its first so many sequences have one new token. Nothing of `cache` lasts beyond the pass.
        """
        cache.begin(step)
        self._plan(step, num_decodes)

    def reserve(self, max_batch: int, max_query_tokens: int, max_context: int) -> None:
        """Make the attention buffers for batches up to these bounds now, so that they stay where they are."""
        for spec in self.choices:
            self._attention(spec, max_batch, max_query_tokens, max_context)

    def attend(
        self, layer: PagedLayer, module: Any, query: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Append layer's new tokens and attend: query [B, H, T, D] -> [B, T, H, Dv]; rows of padding are 0."""
        spec = self.specs[layer.index]
        batch, heads, columns = query.shape[:3]
        key, value = layer.take()
        step = self._step(layer, batch, columns, mask)
        cache = self.pool.caches[layer.index]
        if spec.mla:  # update was given the latent and the rotated key
            key, value = torch.cat([key, value], dim=-1), None
            query = absorb_query(module, query)
        new_k, new_v = _token_rows(key), None if value is None else _token_rows(value)
        cache.append(new_k, new_v, step.slots)
        if self.record_error:
            self.errors[layer.index].add(cache, new_k, new_v, step)
        layer.columns = step.columns
        rows = query.transpose(1, 2).reshape(batch * columns, heads, spec.head_dim)
        rows = rows if step.rows is None else rows[step.rows]
        out = self._attentions[spec].run(rows.to(module.o_proj.weight.dtype).contiguous(), cache, sinks=sinks)
        out = (absorb_output(module, out) if spec.mla else out).to(query.dtype)
        if step.rows is not None:
            full = out.new_zeros(batch * columns, *out.shape[1:])
            full[step.rows] = out
            out = full
        return out.view(batch, columns, *out.shape[1:])

    def _step(self, layer: PagedLayer, batch: int, columns: int, mask: torch.Tensor | None) -> Step:
        """The step that this forward pass shares: begun by its first layer, joined by the others."""
        sequences = layer.sequences
        if layer.columns < sequences.columns:
            step = sequences.current
            joins = step is not None and step.columns == layer.columns + columns
            if step is None or not joins or step.slots.shape[0] != batch * columns:
                raise InvalidInput("a forward pass must reach every layer: an earlier one broke off; use a new cache")
            return step
        valid = earlier = None
        if mask is not None:  # the only copies to the host of a forward pass
            valid = mask[:, -columns:].cpu()
            earlier = mask[:, :-columns].sum(1).tolist()
        step = sequences.advance(batch, columns, valid, earlier)
        self._plan(step, num_decodes=batch if columns == 1 else 0)
        return step

    def _plan(self, step: Step, num_decodes: int) -> None:
        batch, rows = step.seq_lens.shape[0], step.slots.shape[0]
        for spec in self.choices:
            self._attention(spec, batch, rows, step.page_table.shape[1] * spec.page_size).plan(
                step.seq_lens,
                step.page_table,
                step.query_starts,
                num_decodes=num_decodes,
                max_query_len=max(step.counts),
            )

    def _attention(self, spec: AttentionSpec, batch: int, rows: int, context: int) -> Attention:
        """The kind's Attention, made anew with doubled bounds where a batch outgrows it."""
        made = self._attentions.get(spec)
        needed = (batch, rows, context)
        bounds = (made.max_batch, made.max_query_tokens, made.max_context) if made else (1, 1, 1)
        if made is not None and all(new <= old for new, old in zip(needed, bounds, strict=True)):
            return made
        bounds = [max(old, 1 << math.ceil(math.log2(new))) for old, new in zip(bounds, needed, strict=True)]
        with torch.inference_mode(False):
            self._attentions[spec] = Attention(
                spec,
                max_batch=bounds[0],
                max_query_tokens=bounds[1],
                max_context=bounds[2],
                device=self.pool.caches[0].device,
                backend=self._backend,
            )
        return self._attentions[spec]


def _token_rows(x: torch.Tensor) -> torch.Tensor:
    """[B, Hk, T, D] -> [B * T, Hk, D]."""
    return x.transpose(1, 2).flatten(0, 1)
