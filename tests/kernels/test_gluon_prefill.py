"""Hopper's prefill without a GPU: what ptxas makes of it, its list of tiles in the interpreter, its sizes."""

from __future__ import annotations

import json
import random
import re
from itertools import takewhile

import pytest
import torch

from octavo import hopper_tuning
from octavo.backends import BY_NAME
from octavo.device import Device
from octavo.spec import AttentionSpec

from .compiled import disassembly, printed

H200 = Device.named("h200")
# Instructions of the longest loop of products without masks: of two blocks, but one of exact and of head_dim 256.
LOOPS = {
    "of 128": 940,
    "of 64": 870,
    "of 256": 550,
    "of 128, pages of 32, all features": 1510,
    "of 128, pages of 128": 940,
    "exact of 128": 750,
    "exact of 64": 655,
    "exact of 256": 710,
}


def product_loops(listing: str) -> list[list[str]]:
    """Opcodes of the innermost loops that hold tensor-core products, of a disassembly."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"^\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);", line):
            code.append((found[1], found[2]))
    loops = []
    for end, (opcode, rest) in enumerate(code):
        target = re.search(r"L_x_\d+", rest) if opcode.startswith("BRA") else None
        if target and labels.get(target[0], end + 1) <= end:
            loops.append((labels[target[0]], end))
    loops = [(a, b) for a, b in loops if any(op.startswith("QGMMA") for op, _ in code[a:b])]
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [[op for op, _ in code[a : b + 1]] for a, b in inner]


def touched_in_flight(listing: str) -> int:
    """Instructions that name a register of a product, accumulator or operand, before a wait has covered its group."""
    groups: list[list[range]] = []  # committed, oldest first
    group: list[range] = []
    found = 0
    for line in listing.splitlines():
        match = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);", line)
        if not match:
            continue
        opcode, rest = match[1], match[2]
        if opcode.startswith("QGMMA"):
            shape = re.match(r"\s*x(\d+)x32\.(F16|F32)\.\S+\s+R(\d+), (?:R(\d+), )?gdesc", rest)
            assert shape, line
            first, size = int(shape[3]), int(shape[1]) // (4 if shape[2] == "F16" else 2)
            group.append(range(first, first + size))
            if shape[4]:
                group.append(range(int(shape[4]), int(shape[4]) + 4))
            if "gsb0" in rest:
                groups, group = [*groups, group], []
        elif wait := re.search(r"gsb0, 0x(\d+)", rest):
            groups = groups[len(groups) - min(int(wait[1]), len(groups)) :]
        else:
            named = {int(r) for r in re.findall(r"\bR(\d+)\b", rest)}
            found += any(named & set(span) for spans in [*groups, group] for span in spans)
    return found


# What takes most shared memory of what the planner accepts: head_dim, page_size, precision and query_dtype.
LARGE = (
    (64, 128, "exact", "bfloat16"),
    (128, 128, "exact", "bfloat16"),
    (256, 128, "fast", "bfloat16"),
    (256, 128, "exact", "fp8_e4m3"),
    (256, 64, "exact", "bfloat16"),
)


def compile_large() -> None:
    """Print a list with the label and shared memory of each of LARGE."""
    from octavo.kernels.gluon._aot import example_call
    from octavo.kernels.gluon.prefill import launch, prefill_kernel
    from octavo.testing.aot import compile_case

    for dim, page, precision, query in LARGE:
        spec = AttentionSpec(4, 2, dim, page_size=page, precision=precision, query_dtype=query)
        memory = torch.empty(1 << 16, dtype=torch.int32, device="meta")
        shared = compile_case(prefill_kernel, launch(example_call(spec), memory, H200), H200)[0].metadata.shared
        accepted = not BY_NAME["gluon"].reasons(spec, H200, "prefill")
        print(json.dumps({"label": str((dim, page, precision, query)), "large": shared, "accepted": accepted}))


def compile_all() -> None:
    """Print a JSON object for each launch of the kernel; run as a program, since TRITON_INTERPRET must not be set."""
    from octavo.kernels.gluon.prefill import aot_cases
    from octavo.testing.aot import compile_case

    for label, kernel, arguments in aot_cases(H200):
        compiled, log = compile_case(kernel, arguments, H200)
        listing = disassembly(compiled.asm["cubin"])
        # What is computed again comes last, and copies its blocks itself; what masks has many comparisons.
        loops = takewhile(lambda loop: not any(op.startswith("UTMALDG") for op in loop), product_loops(listing))
        plain = [loop for loop in loops if sum(op.startswith("ISETP") for op in loop) < 16]
        found = {
            "label": label,
            "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
            "shared": compiled.metadata.shared,
            "serialised": "erializ" in log,
            "touched_in_flight": touched_in_flight(listing),
            "loops": len(plain),
            "longest": max(map(len, plain)),
            "spills": max(sum(op.startswith(("LDL", "STL")) for op in loop) for loop in plain),
        }
        if label == "of 128":
            step = {"table_row": 1, "num_pages": 7, "rows": 1, "size": 1}
            found["compiled_once"] = compile_case(kernel, {**arguments, **step}, H200)[0].hash == compiled.hash
        print(json.dumps(found), flush=True)


@pytest.fixture(scope="module")
def printed_cases():
    return printed(__name__)


@pytest.fixture(scope="module")
def compiled(printed_cases):
    return {case["label"]: case for case in printed_cases if "large" not in case}


def test_what_is_accepted_fits_shared_memory(printed_cases):
    large = [case for case in printed_cases if "large" in case]
    assert len(large) == len(LARGE) and all(case["accepted"] for case in large)
    assert {case["label"]: case["large"] for case in large if case["large"] > H200.shared_memory} == {}


def test_a_program_fits_an_sm(compiled):
    assert compiled.keys() == LOOPS.keys()
    for case in compiled.values():
        assert case["registers"] * 12 * 32 <= 65536, case  # three warp groups, before they share them out anew
        assert case["shared"] <= H200.shared_memory, case


def test_products_are_not_serialised_and_left_alone_in_flight(compiled):
    assert [label for label, case in compiled.items() if case["serialised"] or case["touched_in_flight"]] == []


def test_sizes_of_a_step_are_no_reason_to_compile_again(compiled):
    assert compiled["of 128"]["compiled_once"]


def test_the_check_of_products_in_flight():
    product = "/*0000*/ QGMMA.64x8x32.F32.E4M3.E4M3 R24, R4, gdesc[UR8], R24, gsb0 ;".replace("64x8", "64 x8")
    reads, waits = "/*0010*/ FADD R1, R27, R2 ;", "/*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    assert touched_in_flight("\n".join([product, reads, waits])) == 1
    assert touched_in_flight("\n".join([product, waits, reads])) == 0


def test_loops_spill_nothing(compiled):
    """Of exact 256 a few numbers: its output alone takes half the registers."""
    assert {label: case["spills"] for label, case in compiled.items() if case["spills"]}.keys() <= {"exact of 256"}
    assert compiled["exact of 256"]["spills"] <= 5


def test_loops_are_as_short_as_they_were(compiled):
    longer = {label: case["longest"] for label, case in compiled.items() if case["longest"] > LOOPS[label]}
    assert longer == {}
    assert all(case["loops"] >= 2 for case in compiled.values())


def tiles_by_hand(spec, lens, rows, capacity, num_decodes, programs):
    """Entries of the list: every tile once, by where it ends; what the last, partial wave holds is cut in pieces."""
    tile = hopper_tuning.prefill_tile(spec)
    size, heads = hopper_tuning.PACKED_ROWS // tile.pack, spec.num_q_heads // tile.pack
    tiles, start = [], 0
    for b, (length, n) in enumerate(zip(lens, rows, strict=True)):
        length = min(max(length, 0), capacity)
        decodes = n <= spec.max_query_len if num_decodes is None else b < num_decodes
        for i in range(0 if decodes else -(-n // size)):
            seen = length - n + i * size + 1
            end = -(-max(length - n + min((i + 1) * size, n), 0) // tile.block)
            first = min(max(seen - spec.window, 0) // tile.block, end) if spec.window else 0
            tiles.append((-end, b, -i, [b, start + i * size, start + n, length, seen], first, end))
        start += n
    tiles.sort()
    waves, left = divmod(len(tiles) * heads, programs)
    left = -(-left // heads)
    pieces = 1
    if left and waves < 8 and not spec.batch_invariant:
        fits = [n for n in range(1, 17) if n == 1 or left * heads * n <= 2 * programs]
        pieces = min(fits, key=lambda n: -(-left * heads * n // programs) / n + 0.02 * n)
    entries = []
    for rank, (*_, head, first, end) in enumerate(tiles):
        cut = rank - (len(tiles) - left)
        n = pieces if cut >= 0 else 1
        share = max(-(-(end - first) // n), 8)
        used = max(-(-(end - first) // share), 1)
        for p in range(n):
            stop = end - p * share
            begin = first if p == used - 1 else max(stop - share, first)
            entries.append([*head, begin, stop, used if p < used else 0, cut * pieces, p, cut])
    return entries


@pytest.mark.parametrize("batch", [1, 3, 70])
@pytest.mark.parametrize(
    "fields", [{}, {"window": 300}, {"batch_invariant": True}, {"max_query_len": 4}, {"precision": "exact"}]
)
@pytest.mark.parametrize("decodes", ["found", "told"])
def test_the_list_holds_every_tile_once_heaviest_first(interpreter, monkeypatch, batch, fields, decodes):
    from octavo.kernels.gluon import prefill_plan as plan

    spec = AttentionSpec(12, 2, 128, **fields)
    monkeypatch.setattr(plan, "device_of", lambda _: H200)
    draw = random.Random(batch)
    lens = [draw.choice([0, -3, 1, 63, 500, 5000, 40000]) for _ in range(batch)]
    rows = [draw.choice([0, 1, 3, 40, 64, 65, 700]) for _ in range(batch)]
    num_decodes = None if decodes == "found" else batch // 3
    starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ints = hopper_tuning.prefill_schedule_ints(spec, H200, batch, max(sum(rows), 1))
    memory = torch.full((ints,), -1, dtype=torch.int32)
    table = torch.zeros(batch, 600, dtype=torch.int32)
    plan.prefill_plan(spec, torch.tensor(lens, dtype=torch.int32), table, starts, memory, num_decodes, None)
    if num_decodes == batch:
        return
    wanted = tiles_by_hand(spec, lens, rows, 600 * 64, num_decodes, H200.num_sms)
    schedule = plan.schedule_of(spec, H200, memory)
    assert memory[:3].tolist() == [len(wanted), 0, 0]
    got = schedule.entries.view(-1, plan.ENTRY)[: len(wanted), :11].tolist()
    live = [(g, w) for g, w in zip(got, wanted, strict=True) if w[7]]
    assert [g[:8] + g[9:10] for g, _ in live] == [w[:8] + w[9:10] for _, w in live]
    shared = [(g[8], g[10], w[8], w[10]) for g, w in live if w[7] > 1]
    assert [(a, b) for a, b, _, _ in shared] == [(a, b) for _, _, a, b in shared]
    assert [g[7] for g, w in zip(got, wanted, strict=True) if not w[7]] == [0] * (len(wanted) - len(live))
    counters = 2 * max((w[10] + 1 for w in wanted), default=0) * spec.num_q_heads // 2
    assert not schedule.counters[:counters].any()


@pytest.mark.parametrize("starts", [[0, 1024, 0, 1024, 0, 1024], [1024, 0, 1024, 3, 1024, 0], [0, 900, 300, 1000]])
def test_rows_that_descend_list_nothing_and_write_nothing_beyond(interpreter, monkeypatch, starts):
    from octavo.kernels.gluon import prefill_plan as plan

    spec, batch, room = AttentionSpec(32, 8, 128), len(starts) - 1, 10_000
    monkeypatch.setattr(plan, "device_of", lambda _: H200)
    ints = hopper_tuning.prefill_schedule_ints(spec, H200, batch, 1024)
    memory = torch.full((room + ints + room,), -7, dtype=torch.int32)
    lens = torch.full((batch,), 200, dtype=torch.int32)
    table = torch.zeros(batch, 8, dtype=torch.int32)
    query_starts = torch.tensor(starts, dtype=torch.int32)
    plan.prefill_plan(spec, lens, table, query_starts, memory[room : room + ints], None, None)
    assert memory[room : room + 3].tolist() == [0, 0, 0]
    assert bool((memory[:room] == -7).all()) and bool((memory[room + ints :] == -7).all())


@pytest.mark.parametrize("fields", [{}, {"precision": "exact"}, {"head_dim": 256}, {"query_dtype": "fp8"}])
def test_the_workspace_grows_with_every_bound(fields):
    spec = AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **fields})
    small = (8, 64, 4096)
    least = hopper_tuning.prefill_workspace_bytes(spec, H200, *small)
    for i, larger in enumerate((64, 8192, 131072)):
        bounds = (*small[:i], larger, *small[i + 1 :])
        assert hopper_tuning.prefill_workspace_bytes(spec, H200, *bounds) >= least
    pieces = hopper_tuning.prefill_pieces(H200) * hopper_tuning.PACKED_ROWS * (spec.value_dim + 1) * 4
    assert least >= pieces + 4 * hopper_tuning.prefill_schedule_ints(spec, H200, 8, 64)


if __name__ == "__main__":
    compile_all()
    compile_large()
