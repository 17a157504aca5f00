"""The indexer's planner: which backend runs each operation, why, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import Device, IndexerSpec, InvalidInput, Unsupported
from octavo.backends import WRITTEN
from octavo.bench import indexer_cases as cases
from octavo.bench.indexer_measure import IndexerInputs, compare, measure
from octavo.cli.main import app
from octavo.device import ARCHITECTURES, KNOWN
from octavo.indexer_backends import FILES, INDEXER_BACKENDS, OPERATIONS
from octavo.indexer_choose import _choose, choose_indexer, choose_operation

ROOT = Path(__file__).resolve().parent.parent / "octavo"
SPEC = IndexerSpec()


@pytest.fixture(autouse=True)
def no_backend_from_outside(monkeypatch):
    monkeypatch.delenv("OCTAVO_BACKEND", raising=False)


@pytest.fixture(autouse=True)
def all_of_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table with every Triton file of the indexer, proven or not."""
    monkeypatch.setitem(WRITTEN, "triton", WRITTEN["triton"] | set(FILES.values()))
    _choose.cache_clear()
    yield
    _choose.cache_clear()


def test_every_operation_has_a_backend_on_every_known_device():
    for name, (heads, dim, page, scales, n) in itertools.product(
        KNOWN, itertools.product((16, 24, 64, 128), (64, 96, 128), (16, 64, 48, 128), ("fp32", "ue8m0"), (1, 8, 20))
    ):
        choice = choose_indexer(IndexerSpec(heads, dim, page, scales, n), name)
        assert set(choice.operations) == set(OPERATIONS)
        on_gpu = KNOWN[name].arch in ARCHITECTURES
        usual = dim != 96 and page != 48
        for operation in choice.operations.values():
            assert on_gpu or operation.backend == "reference"
            assert not (on_gpu and usual) or operation.backend in ("gluon", "triton")
            for verdict in operation.verdicts.values():
                assert (verdict.word == "cannot") == bool(verdict.reasons)
        assert choice.graph_support == (
            "always" if choice.operations["index_append"].backend != "reference" else "never"
        )


def test_files_and_the_table_of_what_is_written_agree():
    homes = {"gluon": "kernels/gluon", "triton": "kernels/triton", "reference": "reference"}
    for backend, home in homes.items():
        for file in set(FILES.values()) & WRITTEN[backend]:
            assert (ROOT / home / f"{file}.py").is_file()
    assert set(FILES.values()) <= WRITTEN["triton"] and set(FILES.values()) <= WRITTEN["reference"]
    assert [b.name for b in INDEXER_BACKENDS] == ["gluon", "triton", "reference"]


def test_a_named_backend_runs_or_is_refused_with_every_reason():
    assert choose_operation(SPEC, Device.named("a100"), "topk", "triton").why == "named by the caller"
    with pytest.raises(Unsupported) as refused:
        choose_operation(IndexerSpec(256, 96, 48), Device.named("h200"), "paged_mqa_logits", "triton")
    assert refused.value.reasons == (
        "needs num_heads of at most 128; found 256",
        "needs head_dim 64 or 128; found 96",
        "needs page_size 16, 32, 64 or 128; found 48",
    )
    assert refused.value.nearest == "no backend named (then reference)"
    with pytest.raises(InvalidInput, match="must be one of gluon, triton, reference"):
        choose_indexer(SPEC, "h200", "cuda")
    with pytest.raises(InvalidInput, match="must be an IndexerSpec"):
        choose_indexer("deepseek", "h200")  # pyright: ignore[reportArgumentType]


def test_the_environment_names_a_backend_for_what_it_has(monkeypatch):
    monkeypatch.setenv("OCTAVO_BACKEND", "reference")
    choice = choose_indexer(SPEC, "h200")
    assert {c.backend for c in choice.operations.values()} == {"reference"}
    assert {c.why for c in choice.operations.values()} == {"named by OCTAVO_BACKEND"}
    monkeypatch.setenv("OCTAVO_BACKEND", "gluon")
    assert choose_operation(SPEC, Device.named("h200"), "topk").backend == "triton"


def test_a_cache_whose_pages_are_not_aligned_is_not_gluons(monkeypatch):
    monkeypatch.setitem(WRITTEN, "gluon", WRITTEN["gluon"] | {"mqa_logits"})
    device = Device("here", "sm_90", 132)  # a device of its own: choices are kept
    assert choose_operation(SPEC, device, "paged_mqa_logits").backend == "gluon"
    unaligned = choose_operation(IndexerSpec(page_alignment=4), device, "paged_mqa_logits")
    assert unaligned.backend == "triton"
    assert unaligned.verdicts["gluon"].reasons == ("needs page_alignment 16; found 4",)


def explain(*arguments):
    done = CliRunner().invoke(app, ["explain", "--model", *arguments])
    return done.exit_code, done.output


def test_explain_shows_the_indexers_plan():
    code, output = explain("deepseek-v3.2", "--device", "h200")
    assert code == 0
    for word in ("indexer: 64 heads of 128, top 2048", "paged_mqa_logits  ", "index_append", "always (any batch)"):
        assert word in output
    index = json.loads(explain("deepseek-v3.2", "--device", "a100", "--json")[1])["indexer"]
    assert index["supported"] and index["top_k"] == 2048 and index["graph_support"] == "always"
    assert index["operations"]["topk"]["backend"] == "triton"
    code, output = explain("deepseek-v3.2", "--device", "a100", "--backend", "gluon", "--json")
    assert code == 2 and not json.loads(output)["indexer"]["supported"]
    assert "indexer" not in explain("llama-3.1-8b", "--device", "h200")[1]


SMALL = IndexerSpec(num_heads=16, head_dim=64, top_k=20)
SMALL_CASES = [
    cases.paged(2, 300, 2, SMALL),
    cases.paged_uneven(3, 100, 1, SMALL),
    cases.ragged(8, 100, True, SMALL),
    cases.ragged(8, 100, False, SMALL),
    cases.topk(3, 400, SMALL),
    cases.append(70, SMALL),
]


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_a_case_is_checked_and_timed(case):
    record = measure(case, "auto", "cpu", run="here", seconds=0.01)
    assert record.error is None and record.backend == "reference" and record.us and record.us > 0
    assert record.rel_err is not None and record.rel_err < 1e-6
    assert record.op == case.op and record.bytes == case.work.bytes


def test_a_wrong_result_and_a_refusal_are_records(monkeypatch):
    from octavo.bench import indexer_measure

    case = cases.topk(3, 400, SMALL)
    monkeypatch.setattr(indexer_measure, "topk_indices", lambda logits, lens, k, out, backend: out.fill_(1))
    (wrong,) = compare(case, ["reference"], "cpu", run="here")
    assert wrong.error == "wrong: relative error 1" and wrong.us is None
    refused = measure(cases.paged(1, 64, 1, SMALL), "triton", "cpu", run="here")
    assert refused.error and refused.error.startswith("Unsupported: backend triton")


def test_work_by_hand():
    case = cases.paged(2, 100, 2)
    assert case.pairs == 2 * (100 + 99)
    assert case.work.flops == 2 * 64 * 128 * case.pairs
    assert case.work.bytes == 200 * 132 + 4 * 64 * 132 + 4 * case.pairs
    assert cases.ragged(4, 10, True).pairs == 7 + 8 + 9 + 10
    assert cases.append(3).work.bytes == 3 * (256 + 132 + 8)
    uneven = cases.paged_uneven(64, 8192)
    assert min(uneven.lens) == 1024 and max(uneven.lens) == 15360 and abs(sum(uneven.lens) / 64 - 8192) < 64
    names = [case.name for case in cases.hopper_grid()]
    assert len(names) == len(set(names)) == 54


def test_sets_are_disjoint_and_tables_cover_the_lengths():
    inputs = IndexerInputs(SMALL_CASES[1], "cpu")
    pages = [set(table.flatten().tolist()) for table in inputs.tables]
    assert not pages[0] & pages[1]
    assert inputs.cache.num_pages == sum(len(p) for p in pages)
