"""What enable of octavo.integrations.transformers hands back, what disable undoes, and what is said on the way."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers_models import cache_of, keyword, left_padded, logits, prompts, tiny, transformers

from octavo import notices
from octavo.formats import FORMATS, dequantise, quantise
from octavo.integrations import transformers as octavo_transformers
from octavo.integrations.transformers import disable, enable


def test_disable_restores_the_model():
    model, ids = tiny("gemma2"), prompts(1, 16)
    before_logits, before_tokens = logits(model, ids), model.generate(ids, max_new_tokens=8)
    before_names = set(vars(model))
    enable(model, "fp8")
    assert not torch.equal(logits(model, ids), before_logits)
    disable(model)
    assert torch.equal(logits(model, ids), before_logits)
    assert torch.equal(model.generate(ids, max_new_tokens=8), before_tokens)
    assert model.config._attn_implementation == "eager" and set(vars(model)) == before_names
    assert not model.get_decoder()._forward_pre_hooks
    assert type(cache_of(model(ids))) is transformers.DynamicCache
    disable(model)  # a model that is not enabled is left alone


def test_a_decoder_enabled_by_itself_is_disabled_through_its_model():
    model, ids = tiny("llama"), prompts(1, 16)
    before = logits(model, ids)
    enable(model.model, "fp8")
    assert not torch.equal(logits(model, ids), before)
    enable(model, "fp8")
    disable(model.model)
    assert torch.equal(logits(model, ids), before) and "_prepare_cache_for_generation" not in vars(model)


def test_enable_again_replaces_and_other_models_are_left_alone():
    model, other, ids = tiny("llama"), tiny("llama"), prompts(1, 16)
    expected = logits(other, ids)
    enable(model, "fp8")
    handle = enable(model, "auto")
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)
    assert len(model.get_decoder()._forward_pre_hooks) == 1
    assert torch.equal(logits(other, ids), expected) and type(cache_of(other(ids))) is transformers.DynamicCache
    gc.collect()
    assert handle.pool.used_pages == 0


def test_the_model_and_its_pages_are_freed():
    model = tiny("llama")
    enable(model, "fp8")
    count = len(octavo_transformers._layers)
    del model
    gc.collect()
    assert len(octavo_transformers._layers) <= count - 2


def test_stats_tell_error_and_saturation():
    model, batch = tiny("llama"), left_padded(2, 20)
    seen: dict[str, list[torch.Tensor]] = {"k": [], "v": []}

    class Watching(transformers.DynamicCache):
        def update(self, keys, values, layer, *args, **keywords):
            if layer == 0:
                real = batch["attention_mask"].bool()
                seen["k"].append(keys.transpose(1, 2)[real])
                seen["v"].append(values.transpose(1, 2)[real])
            return super().update(keys, values, layer, *args, **keywords)

    mask = {"attention_mask": batch["attention_mask"]}
    logits(model, batch["input_ids"], **mask, **{keyword(): Watching(config=model.config)})
    k, v = seen["k"][0], seen["v"][0]
    k_scale, v_scale = float(k.abs().max()) / 448 / 2, float(v.abs().max()) / 448
    handle = enable(model, "fp8", page_size=32, k_scale=k_scale, v_scale=v_scale)
    logits(model, batch["input_ids"], **mask)
    assert handle.stats[0]["tokens"] == 0
    handle.record_error = True
    logits(model, batch["input_ids"], **mask)
    stats = handle.stats[0]
    assert stats["tokens"] == int(batch["attention_mask"].sum()) == 38
    assert stats["k_amax"] == pytest.approx(float(k.abs().max()), rel=1e-5)
    assert stats["k_saturated"] == int((k.abs() / k_scale > 448).sum()) > 0 and stats["v_saturated"] == 0
    format = FORMATS["fp8_e4m3"]
    rounded = dequantise(quantise(v, torch.tensor(v_scale), format), torch.tensor(v_scale), format)
    assert stats["v_rel_err"] == pytest.approx(float((v - rounded).norm() / v.norm()), rel=1e-3)
    assert 0.01 < stats["v_rel_err"] < 2**-4 < stats["k_rel_err"]
    heads = handle.head_stats[0]
    by_head = (v - rounded).norm(dim=(0, 2)) / v.norm(dim=(0, 2))
    assert heads["v_rel_err"] == pytest.approx(by_head.tolist(), rel=1e-3) and len(heads["v_rel_err"]) == 2
    assert sum(heads["k_saturated"]) == stats["k_saturated"] and max(heads["k_amax"]) == stats["k_amax"]
    handle.reset_stats()
    assert handle.stats[1]["tokens"] == 0
    exact = enable(model, "auto")
    exact.record_error = True
    logits(model, batch["input_ids"], **mask)
    assert exact.stats[1]["k_rel_err"] == exact.stats[1]["v_rel_err"] == 0 and exact.stats[1]["tokens"] == 38


def test_the_plan_names_layers_and_backends():
    handle = enable(tiny("gemma2"), "fp8", page_size=32)
    assert "layer 0\n" in handle.plan and "layer 1\n" in handle.plan
    assert "reference" in handle.plan and handle.plan.count("window 6") == 1
    assert len(handle.caches) == 2 and len(handle.choices) == 2


def test_another_cache_implementation_is_replaced_and_said(caplog):
    model, ids = tiny("llama"), prompts(1, 9)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    notices.said.clear()
    enable(model, "auto")
    for _ in range(2):
        found = model.generate(ids, max_new_tokens=5, do_sample=False, cache_implementation="static")
        assert torch.equal(found, expected)
    assert [r.message for r in caplog.records if "cache_implementation='static'" in r.message] == [
        "octavo's cache replaces cache_implementation='static'"
    ]


def test_an_untested_version_is_said_once(caplog, monkeypatch):
    notices.said.clear()
    enable(tiny("llama"), "auto")
    assert "untested" not in caplog.text
    monkeypatch.setattr(octavo_transformers, "TESTED", ("4.1", "5.2"))
    for _ in range(2):
        enable(tiny("llama"), "auto")
    assert [r.message for r in caplog.records if "untested" in r.message] == [
        f"transformers {transformers.__version__} is untested: octavo was tried on 4.1 to 5.2"
    ]


def test_a_copied_model_says_that_it_is_not_enabled():
    model = tiny("llama")
    enable(model, "auto")
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="enable"):
        logits(twin, prompts(1, 5))
