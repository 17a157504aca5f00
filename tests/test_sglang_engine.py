"""A real SGLang engine with octavo on a CPU, where SGLang is installed: against exact models, beside its own backend.

Chunked prefill beside decodes, a prefix that is found again, and greedy generation; a window and a softcap in gemma2.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_engine
import sglang_stand_in as stand_in
import torch

from octavo.bench.engines import same_bytes
from octavo.formats import TORCH_DTYPES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not stand_in.INSTALLED, reason="SGLang is not installed")]
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    sglang_engine.write_checkpoint(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def native(checkpoint):
    """SGLang's own backend for CPUs, with a cache in the model's bfloat16."""
    return generate(checkpoint, "torch_native", "bfloat16", "auto")


def generate(folder, backend, dtype, kv_cache_dtype):
    """What sglang_engine.py found in a process of its own, which knows of octavo as an installed plug-in."""
    info = folder / "plugin" / "octavo-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo\nVersion: 0\n")
    entry = same_bytes.ENTRY if backend in same_bytes.NAMES else "octavo.integrations.sglang:register"
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\noctavo = {entry}\n")
    places = [str(info.parent), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "sglang_engine.py"), str(folder), backend, dtype, kv_cache_dtype, str(port)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    said = done.stdout + done.stderr
    if not found and ("CPU FP8 KV cache requires" in said or f"{kv_cache_dtype} is not supported on CPU" in said):
        pytest.skip("this SGLang has FP8 caches on a CPU for its own backend only")
    assert found, done.stderr[-3000:]
    return json.loads(found[0].removeprefix("RESULT "))


def exact(folder, kept=None):
    """Log-probabilities of the last prompt's tokens: the model in fp32, on keys and values rounded to `kept`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    code = sys.modules[type(model).__module__]
    eager = code.eager_attention_forward

    def rounded(module, query, key, value, *args, **kwargs):
        key, value = (x.to(kept).float() for x in (key, value))
        return eager(module, query, key, value, *args, **kwargs)

    ids = torch.tensor([sglang_engine.prompts()[-1]])
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        if kept is not None:
            patch.setattr(code, "eager_attention_forward", rounded)
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, ids[0, 1:, None])[:, 0]


def error(found, expected):
    return (torch.tensor(found["logprobs"]) - expected).abs().mean().item()


def test_a_16_bit_cache_is_as_exact_as_sglangs_own_backend(checkpoint, native):
    found = generate(checkpoint, "octavo", "bfloat16", "auto")
    expected = exact(checkpoint)
    assert expected.std() > 0.5, "a model that says something"
    assert error(found, expected) <= 1.1 * error(native, expected)
    assert found["cached"] == native["cached"] and found["cached"][1] >= 128
    assert found["tokens"][0][0] == native["tokens"][0][0]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_cache_is_exact_over_what_it_keeps(checkpoint, kv_cache_dtype):
    """With layers in fp32 the engine's numbers are those of the model whose keys and values are rounded to FP8.

    Hardly any rounds the other way then: what is left is a hundredth of what the format itself costs.
    """
    found = generate(checkpoint, "octavo", "float32", kv_cache_dtype)
    over_fp8, plain = exact(checkpoint, TORCH_DTYPES[kv_cache_dtype]), exact(checkpoint)
    assert error(found, over_fp8) < 0.01 * (over_fp8 - plain).abs().mean()
    assert all(len(tokens) == 6 for tokens in found["tokens"]) and found["cached"][1] >= 128


def test_a_prompt_that_is_read_twice_is_scored_the_same_over_the_same_bytes(checkpoint):
    """On a CPU octavo is exact itself: in fp32 the two readings agree, over bytes that cost something."""
    found = generate(checkpoint, "same-bytes-exact", "float32", "fp8_e4m3")
    over_fp8, plain = (exact(checkpoint, kept)[:132].mean() for kept in (torch.float8_e4m3fn, None))
    assert found["scored_tokens"] == 3 * 132 and 0 < found["token_deviation"] < 1e-4
    cost = abs(over_fp8 - plain).item()
    assert abs(found["exact_window_losses"][2] + over_fp8.item()) < 0.05 * cost
