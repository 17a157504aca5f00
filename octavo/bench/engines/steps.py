"""Engine steps for `octavo bench --engine`: each backend that the engine has, at few and at many sequences."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path

from ...errors import InvalidInput
from ...spec import one_of

# Sides: octavo, octavo without its Hopper kernels, then the engine's own, with FP8 and with 16-bit caches.
SIDES = {
    "vllm": ("octavo:fp8", "octavo-triton:fp8", "flash:fp8", "triton:fp8", "octavo:auto", "flash:auto", "triton:auto"),
    "sglang": (
        *("octavo:fp8_e4m3", "octavo-triton:fp8_e4m3", "fa3:fp8_e4m3", "triton:fp8_e4m3"),
        *("octavo:auto", "fa3:auto", "triton:auto"),
    ),
}
# Sequences, tokens of a prompt, tokens generated: of Llama-3.1-8B's shapes with dummy weights.
SHAPES = ((16, 8192, 64), (512, 512, 64))
SECONDS = 540


def check(engine: str, site: Path | None) -> None:
    """Raise InvalidInput for an engine that is not known or not there."""
    one_of("--engine", engine, tuple(SIDES))
    there = (site / engine).is_dir() if site is not None else importlib.util.find_spec(engine) is not None
    if not there:
        raise InvalidInput(
            f"--engine {engine} needs {engine}, which is not installed", f"site {site}" if site else "none"
        )


def measure(engine: str, out: Path, site: Path | None) -> None:
    """Append a record a side and shape to `out`; prints the engine's table. A side that fails is a record too."""
    run = import_module(f"octavo.bench.engines.in_{engine}").main
    common = ["throughput", "--out", str(out), "--budget", str(SECONDS), "--sides", *SIDES[engine]]
    common += ["--site", str(site)] if site is not None else []
    if engine == "vllm":
        run([*common, "--shapes", *("x".join(map(str, shape)) for shape in SHAPES)])
        return
    for batch, tokens, more in SHAPES:
        run([*common, "--batch", str(batch), "--input", str(tokens), "--output", str(more)])
