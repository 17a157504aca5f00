"""What octavo.integrations.transformers must not compute silently wrong is refused, and the model still runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers_models import keyword, left_padded, prompts, tiny, transformers

from octavo import InvalidInput, Unsupported
from octavo.integrations.transformers import disable, enable


@pytest.fixture
def llama():
    model = tiny("llama")
    enable(model, "auto", page_size=4)
    yield model
    with torch.no_grad():  # a refusal leaves the model usable
        assert bool(model(prompts(1, 6)).logits.isfinite().all())


def test_attention_weights(llama):
    with torch.no_grad(), pytest.raises(Unsupported, match="never holds the attention weights"):
        llama(prompts(1, 6), output_attentions=True)
    with pytest.raises(Unsupported, match="output_attentions"):
        llama.generate(prompts(1, 6), max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def test_gradients(llama):
    with pytest.raises(Unsupported, match="no backward pass"):
        llama(prompts(1, 6))


def test_dropout_in_training():
    model = tiny("llama", attention_dropout=0.5)
    enable(model, "auto")
    model.train()
    with torch.no_grad(), pytest.raises(InvalidInput, match="dropout of layer 0 must be the planned 0.0"):
        model(prompts(1, 6))


def test_models_that_are_not_ready():
    for wrong in ("x", None, torch.nn.Linear(2, 2)):
        with pytest.raises(InvalidInput, match="model must be a transformers model"):
            enable(wrong)
        with pytest.raises(InvalidInput, match="model must be a transformers model"):
            disable(wrong)
    with pytest.raises(InvalidInput, match="model must be in eval mode"):
        enable(tiny("llama").train())


def test_a_refused_enable_leaves_the_earlier_one(llama):
    handle = enable(llama, "auto")
    with pytest.raises(InvalidInput, match="kv_dtype must be one of"):
        enable(llama, "bogus")
    with torch.no_grad():
        assert llama(prompts(1, 6), **{keyword(): handle.new_cache()}).logits.isfinite().all()


def test_another_attention_while_enabled(llama):
    enable(llama, "auto")
    llama.set_attn_implementation("eager")
    with torch.no_grad(), pytest.raises(InvalidInput, match="attn_implementation must stay 'octavo'"):
        llama(prompts(1, 6))
    disable(llama)


def test_a_cache_of_a_model_that_is_not_enabled_any_more(llama):
    cache = enable(llama, "auto").new_cache()
    disable(llama)
    with torch.no_grad(), pytest.raises(InvalidInput, match="or the model is not enabled"):
        for _ in range(2):
            llama(prompts(1, 6), **{keyword(): cache})


def test_threads_take_turns():
    model = tiny("llama")
    ids = [prompts(1, 5 + n) for n in range(4)]
    with torch.no_grad():
        alone = [model.generate(one, max_new_tokens=10, do_sample=False) for one in ids]
        enable(model, "auto", page_size=16, layout="nhd")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda one: model.generate(one, max_new_tokens=10, do_sample=False), ids))
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_a_foreign_cache(llama):
    other = tiny("llama", seed=2)
    handle = enable(other, "auto")
    for cache in (transformers.DynamicCache(config=llama.config), handle.new_cache()):
        with torch.no_grad(), pytest.raises(InvalidInput, match="new_cache"):
            llama(prompts(1, 6), **{keyword(): cache})


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_prepared_mask(llama, dtype):
    with torch.no_grad(), pytest.raises(Unsupported, match="2-D"):
        llama(prompts(1, 6), attention_mask=torch.ones(1, 1, 6, 6, dtype=dtype))


def test_a_mask_of_the_new_tokens_only(llama):
    handle = enable(llama, "auto")
    cache = handle.new_cache()
    with torch.no_grad():
        llama(prompts(1, 6), **{keyword(): cache})
        with pytest.raises(InvalidInput, match=r"\[1, 9\].*\[1, 3\]"):
            llama(prompts(1, 3), attention_mask=torch.ones(1, 3), **{keyword(): cache})


def test_a_mask_that_changes_its_mind(llama):
    handle = enable(llama, "auto")
    cache, batch = handle.new_cache(), left_padded(2, 6)
    with torch.no_grad():
        llama(**batch, **{keyword(): cache})
        with pytest.raises(InvalidInput, match=r"\[6, 4\] tokens.*\[6, 6\]"):
            llama(prompts(2, 1), attention_mask=torch.ones(2, 7), **{keyword(): cache})


def test_packed_sequences(llama):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad(), pytest.raises(Unsupported, match="consecutive"):
        llama(prompts(1, 6), position_ids=positions, use_cache=False)


def test_masks_beyond_causal():
    model = tiny("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(Unsupported, match="both directions"):
        enable(model, "auto")
    model = tiny("gemma3_text")
    enable(model, "auto")
    model.config.use_bidirectional_attention = True  # changed afterwards, so that the mask itself is asked
    with torch.no_grad(), pytest.raises(Unsupported, match="bidirectional, packed or blockwise"):
        model(prompts(1, 6))


def test_an_unknown_family():
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    with pytest.raises(Unsupported, match=r"one of llama, .*; it is gpt2"):
        enable(transformers.GPT2LMHeadModel(config), "auto")


def test_a_changed_module(llama):
    llama.model.layers[1].self_attn.scaling = 0.5
    with torch.no_grad(), pytest.raises(InvalidInput, match="scaling of layer 1"):
        llama(prompts(1, 6))
    llama.model.layers[1].self_attn.scaling = 32**-0.5


def test_a_pass_that_broke_off(llama):
    handle = enable(llama, "auto")
    cache = handle.new_cache()
    attention = llama.model.layers[1].self_attn
    with torch.no_grad():
        attention.scaling = 0.5
        with pytest.raises(InvalidInput, match="scaling"):
            llama(prompts(1, 6), **{keyword(): cache})
        attention.scaling = 32**-0.5
        with pytest.raises(InvalidInput, match="broke off"):
            llama(prompts(1, 3), **{keyword(): cache})


def test_too_few_pages():
    model = tiny("llama")
    enable(model, "auto", page_size=4, num_pages=3)
    model.generate(prompts(1, 6), max_new_tokens=6, do_sample=False)
    with pytest.raises(InvalidInput, match="num_pages"):
        model.generate(prompts(1, 6), max_new_tokens=9, do_sample=False)
    assert model.generate(prompts(1, 6), max_new_tokens=6, do_sample=False).shape == (1, 12)


def test_a_layout_or_backend_that_cannot():
    model = tiny("llama")
    with pytest.raises(Unsupported, match="leaf"):
        enable(model, "bfloat16", layout="leaf")
    with pytest.raises(Unsupported):
        enable(model, "fp8", backend="gluon")
    with pytest.raises(InvalidInput, match="kv_dtype must be one of"):
        enable(model, "int4")
    assert model.config._attn_implementation == "eager"
    disable(model)


def test_the_latent_projection_must_be_plain():
    model = tiny("deepseek_v3")
    inner = model.model.layers[1].self_attn

    class Wrapped(torch.nn.Linear):
        """As an adapter or a quantiser would leave it."""

    inner.kv_b_proj = Wrapped(32, 4 * 40, bias=False)
    with pytest.raises(Unsupported, match="plain Linear.*Wrapped"):
        enable(model, "auto")
