"""PTX loads, stores, barriers, TMA copies and tensor-core products."""

from __future__ import annotations

import re

import numpy as np

from .ptx_context import (
    LANES,
    SIZES,
    UNSIGNED,
    Context,
    Effect,
    Mask,
    e4m3_to_float,
    lanes_of,
    swizzled,
)
from .ptx_machine import TENSOR_MAP, Warp


def load(c: Context) -> Effect:
    """ld of parameters, shared and global memory."""
    size = SIZES[re.sub(r"\D", "", c.type)]
    registers = c.operands[0] if isinstance(c.operands[0], list) else [c.operands[0]]
    stores = [c.write(x, f"b{max(8 * size, 16)}") for x in registers]
    if c.parts[1] == "param":
        match = re.match(r".*_param_(\d+)$", c.operands[1][1][0])
        assert match
        value = np.full(32, c.machine.parameters[int(match[1])] & (2**64 - 1), np.uint64)
        return lambda w, mask: stores[0](w, value, mask)
    count, shared = size * len(registers), "shared" in c.parts
    address = c.address(c.operands[1], np.uint32 if shared else np.uint64)

    def effect(w: Warp, mask: Mask) -> None:
        lanes = LANES if mask is None else np.nonzero(mask)[0]
        found = np.zeros((32, count), np.uint8)
        at = address(w)[lanes]
        if shared:
            found[lanes] = c.machine.shared[c.machine.data(w, at[:, None] + np.arange(count))]
        else:
            pool, index = c.machine.global_bytes(at, count)
            found[lanes] = pool[index]
        for i, store in enumerate(stores):
            part = np.ascontiguousarray(found[:, i * size : (i + 1) * size])
            store(w, part.reshape(32) if size == 1 else part.view(UNSIGNED[size]).reshape(32), mask)

    return effect


def store_memory(c: Context) -> Effect:
    """st to shared and global memory."""
    size = SIZES[re.sub(r"\D", "", c.type)]
    values = c.operands[1] if isinstance(c.operands[1], list) else [c.operands[1]]
    reads, shared = [c.read(x, UNSIGNED[size]) for x in values], "shared" in c.parts
    address = c.address(c.operands[0], np.uint32 if shared else np.uint64)

    def effect(w: Warp, mask: Mask) -> None:
        lanes = LANES if mask is None else np.nonzero(mask)[0]
        parts = [np.ascontiguousarray(read(w)).view(np.uint8).reshape(32, -1)[:, :size] for read in reads]
        data, at = np.concatenate(parts, 1)[lanes], address(w)[lanes]
        if shared:
            c.machine.shared[c.machine.data(w, at[:, None] + np.arange(data.shape[1]))] = data
        else:
            pool, index = c.machine.global_bytes(at, data.shape[1])
            pool[index] = data

    return effect


def atomic_add(c: Context) -> Effect:
    address, value = c.address(c.operands[1], np.uint64), c.read(c.operands[2], np.uint32)
    store = c.write(c.operands[0], "u32")

    def effect(w: Warp, mask: Mask) -> None:
        old = np.zeros(32, np.uint32)
        for lane in lanes_of(mask):
            pool, index = c.machine.global_bytes(address(w)[lane : lane + 1], 4)
            old[lane] = pool[index[0]].view(np.uint32)[0]
            pool[index[0]] = (old[lane : lane + 1] + value(w)[lane]).view(np.uint8)
        store(w, old, mask)

    return effect


def load_matrices(c: Context) -> Effect:
    """ldmatrix."""
    address, stores = c.address(c.operands[1], np.uint32), [c.write(x, "b32") for x in c.operands[0]]

    def effect(w: Warp, mask: Mask) -> None:
        at = address(w)
        for i, store in enumerate(stores):
            rows = c.machine.shared[c.machine.data(w, at[8 * i : 8 * i + 8, None] + np.arange(16))]
            store(w, np.ascontiguousarray(rows).view(np.uint32).reshape(32), mask)

    return effect


def synchronise(c: Context) -> Effect:
    """bar.sync and barrier.sync."""
    if c.parts[1] == "warp":
        return lambda w, mask: None
    machine, number = c.machine, c.read(c.operands[0], np.uint32)
    threads = c.read(c.operands[1], np.uint32) if len(c.operands) > 1 else None

    def effect(w: Warp, mask: Mask) -> None:
        state = machine.named.setdefault(int(number(w)[0]), [0, 0])
        generation = state[1]
        state[0] += 1
        if state[0] == (machine.warps_per_program if threads is None else int(threads(w)[0]) // 32):
            state[0], state[1] = 0, generation + 1
        else:
            w.ready = lambda: state[1] != generation

    return effect


def barrier(c: Context) -> Effect:
    """mbarrier.init, inval, arrive, arrive.expect_tx and try_wait."""
    machine, kind = c.machine, c.parts[1]
    first = c.operands[0] if kind in ("init", "inval") else c.operands[1]
    address = c.address(first, np.uint32)
    if kind == "try_wait":
        parity, store = c.read(c.operands[2], np.uint32), c.write(c.operands[0], "pred")

        def wait(w: Warp, mask: Mask) -> None:
            at, phase = machine.barrier_at(w, int(address(w)[0])), int(parity(w)[0]) & 1
            store(w, np.full(32, at.phase != phase), mask)
            if at.phase == phase:
                w.ready = lambda: at.phase != phase

        return wait
    last = c.operands[-1]
    count = c.read(last, np.uint32) if isinstance(last, str) else None

    def effect(w: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            at, number = int(address(w)[lane]), 1 if count is None else int(count(w)[lane])
            if kind == "init":
                machine.add_barrier(w, at, number)
                continue
            if kind == "inval":
                machine.remove_barrier(w, at)
                continue
            found = machine.barrier_at(w, at)
            if "expect_tx" in c.parts:
                found.bytes += number
                number = 1
            found.pending -= number
            found.settle()

    return effect


def copy_box(c: Context) -> Effect:
    """cp.async.bulk.tensor from global to shared memory: zeros out of bounds."""
    machine = c.machine
    target, done = c.address(c.operands[0], np.uint32), c.address(c.operands[2], np.uint32)
    tensor = c.read(c.operands[1][1][0], np.uint64)
    coordinates = [c.values(x, "s32") for x in c.operands[1][1][1]]

    def effect(w: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            box = machine.maps[int(tensor(w)[lane]) - TENSOR_MAP]
            corner = [int(x(w)[lane]) for x in coordinates][::-1]
            sides = [*box.box[:-1], min(box.box[-1], box.swizzle // box.size)]
            index = np.indices(sides).reshape(len(sides), -1) + np.array(corner)[:, None]
            inside = ((index >= 0) & (index < np.array(box.shape)[:, None])).all(0)
            source = (index * np.array(box.strides)[:, None]).sum(0)[inside] * box.size
            data = np.zeros((index.shape[1], box.size), np.uint8)
            data[inside] = box.memory[source[:, None] + np.arange(box.size)]
            at = swizzled(int(target(w)[lane]) + np.arange(index.shape[1]) * box.size, box.swizzle)
            machine.shared[machine.data(w, at[:, None] + np.arange(box.size))] = data
            found = machine.barrier_at(w, int(done(w)[lane]))
            found.bytes -= data.size
            found.settle()

    return effect


def product(c: Context) -> Effect:
    """wgmma of e4m3, this warp's 16 rows of it, with an fp32 or fp16 accumulator."""
    if c.parts[1] != "mma_async":
        return lambda w, mask: None
    columns = int(re.findall(r"m64n(\d+)k32", c.name)[0])
    out, a = c.operands[0], c.operands[1]
    part = "f16x2" if c.parts[-3] == "f16" else "f32"
    sums, stores = [c.values(x, part) for x in out], [c.write(x, part) for x in out]
    b, adds = c.read(c.operands[2], np.uint64), c.read(c.operands[3], bool)
    words = [c.read(x, np.uint32) for x in a] if isinstance(a, list) else []
    a_at = None if words else c.read(a, np.uint64)

    def rows(w: Warp, descriptor: int, count: int) -> np.ndarray:
        start, group = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        width = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
        row = np.arange(count)
        at = start + row // 8 * group + row % 8 * width
        return e4m3_to_float(c.machine.shared[c.machine.data(w, swizzled(at[:, None] + np.arange(32), width))])

    def operand(w: Warp) -> np.ndarray:
        if a_at is not None:
            return rows(w, int(a_at(w)[0]), 64)[16 * (w.number % 4) :][:16]
        taken = np.zeros((16, 32), np.uint8)
        for i, word in enumerate(words):
            quad = np.ascontiguousarray(word(w)).view(np.uint8).reshape(32, 4)
            taken[(LANES // 4 + 8 * (i % 2))[:, None], (LANES % 4 * 4 + 16 * (i // 2))[:, None] + np.arange(4)] = quad
        return e4m3_to_float(taken)

    def effect(w: Warp, mask: Mask) -> None:
        result = operand(w) @ rows(w, int(b(w)[0]), columns).T
        each = 2 if part == "f16x2" else 1  # columns in a register
        for i, (old, store) in enumerate(zip(sums, stores, strict=True)):
            first = i * each
            row, column = LANES // 4 + 8 * (first // 2 % 2), first // 4 * 8 + LANES % 4 * 2 + first % 2
            new = np.stack([result[row, column + k] for k in range(each)], 1)
            new = new if each == 2 else new[:, 0]
            store(w, new + old(w) if adds(w)[0] else new, mask)

    return effect
