"""Pages of the running sequences, and of finished ones that a later prompt may begin with.

A full page is known by SHA-256 over its parent's digest and its tokens, so a digest stands for all tokens up to the
page's end. On a hit the tokens are compared as well: two prompts share memory because they are equal, not because their
digests are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from ..integrations.pages import PagePool
from .requests import Sequence

ROOT = hashlib.sha256(b"octavo prefix").digest()


def digest(parent: bytes, tokens: list[int]) -> bytes:
    """Of a page that holds `tokens` after the page with digest `parent` (ROOT: the first page)."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


@dataclass(frozen=True)
class Known:
    """A page in the prefix cache: where it is, and what it holds."""

    page: int
    tokens: tuple[int, ...]


class PrefixPages:
    """Hands out the pages of a pool; keeps those of finished sequences until their room is needed.

    pool: fixed in size. prefix_cache: whether pages are kept and found again.
    """

    def __init__(self, pool: PagePool, page_size: int, prefix_cache: bool = True) -> None:
        self.pool, self.page_size, self.prefix_cache = pool, page_size, prefix_cache
        self._known: dict[bytes, Known] = {}
        self._digest_of: dict[int, bytes] = {}  # by page
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages that no sequence owns, the oldest first

    @property
    def available(self) -> int:
        """Pages that `take` could hand out."""
        return self.pool.num_pages - self.pool.used_pages + len(self._idle)

    @property
    def in_use(self) -> int:
        """Pages that some sequence owns."""
        return self.pool.used_pages - len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None where there are not so many."""
        if count > self.available:
            return None
        free = self.pool.num_pages - self.pool.used_pages
        for _ in range(count - free):
            page, _ = self._idle.popitem(last=False)
            del self._known[self._digest_of.pop(page)]
            self.pool.release([page])
        return self.pool.take(count)

    def find(self, sequence: Sequence) -> list[int]:
        """Known pages that hold the beginning of its tokens, as many as leave one token to compute; not owned yet."""
        found: list[int] = []
        if not self.prefix_cache:
            return found
        for index in range((len(sequence.tokens) - 1) // self.page_size):
            known = self._known.get(self._digest(sequence, index))
            if known is None or known.tokens != tuple(self._tokens(sequence, index)):
                break
            found.append(known.page)
        return found

    def own(self, pages: list[int]) -> None:
        """One more owner for known `pages`, which `take` then leaves alone."""
        self.pool.share(pages)
        for page in pages:
            self._idle.pop(page, None)

    def keep(self, sequence: Sequence, computed_before: int) -> None:
        """Make the pages that it filled since it had computed so many tokens known; a page known elsewhere stays so."""
        if not self.prefix_cache:
            return
        for index in range(computed_before // self.page_size, sequence.computed // self.page_size):
            name, page = self._digest(sequence, index), sequence.pages[index]
            if name in self._known or page in self._digest_of:
                continue
            self._known[name] = Known(page, tuple(self._tokens(sequence, index)))
            self._digest_of[page] = name
            self.pool.share([page])

    def release(self, sequence: Sequence) -> None:
        """Take its pages back. A prefix outlives what follows it: of a sequence, the last page is given up first."""
        for page in reversed(sequence.pages):
            self.pool.release([page])
            if page in self._digest_of and self.pool.references[page] == 1:
                self._idle[page] = None
        sequence.pages, sequence.computed = [], 0

    def _tokens(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.tokens[index * self.page_size : (index + 1) * self.page_size]

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        while len(sequence.digests) <= index:
            parent = sequence.digests[-1] if sequence.digests else ROOT
            sequence.digests.append(digest(parent, self._tokens(sequence, len(sequence.digests))))
        return sequence.digests[index]
