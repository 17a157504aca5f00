"""octavo beside SGLang's own attention backends, in SGLang: text and perplexity, then throughput; one run, one table.

    python benchmarks/engines/sglang_run.py text --model SMOLLM2_FOLDER --out text.json
    python benchmarks/engines/sglang_run.py throughput --out benchmarks/results/h200/sglang.jsonl

A side is BACKEND:CACHE, "octavo:fp8_e4m3"; each is a process of its own with an engine of its own. The side "reference"
is octavo's reference over the same bytes as octavo: exact attention, without graphs. Throughput is of Llama-3.1-8B's
shapes with dummy weights: every side of a group is set up first, then they are measured one after the other, so that
one alone has the GPU. SGLang has to be importable (--site adds a folder); octavo need not be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT_SIDES = (
    "triton:auto",
    "octavo:auto",
    "octavo:fp8_e4m3",
    "octavo-exact:fp8_e4m3",
    "reference:fp8_e4m3",
    "fa3:fp8_e4m3",
)
SPEED_SIDES = ("octavo:fp8_e4m3", "fa3:fp8_e4m3", "triton:fp8_e4m3", "octavo:auto", "fa3:auto", "triton:auto")
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
    "Explain what a Python list is in two sentences.",
)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
# One machine, nothing fetched, FA3 from sgl_kernel; what the caller's environment says instead is kept.
LOCAL = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "FLASHINFER_NO_DOWNLOAD": "1",
    "SGLANG_USE_SGL_FA3_KERNEL": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "no_proxy": "*",
}
WINDOWS, WINDOW = 8, 1024  # of the perplexity text
SHUTDOWN_S = 10


def main() -> None:
    """Drive the sides, or be one (--side, with which the driver starts this file again)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("text", "throughput"))
    parser.add_argument("--sides", nargs="+", help="BACKEND:CACHE; the first is what the others are compared with")
    parser.add_argument("--model", type=Path, help="folder of the model that writes text")
    parser.add_argument("--site", type=Path, help="folder with SGLang's packages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--input", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens generated for each")
    parser.add_argument("--together", type=int, default=3, help="engines that the GPU's memory holds at once")
    parser.add_argument("--budget", type=float, default=540, help="seconds")
    parser.add_argument("--logs", type=Path, help="folder to keep each side's log in")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        be_side(arguments)
    elif arguments.what == "text" and arguments.model is None:
        parser.error("text needs --model")
    else:
        drive(arguments)


def drive(arguments: argparse.Namespace) -> None:
    """Run the sides in groups, print the table and write what was found."""
    sides = arguments.sides or (TEXT_SIDES if arguments.what == "text" else SPEED_SIDES)
    deadline = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for begin in range(0, len(sides), arguments.together):
            run_group(sides[begin : begin + arguments.together], arguments, work, deadline)
        found = {side: result(work, side) for side in sides}
        if arguments.logs:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            for log in work.glob("*.log"):
                shutil.copy(log, arguments.logs)
    if arguments.what == "text":
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print_text(found)
    else:
        write_records(found, arguments)
        print_speed(found)


def run_group(group: Sequence[str], arguments: argparse.Namespace, work: Path, deadline: float) -> None:
    """Start the sides together; those of throughput then have the GPU one after the other."""
    running = {side: start(side, arguments, work) for side in group}

    def settled(side: str) -> bool:
        return running[side].poll() is not None

    try:
        if arguments.what == "throughput":
            wait(lambda: all(settled(side) or ready(work, side) for side in group), deadline)
            for side in group:
                path(work, side, "go").touch()
                wait(lambda side=side: settled(side), deadline)
        wait(lambda: all(settled(side) for side in group), deadline)
    finally:
        for process in running.values():
            stop(process)


def start(side: str, arguments: argparse.Namespace, work: Path) -> subprocess.Popen[bytes]:
    """A side in a process group of its own, with its log in the work folder."""
    command = [sys.executable, "-u", __file__, *sys.argv[1:], "--side", side, "--work", str(work)]
    folders = [*([arguments.site] if arguments.site else []), plugin_folder(work), ROOT]
    env = {
        **LOCAL,
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]),
        "SGLANG_PLUGINS": "octavo",
    }
    if side.startswith("reference:"):
        env["OCTAVO_BACKEND"] = "reference"
    with path(work, side, "log").open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def plugin_folder(work: Path) -> Path:
    """Metadata with octavo's entry points, by which SGLang finds a checkout that is not installed."""
    info = work / "plugin" / "octavo-0.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\noctavo = octavo.integrations.sglang:register\n")
    return info.parent


def wait(over: Callable[[], bool], deadline: float) -> None:
    """Until `over()` or the deadline."""
    while not over() and time.monotonic() < deadline:
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a side and its engine's processes: its own process group and nothing else."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SHUTDOWN_S)


def path(work: Path, side: str, kind: str) -> Path:
    """A file of a side: log, json (its result), ready, go."""
    return work / f"{side.replace(':', '-')}.{kind}"


def ready(work: Path, side: str) -> bool:
    """Whether a side is set up."""
    return path(work, side, "ready").exists()


def result(work: Path, side: str) -> dict[str, Any]:
    """What a side found, or the end of its log."""
    if path(work, side, "json").exists():
        return json.loads(path(work, side, "json").read_text())
    log = path(work, side, "log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else ["it was not started"]
    causes = [line for line in lines if "Error" in line or "needs " in line]
    return {"error": " | ".join([*causes[:4], *lines[-2:]])[:1000]}


def print_text(found: dict[str, dict[str, Any]]) -> None:
    """Perplexity, and how many greedy tokens are the first side's before the first difference."""
    first = next(iter(found.values()))
    print(f"{'side':24} {'perplexity':>11} {'same tokens':>12} {'cached = not':>13}  first answer")
    for side, r in found.items():
        if "error" in r:
            print(f"{side:24} {r['error']}")
            continue
        pairs = list(zip(r["tokens"], first.get("tokens", r["tokens"]), strict=True))
        same = sum(next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(x)) for x, y in pairs)
        total = sum(len(x) for x, _ in pairs)
        print(f"{side:24} {r['perplexity']:11.4f} {f'{same}/{total}':>12} {r['again']!s:>13}  {r['text'][0][:50]!r}")


def print_speed(found: dict[str, dict[str, Any]]) -> None:
    """Decode and prefill rates, and the decode rate beside octavo's FP8."""
    ours = found.get("octavo:fp8_e4m3", {}).get("step_ms")
    print(f"{'side':24} {'ms a step':>10} {'decode/s':>9} {'prefill/s':>10} {'octavo fp8 is':>14}")
    for side, r in found.items():
        if "error" in r:
            print(f"{side:24} {r['error']}")
            continue
        ratio = f"{r['step_ms'] / ours:.3f} x" if ours else ""
        print(f"{side:24} {r['step_ms']:10.2f} {r['decode_per_s']:9.0f} {r['prefill_per_s']:10.0f} {ratio:>14}")


def write_records(found: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """A record a side for a decode step and one for the prompts."""
    sys.path.insert(0, str(ROOT))
    import torch

    from octavo.bench.records import Record, RecordFile, environment

    run = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-sglang")
    env = {
        **environment("cuda" if torch.cuda.is_available() else "cpu"),
        "sglang": next((r["release"] for r in found.values() if "release" in r), ""),
    }
    shape = f"llama-3.1-8b/tp1/b{arguments.batch}/ctx{arguments.input}"
    with RecordFile(arguments.out) as file:
        for side, r in found.items():
            backend, cache = side.split(":")
            spec = {
                **{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64},
                "kv_dtype": "bfloat16" if cache == "auto" else cache,
                "layout": "leaf" if backend.startswith("octavo") and cache != "auto" else "nhd",
                "output_tokens": arguments.output,
            }
            fields = {"backend": f"sglang-{backend}", "run": run, "spec": spec, "env": env}
            for case, name in ((f"step/decode/{shape}", "step_ms"), (f"step/prefill/{shape}", "prefill_ms")):
                if "error" in r:
                    file.write(Record(case=case, op="step", error=r["error"], **fields))
                    continue
                timing = "wall clock of generate, best of two; a decode step is a share of longer minus one-token ones"
                file.write(Record(case=case, op="step", us=r[name] * 1000, timing=timing, **fields))


def be_side(arguments: argparse.Namespace) -> None:
    """Make the engine, measure, leave the result as a file; the driver ends what stays."""
    measure = write_text if arguments.what == "text" else measure_speed
    try:
        found = measure(arguments)
        found["release"] = importlib.metadata.version("sglang")
    except BaseException as error:  # the engine's own exits too: they are this side's result
        path(arguments.work, arguments.side, "json").write_text(
            json.dumps({"error": f"{type(error).__name__}: {error}"})
        )
        raise
    path(arguments.work, arguments.side, "json").write_text(json.dumps(found))
    os._exit(0)


def make_engine(arguments: argparse.Namespace, **more: Any) -> Any:
    """SGLang's engine for a side; server arguments that this release lacks are left out, and said."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before ServerArgs, which check the backend's name
    import sglang
    from sglang.srt.server_args import ServerArgs

    backend, cache = arguments.side.split(":")
    known = {field.name for field in fields_of(ServerArgs)}
    port = 21000 + 200 * (zlib.crc32(arguments.side.encode()) % 200)  # sides run at once
    asked = {
        "attention_backend": "octavo" if backend == "reference" else backend,
        "kv_cache_dtype": cache,
        "page_size": 64,
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "random_seed": 0,
        "log_level": "info",
        "watchdog_timeout": 300,
        "mm_feature_transport": "cpu",
        "host": "127.0.0.1",
        "port": port,
        "nccl_port": port + 77,
        **more,
    }
    if backend == "reference":  # it reads lengths on the host
        asked |= {"disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True}
    for name in asked.keys() - known:
        print(f"left out: {name}, which this release does not have", flush=True)
    return sglang.Engine(**{name: value for name, value in asked.items() if name in known})


def fields_of(record: Any) -> Any:
    """Fields of SGLang's ServerArgs, a dataclass until it became a msgspec Struct."""
    if dataclasses.is_dataclass(record):
        return dataclasses.fields(record)
    import msgspec

    return msgspec.structs.fields(record)


def write_text(arguments: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers, the same from cached prefixes, and perplexity over a text that Python brings."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    engine = make_engine(
        arguments,
        model_path=str(arguments.model),
        context_length=4096,
        max_running_requests=16,
        max_total_tokens=65536,
        mem_fraction_static=0.25,
        chunked_prefill_size=512,  # a window is cut in two
    )
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    chats = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in asked]
    greedy = {"temperature": 0.0, "max_new_tokens": 64}
    answers, again = (engine.generate(prompt=chats, sampling_params=greedy) for _ in range(2))
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    windows = [ids[5000 * i : 5000 * i + WINDOW] for i in range(WINDOWS)]
    one = {"temperature": 0.0, "max_new_tokens": 1}
    scored = engine.generate(input_ids=windows, sampling_params=one, return_logprob=True, logprob_start_len=0)
    lost = [-entry[0] for s in scored for entry in s["meta_info"]["input_token_logprobs"][1:]]
    return {
        "text": [a["text"] for a in answers],
        "tokens": [a["output_ids"] for a in answers],
        "again": [a["output_ids"] for a in answers] == [a["output_ids"] for a in again],
        "perplexity": math.exp(sum(lost) / len(lost)),
        "scored_tokens": len(lost),
    }


def measure_speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prefill and decode rates of a full batch: generations of one token and of many, best of two each."""
    batch, length, more = arguments.batch, arguments.input, arguments.output
    folder = Path(tempfile.mkdtemp(dir=arguments.work))
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    engine = make_engine(
        arguments,
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        context_length=length + more + 64,
        max_running_requests=batch,
        max_total_tokens=batch * (length + more + 128),
        mem_fraction_static=0.85,
        chunked_prefill_size=8192,
        disable_radix_cache=True,
        cuda_graph_bs_decode=sorted({b for b in (1, 2, 4, 8, 16, 32) if b < batch} | {batch}),
        cuda_graph_bs_prefill=[2048, 4096, 8192],
    )
    draw = random.Random(0)

    def seconds(tokens: int) -> float:
        prompts = [[draw.randrange(1000, 100000) for _ in range(length)] for _ in range(batch)]
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        spent = time.perf_counter() - begin
        assert {a["meta_info"]["completion_tokens"] for a in answers} == {tokens}
        return spent

    seconds(8)  # compiles
    path(arguments.work, arguments.side, "ready").touch()
    while not path(arguments.work, arguments.side, "go").exists():
        time.sleep(0.05)
    prompts_s = min(seconds(1) for _ in range(2))
    step_s = (min(seconds(more + 1) for _ in range(2)) - prompts_s) / more
    return {
        "prefill_ms": prompts_s * 1000,
        "step_ms": step_s * 1000,
        "prefill_per_s": batch * length / prompts_s,
        "decode_per_s": batch / step_s,
    }


if __name__ == "__main__":
    main()
