"""How long a cold and a warm start take: `octavo warmup` in new processes, on an empty Triton cache, then again.

    python benchmarks/start.py --out benchmarks/results/h200/start.jsonl

Each is a process of its own, so that its seconds have imports, the GPU's start and every compile or load in them. The
cold start's cache is a folder that is made for it and taken away.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone

from octavo.bench.records import Record, RecordFile, environment

TIMING = "wall clock of a new process, once"


def start(model: str, arguments: list[str], cache: str) -> tuple[float, dict[str, int], str]:
    """(seconds, kernels compiled and found in the cache, what went wrong) of one start on the Triton cache `cache`."""
    command = [sys.executable, "-m", "octavo", "warmup", model, *arguments, "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        return seconds, {}, (done.stderr.strip().splitlines() or ["no words"])[-1]
    kinds = json.loads(done.stdout)["kinds"]
    return seconds, {name: sum(kind[name] for kind in kinds) for name in ("compiled", "cached", "calls")}, ""


def records(model: str, kv_dtype: str, arguments: list[str], device: str) -> list[Record]:
    """The cold start and the warm one behind it."""
    run = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    made = []
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            seconds, counts, fault = start(model, ["--kv-cache-dtype", kv_dtype, "--device", device, *arguments], cache)
            fields = {"op": "start", "backend": "octavo", "run": run, "timing": TIMING, "env": environment(device)}
            outcome = {"error": fault} if fault else {"us": round(seconds * 1e6)}
            name = f"start/{model}/{kv_dtype}/{kind}"
            made.append(Record(case=name, spec={"kv_dtype": kv_dtype, **counts}, **fields, **outcome))  # type: ignore
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--kv-cache-dtype", default="fp8_e4m3")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("warmup", nargs="*", help="options of octavo warmup, after --")
    arguments = parser.parse_args()
    with RecordFile(arguments.out) as file:
        for model in arguments.models.split(","):
            for record in records(model, arguments.kv_cache_dtype, arguments.warmup, arguments.device):
                file.write(record)
                took = record.error or f"{(record.us or 0) / 1e6:.1f} s, {record.spec}"
                print(f"{record.case}: {took}", flush=True)


if __name__ == "__main__":
    main()
