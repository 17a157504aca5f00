"""What a fuzz compiles beforehand is what its examples launch on an H200: the keys by which Triton finds kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from octavo import AttentionSpec, Unsupported, choose
from octavo.device import Device
from octavo.testing import fuzz, fuzz_kernels
from octavo.testing.fuzz_device import BACKENDS, Pair

from .compiled import launch_key, printed
from .test_warmup_keys import meta, recorded

H200 = Device.named("h200")
Launch = tuple[str, Any, dict[str, Any]]  # label, kernel, arguments
Keys = set[tuple[str, tuple[tuple[str, str], ...]]]


def pairs_of(spec: AttentionSpec) -> set[Pair]:
    """Every pair of backends that runs the spec."""
    found = set()
    for name in BACKENDS:
        try:
            choice = choose(spec, H200, name)
        except Unsupported:
            continue
        found.add((choice.prefill.backend, choice.decode.backend))
    return found


def triton_launches(file: str, call: Any) -> Iterator[Launch]:
    from octavo.kernels.triton import decode, prefill

    if file == "prefill":
        yield "triton prefill", prefill.prefill_kernel, prefill.launch(call, H200)[1]
    else:
        for kernel, _, arguments in decode.launches(call, H200):
            yield f"triton {kernel.__name__}", kernel, arguments


def gluon_launches(file: str, call: Any) -> Iterator[Launch]:
    from octavo.kernels.gluon import decode, plan, prefill, prefill_plan

    memory, capacity = meta(1 << 20, torch.int32), call.page_table.shape[1] * call.spec.page_size
    sequences = call.seq_lens.shape[0]
    if file == "prefill":
        yield "gluon prefill", prefill.prefill_kernel, prefill.launch(call, memory, H200)
        if sequences:
            step = prefill_plan.Step(call.query_starts, call.seq_lens)
            _, arguments = prefill_plan.launch(call.spec, step, capacity, call.num_decodes, memory, H200)
            yield "gluon prefill_plan", prefill_plan.plan_kernel, arguments
    elif batch := sequences if call.num_decodes is None else call.num_decodes:
        yield "gluon decode", decode.decode_kernel, decode.launch(call, memory, H200)
        schedule = plan.schedule_of(call.spec, H200, batch, call.max_query_len, memory)
        on_gpu = call.seq_lens.to("meta")
        _, arguments = plan.launch(call.spec, on_gpu, call.query_starts, schedule, capacity, call.max_query_len)
        yield "gluon plan", plan.plan_kernel, {**arguments, "seq_lens": call.seq_lens}


def launches(example: fuzz.Example) -> Iterator[Launch]:
    """What the device's process launches for an example on an H200."""
    from octavo.kernels.triton import append

    with recorded() as calls:
        example.batch("cpu", 16).run("reference", **example.plan)
    for file, call in calls:
        if file == "append":
            if call.slots.shape[0]:
                yield "append", append._append, append.launch(call, H200)[0]
        elif call.q.shape[0]:
            call = replace(call, workspace=meta(1 << 28, torch.uint8))
            for pair in pairs_of(example.spec):
                by = gluon_launches if pair[file == "decode"] == "gluon" else triton_launches
                yield from by(file, call)


def keys_of(example: fuzz.Example) -> Keys:
    return {
        (label, tuple(sorted(launch_key(kernel, arguments).items()))) for label, kernel, arguments in launches(example)
    }


def launched_by_examples(spec: AttentionSpec) -> Keys:
    """Keys of what hypothesis makes up; more where there are more."""
    found: Keys = set()

    @seed(0)
    @settings(
        max_examples=20 if spec.max_query_len == 1 else 90,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(fuzz.examples(st.just(spec), most_tokens=70, most_rows=20))
    def run(example: fuzz.Example) -> None:
        found.update(keys_of(example))

    run()
    return found


def compare_all() -> None:
    """Print for each spec the labels of launches, how many keys are launched and compiled, which are launched alone."""
    from octavo.testing.aot import _target

    with _target(H200):
        for spec in fuzz.GPU_SPECS:
            launched, compiled = launched_by_examples(spec), set[Any]()
            for rows in range(1, spec.max_query_len + 1):
                for example in fuzz_kernels.classes(spec, rows):
                    compiled |= keys_of(example)
            missing = [
                [label, min(([*set(key) - set(other)] for name, other in compiled if name == label), key=len)]
                for label, key in launched - compiled
            ]
            labels = sorted({label for label, _ in launched})
            print(json.dumps([labels, len(launched), len(compiled), missing]), flush=True)


@pytest.fixture(scope="module")
def compared() -> list[Any]:
    return printed(__name__)


@pytest.mark.parametrize("index", range(len(fuzz.GPU_SPECS)))
def test_what_a_fuzz_launches_is_compiled_before_it(compared, index):
    labels, launched, compiled, missing = compared[index]
    assert missing == []
    assert {"append", "triton prefill", "triton decode_kernel", "triton merge_splits_kernel"} <= set(labels)
    assert compiled / 2 < launched <= compiled  # little is compiled that nothing launches


def test_every_pair_of_backends_has_tasks():
    tasks = fuzz_kernels.tasks()
    assert len({*tasks}) == len(tasks) and tasks[0].rows == 1
    for spec in fuzz.GPU_SPECS:
        assert {task.backend for task in tasks if task.spec == spec} == set(BACKENDS)
        assert max(task.rows for task in tasks if task.spec == spec) == spec.max_query_len


if __name__ == "__main__":
    compare_all()
