"""From config.json to specs: known models, families against transformers' own classes, tensor parallelism, case C3."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from octavo.configs import KNOWN_MODELS, DeclaredCache, checkpoint_kv, load_config, resolve_kv_dtype
from octavo.errors import InvalidInput, Unsupported
from octavo.models import FAMILIES, Model, model_kinds
from octavo.spec import IndexerSpec

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
SCHEME = {
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "quant_method": "compressed-tensors",
}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def known(name: str, **arguments: Any) -> Model:
    arguments = {"kv_dtype": "fp8", "layout": "nhd", **arguments}
    return model_kinds(load_config(name), name=name, **arguments)


@pytest.mark.parametrize(
    ("name", "kinds", "bytes_per_token"),
    [
        # (kind, layers, query heads, KV heads, head_dim/head_dim_v); bytes: layers x KV heads x (K + V)
        ("llama-3.1-8b", [("full", 32, 32, 8, 128, 128)], 32 * 8 * 256),
        ("llama-3.1-70b", [("full", 80, 64, 8, 128, 128)], 80 * 8 * 256),
        ("qwen3-32b", [("full", 64, 64, 8, 128, 128)], 64 * 8 * 256),
        ("gpt-oss-120b", [("sliding_window", 18, 64, 8, 64, 64), ("full", 18, 64, 8, 64, 64)], 36 * 8 * 128),
        ("gemma-3-27b", [("sliding_window", 52, 32, 16, 128, 128), ("full", 10, 32, 16, 128, 128)], 62 * 16 * 256),
        ("deepseek-v3.2", [("mla", 61, 128, 1, 576, 512)], 61 * 576),
        ("smollm2-135m", [("full", 30, 9, 3, 64, 64)], 30 * 3 * 128),
    ],
)
def test_known_models(name: str, kinds: list[tuple], bytes_per_token: int) -> None:
    model = known(name)
    told = [
        (k.name, len(k.layers), k.spec.num_q_heads, k.spec.num_kv_heads, k.spec.head_dim, k.spec.value_dim)
        for k in model.kinds
    ]
    assert told == kinds
    assert sum(k.bytes_per_token for k in model.kinds) == bytes_per_token
    everywhere = sorted(i for k in model.kinds for i in k.layers)
    assert everywhere == list(range(len(everywhere)))


def test_every_known_name_is_tested() -> None:
    assert set(KNOWN_MODELS) == {
        "llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3.2", "smollm2-135m",
    }  # fmt: skip


def test_what_is_not_plain_about_the_known_models() -> None:
    sliding, full = known("gpt-oss-120b").kinds
    assert sliding.spec.window == 128 and full.spec.window is None and sliding.spec.sinks and full.spec.sinks
    assert sliding.layers[:3] == (0, 2, 4)
    sliding, full = known("gemma-3-27b").kinds
    assert sliding.spec.window == 1024 and full.layers[:3] == (5, 11, 17)
    assert full.spec.scale == pytest.approx(168**-0.5) and full.spec.softcap is None
    deepseek = known("deepseek-v3.2", tp=8)
    assert deepseek.kinds[0].spec.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert deepseek.kinds[0].spec.mla and deepseek.kinds[0].spec.num_q_heads == 16
    assert deepseek.indexer == IndexerSpec(num_heads=64, head_dim=128, page_size=64, scale_format="pow2")
    assert deepseek.indexer_bytes_per_token == 61 * 132


def transformers_configs() -> list[Any]:
    """Configs of every family, small, as transformers writes them to config.json."""
    from transformers import (
        Cohere2Config,
        DeepseekV2Config,
        DeepseekV3Config,
        DeepseekV32Config,
        Gemma2Config,
        Gemma3TextConfig,
        GemmaConfig,
        GptOssConfig,
        GraniteConfig,
        Llama4TextConfig,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        Phi3Config,
        Qwen2Config,
        Qwen2MoeConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    small = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    yarn = {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 1e4,
            "original_max_position_embeddings": 4096}  # fmt: skip
    mla = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return [
        LlamaConfig(**small),
        LlamaConfig(**{**small, "head_dim": 32}),
        Qwen2Config(**small, use_sliding_window=True, sliding_window=24, max_window_layers=3),
        Qwen3Config(**small, use_sliding_window=False, sliding_window=24),
        MistralConfig(**small, sliding_window=48),
        MistralConfig(**small, sliding_window=None),
        MixtralConfig(**small, sliding_window=48),
        Phi3Config(**small, sliding_window=48, pad_token_id=0),
        Qwen2MoeConfig(**small),
        Qwen3MoeConfig(**small, head_dim=32),
        GptOssConfig(**small, head_dim=16),
        GemmaConfig(**small, head_dim=32),
        Gemma2Config(**small, sliding_window=40, query_pre_attn_scalar=144),
        Gemma3TextConfig(**small, sliding_window=40, query_pre_attn_scalar=168),
        Cohere2Config(**small, sliding_window=40),
        GraniteConfig(**small, attention_multiplier=0.015625),
        Llama4TextConfig(**small, attention_chunk_size=512),
        DeepseekV2Config(**small, **mla),
        DeepseekV3Config(**{**small, "num_key_value_heads": 4}, **mla, rope_parameters=yarn),
        DeepseekV3Config(**{**small, "num_key_value_heads": 4}, **mla),
        DeepseekV32Config(**{**small, "num_key_value_heads": 4}, **mla, rope_parameters=yarn),
    ]


def test_families_agree_with_transformers() -> None:
    wrapped = {"gemma3", "llama4"}  # the same decoder as *_text, beside a vision tower
    assert {config.model_type for config in transformers_configs()} | wrapped == FAMILIES
    names = {"full_attention": "full", "sliding_attention": "sliding_window", "chunked_attention": "chunked"}
    for config in transformers_configs():
        label = config.model_type
        model = model_kinds(json.loads(config.to_json_string(use_diff=False)), kv_dtype="fp8", layout="nhd")
        told = {i: kind.spec for kind in model.kinds for i in kind.layers}
        assert not any("plain decoder" in note for note in model.notes), label
        if getattr(config, "kv_lora_rank", None):
            assert all(spec.mla for spec in told.values())
        elif getattr(config, "layer_types", None):
            assert [told[i].kind for i in range(8)] == [names[t] for t in config.layer_types], label
        else:
            kind = "sliding_window" if getattr(config, "sliding_window", None) else "full"
            assert {spec.kind for spec in told.values()} == {kind}, label
        for layer, spec in told.items():
            attention = attention_layer(config, layer)
            assert spec.scale == pytest.approx(attention.scaling), label
            if not spec.mla:
                assert spec.group_size == attention.num_key_value_groups, label
                assert spec.head_dim == attention.head_dim, label
            if spec.window is not None:
                assert spec.window == config.sliding_window, label
            assert spec.softcap == getattr(config, "attn_logit_softcapping", None), label
            assert spec.sinks == hasattr(attention, "sinks"), label


def attention_layer(config: Any, layer: int) -> Any:
    """transformers' attention module of a layer, on the meta device."""
    import importlib

    import torch

    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    kind = next(
        found
        for name in (type(config).__name__.removesuffix("Config"), type(config).__name__.removesuffix("TextConfig"))
        if (found := getattr(module, f"{name}Attention", None) or getattr(module, f"{name}TextAttention", None))
    )
    with torch.device("meta"):
        return kind(config, layer)


def test_published_configs_that_leave_things_out_agree_with_transformers() -> None:
    """A config.json holds what its author wrote; patterns and heads left out are the family's."""
    from transformers import Cohere2Config, Gemma2Config, Gemma3TextConfig, GptOssConfig, Llama4TextConfig

    for cls, family in ((Gemma2Config, "gemma2"), (Gemma3TextConfig, "gemma3_text"), (GptOssConfig, "gpt_oss"),
                        (Cohere2Config, "cohere2"), (Llama4TextConfig, "llama4_text")):  # fmt: skip
        given = {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4}
        full = json.loads(cls(**given).to_json_string(use_diff=False))
        short = {"model_type": family, **given} | ({"head_dim": 64} if family == "gpt_oss" else {})
        one, two = (model_kinds(c, kv_dtype="fp8", layout="nhd") for c in (full, short))
        assert [(k.layers, k.spec) for k in one.kinds] == [(k.layers, k.spec) for k in two.kinds], family
    gemma_4b = {
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        }
    }
    spec = model_kinds({"model_type": "gemma3", **gemma_4b}, layout="nhd").kinds[0].spec
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.window) == (8, 4, 256, 1024)


def test_encoders_made_of_decoders_are_not_causal() -> None:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=512, use_bidirectional_attention=True)
    model = model_kinds(json.loads(config.to_json_string(use_diff=False)), layout="nhd")
    assert [k.spec.causal for k in model.kinds] == [False, False]
    assert model.kinds[0].spec.window == config.sliding_window == 257


@pytest.mark.parametrize(("tp", "heads"), [(1, (32, 8)), (2, (16, 4)), (8, (4, 1)), (16, (2, 1)), (32, (1, 1))])
def test_tensor_parallel_ranks(tp: int, heads: tuple[int, int]) -> None:
    model = known("llama-3.1-8b", tp=tp)
    assert (model.kinds[0].spec.num_q_heads, model.kinds[0].spec.num_kv_heads) == heads
    assert any("held by" in note for note in model.notes) == (tp > 8)


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("smollm2-135m", 2, "num_attention_heads.*tp 2 and 9"),
        ("llama-3.1-8b", 0, "positive integer"),
        ("llama-3.1-8b", 64, "tp 64 and 32"),
    ],
)
def test_heads_that_do_not_divide(name: str, tp: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        known(name, tp=tp)


def test_kv_heads_that_neither_divide_nor_are_copied() -> None:
    with pytest.raises(InvalidInput, match="multiple of it.*tp 4 and 6"):
        model_kinds({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64}, tp=4)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_key_that_is_not_there_is_named(key: str) -> None:
    with pytest.raises(InvalidInput, match=f"{key}.*no such key"):
        model_kinds({k: v for k, v in LLAMA.items() if k != key})


def test_a_key_of_the_wrong_type_is_named_with_its_value() -> None:
    with pytest.raises(InvalidInput, match="num_hidden_layers.*'four'"):
        model_kinds({**LLAMA, "num_hidden_layers": "four"})


def test_other_causal_configs_are_plain_decoders_and_say_so() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
    model = model_kinds(gpt2, layout="nhd")
    spec = model.kinds[0].spec
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, len(model.kinds[0].layers)) == (12, 12, 64, 12)
    assert any("gpt2" in note and "plain decoder" in note for note in model.notes)
    assert model_kinds({**gpt2, "model_type": "bloom"}, layout="nhd").kinds[0].spec.alibi
    assert model_kinds({**gpt2, "multi_query": True}, layout="nhd").kinds[0].spec.num_kv_heads == 1


def test_layers_without_attention_have_no_cache() -> None:
    types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    for extra in ({"layer_types": types}, {"full_attention_interval": 4}):
        model = model_kinds({**LLAMA, **extra}, layout="nhd")
        assert [kind.layers for kind in model.kinds] == [(3,)]
        assert any("3 of 4 layers" in note for note in model.notes)


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"layer_types": ["minimax_m3_sparse"] * 4}, "minimax_m3_sparse"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
    ],
)
def test_what_no_spec_describes_is_refused(extra: dict, found: str) -> None:
    with pytest.raises(Unsupported) as raised:
        model_kinds({**LLAMA, **extra}, layout="nhd")
    assert found in "\n".join(raised.value.reasons)


@pytest.mark.parametrize(
    ("asked", "declared", "dtype", "words"),
    [
        ("auto", None, "bfloat16", "no KV scales"),
        ("auto", SCHEME, "fp8_e4m3", "compressed-tensors's kv_cache_scheme declares"),
        ("auto", MODELOPT, "fp8_e4m3", "ModelOpt's kv_cache_quant_algo declares"),
        ("bf16", None, "bfloat16", "as given"),
        ("bf16", SCHEME, "bfloat16", "are not used"),
        ("fp8", None, "fp8_e4m3", "1.0"),
        ("fp8", SCHEME, "fp8_e4m3", "are used"),
        ("fp8_e5m2", None, "fp8_e5m2", "1.0"),
    ],
)
def test_c3_explicit_against_checkpoint(asked: str, declared: dict | None, dtype: str, words: str) -> None:
    config = {**LLAMA, "torch_dtype": "bfloat16"} | ({"quantization_config": declared} if declared else {})
    model = model_kinds(config, kv_dtype=asked, layout="nhd")
    assert model.kinds[0].spec.kv_dtype == dtype
    assert resolve_kv_dtype(config, asked)[0] == dtype
    said = [note for note in model.notes if "kv cache dtype" in note]
    assert len(said) == 1 and words in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("declared", [SCHEME, MODELOPT])
def test_c3_e5m2_with_e4m3_scales_is_refused(declared: dict) -> None:
    with pytest.raises(Unsupported, match="scales made for fp8_e4m3; the kv cache dtype is fp8_e5m2"):
        model_kinds({**LLAMA, "quantization_config": declared}, kv_dtype="fp8_e5m2")


def test_a_checkpoint_format_that_octavo_has_not() -> None:
    config = {**LLAMA, "quantization_config": {"quantization": {"kv_cache_quant_algo": "NVFP4"}}}
    with pytest.raises(Unsupported, match="NVFP4"):
        model_kinds(config)
    assert model_kinds(config, kv_dtype="fp8", layout="nhd").kinds[0].spec.kv_dtype == "fp8_e4m3"
    integer = {**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}
    declared = checkpoint_kv(integer)
    assert declared is not None and declared.reasons == ("kv_cache_scheme's type must be float; it is int",)
    channels = {**SCHEME["kv_cache_scheme"], "strategy": "channel", "dynamic": True}  # type: ignore[dict-item]
    with pytest.raises(
        Unsupported,
        match="(?s)dynamic must be False; it is True.*strategy must be tensor or attn_head or head; it is channel",
    ):
        model_kinds({**LLAMA, "quantization_config": {"kv_cache_scheme": channels}})


def test_scale_granularity_follows_the_checkpoint_unless_given() -> None:
    scheme = {**SCHEME["kv_cache_scheme"], "strategy": "attn_head"}  # type: ignore[dict-item]
    config = {**LLAMA, "quantization_config": {"kv_cache_scheme": scheme}}
    assert model_kinds(config, layout="nhd").kinds[0].spec.scale_granularity == "head"
    given = model_kinds(config, layout="nhd", scale_granularity="token_head")
    assert given.kinds[0].spec.scale_granularity == "token_head"
    assert model_kinds(config, kv_dtype="bf16", layout="nhd").kinds[0].spec.scale_granularity == "tensor"


def test_a_folder_and_a_file_are_read_and_modelopt_beside_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == LLAMA
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    assert checkpoint_kv(load_config(tmp_path)) == DeclaredCache("ModelOpt's kv_cache_quant_algo")


@pytest.mark.parametrize(
    ("content", "message"), [("{", "readable JSON"), ("[1]", "JSON object"), (None, "config.json")]
)
def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInput, match=message):
        load_config(tmp_path)
    with pytest.raises(InvalidInput, match="llama-3.1-8b"):
        load_config("llama-9-900b")


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_types": 5},
        {"architectures": 5},
        {"model_type": []},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"num_hidden_layers": 10**9},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None, "sliding_window": 8},
        {"model_type": "gemma2", "query_pre_attn_scalar": "x"},
    ],
)
def test_values_of_the_wrong_type_are_one_clear_line(wrong: dict) -> None:
    with pytest.raises(InvalidInput) as error:
        model_kinds({**LLAMA, **wrong}, layout="nhd")
    assert "\n" not in str(error.value)


def test_a_scheme_that_is_no_object_and_weights_of_fewer_bits() -> None:
    with pytest.raises(Unsupported, match="kv_cache_scheme must be an object; it is 'fp8'"):
        model_kinds({**LLAMA, "quantization_config": {"kv_cache_scheme": "fp8"}}, layout="nhd")
    assert model_kinds({**LLAMA, "torch_dtype": "float8_e4m3fn"}, layout="nhd").kinds[0].spec.kv_dtype == "bfloat16"
