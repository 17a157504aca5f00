"""Run a kernel's PTX without a GPU: warps of 32 lanes in numpy, shared memory, mbarriers, TMA and wgmma.

It is there to see values and protocols of the Hopper kernels, which Triton's interpreter does not run: what a kernel
computes, that its barriers cannot lock, that no address is out of bounds, that an mbarrier's memory is used for nothing
else. Asynchronous copies and products take effect at once and warps run in turns, so it shows neither races nor times;
and it takes what Triton made, not what ptxas does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

TENSOR_MAP = 1 << 50  # addresses of descriptors
POOL_BITS = 40  # an address is (pool << POOL_BITS) + offset
BARRIER_BYTES = 8
STEPS = 2000  # of a warp, before the next one runs
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


class Deadlock(Exception):
    """Every warp waits."""


class MisusedBarrier(Exception):
    """Memory of an mbarrier that is used for something else, or an mbarrier that is not there."""


class Instruction(NamedTuple):
    """One PTX instruction: its guard (negated, predicate), opcode in parts, operands, and the scope it stands in."""

    guard: tuple[bool, str] | None
    parts: tuple[str, ...]
    operands: list[Any]  # names, literals, lists of them, or ("memory", [parts])
    scope: int | None

    @property
    def name(self) -> str:
        """The opcode as it is written."""
        return ".".join(self.parts)


def tokens(body: str) -> list[str]:
    """Statements, labels ("label:...") and the braces of scopes, in order."""
    found, statement, depth = [], "", 0
    for char in body:
        if char == "{" and (depth or statement.strip()):
            depth, statement = depth + 1, statement + char
        elif char == "}" and depth:
            depth, statement = depth - 1, statement + char
        elif char in "{}":
            found.append(char)
            statement = ""
        elif char == ";":
            found.append(statement.strip())
            statement = ""
        elif char == ":" and not depth and re.fullmatch(r"\s*[\w$]+", statement):
            found.append("label:" + statement.strip())
            statement = ""
        else:
            statement += char
    return found


def parse(text: str) -> tuple[list[Instruction], dict[str, int], dict[str, list[str]]]:
    """The instructions of the only kernel in `text`, where labels stand, and its jump tables.

    Registers and labels of an inner scope, those of inline assembly, get the number of the scope to their names.
    """
    entry = text.index(".entry")
    body = text[text.index("{", entry + text[entry:].index(")")) :]
    body = re.sub(r"//[^\n]*", "", body)
    tables = {
        name: [target.strip() for target in targets.split(",")]
        for name, targets in re.findall(r"(\$L_brx_\d+)\s*:\s*\.branchtargets([^;]*);", body)
    }
    body = re.sub(r"\n\s*\.(loc|file|pragma)[^\n]*", "\n", body)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[tuple[int, dict[str, str]]] = [(0, {})]
    made = 0

    def renamed(name: str) -> str:
        return next((names[name] for _, names in reversed(scopes) if name in names), name)

    def operand(text: str) -> Any:
        if text.startswith("{"):
            return [operand(part.strip()) for part in text[1:-1].split(",")]
        if text.startswith("["):
            address, _, rest = text[1:-1].partition(",")
            parts: list[Any] = [renamed(address.replace(" ", ""))]
            if rest:
                parts.append([renamed(x.strip()) for x in rest.strip().strip("{}").split(",")])
            return "memory", parts
        return renamed(text)

    for token in tokens(body):
        inner = len(scopes) > 2
        number, names = scopes[-1]
        if token == "{":
            made += 1
            scopes.append((made, {}))
        elif token == "}":
            scopes.pop()
        elif token.startswith("label:"):
            label = token.removeprefix("label:")
            labels[f"{label}@{number}" if inner else label] = len(code)
        elif token.startswith(".reg") and inner:
            names.update({x.strip(): f"{x.strip()}@{number}" for x in token.split(None, 2)[2].split(",")})
        elif token and not token.startswith("."):
            match = re.match(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", token, re.S)
            assert match, token
            guard = (match[1] == "!", renamed(match[2])) if match[2] else None
            operands = [operand(x.strip()) for x in _OPERANDS.findall(match[4].replace("\n", " "))]
            code.append(Instruction(guard, tuple(match[3].split(".")), operands, number if inner else None))
    return code, labels, tables


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    count: int
    phase: int = 0
    pending: int = field(init=False)
    bytes: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def settle(self) -> None:
        """Begin the next phase if nothing is waited for."""
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


@dataclass
class TensorMap:
    """A TMA descriptor over bytes; shape, strides and box in elements of `size` bytes."""

    memory: np.ndarray
    shape: list[int]
    strides: list[int]
    box: list[int]
    size: int
    swizzle: int


class Warp:
    """32 lanes: their registers by name, and where they are."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.at = 0
        self.registers: dict[str, np.ndarray] = {}
        self.done = False
        self.ready: Callable[[], bool] | None = None  # what it waits for
        self.thread = np.arange(32 * number, 32 * number + 32, dtype=np.uint32)


class Machine:
    """One streaming multiprocessor with a kernel loaded.

    Args:
        text: the PTX. parameters: integers by position. maps: tensor maps by position.
        shared: bytes of shared memory. pools: global memory, uint8 arrays by number. grid: programs in all.
    """

    def __init__(
        self,
        text: str,
        parameters: dict[int, int],
        maps: dict[int, TensorMap],
        shared: int,
        pools: dict[int, np.ndarray],
        grid: int,
    ) -> None:
        from .ptx_instructions import build

        self.code, self.labels, self.tables = parse(text)
        self.parameters, self.maps, self.pools, self.grid = parameters, maps, pools, grid
        self.shared_bytes = shared
        self.steps = [build(self, instruction) for instruction in self.code]
        threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", text)
        assert threads
        self.warps_per_program = int(threads[1]) // 32

    def run(self, program: int) -> None:
        """Run one program to its end, in poisoned shared memory."""
        self.program = program
        self.shared = np.full(self.shared_bytes + 1024, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}  # the live ones
        self.held = np.zeros(self.shared.size, bool)  # bytes that are theirs
        self.named: dict[int, list[int]] = {}  # arrivals and generation of bar.sync
        warps = [Warp(number) for number in range(self.warps_per_program)]
        while any(not warp.done for warp in warps):
            moved = [self.advance(warp) for warp in warps]
            if not any(moved):
                where = [(w.number, self.code[w.at - 1].name) for w in warps if not w.done]
                raise Deadlock(f"program {program}: {where}")

    def advance(self, warp: Warp) -> bool:
        """Run a warp until it waits or its turn is over; whether it could move at all."""
        if warp.done or (warp.ready is not None and not warp.ready()):
            return False
        warp.ready = None
        for _ in range(STEPS):
            step = self.steps[warp.at]
            warp.at += 1
            step(warp)
            if warp.done or warp.ready is not None:
                break
        return True

    def fault(self, warp: Warp, what: str) -> MisusedBarrier:
        """The error of the instruction that `warp` is at."""
        name = self.code[warp.at - 1].name
        return MisusedBarrier(f"program {self.program}, warp {warp.number}, {name}: {what}")

    def add_barrier(self, warp: Warp, address: int, count: int) -> None:
        """mbarrier.init: its 8 bytes are its own until mbarrier.inval, by PTX's rules; what they held is lost."""
        if address % BARRIER_BYTES or address in self.barriers:
            live = "a live mbarrier has" if address in self.barriers else "is no multiple of 8"
            raise self.fault(warp, f"init at {address} of shared memory, which {live}")
        self.barriers[address] = Barrier(count)
        self.held[address : address + BARRIER_BYTES] = True
        self.shared[address : address + BARRIER_BYTES] = 0xFF

    def remove_barrier(self, warp: Warp, address: int) -> None:
        """mbarrier.inval."""
        self.barrier_at(warp, address)
        del self.barriers[address]
        self.held[address : address + BARRIER_BYTES] = False

    def barrier_at(self, warp: Warp, address: int) -> Barrier:
        """The live mbarrier of an address."""
        if address not in self.barriers:
            raise self.fault(warp, f"no live mbarrier at {address} of shared memory")
        return self.barriers[address]

    def data(self, warp: Warp, index: np.ndarray) -> np.ndarray:
        """`index`, bytes of shared memory that are read or written; no live mbarrier's.

        On a GPU nothing is seen of it until processes share it: then the bits of the mbarrier come back over the data.
        """
        held = self.held[index]
        if np.count_nonzero(held):
            found = sorted({int(at) // BARRIER_BYTES * BARRIER_BYTES for at in index[held]})
            raise self.fault(warp, f"data in the memory of live mbarriers, at {found} of shared memory")
        return index

    def global_bytes(self, addresses: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The pool that `addresses` [n] lie in, and the indices [n, count] of their bytes; none out of bounds."""
        found = addresses.astype(np.int64)
        pool = self.pools[int(found[0]) >> POOL_BITS]
        index = (found & ((1 << POOL_BITS) - 1))[:, None] + np.arange(count)
        assert (found >> POOL_BITS == found[0] >> POOL_BITS).all(), "addresses in several tensors"
        assert index.max() < pool.size, f"byte {index.max()} of a tensor of {pool.size}"
        return pool, index


def run_kernel(kernel: Any, arguments: dict[str, Any], device: Any, grid: int) -> None:
    """Launch a Gluon kernel over CPU tensors as kernel[(grid,)](**arguments) would on `device`."""
    from octavo.testing.aot import compile_case

    compiled, _ = compile_case(kernel, arguments, device)
    parameters: dict[int, int] = {}
    maps: dict[int, TensorMap] = {}
    pools: dict[int, np.ndarray] = {}
    numbers: dict[int, int] = {}

    def address(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage.data_ptr(), len(numbers) + 1)
        pools[number] = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
        return (number << POOL_BITS) + tensor.data_ptr() - storage.data_ptr()

    def add(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for inner, part in zip(kind, value, strict=True):
                add(inner, part)
        elif kind.startswith("tensordesc"):
            base, size = value.base, value.base.element_size()
            at = address(base)
            memory = pools[at >> POOL_BITS][at & ((1 << POOL_BITS) - 1) :]
            swizzle = value.layout.swizzle_byte_width
            maps[len(parameters)] = TensorMap(
                memory, list(value.shape), list(value.strides), list(value.block_shape), size, swizzle
            )
            for number in (0, *value.shape, *value.strides):
                parameters[len(parameters)] = int(number)
        elif kind != "constexpr":
            parameters[len(parameters)] = address(value) if isinstance(value, torch.Tensor) else int(value)

    for name, kind in compiled.src.signature.items():
        add(kind, arguments[name])
    for _ in range(2):  # scratch memory, of which there is none
        parameters[len(parameters)] = 0
    machine = Machine(compiled.asm["ptx"], parameters, maps, compiled.metadata.shared, pools, grid)
    for program in range(grid):
        machine.run(program)
