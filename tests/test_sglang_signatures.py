"""What the SGLang plug-in uses is in every release that it is for: methods, parameters, attributes, options.

The releases are records (tools/record_sglang_interface.py), so nothing of SGLang is needed; the plug-in is read as
source, so that whatever it uses is compared, not a list of it.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import sglang_stand_in as stand_in

from octavo.integrations import _sglang_support as support
from octavo.integrations import sglang as plugin

ROOT = Path(__file__).resolve().parent.parent
RECORDS = {
    record["release"]: record
    for path in sorted((ROOT / "tests" / "signatures").glob("sglang-*.json"))
    for record in [json.loads(path.read_text())]
}
SOURCES = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "octavo" / "integrations").glob("*sglang*.py")}
# What a name in the plug-in's sources is of SGLang's.
NAMED = {
    "runner": ["ModelRunner"],
    "layer": ["RadixAttention"],
    "module": ["RadixAttention"],
    "forward_batch": ["ForwardBatch"],
    "mode": ["ForwardMode"],
    "draft": ["EagleVerifyInput"],
    "pool": ["MHATokenToKVPool", "SWAKVPool", "KVCache"],
    "owner": ["MHATokenToKVPool", "SWAKVPool", "KVCache"],
}
OF_PYTHON = {"name", "modules"}  # of enum.Enum and torch.nn.Module
# Methods that raise unless overridden and that octavo leaves so, with what calls them.
LEFT = {
    "forward_mixed": "NPUs",
    "init_forward_metadata_for_breakable_cuda_graph_capture": "backends whose metadata a breakable graph captures",
    "prepare_forward_metadata_for_breakable_cuda_graph_replay": "backends whose metadata a breakable graph captures",
    "update_verify_buffers_to_fill_after_draft": "trees of drafts, which octavo refuses",
}
ADDED = {"get_cpu_graph_seq_len_fill_value": "SGLang's graph runner for CPUs, which its base class does not know"}


@pytest.fixture(params=RECORDS)
def record(request):
    return RECORDS[request.param]


def class_of(record, name):
    return next(names[name] for names in record["modules"].values() if isinstance(names.get(name), dict))


def members(record, name):
    found = class_of(record, name)
    return {*found["methods"], *found["attributes"]}


def plugin_class():
    nodes = ast.walk(SOURCES["_sglang_backend"])
    return next(n for n in nodes if isinstance(n, ast.ClassDef) and n.name == "OctavoAttentionBackend")


def parameters(text):
    """Names of positional parameters in a signature, and whether it takes any further keyword."""
    arguments = ast.parse(f"def f{text}: ...").body[0].args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args)], arguments.kwarg is not None


def test_the_releases_are_those_that_the_plugin_names():
    assert tuple(RECORDS) == plugin.TESTED


def test_everything_that_raises_unless_overridden_is_overridden(record):
    own = {f.name for f in plugin_class().body if isinstance(f, ast.FunctionDef)}
    abstract = set(class_of(record, "AttentionBackend")["abstract"])
    assert abstract - own == LEFT.keys()


def test_overrides_take_what_sglang_passes(record):
    base = class_of(record, "AttentionBackend")["methods"]
    own = [f for f in plugin_class().body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
    assert len(own) > 5
    for function in own:
        if function.name in ADDED:
            continue
        theirs, any_keyword = parameters(base[function.name])
        ours, takes_any = parameters(f"({ast.unparse(function.args)})")
        assert ours[: len(theirs)] == theirs, function.name
        assert takes_any or not any_keyword, function.name


def test_flags_are_sglangs():
    """A flag of the class that no release reads would be a spelling mistake."""
    known = set().union(*(members(record, "AttentionBackend") for record in RECORDS.values()))
    flags = {s.targets[0].id for s in plugin_class().body if isinstance(s, ast.Assign)}
    assert flags and flags <= known


def test_every_attribute_that_is_read_is_there(record):
    missing, seen = [], set()
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            classes = NAMED.get(node.value.id, [])
            if not classes or node.attr in OF_PYTHON:
                continue
            seen.add(node.value.id)
            if not any(node.attr in members(record, name) for name in classes):
                missing.append(f"{node.value.id}.{node.attr}")
    assert missing == []
    assert seen == NAMED.keys() - {"owner"}, "names that the sources no longer use, or use by another name"


def test_a_missing_attribute_is_seen(record, monkeypatch):
    monkeypatch.setitem(SOURCES, "more", ast.parse("def f(runner): return runner.token_pool"))
    with pytest.raises(AssertionError, match="runner.token_pool"):
        test_every_attribute_that_is_read_is_there(record)


def test_every_option_that_is_read_is_there(record):
    read = {need.option for need in support.NEEDS}
    read |= {f"exec.kernel.{half}attention_backend" for half in ("", "prefill_", "decode_")}
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "option"
                and isinstance(node.args[0], ast.Constant)
            ):
                read.add(node.args[0].value)
    read.discard("exec.kernel")
    # Some widths are properties of the parallel context rather than options.
    parallel = {f"parallel.{name}" for name in members(record, "ParallelContext")}
    assert sorted(read - set(record["options"]) - parallel) == []
    getters = record["modules"]["sglang.srt.runtime_context"]
    assert {f"get_{option.split('.')[0]}" for option in read} <= getters.keys()


def test_graphs_are_named_as_sglang_names_them(record):
    for kinds in support.GRAPHS.values():
        assert set(kinds) <= set(class_of(record, "Backend")["constants"].values())
    assert support.GRAPHS.keys() <= members(record, "CudaGraphConfig") and "backend" in members(record, "PhaseConfig")


def test_the_modes_and_pools_that_are_named_are_there(record):
    from octavo.integrations._sglang_names import CLOSED, EXTENDS

    assert set(EXTENDS) <= members(record, "ForwardMode")
    assert set(CLOSED) <= members(record, "MHATokenToKVPool") | members(record, "KVCache")
    assert "full_to_swa_index_mapping" in members(record, "SWAKVPool")
    assert "req_to_token" in members(record, "ReqToTokenPool")


def test_models_reach_the_pools_through_the_backend(record):
    """SGLang's models take them from these two attributes, whatever the base class says."""
    nodes = ast.walk(plugin_class())
    assigned = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    assert {"token_to_kv_pool", "req_to_token_pool"} <= assigned
    assert record["modules"]["sglang.srt.model_executor.forward_context"].keys() == {
        "get_token_to_kv_pool",
        "get_req_to_token_pool",
    }


def test_choices_are_where_the_plugin_looks_for_them(record):
    modules = record["modules"]
    looked_at = "sglang.srt.arg_groups.choices"
    found = modules.get(looked_at) or modules["sglang.srt.server_args"]
    adder = found["add_attention_backend_choices"]  # a function, or the list's own extend
    assert adder == "constant" or parameters(adder)[0] == ["choices"]
    assert "triton" in found["ATTENTION_BACKEND_CHOICES"]
    assert not set(plugin.NAMES) & set(found["ATTENTION_BACKEND_CHOICES"]), "SGLang has a backend of that name"
    assert modules["sglang.srt.plugins"]["GENERAL_PLUGINS_GROUP"] == "sglang.srt.plugins"


def test_the_entry_point_is_declared():
    text = (ROOT / "pyproject.toml").read_text()
    declared = text.split('[project.entry-points."sglang.srt.plugins"]\n')[1].split("\n")[0]
    assert declared == 'octavo = "octavo.integrations.sglang:register"'
    assert callable(plugin.register)


def test_the_docs_list_every_need():
    listed = (ROOT / "docs" / "integrations.md").read_text()
    rows = {f"| {need.words} | `{need.option.split('.')[-1]}` |" for need in support.NEEDS}
    assert {row for row in rows if row not in listed} == set()
    for phase, kinds in support.GRAPHS.items():
        assert f"| {phase} graphs that are {' or '.join(kinds)} |" in listed
    for release in plugin.TESTED:
        assert release in listed


def test_stand_ins_have_no_member_that_sglang_lacks(record):
    for name in ("RadixAttention", "ForwardMode", "MHATokenToKVPool", "SWAKVPool", "AttentionBackend"):
        own = {n for n in vars(getattr(stand_in, name)) if not n.startswith("_")}
        of_theirs = members(record, name) | members(record, "KVCache")
        assert own <= of_theirs, name
