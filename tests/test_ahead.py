"""Compiling ahead: what is grouped, that first calls are those that measuring makes, and processes that die."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo import AttentionSpec, Unsupported
from octavo.bench import ahead, cases, indexer_cases, matrix
from octavo.bench.indexer_measure import IndexerInputs, indexer_side
from octavo.bench.peers import PEERS, Peer
from octavo.bench.processes import in_processes
from octavo.bench.sides import AttentionInputs, octavo_side
from octavo.spec import IndexerSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec(8, 2, 64)
INDEXER = IndexerSpec(num_heads=8, head_dim=64, page_size=64, top_k=16)
CASES = [
    cases.decode(SPEC, 5, 3000),
    cases.decode(replace(SPEC, max_query_len=4, window=100, sinks=True), 2, 300),
    cases.prefill(replace(SPEC, kv_dtype="bfloat16", layout="nhd"), 2, 40, 5000),
    cases.append(SPEC, 2, 30),
    cases.decode(SPEC, 2, 100).with_append(),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compact_inputs_make_the_same_call_over_a_few_pages(case):
    small, whole = AttentionInputs(case, "cpu", compact=True), AttentionInputs(case, "cpu")
    assert small.sets == 1 and small.period == 16 * 128
    (cache, (table,)), (_, tables) = small.cache(case.spec), whole.cache(case.spec)
    assert cache.num_pages == small.period // case.spec.page_size and table.shape == tables[0].shape
    assert int(table.min()) >= 0 and int(table.max()) < cache.num_pages
    side = octavo_side(case, "auto", small)
    side.calls[0]()
    if side.out is not None:
        assert side.out.isfinite().all()


@pytest.mark.parametrize(
    "case",
    [
        indexer_cases.paged(3, 200, 2, INDEXER),
        indexer_cases.ragged(8, 64, True, INDEXER),
        indexer_cases.topk(3, 50, INDEXER),
        indexer_cases.append(20, INDEXER),
    ],
    ids=lambda case: case.op,
)
def test_an_indexer_takes_one_set(case):
    inputs = IndexerInputs(case, "cpu", compact=True)
    assert inputs.sets == 1
    indexer_side(case, "reference", inputs).calls[0]()
    ahead.call_once((case, "reference"), CPU)


def test_groups_share_a_kernel_and_leave_out_what_compiles_nothing(monkeypatch):
    monkeypatch.setitem(PEERS, "builds", Peer("builds", ("decode",), "torch", "x:y", True))
    two = [cases.decode(SPEC, b, 100) for b in (1, 2)]
    found = ahead.groups(
        [(two[0], ["gluon", "triton", "builds", "sdpa-flash"]), (two[1], ["gluon", "reference"]), (CASES[3], ["auto"])]
    )
    assert found == [
        [(two[0], "builds")],
        [(two[0], "gluon"), (two[1], "gluon")],
        [(two[0], "triton")],
        [(CASES[3], "auto")],
    ]


def test_every_cell_of_the_matrix_is_in_one_group():
    cells = [(case, ["gluon", "triton"]) for case in matrix.cases(matrix.WHOLE, 141e9)]
    found = ahead.groups(cells)
    assert sum(map(len, found)) == 2 * len(cells) and 100 < len(found) < 300
    assert all(len({(backend, case.spec) for case, backend in group}) == 1 for group in found)


def test_a_first_call_of_what_cannot_run_raises_and_is_dropped_in_a_process():
    with pytest.raises(Unsupported, match="measured for prefill"):
        ahead.call_once((CASES[0], "flashinfer-fa3"), CPU)
    group = [(CASES[0], "flashinfer-fa3"), (CASES[0], "reference")]
    assert list(in_processes(ahead.call_once, [group], CPU, 1)) == [(0, [None, None])]


def _root(item: float, device: torch.device) -> tuple[float, str]:
    """A result; raises for a negative item."""
    return math.sqrt(item), str(device)


def test_processes_give_results_of_every_group():
    groups = [[4.0, -1.0], [9.0], []]
    found = dict(in_processes(_root, groups, CPU, 2))
    assert found == {0: [(2.0, "cpu"), None], 1: [(3.0, "cpu")], 2: []}


class _Fatal:
    """Ends the process that it is sent to."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_process_that_dies_loses_its_own_group_alone():
    groups: Any = [[(_Fatal(), "triton")] * 3, [(CASES[3], "reference")], [(CASES[0], "reference")] * 2]
    assert list(in_processes(ahead.call_once, groups, CPU, 1)) == [(0, None), (1, [None]), (2, [None, None])]


class _Slow:
    """Takes a minute to arrive."""

    def __reduce__(self) -> Any:
        return time.sleep, (60,)


def test_what_takes_too_long_is_left_and_no_process_stays():
    started = time.monotonic()
    assert list(in_processes(ahead.call_once, [[(_Slow(), "triton")]] * 2, CPU, 2, most_seconds=0.5)) == []  # type: ignore[list-item]
    assert time.monotonic() - started < 30 and multiprocessing.active_children() == []


def test_an_interrupt_ends_it():
    groups: Any = [[(CASES[3], "reference")], [(_Slow(), "triton")]]
    with pytest.raises(KeyboardInterrupt):
        for _ in in_processes(ahead.call_once, groups, CPU, 2):
            raise KeyboardInterrupt
    assert multiprocessing.active_children() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_measuring_compiles_nothing_afterwards(tmp_path, monkeypatch):
    from octavo.bench.matrix import backends_of, compare
    from octavo.device import Device
    from octavo.warmup import watched

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = AttentionSpec(32, 8, 128)
    some = [
        cases.decode(spec, 3, 700),
        cases.decode(replace(spec, kv_dtype="bfloat16", layout="nhd"), 64, 1024),
        cases.prefill(spec, 2, 1000, 3000),
        cases.append(spec, 1, 5000),
    ]
    device = torch.device("cuda")
    cells = [(case, backends_of(case, Device.of(device), peers=False)) for case in some]
    done = list(in_processes(ahead.call_once, ahead.groups(cells), device, 4))
    with watched() as found:
        records = [r for case, backends in cells for r in compare(case, backends, device, run="r", seconds=0.001)]
    assert sum(len(results or ()) for _, results in done) == len(records) and all(r.us for r in records), [
        r.error for r in records
    ]
    assert found.compiled == [] and found.cached
