"""Sides of a comparison of engines: processes with their logs and results, of which one at a time may have the GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ...errors import InvalidInput
from .. import report
from ..records import Record, RecordFile

ROOT = Path(__file__).resolve().parents[3]  # the folder that holds octavo
SHUTDOWN_S = 10
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
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
    "Explain what a Python list is in two sentences.",
    f"What is this text about?\n\n{topics['assert']}",  # of several pages
)
WINDOWS, WINDOW = 8, 1024  # of the perplexity text


def parser_of(description: str | None, package: str) -> argparse.ArgumentParser:
    """What every engine's command takes; an engine adds how its throughput is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("text", "throughput"))
    parser.add_argument("--sides", nargs="+", help="BACKEND:CACHE; the first is what the others are compared with")
    parser.add_argument("--model", type=Path, help="folder of the model that writes text")
    parser.add_argument("--site", type=Path, help=f"folder with {package}'s packages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=540, help="seconds")
    parser.add_argument("--logs", type=Path, help="folder that the sides' logs are left in")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with `argv`: what the processes of the sides are started with too."""
    arguments = parser.parse_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    if arguments.what == "text" and arguments.model is None and not arguments.side:
        parser.error("text needs --model")
    return arguments


def command_of(module: str, side: str, arguments: argparse.Namespace, work: Path) -> list[str]:
    """What starts `module` again as one side."""
    return [sys.executable, "-u", "-m", module, *arguments.argv, "--side", side, "--work", str(work)]


def collect(sides: Sequence[str], logs: Path | None, work: Path) -> dict[str, dict[str, Any]]:
    """What each side found; the ends of their logs go to the folder `logs`."""
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        for log in work.glob("*.log"):
            (logs / log.name).write_bytes(log.read_bytes()[-200_000:])
    return {side: result(work, side) for side in sides}


def chats(tokenizer: Any) -> list[str]:
    """The prompts as a model's chat template has them."""
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in asked]


def windows(tokenizer: Any, count: int = WINDOWS) -> list[list[int]]:
    """Token ids of `count` windows, apart from each other and at most 5000 tokens, of a text that Python brings."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    most = (len(ids) - WINDOW) // WINDOW + 1
    if not 0 < count <= most:
        raise InvalidInput(f"windows must be 1 to {most}: the text has {len(ids)} tokens", count)
    apart = min(5000, (len(ids) - WINDOW) // max(count - 1, 1))
    return [ids[apart * i : apart * i + WINDOW] for i in range(count)]


def write_json(found: dict[str, Any], out: Path) -> None:
    """Write what text sides found."""
    out.parent.mkdir(parents=True, exist_ok=True)
    report.write(out, json.dumps(found, indent=1) + "\n")


def write_steps(
    file: RecordFile, case: str, found: dict[str, Any], timing: str, spec: dict[str, Any], **fields: Any
) -> None:
    """A record for a decode step of `case` and one for its prompts.

    found: step_ms, perhaps with step_ms_p20 and step_ms_p80, and prefill_ms; or error. spec: fields beside the heads of
    LLAMA_8B. fields: of the records.
    """
    heads = {"num_q_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    fields |= {"op": "step", "spec": {**{name: LLAMA_8B[key] for name, key in heads.items()}, **spec}}
    for phase, name in (("decode", "step_ms"), ("prefill", "prefill_ms")):
        if "error" in found:
            file.write(Record(case=f"step/{phase}/{case}", error=found["error"], **fields))
            continue
        times = {f"us{q}": found[f"{name}{q}"] * 1e3 for q in ("", "_p20", "_p80") if f"{name}{q}" in found}
        file.write(Record(case=f"step/{phase}/{case}", timing=timing, **times, **fields))


def path(work: Path, side: str, kind: str) -> Path:
    """A file of a side: log, json (its result), part (what it has of it so far), ready, go."""
    return work / f"{side.replace(':', '-')}.{kind}"


def run_group(
    group: Sequence[str], start: Callable[[str], subprocess.Popen[bytes]], work: Path, deadline: float, in_turn: bool
) -> None:
    """Start the sides together and see them through; in_turn: when all are set up, each has the GPU for itself."""
    running = {side: start(side) for side in group}

    def settled(side: str) -> bool:
        return running[side].poll() is not None

    try:
        if in_turn:
            wait(lambda: all(settled(side) or path(work, side, "ready").exists() for side in group), deadline)
            for side in group:
                path(work, side, "go").touch()
                wait(lambda side=side: settled(side), deadline)
        wait(lambda: all(settled(side) for side in group), deadline)
    finally:
        for process in running.values():
            stop(process)


def take_turn(work: Path, side: str) -> None:
    """Of a side: say that it is set up, and wait until it alone has the GPU."""
    path(work, side, "ready").touch()
    while not path(work, side, "go").exists():
        time.sleep(0.05)


def launch(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process group of its own that writes to `log`."""
    with log.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def plugin_folder(work: Path, group: str, entry: str) -> Path:
    """Metadata with octavo's entry point, by which an engine finds a checkout that is not installed; one an entry."""
    info = work / entry.replace(":", "-") / "octavo-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\noctavo = {entry}\n")
    return info.parent


def python_path(*folders: Path | None) -> str:
    """PYTHONPATH of a side: the folders, the checkout, and what there was."""
    found = [str(f) for f in (*folders, ROOT) if f is not None]
    return os.pathsep.join([*found, os.environ.get("PYTHONPATH", "")])


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


def leave(work: Path, side: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Of a side: measure, leave the result or the error as a file, and end."""
    try:
        found = measure()
    except BaseException as error:  # the engine's own exits too: they are this side's result
        path(work, side, "json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}))
        raise
    path(work, side, "json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def leave_part(work: Path, side: str, found: dict[str, Any]) -> None:
    """Of a side: leave what it has so far, which stays its result if it comes to no end."""
    report.write(path(work, side, "part"), json.dumps(found))


def result(work: Path, side: str) -> dict[str, Any]:
    """What a side found, or why it did not: its error and the telling lines of its log.

    Of a side that left a part and came to no end: the part, and as "unfinished" why it is no more.
    """
    found = json.loads(path(work, side, "json").read_text()) if path(work, side, "json").exists() else {}
    if found and "error" not in found:
        return found
    log = path(work, side, "log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else ["it was not started"]
    causes = [line for line in lines if "Error" in line or "needs " in line]
    why = " | ".join([found.get("error", "no result"), *causes[:4], *lines[-2:]])[:1500]
    part = path(work, side, "part")
    return {**json.loads(part.read_text()), "unfinished": why} if part.exists() else {"error": why}
