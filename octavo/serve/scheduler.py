"""Who runs in the next step, with how many tokens, on which pages. Knows nothing of a model.

Every step first gives each sequence that is past its prompt its one token, then fills the step's budget with pieces of
prompts, first come first served. Where a sequence needs a page and there is none, the youngest one gives up its pages
and queues again, in front; what it had computed is computed anew (or found in the prefix cache). So the oldest always
moves, and none is lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .pages import PrefixPages
from .requests import Sequence


@dataclass(frozen=True)
class Share:
    """What one sequence gets of a step: the tokens [start, start + count) of it."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether a token can be chosen after it: nothing of the sequence is left to compute."""
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """The queue, the running sequences, and their pages.

    Args:
        pages: where sequences live.
        max_batch: most running sequences.
        step_tokens: most tokens of a step; at least max_batch, so that decodes always fit.
    """

    def __init__(self, pages: PrefixPages, max_batch: int, step_tokens: int) -> None:
        self.pages, self.max_batch = pages, max_batch
        self.step_tokens = max(step_tokens, max_batch)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue it."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget it, wherever it is, and free its pages. A removed one is left as it is."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pages.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def plan(self) -> list[Share]:
        """The shares of the next step, decodes (one token) first; their pages are owned. Empty: nothing to do."""
        decodes = self._decodes()
        budget = self.step_tokens - len(decodes)
        chunks = []
        for sequence in self.running:
            if sequence.remaining > 1 and budget > 0:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].count
        while budget > 0 and self._admit():
            chunks.append(self._chunk(self.running[-1], budget))
            budget -= chunks[-1].count
        shares = decodes + chunks
        shares.sort(key=lambda share: share.count > 1)  # the last piece of a prompt may be one token: a decode too
        return shares

    def computed(self, share: Share) -> None:
        """The cache now holds what `share` stood for."""
        sequence = share.sequence
        sequence.computed = share.start + share.count
        self.pages.keep(sequence, share.start)

    def _chunk(self, sequence: Sequence, budget: int) -> Share:
        return Share(sequence, sequence.computed, min(sequence.remaining, budget))

    def _decodes(self) -> list[Share]:
        """One token for each sequence that has one left, with room for it; the youngest make way for the others."""
        shares: list[Share] = []
        for sequence in list(self.running):
            # One that made way for an earlier one is no longer running, and had no turn yet.
            if sequence.remaining == 1 and sequence in self.running and self._make_room(sequence):
                shares.append(Share(sequence, sequence.computed, 1))
        return shares

    def _make_room(self, sequence: Sequence) -> bool:
        """Own the pages that its tokens need; False where it had to make way itself."""
        missing = self.pages.pages_for(len(sequence.tokens)) - len(sequence.pages)
        while missing > 0:
            taken = self.pages.take(missing)
            if taken is not None:
                sequence.pages += taken
                break
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self) -> bool:
        """Let the first that may run begin, with pages for all its tokens; False if none can."""
        if len(self.running) >= self.max_batch:
            return False
        sequence = next((s for s in self.waiting if not _waits_for_twin(s)), None)
        if sequence is None:
            return False
        found = self.pages.find(sequence)
        needed = self.pages.pages_for(len(sequence.tokens)) - len(found)
        self.pages.own(found)
        taken = self.pages.take(needed)
        sequence.pages = found
        if taken is None:
            self.pages.release(sequence)
            return False
        sequence.pages = found + taken
        sequence.computed = len(found) * self.pages.page_size
        if sequence.cached is None:
            sequence.cached = sequence.computed
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True


def _waits_for_twin(sequence: Sequence) -> bool:
    """Whether another sequence is about to compute the same prompt."""
    twin = sequence.after
    return twin is not None and not twin.done and twin.computed < len(twin.prompt)
