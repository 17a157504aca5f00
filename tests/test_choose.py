"""The planner: rules as data, verdicts, refusals, and case Z1 over every named device."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo
from octavo import backends, indexer_backends, tuning
from octavo.backends import BACKENDS, BY_NAME, WRITTEN
from octavo.choose import Choice, _choose, choose
from octavo.device import KNOWN, Device
from octavo.errors import InvalidInput, Unsupported
from octavo.layouts import layout_reasons
from octavo.rules import PHASES
from octavo.spec import AttentionSpec

ROOT = Path(octavo.__file__).parent
SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)

AXES: dict[str, tuple] = {
    "query_dtype": ("bfloat16", "fp8_e4m3"),
    "kv_dtype": ("bfloat16", "fp8_e4m3", "fp8_e5m2"),
    "max_query_len": (1, 4),  # decode and mixed batches, draft verification
    "dims": ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)),
    "page_size": (1, 8, 16, 32, 48, 64, 128, 256, 528),
    "group": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 71),
    "sinks": (False, True),
    "window": (None, 1024),
    "softcap": (None, 50.0),
    "lse": (False, True),
    "layout": ("leaf", "nhd", "hnd"),
    "device": tuple(KNOWN),
    "backend": (None, *BY_NAME),
}


@pytest.fixture(autouse=True)
def no_backend_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_BACKEND", raising=False)


@pytest.fixture
def all_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table as it will be: every kernel there. Plans made under it are forgotten afterwards."""
    for name in ("gluon", "triton"):
        monkeypatch.setitem(backends.WRITTEN, name, frozenset(PHASES))
    _choose.cache_clear()
    yield
    _choose.cache_clear()


@pytest.fixture
def none_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table with the reference alone."""
    for name in ("gluon", "triton"):
        monkeypatch.setitem(backends.WRITTEN, name, frozenset())
    _choose.cache_clear()
    yield
    _choose.cache_clear()


def cells(count: int) -> list[dict]:
    """`count` cells of Z1's grid: drawn by a fixed seed, after one for every value of every axis."""
    rng = random.Random(1)
    drawn = [{axis: rng.choice(values) for axis, values in AXES.items()} for _ in range(count)]
    return [{**drawn[0], axis: value} for axis, values in AXES.items() for value in values] + drawn


def cell_spec(cell: dict) -> AttentionSpec:
    names = ("query_dtype", "kv_dtype", "max_query_len", "page_size", "sinks", "window", "softcap", "lse", "layout")
    dim, dim_v = cell["dims"]
    return AttentionSpec(
        num_q_heads=cell["group"], num_kv_heads=1, head_dim=dim, head_dim_v=dim_v, **{n: cell[n] for n in names}
    )


def expected_values(spec: AttentionSpec, device: Device, backend: str, phase: str) -> list[str]:
    """The values that the reasons against a backend have to name: Z1's rules written a second time, by hand."""
    dims = str(spec.head_dim) if spec.head_dim == spec.value_dim else f"{spec.head_dim}/{spec.value_dim}"
    found = []
    if spec.layout == "leaf":
        found += ["kv_dtype is " + spec.kv_dtype] * (not spec.kv_dtype.startswith("fp8"))
        found += [f"it is {spec.page_size}"] * (spec.page_size % 32 != 0)
    if backend == "gluon":
        found += [str(device)] * (device.arch != "sm_90")
        found += [f"found {spec.layout}"] * (spec.layout != "leaf")
        found += [f"found {spec.kv_dtype}"] * (spec.kv_dtype != "fp8_e4m3")
        found += [f"found {spec.page_size}"] * (spec.page_size not in (32, 64, 128))
        shapes = ("64", "128", "256") if phase == "prefill" else ("64", "128", "192/128", "256")
        found += [f"found {dims}"] * (dims not in shapes)
        found += [f"found {spec.group_size}"] * (spec.group_size > 32)
    if backend == "triton":
        found += [str(device)] * (device.arch == "cpu")
        found += [f"found {spec.kv_dtype}"] * (spec.query_dtype == "fp8_e4m3" and spec.kv_dtype != "fp8_e4m3")
    return found


def check_cell(cell: dict) -> float:
    """One cell is a plan or a refusal with every value found; returns the seconds that took."""
    spec, device = cell_spec(cell), Device.named(cell["device"])
    start = time.process_time()
    try:
        choice = choose(spec, device, cell["backend"])
    except Unsupported as refusal:
        seconds = time.process_time() - start
        text = "\n".join(refusal.reasons)
        judged = [cell["backend"]] if cell["backend"] else list(BY_NAME)
        for name, phase in itertools.product(judged, PHASES):
            for value in expected_values(spec, device, name, phase):
                assert value in text, (cell, value, text)
        assert refusal.reasons and all(refusal.reasons)
        assert "None" not in str(refusal)
        return seconds
    seconds = time.process_time() - start
    for phase in PHASES:
        chosen = choice.phase(phase)
        assert chosen.verdicts[chosen.backend].word in ("may", "must")
        assert cell["backend"] in (None, chosen.backend)
        for name, verdict in chosen.verdicts.items():
            values = expected_values(spec, device, name, phase)
            missing = phase not in backends.WRITTEN[name]
            assert len(verdict.reasons) == len(values) + missing, (cell, name, phase, verdict.reasons)
            assert (verdict.word == "cannot") == bool(verdict.reasons)
            assert all(any(value in reason for reason in verdict.reasons) for value in values)
    assert "None" not in str(choice)
    return seconds


def test_z1_with_the_kernels_of_this_repository() -> None:
    _choose.cache_clear()
    drawn = cells(1500)
    for axis, values in AXES.items():
        assert {cell[axis] for cell in drawn} == set(values)
    assert statistics.median(check_cell(cell) for cell in drawn) < 0.05


def test_z1_with_every_kernel_written(all_written: None) -> None:
    seconds = [check_cell(cell) for cell in cells(1500)]
    assert statistics.median(seconds) < 0.05


def test_a_full_slice_of_z1_has_a_plan_wherever_the_layout_holds_the_cache() -> None:
    for dims, page, group, device in itertools.product(AXES["dims"], AXES["page_size"], (1, 4, 71), KNOWN):
        for kv, layout in itertools.product(AXES["kv_dtype"], ("leaf", "nhd")):
            spec = AttentionSpec(group, 1, *dims, kv_dtype=kv, page_size=page, layout=layout)
            if layout_reasons(spec):
                with pytest.raises(Unsupported):
                    choose(spec, device)
            else:
                assert choose(spec, device).prefill.backend in BY_NAME


def test_the_reference_alone_must() -> None:
    choice = choose(SPEC, "cpu")
    assert [v.word for v in choice.decode.verdicts.values()] == ["cannot", "cannot", "must"]
    assert (choice.prefill.backend, choice.decode.backend) == ("reference", "reference")
    assert (choice.prefill.compute_query_dtype, choice.graph_support) == ("float32", "never")
    assert choice.workspace_bytes(256, 8192, 131072) == 0


def test_order_and_verdicts_when_all_are_written(all_written: None) -> None:
    on_hopper, on_blackwell = choose(SPEC, "h200"), choose(SPEC, "b200")
    assert {v.word for v in on_hopper.decode.verdicts.values()} == {"may"}
    assert (on_hopper.decode.backend, on_blackwell.decode.backend) == ("gluon", "triton")
    assert on_blackwell.decode.verdicts["gluon"].reasons == ("needs Hopper (sm_90); found b200 (sm_100)",)
    assert on_hopper.graph_support == "always"
    assert choose(dataclasses.replace(SPEC, alibi=True), "h200").decode.verdicts["reference"].word == "must"


@pytest.mark.parametrize(
    ("device", "backend", "fields", "prefill", "decode"),
    [
        ("h200", "gluon", {}, "fp8_e4m3", "fp8_e4m3 x2"),
        ("h200", "gluon", {"precision": "exact"}, "fp8_e4m3 x2", "fp8_e4m3 x2"),
        ("h200", "gluon", {"query_dtype": "fp8_e4m3"}, "fp8_e4m3", "fp8_e4m3"),
        ("b200", "triton", {}, "fp8_e4m3", "float16"),
        ("b200", "triton", {"precision": "exact"}, "float16", "float16"),
        ("a100", "triton", {}, "float16", "float16"),
        ("b200", "triton", {"kv_dtype": "fp8_e5m2"}, "float16", "float16"),
        ("b200", "triton", {"kv_dtype": "bfloat16", "layout": "nhd"}, "bfloat16", "bfloat16"),
        ("b200", "reference", {}, "float32", "float32"),
    ],
)
def test_what_is_multiplied(
    all_written: None, device: str, backend: str, fields: dict, prefill: str, decode: str
) -> None:
    choice = choose(dataclasses.replace(SPEC, **fields), device, backend)
    assert (choice.prefill.compute_query_dtype, choice.decode.compute_query_dtype) == (prefill, decode)


def test_phases_choose_for_themselves(all_written: None) -> None:
    choice = choose(dataclasses.replace(SPEC, head_dim=192, head_dim_v=128), "h200")
    assert (choice.prefill.backend, choice.decode.backend) == ("triton", "gluon")


@pytest.mark.parametrize(("rows", "support"), [(1, "single_token_decode"), (4, "uniform_batch")])
def test_graphs_where_only_decode_has_a_kernel(
    none_written: None, monkeypatch: pytest.MonkeyPatch, rows: int, support: str
) -> None:
    monkeypatch.setitem(backends.WRITTEN, "triton", frozenset({"decode"}))
    assert choose(dataclasses.replace(SPEC, max_query_len=rows), "h200").graph_support == support


def test_masks_and_mla_are_rules(all_written: None) -> None:
    for fields in ({"alibi": True}, {"attention_chunk": 8192}, {"causal": False}):
        assert choose(dataclasses.replace(SPEC, **fields), "h200").prefill.backend == "reference"
        with pytest.raises(Unsupported, match=next(iter(fields))):
            choose(dataclasses.replace(SPEC, **fields), "h200", "triton")
    with pytest.raises(Unsupported, match="prefix_mask=True"):
        choose(dataclasses.replace(SPEC, prefix_mask=True), "h200")
    latent = AttentionSpec(128, 1, 576, 512, mla=True, layout="nhd")
    choice = choose(latent, "h200")
    assert choice.decode.backend == "reference"
    assert any("MLA" in reason for reason in choice.decode.verdicts["triton"].reasons)


def test_a_named_backend_never_falls_back(none_written: None) -> None:
    spec = AttentionSpec(71, 1, 80, page_size=16, kv_dtype="fp8_e5m2", layout="nhd", max_query_len=9)
    with pytest.raises(Unsupported) as raised:
        choose(spec, "b200", "gluon")
    text = "\n".join(raised.value.reasons)
    for value in (
        "b200 (sm_100)",
        "none yet",
        "found nhd",
        "found fp8_e5m2",
        "found 16",
        "found 80",
        "found 71",
        "found 9",
    ):
        assert value in text
    assert raised.value.nearest == "no backend named (then reference in prefill, reference in decode)"
    assert len(set(raised.value.reasons)) == len(raised.value.reasons)


def test_the_environment_names_a_backend_and_is_read_at_every_call(
    none_written: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(SPEC, "h200").decode.why == "must: the only backend that may"
    monkeypatch.setenv("OCTAVO_BACKEND", "triton")
    with pytest.raises(Unsupported, match="named by OCTAVO_BACKEND"):
        choose(SPEC, "h200")
    assert choose(SPEC, "h200", "reference").decode.why == "named by the caller"
    monkeypatch.setenv("OCTAVO_BACKEND", "cutlass")
    with pytest.raises(InvalidInput, match="OCTAVO_BACKEND.*gluon, triton, reference.*cutlass"):
        choose(SPEC, "h200")


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"page_size": 16}, "page_size=64"),
        ({"kv_dtype": "bfloat16"}, "layout='nhd'"),
        ({"prefix_mask": True}, None),
    ],
)
def test_the_nearest_change_is_one_that_works(none_written: None, fields: dict, nearest: str | None) -> None:
    with pytest.raises(Unsupported) as raised:
        choose(dataclasses.replace(SPEC, **fields), "h200")
    assert raised.value.nearest == nearest


def test_the_nearest_change_of_a_kernel_takes_several_fields(all_written: None) -> None:
    spec = dataclasses.replace(SPEC, layout="hnd", page_size=16, kv_dtype="fp8_e5m2", scale_granularity="token_head")
    with pytest.raises(Unsupported) as raised:
        choose(spec, "h200", "gluon")
    change = dict(part.split("=") for part in (raised.value.nearest or "").split(", "))
    assert change == {
        "layout": "'leaf'",
        "kv_dtype": "'fp8_e4m3'",
        "page_size": "64",
        "scale_granularity": "'tensor'",
    }
    mended = dataclasses.replace(spec, layout="leaf", kv_dtype="fp8_e4m3", page_size=64, scale_granularity="tensor")
    assert choose(mended, "h200", "gluon").decode.backend == "gluon"


def test_choosing_is_cached() -> None:
    assert choose(SPEC, "h200") is choose(dataclasses.replace(SPEC), Device.named("h200"))


def test_an_old_triton_is_a_broken_rule(all_written: None) -> None:
    device = dataclasses.replace(Device.named("h200"), triton_version="3.5.1")
    assert choose(SPEC, device).decode.verdicts["gluon"].reasons == ("needs triton 3.6 or newer; found 3.5.1",)
    assert choose(SPEC, dataclasses.replace(device, triton_version="")).decode.backend == "reference"


def test_an_architecture_of_tomorrow_is_not_a_superset(all_written: None) -> None:
    verdicts = choose(SPEC, Device("next", "sm_130", num_sms=200)).decode.verdicts
    assert (verdicts["gluon"].word, verdicts["triton"].word, verdicts["reference"].word) == ("cannot", "cannot", "must")


@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True}, {"window": 128}, {"max_query_len": 4}])
def test_workspace_is_monotone_in_each_bound(all_written: None, fields: dict) -> None:
    choice = choose(dataclasses.replace(SPEC, **fields), "b200")
    bounds = [(b, t, c) for b in (1, 7, 256) for t in (1, 8, 8192) for c in (1, 4096, 131072)]
    sizes = {bound: choice.workspace_bytes(*bound) for bound in bounds}
    for one, two in itertools.product(bounds, bounds):
        if all(x <= y for x, y in zip(one, two, strict=True)):
            assert sizes[one] <= sizes[two]
    assert all(size % tuning.ALIGNMENT == 0 and size > 0 for size in sizes.values())


def test_workspace_by_hand(all_written: None) -> None:
    # 1 sequence, 8 KV heads, 1024 tokens: 4 pieces a head of 4 rows x 129 floats and 4 ints; 8 counters; steps of 256.
    total = 32 * (4 * 129 * 4 + 16) + 32
    assert choose(SPEC, "b200").workspace_bytes(1, 1, 1024) == -(-total // 256) * 256
    with pytest.raises(InvalidInput, match="max_context"):
        choose(SPEC, "b200").workspace_bytes(1, 1, 0)


def test_every_function_that_is_called_written_is_a_file_and_the_other_way_round() -> None:
    homes = {"gluon": "kernels/gluon", "triton": "kernels/triton", "reference": "reference"}
    names = {*PHASES, "append", "merge_states"}
    for backend, home in homes.items():
        files = {path.stem for path in (ROOT / home).glob("*.py")} & names
        assert files == WRITTEN[backend] & names, backend


def test_what_does_not_fit_shared_memory_is_refused() -> None:
    """Exact prefill of heads of 256: two terms of a query, and a page of 128, in 227 KiB."""
    spec = AttentionSpec(4, 2, 256, page_size=128, precision="exact")
    choice = choose(spec, "h200")
    assert (choice.prefill.backend, choice.decode.backend) == ("triton", "gluon")
    (reason,) = choice.prefill.verdicts["gluon"].reasons
    assert reason.startswith("needs page_size 32 or 64") and reason.endswith("found 128")
    for fields in ({"page_size": 64}, {"precision": "fast"}, {"query_dtype": "fp8_e4m3"}):
        assert choose(dataclasses.replace(spec, **fields), "h200").prefill.backend == "gluon"


def test_docs_rules_is_current() -> None:
    rules = backends.rules_markdown() + indexer_backends.rules_markdown()
    assert (ROOT.parent / "docs" / "rules.md").read_text(encoding="utf-8") == rules


def test_the_table_is_complete() -> None:
    assert [b.name for b in BACKENDS] == ["gluon", "triton", "reference"]
    for backend in BACKENDS:
        needs = [(rule.needs, phase) for rule in backend.rules for phase in rule.phases]
        assert len(needs) == len(set(needs))


def test_the_printed_plan_fits_and_names_what_it_needs() -> None:
    choice = choose(SPEC, "b200")
    assert isinstance(choice, Choice)
    text = str(choice)
    for word in (
        "prefill",
        "decode",
        choice.prefill.backend,
        choice.prefill.compute_query_dtype,
        "not gluon",
        "b200 (sm_100)",
        "fp8_e4m3",
        "leaf",
        "page 64",
    ):
        assert word in text
    assert max(len(line) for line in text.splitlines()[1:]) <= 100
