"""KV-cache schemes and scales of checkpoints: cases C3 (explicit against checkpoint) and C4 (bad scales)."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers_models import prompts, tiny, transformers

from octavo import InvalidInput, Unsupported
from octavo.integrations.transformers import enable

safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors comes with transformers")

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
K_NAME = {"compressed-tensors": "self_attn.k_scale", "modelopt": "self_attn.k_proj.k_scale"}
FORMATS = tuple(K_NAME)


def both(k: Any, v: Any) -> dict[str, Any]:
    """The same k and v scale for both layers, as {"0.k": ...}."""
    return {f"{layer}.{kind}": scale for layer in (0, 1) for kind, scale in (("k", k), ("v", v))}


def checkpoint(
    folder: Path, format: str = "modelopt", scales: dict[str, Any] | None = None, declare: Any = True, **changes: Any
) -> Any:
    """A llama that was loaded from `folder`, whose files declare a KV cache in `format` and hold `scales`.

    declare: True, False, or what is declared instead (a scheme for compressed-tensors, an algorithm for ModelOpt).
    """
    model = tiny("llama", **changes)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    for name, scale in (scales or {}).items():
        layer, kind = name.split(".")
        key = f"model.layers.{layer}.{K_NAME[format]}".replace("k_proj", f"{kind}_proj").replace(
            "k_scale", f"{kind}_scale"
        )
        tensors[key] = torch.as_tensor(scale, dtype=torch.float32).clone()  # safetensors refuses shared memory
    safetensors_torch.save_file(tensors, file, metadata={"format": "pt"})
    if format == "modelopt":
        algorithm = "FP8" if declare is True else declare or None
        content = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": algorithm}}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
        # These files are loaded for good; the other format's need a package that loads its weights.
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    else:
        if declare:
            config = json.loads((folder / "config.json").read_text())
            scheme = SCHEME if declare is True else declare
            config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
            (folder / "config.json").write_text(json.dumps(config))
        model.config._name_or_path = str(folder)
    return model


def messages(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.message for record in caplog.records if record.name == "octavo" and text in record.message]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("declare", [True, False])
@pytest.mark.parametrize("asked", ["auto", "bfloat16", "float32", "fp8", "fp8_e5m2"])
def test_explicit_wins_and_auto_follows_the_checkpoint(tmp_path, caplog, format, declare, asked):
    caplog.set_level(logging.INFO, logger="octavo")
    model = checkpoint(tmp_path, format, both(0.25, 0.5) if declare else None, declare)
    if declare and asked == "fp8_e5m2":
        with pytest.raises(Unsupported, match="made for fp8_e4m3.*kv cache dtype is fp8_e5m2"):
            enable(model, asked, page_size=32)
        handle = enable(model, asked, page_size=32, k_scale=1.0, v_scale=1.0)  # its own scales
        assert handle.caches[0].k_scale is not None and float(handle.caches[0].k_scale) == 1.0
        return
    handle = enable(model, asked, page_size=32)
    expected = {"auto": "fp8_e4m3" if declare else "float32", "fp8": "fp8_e4m3"}.get(asked, asked)
    assert {spec.kv_dtype for spec in handle.specs} == {expected}
    said = messages(caplog, "kv_cache_dtype=auto")
    assert len(said) == (asked == "auto")
    if asked == "auto":
        assert expected in said[0] and ("declares no" in said[0]) == (not declare)
    for cache in handle.caches:
        if expected == "fp8_e4m3":
            assert (float(cache.k_scale), float(cache.v_scale)) == ((0.25, 0.5) if declare else (1.0, 1.0))
        else:
            assert cache.k_scale is None or float(cache.k_scale) == 1.0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1, 1)])
def test_scales_per_tensor_and_per_head_are_read(tmp_path, format, shape):
    k = torch.rand(shape) + 0.5
    v = torch.rand(shape) + 0.5
    handle = enable(checkpoint(tmp_path, format, both(k, v)), "auto", page_size=32)
    granularity = "head" if k.numel() == 2 else "tensor"
    for spec, cache in zip(handle.specs, handle.caches, strict=True):
        assert spec.scale_granularity == granularity
        assert cache.k_scale.flatten().tolist() == k.flatten().tolist()
        assert cache.v_scale.flatten().tolist() == v.flatten().tolist()


def test_layers_keep_their_own_scales_and_the_pool_keeps_them_as_it_grows(tmp_path):
    scales = {"0.k": 0.25, "0.v": 0.5, "1.k": [0.125, 2.0], "1.v": 4.0}
    model = checkpoint(tmp_path, "compressed-tensors", scales)
    handle = enable(model, "auto", page_size=32)
    expected = [[0.25, 0.25], [0.5, 0.5], [0.125, 2.0], [4.0, 4.0]]
    assert [s.tolist() for cache in handle.caches for s in (cache.k_scale, cache.v_scale)] == expected
    with torch.no_grad():
        model(prompts(20, 8))
    assert handle.pool.num_pages > 16
    assert [s.tolist() for cache in handle.caches for s in (cache.k_scale, cache.v_scale)] == expected


def test_scales_are_applied_once(tmp_path):
    """A scale that divides on the way in and multiplies on the way out changes little; dropped or doubled, much."""
    model = checkpoint(tmp_path, "modelopt", both(1 / 16, 1 / 32))
    ids = prompts(2, 12)
    with torch.no_grad():
        expected = model(ids).logits
        enable(model, "auto", page_size=32)
        found = model(ids).logits
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.15


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0, [1.0, 0.0], [1.0, 1.0, 1.0], [1.0] * 32])
def test_bad_scales_are_refused_at_load(tmp_path, format, bad):
    model = checkpoint(tmp_path, format, {**both(1.0, 1.0), "1.v": bad})
    with pytest.raises(InvalidInput, match=r"layers\.1\..*v_scale must"):
        enable(model, "auto", page_size=32)
    assert model.config._attn_implementation == "eager"
    enable(model, "bfloat16")  # which uses no scales


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0, torch.tensor([1.0, 2.0, 3.0]), [1.0], {7: 1.0}])
def test_bad_scales_given_by_hand_are_refused(bad):
    with pytest.raises(InvalidInput, match="v_scale"):
        enable(tiny("llama"), "fp8", page_size=32, k_scale=1.0, v_scale=bad)


def test_a_missing_scale_is_one_and_said_once(tmp_path, caplog):
    model = checkpoint(tmp_path, "modelopt", {"0.k": 0.5, "0.v": 0.25, "1.v": 0.25})
    handle = enable(model, "auto", page_size=32)
    assert [float(cache.k_scale) for cache in handle.caches] == [0.5, 1.0]
    assert messages(caplog, "k_scale") == ["k_scale is missing for layers 1: it is 1.0 there"]
    assert not messages(caplog, "v_scale")


@pytest.mark.parametrize("scales", [{}, {"0.v": 0.25, "1.v": 0.25}])
def test_missing_scales_of_one_kind_or_all_are_one_and_said_once(tmp_path, caplog, scales):
    handle = enable(checkpoint(tmp_path, "compressed-tensors", scales), "auto", page_size=32)
    assert [float(cache.k_scale) for cache in handle.caches] == [1.0, 1.0]
    assert [float(cache.v_scale) for cache in handle.caches] == ([0.25, 0.25] if scales else [1.0, 1.0])
    assert len(messages(caplog, "k_scale")) == 1 and "layers 0, 1" in messages(caplog, "k_scale")[0]
    assert len(messages(caplog, "v_scale")) == (0 if scales else 1)


def test_one_scale_given_by_hand_leaves_the_other_at_one_and_says_so(caplog):
    cache = enable(tiny("llama"), "fp8", page_size=32, v_scale=0.5).caches[0]
    assert (float(cache.k_scale), float(cache.v_scale)) == (1.0, 0.5)
    assert messages(caplog, "scale") == ["k_scale is missing for layers 0, 1: it is 1.0 there"]


def test_scales_given_by_hand_win(tmp_path):
    model = checkpoint(tmp_path, "modelopt", both(0.25, 0.5))
    per_head = torch.tensor([0.5, 2.0])
    cases = (
        ({"k_scale": 0.75}, [0.75, 0.5]),
        ({"k_scale": {0: 0.75, 1: 0.75}, "v_scale": [2.0, 2.0]}, [0.75, 2.0]),
        ({"k_scale": per_head}, [[0.5, 2.0], [0.5, 0.5]]),
        ({"k_scale": [per_head, 1.0]}, [[0.5, 2.0], [0.5, 0.5]]),
    )
    for given, expected in cases:
        cache = enable(model, "auto", page_size=32, **given).caches[0]
        assert [cache.k_scale.tolist(), cache.v_scale.tolist()] == expected


def test_granularities_against_the_checkpoint(tmp_path):
    model = checkpoint(tmp_path, "modelopt", both([0.25, 0.5], 0.5))
    with pytest.raises(InvalidInput, match=r"k_scale of layer 0 must have shape \[\]"):
        enable(model, "auto", page_size=32, scale_granularity="tensor")
    handle = enable(model, "auto", page_size=32, scale_granularity="token_head")  # made as tokens come
    assert handle.caches[0].k_scale.shape == (16, 2, 32)


@pytest.mark.parametrize(
    ("format", "declare", "reason"),
    [
        ("compressed-tensors", {**SCHEME, "type": "int"}, "type must be float; it is int"),
        ("compressed-tensors", {**SCHEME, "num_bits": 4}, "num_bits must be 8; it is 4"),
        ("compressed-tensors", {**SCHEME, "dynamic": True}, "dynamic must be False; it is True"),
        ("compressed-tensors", {**SCHEME, "symmetric": False}, "symmetric must be True; it is False"),
        ("compressed-tensors", {**SCHEME, "strategy": "channel"}, "strategy must be tensor or .*; it is channel"),
        ("modelopt", "NVFP4", "kv_cache_quant_algo must be FP8; it is NVFP4"),
        ("modelopt", "INT8", "kv_cache_quant_algo must be FP8; it is INT8"),
    ],
)
def test_auto_refuses_what_it_cannot_follow_and_explicit_wins(tmp_path, caplog, format, declare, reason):
    model = checkpoint(tmp_path, format, both(0.25, 0.25), declare)
    with pytest.raises(Unsupported, match=reason):
        enable(model, "auto", page_size=32)
    assert enable(model, "bfloat16").specs[0].kv_dtype == "bfloat16"
    handle = enable(model, "fp8", page_size=32)
    assert handle.specs[0].kv_dtype == "fp8_e4m3" and float(handle.caches[0].k_scale or 1.0) == 1.0
    assert len(messages(caplog, "its scales are 1.0 unless given")) == 1


def test_a_zero_point_is_refused(tmp_path):
    model = checkpoint(tmp_path, "compressed-tensors", both(1.0, 1.0))
    file = tmp_path / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    key = "model.layers.0.self_attn.k_zero_point"
    safetensors_torch.save_file({**tensors, key: torch.tensor([0.0])}, file)
    enable(model, "auto", page_size=32)
    safetensors_torch.save_file({**tensors, key: torch.tensor([3.0])}, file)
    with pytest.raises(Unsupported, match="symmetric; model.layers.0.self_attn.k_zero_point"):
        enable(model, "auto", page_size=32)


def test_scales_in_a_sharded_checkpoint_are_found(tmp_path):
    model = checkpoint(tmp_path, "compressed-tensors", both(0.25, 0.5))
    file = tmp_path / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    file.unlink()
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for key, tensor in tensors.items():
        shards["b.safetensors" if key.endswith("_scale") else "a.safetensors"][key] = tensor
    for name, part in shards.items():
        safetensors_torch.save_file(part, tmp_path / name)
    index = {"weight_map": {key: name for name, part in shards.items() for key in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "a.safetensors").write_bytes(b"not opened: it holds no scales")
    assert [float(cache.v_scale) for cache in enable(model, "auto", page_size=32).caches] == [0.5, 0.5]


def test_a_latent_takes_the_key_scale(tmp_path):
    model = tiny("deepseek_v3")
    model.save_pretrained(tmp_path)
    key = "model.layers.{}.self_attn.{}_scale"
    extra = {key.format(layer, kind): torch.tensor(0.5) for layer in (0, 1) for kind in "kv"}
    safetensors_torch.save_file(extra, tmp_path / "scales.safetensors")
    model.config._name_or_path = str(tmp_path)
    handle = enable(model, "fp8")
    assert [float(cache.k_scale) for cache in handle.caches] == [0.5, 0.5]
