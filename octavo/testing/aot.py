"""Compile kernels ahead of time for GPUs that are not here, and read what ptxas says of them.

A kernel module takes part by a function

    aot_cases(device: octavo.device.Device) -> Iterable[tuple[str, kernel, dict[str, object]]]

that yields, for each launch worth holding to a bound on `device` (the default tiles of common specs), a label, the
@triton.jit or Gluon kernel, and the arguments by name with which it would be launched: kernel[grid](**arguments),
num_warps and the like among them. They are best made by the very function that the launch takes them from. Tensors may
be on the "meta" device: only dtype and alignment (a meta tensor counts as aligned) are looked at. Integers are
specialised as in a launch (1, multiples of 16), so strides should be those of a real cache.

    python -m octavo.testing.aot octavo.kernels.triton.append --devices a100,h200

prints one JSON object a kernel and device. TRITON_INTERPRET must not be set: `in_a_subprocess` sees to that for a
caller that has it set.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..device import ARCHITECTURES, KNOWN, Device
from ..errors import InvalidInput

# One named device for each architecture.
DEVICES = tuple(next(d.name for d in KNOWN.values() if d.arch == arch) for arch in ARCHITECTURES)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one device.

    Attributes:
        module, label: where it is from. device, arch: what it was compiled for.
        registers: a thread. spilled: bytes of spill stores and loads. stack: bytes of stack frame.
        shared: bytes of shared memory a program; shared_limit: what the device gives one.
        num_warps: warps of a program.
    """

    module: str
    label: str
    device: str
    arch: str
    registers: int
    spilled: int
    stack: int
    shared: int
    shared_limit: int
    num_warps: int

    @property
    def faults(self) -> list[str]:
        """What keeps it from being a default: spills, or more shared memory than there is."""
        found = [f"spills {self.spilled} bytes"] if self.spilled else []
        if self.shared > self.shared_limit:
            found.append(f"takes {self.shared} bytes of shared memory of {self.shared_limit}")
        return [f"{self.module} {self.label} on {self.device} ({self.arch}) {fault}" for fault in found]


def compile_case(kernel: Any, arguments: dict[str, Any], device: Device) -> tuple[Any, str]:
    """Compile one launch for `device` as a launch would: (Triton's compiled kernel, ptxas -v of its PTX)."""
    from triton import knobs

    if knobs.runtime.interpret:
        raise InvalidInput("TRITON_INTERPRET must not be set where kernels are compiled", "1")
    with _target(device):
        kernel.device_caches.clear()  # it keeps compiled kernels by device number, and all here have number 0
        compiled = kernel.warmup(grid=(1,), **arguments)
        kernel.device_caches.clear()
    return compiled, _ptxas(compiled.asm["ptx"], int(device.arch.removeprefix("sm_")))


def compile_module(module: str, device: Device) -> Iterator[Compiled]:
    """Compile every case of `module` for `device`."""
    for label, kernel, arguments in importlib.import_module(module).aot_cases(device):
        compiled, log = compile_case(kernel, arguments, device)
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
        yield Compiled(
            module=module,
            label=label,
            device=device.name,
            arch=device.arch,
            registers=max(map(int, re.findall(r"Used (\d+) registers", log))),
            spilled=spilled,
            stack=max(map(int, re.findall(r"(\d+) bytes stack frame", log))),
            shared=compiled.metadata.shared,
            shared_limit=device.shared_memory,
            num_warps=compiled.metadata.num_warps,
        )


def in_a_subprocess(modules: Sequence[str], devices: Iterable[str] = DEVICES) -> list[Compiled]:
    """`compile_module` of each module and device in a process without TRITON_INTERPRET.

    Raises RuntimeError with what the process wrote to stderr, where it fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "octavo.testing.aot", *modules, "--devices", ",".join(devices)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


class _NoGPU:
    """What Triton asks of a driver before it compiles, for a GPU that is not here."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _target(device: Device) -> Iterator[None]:
    """Triton compiles for `device` inside."""
    from triton import runtime
    from triton.backends.compiler import GPUTarget

    driver: Any = runtime.driver
    before = driver._active
    driver.set_active(_NoGPU(GPUTarget("cuda", int(device.arch.removeprefix("sm_")), 32)))
    try:
        yield
    finally:
        driver._active = before


def _ptxas(ptx: str, capability: int) -> str:
    """What `ptxas -v` prints for `ptx`, by the ptxas and target that Triton itself takes."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}", source]
        done = subprocess.run([*command, "-o", source + ".cubin"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stderr


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON object for each case of each module on each device."""
    parser = argparse.ArgumentParser(prog="python -m octavo.testing.aot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="+", help="modules that have aot_cases")
    parser.add_argument("--devices", default=",".join(DEVICES), help="names, separated by commas")
    options = parser.parse_args(arguments)
    for module in options.modules:
        for name in options.devices.split(","):
            for compiled in compile_module(module, Device.named(name)):
                print(json.dumps(dataclasses.asdict(compiled)), flush=True)


if __name__ == "__main__":
    main()
