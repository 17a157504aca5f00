"""prefill: chunked, paged, causal FP8 prefill on Hopper, over the leaf layout.

S = Q K^T and O = P V multiply the cache's FP8 bytes as they lie in memory; P goes from the accumulator of the first
product to the operand of the second in registers, because the leaf layout keeps V's tokens in that order. The query is
quantised here, a scale for each row and head; `_prefill_steps` says how fast and exact differ.

Persistent programs of one producer warp (TMA) and two consumers of four warps, of 64 packed rows each, take items from
the list of `prefill_plan` and walk the keys from the diagonal back. Decode sequences of a call are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import hopper_tuning
from ...calls import AttentionCall
from ...device import Device, device_of
from ...spec import AttentionSpec
from . import _pipeline as pipe
from ._aot import FEATURES, LLAMA, example_call
from ._names import reinterpret
from ._prefill_repeats import repeat_lost
from ._prefill_results import Parts, finish_tile, normaliser
from ._prefill_steps import (
    LOWEST,
    blocks_fast,
    free,
    load_query,
    lost_rows,
    no_output,
    one_block,
    row_factors,
    scores_of,
    start_scores,
    wait_full,
)
from ._prefill_tiles import BLOCKS, FACTOR, HEAD, LENGTH, MISSING, ROWS, SEEN, TOP, Batch, Scales, get, produce
from ._results import NOTHING, Output
from .decode import descriptors, per_head
from .prefill_plan import Constants, constants, prefill_plan, schedule_of

CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
MAX_REGISTERS = 168  # of a thread at the launch, of which the consumers then take the producer's


@gluon.jit
def consume(batch, scales, output, memory, schedule, query_bars, bars, q_in, q_terms, factors, k_tiles, v_tiles, record,
            WHICH: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """Attend for 64 of a tile's packed rows, tile by tile, and write results or parts of them."""
    q_full, q_empty = query_bars
    k_full, v_full, empty, v_landed = bars
    ints, floats = record
    R: gl.constexpr = gl.SliceLayout(1, pipe.accumulator_layout(c.block))
    r = gl.arange(0, ROWS, layout=R)
    count = gl.program_id(0) * 0
    number = count  # of a block: a tile has one more than it attends over, see `produce`
    mbarrier.wait(q_full, 0)
    blocks = get(ints, count, BLOCKS)
    while blocks >= 0:
        length = get(ints, count, LENGTH)
        seen = get(ints, count, SEEN) + WHICH * (ROWS // c.pack)
        load_query(q_in.index(WHICH), q_terms, factors, get(ints, count, HEAD), get(floats, count, FACTOR), scales, c)
        mbarrier.arrive(q_empty, count=1)
        factor = row_factors(factors, c)
        limit = gl.minimum(r // c.pack + seen, length)  # a row sees tokens below it
        end = number + blocks
        # From the diagonal back: blocks that some row does not see whole, those that all do, the window's far end.
        top = get(ints, count, TOP)
        whole = gl.minimum(gl.maximum(gl.minimum(seen, length), 0) // c.block, top + 1)
        if get(ints, count, MISSING) > 0:
            whole = whole * 0
        end_masked = number + gl.minimum(top + 1 - whole, blocks)
        end_whole = end
        if c.window > 0:
            oldest = gl.minimum(seen + (ROWS - 1) // c.pack, length) - c.window  # of the last row
            below = (gl.maximum(oldest, 0) + c.block - 1) // c.block
            end_whole = number + gl.maximum(gl.minimum(top + 1 - below, blocks), 0)
        o = no_output(c)
        weight = gl.zeros([ROWS, 4], gl.float32, pipe.pair_layout(64, 4))
        reference = gl.full([ROWS], NOTHING if c.exact else LOWEST, gl.float32, R)
        wait_full(k_full, number, c)
        s = start_scores(number, q_terms, k_tiles, c)
        s = scores_of(warpgroup_mma_wait(0, deps=[s]), c)
        free(empty, number, c)
        tile = (batch, ints, count)
        while number < end_masked:
            block = end - 1 - number + (top + 1 - blocks)
            s, o, reference, weight, factor = one_block(block, number, q_terms, s, o, reference, weight, factor,
                                                        limit, tile, k_tiles, v_tiles, bars, True, c)  # fmt: skip
            number += 1
        if not c.exact:
            while number < end_whole - (c.unroll - 1):
                s, o, reference, weight, factor = blocks_fast(
                    number, q_terms, s, o, reference, weight, factor, k_tiles, v_tiles, bars, c
                )
                number += c.unroll
        while number < end_whole:
            s, o, reference, weight, factor = one_block(0, number, q_terms, s, o, reference, weight, factor,
                                                        limit, tile, k_tiles, v_tiles, bars, False, c)  # fmt: skip
            number += 1
        if c.window > 0:
            while number < end:
                block = end - 1 - number + get(ints, count, TOP) + 1 - get(ints, count, BLOCKS)
                s, o, reference, weight, factor = one_block(block, number, q_terms, s, o, reference, weight, factor,
                                                            limit, tile, k_tiles, v_tiles, bars, True, c)  # fmt: skip
                number += 1
        begin = (get(ints, count, TOP) + 1 - get(ints, count, BLOCKS)) * c.block
        lost = lost_rows(reference, factor, limit, begin, (get(ints, count, TOP) + 1) * c.block, c)
        inverse, lse = normaliser(reference, weight, factor, factors, lost, c)
        finish_tile(o, inverse, lse, lost, count, ints, floats, output, memory, schedule, WHICH, c)
        count += 1
        number += 1
        mbarrier.wait(q_full, count & 1)
        blocks = get(ints, count, BLOCKS)


# What changes from step to step is no reason to compile again.
@gluon.jit(do_not_specialize=["table_row", "num_pages", "rows", "size"])
def prefill_kernel(q_desc, k_desc, v_desc, query_starts, page_table, table_row, num_pages, rows, size,
                   schedule, scales, output, memory, c: gl.constexpr):  # fmt: skip
    """One launch: attention of the prefill sequences of a batch, merged."""
    batch = Batch(query_starts, page_table, table_row, num_pages, rows, size)
    FP8: gl.constexpr = gl.float8e4nv
    STAGES: gl.constexpr = c.stages
    DIM: gl.constexpr = c.dim
    ROWS_K: gl.constexpr = gl.NVMMASharedLayout(c.panel, 8, 2)
    ROWS_V: gl.constexpr = gl.NVMMASharedLayout(c.page, 8, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS_Q: gl.constexpr = gl.NVMMASharedLayout(q_desc.layout.swizzle_byte_width, c.query_bits, 2)
    # TMA sees boxes of heads or pages, the consumers tiles of rows or tokens
    q_pages = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    q_in = reinterpret(q_pages, q_desc.dtype, [2, ROWS, c.dim], ROWS_Q)
    q_a = gl.allocate_shared_memory(FP8, [ROWS, DIM], ROWS_K)
    q_b = gl.allocate_shared_memory(FP8, [ROWS, DIM], ROWS_K)
    if c.query_terms == 2:
        terms_a = (q_a, gl.allocate_shared_memory(FP8, [ROWS, DIM], ROWS_K))
        terms_b = (q_b, gl.allocate_shared_memory(FP8, [ROWS, DIM], ROWS_K))
    else:
        terms_a = (q_a,)
        terms_b = (q_b,)
    factors_a = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    factors_b = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    k_pages = gl.allocate_shared_memory(FP8, [c.stages * c.panels * c.pages, 1, 1, c.page, c.panel], k_desc.layout)
    v_pages = gl.allocate_shared_memory(FP8, [c.stages * c.pages, 1, 1, c.dim, c.page], v_desc.layout)
    k_tiles = reinterpret(k_pages, FP8, [c.stages, c.block, c.dim], ROWS_K)
    v_tiles = reinterpret(v_pages, FP8, [c.stages, c.dim, c.block], ROWS_V)
    record = (
        gl.allocate_shared_memory(gl.int32, [32, 1], FLAT),
        gl.allocate_shared_memory(gl.float32, [32, 1], FLAT),
    )
    q_full, q_empty = pipe.make_ring(1, 2)
    k_full, empty = pipe.make_ring(STAGES, 2)
    v_full = pipe.make_barriers(STAGES)
    v_landed = pipe.make_barriers(1)
    fence_async_shared()
    query_bars = (q_full.index(0), q_empty.index(0))
    bars = (k_full, v_full, empty, v_landed.index(0))
    gl.warp_specialize(
        [
            (consume, (batch, scales, output, memory, schedule, query_bars, bars, q_in, terms_a, factors_a,
                       k_tiles, v_tiles, record, 0, c)),
            (consume, (batch, scales, output, memory, schedule, query_bars, bars, q_in, terms_b, factors_b,
                       k_tiles, v_tiles, record, 1, c)),
            (produce, (q_desc, k_desc, v_desc, batch, schedule, scales, output, query_bars, bars,
                       q_pages, k_pages, v_pages, record, c)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
    if c.watched:
        AGAIN: gl.constexpr = c.again
        buffers = (q_pages, q_in, terms_a, factors_a, k_pages, v_pages, k_tiles, v_tiles, record)
        used = (q_full, q_empty, k_full, empty, v_full, v_landed)
        repeat_lost(q_desc, k_desc, v_desc, batch, schedule, scales, output, buffers, used, AGAIN)


# ---- the launch


def prefill(call: AttentionCall) -> None:
    """Write the rows of every prefill sequence of `call`, and 0 and -inf to the rows of no sequence.

    Without a schedule in `call` one is made here, in the end of the workspace, by one launch more. Nothing is read on
    the host. A query whose base or strides are no multiple of 16 bytes is copied first: TMA reads no other.
    """
    if call.q.shape[0] == 0:
        return
    device = device_of(call.q.device)
    schedule = call.prefill_schedule
    if schedule is None:
        schedule = own_schedule(call, device)
    prefill_kernel[(device.num_sms,)](**launch(call, schedule, device))


def own_schedule(call: AttentionCall, device: Device) -> torch.Tensor:
    """The schedule of `call`, made in the end of its workspace."""
    batch, rows = call.seq_lens.shape[0], call.q.shape[0]
    ints = hopper_tuning.prefill_schedule_ints(call.spec, device, batch, rows)
    schedule = call.workspace[: call.workspace.numel() // 4 * 4].view(torch.int32)[-ints:]
    prefill_plan(
        call.spec, call.seq_lens, call.page_table, call.query_starts, schedule, call.num_decodes, call.max_query_len
    )
    return schedule


def launch(call: AttentionCall, memory: torch.Tensor, device: Device) -> dict[str, Any]:
    """The arguments by name that the kernel is launched with for `call`, by the schedule in `memory`."""
    spec, cache, table, lse = call.spec, call.cache, call.page_table, call.lse
    c = constants(spec)
    sequences, rows = call.seq_lens.shape[0], call.q.shape[0]
    k_desc, v_desc = descriptors(spec, cache, c)
    floats = call.workspace[: call.workspace.numel() // 4 * 4].view(torch.float32)
    return {
        "q_desc": query_descriptor(call.q, c),
        "k_desc": k_desc,
        "v_desc": v_desc,
        "query_starts": call.query_starts,
        "page_table": table,
        "table_row": table.stride(0),
        "num_pages": cache.strides.num_pages,
        "rows": rows,
        "size": sequences,
        "schedule": schedule_of(spec, device, memory),
        "scales": Scales(call.q_scale, per_head(call.q_scale), cache.k_scale, per_head(cache.k_scale)),
        "output": Output(
            call.out,
            *call.out.stride(),
            lse,
            *((0, 0) if lse is None else lse.stride()),
            call.out_scale,
            cache.v_scale,
            per_head(cache.v_scale),
            call.sinks,
        ),
        "memory": Parts(floats, floats[hopper_tuning.prefill_parts(spec, device) :]),
        "c": c,
        "num_warps": 4,
        "maxnreg": MAX_REGISTERS,
    }


def query_descriptor(q: torch.Tensor, c: Constants) -> TensorDescriptor:
    """TMA view of the query [rows, heads, D] in boxes of a consumer's packed rows."""
    steps = [q.stride(0), q.stride(1)]
    if q.data_ptr() % 16 or any(step * q.element_size() % 16 for step in steps):
        q = q.contiguous()
        steps = [q.stride(0), q.stride(1)]
    layout = gl.NVMMASharedLayout(min(128, c.dim * c.query_bits // 8), c.query_bits, 3)
    return TensorDescriptor(q, list(q.shape), [*steps, 1], [64 // c.pack, c.pack, c.dim], layout)


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The launches to compile ahead of time for `device` (octavo.testing.aot says what they are)."""
    if device.arch != "sm_90":
        return
    for label, fields in (
        ("of 128", LLAMA),
        ("of 64", {**LLAMA, "head_dim": 64}),
        ("of 256", {**LLAMA, "head_dim": 256}),
        ("of 128, pages of 32, all features", {**LLAMA, "page_size": 32, **FEATURES}),
        ("of 128, pages of 128", {**LLAMA, "page_size": 128}),
        ("exact of 128", {**LLAMA, "precision": "exact"}),
        ("exact of 64", {**LLAMA, "head_dim": 64, "precision": "exact"}),
        ("exact of 256", {**LLAMA, "head_dim": 256, "precision": "exact"}),
    ):
        call = example_call(AttentionSpec(**fields))
        memory = torch.empty(1 << 16, dtype=torch.int32, device="meta")
        yield label, prefill_kernel, launch(call, memory, device)
