"""What PTX instructions do: `build` makes a step of each. Those that the Hopper kernels use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import ptx_arithmetic as arithmetic
from . import ptx_memory as memory
from .ptx_context import Context, Effect, Mask
from .ptx_machine import Instruction, Machine, Warp


def branch(c: Context) -> Effect:
    machine, target = c.machine, c.operands[0]
    target = f"{target}@{c.scope}" if f"{target}@{c.scope}" in machine.labels else target

    def effect(w: Warp, mask: Mask) -> None:
        assert mask is None, f"lanes part at {target}"
        w.at = machine.labels[target]

    return effect


def jump(c: Context) -> Effect:
    """brx.idx."""
    index, table = c.read(c.operands[0], np.uint32), c.machine.tables[c.operands[1]]

    def effect(w: Warp, mask: Mask) -> None:
        w.at = c.machine.labels[table[int(index(w)[0])]]

    return effect


def leave(c: Context) -> Effect:
    def effect(w: Warp, mask: Mask) -> None:
        w.done = True

    return effect


def nothing(c: Context) -> Effect:
    """What only orders or accounts."""
    return lambda w, mask: None


EFFECTS: dict[str, Callable[[Context], Effect]] = {
    **dict.fromkeys([*arithmetic.FLOATS, *arithmetic.INTEGERS], arithmetic.arithmetic),
    "setp": arithmetic.compare,
    "selp": arithmetic.select,
    "bfe": arithmetic.extract_bits,
    "prmt": arithmetic.permute_bytes,
    "shf": arithmetic.funnel_shift,
    "cvt": arithmetic.convert,
    "mov": arithmetic.move,
    "cvta": arithmetic.move,
    "shfl": arithmetic.shuffle,
    "vote": arithmetic.vote,
    "redux": arithmetic.reduce_lanes,
    "popc": arithmetic.count_bits,
    "elect": arithmetic.elect,
    "ld": memory.load,
    "st": memory.store_memory,
    "atom": memory.atomic_add,
    "ldmatrix": memory.load_matrices,
    "bar": memory.synchronise,
    "barrier": memory.synchronise,
    "mbarrier": memory.barrier,
    "cp": memory.copy_box,
    "wgmma": memory.product,
    "bra": branch,
    "brx": jump,
    "ret": leave,
    **dict.fromkeys(["setmaxnreg", "fence", "griddepcontrol"], nothing),
}


def build(machine: Machine, instruction: Instruction) -> Callable[[Warp], None]:
    """The step that an instruction is, its guard included."""
    if instruction.parts[0] not in EFFECTS:
        raise NotImplementedError(instruction.name)
    effect = EFFECTS[instruction.parts[0]](Context(machine, instruction))
    if instruction.guard is None:
        return lambda w: effect(w, None)
    negated, predicate = instruction.guard

    def step(w: Warp) -> None:
        mask = w.registers[predicate] != negated
        if mask.all():
            effect(w, None)
        elif mask.any():
            effect(w, mask)

    return step
