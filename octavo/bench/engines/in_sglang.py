"""octavo beside SGLang's own attention backends, in SGLang: text and perplexity, then throughput; one run, one table.

    python -m octavo.bench.engines.in_sglang text --model SMOLLM2_FOLDER --out text.json
    python -m octavo.bench.engines.in_sglang throughput --out benchmarks/results/h200/sglang.jsonl

A side is BACKEND:CACHE, "octavo:fp8_e4m3"; each is a process of its own with an engine of its own. The sides
"same-bytes" and "same-bytes-exact" are octavo and octavo-exact beside exact attention over the bytes that they write
(same_bytes.py). The side "reference" is exact attention over bytes that it writes itself, which are others. These three
run without graphs, have their perplexity measured and write no answers. Throughput is of Llama-3.1-8B's shapes with
dummy weights: every side of a group is set up first, then they are measured one after the other, so that one alone has
the GPU. SGLang has to be importable (--site adds a folder); octavo need not be installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import random
import subprocess
import tempfile
import time
import zlib
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...quality.score import common
from . import same_bytes
from . import sides as running
from .sides import LLAMA_8B, path

TEXT_SIDES = (
    "triton:auto",
    "octavo:auto",
    "octavo:fp8_e4m3",
    "octavo-exact:fp8_e4m3",
    "same-bytes:fp8_e4m3",
    "same-bytes-exact:fp8_e4m3",
    "fa3:fp8_e4m3",
)
SPEED_SIDES = ("octavo:fp8_e4m3", "fa3:fp8_e4m3", "triton:fp8_e4m3", "octavo:auto", "fa3:auto", "triton:auto")
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
CHUNK = 512  # of a prompt that text sides read: a window is cut in two
FIRST_PORT, END_PORT = 12000, 32000  # below what Linux gives to outgoing connections
MOST_SIDES = 16  # of a driver, with two ports each


def main(argv: Sequence[str] | None = None) -> None:
    """Drive the sides, or be one (--side, with which the driver starts this module again)."""
    parser = running.parser_of(__doc__, "SGLang")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--input", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens generated for each")
    parser.add_argument("--together", type=int, default=3, help="engines that the GPU's memory holds at once")
    parser.add_argument("--perplexity", action="store_true", help="of text: no answers, the perplexity alone")
    parser.add_argument("--windows", type=int, default=64, help="of 1024 tokens, which same-bytes sides read twice")
    arguments = running.parse(parser, argv)
    if len(sides_of(arguments)) > MOST_SIDES:
        parser.error(f"--sides must be {MOST_SIDES} at most, {len(sides_of(arguments))} came")
    if arguments.side:
        measure = write_text if arguments.what == "text" else measure_speed
        running.leave(
            arguments.work,
            arguments.side,
            lambda: {**measure(arguments), "release": importlib.metadata.version("sglang")},
        )
    else:
        drive(arguments)


def drive(arguments: argparse.Namespace) -> None:
    """Run the sides in groups, print the table and write what was found."""
    sides = sides_of(arguments)
    deadline = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for begin in range(0, len(sides), arguments.together):
            group = sides[begin : begin + arguments.together]
            in_turn = arguments.what == "throughput"
            running.run_group(group, lambda side: start(side, arguments, work), work, deadline, in_turn)
        found = running.collect(sides, arguments.logs, work)
    if arguments.what == "text":
        running.write_json(found, arguments.out)
        print_text(found)
    else:
        write_records(found, arguments)
        print_speed(found)


def sides_of(arguments: argparse.Namespace) -> Sequence[str]:
    """The sides that were asked for, or those of the comparison."""
    return arguments.sides or (TEXT_SIDES if arguments.what == "text" else SPEED_SIDES)


def start(side: str, arguments: argparse.Namespace, work: Path) -> subprocess.Popen[bytes]:
    """A side in a process group of its own, with its log in the work folder."""
    command = running.command_of("octavo.bench.engines.in_sglang", side, arguments, work)
    entry = same_bytes.ENTRY if rereads(side) else "octavo.integrations.sglang:register"
    plugin = running.plugin_folder(work, "sglang.srt.plugins", entry)
    env = {
        **LOCAL,
        **os.environ,
        "PYTHONPATH": running.python_path(arguments.site, plugin),
        "SGLANG_PLUGINS": "octavo",
    }
    if side.startswith("reference:"):
        env["OCTAVO_BACKEND"] = "reference"
    if side.startswith("octavo-triton:"):
        env["OCTAVO_BACKEND"] = "triton"
    return running.launch(command, env, path(work, side, "log"))


def rereads(side: str) -> bool:
    """Whether the side is read beside exact attention over its own bytes."""
    return side.split(":")[0] in same_bytes.NAMES


def print_text(found: dict[str, dict[str, Any]]) -> None:
    """Perplexity, and how many greedy tokens are the first side's before the first difference."""
    first = next((r for r in found.values() if "tokens" in r), {})
    print(f"{'side':24} {'perplexity':>11} {'same tokens':>12} {'cached = not':>13}  first answer")
    for side, r in found.items():
        if "error" in r:
            print(f"{side:24} {r['error']}")
            continue
        if "tokens" not in r:
            print(f"{side:24} {r['perplexity']:11.4f}", *beside_exact(r), r.get("unfinished", ""))
            continue
        pairs = list(zip(r["tokens"], first["tokens"], strict=True))
        same = sum(common(*pair) for pair in pairs)
        total = sum(len(x) for x, _ in pairs)
        print(f"{side:24} {r['perplexity']:11.4f} {f'{same}/{total}':>12} {r['again']!s:>13}  {r['text'][0][:50]!r}")


def beside_exact(r: dict[str, Any]) -> list[str]:
    """Of a same-bytes side: how far it is from exact attention, in words; nothing of another."""
    if "change" not in r:
        return []
    value, low, high = (None if r["change"][k] is None else 100 * r["change"][k] for k in ("value", "low", "high"))
    interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
    return [f"{value:+.3f} %{interval} of exact attention's {r['exact_perplexity']:.4f} over the same bytes"]


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
    import torch

    from ..records import RecordFile, environment

    run = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-sglang")
    env = {
        **environment("cuda" if torch.cuda.is_available() else "cpu"),
        "sglang": next((r["release"] for r in found.values() if "release" in r), ""),
    }
    case = f"llama-3.1-8b/tp1/b{arguments.batch}/ctx{arguments.input}"
    timing = "wall clock of generate, best of two; a decode step is a share of longer minus one-token ones"
    with RecordFile(arguments.out) as file:
        for side, r in found.items():
            backend, cache = side.split(":")
            spec = {
                "page_size": 64,
                "kv_dtype": "bfloat16" if cache == "auto" else cache,
                "layout": "leaf" if backend.startswith("octavo") and cache != "auto" else "nhd",
                "output_tokens": arguments.output,
            }
            running.write_steps(file, case, r, timing, spec, backend=f"sglang-{side}", run=run, env=env)


def make_engine(arguments: argparse.Namespace, **more: Any) -> Any:
    """SGLang's engine for a side; server arguments that this release lacks are left out, and said."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before ServerArgs, which check the backend's name
    import sglang
    from sglang.srt.server_args import ServerArgs

    backend, cache = arguments.side.split(":")
    known = {field.name for field in fields_of(ServerArgs)}
    port, nccl_port = ports(arguments)
    asked = {
        "attention_backend": "octavo" if backend in ("reference", "octavo-triton") else backend,
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
        "nccl_port": nccl_port,
        **more,
    }
    if backend == "reference":  # it reads lengths on the host
        asked |= {"disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True}
    if rereads(arguments.side):
        asked |= same_bytes.OPTIONS
    for name in asked.keys() - known:
        print(f"left out: {name}, which this release does not have", flush=True)
    return sglang.Engine(**{name: value for name, value in asked.items() if name in known})


def ports(arguments: argparse.Namespace) -> tuple[int, int]:
    """The side's port and its NCCL's: of no other side of its driver, nor of text and throughput that run at once.

    Drivers of one kind have work folders of their own, and so other ports but for chance.
    """
    each = 2 * MOST_SIDES
    pairs_of_drivers = (END_PORT - FIRST_PORT) // (2 * each)  # one of text and one of throughput
    driver = 2 * (zlib.crc32(str(arguments.work).encode()) % pairs_of_drivers) + (arguments.what == "text")
    port = FIRST_PORT + each * driver + 2 * list(sides_of(arguments)).index(arguments.side)
    return port, port + 1


def fields_of(record: Any) -> Any:
    """Fields of SGLang's ServerArgs, a dataclass until it became a msgspec Struct."""
    if dataclasses.is_dataclass(record):
        return dataclasses.fields(record)
    import msgspec

    return msgspec.structs.fields(record)


def write_text(arguments: argparse.Namespace) -> dict[str, Any]:
    """Perplexity over a text that Python brings, then greedy answers, and the same from cached prefixes.

    The perplexity is left for the driver as soon as it is known. Sides without graphs write no answers: exact attention
    goes sequence by sequence, a step takes it a tenth of a second and more, and they would take it minutes.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    twice = rereads(arguments.side)
    graphless = twice or arguments.side.startswith("reference:")
    alone = arguments.perplexity or graphless
    engine = make_engine(
        arguments,
        model_path=str(arguments.model),
        context_length=4096,
        max_running_requests=16,
        max_total_tokens=65536,
        mem_fraction_static=0.25,
        chunked_prefill_size=CHUNK,
        # Graphs of no other size are replayed where nothing but the windows is read.
        **({"cuda_graph_bs_prefill": [CHUNK], "cuda_graph_bs_decode": [1]} if alone and not graphless else {}),
    )
    if twice:
        windows = running.windows(tokenizer, arguments.windows)
        return same_bytes.measure(engine, windows, lambda r: running.leave_part(arguments.work, arguments.side, r))
    found = perplexity(engine, tokenizer)
    if not alone:
        running.leave_part(arguments.work, arguments.side, found)
        found |= answers(engine, tokenizer)
    return found


def perplexity(engine: Any, tokenizer: Any) -> dict[str, Any]:
    """Over windows of a text that Python brings, each token but the first of a window scored."""
    windows = running.windows(tokenizer)
    one = {"temperature": 0.0, "max_new_tokens": 1}
    scored = engine.generate(input_ids=windows, sampling_params=one, return_logprob=True, logprob_start_len=0)
    lost = [[-entry[0] for entry in s["meta_info"]["input_token_logprobs"][1:]] for s in scored]
    tokens = sum(map(len, lost))
    return {
        "perplexity": math.exp(sum(map(sum, lost)) / tokens),
        "scored_tokens": tokens,
        "window_losses": [sum(window) / len(window) for window in lost],
    }


def answers(engine: Any, tokenizer: Any) -> dict[str, Any]:
    """Greedy answers, and whether they are the same once more, from cached prefixes."""
    chats = running.chats(tokenizer)
    greedy = {"temperature": 0.0, "max_new_tokens": 64}
    first, again = (engine.generate(prompt=chats, sampling_params=greedy) for _ in range(2))
    tokens = [a["output_ids"] for a in first]
    return {
        "text": [a["text"] for a in first],
        "tokens": tokens,
        "again": tokens == [a["output_ids"] for a in again],
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
    running.take_turn(arguments.work, arguments.side)
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
