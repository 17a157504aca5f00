"""The engine: one thread that takes requests in, runs step after step, and hands text out.

Everything of a sequence happens on that thread, so nothing here is locked but the door. What goes wrong with one
sequence ends that one: its neighbours' step is run again without it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import LEAVING
from ..notices import log
from .errors import INTERNAL, SHUTDOWN
from .metrics import Metrics
from .pages import PrefixPages
from .ranks import LeadingRunner
from .requests import Event, Sequence, TokenChoice
from .runner import Batch, Runner
from .sampling import choose_tokens
from .scheduler import Scheduler, Share
from .text import TextStream

News = list[tuple[Sequence, Event]]

NOT_NUMBERS = "the model's logits are not finite numbers"


@dataclass(frozen=True)
class EngineOptions:
    """Bounds of an engine.

    Attributes:
        max_context: most tokens of a sequence, prompt and reply.
        max_batch: most sequences that run at once.
        step_tokens: most tokens of a step.
        max_waiting: most sequences that may queue.
        prefix_cache: whether finished sequences' pages are found again.
    """

    max_context: int
    max_batch: int = 64
    step_tokens: int = 2048
    max_waiting: int = 1024
    prefix_cache: bool = True


class Refused(Exception):
    """The engine takes no more requests, now or ever; the text is for the client."""


class Engine:
    """Continuous batching over one model.

    Args:
        runner: runs a batch. tokenizer: of the model.
        stop_tokens: ids that end a sequence.
        options: bounds.
        metrics: counted into.

    Attributes:
        post: called on the engine's thread with the news of a step; hands each Event to its sequence's `deliver`.
        shut: called, on any thread and maybe more than once, when no more requests are taken.
        failed: why the engine stopped by itself; None while it has not.
    """

    def __init__(
        self,
        runner: Runner | LeadingRunner,
        tokenizer: Any,
        stop_tokens: frozenset[int],
        options: EngineOptions,
        metrics: Metrics,
    ) -> None:
        self.runner, self.tokenizer, self.stop_tokens = runner, tokenizer, stop_tokens
        self.options, self.metrics = options, metrics
        self.pages = PrefixPages(runner.handle.pool, runner.page_size, options.prefix_cache)
        self.scheduler = Scheduler(self.pages, options.max_batch, options.step_tokens)
        self.post: Callable[[News], None] = hand_out
        self.shut: Callable[[], None] = lambda: None
        self.failed: str | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._incoming = 0  # sequences in the inbox
        self._open = True
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._loop, name="octavo-engine", daemon=True)
        metrics.watch(self)

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    @property
    def accepting(self) -> bool:
        """Whether `submit` may succeed."""
        return self._open

    @property
    def why_shut(self) -> str:
        """Why no more requests are taken, where they are not."""
        return self.failed or SHUTDOWN

    @property
    def waiting(self) -> int:
        """Sequences that queue, the ones just submitted included."""
        return len(self.scheduler.waiting) + self._incoming

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue them, all or none. Raises Refused when shutting down or the queue is full; callable from any thread."""
        with self._door:
            if not self._open:
                raise Refused(self.why_shut)
            if self.waiting + len(sequences) > self.options.max_waiting:
                raise Refused(f"{self.options.max_waiting} requests are waiting already; try again later")
            self._incoming += len(sequences)
            self._inbox.put(lambda: self._add(sequences))

    def cancel(self, sequences: list[Sequence]) -> None:
        """Forget those that are not done; no further Event of them is handed out. Callable from any thread."""
        self._inbox.put(lambda: self._cancel(sequences))

    def drain(self, seconds: float) -> None:
        """Take no more requests; finish what there is within `seconds`, end the rest with an error. Does not wait.

        Called again it may leave less time, never more.
        """
        deadline = time.monotonic() + seconds
        with self._door:
            self._open = False
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._inbox.put(None)
        self._say_shut()

    def close(self) -> None:
        """End what is left with an error, and the thread."""
        self.drain(0)
        if self._thread.ident is not None:
            self._thread.join()

    def _loop(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.set_device(self.runner.device)  # a thread starts on device 0
        try:
            while True:
                self._take_in()
                if self._deadline is not None and not (self.scheduler.busy and time.monotonic() < self._deadline):
                    break
                if self.scheduler.busy:
                    self._step()
        except BaseException as error:  # a broken device: every later step would fail alike
            log.exception("the engine stopped")
            self.failed = f"the engine stopped: {type(error).__name__}"
        finally:
            with self._door:
                self._open = False
            self._say_shut()
            while not self._inbox.empty():
                self._take_in()
            left = [*self.scheduler.running, *self.scheduler.waiting]
            self._tell([(sequence, self._end(sequence, self.why_shut)) for sequence in left])
            if self.failed is None:
                self.runner.stop()

    def _take_in(self) -> None:
        """Do what was asked for; wait for it where there is nothing else to do."""
        block = not self.scheduler.busy and self._deadline is None
        while block or not self._inbox.empty():
            asked = self._inbox.get()
            block = False
            if asked is not None:
                asked()

    def _add(self, sequences: list[Sequence]) -> None:
        with self._door:  # so that `submit` counts each once
            self._incoming -= len(sequences)
            for sequence in sequences:
                if not sequence.done:  # cancelled before it came in
                    sequence.text = TextStream(self.tokenizer, sequence.prompt, sequence.sampling.stop)
                    self.scheduler.add(sequence)

    def _cancel(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if not sequence.done:
                sequence.done = True
                self.scheduler.remove(sequence)
                self.metrics.ended(sequence, "cancelled")

    def _step(self) -> None:
        shares = self.scheduler.plan()
        if not shares:
            raise RuntimeError(f"no step for {len(self.scheduler.waiting)} waiting sequences")
        started = time.perf_counter()
        try:
            chosen, failed = self._run(shares), []
        except LEAVING:
            raise
        except BaseException:
            if not self.runner.alone:
                raise
            log.exception("a step of %d sequences failed; each is run alone", len(shares))
            chosen, failed = self._run_apart(shares)
        news = [(sequence, self._end(sequence, INTERNAL)) for sequence in failed]
        for sequence, choice in chosen:
            event = self._advance(sequence, choice)
            if event.text or event.tokens or event.last:
                news.append((sequence, event))
        self.metrics.stepped(time.perf_counter() - started, shares, self.scheduler.preemptions)
        self._tell(news)

    def _run(self, shares: list[Share]) -> list[tuple[Sequence, TokenChoice | None]]:
        logits = self.runner.run(Batch.of(shares, self.runner.page_size))
        sampled = [share.sequence for share in shares if share.samples]
        choices = choose_tokens(logits, sampled) if sampled else []
        for share in shares:
            self.scheduler.computed(share)
        return list(zip(sampled, choices, strict=True))

    def _run_apart(self, shares: list[Share]) -> tuple[list[tuple[Sequence, TokenChoice | None]], list[Sequence]]:
        """(choices, sequences that fail alone too). Writing a token's keys and values twice writes the same bytes."""
        chosen: list[tuple[Sequence, TokenChoice | None]] = []
        failed: list[Sequence] = []
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()  # raises where the device itself is lost
        for share in shares:
            try:
                chosen += self._run([share])
            except LEAVING:
                raise
            except BaseException:
                log.exception("a request failed")
                failed.append(share.sequence)
        return chosen, failed

    def _advance(self, sequence: Sequence, choice: TokenChoice | None) -> Event:
        """Take a chosen token in; the news of it."""
        sampling, text = sequence.sampling, sequence.text
        if choice is None or text is None:
            return self._end(sequence, NOT_NUMBERS)
        try:
            sequence.tokens.append(choice.token)
            sequence.counts[choice.token] = sequence.counts.get(choice.token, 0) + 1
            self.metrics.token(sequence)
            if choice.token in self.stop_tokens and not sampling.ignore_eos:
                return self._finish(sequence, text.finish(), (), "stop")
            new = text.push(choice.token)
            shown = () if sampling.logprobs is None else (choice,)
            if text.stopped:
                return self._finish(sequence, new, shown, "stop")
            if sequence.new_tokens >= sampling.max_tokens:
                new += text.finish()  # the first bytes of a character are shown now, and may end a stop string
                return self._finish(sequence, new, shown, "stop" if text.stopped else "length")
            return sequence.event(new, shown)
        except LEAVING:
            raise
        except BaseException:
            log.exception("a request failed")
            return self._end(sequence, INTERNAL)

    def _finish(self, sequence: Sequence, text: str, shown: tuple[TokenChoice, ...], why: str) -> Event:
        sequence.done = True
        self.scheduler.remove(sequence)
        self.metrics.ended(sequence, why)
        return sequence.event(text, shown, why)

    def _end(self, sequence: Sequence, error: str) -> Event:
        sequence.done = True
        self.scheduler.remove(sequence)
        self.metrics.ended(sequence, "error")
        return sequence.failure(error)

    def _say_shut(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop that listened is closed
            self.shut()

    def _tell(self, news: News) -> None:
        if not news:
            return
        try:
            self.post(news)
        except RuntimeError as error:  # the event loop that listened is closed: nobody is left to tell
            log.warning("news of %d requests could not be delivered: %s", len(news), error)


def hand_out(news: News) -> None:
    """Give each Event to its sequence's `deliver`."""
    for sequence, event in news:
        sequence.deliver(event)
