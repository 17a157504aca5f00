"""What tests of compiled kernels share: a process that compiles, what a launch is found by, machine code as text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def printed(module: str) -> list[Any]:
    """What a test module prints as JSON, a value a line, when it is run as a program.

    TRITON_INTERPRET, which its tests have set, must not be where kernels are compiled.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def launch_key(kernel: Any, arguments: dict[str, Any]) -> dict[str, str]:
    """What Triton's binder finds a compiled kernel by, by argument; of constants in one argument, by field.

    Inside octavo.testing.aot's `_target`, which names the device.
    """
    from octavo.kernels.constants import CompileTime

    binder = kernel.device_caches[0][-1]
    bound, specialisation, options = binder(**arguments, debug=False)
    found = {"kernel": kernel.__name__, **{name: repr(value) for name, value in options.items()}}
    for parameter, value in zip(kernel.params, specialisation, strict=True):
        given = bound[parameter.name]
        if isinstance(given, CompileTime):
            found |= {f"{parameter.name}.{field}": repr(x) for field, x in given.items()}
        else:
            found[parameter.name] = repr(value)
    return found


def disassembly(cubin: bytes) -> str:
    """A kernel's machine code as text, by the disassembler that Triton brings."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/nvdisasm")
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def instructions(cubin: bytes) -> list[tuple[str, list[str]]]:
    """(opcode, registers in order) of a kernel."""
    lines = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);", disassembly(cubin))
    return [(op, re.findall(r"\bR\d+\b", rest)) for op, rest in lines]
