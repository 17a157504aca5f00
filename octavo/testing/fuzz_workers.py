"""A fuzz of one device by many processes: workers make examples up and judge them, one process runs them all.

A worker has a seed, and hypothesis in it draws, shrinks and prints as in any test. It makes a batch on the CPU, asks
the device's process (`fuzz_device`), and holds the cache to the reference's, bit for bit, and results to `bounds`.
Whatever becomes of a process, `run` ends in its time, and so has every process that it started.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ..bench.processes import processors
from . import bounds, fuzz
from .compare import CACHE, same_bytes
from .fuzz_device import Answer, Asked, Pair, Progress, Runner, Tensors, packed, receive, send, serve, unpacked
from .inputs import Batch

Ask = Callable[[Asked, Tensors], tuple[Answer, Tensors]]


def default_workers() -> int:
    """A core each, and one for the device's process; more than 15 would wait for it."""
    return max(1, min(15, processors() - 1))


@dataclass(frozen=True)
class Fuzz:
    """How much is fuzzed, by what.

    Attributes:
        examples: in all. workers: processes that make them. first_seed: worker n's seed is first_seed + n.
        seconds: after them nothing is asked any more; grace: seconds more, after them processes are ended.
        shrinking: seconds that a worker makes an example smaller that failed.
        runner: of the device's process. most_tokens, most_rows: of a sequence.
        every: examples after which the progress is told.
    """

    examples: int = 10_000
    workers: int = field(default_factory=default_workers)
    first_seed: int = 0
    seconds: float = 300.0
    grace: float = 15.0
    shrinking: float = 30.0
    runner: Runner = field(default_factory=Runner)
    most_tokens: int = 600
    most_rows: int = 150
    every: int = 1000

    def share(self, number: int) -> int:
        """Examples of a worker."""
        return self.examples // self.workers + (number < self.examples % self.workers)

    @property
    def strategy(self) -> st.SearchStrategy[fuzz.Example]:
        """What every worker draws from."""
        return fuzz.examples(st.sampled_from(fuzz.GPU_SPECS), self.most_tokens, self.most_rows)


@dataclass
class Report:
    """What a worker tells at its end.

    Attributes:
        examples: that were run and right. counts: results that were right, by pair of backends.
        failure: what hypothesis and the exception say. asking: the example that was asked for and not answered.
    """

    examples: int = 0
    counts: Counter[Pair] = field(default_factory=Counter)
    failure: str | None = None
    asking: str | None = None


@dataclass
class Outcome:
    """Of a fuzz: examples that are right, results that are, by pair of backends, what failed, the device's process."""

    examples: int = 0
    counts: Counter[Pair] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    seconds: float = 0.0


class CacheDiffers(AssertionError):
    """What was appended is not what the reference appends."""


class OutOfBounds(AssertionError):
    """A result is not within its limits."""


class NotRun(AssertionError):
    """Something was raised instead."""


def judge(example: fuzz.Example, ask: Ask) -> list[Pair]:
    """The pairs of backends that ran an example and are right, or an AssertionError that says what is wrong."""
    inputs, told = example.inputs(16), example.plan["num_decodes"]
    answer, there = ask(Asked(inputs.spec, inputs.num_pages, inputs.strided, example.plan), inputs.tensors)
    if answer.error is not None:
        raise NotRun(answer.error)
    here = inputs.batch()
    if example.shared:  # several sequences wrote to the same slots: whose bytes stay is not said
        take_over(here, there)
    if different := [name for name in CACHE if not same_bytes(there.get(name), getattr(here.cache, name))]:
        raise CacheDiffers(f"{', '.join(different)} of the cache, appended on {answer.device}")
    for n, pair in enumerate(answer.pairs):
        here.lse = there.get(f"lse {n}")
        if found := bounds.faults(here, there[f"out {n}"], pair, answer.device, told):
            raise OutOfBounds(f"prefill by {pair[0]}, decode by {pair[1]}: {'; '.join(found)}")
    return list(answer.pairs)


def take_over(batch: Batch, there: Tensors) -> None:
    """Give the batch's cache the bytes that were appended elsewhere."""
    for name in CACHE:
        if (to := getattr(batch.cache, name)) is not None:
            to.copy_(there[name])


def alone(runner: Runner) -> Ask:
    """Asks a runner in this process."""

    def ask(asked: Asked, tensors: Tensors) -> tuple[Answer, Tensors]:
        there = {name: tensor.to(runner.device) for name, tensor in tensors.items()}
        answer, made = runner.answer(asked, there)
        return answer, {name: tensor.cpu() for name, tensor in made.items()}

    return ask


def over(connection: Connection) -> Ask:
    """Asks the device's process."""

    def ask(asked: Asked, tensors: Tensors) -> tuple[Answer, Tensors]:
        send(connection, asked, *packed(tensors))
        answer, fields, buffer = receive(connection)
        return answer, unpacked(fields, buffer)

    return ask


class Worker:
    """Judges examples until the time is over, and knows what failed: hypothesis must find it again as it was."""

    def __init__(self, ask: Ask, until: float, shrinking: float) -> None:
        self.report = Report()
        self._ask, self._until, self._shrinking = ask, until, shrinking
        self._failed: dict[fuzz.Example, AssertionError] = {}

    def check(self, example: fuzz.Example) -> None:
        """Judge an example, if there is time and a device; raise what is wrong with it."""
        if example not in self._failed and self._goes_on():
            self._judge(example)
        if (error := self._failed.get(example)) is not None:
            raise type(error)(str(error))

    def _goes_on(self) -> bool:
        return self.report.asking is None and time.monotonic() < self._until

    def _judge(self, example: fuzz.Example) -> None:
        try:
            right = judge(example, self._ask)
        except (EOFError, OSError):
            self.report.asking = repr(example)
        except AssertionError as error:
            self._fails(example, error)
        except Exception:
            self._fails(example, NotRun(traceback.format_exc()))
        else:
            self.report.examples += 1
            self.report.counts.update(right)

    def _fails(self, example: fuzz.Example, error: AssertionError) -> None:
        if not self._failed:
            self._until = min(self._until, time.monotonic() + self._shrinking)
        self._failed[example] = error


def checked(plan: Fuzz, number: int, worker: Worker) -> Report:
    """Let hypothesis make a worker's share of examples; what it prints of one that fails is in the report."""

    @seed(plan.first_seed + number)
    @settings(
        max_examples=plan.share(number),
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),  # type: ignore[arg-type]
    )
    @given(plan.strategy)
    def check(example: fuzz.Example) -> None:
        worker.check(example)

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            check()
    except BaseException as error:
        said = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-3))
        worker.report.failure = f"{printed.getvalue()}{said}"
    return worker.report


def work(plan: Fuzz, number: int, until: float, asks: Connection, tells: Connection) -> None:
    """The process of a worker."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quiet()
    tells.send(checked(plan, number, Worker(over(asks), until, plan.shrinking)))


def hold(runner: Runner, asking: list[Connection], running: Any, tells: Connection, every: int) -> None:
    """The process of the device."""
    quiet()
    serve(runner, asking, running, tells, every)


def quiet() -> None:
    """One thread, and an interrupt is for the process that started this one: it ends all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


class _Processes:
    """The processes of a fuzz, and the ends of the pipes by which they tell."""

    def __init__(self, plan: Fuzz, until: float) -> None:
        context = multiprocessing.get_context("spawn")  # a GPU cannot be used after a fork
        asking = [context.Pipe() for _ in range(plan.workers)]
        reports = [context.Pipe(duplex=False) for _ in range(plan.workers)]
        self.progress, tells = context.Pipe(duplex=False)
        self.reports = [report for report, _ in reports]
        self.running = context.RawValue("i", -1)  # whose example runs
        given = (plan.runner, [end for _, end in asking], self.running, tells, plan.every)
        self.device = context.Process(target=hold, args=given, name="device", daemon=True)
        self.workers = [
            context.Process(target=work, args=(plan, n, until, asks, told), name=f"worker {n}", daemon=True)
            for n, ((asks, _), (_, told)) in enumerate(zip(asking, reports, strict=True))
        ]
        try:
            for process in (self.device, *self.workers):
                process.start()
        except BaseException:
            self.end()
            raise
        finally:  # with a copy here nobody would see that the process at an end is gone
            for end in (tells, *(end for ends in asking for end in ends), *(told for _, told in reports)):
                end.close()

    def end(self, wait_for: float = 0.0) -> None:
        """End every process, those that end by themselves in so many seconds aside."""
        until = time.monotonic() + wait_for
        for process in (*self.workers, self.device):
            if process.pid is not None:
                process.join(max(0.0, until - time.monotonic()))
                process.kill()
                process.join()


class _Listener:
    """What the processes of a fuzz told; what is wrong is said at once and kept, whatever becomes of the rest."""

    def __init__(self, plan: Fuzz, processes: _Processes, say: Callable[[str], None]) -> None:
        self._plan, self._processes, self._say = plan, processes, say
        self._pending: dict[Any, int] = dict(zip(processes.reports, range(plan.workers), strict=True))
        self._device_tells = True
        self._started = time.monotonic()
        self._unanswered: dict[int, str] = {}
        self.outcome = Outcome()

    def listen(self, until: float) -> bool:
        """Hear what is told until every worker's report is there or the time is over; whether all are there."""
        while self._pending:
            ends = [*self._pending, *([self._processes.progress] if self._device_tells else [])]
            ready = wait(ends, max(0.0, until - time.monotonic()))
            if not ready:
                return False
            for end in ready:
                if end is self._processes.progress:
                    self._hear_device()
                else:
                    self._hear_worker(end)
        while self._device_tells and self._processes.progress.poll(max(0.0, until - time.monotonic())):
            self._hear_device()
        return True

    def _hear_device(self) -> None:
        try:
            progress = self._processes.progress.recv()
        except (EOFError, OSError):
            self._device_tells = False
            return
        self.outcome.progress = progress
        seconds = time.monotonic() - self._started
        self._say(
            f"{progress.ran:,} run after {seconds:.1f} s, of which the device's process worked {progress.busy:.1f} s"
        )

    def _hear_worker(self, end: Any) -> None:
        number = self._pending.pop(end)
        try:
            report = end.recv()
        except (EOFError, OSError):
            process = self._processes.workers[number]
            process.join(1)
            self.fails(f"worker {number} died, exit code {process.exitcode}")
            return
        self.outcome.examples += report.examples
        self.outcome.counts.update(report.counts)
        if report.asking is not None:
            self._unanswered[number] = report.asking
        if report.failure is not None:
            seed, share = self._plan.first_seed + number, self._plan.share(number)
            self.fails(f"worker {number}, @seed({seed}), {share} examples:\n{report.failure}")

    def fails(self, what: str) -> None:
        """Say and keep what is wrong."""
        self.outcome.failures.append(what)
        self._say(what)

    def ends(self) -> Outcome:
        """The outcome, once every process has ended: with workers that told nothing, and what the device ended at."""
        for number in sorted(self._pending.values()):
            self.fails(f"worker {number} told nothing and was ended")
        code, lost = self._processes.device.exitcode, self.outcome.progress.lost
        if code or lost or self._unanswered:
            last = self._unanswered.get(self._processes.running.value, "of no worker")
            how = "lost the device" if lost else f"ended, exit code {code}"
            self.fails(f"the device's process {how}, at the example\n{last}\n{lost or ''}")
        self.outcome.seconds = time.monotonic() - self._started
        return self.outcome


def run(plan: Fuzz, say: Callable[[str], None] = print) -> Outcome:
    """Fuzz, and say how far it is; every process that is started has ended when it returns or raises."""
    until = time.monotonic() + plan.seconds
    processes = _Processes(plan, until)
    try:
        heard = _Listener(plan, processes, say)
        if not heard.listen(until + plan.grace):
            # A device that hangs answers nobody: once its process has ended, workers tell what they have.
            heard.fails(f"not all had ended {plan.grace:.0f} s after the limit of {plan.seconds:.0f} s")
            processes.device.kill()
            heard.listen(time.monotonic() + plan.grace)
        processes.end(wait_for=plan.grace)
        return heard.ends()
    finally:
        processes.end()
