"""octavo beside vLLM's own attention backends, in vLLM: text and perplexity, then throughput; one run, one table.

    python -m octavo.bench.engines.in_vllm text --model SMOLLM2_FOLDER --out text.json
    python -m octavo.bench.engines.in_vllm throughput --out benchmarks/results/h200/vllm.jsonl

A side is BACKEND:CACHE, "octavo:fp8" (octavo-triton: octavo without its Hopper kernels), and for text perhaps changes,
"octavo:fp8:chunked+prefix": nograph (compiled, no CUDA graphs), v1 (the older model runner), chunked (prompts in chunks
of 256), prefix (cached prefixes), ngram (drafts from the prompt), full (one graph for any batch), exact (precision of
prefill), serve (through the HTTP server, alone). Each side is a process with an engine of its own. Throughput is of
Llama-3.1-8B's shapes with dummy weights: the sides that the GPU's memory holds are set up together, then measured one
after the other. vLLM has to be importable (--site adds a folder); octavo need not be installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...quality.score import common
from . import sides as running
from .sides import LLAMA_8B, PROMPTS, WINDOW, path

BACKENDS = {"octavo": "CUSTOM", "octavo-triton": "CUSTOM", "triton": "TRITON_ATTN", "flash": "FLASH_ATTN"}
TEXT_SIDES = (
    *("triton:auto", "octavo:auto", "octavo:fp8", "triton:fp8", "flash:fp8"),
    *(f"octavo:fp8:{change}" for change in ("exact", "nograph", "v1", "chunked", "prefix", "ngram", "full", "serve")),
)
SPEED_SIDES = ("octavo:fp8", "flash:fp8", "triton:fp8", "octavo:auto", "flash:auto", "triton:auto")
SHAPES = ("64x2048x128", "16x32768x192")  # batch x tokens of a prompt x tokens generated
CAPTURED = [1, 2, 4, 8, 16, 32, 64]
GIB = 1 << 30
WEIGHTS_GIB, OVERHEAD_GIB = 15.0, 4.0  # of an engine with Llama-3.1-8B's shapes, beside its cache
SMALL_GIB = 9.0  # of an engine that writes text
STEP_TOKENS = 8192  # of a prefill step


def main(argv: Sequence[str] | None = None) -> None:
    """Drive the sides, or be one (--side, with which the driver starts this module again)."""
    parser = running.parser_of(__doc__, "vLLM")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--memory", type=float, default=132, help="GiB of the GPU that engines may take together")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = running.parse(parser, argv)
    for shape in arguments.shapes:
        batch, tokens, more = shape_of(shape)
        steps = batch * tokens // STEP_TOKENS + 1
        if more <= steps:
            parser.error(f"{shape}: its prompts take {steps} steps, and whole batches decode after as many tokens")
    if arguments.side:
        measure = write_text if arguments.what == "text" else measure_speed
        running.leave(arguments.work, arguments.side, lambda: measure(arguments))
    else:
        drive(arguments)


def drive(arguments: argparse.Namespace) -> None:
    """Run the sides in groups, print the table and write what was found."""
    text = arguments.what == "text"
    sides = arguments.sides or (TEXT_SIDES if text else SPEED_SIDES)
    deadline = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for group in groups(sides, arguments):
            running.run_group(group, lambda side: start(side, arguments, work), work, deadline, in_turn=not text)
            print(f"{' '.join(group)}: {deadline - time.monotonic():.0f} s left", flush=True)
        found = running.collect(sides, arguments.logs, work)
    if text:
        running.write_json(found, arguments.out)
        print_text(found)
    else:
        write_records(found, arguments)
        print_speed(found, arguments.shapes)


def groups(sides: Sequence[str], arguments: argparse.Namespace) -> list[list[str]]:
    """Sides that fit the GPU together, in order."""
    made: list[list[str]] = [[]]
    taken = 0.0
    for side in sides:
        need = SMALL_GIB
        if arguments.what == "throughput":
            need = WEIGHTS_GIB + OVERHEAD_GIB + cache_gib(side, arguments.shapes)
        if made[-1] and taken + need > arguments.memory:
            made.append([])
            taken = 0.0
        made[-1].append(side)
        taken += need
    return made


def shape_of(text: str) -> tuple[int, int, int]:
    """Batch, tokens of a prompt, tokens generated."""
    batch, tokens, more = map(int, text.split("x"))
    return batch, tokens, more


def cache_gib(side: str, shapes: list[str]) -> float:
    """GiB that the largest shape's cache needs, with a page of slack a sequence."""
    token = 2 * LLAMA_8B["num_hidden_layers"] * LLAMA_8B["num_key_value_heads"] * LLAMA_8B["head_dim"]
    token *= 2 if side.split(":")[1] == "auto" else 1
    return 1 + max(b * (n + more + 128) for b, n, more in map(shape_of, shapes)) * token / GIB


def start(side: str, arguments: argparse.Namespace, work: Path) -> subprocess.Popen[bytes]:
    """A side in a process group of its own, with its log in the work folder."""
    command = running.command_of("octavo.bench.engines.in_vllm", side, arguments, work)
    plugin = running.plugin_folder(work, "vllm.general_plugins", "octavo.integrations.vllm:register")
    env = {
        **os.environ,
        "PYTHONPATH": running.python_path(arguments.site, plugin),
        "VLLM_PLUGINS": "octavo",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if side.endswith(":serve") else "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(work / "vllm" / side.replace(":", "-")),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(work / "triton")),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "2",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        # Nothing leaves the machine, which may have no other interface.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if "v1" in side.split(":")[-1].split("+"):
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if side.startswith("octavo-triton:"):
        env["OCTAVO_BACKEND"] = "triton"
    return running.launch(command, env, path(work, side, "log"))


def options(side: str) -> dict[str, Any]:
    """What the words of a side ask of the engine."""
    backend, cache, *rest = side.split(":")
    changes = set(rest[0].split("+")) if rest else set()
    asked: dict[str, Any] = {
        "attention_backend": BACKENDS[backend],
        "kv_cache_dtype": cache,
        "dtype": "bfloat16",
        "seed": 0,
        "enable_prefix_caching": "prefix" in changes,
        "disable_log_stats": True,
    }
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": CAPTURED}
    if "nograph" in changes:
        graphs = {"compilation_config": {"cudagraph_mode": "NONE"}}
    if "full" in changes:
        graphs["compilation_config"] = {"cudagraph_mode": "FULL"}
    if "ngram" in changes:
        draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        asked["speculative_config"] = draft
        graphs["cudagraph_capture_sizes"] = [4 * n for n in (1, 2, 4, 8)]
    if "exact" in changes:
        asked["additional_config"] = {"octavo": {"precision": "exact"}}
    if "chunked" in changes:
        asked["max_num_batched_tokens"] = 256
    return {**asked, **graphs}


def write_text(arguments: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers, the same once more (of cached tokens, if any), and perplexity over a text that Python brings."""
    if arguments.side.endswith(":serve"):
        return serve_text(arguments)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(arguments.model),
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_model_len=4096,
        max_num_seqs=64,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=4 * GIB,
        **{"max_num_batched_tokens": STEP_TOKENS, **options(arguments.side)},
    )
    tokenizer = llm.get_tokenizer()
    chats = running.chats(tokenizer)
    greedy = SamplingParams(temperature=0.0, max_tokens=64, logprobs=2)
    clock = Clock(llm)
    first = llm.generate(chats, greedy, use_tqdm=False)
    steps = len(clock.steps)
    again = llm.generate(chats, greedy, use_tqdm=False)
    answers = [answer.outputs[0] for answer in first]
    windows = running.windows(tokenizer)
    one = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([{"prompt_token_ids": w} for w in windows], one, use_tqdm=False)
    pairs = zip(windows, scored, strict=True)
    lost = [-s.prompt_logprobs[i][w[i]].logprob for w, s in pairs for i in range(1, WINDOW)]
    return {
        "text": [a.text for a in answers],
        "tokens": [list(a.token_ids) for a in answers],
        "gaps": [[gap(step) for step in a.logprobs] for a in answers],
        "again": [list(a.token_ids) for a in answers] == [list(a.outputs[0].token_ids) for a in again],
        "cached_tokens": sum(a.num_cached_tokens or 0 for a in again),
        "steps": steps,
        "perplexity": math.exp(sum(lost) / len(lost)),
        "scored_tokens": len(lost),
    }


def gap(step: dict[int, Any]) -> float:
    """How far the second most likely token was behind, in nats: a small one is a near-tie."""
    best = sorted((token.logprob for token in step.values()), reverse=True)
    return best[0] - best[1]


def serve_text(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers of `vllm serve` with octavo named on its command line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend, cache, _ = arguments.side.split(":")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(arguments.model)]
    command += ["--attention-backend", BACKENDS[backend], "--kv-cache-dtype", cache, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "16", "--served-model-name", "model"]
    command += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(2 * GIB)]
    command += ["--cudagraph-capture-sizes", "1", "2", "4", "8", "16"]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command)
    try:
        while True:
            assert server.poll() is None, f"the server ended with {server.returncode}"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).read()
                break
            except OSError:
                time.sleep(1)
        return {"text": [chat(url, prompt) for prompt in PROMPTS]}
    finally:
        server.terminate()
        server.wait(running.SHUTDOWN_S)


def chat(url: str, prompt: str) -> str:
    """One answer of an OpenAI-compatible server."""
    asked = {"model": "model", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 64}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(asked).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]


class Clock:
    """When each step of an engine gave how many sequences a token."""

    def __init__(self, llm: Any) -> None:
        self.steps: list[tuple[float, int]] = []
        client = llm.llm_engine.engine_core
        get_output = client.get_output

        def timed() -> Any:
            outputs = get_output()
            count = sum(1 for one in outputs.outputs if one.new_token_ids)
            self.steps.append((time.perf_counter(), count))
            return outputs

        client.get_output = timed


def measure_speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prefill rate and time of a decode step of each shape: steps in which every sequence of the batch has a token."""
    from vllm import LLM, SamplingParams

    shapes = {text: shape_of(text) for text in arguments.shapes}
    folder = Path(tempfile.mkdtemp(dir=arguments.work))
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_model_len=max(n + more for _, n, more in shapes.values()) + 16,
        max_num_seqs=max(b for b, _, _ in shapes.values()),
        max_num_batched_tokens=STEP_TOKENS,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=int(cache_gib(arguments.side, arguments.shapes) * GIB),
        **options(arguments.side),
    )
    clock, draw = Clock(llm), random.Random(0)

    def generate(batch: int, tokens: int, more: int) -> float:
        prompts = [{"prompt_token_ids": [draw.randrange(1000, 100000) for _ in range(tokens)]} for _ in range(batch)]
        sampling = SamplingParams(temperature=0.0, max_tokens=more, ignore_eos=True, detokenize=False)
        clock.steps.clear()
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return begin

    for batch, tokens, _ in shapes.values():
        generate(batch, min(tokens, 1024), 4)  # compiles what the shape needs
    running.take_turn(arguments.work, arguments.side)
    found = {}
    for text, (batch, tokens, more) in shapes.items():
        runs = []
        for _ in range(2 if batch * tokens <= 1 << 18 else 1):
            begin = generate(batch, tokens, more)
            full = [at for at, count in clock.steps if count == batch]
            between = [b - a for a, b in zip(full, full[1:], strict=False)]
            runs.append({"prefill_ms": (full[0] - begin) * 1e3, "steps_ms": [1e3 * s for s in between]})
        best = min(runs, key=lambda run: statistics.median(run["steps_ms"]))
        steps = sorted(best["steps_ms"])
        prefill = min(run["prefill_ms"] for run in runs)
        found[text] = {
            **{"prefill_ms": prefill, "prefill_per_s": batch * tokens / prefill * 1e3, "steps": len(steps)},
            **{
                f"step_ms{name}": steps[int(q * (len(steps) - 1))]
                for name, q in (("", 0.5), ("_p20", 0.2), ("_p80", 0.8))
            },
        }
        found[text]["decode_per_s"] = batch / found[text]["step_ms"] * 1e3
    return found


def print_text(found: dict[str, dict[str, Any]]) -> None:
    """Perplexity, greedy tokens before the first difference from the first side, and how near a tie that was."""
    first = next(iter(found.values()))
    heads = f"{'perplexity':>10} {'same tokens':>11} {'gaps there':>28} {'steps':>5} {'cached':>6} {'again':>6}"
    print(f"{'side':26} {heads}  first answer")
    for side, r in found.items():
        if "error" in r:
            print(f"{side:26} {r['error']}")
            continue
        if "tokens" not in r or "tokens" not in first:
            print(f"{side:26} {'':72} {r['text'][0][:60]!r}")
            continue
        same, gaps = [], []
        for ours, theirs, near in zip(r["tokens"], first["tokens"], first["gaps"], strict=True):
            same.append(common(ours, theirs))
            gaps += [] if same[-1] == len(theirs) else [f"{near[same[-1]]:.3f}"]
        count = f"{sum(same)}/{sum(map(len, first['tokens']))}"
        row = f"{side:26} {r['perplexity']:10.4f} {count:>11} {' '.join(gaps):>28}"
        print(f"{row} {r['steps']:5} {r['cached_tokens']:6} {r['again']!s:>6}  {r['text'][0][:60]!r}")


def print_speed(found: dict[str, dict[str, Any]], shapes: list[str]) -> None:
    """Decode and prefill rates of each shape, and the decode rate of octavo's FP8 beside each."""
    for shape in shapes:
        ours = found.get("octavo:fp8", {}).get(shape, {}).get("step_ms")
        names = ("ms a step", "p20", "p80", "decode/s", "prefill/s", "octavo fp8 is")
        print(f"{shape:14} " + " ".join(f"{n:>{w}}" for n, w in zip(names, (10, 7, 7, 9, 10, 14), strict=True)))
        for side, r in found.items():
            if "error" in r:
                print(f"{side:14} {r['error']}")
                continue
            s = r[shape]
            ratio = f"{s['step_ms'] / ours:.3f} x" if ours else ""
            print(
                f"{side:14} {s['step_ms']:10.2f} {s['step_ms_p20']:7.2f} {s['step_ms_p80']:7.2f} "
                f"{s['decode_per_s']:9.0f} {s['prefill_per_s']:10.0f} {ratio:>14}"
            )


def write_records(found: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """A record a side and shape for a decode step and one for the prompts."""
    from ..records import RecordFile, environment

    run = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-vllm")
    env = {**environment("cuda"), "vllm": release(arguments.site)}
    timing = "wall clock of engine steps in which every sequence has a token, median; prompts: until all have one"
    with RecordFile(arguments.out) as file:
        for side, r in found.items():
            backend, cache = side.split(":")[:2]
            ours, fp8 = backend.startswith("octavo"), cache != "auto"
            for shape in arguments.shapes:
                batch, tokens, more = shape_of(shape)
                spec = {
                    "page_size": 64 if ours else 16,
                    "layout": ("leaf" if fp8 else "hnd") if ours else "nhd",
                    "kv_dtype": "fp8_e4m3" if fp8 else "bfloat16",
                    "output_tokens": more,
                }
                case = f"llama-3.1-8b/tp{arguments.tensor_parallel_size}/b{batch}/ctx{tokens}"
                steps = r if "error" in r else r[shape]
                running.write_steps(file, case, steps, timing, spec, backend=f"vllm-{side}", run=run, env=env)


def release(site: Path | None) -> str:
    """vLLM's version, by its metadata."""
    import importlib.metadata

    folders = [str(site)] if site else sys.path
    found = importlib.metadata.distributions(name="vllm", path=folders)
    return next((d.version for d in found), "")


if __name__ == "__main__":
    main()
