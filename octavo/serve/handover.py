"""Serving by vLLM or SGLang with octavo's attention plugged in: their command, built as a list, run without a shell."""

from __future__ import annotations

import importlib.util
import os
import sys

from ..errors import InvalidInput
from ..spec import dtype_name

# What each engine calls a 16-bit cache; the FP8 formats have octavo's names in both.
_SIXTEEN_BITS = {
    "vllm": {"bfloat16": "bfloat16", "float16": "float16"},
    "sglang": {"bfloat16": "bf16"},
}


def command(
    engine: str, model: str, kv_cache_dtype: str, tp: int, host: str, port: int, rest: list[str]
) -> tuple[list[str], dict[str, str]]:
    """(arguments after the Python, variables to set) that start `engine` with octavo's attention.

    rest: arguments of the engine's own; a later one wins over those made here, as in its own parser.
    """
    dtype = _cache_dtype(engine, kv_cache_dtype)
    if engine == "vllm":
        arguments = ["-m", "vllm.entrypoints.cli.main", "serve", model, "--attention-backend", "CUSTOM"]
        arguments += ["--kv-cache-dtype", dtype, "--tensor-parallel-size", str(tp), "--host", host, "--port", str(port)]
        return arguments + rest, {"VLLM_PLUGINS": "octavo"}
    arguments = ["-m", "sglang.launch_server", "--model-path", model, "--attention-backend", "octavo"]
    arguments += ["--page-size", "64", "--kv-cache-dtype", dtype, "--tp-size", str(tp)]
    return [*arguments, "--host", host, "--port", str(port), *rest], {}


def start(arguments: list[str], variables: dict[str, str]) -> None:
    """Become the engine's process, so that signals and the exit code are its own; does not return.

    A variable that is set already stays as it is.
    """
    os.execve(sys.executable, [sys.executable, *arguments], {**variables, **os.environ})


def check_installed(engine: str) -> None:
    """InvalidInput where the engine's package is not there."""
    if importlib.util.find_spec(engine) is None:
        raise InvalidInput(f"--engine {engine} needs the package {engine}, which is not installed")


def _cache_dtype(engine: str, asked: str) -> str:
    if asked == "auto":
        return asked
    name = dtype_name(asked)
    if name.startswith("fp8"):
        return name
    known = _SIXTEEN_BITS[engine]
    if name not in known:
        raise InvalidInput(
            f"--kv-cache-dtype of {engine} must be fp8_e4m3, fp8_e5m2, {', '.join(known)} or auto", asked
        )
    return known[name]
