"""transformers' Cache over octavo's pages. Imports transformers: load it inside a function.

A layer's `update` keeps nothing in tensors: it holds the new tokens back for the attention function, which appends them
once it knows from the mask which of them are padding, and hands itself to that function.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import InvalidInput
from .pages import PagePool, Sequences, Step

KEYWORD = "octavo_layer"


class PagedLayer(CacheLayerMixin):
    """One layer of a PagedKVCache: how far it has come, and the new tokens until attention takes them."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, sequences: Sequences, index: int, handed: dict[int, PagedLayer]) -> None:
        super().__init__()
        self.sequences = sequences
        self.index = index
        self.columns = 0
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._handed = handed

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is made here: the pages belong to the model's pool."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens [B, Hk, T, D]; returns them, and reaches the attention function through the keyword dict.

        A transformers without that dict (5.17) hands nothing on: the layer then waits in a dict that the attention
        function looks into.
        """
        if self.pending is not None:
            raise InvalidInput(
                "octavo's attention must take each update: an earlier pass broke off, or the model is not enabled; "
                "use a new cache of an enabled model"
            )
        self.is_initialized = True
        self.pending = (key_states, value_states)
        keywords = kwargs.get("kwargs")
        if isinstance(keywords, dict):
            keywords[KEYWORD] = self
        else:
            self._handed[self.index] = self
        return key_states, value_states

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens that `update` held back."""
        if self.pending is None:
            raise InvalidInput("each attention call needs the new keys and values of its own update")
        pending, self.pending = self.pending, None
        return pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask, the first of them)."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns of the padded batch that this layer has seen."""
        return self.columns

    def get_max_length(self) -> int:
        """-1: bounded by the pool, not by the layer."""
        return -1


class PagedKVCache(Cache):
    """What `enable` makes a model generate with; made by `handle.new_cache()`.

    Beams, crops and repeats act on the page tables once, for all layers. Its pages are freed with it.

    for_one_pass: made for a forward pass with use_cache=False, whose output must not hold it.
    """

    for_one_pass = False

    def __init__(self, pool: PagePool, windowed: bool, handed: dict[int, PagedLayer]) -> None:
        self.sequences = Sequences(pool, windowed)
        self._paged = [PagedLayer(self.sequences, index, handed) for index in range(len(pool.caches))]
        super().__init__(layers=list(self._paged))

    @property
    def pool(self) -> PagePool:
        """The pages of the model."""
        return self.sequences.pool

    def begin(self, step: Step) -> None:
        """The next forward pass is `step`, of sequences that are not this object's; see `Handle.begin`."""
        self.sequences.current, self.sequences.columns = step, step.columns
        for layer in self._paged:
            layer.columns, layer.pending = 0, None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i continues what row beam_idx[i] holds."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, int64 or bool."""
        indices = torch.as_tensor(indices)
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, in place."""
        self._select([row for row in range(len(self.sequences.lengths)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove columns."""
        tokens_to_remove = int(tokens_to_remove)  # assisted generation counts in tensors
        if tokens_to_remove > 0:
            raise InvalidInput("crop takes minus the number of columns to remove", tokens_to_remove)
        self.sequences.crop(-tokens_to_remove)
        self._follow()

    def reset(self) -> None:
        """Forget everything."""
        self.sequences.reset()
        self._follow()

    def _select(self, rows: list[int]) -> None:
        if self.sequences.lengths:  # an empty cache has no rows yet, whatever their order
            self.sequences.select(rows)

    def _follow(self) -> None:
        for layer in self._paged:
            layer.columns, layer.pending = self.sequences.columns, None
