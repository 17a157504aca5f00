"""Hopper's indexer logits without a GPU: what ptxas makes of them, and in the interpreter who computes which tiles."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from octavo import hopper_tuning
from octavo.device import Device
from octavo.kernels.gluon._rows import Rows, block_tiles, share

from .compiled import instructions, printed

SM_SHARED_MEMORY, RESERVED = 228 * 1024, 1024  # bytes of an SM, and of it for each program
WIDTHS = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


def barriers(ptx: str) -> set[int]:
    """Where in shared memory the kernel's barriers are."""
    bases = set(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx))
    at = {
        to: int(offset) for to, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx) if base in bases
    }
    return {at[register] for register in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)}


def handed_over(ptx: str) -> set[int]:
    """Bytes of shared memory through which warps are handed what they start with."""
    found = set()
    for vector, width, offset in re.findall(r"st\.shared(?:\.v(\d))?\.(b\d+)\s+\[global_smem\+(\d+)\]", ptx):
        found |= set(range(int(offset), int(offset) + int(vector or 1) * WIDTHS[width]))
    return found


def compile_all() -> None:
    """Print a JSON object for each launch of the kernel; run as a program, since TRITON_INTERPRET must not be set."""
    from octavo.kernels.gluon.mqa_logits import aot_cases
    from octavo.testing.aot import compile_case

    for label, kernel, arguments in aot_cases(Device.named("h200")):
        compiled, log = compile_case(kernel, arguments, Device.named("h200"))
        opcodes = [op for op, _ in instructions(compiled.asm["cubin"])]
        c, ptx = arguments["c"], compiled.asm["ptx"]
        found = {
            "label": label,
            "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
            "most_registers": c.max_registers,
            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
            "shared": compiled.metadata.shared,
            "serialised": "erializ" in log,
            "score_products": sum(op.startswith("QGMMA") for op in opcodes),
            "scores": c.passes * c.subtiles * c.dim // 32,
            "sum_products": sum(op.startswith("HGMMA") for op in opcodes),
            "sums": c.block_rows * c.subtiles * c.heads // 16,
            "rounded": sum(op.startswith("F2FP.RELU.BF16") for op in opcodes),
            "pairs": c.columns * c.passes * c.subtiles // 4,
            "barriers": len(barriers(ptx)),
            "expected_barriers": 2 * (c.stages + c.query_stages) + 1,
            "barriers_overwritten": sorted(barriers(ptx) & handed_over(ptx)),
        }
        print(json.dumps(found), flush=True)


@pytest.fixture(scope="module")
def compiled():
    return printed(__name__)


def test_programs_share_an_sm_and_nothing_spills(compiled):
    programs = {64: 4, 80: 3, 128: 2}
    assert len(compiled) == 9
    for case in compiled:
        assert case["registers"] <= case["most_registers"] and case["spilled"] == 0, case
        assert programs[case["most_registers"]] * (case["shared"] + RESERVED) <= SM_SHARED_MEMORY, case


def test_a_tile_takes_as_many_instructions_as_it_has_to(compiled):
    """Each product once, and one instruction for two scores; none of them waits for the one before it."""
    for case in compiled:
        assert not case["serialised"], case
        assert case["score_products"] == case["scores"] and case["sum_products"] == case["sums"], case
        assert case["rounded"] == case["pairs"], case


def test_no_barrier_is_overwritten_while_a_warp_may_poll_it(compiled):
    """The compiler reuses a barrier's memory after the last wait in the code; a warp may still be waiting there."""
    for case in compiled:
        assert case["barriers"] == case["expected_barriers"] and case["barriers_overwritten"] == [], case


def test_the_check_finds_an_overwritten_barrier():
    ptx = """
        mov.b32 %r5, global_smem;
        add.s32 %r6, %r5, 512;
        @%p1 mbarrier.init.shared::cta.b64 [%r6], 1;
        st.shared.v4.b32 [global_smem+500], {%r1, %r2, %r3, %r4};
    """
    assert barriers(ptx) & handed_over(ptx) == {512}
    assert not barriers(ptx) & handed_over(ptx.replace("+500", "+496"))


def spans_by_hand(rows, sequence_rows, block_rows, tile):
    """First tile and number of tiles of each block of `rows`, [low, high) of each row, sequence by sequence."""
    found = []
    for first in range(0, len(rows), sequence_rows):
        sequence = rows[first : first + sequence_rows]
        for begin in range(0, len(sequence), block_rows):
            seen = [(low, high) for low, high in sequence[begin : begin + block_rows] if high > low]
            if not seen:
                found.append((0, 0))
                continue
            start = min(low for low, _ in seen) // tile
            found.append((start, -(-max(high for _, high in seen) // tile) - start))
    return found


@triton.jit
def look(rows, blocks, found, SCAN: tl.constexpr, c: tl.constexpr):
    """start, end, block and before of each program; first tile and tiles of each block."""
    start, end, block, before = share(tl.arange(0, SCAN), rows, c)
    to = found + 4 * tl.program_id(0)
    tl.store(to, start)
    tl.store(to + 1, end)
    tl.store(to + 2, block)
    tl.store(to + 3, before)
    if tl.program_id(0) == 0:
        for base in range(0, rows.blocks, SCAN):
            b = base + tl.arange(0, SCAN)
            first, tiles, _ = block_tiles(b, rows, c)
            tl.store(blocks + 2 * b, first, mask=b < rows.blocks)
            tl.store(blocks + 2 * b + 1, tiles, mask=b < rows.blocks)


def shares(rows, constants, programs):
    """What `look` finds, as lists."""
    blocks = torch.full((rows.blocks, 2), -1, dtype=torch.int32)
    found = torch.full((programs, 4), -1, dtype=torch.int32)
    look[(programs,)](rows, blocks, found, constants.scan, constants)
    return found.tolist(), [tuple(pair) for pair in blocks.tolist()]


def check_shares(rows, spans, sequence_rows, constants, programs):
    found, blocks = shares(rows, constants, programs)
    assert blocks == spans_by_hand(spans, sequence_rows, constants.block_rows, constants.tile)
    if constants.fold:
        blocks = [blocks[n // 2] if n % 2 == 0 else blocks[-1 - n // 2] for n in range(len(blocks))]
    before = [0]
    for _, tiles in blocks:
        before.append(before[-1] + (tiles + constants.switch if tiles else 0))
    assert [start for start, *_ in found] == [0, *(end for _, end, *_ in found[:-1])] and found[-1][1] == before[-1]
    assert max(end - start for start, end, *_ in found) <= -(-before[-1] // programs)
    for start, end, block, ahead in found:
        assert start == end or (before[block] == ahead and ahead <= start < before[block + 1])


@pytest.mark.parametrize(("batch", "n", "matrix"), [(1, 1, False), (5, 2, True), (300, 1, False), (1100, 3, False)])
def test_programs_share_the_tiles_of_sequences(interpreter, batch, n, matrix):
    from octavo.kernels.gluon.mqa_logits import constants

    draw, limit = random.Random(batch), 5000
    lens = [
        [draw.choice([0, -3, -(2**31), 1, 63, 64, 65, 700, 10**6]) for _ in range(n if matrix else 1)]
        for _ in range(batch)
    ]
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    tile = hopper_tuning.logits_tile(64, 128, n, batch * limit, Device.named("h200"))
    groups = -(-n // tile.block_rows)
    c = constants(tile, (64, 128, n, 64), batch * groups, (matrix, False, False, False))
    rows = Rows(seq_lens if matrix else seq_lens[:, 0], None, seq_lens.stride(0), 1, limit, batch * groups, batch * n)
    own = [row if matrix else [row[0] - n + 1 + j for j in range(n)] for row in lens]
    spans = [(0, min(max(length, 0), limit)) for row in own for length in row]
    for programs, scan in ((1, 128), (13, c.scan)):
        check_shares(rows, spans, n, replace(c, scan=scan), programs)


@pytest.mark.parametrize("count", [1, 37, 4200])
def test_programs_share_the_tiles_of_a_run_of_keys(interpreter, count):
    from octavo.kernels.gluon.mqa_logits import constants

    draw, keys = random.Random(count), 3000
    starts = [draw.randint(-9, keys) for _ in range(count)]
    ends = [start + draw.choice([-3, 0, 1, 64, 900, 9000]) for start in starts]
    tile = hopper_tuning.logits_tile(64, 128, count, None, Device.named("h200"))
    blocks = -(-count // tile.block_rows)
    c = constants(tile, (64, 128, 0, 0), blocks, (False, False, False, False))
    first, last = (torch.tensor(x, dtype=torch.int32) for x in (starts, ends))
    spans = [(max(a, 0), min(max(b, 0), keys)) for a, b in zip(starts, ends, strict=True)]
    for changed in (replace(c, switch=0), replace(c, scan=128)):
        check_shares(Rows(first, last, 1, 1, keys, blocks, count), spans, count, changed, programs=5)


def test_shares_of_a_causal_prompt_have_as_many_blocks(interpreter):
    """Each begins with about as many: none has all of the short ones, which begin every tile or two."""
    from octavo.kernels.gluon.mqa_logits import constants

    count, programs = 2048, 20
    tile = hopper_tuning.logits_tile(64, 128, count, None, Device.named("h200"))
    blocks = count // tile.block_rows
    c = constants(tile, (64, 128, 0, 0), blocks, (False, False, False, False))
    starts, ends = torch.zeros(count, dtype=torch.int32), torch.arange(1, count + 1, dtype=torch.int32)
    found, _ = shares(Rows(starts, ends, 1, 1, count, blocks, count), c, programs)
    first = [nth for _, _, nth, _ in found] + [blocks]
    begun = [b - a for a, b in zip(first, first[1:], strict=False)]
    assert max(begun) <= blocks / programs + 3, begun


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", range(1, 9))
def test_tiles_hold_every_row_and_fit_an_sm(heads, dim, rows):
    device = Device.named("h200")
    for most_tokens in (4096, 1 << 22, None):
        tile = hopper_tuning.logits_tile(heads, dim, rows, most_tokens, device)
        assert tile.columns * tile.passes >= tile.block_rows * heads and tile.columns % heads == 0
        assert tile.block_rows <= 4 and tile.columns // heads in (1, 2, 4) and tile.stages >= 2
        blocks = -(-rows // tile.block_rows)
        assert most_tokens is None or blocks * tile.block_rows - rows < blocks  # rows are spread evenly
        ring = tile.stages * tile.tokens * (dim + 4) + tile.query_stages * tile.passes * tile.columns * dim
        assert tile.programs_per_sm * (ring + RESERVED) <= SM_SHARED_MEMORY


if __name__ == "__main__":
    compile_all()
