"""octavo.integrations.transformers against transformers' own eager attention, on tiny random models of every family."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers_models import FAMILY_NAMES, keyword, left_padded, logits, prompts, tiny, transformers

from octavo import InvalidInput
from octavo.formats import FORMATS, dequantise, quantise
from octavo.integrations.transformers import FAMILIES, enable

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOWED = ("qwen3", "mistral", "gpt_oss", "gemma2", "gemma3_text")


def generations(model: Any) -> dict[str, torch.Tensor]:
    """Token ids by every way of generating that must not depend on where keys and values are kept."""
    one, batch = prompts(1, 14), left_padded(3, 12)
    found = {
        "greedy": model.generate(one, max_new_tokens=14, do_sample=False),
        "left-padded": model.generate(**batch, max_new_tokens=14, do_sample=False),
        "beams": model.generate(**batch, max_new_tokens=12, num_beams=3, do_sample=False),
        "prefill in chunks": model.generate(one, max_new_tokens=12, do_sample=False, prefill_chunk_size=5),
        "prompt lookup": model.generate(
            one.repeat(1, 2), max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3
        ),
    }
    found["no cache"] = model.generate(one, max_new_tokens=6, do_sample=False, use_cache=False)
    torch.manual_seed(3)
    found["sampling"] = model.generate(**batch, max_new_tokens=12, do_sample=True, num_return_sequences=2)
    return found


def test_every_listed_family_is_tested():
    assert set(FAMILY_NAMES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_float32_cache_generates_what_eager_attention_generates(family):
    model = tiny(family)
    expected = generations(model)
    handle = enable(model, "auto", page_size=8)
    found = generations(model)
    for way, tokens in expected.items():
        assert torch.equal(found[way], tokens), way
    assert {spec.kv_dtype for spec in handle.specs} == {"float32"}
    gc.collect()
    assert handle.pool.used_pages == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_float32_cache_generates_alike_on_a_gpu(family):
    model, batch = tiny(family).to("cuda"), {name: t.to("cuda") for name, t in left_padded(3, 12).items()}
    expected = model.generate(**batch, max_new_tokens=12, num_beams=2, do_sample=False)
    enable(model, "auto", page_size=8)
    assert torch.equal(model.generate(**batch, max_new_tokens=12, num_beams=2, do_sample=False), expected)
    enable(model, "fp8", page_size=32).record_error = True
    assert model.generate(**batch, max_new_tokens=4, do_sample=False).shape == (3, 16)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_chunks_agree_with_one_forward_pass(family):
    model, ids = tiny(family), prompts(2, 23)
    expected = logits(model, ids)
    handle = enable(model, "auto", page_size=4)
    for sizes in ([23], [10, 1, 7, 5], [1] * 23):
        cache, parts = handle.new_cache(), []
        for chunk in ids.split(sizes, dim=1):
            parts.append(logits(model, chunk, **{keyword(): cache}))
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)
        assert cache.get_seq_length() == 23
    torch.testing.assert_close(logits(model, ids, use_cache=False), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert "Paged" not in repr(model(ids, use_cache=False)) + repr(model(ids, use_cache=False, return_dict=False))
        assert "Paged" in repr(model(ids)) and "Paged" in repr(model(ids, return_dict=False))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_cache_is_exact_attention_over_what_it_stores(family, kv_dtype):
    """Eager attention over keys and values that went through the format, against octavo over the bytes."""
    model, ids = tiny(family), prompts(2, 20)
    k_scale, v_scale = 0.25, 0.25 if family == "deepseek_v3" else 0.125
    plain = logits(model, ids)

    class Rounding(transformers.DynamicCache):
        """A cache that hands out what an FP8 cache would hold."""

        def update(self, keys, values, layer, *args, **keywords):
            scales = (torch.tensor(k_scale), torch.tensor(v_scale))
            format = FORMATS[kv_dtype]
            rounded = [
                dequantise(quantise(x, s, format), s, format) for x, s in zip((keys, values), scales, strict=True)
            ]
            return super().update(*rounded, layer, *args, **keywords)

    expected = logits(model, ids, **{keyword(): Rounding(config=model.config)})
    given = {"k_scale": k_scale} if family == "deepseek_v3" else {"k_scale": k_scale, "v_scale": v_scale}
    handle = enable(model, kv_dtype, page_size=32, **given)
    cache = handle.new_cache()
    found = torch.cat([logits(model, part, **{keyword(): cache}) for part in ids.split([13, 7], dim=1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    error = float((found - plain).norm() / plain.norm())
    assert 1e-3 < error < (0.2 if kv_dtype == "fp8_e4m3" else 0.4)  # e5m2 has one bit less
    assert {spec.layout for spec in handle.specs} == {"nhd" if family == "deepseek_v3" else "leaf"}
    stored = 40 if family == "deepseek_v3" else 2 * 2 * 32  # a latent, or K and V of two heads
    assert handle.bytes_per_token == 2 * stored
    assert model.generate(ids, max_new_tokens=5, do_sample=False, num_beams=2).shape == (2, 25)


@pytest.mark.parametrize("layout", ["leaf", "nhd", "hnd"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "token_head"])
def test_layouts_and_granularities_generate_alike(layout, granularity):
    model = tiny("llama")
    batch = left_padded(2, 40)
    enable(model, "fp8", page_size=32, layout="nhd", scale_granularity=granularity)
    expected = model.generate(**batch, max_new_tokens=8, do_sample=False, num_beams=2)
    handle = enable(model, "fp8", page_size=32, layout=layout, scale_granularity=granularity)
    found = model.generate(**batch, max_new_tokens=8, do_sample=False, num_beams=2)
    assert torch.equal(found, expected)
    assert {(spec.layout, spec.scale_granularity) for spec in handle.specs} == {(layout, granularity)}


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_bites(family):
    ids = prompts(1, 20)
    narrow, wide = tiny(family), tiny(family, sliding_window=200)
    assert (logits(narrow, ids) - logits(wide, ids)).abs().max() > 0.05
    handle = enable(narrow, "auto")
    assert 6 in {spec.window for spec in handle.specs}


def test_softcap_and_sinks_bite():
    ids = prompts(1, 20)
    capped, free = tiny("gemma2"), tiny("gemma2", attn_logit_softcapping=None)
    assert (logits(capped, ids) - logits(free, ids)).abs().max() > 0.05
    assert {spec.softcap for spec in enable(capped, "auto").specs} == {2.0}
    sinking, dry = tiny("gpt_oss"), tiny("gpt_oss")
    with torch.no_grad():
        for layer in dry.model.layers:
            layer.self_attn.sinks.fill_(-1e9)
    assert (logits(sinking, ids) - logits(dry, ids)).abs().max() > 0.05
    assert all(spec.sinks for spec in enable(sinking, "auto").specs)


def test_a_latent_is_stored_once():
    model = tiny("deepseek_v3")
    handle = enable(model, "auto")
    assert {(s.kind, s.num_kv_heads, s.head_dim, s.value_dim) for s in handle.specs} == {("mla", 1, 40, 32)}
    assert handle.bytes_per_token == 2 * 40 * 4
    with pytest.raises(InvalidInput, match="one scale"):
        enable(model, "fp8", v_scale=0.5)


def test_a_conversation_continues_in_its_cache():
    model, ids = tiny("mistral"), prompts(1, 30)
    expected = model.generate(ids, max_new_tokens=10, do_sample=False)
    handle = enable(model, "auto", page_size=4)
    cache = handle.new_cache()
    first = model.generate(ids[:, :17], max_new_tokens=3, do_sample=False, **{keyword(): cache})
    cache.crop(-(cache.get_seq_length() - 17))
    assert first.shape[1] == 20 and cache.get_seq_length() == 17
    found = model.generate(ids, max_new_tokens=10, do_sample=False, **{keyword(): cache})
    assert torch.equal(found, expected)
    assert handle.pool.used_pages == -(-39 // 4)
    cache.reset()
    assert cache.get_seq_length() == 0 and handle.pool.used_pages == 0
    assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False, **{keyword(): cache}), expected)


def test_rows_can_be_repeated_and_selected():
    model, ids = tiny("llama"), prompts(2, 11)
    expected = logits(model, ids)
    handle = enable(model, "auto", page_size=4)
    cache = handle.new_cache()
    logits(model, ids[:, :9], **{keyword(): cache})
    cache.batch_repeat_interleave(2)
    tail = ids[:, 9:].repeat_interleave(2, 0)
    tail[1] = 5
    found = logits(model, tail, **{keyword(): cache})
    torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 1, 1], 9:], rtol=1e-4, atol=1e-4)
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    assert cache.sequences.lengths == [11, 11]


def test_right_padding_is_not_stored():
    model, ids = tiny("llama"), prompts(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    expected = logits(model, ids, attention_mask=mask)
    handle = enable(model, "auto")
    cache = handle.new_cache()
    found = logits(model, ids, attention_mask=mask, **{keyword(): cache})
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1, :6], expected[1, :6], rtol=1e-4, atol=1e-4)
    assert bool(found.isfinite().all()) and cache.sequences.lengths == [9, 6]


def test_the_pool_outlives_inference_mode():
    model, ids = tiny("llama"), prompts(3, 30)
    expected = logits(model, ids)
    enable(model, "auto", page_size=1)
    with torch.inference_mode():
        model(ids)  # grows the pool
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_models_keep_a_bfloat16_cache():
    model, batch = tiny("llama").to(torch.bfloat16), left_padded(2, 12)
    handle = enable(model, "auto")
    assert {(s.query_dtype, s.kv_dtype, s.out_dtype) for s in handle.specs} == {("bfloat16",) * 3}
    exact = tiny("llama")
    found = logits(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    expected = logits(exact, batch["input_ids"], attention_mask=batch["attention_mask"])
    real = batch["attention_mask"].bool()
    assert float((found[real].float() - expected[real]).norm() / expected[real].norm()) < 0.05
