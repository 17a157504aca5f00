"""How PTX instructions read the lanes of a warp and write them, and the number formats that they have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .ptx_machine import Instruction, Machine, Warp

Read = Callable[[Warp], np.ndarray]
Mask = np.ndarray | None
Effect = Callable[[Warp, Mask], None]

UNSIGNED = {1: np.uint16, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
LANES = np.arange(32)


def e4m3_to_float(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).view(torch.float8_e4m3fn).float().numpy()


def float_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest, saturated; NaN stays."""
    values = torch.from_numpy(np.ascontiguousarray(x.astype(np.float32)))
    result = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    result[values.isnan()] = 0x7F
    return result.numpy()


def float_to_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Shared-memory addresses as TMA and wgmma permute them."""
    bits = {128: 7, 64: 3, 32: 1}.get(width, 0)
    return address ^ (((address >> 7) & bits) << 4)


def type_of(part: str) -> Any:
    """The unsigned type that holds a value of a PTX type; bool for predicates."""
    if part == "pred":
        return bool
    if part in ("f16x2", "bf16x2"):
        return np.uint32
    return UNSIGNED[SIZES[re.sub(r"^[a-z]+", "", part)]]


class Context:
    """An instruction being built: how it reads operands and writes results."""

    def __init__(self, machine: Machine, instruction: Instruction) -> None:
        self.machine, self.parts, self.operands = machine, instruction.parts, instruction.operands
        self.scope, self.name = instruction.scope, instruction.name
        self.type = self.parts[-1]

    def read(self, operand: str, kind: Any) -> Read:
        """Values [32] of a register, literal or special register."""
        machine = self.machine
        special = {
            "%tid.x": lambda w: w.thread,
            "%ctaid.x": lambda w: np.full(32, machine.program, np.uint32),
            "%nctaid.x": lambda w: np.full(32, machine.grid, np.uint32),
            "%laneid": lambda w: LANES.astype(np.uint32),
            "%lanemask_lt": lambda w: (np.uint32(1) << LANES.astype(np.uint32)) - np.uint32(1),
            "global_smem": lambda w: np.zeros(32, np.uint32),
            "true": lambda w: np.ones(32, bool),
        }
        if operand in special:
            get = special[operand]
        elif re.fullmatch(r"-?\d+|0[xf][0-9a-fA-F]+U?", operand):
            number = int(operand[2:].rstrip("U"), 16) if operand[:2] in ("0x", "0f") else int(operand)
            constant = np.full(32, number & (2**64 - 1), np.uint64).astype(kind)
            return lambda w: constant
        else:
            nothing = np.zeros(32, kind)  # what was never written: LLVM's undefined values
            get = lambda w: w.registers.get(operand, nothing)  # noqa: E731
        return lambda w: (lambda x: x if x.dtype == kind else x.astype(kind))(get(w))

    def floats(self, operand: str) -> Read:
        get = self.read(operand, np.uint32)
        return lambda w: get(w).view(np.float32)

    def halves(self, operand: str) -> Read:
        get = self.read(operand, np.uint32)
        return lambda w: np.ascontiguousarray(get(w)).view(np.float16).reshape(32, 2).astype(np.float32)

    def half(self, operand: str) -> Read:
        get = self.read(operand, np.uint16)
        return lambda w: get(w).view(np.float16).astype(np.float32)

    def values(self, operand: str, part: str) -> Read:
        """As the numbers that a PTX type means."""
        by_type = {"f32": self.floats, "f16x2": self.halves, "f16": self.half}
        if part in by_type:
            return by_type[part](operand)
        kind = type_of(part)
        get = self.read(operand, kind)
        return (lambda w: get(w).view(SIGNED[kind])) if part[0] == "s" else get

    def write(self, register: str, part: str) -> Callable[[Warp, np.ndarray, Mask], None]:
        """Store numbers of a PTX type, of the lanes of a mask."""
        kind = type_of(part)

        def store(w: Warp, x: np.ndarray, mask: Mask) -> None:
            if part == "f32":
                x = np.ascontiguousarray(x.astype(np.float32)).view(np.uint32)
            elif part in ("f16x2", "f16"):
                x = np.ascontiguousarray(x.astype(np.float16)).view(kind).reshape(32)
            else:
                x = np.asarray(x).astype(kind)
            if mask is not None:
                x = np.where(mask, x, w.registers.get(register, np.zeros(32, kind)))
            w.registers[register] = x

        return store

    def address(self, operand: Any, kind: Any) -> Read:
        """Addresses of a memory operand."""
        match = re.match(r"(.+?)(?:\+(-?\d+))?$", operand[1][0])
        assert match
        get, offset = self.read(match[1], kind), int(match[2] or 0)
        return lambda w: get(w).astype(np.int64) + offset


def lanes_of(mask: Mask) -> Any:
    return range(32) if mask is None else np.nonzero(mask)[0]
