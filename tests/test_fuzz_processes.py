"""The fuzz of one device by many processes, on a CPU with the reference as the only backend; and that nothing hangs."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, reproduce_failure, settings

from octavo.testing import fuzz, fuzz_kernels
from octavo.testing.fuzz_device import Runner, packed, serve, unpacked
from octavo.testing.fuzz_workers import (
    CacheDiffers,
    Fuzz,
    NotRun,
    OutOfBounds,
    Worker,
    alone,
    checked,
    judge,
    over,
    run,
)

REFERENCE = ("reference",)
SMALL = Fuzz(
    examples=30, workers=1, seconds=60, grace=2, shrinking=3, runner=Runner("cpu", REFERENCE), most_tokens=90, every=10
)
LONG = 40  # tokens


@dataclass
class Faulty(Runner):
    """Goes wrong with more than LONG tokens: raises, loses the device, hangs, or changes the last byte of a tensor."""

    device: str = "cpu"
    backends: tuple[str | None, ...] = REFERENCE
    fault: str = ""

    def answer(self, asked, tensors):
        long = tensors["k"].shape[0] > LONG
        if long and self.fault in ("raises", "loses"):
            raise RuntimeError("something of the device")
        if long and self.fault == "hangs":
            time.sleep(1000)
        answer, made = super().answer(asked, tensors)
        if long and self.fault in made:
            made[self.fault] = made[self.fault].contiguous().clone()
            made[self.fault].view(torch.uint8).view(-1)[-1:] ^= 0x81
        return answer, made

    def lost(self):
        return self.fault == "loses"


@contextlib.contextmanager
def served(runner: Runner, every: int = 1000) -> Iterator[tuple]:
    """A device's process as a thread: how to ask it, whose example runs, and what it told once it has ended."""
    context = multiprocessing.get_context("spawn")
    (ours, theirs), (told, tells) = context.Pipe(), context.Pipe(duplex=False)
    running, progress = context.RawValue("i", -1), []

    def serving():
        serve(runner, [theirs], running, tells, every)
        theirs.close()

    thread = threading.Thread(target=serving, daemon=True)
    thread.start()
    try:
        yield over(ours), running, progress
    finally:
        ours.close()
        thread.join(20)
        assert not thread.is_alive()
        while told.poll():
            progress.append(told.recv())


def fuzzed(runner: Runner, plan: Fuzz = SMALL):
    """The report of one worker, and what the device's process told last."""
    with served(runner, plan.every) as (ask, running, progress):
        report = checked(plan, 0, Worker(ask, time.monotonic() + plan.seconds, plan.shrinking))
    return report, progress, running.value


def long_example(**changes) -> fuzz.Example:
    return fuzz.Example(replace(fuzz.GPU_SPECS[1], **changes), ((50, 1),), ((70, 5),))


def test_every_bit_of_a_tensor_arrives():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (3, 4, 8), generator=generator, dtype=torch.uint8)
    sent = {
        **{str(dtype): bits.view(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn)},
        "transposed": bits.view(torch.float16).transpose(0, 1),
        "one": torch.tensor(float("nan")),
        "none": torch.empty(0, 3, 5, dtype=torch.bfloat16),
        "last": bits[0, :1, :3],
    }
    fields, buffer = packed(sent)
    came = unpacked(fields, buffer.clone())
    assert list(came) == list(sent)
    for name, tensor in sent.items():
        assert came[name].dtype == tensor.dtype and came[name].shape == tensor.shape
        assert came[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
    starts = [start for *_, start in fields]
    assert starts == sorted(starts) and all(start % 256 == 0 for start in starts)


def test_an_example_is_judged_over_a_connection_as_in_one_process():
    with served(Runner("cpu", REFERENCE)) as (ask, _, _):
        for spec in fuzz.GPU_SPECS:
            for shared in (False, True):
                example = fuzz.Example(spec, ((50, 1),), ((70, 5),), shared=shared, holes=True, strided=True)
                assert judge(example, ask) == judge(example, alone(Runner("cpu", REFERENCE))) == [REFERENCE * 2]


@pytest.mark.parametrize("fault", ["k", "v", "k_scale", "v_scale"])
def test_a_byte_of_the_cache_that_is_wrong_is_seen(fault):
    with pytest.raises(CacheDiffers, match=f"^{fault} of the cache"):
        judge(long_example(scale_granularity="token_head"), alone(Faulty(fault=fault)))


@pytest.mark.parametrize("fault", ["out 0", "lse 0"])
def test_a_result_that_is_wrong_is_seen(fault):
    with pytest.raises(OutOfBounds, match=f"by reference, decode by reference: {fault.split()[0]}"):
        judge(long_example(), alone(Faulty(fault=fault)))


def test_what_fails_is_made_smaller_and_can_be_repeated():
    report, progress, _ = fuzzed(Faulty(fault="out 0"), replace(SMALL, shrinking=20))
    assert report.failure is not None and "OutOfBounds: prefill by reference" in report.failure
    assert "example=Example(spec=AttentionSpec(" in report.failure and "seed=0)" in report.failure
    assert progress[-1].ran > report.examples + 20
    version, blob = re.search(r"@reproduce_failure\('(.+?)', (b'.+?')\)", report.failure).groups()

    @reproduce_failure(version, ast.literal_eval(blob))
    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(SMALL.strategy)
    def again(example):
        judge(example, alone(Faulty(fault="out 0")))

    with pytest.raises(OutOfBounds):
        again()


def test_what_is_raised_at_the_device_is_a_failure_of_that_example_alone():
    with served(Faulty(fault="raises")) as (ask, _, progress):
        with pytest.raises(NotRun, match="in answer\n(.*\n)+RuntimeError: something of the device"):
            judge(long_example(), ask)
        assert judge(fuzz.Example(fuzz.GPU_SPECS[0], ((LONG, 1),)), ask) == [REFERENCE * 2]
    assert progress[-1].ran == 2 and progress[-1].lost is None


def test_a_lost_device_ends_the_asking_and_is_told():
    report, progress, running = fuzzed(Faulty(fault="loses"))
    assert report.failure is None and report.examples < 30
    assert report.asking is not None and report.asking.startswith("Example(") and running == 0
    assert progress[-1].lost is not None and "something of the device" in progress[-1].lost


def test_a_class_of_calls_is_run_before_a_fuzz():
    spec = fuzz.GPU_SPECS[4]
    rows = [fuzz_kernels.classes(spec, n) for n in (1, 2)]
    assert [len(list(found)) for found in rows] == [4, 4]
    done = fuzz_kernels.compile_task(fuzz_kernels.Task(spec, "reference", 2), torch.device("cpu"))
    assert done.failures == [] and done.seconds > 0
    assert fuzz_kernels.compile_task(fuzz_kernels.Task(spec, "triton", 1), torch.device("cpu")).seconds == 0


def test_classes_that_cannot_be_run_in_time_are_told():
    whole = fuzz_kernels.compile_all(jobs=1, seconds=0, device="cpu")
    assert whole.compiled == 0 and re.fullmatch(r"(\d+) of \1 tasks were not done after 0 s", *whole.failures)


def children() -> list[str]:
    return [process.name for process in multiprocessing.active_children()]


def test_processes_share_the_examples_out_and_one_that_dies_is_seen():
    """The first of two workers is killed at the first word of the device's process; the other does its share."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        for process in multiprocessing.active_children():
            if process.name == "worker 0" and len(said) == 1:
                process.kill()

    plan = replace(SMALL, examples=81, workers=2)
    assert [plan.share(n) for n in range(2)] == [41, 40]
    outcome = run(plan, say)
    assert outcome.failures == ["worker 0 died, exit code -9"] and said.count(outcome.failures[0]) == 1
    assert outcome.examples == 40 == outcome.counts[REFERENCE * 2] and outcome.progress.ran >= 40
    assert re.match(r"10 run after \d+\.\d s, of which the device's process worked \d+\.\d s", said[0])
    assert children() == []


def test_a_device_that_hangs_ends_with_the_time():
    started = time.monotonic()
    outcome = run(replace(SMALL, runner=Faulty(fault="hangs"), seconds=7, grace=1), lambda line: None)
    assert time.monotonic() - started < 14
    late, why = outcome.failures
    assert re.match(r"the device's process ended, exit code -9, at the example\nExample\(spec=", why)
    assert late == "not all had ended 1 s after the limit of 7 s"
    assert outcome.examples < 30 and children() == []


def test_time_that_is_over_ends_the_asking():
    worker = Worker(alone(Runner("cpu", REFERENCE)), time.monotonic() - 1, 1)
    assert checked(SMALL, 0, worker).examples == 0 and worker.report.failure is None
