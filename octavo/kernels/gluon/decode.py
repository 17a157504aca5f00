"""decode: paged FP8 decode and draft verification on Hopper, over the leaf layout.

The tile of K is the A operand of S^T = K Q^T and the tile of V^T that of O^T = V^T P^T, both as they lie in the cache:
M is tokens or head_dim, never padded, and no FP8 byte is converted. Query and P are e4m3 pairs (hi, lo) in neighbouring
columns, which is bf16's precision. P is scaled by its own tile's maximum and every tile has a fresh accumulator, added
in fp32 outside, so that neither a sink nor a long context costs digits.

Persistent programs of one producer warp (TMA) and four consumer warps share all tiles evenly (`plan`). Where an item, a
sequence and KV head, is cut, the program that finishes its last part merges it: one launch. What the plan has written
and read (schedule, lengths, page table) is read while the kernel before still runs; all else is after the wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import hopper_tuning
from ...calls import AttentionCall, CacheBytes
from ...device import Device, device_of
from ...spec import AttentionSpec
from . import _pipeline as pipe
from ._aot import FEATURES, LLAMA, example_call
from ._names import reinterpret, thread_barrier
from ._results import (
    NOTHING,
    Output,
    Pools,
    Query,
    column_rows,
    finish,
    in_powers_of_two,
    merge_if_last,
    part_slot,
    rows_without_units,
    write_rows_without_units,
)
from ._work import Batch, facts_of, following, load_scales, page_entries, parts_if_cut, work_at
from .plan import Constants, Schedule, constants, plan, schedule_of, starts_at

P_BITS = gl.constexpr(8.0)  # P is in [0, 2^8]: within e4m3, and its second term too
PRODUCER_REGISTERS = gl.constexpr(24)


# ---- the producer: one warp


@gluon.jit
def copy_tile(k_desc, v_desc, entries, kv_head, step, num_pages, k_pages, v_pages, full, empty, c: gl.constexpr):
    """Start the copies of a tile, whose page ids are `entries`, into the stage of `step` once that is empty."""
    PAGES: gl.constexpr = c.pages
    stage = step % c.stages
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), ((step // c.stages) & 1) ^ 1)
    mbarrier.expect(bar, c.tile_bytes)
    for g in gl.static_range(PAGES):
        page = gl.where((entries[g] >= 0) & (entries[g] < num_pages), entries[g], -1)
        k_at, v_at = stage * (c.panels * c.pages) + g, stage * c.pages + g
        pipe.copy_page(k_desc, k_pages, page, kv_head, bar, k_at, c.pages, c.panels)
        pipe.copy_page(v_desc, v_pages, page, kv_head, bar, v_at, 0, 1)


@gluon.jit
def produce(k_desc, v_desc, batch, schedule, start, end, b, k_pages, v_pages, full, empty, c: gl.constexpr):
    """Fill the ring with the tiles of units [start, end)."""
    t = start
    step = start * 0
    work = work_at(t, end, facts_of(b, True, batch, schedule, ".cg"), batch, schedule, c)
    page, tiles = work.page, work.tiles
    entries = page_entries(b, page, work, batch, ".cg", c)
    next_entries = page_entries(b, page + c.pages, work, batch, ".cg", c)
    gdc_wait()  # before: what the plan wrote, and what it read; after: what any kernel writes
    if t < end:  # the first tile apart: the next one's ids are there already
        kv_head = work.head // c.blocks
        copy_tile(k_desc, v_desc, entries, kv_head, step, batch.num_pages, k_pages, v_pages, full, empty, c)
        entries = next_entries
        page += c.pages
        tiles -= 1
        step += 1
    next_b = following(b, work, schedule)
    facts = facts_of(next_b, t + work.n < end, batch, schedule, "")
    while t < end:
        kv_head = work.head // c.blocks
        for _ in range(tiles):
            copy_tile(k_desc, v_desc, entries, kv_head, step, batch.num_pages, k_pages, v_pages, full, empty, c)
            page += c.pages
            entries = page_entries(b, page, work, batch, "", c)  # behind the copies, which else wait for them
            step += 1
        t += work.n
        if t < end:
            b = next_b
            work = work_at(t, end, facts, batch, schedule, c)
            page, tiles = work.page, work.tiles
            entries = page_entries(b, page, work, batch, "", c)
            next_b = following(b, work, schedule)
            facts = facts_of(next_b, t + work.n < end, batch, schedule, "")


# ---- the consumer: four warps


@gluon.jit
def load_query(work, batch, query, c: gl.constexpr):
    """The query columns of a pass as `packed` keeps them."""
    layout: gl.constexpr = pipe.rows_layout(c.dim_padded, 8)
    j = gl.arange(0, c.columns, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim_padded, layout=gl.SliceLayout(0, layout))
    row, q_head, _, there = column_rows(j, work.head, work.first_row, work.rows, batch, c)
    at = gl.expand_dims(row.to(gl.int64) * query.row + q_head.to(gl.int64) * query.head, 1) + gl.expand_dims(d, 0)
    mask = gl.expand_dims(there, 1) & gl.expand_dims(d < c.dim, 0)
    return packed(gl.load(query.q + at, mask=mask, other=0.0))


@gluon.jit
def packed(q):
    """q [columns, D] as 32-bit words of two neighbours, if they are of 16 bits: as loaded, so that no one waits yet."""
    if q.dtype.primitive_bitwidth == 16:
        first, second = gl.split(gl.reshape(q.to(gl.uint16, bitcast=True), [q.shape[0], q.shape[1] // 2, 2]))
        return first.to(gl.uint32) | (second.to(gl.uint32) << 16)
    else:
        return q


@gluon.jit
def unpacked(words, dtype: gl.constexpr, layout: gl.constexpr):
    """What `packed` was given, of `dtype`."""
    if dtype.primitive_bitwidth == 16:
        first = words.to(gl.uint16).to(dtype, bitcast=True)
        second = (words >> 16).to(gl.uint16).to(dtype, bitcast=True)
        q = gl.reshape(gl.join(first, second), [words.shape[0], 2 * words.shape[1]])
        return gl.convert_layout(q, layout, assert_trivial=True)
    else:
        return words


@gluon.jit
def store_query(q, k_scale, work, batch, query, q_smem, columns: gl.constexpr, c: gl.constexpr):
    """The query columns q as e4m3 pairs in shared memory; returns what turns a product into a score."""
    layout: gl.constexpr = pipe.rows_layout(c.dim_padded, 8)
    j = gl.arange(0, c.columns, layout=gl.SliceLayout(1, layout))
    _, q_head, _, there = column_rows(j, work.head, work.first_row, work.rows, batch, c)
    q = unpacked(q, query.q.dtype.element_ty, layout).to(gl.float32)
    scale = pipe.power_of_two_scale(gl.max(gl.abs(q), axis=1))
    hi, lo = pipe.split_fp8(q * gl.expand_dims(scale, 1))
    q_smem.store(gl.reshape(gl.permute(gl.join(hi, lo), (0, 2, 1)), [2 * c.columns, c.dim_padded]))
    factor = c.softmax_scale / scale
    if query.scale is not None:
        factor *= gl.load(query.scale + q_head * query.scale_head, mask=there, other=1.0)
    return gl.convert_layout(factor, columns) * k_scale


@gluon.jit
def token_positions(entries, page, num_pages, layout: gl.constexpr, c: gl.constexpr):
    """Positions of the tokens of a tile that starts with `page`; far beyond any length on pages that are not there."""
    PAGES: gl.constexpr = c.pages
    token = gl.arange(0, c.tile, layout=layout)
    position = token + page * c.page
    for g in gl.static_range(PAGES):
        missing = (entries[g] < 0) | (entries[g] >= num_pages)
        position = gl.where((token // c.page == g) & missing, 2**30, position)
    return position


@gluon.jit
def clear_dead(v_tiles, stage, first, position, work, c: gl.constexpr):
    """Zero what is dead in V^T of the page that `position` is in, of a tile that starts with page `first`.

    Pages without a live token, and those that are not there, are zeros as they come.
    """
    page = position // c.page
    begin = page * c.page
    v_page = v_tiles.index(stage * c.pages + page - first)
    pipe.zero_dead_tokens(v_page, work.oldest - begin, work.length - begin, c.dim_v, c.page)


@gluon.jit
def less_bits(peak):
    """What P is relative to: a largest score less P_BITS; from 2^27 on, where fp32 would make 16 of these 8, itself.

    P is 1 at most then, in sums as in products. Against a tile on the other side of 2^27 that is 8 too few, which is
    what rounding moves such a score by.
    """
    return gl.where(gl.abs(peak) < 2.0**27, peak - P_BITS, peak)


@gluon.jit
def consume(batch, schedule, query, pools, output, parts_memory, start, end, b, more,
            k_tiles, v_tiles, q_smem, p_smem, exchange, full, empty, c: gl.constexpr):  # fmt: skip
    """Attend over the tiles of units [start, end), item by item, and write results or parts of them."""
    T: gl.constexpr = c.tile
    C: gl.constexpr = c.columns
    N: gl.constexpr = 2 * C
    DV: gl.constexpr = c.dim_v
    PAGES: gl.constexpr = c.pages
    WGMMA: gl.constexpr = pipe.accumulator_layout(N)
    SCORES: gl.constexpr = pipe.pair_layout(c.tile, c.columns)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    OUT: gl.constexpr = pipe.pair_layout(c.dim_v, c.columns)
    FOLDED: gl.constexpr = pipe.folded_layout(c.columns)
    j = gl.arange(0, c.columns, layout=COLUMNS)
    no_scores = gl.zeros([T, N], gl.float32, WGMMA)
    no_out = gl.zeros([DV, N], gl.float32, WGMMA)
    OUT_COLUMNS: gl.constexpr = gl.SliceLayout(0, OUT)
    columns = gl.arange(0, c.columns, layout=OUT_COLUMNS)
    d = gl.arange(0, c.dim_v, layout=gl.SliceLayout(1, OUT))
    t = start
    step = start * 0
    work = work_at(t, end, facts_of(b, True, batch, schedule, ".cg"), batch, schedule, c, True)
    next_b = following(b, work, schedule)
    facts = facts_of(next_b, t + work.n < end, batch, schedule, ".cg")
    parts, first_program, within = parts_if_cut(work, schedule, c)
    gdc_wait()
    gdc_launch_dependents()
    q = load_query(work, batch, query, c)
    scales = load_scales(columns, work, batch, query, output, c)
    entries = page_entries(b, work.page, work, batch, "", c)
    while t < end:
        k_scale, v_scale, sinks = scales
        item = (b, work.head, work.first_row, work.rows, work.first_unit, v_scale)
        factor = store_query(q, k_scale, work, batch, query, q_smem, COLUMNS, c)
        fence_async_shared()
        thread_barrier()  # here, or the compiler puts it into the loop
        _, _, row, there = column_rows(j, work.head, work.first_row, work.rows, batch, c)
        limit = gl.expand_dims(gl.where(there, work.length - work.rows + 1 + row, 0), 0)  # a row sees tokens below it
        peak = gl.full([C], NOTHING, gl.float32, COLUMNS)
        weight = gl.zeros([32, C], gl.float32, FOLDED)
        out = gl.zeros([DV, C], gl.float32, OUT)
        page = work.page
        for _ in range(work.tiles):
            stage = step % c.stages
            position = token_positions(entries, page, batch.num_pages, gl.SliceLayout(1, SCORES), c)
            entries = page_entries(b, page + c.pages, work, batch, "", c)  # on their way during the wait
            mbarrier.wait(full.index(stage), (step // c.stages) & 1)
            x = warpgroup_mma(k_tiles.index(stage), q_smem.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=[x])
            y = in_powers_of_two(pipe.add_pairs(x), gl.expand_dims(factor, 0), c)
            seen = gl.expand_dims(position, 1) < limit
            if c.window > 0:
                seen = seen & (gl.expand_dims(position, 1) >= limit - c.window)
            y = gl.where(seen, y, -float("inf"))  # a select: the score of a stale row of K may be NaN
            tile_peak = gl.maximum(pipe.column_max(y, exchange), NOTHING)
            p = gl.exp2(y - gl.expand_dims(less_bits(tile_peak), 0))
            p_sum = pipe.fold_rows(p)
            pipe.store_leaf_pairs(p, p_smem, c.page)
            if c.window > 0:
                dead = work.oldest - page * c.page
                if dead > 0:
                    clear_dead(v_tiles, stage, page, work.oldest, work, c)
            if (page * c.page + c.tile > work.length) & (work.length % c.page > 0):
                clear_dead(v_tiles, stage, page, work.length, work, c)
            fence_async_shared()
            pv = no_out
            for g in gl.static_range(PAGES):
                v_page, p_page = v_tiles.index(stage * c.pages + g), p_smem.index(g).permute((1, 0))
                pv = warpgroup_mma(v_page, p_page, pv, use_acc=g > 0, is_async=True)
            new_peak = gl.maximum(peak, tile_peak)
            keep = gl.exp2(peak - new_peak)
            add = gl.exp2(tile_peak - new_peak)
            peak = new_peak
            weight = weight * pipe.as_row(keep, FOLDED) + p_sum * pipe.as_row(add, FOLDED)
            pv = warpgroup_mma_wait(0, deps=[pv])
            mbarrier.arrive(empty.index(stage), count=1)
            out = out * pipe.as_row(keep, OUT) + pipe.add_pairs(pv) * pipe.as_row(add, OUT)
            page += c.pages
            step += 1
        begin, n, units = t, work.n, work.units
        part = parts, first_program, within
        t += n
        if t < end:  # what follows is loaded while this is written
            b = next_b
            work = work_at(t, end, facts, batch, schedule, c)
            q = load_query(work, batch, query, c)
            scales = load_scales(columns, work, batch, query, output, c)
            entries = page_entries(b, work.page, work, batch, "", c)
            next_b = following(b, work, schedule)
            facts = facts_of(next_b, t + work.n < end, batch, schedule, "")
            parts, first_program, within = parts_if_cut(work, schedule, c)
        else:  # or what was loaded for this one would keep its registers until here
            q = gl.zeros_like(q)
        denominator = gl.convert_layout(gl.sum(weight, axis=0), OUT_COLUMNS, assert_trivial=True)
        lse = less_bits(gl.convert_layout(peak, OUT_COLUMNS, assert_trivial=True)) + gl.log2(denominator)
        out = out * gl.expand_dims(1.0 / gl.maximum(denominator, 1e-30), 0)
        if n > 0:
            if n == units:
                finish(out, lse, columns, d, 0, item, sinks, batch, output, c)
            else:
                to = parts_memory + part_slot(gl.program_id(0), begin != start, begin, c) * c.part
                gl.store(to + gl.expand_dims(columns * c.dim_v, 0) + gl.expand_dims(d, 1), out)
                gl.store(to + c.columns * c.dim_v + columns, lse)
                merge_if_last(item, *part, batch, schedule, output, parts_memory, c)
    gdc_wait()  # also where there was no work: the kernel after this one relies on it
    if more:
        write_rows_without_units(query, pools, batch, schedule, output, c)


# ---- the kernel


# What changes from step to step is no reason to compile again; Triton specialises what is in a tuple whatever is asked.
@gluon.jit(do_not_specialize=["table_row", "capacity", "num_pages", "rows", "size"])
def decode_kernel(k_desc, v_desc, pools, seq_lens, page_table, query_starts, table_row, capacity, num_pages, rows,
                  schedule, size, heads, programs, query, output, parts_memory, c: gl.constexpr):  # fmt: skip
    """One launch: attention of the decode sequences of a batch, merged."""
    batch = Batch(seq_lens, page_table, query_starts, table_row, capacity, num_pages, rows)
    schedule = Schedule(schedule, size, heads, programs)
    FP8: gl.constexpr = gl.float8e4nv
    STAGES: gl.constexpr = c.stages
    ROWS_K: gl.constexpr = gl.NVMMASharedLayout(c.panel, 8, 2)
    ROWS_V: gl.constexpr = gl.NVMMASharedLayout(c.page, 8, 2)
    N: gl.constexpr = 2 * c.columns
    # TMA sees pages, wgmma tiles: the pages of a stage are one tile of K
    k_pages = gl.allocate_shared_memory(FP8, [c.stages * c.panels * c.pages, 1, 1, c.page, c.panel], k_desc.layout)
    v_pages = gl.allocate_shared_memory(FP8, [c.stages * c.pages, 1, 1, c.dim_v, c.page], v_desc.layout)
    k_tiles = reinterpret(k_pages, FP8, [c.stages, c.tile, c.dim_padded], ROWS_K)
    v_tiles = reinterpret(v_pages, FP8, [c.stages * c.pages, c.dim_v, c.page], ROWS_V)
    q_smem = gl.allocate_shared_memory(FP8, [N, c.dim_padded], ROWS_K)
    p_smem = gl.allocate_shared_memory(FP8, [c.pages, N, c.page], ROWS_V)
    exchange = gl.allocate_shared_memory(gl.float32, [4, c.columns], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    full, empty = pipe.make_ring(STAGES)
    fence_async_shared()
    program = gl.program_id(0)
    b = gl.load(schedule.memory + schedule.batch + 1 + program, cache_modifier=".cg")
    b = gl.minimum(b, schedule.batch - 1)  # where there is no work
    start = gl.load(starts_at(schedule) + program, cache_modifier=".cg")
    end = gl.load(starts_at(schedule) + program + 1, cache_modifier=".cg")
    more = rows_without_units(batch, schedule, c)
    gl.warp_specialize(
        [
            (consume, (batch, schedule, query, pools, output, parts_memory, start, end, b, more,
                       k_tiles, v_tiles, q_smem, p_smem, exchange, full, empty, c)),
            (produce, (k_desc, v_desc, batch, schedule, start, end, b, k_pages, v_pages, full, empty, c)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


# ---- the launch


def decode(call: AttentionCall) -> None:
    """Attention of the decode sequences of `call`; semantics as octavo.reference.attention states them.

    Without a schedule in `call` one is made here, in the end of the workspace, by one launch more. Sequences of more
    than spec.max_query_len (or call.max_query_len) rows are left alone. Nothing is read on the host.
    """
    batch = call.seq_lens.shape[0] if call.num_decodes is None else call.num_decodes
    if batch == 0 or call.q.shape[0] == 0:
        return
    device = device_of(call.q.device)
    schedule = call.schedule
    if schedule is None:
        ints = hopper_tuning.decode_schedule_ints(call.spec, device, batch)
        schedule = call.workspace[: call.workspace.numel() // 4 * 4].view(torch.int32)[-ints:]
        step = call.seq_lens, call.page_table, call.query_starts
        plan(call.spec, *step, schedule, call.num_decodes, call.max_query_len)
    arguments = launch(call, schedule, device)
    decode_kernel[(arguments["programs"],)](**arguments)


def launch(call: AttentionCall, memory: torch.Tensor, device: Device) -> dict[str, Any]:
    """The arguments by name that the kernel is launched with for `call`, by the schedule in `memory`."""
    spec, cache, table = call.spec, call.cache, call.page_table
    sequences = call.seq_lens.shape[0]
    batch = sequences if call.num_decodes is None else call.num_decodes
    c = constants(spec, call.max_query_len, call.num_decodes == sequences)
    capacity = table.shape[1] * spec.page_size
    num_pages, rows = cache.strides.num_pages, call.q.shape[0]
    lse, q_row, q_head = call.lse, call.q.stride(0), call.q.stride(1)
    k_desc, v_desc = descriptors(spec, cache, c)
    schedule = schedule_of(spec, device, batch, call.max_query_len, memory)
    tile = hopper_tuning.decode_tile(spec, c.max_rows)
    options = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    return {
        "k_desc": k_desc,
        "v_desc": v_desc,
        "pools": _pools(cache),
        "seq_lens": call.seq_lens,
        "page_table": table,
        "query_starts": call.query_starts,
        "table_row": table.stride(0),
        "capacity": capacity,
        "num_pages": num_pages,
        "rows": rows,
        "schedule": schedule.memory,
        "size": schedule.batch,
        "heads": schedule.heads,
        "programs": schedule.programs,
        "query": Query(
            call.q, q_row, q_head, call.q_scale, per_head(call.q_scale), cache.k_scale, per_head(cache.k_scale)
        ),
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
        "parts_memory": call.workspace[: call.workspace.numel() // 4 * 4].view(torch.float32),
        "c": c,
        "num_warps": 4,
        "launch_pdl": True,
        **options,
    }


def per_head(scale: torch.Tensor | None) -> int:
    """Stride of a scale over heads."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)


def _pools(cache: CacheBytes) -> Pools:
    """Memory of the cache, for what is read without TMA."""
    s, fp8 = cache.strides, torch.float8_e4m3fn
    k, v = cache.k_pool[s.k_offset :].view(fp8), cache.v_pool[s.v_offset :].view(fp8)
    return Pools(k, s.k_page, s.k_head, v, s.v_page, s.v_head, s.v_slot)


def descriptors(spec: AttentionSpec, cache: CacheBytes, c: Constants) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA views of K [pages, heads, page, D] and V^T [pages, heads, Dv, page]; columns beyond D are zeros."""
    s, heads = cache.strides, spec.num_kv_heads

    def view(pool: torch.Tensor, offset: int, shape: list[int], steps: list[int], box: list[int]) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(box[-1], 8, 4)
        return TensorDescriptor(pool[offset:].view(torch.float8_e4m3fn), shape, steps, [1, 1, *box], layout)

    k_steps, v_steps = [s.k_page, s.k_head, s.k_slot, 1], [s.v_page, s.v_head, s.v_slot, 1]
    k = view(cache.k_pool, s.k_offset, [s.num_pages, heads, c.page, c.dim], k_steps, [c.page, c.panel])
    v = view(cache.v_pool, s.v_offset, [s.num_pages, heads, c.dim_v, c.page], v_steps, [c.dim_v, c.page])
    return k, v


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The launches to compile ahead of time for `device` (octavo.testing.aot says what they are)."""
    if device.arch != "sm_90":
        return
    for label, fields in (
        ("32/8 of 128", LLAMA),
        ("64/8 of 128, pages of 128", {**LLAMA, "num_q_heads": 64, "page_size": 128}),
        ("64/8 of 64", {**LLAMA, "num_q_heads": 64, "head_dim": 64}),
        ("16/8 of 256", {**LLAMA, "num_q_heads": 16, "head_dim": 256}),
        ("8/8 of 192/128", {**LLAMA, "num_q_heads": 8, "head_dim": 192, "head_dim_v": 128}),
        ("64/8 of 128, 4 rows", {**LLAMA, "num_q_heads": 64, "max_query_len": 4}),
        ("32/8 of 128, pages of 32, 4 rows, all features", {**LLAMA, "page_size": 32, "max_query_len": 4, **FEATURES}),
        ("32/8 of 128, batch invariant", {**LLAMA, "batch_invariant": True}),
    ):
        call = example_call(AttentionSpec(**fields))
        memory = torch.empty(1 << 16, dtype=torch.int32, device="meta")
        yield label, decode_kernel, launch(call, memory, device)
