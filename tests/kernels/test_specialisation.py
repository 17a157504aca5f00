"""What a launch is compiled for: nothing that changes from one step to the next, unless a rule says so.

Triton compiles again for an integer that becomes 1, or a multiple of 16, or neither, and a request waits for that.
`do_not_specialize` forbids it of an argument, and not of what is inside a tuple. So the keys by which Triton finds a
compiled kernel are compared here, made by its own binder for launches that only differ in such numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from octavo.calls import AttentionCall
from octavo.device import Device
from octavo.indexer_calls import SCALE_BYTES, IndexAppendCall, IndexBytes, LogitsCall, PagedLogitsCall
from octavo.spec import AttentionSpec

from .compiled import launch_key, printed

H200 = Device.named("h200")
Launch = tuple[Any, dict[str, Any]]  # a kernel and the arguments it is launched with
STEPS = tuple(
    (batch, pages, width)
    for batch in (1, 15, 16, 17, 64, 300)
    for pages, width in ((1, 1), (16, 16), (100, 100), (8515, 2048))
)
ROWS = (1, 2, 15, 16, 17, 100, 1000, 8192)

# What a kernel is compiled for though it may change from step to step, and by which rule: constants of classes of
# shapes. `c` stands for each field of a kernel's constants.
ALLOWED: dict[str, dict[str, str]] = {
    "gluon decode": {"c.all_decode": "whether rows of no sequence are decode's to write"},
    "gluon plan": {"SEQUENCES": "the power of two above the batch", "num_warps": "follows SEQUENCES"},
    "gluon paged_mqa_logits": {
        "c.tile": "small where there are few tokens in all",
        "c.stages": "follows tile",
        "c.scan": "the power of two above the blocks of rows",
    },
    "gluon mqa_logits": {"c.scan": "the power of two above the blocks of rows"},
    "triton append": {
        "c.few": "small tiles where large ones are too few",
        **{name: "follows few" for name in ("c.rows", "c.block", "c.num_warps", "num_warps")},
    },
    "triton index_append": {
        "c.rows": "4 where there are few",
        **{name: "follows rows" for name in ("c.num_warps", "num_warps")},
    },
    "triton mqa_logits": {
        "c.rows": "those that share a tile of keys: 1 where there is no more",
        "c.programs_per_sm": "follows rows",
    },
    "triton topk": {
        **{name: "by octavo.kernels.triton._select.plan" for name in ("c", "kernel", "num_warps", "maxnreg")},
        "row_stride": "rows that begin at multiples of 16 bytes are read so many at a time",
    },
}


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_call(spec: AttentionSpec, batch: int, pages: int, width: int, more: int = 0) -> AttentionCall:
    """A step of `batch` decodes over a cache of `pages` pages, and with `more` a sequence of so many rows."""
    from octavo.kernels.gluon._aot import example_call

    rows, sequences = batch * spec.max_query_len + more, batch + (more > 0)
    return replace(
        example_call(spec, sequences, pages),
        q=meta(rows, spec.num_q_heads, spec.head_dim, dtype=torch.bfloat16),
        out=meta(rows, spec.num_q_heads, spec.value_dim, dtype=torch.bfloat16),
        page_table=meta(sequences, width),
        num_decodes=batch,
        max_query_len=max(more, spec.max_query_len),
    )


LLAMA = AttentionSpec(32, 8, 128)
NHD = AttentionSpec(32, 8, 128, layout="nhd")
ATTENTION = ("decode", "merge of splits", "prefill", "append")


def attention_launches() -> Iterator[tuple[str, Launch]]:
    from octavo.kernels.gluon import decode, plan, prefill, prefill_plan
    from octavo.kernels.triton import decode as triton_decode
    from octavo.kernels.triton import prefill as triton_prefill

    memory = meta(1 << 20)
    for batch, pages, width in STEPS:
        for more in (0, 17, 8192):
            call = attention_call(LLAMA, batch, pages, width, more)
            capacity = width * LLAMA.page_size
            yield "gluon decode", (decode.decode_kernel, decode.launch(call, memory, H200))
            schedule = plan.schedule_of(LLAMA, H200, batch, 1, memory)
            _, arguments = plan.launch(LLAMA, call.seq_lens, call.query_starts, schedule, capacity, 1)
            yield "gluon plan", (plan.plan_kernel, arguments)
            yield "gluon prefill", (prefill.prefill_kernel, prefill.launch(call, memory, H200))
            step = prefill_plan.Step(call.query_starts, call.seq_lens)
            _, arguments = prefill_plan.launch(LLAMA, step, capacity, batch, memory, H200)
            yield "gluon prefill_plan", (prefill_plan.plan_kernel, arguments)
            for spec in (LLAMA, NHD):
                call = attention_call(spec, batch, pages, width, more)
                for kernel, _, arguments in triton_decode.launches(call, H200):
                    name = "decode" if kernel is triton_decode.decode_kernel else "merge of splits"
                    yield f"triton {name}, {spec.layout}", (kernel, arguments)
                arguments = triton_prefill.launch(call, H200)[1]
                yield f"triton prefill, {spec.layout}", (triton_prefill.prefill_kernel, arguments)


def cache_launches() -> Iterator[tuple[str, Launch]]:
    from octavo.kernels.triton import append, index_append, merge_states

    for rows in ROWS:
        for pages in (1, 16, 100):
            for spec in (LLAMA, NHD):
                call = append._example(spec, rows, torch.bfloat16, pages)
                yield f"triton append, {spec.layout}", (append._append, append.launch(call, H200)[0])
            index = IndexBytes(meta(pages, 64, 1, 128 + SCALE_BYTES, dtype=torch.uint8), "fp32")
            call = IndexAppendCall(meta(rows, 128, dtype=torch.bfloat16), meta(rows, dtype=torch.int64), index, meta(2))
            yield "triton index_append", (index_append.index_append_kernel, index_append.launch(call, H200)[0])
        outs, lses = meta(8, rows, 8, 128, dtype=torch.bfloat16), meta(8, rows, 8, dtype=torch.float32)
        arguments = merge_states.launch(outs, lses, outs[0], lses[0])
        yield "triton merge_states", (merge_states.merge_states_kernel, arguments)


def indexer_launches() -> Iterator[tuple[str, Launch]]:
    from octavo.kernels.gluon import mqa_logits
    from octavo.kernels.triton import mqa_logits as triton_mqa_logits
    from octavo.kernels.triton import topk

    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    for batch, pages, width in STEPS:
        for context in {1, 100, width * 64}:
            index = IndexBytes(meta(pages, 64, 1, 128 + SCALE_BYTES, dtype=torch.uint8), "fp32")
            q, weights, out = (
                meta(batch, 1, 64, 128, dtype=fp8),
                meta(batch, 64, dtype=fp32),
                meta(batch, context, dtype=fp32),
            )
            call = PagedLogitsCall(q, index, weights, meta(batch), meta(batch, width), context, out, None)
            arguments = mqa_logits.launch_paged(call, H200)
            arguments.pop("programs")
            yield "gluon paged_mqa_logits", (mqa_logits.mqa_logits_kernel, arguments)
            arguments, _ = triton_mqa_logits.paged_launch(call, H200)
            yield "triton paged_mqa_logits", (triton_mqa_logits.paged_mqa_logits_kernel, arguments)
    for rows in ROWS:
        for keys in (1, 16, 100, 8192):
            q, k, weights = meta(rows, 64, 128, dtype=fp8), meta(keys, 128, dtype=fp8), meta(rows, 64, dtype=fp32)
            ends, out = meta(rows), meta(rows, keys, dtype=fp32)
            call = LogitsCall(q, k, meta(keys, dtype=fp32), weights, ends, ends, out, None, False)
            arguments = mqa_logits.launch(call, H200)
            arguments.pop("programs")
            yield "gluon mqa_logits", (mqa_logits.mqa_logits_kernel, arguments)
            arguments, _ = triton_mqa_logits.ragged_launch(call, H200)
            yield "triton mqa_logits", (triton_mqa_logits.mqa_logits_kernel, arguments)
            for kernel, _, arguments in topk.launches(out, ends, meta(rows, 2048), H200):
                yield "triton topk", (kernel, arguments)


@triton.jit(do_not_specialize=["size"])
def careless(step, size):
    """A kernel that takes the same number in a tuple and as an argument."""


def compare_all() -> None:
    """Print for each kernel how many launches there were, and the arguments whose keys differ with those keys."""
    from octavo.testing.aot import _target

    keys: dict[str, list[dict[str, str]]] = {}
    with _target(H200):
        for make in (attention_launches, cache_launches, indexer_launches):
            for name, (kernel, arguments) in make():
                keys.setdefault(name, []).append(launch_key(kernel, arguments))
        keys["careless"] = [launch_key(careless, {"step": (n,), "size": n}) for n in (1, 15, 16, 17)]
    for name, found in keys.items():
        fields = {field for one in found for field in one}
        values = {field: sorted({one.get(field, "none") for one in found}) for field in sorted(fields)}
        print(json.dumps([name, len(found), {f: v for f, v in values.items() if len(v) > 1}]), flush=True)


@pytest.fixture(scope="module")
def compared() -> dict[str, tuple[int, dict[str, list[str]]]]:
    return {name: (launches, differ) for name, launches, differ in printed(__name__)}


@pytest.mark.parametrize(
    "name",
    [
        *(f"gluon {name}" for name in ("decode", "plan", "prefill", "prefill_plan", "paged_mqa_logits", "mqa_logits")),
        *(f"triton {name}, {layout}" for name in ATTENTION for layout in ("leaf", "nhd")),
        *(f"triton {name}" for name in ("index_append", "merge_states", "paged_mqa_logits", "mqa_logits", "topk")),
    ],
)
def test_nothing_is_compiled_for_one_step_alone(compared, name):
    launches, differ = compared[name]
    allowed = ALLOWED.get(name.split(",")[0], {})
    assert launches >= len(ROWS)
    assert {field: keys for field, keys in differ.items() if not {field, field.split(".")[0]} & set(allowed)} == {}


def test_the_check_sees_into_tuples(compared):
    """Triton does not: it was asked the same of both."""
    launches, differ = compared["careless"]
    assert launches == 4 and set(differ) == {"step"} and len(differ["step"]) == 3


if __name__ == "__main__":
    compare_all()
