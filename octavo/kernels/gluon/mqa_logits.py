"""mqa_logits: the indexer's FP8 logits on Hopper, over pages or over one run of keys.

A tile of keys is the A operand, 64 tokens as they lie in the cache; the heads of up to four query rows are the columns
of the B operand. relu and the rounding of scores to bf16 are one instruction for two of them, and a second product in
the tensor cores adds up the heads in fp32: scores are its A operand, in registers as the first product left them,
weights its B operand, as two bf16 terms (16 bits). So a logit is off by at most 2^-8 k_scale sum_h |relu(q . k) w|.
An epilogue in fp32 takes 256 instructions where this takes 64: they, not the tensor cores, bound it where memory
does not.

Each query row has products of its own in the head sum: 0 x NaN is NaN, so a NaN in one row's query would spoil the
logits of its neighbours.

Persistent programs of one producer warp (TMA) and four consumer warps; tiles are independent, so nothing is merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
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
from ...device import Device, device_of
from ...indexer_calls import SCALE_BYTES, IndexBytes, LogitsCall, PagedLogitsCall
from . import _pipeline as pipe
from ._aot import example_logits, example_paged_logits
from ._logits import (
    FILL_COLUMNS,
    TERMS,
    Constants,
    Output,
    Table,
    add_terms,
    any_missing,
    by_row,
    emit,
    fill_unseen,
    load_scales,
    mark_missing,
    page_id,
    relu_bf16,
    split_weights,
)
from ._names import async_load, reinterpret, thread_barrier
from ._rows import Rows, block_tiles, nth_block, part, place_of, row_of, share, span

PRODUCER_REGISTERS = gl.constexpr(24)


# ---- the producer: one warp


@gluon.jit
def produce(q_desc, w_desc, k_desc, s_desc, rows, table, start, end, nth, before,
            k_boxes, s_boxes, q_smem, w_rows, full, empty, q_full, q_empty, fetched, c: gl.constexpr):  # fmt: skip
    """Fill the ring with the tiles of units [start, end), and queries and weights of their blocks.

    TMA gives zeros for what is not there.
    """
    BOXES: gl.constexpr = c.boxes
    PASSES: gl.constexpr = c.passes
    # Here, by one warp: other memory takes the place of a barrier that the kernel has done with, polled or not.
    mbarrier.wait(fetched.index(0), 0)
    t = start
    stage = start * 0
    phase = start * 0
    segment = start * 0
    while t < end:
        block = nth_block(nth, rows, c)
        first, tiles, _ = block_tiles(block, rows, c)
        skipped, n, after = part(t, end, before, tiles, c)
        if n > 0:
            q_stage = segment % c.query_stages
            bar = q_full.index(q_stage)
            mbarrier.wait(q_empty.index(q_stage), ((segment // c.query_stages) & 1) ^ 1)
            mbarrier.expect(bar, c.query_bytes)
            row = row_of(block, c)
            async_load(w_desc, [row, 0], bar, w_rows.index(q_stage))
            for u in gl.static_range(PASSES):
                to = q_smem.index(q_stage * PASSES + u)
                async_load(q_desc, [row * c.heads + u * c.columns, 0], bar, to)
            for i in range(n):
                token = (first + skipped + i) * c.tile
                bar = full.index(stage)
                pages = ()
                for g in gl.static_range(BOXES):
                    pages = pages + (page_id(table, block, token + g * c.box, rows, c),)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(bar, c.tile_bytes)
                for g in gl.static_range(BOXES):
                    offset = token + g * c.box
                    if c.paged:
                        offset = offset % c.page
                    at = stage * BOXES + g
                    async_load(k_desc, [pages[g], offset, 0], bar, k_boxes.index(at))
                    async_load(s_desc, [pages[g], offset], bar, s_boxes.index(at))
                stage += 1
                phase = gl.where(stage == c.stages, phase ^ 1, phase)
                stage = gl.where(stage == c.stages, 0, stage)
            segment += 1
        t = gl.minimum(end, after)
        nth += 1
        before = after


# ---- the consumer: four warps


@gluon.jit
def tile_sums(k_tiles, q_smem, w_smem, stage, q_stage, empty, c: gl.constexpr):
    """Head sums of a tile: for each 64 tokens and query row [64, TERMS]. The tile's memory is given back on the way.

    A product is under way while the one before it is rounded and summed.
    """
    SUBTILES: gl.constexpr = c.subtiles
    PASSES: gl.constexpr = c.passes
    ROWS: gl.constexpr = c.rows_a_pass
    STEPS: gl.constexpr = SUBTILES * PASSES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TERMS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    N: gl.constexpr = c.columns
    no_scores = gl.zeros([64, N], gl.float32, pipe.accumulator_layout(N))
    no_sums = gl.zeros([64, TERMS], gl.float32, SUMS)
    k_tile, query = k_tiles.index(stage * SUBTILES), q_smem.index(q_stage * PASSES).permute((1, 0))
    following = warpgroup_mma(k_tile, query, no_scores, use_acc=False, is_async=True)
    sums = ()
    for step in gl.static_range(STEPS):
        x = following
        if step + 1 < STEPS:
            k_tile = k_tiles.index(stage * SUBTILES + (step + 1) // PASSES)
            query = q_smem.index(q_stage * PASSES + (step + 1) % PASSES).permute((1, 0))
            following = warpgroup_mma(k_tile, query, no_scores, use_acc=False, is_async=True)
        # later than x: the head sums of the step before, and the next product
        x = warpgroup_mma_wait((0 if step == 0 else ROWS) + (1 if step + 1 < STEPS else 0), deps=[x])
        if step + 1 == STEPS:
            mbarrier.arrive(empty.index(stage), count=1)
        scores = by_row(relu_bf16(x), c)
        for r in gl.static_range(ROWS):
            if step % PASSES * ROWS + r < c.block_rows:
                left = gl.convert_layout(scores[r], LEFT)
                w = w_smem.index(step % PASSES * ROWS + r).permute((1, 0))
                sums = sums + (warpgroup_mma(left, w, no_sums, use_acc=False, is_async=True),)
    return sums


@gluon.jit
def consume(rows, table, output, start, end, nth, before,
            k_tiles, s_tiles, q_smem, w_rows, w_smem, full, empty, q_full, q_empty, c: gl.constexpr):  # fmt: skip
    """Logits of the tiles of units [start, end); then fill this program's share of what no row sees."""
    ROWS: gl.constexpr = c.block_rows
    SUBTILES: gl.constexpr = c.subtiles
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TERMS, 16])
    of_layout = add_terms(gl.zeros([64, TERMS], gl.float32, SUMS))  # not computed: its layout is wanted
    LOGITS: gl.constexpr = of_layout.type.layout
    TOKENS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    i = gl.arange(0, 64, layout=TOKENS)
    j = gl.arange(0, TERMS // 2, layout=gl.SliceLayout(0, LOGITS))
    t = start
    stage = start * 0
    phase = start * 0
    segment = start * 0
    while t < end:
        block = nth_block(nth, rows, c)
        first, tiles, last = block_tiles(block, rows, c)
        skipped, n, after = part(t, end, before, tiles, c)
        if n > 0:
            sequence, within, there = place_of(block, j, rows, c)
            low, high = span(sequence, within, there, rows, c)
            to = output.logits + (row_of(block, c) + j).to(gl.int64) * output.row
            if c.compressed:
                high = gl.minimum(high, low + output.width)
            else:
                to += low.to(gl.int64) * output.column
            to, length = gl.expand_dims(to, 0), gl.expand_dims(high - low, 0)
            position = gl.expand_dims(i, 1) - gl.expand_dims(low, 0)
            first += skipped
            token = first * c.tile
            token_end = gl.minimum((first + n) * c.tile, last)
            missing = first * 0
            if c.paged:
                missing = any_missing(table, block, token, token_end, c)
            q_stage = segment % c.query_stages
            mbarrier.wait(q_full.index(q_stage), (segment // c.query_stages) & 1)
            split_weights(w_rows.index(q_stage), w_smem, c)
            fence_async_shared()
            thread_barrier()  # here, or the compiler puts it into the loop
            for _ in range(n):
                mbarrier.wait(full.index(stage), phase)
                scales = ()
                for m in gl.static_range(SUBTILES):
                    scales = scales + (load_scales(s_tiles.index(stage * SUBTILES + m), TOKENS, c),)
                sums = tile_sums(k_tiles, q_smem, w_smem, stage, q_stage, empty, c)
                sums = warpgroup_mma_wait(0, deps=sums)
                for m in gl.static_range(SUBTILES):
                    if ROWS * SUBTILES == 1:
                        emit((sums,), scales[m], token + position, length, to, output, c)
                    else:
                        row_sums = sums[m * ROWS : m * ROWS + ROWS]
                        emit(row_sums, scales[m], token + (m * 64) + position, length, to, output, c)
                token += c.tile
                stage += 1
                phase = gl.where(stage == c.stages, phase ^ 1, phase)
                stage = gl.where(stage == c.stages, 0, stage)
            mbarrier.arrive(q_empty.index(q_stage), count=1)
            if c.paged:  # noqa: SIM102 - decided when it is compiled
                if missing > 0:
                    thread_barrier()  # what other threads wrote there comes first
                    mark_missing(table, block, first * c.tile, token_end, rows, output, c)
            segment += 1
        t = gl.minimum(end, after)
        nth += 1
        before = after
    if c.fill:
        fill_unseen(rows, output, c)


# ---- the kernel


@gluon.jit
def fetch_descriptors(k_desc, s_desc, k_boxes, s_boxes, fetched, c: gl.constexpr):
    """Start copies of a page that is not there: zeros, without traffic, but the descriptors are on their way."""
    mbarrier.expect(fetched.index(0), c.box * (c.dim + 4))
    async_load(k_desc, [-1, 0, 0], fetched.index(0), k_boxes.index(0))
    async_load(s_desc, [-1, 0], fetched.index(0), s_boxes.index(0))


# What changes from step to step is no reason to compile again; Triton specialises what is in a tuple whatever is asked.
@gluon.jit(
    do_not_specialize=["limit", "blocks", "rows", "table_row", "num_pages", "logits_row", "width", "pieces", "piece"]
)
def mqa_logits_kernel(q_desc, w_desc, k_desc, s_desc, first, last, stride, last_stride, limit, blocks, rows,
                      table, table_row, table_column, num_pages,
                      logits, logits_row, logits_column, width, fill, pieces, piece, c: gl.constexpr):  # fmt: skip
    """Logits of all rows, and the fill of what they do not see, in one launch.

    The arguments behind the descriptors are the fields of Rows, Table and Output.
    """
    rows = Rows(first, last, stride, last_stride, limit, blocks, rows)
    table = Table(table, table_row, table_column, num_pages)
    output = Output(logits, logits_row, logits_column, width, fill, pieces, piece)
    FP8: gl.constexpr = gl.float8e4nv
    STAGES: gl.constexpr = c.stages
    QUERY_STAGES: gl.constexpr = c.query_stages
    KEYS: gl.constexpr = gl.NVMMASharedLayout(c.dim, 8, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * c.heads), 16, 2)
    # TMA sees boxes of a page, wgmma tiles: the boxes of a stage are one tile
    k_boxes = gl.allocate_shared_memory(FP8, [c.stages * c.boxes, 1, c.box, c.dim], k_desc.layout)
    s_boxes = gl.allocate_shared_memory(gl.int32, [c.stages * c.boxes, 1, c.box], s_desc.layout)
    k_tiles = reinterpret(k_boxes, FP8, [c.stages * c.subtiles, 64, c.dim], KEYS)
    s_tiles = reinterpret(s_boxes, gl.int32, [c.stages * c.subtiles, 64], FLAT)
    q_smem = gl.allocate_shared_memory(FP8, [c.query_stages * c.passes, c.columns, c.dim], q_desc.layout)
    w_rows = gl.allocate_shared_memory(gl.float32, [c.query_stages, c.weight_rows, c.heads], w_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [c.block_rows, TERMS, c.heads], WEIGHTS)
    full, empty = pipe.make_ring(STAGES)
    q_full, q_empty = pipe.make_ring(QUERY_STAGES)
    fetched = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(fetched.index(0), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    fetch_descriptors(k_desc, s_desc, k_boxes, s_boxes, fetched, c)  # while the launch before this one ends
    gdc_wait()
    SCAN: gl.constexpr = c.scan
    # Of few blocks every warp holds all, so that no sum needs a barrier; of many each holds some, as loads cost more.
    each: gl.constexpr = SCAN // 32 if SCAN <= 128 else 1
    index = gl.arange(0, SCAN, layout=gl.BlockedLayout([each], [32], [4], [0]))
    start, end, nth, before = share(index, rows, c)
    gl.warp_specialize(
        [
            (consume, (rows, table, output, start, end, nth, before,
                       k_tiles, s_tiles, q_smem, w_rows, w_smem, full, empty, q_full, q_empty, c)),
            (produce, (q_desc, w_desc, k_desc, s_desc, rows, table, start, end, nth, before,
                       k_boxes, s_boxes, q_smem, w_rows, full, empty, q_full, q_empty, fetched, c)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


# ---- the launches


def paged_mqa_logits(call: PagedLogitsCall) -> None:
    """Logits of the rows of `call` over their pages; semantics as octavo.reference.mqa_logits states them."""
    if call.q.numel() == 0 or call.max_context < 1:
        return
    arguments = launch_paged(call, device_of(call.q.device))
    mqa_logits_kernel[(arguments.pop("programs"),)](**arguments)


def mqa_logits(call: LogitsCall) -> None:
    """Logits of the rows of `call` over one run of keys; semantics as octavo.reference.mqa_logits states them."""
    if call.q.numel() == 0 or call.out.shape[1] == 0:
        return
    if call.k.shape[0] == 0:
        if call.fill is not None:
            call.out.fill_(call.fill)
        return
    arguments = launch(call, device_of(call.q.device))
    mqa_logits_kernel[(arguments.pop("programs"),)](**arguments)


def launch_paged(call: PagedLogitsCall, device: Device) -> dict[str, Any]:
    """The arguments by name that the kernel is launched with for `call`, and the number of programs."""
    batch, n, heads, dim = call.q.shape
    cache, lens, table = call.cache, call.seq_lens, call.page_table
    limit = min(call.max_context, table.shape[1] * cache.page_size)
    tile = hopper_tuning.logits_tile(heads, dim, n, batch * limit, device)
    blocks = batch * -(-n // tile.block_rows)
    length_a_row, exponents = lens.dim() == 2, cache.scale_format == "ue8m0"
    shape = heads, dim, n, cache.page_size
    c = constants(tile, shape, blocks, (length_a_row, exponents, False, call.fill is not None))
    k_desc, s_desc = page_descriptors(cache, c)
    rows = Rows(lens, None, lens.stride(0), lens.stride(1) if length_a_row else 0, limit, blocks, batch * n)
    rest = _rest(call, c, rows, call.max_context, device.num_sms * tile.programs_per_sm)
    return {**rest, "k_desc": k_desc, "s_desc": s_desc, **_table(Table(table, *table.stride(), cache.num_pages))}


def launch(call: LogitsCall, device: Device) -> dict[str, Any]:
    """As `launch_paged`, for rows over one run of keys."""
    count, heads, dim = call.q.shape
    keys = call.k.shape[0]
    tile = hopper_tuning.logits_tile(heads, dim, count, None, device)
    blocks = -(-count // tile.block_rows)
    c = constants(tile, (heads, dim, 0, 0), blocks, (False, False, call.compressed, call.fill is not None))
    k, k_scale = _aligned(call.k), _aligned(call.k_scale).view(torch.int32)
    shape, steps = [1, keys, dim], [keys * dim, dim, 1]
    k_desc = TensorDescriptor(k, shape, steps, [1, c.box, dim], gl.NVMMASharedLayout(dim, 8, 3))
    s_desc = TensorDescriptor(k_scale, [1, keys], [-(-keys // 4) * 4, 1], [1, c.box], gl.NVMMASharedLayout(0, 32, 2))
    rows = Rows(call.starts, call.ends, call.starts.stride(0), call.ends.stride(0), keys, blocks, count)
    rest = _rest(call, c, rows, call.out.shape[1], device.num_sms * tile.programs_per_sm)
    return {**rest, "k_desc": k_desc, "s_desc": s_desc, **_table(Table(None, 0, 0, 0))}


def _table(table: Table) -> dict[str, Any]:
    """A table as arguments of the kernel."""
    return {
        "table": table.ids,
        "table_row": table.row,
        "table_column": table.column,
        "num_pages": table.num_pages,
    }


@lru_cache(maxsize=1024)
def constants(
    tile: hopper_tuning.LogitsTile,
    shape: tuple[int, int, int, int],
    blocks: int,
    features: tuple[bool, bool, bool, bool],
) -> Constants:
    """Constants of a launch.

    shape: heads, dim, query rows of a sequence and tokens of a page, both 0 for keys in one run. features:
    length_a_row, exponents, compressed, fill.
    """
    heads, dim, sequence_rows, page = shape
    length_a_row, exponents, compressed, fill = features
    return Constants(
        paged=page > 0,
        page=page or tile.tokens,
        heads=heads,
        dim=dim,
        sequence_rows=sequence_rows,
        groups=-(-sequence_rows // tile.block_rows),
        block_rows=tile.block_rows,
        columns=tile.columns,
        passes=tile.passes,
        fold=page == 0,
        switch=tile.switch,
        tile=tile.tokens,
        stages=tile.stages,
        query_stages=tile.query_stages,
        max_registers=tile.max_registers,
        scan=min(2048, max(128, 1 << (blocks - 1).bit_length())),
        length_a_row=length_a_row,
        exponents=exponents,
        compressed=compressed,
        fill=fill,
    )


def _rest(call: PagedLogitsCall | LogitsCall, c: Constants, rows: Rows, width: int, programs: int) -> dict[str, Any]:
    """The arguments that both launches have; logits are written to columns below `width`."""
    q, weights, out = _aligned(call.q).view(-1, c.dim), _aligned(call.weights), call.out
    pieces = min(-(-programs // rows.rows), -(-width // FILL_COLUMNS.value))
    if not c.fill:  # no more programs than there can be tiles
        programs = min(programs, max(1, rows.blocks * (c.switch - (-rows.limit // c.tile))))
    flat = gl.NVMMASharedLayout(0, 32, 2)
    return {
        "q_desc": TensorDescriptor.from_tensor(q, [c.columns, c.dim], gl.NVMMASharedLayout(c.dim, 8, 2)),
        "w_desc": TensorDescriptor.from_tensor(weights, [c.weight_rows, c.heads], flat),
        **rows._asdict(),
        "logits": out,
        "logits_row": out.stride(0),
        "logits_column": out.stride(1),
        "width": width,
        "fill": float(call.fill or 0.0),
        "pieces": pieces,
        "piece": -(-width // pieces),
        "c": c,
        "programs": programs,
        "num_warps": 4,
        "launch_pdl": True,
        **({} if c.max_registers is None else {"maxnreg": c.max_registers}),
    }


def page_descriptors(cache: IndexBytes, c: Constants) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA views of keys [pages, page, dim] and of the bits of their scales [pages, page]."""
    pages, page, stride = cache.pages, cache.page_size, cache.pages.stride(0)
    flat = pages.as_strided((pages.numel(),), (1,), pages.storage_offset())
    shape, steps = [cache.num_pages, page, c.dim], [stride, c.dim, 1]
    k_layout, s_layout = gl.NVMMASharedLayout(c.dim, 8, 3), gl.NVMMASharedLayout(0, 32, 2)
    k_desc = TensorDescriptor(flat.view(torch.float8_e4m3fn), shape, steps, [1, c.box, c.dim], k_layout)
    bits = flat[page * c.dim :].view(torch.int32)
    s_desc = TensorDescriptor(bits, [cache.num_pages, page], [stride // SCALE_BYTES, 1], [1, c.box], s_layout)
    return k_desc, s_desc


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it, contiguous at an address that TMA takes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The launches to compile ahead of time for `device` (octavo.testing.aot says what they are)."""
    if device.arch != "sm_90":
        return
    for label, fields in (
        ("paged, 1 row of 64", {}),
        ("paged, 2 rows of 64", {"n": 2}),
        ("paged, 3 rows of 64", {"n": 3}),
        (
            "paged, 4 rows of 64, bfloat16, filled, a length a row",
            {"n": 4, "out": torch.bfloat16, "fill": 0.0, "lens": 2},
        ),
        ("paged, 1 row of 32 of 64, pages of 32, ue8m0", {"heads": 32, "dim": 64, "page": 32, "scales": "ue8m0"}),
        ("paged, 8 rows of 16, pages of 128", {"heads": 16, "n": 8, "page": 128}),
        ("paged, 2 rows of 128", {"heads": 128, "n": 2}),
    ):
        arguments = launch_paged(example_paged_logits(**fields), device)
        arguments.pop("programs")
        yield label, mqa_logits_kernel, arguments
    for label, fields in (("run of keys", {}), ("run of keys, compressed, filled", {"compressed": True, "fill": -1.0})):
        arguments = launch(example_logits(**fields), device)
        arguments.pop("programs")
        yield label, mqa_logits_kernel, arguments
