"""The serving storm on a GPU (octavo/testing/storm.py), and what happened as one JSON object.

python benchmarks/storm.py --out benchmarks/results/h200/storm.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octavo.bench import report
from octavo.bench.records import environment
from octavo.testing.storm import trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--backend", default=None)
    arguments = parser.parse_args()
    found = {**trial(arguments.steps, arguments.backend), "env": environment("cuda")}
    report.write(Path(arguments.out), json.dumps(found, indent=1) + "\n")
    told = ("steps", "counts", "worst_row_error", "bytes_allocated", "seconds")
    print(json.dumps({name: found[name] for name in told}))


if __name__ == "__main__":
    main()
