"""What octavo knows of a machine: facts, detected from torch or looked up by name, never measured.

A named device needs no GPU, so a plan can be made for any machine anywhere. Architectures are names ("sm_90"), and
rules list the ones they hold for: a newer one is not a superset of an older one.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from typing import Any

from .errors import InvalidInput

# Compute capabilities 8.0 to 12.1 that octavo knows.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
# Those whose tensor cores multiply e4m3: Ada, Hopper and the Blackwell families (PTX ISA, mma and wgmma and tcgen05).
FP8_DOT = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU.

    Attributes:
        name: octavo's name ("h200", "cpu") or what the driver calls a detected one.
        arch: "sm_90" and the like, "cpu", or ROCm's name ("gfx942").
        num_sms: streaming multiprocessors; 0 for the CPU.
        shared_memory: bytes one block may use (opt-in limit).
        memory_gb: memory of the device, in 1e9 bytes; 0 if it is not known.
        bandwidth_gbs: peak memory bandwidth, in 1e9 bytes a second; 0 if it is not known.
        triton_version: the installed one of a detected device, "" if there is none; the oldest that octavo
            takes for a named one.
    """

    name: str
    arch: str
    num_sms: int = 0
    shared_memory: int = 0
    memory_gb: float = 0.0
    bandwidth_gbs: float = 0.0
    triton_version: str = "3.6.0"

    @property
    def fp8_dot(self) -> bool:
        """Whether the tensor cores multiply e4m3 by e4m3."""
        return self.arch in FP8_DOT

    @property
    def triton(self) -> tuple[int, int]:
        """Major and minor of the Triton version; (0, 0) if there is none."""
        parts = (self.triton_version.split(".") + ["0", "0"])[:2]
        return (int(parts[0]), int(parts[1])) if all(p.isdigit() for p in parts) else (0, 0)

    def __str__(self) -> str:
        return self.name if self.name == self.arch else f"{self.name} ({self.arch})"

    @staticmethod
    def named(name: str) -> Device:
        """The device that octavo knows as `name` (any case). Raises InvalidInput, listing the known names."""
        device = KNOWN.get(name.lower()) if isinstance(name, str) else None
        if device is None:
            raise InvalidInput(f"device must be one of {', '.join(KNOWN)}, or auto, or a torch device", repr(name))
        return device

    @staticmethod
    def detect(device: Any = None) -> Device:
        """The machine behind a torch device or its name; None: the current GPU, or the CPU where torch sees none."""
        import torch

        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InvalidInput("device must be something torch.device takes", repr(device)) from error
        if device.type == "cpu":
            return KNOWN["cpu"]
        if device.type != "cuda":
            raise InvalidInput("device must be a cpu or cuda device", repr(str(device)))
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise InvalidInput(f"device must be a GPU that torch sees ({count} here)", repr(str(device)))
        return _detect_gpu(torch.cuda.current_device() if device.index is None else device.index)

    @staticmethod
    def of(device: Any = None) -> Device:
        """`device` as a Device: one already, a known name, "auto" or None (detect), or a torch device or its name."""
        if isinstance(device, Device):
            return device
        if device is None or device == "auto":
            return Device.detect()
        if isinstance(device, str) and device.split(":")[0] != "cuda" and not device.startswith("cpu:"):
            return Device.named(device)
        return Device.detect(device)


_KIB = 1024
# SMs, memory and bandwidth: NVIDIA's data sheets of each product (SXM forms for A100, H100, H200, B200, B300).
# Shared memory: CUDA C Programming Guide, technical specifications per compute capability, maximum per block.
KNOWN = {
    d.name: d
    for d in (
        Device("a100", "sm_80", 108, 163 * _KIB, 80, 2039),
        Device("a10", "sm_86", 72, 99 * _KIB, 24, 600),
        Device("l40s", "sm_89", 142, 99 * _KIB, 48, 864),
        Device("h100", "sm_90", 132, 227 * _KIB, 80, 3350),
        Device("h200", "sm_90", 132, 227 * _KIB, 141, 4800),
        Device("b200", "sm_100", 148, 227 * _KIB, 180, 8000),
        Device("b300", "sm_103", 148, 227 * _KIB, 288, 8000),
        Device("rtx5090", "sm_120", 170, 99 * _KIB, 32, 1792),
        Device("gb10", "sm_121", 48, 99 * _KIB, 128, 273),
        Device("cpu", "cpu"),
    )
}


def triton_version() -> str:
    """Version of the installed Triton from its metadata, without importing it; "" if there is none."""
    for package in ("triton", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@functools.lru_cache(maxsize=64)
def _detect_gpu(index: int) -> Device:
    import torch

    return from_properties(torch.cuda.get_device_properties(index), rocm=torch.version.hip is not None)


def known_gpu(product: str) -> Device | None:
    """The known device that a driver's name of a GPU speaks of ("NVIDIA H200" is h200); None if there is none."""
    words = product.lower().replace("rtx ", "rtx").replace("-", " ").split()
    words += [word[1:] for word in words if word.startswith("gb") and word not in KNOWN]  # a GB200 has B200s
    return next((device for name, device in KNOWN.items() if name in words), None)


def from_properties(properties: Any, rocm: bool = False) -> Device:
    """A Device from what torch.cuda.get_device_properties returned; bandwidth from the known device of its name."""
    same = known_gpu(properties.name)
    return Device(
        name=properties.name,
        arch=properties.gcnArchName.split(":")[0] if rocm else f"sm_{properties.major}{properties.minor}",
        num_sms=properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 0),
        memory_gb=round(properties.total_memory / 1e9, 1),
        bandwidth_gbs=same.bandwidth_gbs if same else 0.0,
        triton_version=triton_version(),
    )


@functools.lru_cache(maxsize=64)
def device_of(device: Any) -> Device:
    """`Device.detect` of a tensor's torch.device, kept: what a launch asks for each time."""
    return Device.detect(device)


def torch_device(device: Any) -> Any:
    """The torch.device, with its index, of a CPU or of a GPU that torch sees. Raises InvalidInput for anything else."""
    import torch

    Device.detect("cuda:0" if device is None else device)  # says what is needed of a device that is not there
    return torch.empty(0, device=device).device
