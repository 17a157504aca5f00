"""Metadata of any value never leads a kernel out of its memory; see tests/hostile_cases.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {"attention": 80, "append": 40, "indexer": 30, "decode_plan": 60}


def run(name: str, examples: int, log: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "hostile_cases.py"), name, str(examples), str(log)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def check(name: str, examples: int, log: Path) -> None:
    done = run(name, examples, log)
    example = log.read_text() if log.exists() else "none"
    assert done.returncode == 0, f"exit {done.returncode} at {example}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_kernels_stay_in_their_memory(name, tmp_path):
    check(name, EXAMPLES[name], tmp_path / "example.txt")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_kernels_stay_in_their_memory_at_length(name, tmp_path):
    check(name, 10 * EXAMPLES[name], tmp_path / "example.txt")


def test_offsets_of_heads_and_elements_beyond_int32(tmp_path):
    """A query of [heads, tokens, dim] in memory, 2^29 elements a head: int32 products would be wild addresses."""
    check("far_heads", 1, tmp_path / "example.txt")


def test_the_fence_is_one(tmp_path):
    """One element beyond a tensor ends the process: otherwise the tests above would show nothing."""
    assert run("wild_read", 1, tmp_path / "example.txt").returncode == -signal.SIGSEGV
