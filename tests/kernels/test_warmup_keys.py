"""What `octavo warmup` compiles is what the plug-ins of vLLM and SGLang launch: the keys by which Triton finds kernels.

Both run on a CPU, and the calls that reach a kernel are turned into launches on an H200.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.device import Device

from .compiled import launch_key, printed

H200 = Device.named("h200")
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
Calls = list[tuple[str, Any]]


def meta(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


@contextlib.contextmanager
def recorded() -> Iterator[Calls]:
    """The operations that reach a kernel, by name, with their calls."""
    from octavo import ops

    stock, calls = ops.kernel, []

    def kernel(backend: str, file: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append((file, arguments[0]))
            return stock(backend, file)(*arguments)

        return call

    ops.kernel = kernel  # type: ignore[assignment]
    try:
        yield calls
    finally:
        ops.kernel = stock


def launches(file: str, call: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """What `call` launches on an H200: label, kernel, arguments."""
    from octavo.kernels.gluon import decode, plan, prefill, prefill_plan
    from octavo.kernels.triton import append
    from octavo.kernels.triton import decode as triton_decode
    from octavo.kernels.triton import prefill as triton_prefill

    if file == "append":
        yield file, append._append, append.launch(call, H200)[0]
        return
    call, memory = replace(call, workspace=meta(1 << 28, torch.uint8)), meta(1 << 20, torch.int32)
    if not call.spec.fp8:
        if file == "decode":
            for kernel, _, arguments in triton_decode.launches(call, H200):
                yield kernel.__name__, kernel, arguments
        else:
            yield file, triton_prefill.prefill_kernel, triton_prefill.launch(call, H200)[1]
        return
    batch = call.seq_lens.shape[0] if call.num_decodes is None else call.num_decodes
    capacity = call.page_table.shape[1] * call.spec.page_size
    if file == "decode":
        yield file, decode.decode_kernel, decode.launch(call, memory, H200)
        schedule = plan.schedule_of(call.spec, H200, batch, call.max_query_len, memory)
        on_gpu = call.seq_lens.to("meta")
        _, arguments = plan.launch(call.spec, on_gpu, call.query_starts, schedule, capacity, call.max_query_len)
        yield "plan", plan.plan_kernel, {**arguments, "seq_lens": call.seq_lens}
    else:
        yield file, prefill.prefill_kernel, prefill.launch(call, memory, H200)
        step = prefill_plan.Step(call.query_starts, call.seq_lens)
        _, arguments = prefill_plan.launch(call.spec, step, capacity, call.num_decodes, memory, H200)
        yield "prefill_plan", prefill_plan.plan_kernel, arguments


def keys_of(calls: Calls) -> dict[str, set[tuple[tuple[str, str], ...]]]:
    """Keys of all launches, by kernel."""
    found: dict[str, set[tuple[tuple[str, str], ...]]] = {}
    for file, call in calls:
        for label, kernel, arguments in launches(file, call):
            found.setdefault(label, set()).add(tuple(sorted(launch_key(kernel, arguments).items())))
    return found


def warmed(layout: str = "auto", **fields: Any) -> Calls:
    """The calls of `octavo warmup` for the model."""
    from octavo.choose import Choice, choose
    from octavo.cli.explain import plan
    from octavo.models import model_kinds
    from octavo.warmup import warm

    scale = fields.pop("softmax_scale", None)
    kind = model_kinds(MODEL, tp=1, name="model", layout="nhd", **fields).kinds[0]
    choice = plan(kind, H200, layout, "auto").outcome
    assert isinstance(choice, Choice)
    on_cpu = choose(replace(choice.spec, softmax_scale=scale), "cpu")
    with recorded() as calls:
        warm(on_cpu, "cpu", max_batch=8, max_query_tokens=256, max_context=256)
    return calls


def of_vllm(release: str, kv_cache_dtype: str = "fp8", drafts: int = 0) -> Calls:
    """The calls of vLLM's plug-in: a prompt, decodes, both, and drafts under verification."""
    from vllm_layers import Sequences, Vllm

    with pytest.MonkeyPatch.context() as patch, recorded() as calls:
        vllm = Vllm(patch, release, drafts=drafts)
        layer = vllm.layer(kv_cache_dtype=kv_cache_dtype)
        layer.impl.process_weights_after_loading(torch.bfloat16)
        builder, sequences = vllm.builder(layer), Sequences(layer)
        for rows in ([50, 20, 64], [1, 1, 1], [1, 30, 33], [1 + drafts] * 3, [1, 0, 2]):
            sequences.step(vllm, builder, rows)
    return calls


def of_sglang(dtype: torch.dtype, scaled: bool = False) -> Calls:
    """The calls of SGLang's plug-in: prompts, decodes, both."""
    import sglang_stand_in as stand_in
    from sglang_served import Served, publish_options, radix, runner_of

    with stand_in.present(), pytest.MonkeyPatch.context() as patch, recorded() as calls:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        from octavo.integrations._sglang_backend import OctavoAttentionBackend

        publish_options(patch)
        layer = radix()
        if scaled:
            layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(1.0), False) for _ in "kv")
        served = Served(OctavoAttentionBackend(runner_of(layer, dtype=dtype), "fast"), layer)
        for mode, counts in (
            (ForwardMode.EXTEND, (5, 70, 130)),
            (ForwardMode.DECODE, (1, 1, 1)),
            (ForwardMode.MIXED, (7, 1, 40)),
        ):
            served.run(mode, counts)
    return calls


PAGES_OF_VLLM = {"page_size": 32, "softmax_scale": 0.2}  # the tests' own
CASES: dict[str, tuple[Callable[[], Calls], dict[str, Any]]] = {}
for release in ("0.26", "0.33"):
    fp8 = {"kv_dtype": "fp8_e4m3", **PAGES_OF_VLLM}
    CASES[f"vllm {release}, fp8"] = (lambda release=release: of_vllm(release), fp8)
    CASES[f"vllm {release}, fp8, 3 drafts"] = (
        lambda release=release: of_vllm(release, drafts=3),
        {**fp8, "max_query_len": 4},
    )
    CASES[f"vllm {release}, 16 bits"] = (
        lambda release=release: of_vllm(release, "auto"),
        {"kv_dtype": "bfloat16", "layout": "hnd", **PAGES_OF_VLLM},
    )
CASES |= {
    "sglang, fp8": (lambda: of_sglang(torch.float8_e4m3fn), {"kv_dtype": "fp8_e4m3"}),
    "sglang, fp8, scales": (lambda: of_sglang(torch.float8_e4m3fn, scaled=True), {"kv_dtype": "fp8_e4m3"}),
    "sglang, 16 bits": (lambda: of_sglang(torch.bfloat16), {"kv_dtype": "bfloat16"}),
}


def compare_all() -> None:
    """Print for each case and kernel how many keys the engine has, and how they differ from the nearest one warmed."""
    from octavo.testing.aot import _target

    for name, (engine, fields) in CASES.items():
        with _target(H200):
            calls = warmed(**fields)
            launched, compiled = keys_of(engine()), keys_of(calls)
            unscaled = keys_of([(file, call) for file, call in calls if call.cache.k_scale is None])
        missing = {
            kernel: [min(([*set(key) - set(other)] for other in compiled[kernel]), key=len) for key in keys]
            for kernel, all_keys in launched.items()
            if (keys := all_keys - compiled[kernel])
        }
        found = {kernel: len(keys) for kernel, keys in launched.items()}
        without = sorted(kernel for kernel, keys in launched.items() if not keys & unscaled[kernel])
        print(json.dumps([name, found, missing, without]), flush=True)


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return {name: rest for name, *rest in printed(__name__)}


@pytest.mark.parametrize("name", CASES)
def test_what_an_engine_launches_is_what_warming_up_compiles(compared, name):
    found, missing, _ = compared[name]
    assert {"append", "decode", "prefill"} <= {kernel.removesuffix("_kernel") for kernel in found}
    assert missing == {}


def test_scales_are_a_reason_to_compile(compared):
    """So a cache without them, which warming up had alone, warms nothing that vLLM launches but plans."""
    assert compared["vllm 0.33, fp8"][2] == ["append", "decode", "prefill"] == compared["sglang, fp8, scales"][2]
    assert compared["sglang, fp8"][2] == []


if __name__ == "__main__":
    compare_all()
