"""octavo's plug-in against what was recorded of each vLLM release: signatures, names, selection, registration."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm_layers import Vllm, configuration
from vllm_stub import RECORDS, install, modules_of

from octavo import AttentionSpec, Device, Unsupported, choose
from octavo.integrations import vllm as plugin
from octavo.integrations._vllm_releases import RELEASES, decode_rows, kernel_block, release_of

H200 = Device.named("h200")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr("octavo.notices.said", set())


@pytest.fixture(params=list(RECORDS))
def release(request):
    return request.param


def parameters(text):
    """A recorded signature as inspect's."""
    exec(f"def f{text[text.index('(') :]}: ...", scope := {})
    return inspect.signature(scope["f"]).parameters


def test_each_release_that_octavo_names_is_recorded():
    assert [r.version for r in RELEASES] == list(RECORDS)
    assert all(release_of(record["version"]).version == name for name, record in RECORDS.items())


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("OctavoBackend", ("AttentionBackend",)),
        ("OctavoImpl", ("AttentionImplBase", "AttentionImpl")),
        ("OctavoMetadataBuilder", ("AttentionMetadataBuilder",)),
    ],
)
def test_our_methods_take_every_call_that_theirs_take(monkeypatch, release, ours, theirs):
    vllm = Vllm(monkeypatch, release)
    mine = getattr(vllm.backend, ours)
    assert not inspect.isabstract(mine)
    recorded = RECORDS[release]["classes"]["vllm.v1.attention.backend"]
    overridden = 0
    for name, text in ((n, t) for base in theirs for n, t in recorded[base]["methods"].items()):
        found = inspect.getattr_static(mine, name)
        if any(
            name in vars(getattr(vllm.engine, base)) and vars(getattr(vllm.engine, base))[name] is found
            for base in theirs
        ):
            continue
        overridden += 1
        kinds = {staticmethod: "staticmethod", classmethod: "classmethod"}
        assert kinds.get(type(found), "method") in text.split("(")[0].split() + ["method"], name
        have = inspect.signature(getattr(found, "__func__", found)).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in have.values())
        for place, (parameter, wanted) in enumerate(parameters(text).items()):
            if parameter not in have:
                assert anything, f"{ours}.{name} has no {parameter}"
                continue
            assert list(have).index(parameter) == place, f"{ours}.{name}: {parameter} is at another place"
            assert wanted.default is wanted.empty or have[parameter].default is not inspect.Parameter.empty
    assert overridden >= 3


def test_what_differs_between_releases_is_there_when_it_is_called(monkeypatch, release):
    """The methods of a release's own mixin are those that the release asks for, and no others."""
    mixin = release_of(RECORDS[release]["version"]).memory
    own = {name for name in vars(mixin) if not name.startswith("_")}
    asked = RECORDS[release]["classes"]["vllm.v1.attention.backend"]["AttentionBackend"]["methods"]
    assert own <= asked.keys()
    others = {n for r in RELEASES if r.memory is not mixin for n in vars(r.memory) if not n.startswith("_")}
    assert not (others - own) & asked.keys()


def test_vllms_layer_can_call_ours(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    impl = vllm.backend.OctavoImpl
    for name, function in (
        ("impl_cls", impl),
        ("do_kv_cache_update", impl.do_kv_cache_update),
        ("forward", impl.forward),
    ):
        call = RECORDS[release]["layer"]["calls"][name]
        given = [None] * (call["positional"] + (name != "impl_cls"))
        inspect.signature(function).bind(*given, **dict.fromkeys(call["keywords"]))


def selector(release, **asked):
    """What vLLM's selector passes to validate_configuration: the recorded fields, at their defaults."""
    fields = RECORDS[release]["classes"]["vllm.v1.attention.selector"]["AttentionSelectorConfig"]["fields"]
    given = {n: False if v == "False" else "decoder" if n == "attn_type" else None for n, v in fields.items()}
    given |= {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", **asked}
    assert given.keys() == fields.keys(), given.keys() - fields.keys()
    return {"device_capability": SimpleNamespace(major=9, minor=0), **given}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "fp8_e5m2", "block_size": 32},
        {"block_size": 256, "has_sliding_window": True, "has_sink": True},
        {
            "dtype": torch.float16,
            "use_per_head_quant_scales": True,
            "use_batch_invariant": True,
            "use_kv_connector": True,
        },
    ],
)
def test_what_octavo_can_do_is_selected(monkeypatch, release, asked):
    vllm = Vllm(monkeypatch, release)
    assert vllm.backend.OctavoBackend.validate_configuration(**selector(release, **asked)) == []


REFUSED = {
    "head": ({"head_size": 40}, "triton: needs head_dim 64, 80, 96, 128, 192/128, 256 or 512; found 40"),
    "dtype": ({"dtype": torch.float32}, "triton: needs query_dtype bfloat16, float16 or fp8_e4m3; found float32"),
    "mla": ({"use_mla": True, "head_size": 576}, "triton: needs K and V of their own"),
    "prefix": ({"use_mm_prefix": True}, "triton: needs no image-prefix mask"),
    "causal": ({"use_non_causal": True}, "triton: needs causal attention; found causal=False"),
    "cache": ({"kv_cache_dtype": "nvfp4"}, "needs kv_cache_dtype auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2;"),
    "block": ({"block_size": 16}, "needs a block_size that is a multiple of one of 32, 64, 128; found 16"),
    "sparse": ({"use_sparse": True}, "needs dense attention; found sparse attention"),
    "encoder": ({"attn_type": "encoder_only"}, "needs decoder attention over a KV cache; found encoder_only"),
    "pcp": ({"use_pcp": True}, "needs no prefill context parallelism"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_octavo_cannot_do_is_refused_in_words(monkeypatch, release, why):
    asked, reason = REFUSED[why]
    found = Vllm(monkeypatch, release).backend.OctavoBackend.validate_configuration(**selector(release, **asked))
    assert any(line.startswith(reason) for line in found), found
    assert all(("needs " in line and "found " in line) or "layout" in line for line in found), found


def test_the_reasons_are_those_that_choose_gives(monkeypatch, release):
    """Word for word, for a phase that only the reference, which never serves, could run."""
    found = Vllm(monkeypatch, release).backend.OctavoBackend.validate_configuration(**selector(release, head_size=40))
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=40, layout="hnd")
    for backend in ("gluon", "triton"):
        with pytest.raises(Unsupported) as refused:
            choose(spec, H200, backend)
        assert [line for line in found if line.startswith(backend)] == [
            f"{backend}: {r}" for r in refused.value.reasons
        ]


def test_a_backend_named_by_the_user_is_taken_at_its_word(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    monkeypatch.setenv("OCTAVO_BACKEND", "reference")
    assert vllm.backend.OctavoBackend.validate_configuration(**selector(release, head_size=40)) == []
    monkeypatch.setenv("OCTAVO_BACKEND", "gluon")
    found = vllm.backend.OctavoBackend.validate_configuration(**selector(release, kv_cache_dtype="auto"))
    assert any("needs layout leaf" in line for line in found)


def test_another_gpu_is_judged_by_its_own_rules(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    asked = selector(release) | {"device_capability": SimpleNamespace(major=7, minor=5)}
    found = vllm.backend.OctavoBackend.validate_configuration(**asked)
    assert any("sm_75" in line for line in found)


def test_drafts_beyond_what_decode_takes_are_refused(monkeypatch, release):
    vllm = Vllm(monkeypatch, release, drafts=40)
    found = vllm.backend.OctavoBackend.validate_configuration(**selector(release))
    assert any("max_query_len of at most 16; found 41" in line for line in found)


def test_prefill_is_as_precise_as_the_user_asks(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    assert vllm.layer("layers.0").impl.spec.precision == "fast"
    vllm.config.additional_config = {"octavo": {"precision": "exact"}, "other": 1}
    assert vllm.layer("layers.1").impl.spec.precision == "exact"
    validate = vllm.backend.OctavoBackend.validate_configuration
    assert validate(**selector(release)) == []
    vllm.config.additional_config = {"octavo": {"precision": "high"}}
    assert validate(**selector(release)) == ["precision must be one of fast, exact; came 'high'"]
    vllm.config.additional_config = {"octavo": {"precison": "exact"}}
    assert "must be {'precision': 'fast' or 'exact'}; came" in validate(**selector(release))[0]


def test_rows_of_a_decode(monkeypatch, release):
    install(monkeypatch, release)
    assert decode_rows(configuration()) == 1
    config = configuration(drafts=3)
    assert decode_rows(config) == 4
    config.speculative_config.parallel_drafting = True
    assert decode_rows(config) == (7 if release == "0.26" else 4)
    config.use_v2_model_runner = False
    assert decode_rows(config) == 7


def test_block_sizes(monkeypatch, release):
    backend = Vllm(monkeypatch, release).backend.OctavoBackend
    assert backend.get_supported_kernel_block_sizes() == [128, 64, 32]
    assert backend.get_preferred_block_size(16) == 64
    assert [b for b in (16, 32, 48, 64, 96, 128, 192, 256) if backend.supports_block_size(b)] == [
        32,
        64,
        96,
        128,
        192,
        256,
    ]
    assert [kernel_block(b) for b in (32, 96, 192, 256, 16)] == [32, 32, 64, 128, None]


def test_the_bytes_of_a_block_and_head_lie_together(monkeypatch, release):
    """In every order that vLLM may choose, slots and content come last; and blocks before layers, where they share."""
    backend = Vllm(monkeypatch, release).backend.OctavoBackend
    if release == "0.26":
        shape = backend.get_kv_cache_shape(1234567, 64, 8, 128, cache_dtype_str="fp8")
        assert shape == (1234567, 8, 64, 256)  # vLLM finds the blocks by looking for their number
        assert backend.get_kv_cache_stride_order() == (0, 1, 2, 3)
        with_layers = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        assert with_layers[0] == 1 and with_layers[-2:] == (3, 4) and sorted(with_layers) == [0, 1, 2, 3, 4]
        assert backend.get_required_kv_cache_layout() == "HND"
    else:
        layouts = backend.supported_kv_cache_layouts()
        assert layouts[0].name == "LBHNC" and all(layout.value[-2:] == (3, 4) for layout in layouts)
        every = type(layouts[0])
        assert {layout for layout in every if layout.value[-2:] == (3, 4)} == set(layouts)


def test_pages_start_where_kernels_can_read_them(monkeypatch):
    backend = Vllm(monkeypatch, "0.33").backend.OctavoBackend
    spec = dataclasses.make_dataclass("Spec", ["page_size_bytes", ("block_stride_alignment", object, None)])
    assert backend.customize_spec(spec(4096)) == spec(4096)
    assert backend.customize_spec(spec(4104)).block_stride_alignment == 16
    assert backend.customize_spec(spec(4104, 64)).block_stride_alignment == 64
    assert (
        set(vars(spec(1)))
        <= {"page_size_bytes"}
        | RECORDS["0.33"]["classes"]["vllm.v1.kv_cache_interface"]["KVCacheSpec"]["fields"].keys()
    )


def test_registering_makes_octavo_custom(monkeypatch, release):
    install(monkeypatch, release)
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    plugin.register()
    plugin.register()  # vLLM may call it several times
    path = registry.AttentionBackendEnum.CUSTOM.get_path()
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert found.get_name() == "CUSTOM" and found.get_impl_cls() and found.get_builder_cls()
    assert found.forward_includes_kv_cache_update is False


def test_another_plugins_backend_is_left_alone(monkeypatch, release, caplog):
    install(monkeypatch, release)
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "other.Backend")
    plugin.register()
    assert registry.AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"
    assert "octavo leaves it" in caplog.text


def test_another_release_is_refused_with_a_sentence(monkeypatch):
    install(monkeypatch, "0.33")
    sys.modules["vllm"].__version__ = "0.35.2"
    plugin.register()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    module, _, name = registry.AttentionBackendEnum.CUSTOM.get_path().rpartition(".")
    stand_in = getattr(importlib.import_module(module), name)
    sentence = (
        "octavo plugs into vLLM 0.26 and 0.33; this is vLLM 0.35.2, whose backend interface it was not tried with"
    )
    assert stand_in.validate_configuration(head_size=128, something="new") == [sentence]
    with pytest.raises(ImportError, match="this is vLLM 0.35.2"):
        stand_in.get_impl_cls()


def test_a_release_without_a_registry_of_backends_is_left_as_it_is(monkeypatch, caplog):
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    old = ModuleType("vllm")
    old.__version__, old.__path__ = "0.8.5", []
    monkeypatch.setitem(sys.modules, "vllm", old)
    plugin.register()
    assert "this is vLLM 0.8.5" in caplog.text


def test_the_entry_points_are_declared():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."vllm.general_plugins"]')[1].split("[")[0]
    declared = dict(re.findall(r'^(\w+) = "([\w.:]+)"', section, re.MULTILINE))
    assert declared["octavo"] == "octavo.integrations.vllm:register" and plugin.INDEXER_PLUGIN in declared
    for name, path in declared.items():
        module, _, function = path.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_a_stub_has_what_was_recorded_and_no_more(monkeypatch, release):
    modules = modules_of(release, None)
    backend = modules["vllm.v1.attention.backend"].AttentionBackend
    assert hasattr(backend, "get_kv_cache_shape") == (release == "0.26")
    assert hasattr(backend, "customize_spec") == (release == "0.33")
