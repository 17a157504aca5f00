"""Triton's indexer kernels under the interpreter, against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from indexer_cases import (
    INF,
    AppendCase,
    PagedCase,
    RaggedCase,
    TopkCase,
    compare_append,
    compare_paged,
    compare_ragged,
    compare_topk,
    paged_call,
    planted_rows,
    ragged_call,
)

from octavo.device import ARCHITECTURES, Device
from octavo.kernels.triton import mqa_logits, topk
from octavo.kernels.triton._select import registers_for
from octavo.kernels.triton.append import DEPENDENT_LAUNCH
from octavo.kernels.triton.index_append import index_append
from octavo.reference.topk import topk_indices as reference_topk

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

APPENDS = [
    *(
        AppendCase(scale_format=scales, dtype=dtype, wild=wild)
        for scales, dtype, wild in itertools.product(
            ["fp32", "pow2", "ue8m0"], [torch.bfloat16, torch.float16, torch.float32], [False, True]
        )
    ),
    *(AppendCase(dim, page, rows=70, strided=True) for dim, page in ((64, 16), (64, 128), (128, 32))),
    AppendCase(rows=1),
]


@pytest.mark.parametrize("case", APPENDS, ids=str)
def test_append_equals_the_reference(case):
    assert compare_append(case, index_append, "cpu") == []


PAGED = [
    *(
        PagedCase(heads=heads, dim=dim, n=n, page_size=page)
        for heads, dim, n, page in (
            (64, 128, 1, 64),
            (16, 64, 3, 16),
            (32, 128, 8, 32),
            (128, 128, 2, 128),
            (64, 64, 4, 64),
        )
    ),
    *(PagedCase(heads=heads, n=2, lens=(5, 130)) for heads in (8, 24, 100)),
    *(PagedCase(lens=(70, 130, 0), scale_format=scales, n=2, heads=32) for scales in ("pow2", "ue8m0")),
    *(
        PagedCase(lens=(130, 7, 66), n=n, heads=16, lens_form=form, fill=fill)
        for n, form, fill in itertools.product((1, 3, 7), ("matrix", "strided"), (None, -1.0))
    ),
    *(PagedCase(lens=(200, 150), heads=32, page_size=page, hole=True) for page in (16, 64, 128)),
    PagedCase(lens=(200, 150), n=2, heads=32, out=torch.bfloat16),
    PagedCase(lens=(200, 10**3, 3), heads=16, max_context=100),
    PagedCase(lens=(0, 0), heads=16, max_context=70),
    PagedCase(lens=(300,), heads=16, max_context=3000, fill=0.5),
    PagedCase(lens=tuple(i * 7 % 20 for i in range(140)), heads=16, dim=64, max_context=24, fill=None),
    PagedCase(lens=(65, 64), n=5, heads=64, strided=True),
]


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_paged_logits_equal_the_reference(case):
    assert compare_paged(case, mqa_logits.paged_mqa_logits, "cpu", loss=0.0) == []


@pytest.mark.parametrize("device", ["a100", "b200"])
def test_paged_logits_in_other_devices_tiles(device, monkeypatch):
    from octavo.device import Device

    named = replace(Device.named(device), num_sms=2)
    monkeypatch.setattr(mqa_logits, "target_of", lambda device: named)
    for case in (PAGED[0], PAGED[1], PAGED[3], replace(PAGED[0], heads=32, n=8, scale_format="ue8m0")):
        assert compare_paged(case, mqa_logits.paged_mqa_logits, "cpu", loss=0.0) == []


def test_a_lengths_beyond_the_table_ends_there():
    case = PagedCase(lens=(130, 70), heads=16, n=2, max_context=1000)
    call = paged_call(case, "cpu")
    whole = torch.full_like(call.out, float("nan"))
    full = torch.full_like(call.seq_lens, call.page_table.shape[1] * 64 + 1)
    mqa_logits.paged_mqa_logits(replace(call, seq_lens=full, out=whole))
    mqa_logits.paged_mqa_logits(replace(call, seq_lens=torch.full_like(full, 2**31 - 1)))
    assert torch.equal(call.out[1::2].view(torch.int32), whole[1::2].view(torch.int32))
    assert (call.out[:, call.page_table.shape[1] * 64 : 1000] == -INF).all()


def test_a_nan_key_spoils_its_own_logit_alone():
    case = PagedCase(lens=(130,), heads=32, n=2)
    call = paged_call(case, "cpu")
    mqa_logits.paged_mqa_logits(call)
    spoiled = replace(call, out=torch.full_like(call.out, 9.0))
    call.cache.keys()[int(call.page_table[0, 0]), 5, 7] = 0x7F
    mqa_logits.paged_mqa_logits(spoiled)
    assert spoiled.out[:, 5].isnan().all()
    others = [t for t in range(256) if t != 5]
    assert torch.equal(spoiled.out[:, others], call.out[:, others])


RAGGED = [
    *(
        RaggedCase(compressed=compressed, fill=fill, heads=heads, dim=dim)
        for compressed, fill, (heads, dim) in itertools.product((False, True), (None, -INF), ((64, 128), (32, 64)))
    ),
    RaggedCase(rows=70, keys=130, causal=True, heads=16, width=140),
    RaggedCase(compressed=True, width=30),
    RaggedCase(compressed=True, width=900, fill=0.5, heads=16),
    RaggedCase(rows=5, keys=3000, heads=128, width=3000, causal=True),
    RaggedCase(out=torch.bfloat16, heads=24),
    RaggedCase(rows=3, keys=0, width=9, causal=False),
]


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_ragged_logits_equal_the_reference(case):
    assert compare_ragged(case, mqa_logits.mqa_logits, "cpu", loss=0.0) == []


def test_nothing_to_do_launches_nothing(monkeypatch):
    for module in (mqa_logits, topk):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, None)  # what is launched raises
    with pytest.raises(TypeError, match="NoneType"):
        topk.topk_indices(
            torch.zeros(2, 5), torch.full((2,), 5, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
        )
    with pytest.raises(TypeError, match="NoneType"):
        mqa_logits.paged_mqa_logits(paged_call(PagedCase(lens=(3,), heads=16), "cpu"))
    call = paged_call(PagedCase(lens=(3,), heads=16), "cpu")
    none = replace(call, q=call.q[:0], weights=call.weights[:0], seq_lens=call.seq_lens[:0], out=call.out[:0])
    mqa_logits.paged_mqa_logits(none)
    ragged = ragged_call(RaggedCase(), "cpu")
    mqa_logits.mqa_logits(replace(ragged, q=ragged.q[:0], out=ragged.out[:0]))
    topk.topk_indices(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32))


def small_plan(slices, listed, size):
    """A plan whose lists and registers hold little, so that a short row takes every path, in several parts."""

    def plan(rows, width, k, device):
        c, _ = MAKE(rows, 20000, k, device)
        fields = {"size": size, "sample": 64, "bins": 64, "lanes": 8, "searched": 64}
        fields |= {"slices": slices, "parts": -(-width // (slices * 256)), "listed": listed}
        return replace(c, **fields, num_warps=4), rows if slices > 1 else min(rows, 2)

    return plan


MAKE = topk.plan
KINDS = ("normal", "ties", "zeros", "sorted", "infinities", "wide", "equal")
# Slices, room of a list, and candidates in registers: with few of either lists are compacted, or the row is searched.
WAYS = [(4, 64, 256), (3, 128, 64), (3, 16, 256), (3, 512, 64), (1, 256, 256), (1, 256, 64)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slices", "listed", "size"), WAYS)
def test_topk_equals_the_reference_whichever_way_it_is_found(kind, slices, listed, size, monkeypatch):
    monkeypatch.setattr(topk, "plan", small_plan(slices, listed, size))
    for rows, width, k, dtype in ((4, 1100, 24, torch.float32), (3, 900, 20, torch.bfloat16)):
        assert compare_topk(TopkCase(rows, width, k, kind, dtype), topk.topk_indices, "cpu") == []


@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
def test_topk_of_rows_that_registers_hold(kind):
    for case in (TopkCase(3, 100, 30, kind), TopkCase(2, 40, 64, kind), TopkCase(4, 300, 1, kind)):
        assert compare_topk(case, topk.topk_indices, "cpu") == []


@pytest.mark.parametrize("kind", ["normal", "zeros"])
def test_topk_as_it_is_planned(kind):
    assert compare_topk(TopkCase(2, 20000, 2048, kind, full=True), topk.topk_indices, "cpu") == []


def run_topk(rows, width, k, device="h200"):
    """The launches' arguments, run, for random rows."""
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(5))
    lens = torch.full((rows,), width, dtype=torch.int32)
    out = torch.full((rows, k), -7, dtype=torch.int32)
    launches = topk.launches(logits, lens, out, Device.named(device))
    for kernel, programs, arguments in launches:
        kernel[(programs,)](**arguments)
    return launches[-1][2]


def test_the_estimate_usually_serves(monkeypatch):
    """Of random rows, the candidates hold the k largest and fit: the row is read once."""
    rows, k = 6, 64
    plan = small_plan(4, 256, 512)
    monkeypatch.setattr(topk, "plan", lambda *a: (replace(plan(*a)[0], sample=1024), rows))
    listed = run_topk(rows, 4000, k)["scratch"].counts
    assert (listed.sum(1) >= k).all() and (listed.sum(1) <= 4 * k).all()


@pytest.mark.parametrize(("listed", "size", "left"), [(256, 256, 0), (256, 64, 1), (16, 256, 1)])
def test_what_lists_or_registers_do_not_hold_is_left_to_a_search(listed, size, left, monkeypatch):
    monkeypatch.setattr(topk, "plan", small_plan(1, listed, size))
    arguments = run_topk(3, 900, 24)
    assert arguments["scratch"].left.tolist() == [left] * 3
    assert (arguments["out"] >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_too_many_candidates_are_compacted_and_only_what_remains_searched(dtype, monkeypatch):
    """Of rows with too many those whose k-th has more equals than registers hold, and those with too few."""
    size, k, searched = 256, 64, []
    monkeypatch.setattr(topk, "plan", small_plan(4, 768, size))
    search = topk.search
    monkeypatch.setattr(topk, "search", lambda row, *rest: (searched.append(1), search(row, *rest))[1])
    logits, lens, kinds = planted_rows(6, 3000, k, size, dtype)
    want, out = (torch.full((6, k), -7, dtype=torch.int32) for _ in range(2))
    reference_topk(logits, lens, want)
    launches = topk.launches(logits, lens, out, Device.named("h200"))
    for kernel, programs, arguments in launches:
        kernel[(programs,)](**arguments)
    assert torch.equal(out, want)
    counts = launches[1][2]["scratch"].counts
    total = counts.sum(1)
    assert (total[kinds < 2] > size).all() and counts.max() <= 768 and (total[kinds == 2] < k).all()
    assert len(searched) == 4


def law(width, k, sample):
    """Mean and standard deviation of what an estimate leaves: its share, deviations and half a bin."""
    share = sample * k / width
    least = (share + 3.5 * share**0.5 + 2) * (1 + 1 / 28)
    return k * least / share, k * least**0.5 / share


@pytest.mark.parametrize(("width", "k"), [(131072, 2048), (1 << 20, 2048), (32768, 512), (262144, 2048), (65536, 4096)])
@pytest.mark.parametrize("spare", [3, 5])
def test_registers_hold_what_the_estimate_leaves(width, k, spare):
    """Of random rows, by the law of order statistics."""
    sample, size, warps = registers_for(width, k, spare)
    assert size == 8 * 32 * warps and size >= 2 * k
    mean, deviation = law(width, k, sample)
    assert mean - k > 3 * k / (sample * k / width) ** 0.5
    assert mean + spare * deviation + 1.5 * 16 <= size


def test_the_estimate_leaves_what_registers_are_planned_by():
    rows, width, k = 120, 131072, 2048
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(8))
    out = torch.empty((rows, k), dtype=torch.int32)
    lens = torch.full((rows,), width, dtype=torch.int32)
    kernel, programs, arguments = topk.launches(logits, lens, out, Device.named("h200"))[0]
    kernel[(programs,)](**arguments)
    left = (logits >= arguments["scratch"].bounds[:, :1]).sum(1).double()
    mean, deviation = law(width, k, 4096)
    assert abs(left.mean() - mean) < 3 * deviation / rows**0.5
    assert abs(left.std() / deviation - 1) < 3 / (2 * rows) ** 0.5


@pytest.mark.parametrize(
    ("rows", "width", "slices", "warps", "groups"),
    [
        (64, 131072, 4, 16, 64),
        (1, 131072, 8, 16, 1),
        (256, 32768, 1, 16, 256),
        (2048, 65536, 1, 16, 264),
        (600, 131072, 1, 16, 264),
        (64, 8192, 0, 16, 64),
        (1, 1 << 20, 16, 32, 1),
    ],
)
def test_a_row_has_as_many_programs_as_run_at_once(rows, width, slices, warps, groups):
    c, found = topk.plan(rows, width, 2048, Device.named("h200"))
    assert (c.slices, c.num_warps, found) == (slices, warps, groups)
    assert slices == 0 or slices * c.parts * 32 * c.lanes >= width
    logits = torch.empty((rows, width), device="meta")
    lens, out = torch.empty(rows, dtype=torch.int32), torch.empty((rows, 2048), dtype=torch.int32)
    assert len(topk.launches(logits, lens, out, Device.named("h200"))) == (2 if slices else 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_dependent_launch_is_for_those_that_have_it(arch, monkeypatch):
    named = replace(Device.named("h200"), arch=arch)
    assert not topk.plan(8, 131072, 2048, named)[0].dependent_launch  # interpreted
    monkeypatch.setattr("octavo.kernels.triton._select.INTERPRETED", False)
    c, _ = topk.plan(9, 131072, 2048, named)
    assert c.dependent_launch == (arch in DEPENDENT_LAUNCH)
    assert c.registers in (0, 64) and c.num_warps == 16
