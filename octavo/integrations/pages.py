"""Pages of a whole model and the sequences that own them: allocation, sharing, and what one forward pass writes where.

Every layer of a model holds the same tokens, so page p of each layer's cache belongs to the same sequence and one page
table serves all layers. Pages are shared whole (beams, repeated prompts); a shared page is copied before it is written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache import PagedCache
from ..errors import InvalidInput

FIRST_PAGES = 16  # pages of a pool that grows by doubling


class PagePool:
    """One PagedCache per layer and the reference counts of their common pages.

    Args:
        make: make(layer, num_pages) -> that layer's PagedCache.
        num_layers: how many layers.
        num_pages: fixed size; None: starts small and doubles, copying the pages.
    """

    def __init__(self, make: Callable[[int, int], PagedCache], num_layers: int, num_pages: int | None) -> None:
        self._make = make
        self.growable = num_pages is None
        count = FIRST_PAGES if num_pages is None else num_pages
        self.caches = [make(layer, count) for layer in range(num_layers)]
        self.references = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """Pages of each layer's cache."""
        return len(self.references)

    @property
    def used_pages(self) -> int:
        """Pages that some sequence owns."""
        return self.num_pages - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages, owned once each. Raises InvalidInput where a fixed pool has too few."""
        if count > len(self._free):
            if not self.growable:
                raise InvalidInput(
                    f"enable(num_pages=...) must cover the tokens in use: {count} more pages were needed",
                    f"{len(self._free)} free of {self.num_pages}",
                )
            self._grow(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """One more owner for each of `pages`."""
        for page in pages:
            self.references[page] += 1

    def release(self, pages: list[int]) -> None:
        """One owner less for each of `pages`; a page without owners is free."""
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                self._free.append(page)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages in every layer, token_head scales included."""
        for cache in self.caches:
            _copy_pages(cache, cache, _host(sources), _host(targets))

    def _grow(self, needed: int) -> None:
        before = self.num_pages
        after = max(2 * before, before + needed)
        pages = _host(list(range(before)))
        for layer, cache in enumerate(self.caches):
            self.caches[layer] = self._make(layer, after)
            self.caches[layer].counters.copy_(cache.counters)
            _copy_pages(cache, self.caches[layer], pages, pages)
        self.references += [0] * (after - before)
        self._free += range(after - 1, before - 1, -1)


def _copy_pages(source: PagedCache, target: PagedCache, from_pages: torch.Tensor, to_pages: torch.Tensor) -> None:
    from_pages, to_pages = from_pages.to(source.device), to_pages.to(source.device)
    target.k[to_pages] = source.k[from_pages]
    if not source.spec.mla:  # an MLA value is a part of its key
        target.v[to_pages] = source.v[from_pages]
    if source.spec.fp8 and source.spec.scale_granularity == "token_head":
        for name in ("k_scale",) if source.spec.mla else ("k_scale", "v_scale"):
            getattr(target, name)[to_pages] = getattr(source, name)[from_pages]


@dataclass(frozen=True)
class Step:
    """What one forward pass of B rows of T new columns appends and attends, the same in every layer; on the device.

    Attributes:
        columns: width of the padded batch after this step.
        slots: int64 [B * T], -1 for padding.
        rows: int64 [n], the columns of B * T that hold tokens, or None where all do.
        seq_lens, page_table, query_starts: as Attention.plan takes them.
        counts, lengths: host copies of new tokens and of all tokens a row.
    """

    columns: int
    slots: torch.Tensor
    rows: torch.Tensor | None
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    counts: list[int]
    lengths: list[int]


class Sequences:
    """The rows of one batch: pages and number of stored tokens of each, and the width of the padded batch around them.

    Padding is never stored: a row's tokens lie at positions 0 .. of its pages, wherever its padding was.
    Pages go back to the pool when this object does.
    """

    def __init__(self, pool: PagePool, windowed: bool) -> None:
        self.pool = pool
        self.page_size = pool.caches[0].spec.page_size
        self.device = pool.caches[0].device
        self.windowed = windowed
        self.columns = 0
        self.lengths: list[int] = []
        self.owned: list[list[int]] = []
        self.current: Step | None = None
        self._dense = 0  # columns since the last one with padding
        self._ended: list[bool] = []  # rows whose last column was padding
        self._table = _empty_table(0, 1)
        self._device_table: torch.Tensor | None = None
        weakref.finalize(self, _release_all, pool, self.owned)

    def advance(self, batch: int, new_columns: int, valid: torch.Tensor | None, earlier: list[int] | None) -> Step:
        """Begin a forward pass: own the pages that its tokens need and say where they go.

        valid: bool [B, T] on the host, False for padding; None: no padding. earlier: per row, the tokens that the
        attention mask says the cache holds; checked. Raises InvalidInput, with nothing changed, for another batch size,
        another history, or tokens after padding where a window would count it.
        """
        if not self.lengths:
            self._begin(batch)
        if batch != len(self.lengths):
            raise InvalidInput(f"the cache holds {len(self.lengths)} sequences", f"a batch of {batch}")
        if earlier is not None and earlier != self.lengths:
            raise InvalidInput(f"attention_mask must show the {self.lengths} tokens that the cache holds", earlier)
        if valid is None:
            valid = torch.ones(batch, new_columns, dtype=torch.bool, device="cpu")
        self._check_padding(valid)
        counts = valid.sum(1)
        self._own(counts.tolist())
        order = valid.cumsum(1) - 1 + _host(self.lengths)[:, None]  # position of each token in its row
        pages = self._table.gather(1, (order // self.page_size).clamp_min(0)).to(torch.int64)
        slots = torch.where(valid, pages * self.page_size + order % self.page_size, -1)
        everything = bool(valid.all())
        self._dense = self._dense + new_columns if everything else _trailing_dense(valid)
        self._ended = [not last for last in valid[:, -1].tolist()]
        self.lengths = [have + new for have, new in zip(self.lengths, counts.tolist(), strict=True)]
        self.columns += new_columns
        if self._device_table is None:
            self._device_table = self._table.to(self.device)
        starts = torch.cat([_host([0]), counts.cumsum(0)])
        self.current = Step(
            columns=self.columns,
            slots=slots.flatten().to(self.device),
            rows=None if everything else valid.flatten().nonzero()[:, 0].to(self.device),
            seq_lens=_host(self.lengths).to(torch.int32).to(self.device),
            page_table=self._device_table,
            query_starts=starts.to(torch.int32).to(self.device),
            counts=counts.tolist(),
            lengths=list(self.lengths),
        )
        return self.current

    def select(self, rows: list[int]) -> None:
        """Row i becomes a copy of row rows[i]; pages are shared, not copied."""
        chosen = [list(self.owned[row]) for row in rows]
        for pages in chosen:
            self.pool.share(pages)
        for pages in self.owned:
            self.pool.release(pages)
        self.owned[:] = chosen
        self.lengths = [self.lengths[row] for row in rows]
        self._ended = [self._ended[row] for row in rows]
        self._table, self._device_table = self._table[rows], None

    def crop(self, columns: int) -> None:
        """Forget the last `columns` columns. Raises InvalidInput where one of them holds padding."""
        if columns > self._dense:
            raise InvalidInput(f"at most {self._dense} columns can be cropped: padding lies before them", columns)
        self.columns -= columns
        self._dense -= columns
        self.lengths = [length - columns for length in self.lengths]
        for row, length in enumerate(self.lengths):
            keep = -(-length // self.page_size)
            self.pool.release(self.owned[row][keep:])
            del self.owned[row][keep:]

    def reset(self) -> None:
        """Forget everything; the next forward pass may have another batch size."""
        _release_all(self.pool, self.owned)
        self.lengths, self.columns, self.current, self._dense = [], 0, None, 0

    def _begin(self, batch: int) -> None:
        self.lengths = [0] * batch
        self.owned[:] = [[] for _ in range(batch)]
        self._ended = [False] * batch
        self._table, self._device_table = _empty_table(batch, 1), None

    def _check_padding(self, valid: torch.Tensor) -> None:
        if not self.windowed:
            return
        shown = torch.cat([_host(self.lengths)[:, None] > 0, valid], dim=1)
        after = _host(self._ended) & valid.any(1) & (_host(self.lengths) > 0)
        inside = (shown[:, 1:] & (shown.cumsum(1) - shown.long())[:, 1:].gt(0) & ~shown[:, :-1]).any(1)
        # The first column of `shown` stands for the stored tokens, directly before the new columns.
        if bool((after | inside).any()):
            raise InvalidInput("padding must not lie between tokens where a layer has a window (pad on the left)")

    def _own(self, counts: list[int]) -> None:
        """Make each row own writable pages for its new tokens."""
        size, wanted = self.page_size, []
        shared: list[tuple[int, int]] = []  # (row, index) of a partly filled page with other owners
        claimed: dict[int, int] = {}
        for row, count in enumerate(counts):
            length = self.lengths[row]
            wanted.append(-(-(length + count) // size) - len(self.owned[row]) if count else 0)
            if count and length % size:
                page = self.owned[row][length // size]
                claimed[page] = claimed.get(page, 0) + 1
                if self.pool.references[page] - claimed[page] >= 1:  # the last owner that writes may keep it
                    shared.append((row, length // size))
        if not shared and not any(wanted):
            return
        fresh = self.pool.take(sum(wanted) + len(shared))
        sources, targets = [], []
        for row, index in shared:
            sources.append(self.owned[row][index])
            targets.append(fresh.pop())
            self.owned[row][index] = targets[-1]
        if shared:
            self.pool.copy(sources, targets)
            self.pool.release(sources)
        for row, count in enumerate(wanted):
            self.owned[row] += [fresh.pop() for _ in range(count)]
        self._write_table()

    def _write_table(self) -> None:
        widest = max(len(pages) for pages in self.owned)
        width = self._table.shape[1]
        if widest > width:  # by doubling, so that long generations rebuild it rarely
            width = max(widest, 2 * width)
        self._table = _empty_table(len(self.owned), width)
        for row, pages in enumerate(self.owned):
            self._table[row, : len(pages)] = _host(pages)
        self._device_table = None


def _host(values: list[int] | list[bool]) -> torch.Tensor:
    """1-D on the host, whatever torch's default device is."""
    return torch.tensor(
        values, dtype=torch.bool if values and isinstance(values[0], bool) else torch.int64, device="cpu"
    )


def _empty_table(rows: int, width: int) -> torch.Tensor:
    return torch.zeros(rows, width, dtype=torch.int32, device="cpu")


def _trailing_dense(valid: torch.Tensor) -> int:
    """How many of the last columns of bool [B, T] hold a token in every row."""
    return int(valid.all(0).flip(0).long().cumprod(0).sum())


def _release_all(pool: PagePool, owned: list[list[int]]) -> None:
    for pages in owned:
        pool.release(pages)
    owned.clear()
