"""Compiles every kernel ahead of time with several releases of Triton, and prints the table of docs/trust.md.

    python tools/triton_releases.py 3.6.0 3.7.1 3.8.0 3.9.0

Each release is installed alone into a folder of its own, which comes first on the path of the processes that compile
(octavo/testing/aot.py); a release takes a gigabyte and some minutes. A cell is cases compiled, of which how many spill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRITON = ("append", "prefill", "decode", "merge_states", "index_append", "mqa_logits", "topk")
GLUON = ("decode", "prefill", "mqa_logits", "plan", "prefill_plan")
COLUMNS = (("triton", TRITON, "h200"), ("triton", TRITON, "b200"), ("gluon", GLUON, "h200"))


def compiled(folder: Path, backend: str, files: tuple[str, ...], device: str) -> str:
    """One cell: "58, 2 spill", or the files that do not compile with the last line of each error."""
    count = spilling = 0
    failed = []
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "TRITON_CACHE_DIR": str(folder / "cache")}
    for file in files:
        command = [sys.executable, "-m", "octavo.testing.aot", f"octavo.kernels.{backend}.{file}", "--devices", device]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        count += len(cases)
        spilling += sum(case["spilled"] > 0 for case in cases)
        if done.returncode:
            failed.append(f"{file}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return f"{count}, {spilling} spill" + "".join(f"; {words}" for words in failed)


def main() -> None:
    print("| Triton | Triton's kernels, sm_90 | Triton's kernels, sm_100 | Gluon's kernels, sm_90 |")
    print("| --- | --- | --- | --- |")
    for version in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, f"triton=={version}"]
            subprocess.run(pip, check=True)
            cells = [compiled(Path(folder), *column) for column in COLUMNS]
        print(f"| {version} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
