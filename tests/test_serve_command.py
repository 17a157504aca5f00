"""The command `octavo serve`: options, the engines it hands over to, loading, ranks, and a real model end to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from serve_models import byte_tokenizer, generated, tiny_loaded
from transformers_models import tiny
from typer.testing import CliRunner

from octavo import InvalidInput, Unsupported
from octavo.cli.main import app
from octavo.integrations.transformers import enable
from octavo.quality import smollm2
from octavo.serve import handover, load, server
from octavo.serve.server import ServeOptions

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SCALES = torch.tensor([0.5, 2.0**-10])  # of two KV heads; the second one saturates the values beyond 0.44


def octavo(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["serve", *arguments])
    return done.exit_code, done.output


def test_vllm_is_started_with_octavo_and_its_own_arguments(monkeypatch):
    started = []
    monkeypatch.setattr(handover, "check_installed", lambda engine: None)
    monkeypatch.setattr(handover.os, "execve", lambda *call: started.append(call))
    octavo("org/model", "--engine", "vllm", "--tp", "2", "--port", "9", "--max-num-seqs", "7", "--enforce-eager")
    program, arguments, environment = started[0]
    assert program == arguments[0] == sys.executable and environment["VLLM_PLUGINS"] == "octavo"
    assert arguments[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "org/model"]
    found = dict(zip(arguments[5::2], arguments[6::2], strict=False))
    assert found["--attention-backend"] == "CUSTOM" and found["--kv-cache-dtype"] == "fp8_e4m3"
    assert found["--tensor-parallel-size"] == "2" and found["--port"] == "9" and found["--host"] == "127.0.0.1"
    assert arguments[-3:] == ["--max-num-seqs", "7", "--enforce-eager"]


def test_sglang_is_started_with_octavo_and_a_shell_reads_nothing(monkeypatch):
    model = "m; rm -rf $(pwd)"
    arguments, variables = handover.command("sglang", model, "bf16", 1, "127.0.0.1", 8, ["--mem-fraction-static", ".5"])
    assert arguments[:4] == ["-m", "sglang.launch_server", "--model-path", model] and variables == {}
    found = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert found["--attention-backend"] == "octavo" and found["--page-size"] == "64"
    assert found["--kv-cache-dtype"] == "bf16" and found["--mem-fraction-static"] == ".5"
    with pytest.raises(InvalidInput, match="float16"):
        handover.command("sglang", model, "float16", 1, "127.0.0.1", 8, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["org/model", "--engine", "tgi"], "transformers, vllm, sglang"),
        (["org/model", "--max-num-seqs", "7"], "--max-num-seqs 7"),
        (["a/b/c/d"], "hub id"),
        (["./nowhere"], "hub id"),
        (["./nowhere.gguf"], "no such file"),
        (["org/model", "--api-key-file", "nowhere"], "--api-key-file"),
        (["org/model", "--device", "tpu"], "--device"),
        (["org/model", "--drain-seconds", "inf"], "--drain-seconds must be a finite number"),
        (["org/model", "--drain-seconds", "nan"], "--drain-seconds"),
        (["org/model", "--host", ".."], "--host must be an address"),
        (["org/model", "--host", "x" * 300], "--host must be an address"),
        (["org/model", "--host", "..", "--tp", "2"], "--host must be an address"),
    ],
)
def test_what_cannot_be_served_is_one_message_and_exit_code_2(arguments, words):
    code, output = octavo(*arguments, "--port", "0") if "--engine" not in arguments else octavo(*arguments)
    assert code == 2 and words in output and "Traceback" not in output


def test_a_missing_engine_is_named():
    code, output = octavo("org/model", "--engine", "sglang")
    assert code == 2 and "needs the package sglang" in output


def test_a_taken_port_is_said_before_anything_is_loaded():
    """By a server that is still loading: it has the port from its beginning."""
    taken = server.listen("127.0.0.1", 0)
    code, output = octavo("org/model", "--port", str(taken.getsockname()[1]))
    assert code == 2 and "cannot listen on 127.0.0.1" in output and len(output.splitlines()) == 1
    taken.close()


def test_a_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("from-file\n")
    monkeypatch.setenv(server.KEY_VARIABLE, "from-environment")
    assert server.read_key(file) == "from-file" and server.read_key(None) == "from-environment"
    monkeypatch.delenv(server.KEY_VARIABLE)
    assert server.read_key(None) is None
    file.write_text(" \n")
    with pytest.raises(InvalidInput, match="empty"):
        server.read_key(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model and its tokenizer, saved as a checkpoint is; with a scale for each KV head."""
    from safetensors.torch import save_file

    where = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_loaded().model.save_pretrained(where)
    byte_tokenizer().save_pretrained(where)
    scales = {f"model.layers.{n}.self_attn.{kind}_scale": SCALES.clone() for n in range(2) for kind in "kv"}
    save_file(scales, where / "scales.safetensors")
    return where


def test_a_folder_is_served_under_its_last_name_and_pickles_are_refused(folder, tmp_path):
    loaded = load.load_model(str(folder), CPU, 1, print)
    assert loaded.name == "tiny-llama" and not loaded.model.training
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InvalidInput, match="pickled"):
        load.load_model(str(tmp_path), CPU, 1, print)


def test_a_tokenizer_that_panics_is_a_model_that_cannot_be_read(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidInput, match="cannot read a causal language model"):
        load.load_model(str(tmp_path), CPU, 1, print)


def test_code_in_a_checkpoint_is_not_run(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {k: f"code.{k}" for k in ("AutoConfig", "AutoModelForCausalLM")}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(InvalidInput, match="cannot read"):
        load.load_model(str(tmp_path), CPU, 1, print)
    assert not (tmp_path / "ran").exists()


def test_bounds_come_from_the_model_and_the_cache():
    loaded = tiny_loaded()
    options = ServeOptions(model="tiny", device=CPU, cache_tokens=100, page_size=32)
    runner, bounds = server.prepare(options, loaded)
    assert runner.handle.pool.num_pages == 4 and bounds.max_context == 128  # of the model's 256 the cache holds 128
    with pytest.raises(InvalidInput, match="--max-context"):
        server.prepare(ServeOptions(model="tiny", device=CPU, cache_tokens=100, max_context=129), loaded)
    assert server.model_facts(loaded, "other", 5).name == "other"


def test_the_models_own_sampling_is_the_default_where_it_has_one():
    loaded = tiny_loaded()
    assert server.model_facts(loaded, None, 5).temperature == 1.0
    loaded.model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    facts = server.model_facts(loaded, None, 5)
    assert (facts.temperature, facts.top_p, facts.top_k) == (0.6, 0.95, 20)


@contextmanager
def serving(*arguments: str):
    """`octavo serve` as a process of its own; its first lines, the plan among them, and its address."""
    command = [sys.executable, "-m", "octavo", "serve", *arguments, "--port", "0"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors:  # a pipe that nobody reads would fill
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables)
        watchdog = threading.Timer(240, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if match := re.search(r"http://\S+/v1", line):
                    yield process, "".join(lines), match.group()
                    break
            else:
                errors.seek(0)
                raise AssertionError(errors.read())
        finally:
            watchdog.cancel()
            if process.poll() is None:
                process.kill()
            process.communicate()


def end(process: subprocess.Popen) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(60)


@pytest.mark.skipif(not (smollm2.copy_folder() / "config.json").is_file(), reason="the demo's model is not unpacked")
def test_smollm2_answers_the_official_client_and_the_server_ends_at_a_signal():
    openai = pytest.importorskip("openai")
    with serving("smollm2-135m", "--cache-tokens", "2048") as (process, shown, url):
        assert "fp8_e4m3 cache" in shown and "2,048 tokens" in shown and url.startswith("http://127.0.0.1:")
        client = openai.OpenAI(base_url=url, api_key="none", timeout=120)
        question = [{"role": "user", "content": "What is 15% of 4800?"}]
        made = client.chat.completions.create(
            model=smollm2.NAME, messages=question, max_tokens=12, temperature=0, stream=True
        )
        chunks = list(made)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert "15%" in text and chunks[-1].choices[0].finish_reason == "length"
        assert end(process) == 0


@pytest.mark.slow
def test_a_gguf_file_is_served_under_its_own_name():
    pytest.importorskip("gguf")
    try:
        file = smollm2.find_gguf()
    except InvalidInput as missing:
        pytest.skip(str(missing))
    loaded = load.load_model(str(file), CPU, 1, print)
    assert loaded.name == file.stem and load.stop_tokens(loaded.model, loaded.tokenizer)
    with pytest.raises(InvalidInput, match="GGUF"):
        load.load_model(str(file), CPU, 2, print)


def ask(url: str, name: str, prompt: str) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{url}/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def written(prompts: list[str], scales: torch.Tensor) -> list[str]:
    """What one process writes greedily after each prompt, through octavo's cache with these scales."""
    loaded = tiny_loaded()
    enable(loaded.model, "fp8", page_size=32, k_scale=scales, v_scale=scales)
    tokens = [generated(loaded.model, list(prompt.encode()), 24) for prompt in prompts]
    return [loaded.tokenizer.decode(found, skip_special_tokens=True) for found in tokens]


@pytest.mark.slow
def test_two_signals_and_a_template_without_end_leave_the_exit_code_as_it_is(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4)
    with serving(str(tmp_path), "--served-name", "tiny") as (process, _, url), ThreadPoolExecutor() as pool:
        body = {"model": "tiny", "prompt": "a", "n": 64, "max_tokens": 250, "ignore_eos": True, "stream": True}
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        stream = pool.submit(httpx.post, f"{url}/completions", json=body, timeout=60)
        looping = pool.submit(httpx.post, f"{url}/chat/completions", json=chat, timeout=60)
        while "octavo_running 0.0" in (told := httpx.get(url.removesuffix("v1") + "metrics").text):
            time.sleep(0.01)
        assert "octavo_running" in told
        process.send_signal(signal.SIGINT)
        assert looping.result().status_code == 503  # so the first one was taken, and the second is another
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "shutting down" in stream.result().text and "[DONE]" in stream.result().text


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_two_ranks_write_what_one_writes(folder):
    """Gloo on a CPU: heads and their scales are divided, schedules are not; both ranks end at rank 0's word."""
    prompts = ["hello", "a longer prompt, of more than one page of thirty-two tokens"]
    expected = written(prompts, SCALES)
    assert all(one != other for one, other in zip(expected, written(prompts, SCALES.flip(0)), strict=True))
    with serving(str(folder), "--tp", "2", "--page-size", "32", "--cache-tokens", "1024") as (process, shown, url):
        assert "2 query / 1 KV heads" in shown and "a scale per head" in shown and "each of 2 ranks" in shown
        for _ in range(2):  # the second time from the prefix cache
            assert [ask(url, "tiny-llama", prompt) for prompt in prompts] == expected
        begun = time.monotonic()
        assert end(process) in (0, 1)  # torchrun's word for a signal
        assert time.monotonic() - begun < 25


def test_families_that_ranks_cannot_share_are_refused():
    from octavo.integrations.transformers_models import FAMILIES, _refuse_tensor_parallel

    model = tiny("llama")
    with pytest.raises(Unsupported, match="whole KV heads; there are 2 for 3 ranks"):
        _refuse_tensor_parallel("llama", FAMILIES["llama"], model.config, 3)
    with pytest.raises(Unsupported, match="deepseek_v3"):
        _refuse_tensor_parallel("deepseek_v3", FAMILIES["deepseek_v3"], tiny("deepseek_v3").config, 2)
    _refuse_tensor_parallel("llama", FAMILIES["llama"], model.config, 2)
