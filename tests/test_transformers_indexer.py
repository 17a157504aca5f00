"""octavo's indexer in transformers' sparse-attention models, against the stock indexer."""

from __future__ import annotations

import pytest
import torch
from transformers_models import _COMMON, cache_of, keyword, left_padded, prompts, transformers

import octavo
from octavo.integrations.transformers import disable, disable_indexer, enable, enable_indexer

pytest.importorskip("transformers.models.deepseek_v32", reason="this transformers has no sparse attention")

TOPK = 8
_FIELDS = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "index_n_heads": 32,  # with few, many scores are exactly 0, and ties are free
    "index_head_dim": 64,
    "index_topk": TOPK,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
NAMES = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}


def tiny(kind, seed=0, **changes):
    """A random fp32 model whose rows see more than TOPK tokens."""
    fields = {**_COMMON, **_FIELDS, **changes}
    if kind == "glm_moe_dsa":
        fields["indexer_types"] = ["full", "shared", "full"]
    config = getattr(transformers, f"{NAMES[kind]}Config")(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{NAMES[kind]}ForCausalLM")(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def generate(model, **inputs):
    """Greedy, without the padding token: its embedding is 0, and so are all its scores, which tie."""
    return model.generate(**inputs, max_new_tokens=10, do_sample=False, suppress_tokens=[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", NAMES)
def test_generated_tokens_equal_the_stock_models(kind, seed):
    model = tiny(kind, seed)
    for inputs in ({"input_ids": prompts(2, 20, seed)}, left_padded(3, 17, seed)):
        stock = generate(model, **inputs)
        handle = enable_indexer(model, "float32")
        assert torch.equal(generate(model, **inputs), stock)
        assert handle.bytes_per_token == len(handle.indexers) * 256
        assert enable_indexer(model).bytes_per_token == len(handle.indexers) * 68
        assert generate(model, **inputs).shape == stock.shape
        disable_indexer(model)
        assert torch.equal(generate(model, **inputs), stock)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("kind", NAMES)
def test_each_layer_chooses_what_fp8_keys_allow(kind, scale_format):
    """The same inputs to the stock indexer and octavo's: the choices differ only where scores nearly tie."""
    model = tiny(kind)
    taken = []
    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    stock = {indexer: indexer.forward for indexer in indexers}

    def both(indexer):
        def forward(*args, **kwargs):
            mine = octavos[indexer](*args, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("cache", "past_key_values")}
            taken.append((stock[indexer](*args, **kwargs), mine, args[3]))
            return mine

        return forward

    enable_indexer(model, scale_format=scale_format)
    octavos = {indexer: indexer.forward for indexer in indexers}
    for indexer in indexers:
        indexer.forward = both(indexer)
    with torch.no_grad():
        model(**left_padded(2, 40), use_cache=False)
    assert len(taken) == len(indexers)
    for want, got, mask in taken:
        assert want.shape == got.shape == (2, 40, TOPK) and got.dtype == torch.int32
        seen = mask if mask.dtype == torch.bool else mask == 0
        agree = total = 0
        for b in range(2):
            for row in range(40):
                visible = set(seen[b, row].nonzero().flatten().tolist())
                mine = set(got[b, row].tolist())
                theirs = set(want[b, row].tolist()) & visible
                if visible:
                    assert mine <= visible and len(mine) == min(TOPK, len(visible))
                    agree += len(mine & theirs)
                    total += len(theirs)
        assert agree >= 0.9 * total


@pytest.mark.parametrize("kind", NAMES)
def test_beams_and_crops_carry_the_keys(kind):
    model = tiny(kind)
    inputs = {"input_ids": prompts(2, 15), "num_beams": 3}
    stock = generate(model, **inputs)
    enable_indexer(model, "float32")
    assert torch.equal(generate(model, **inputs), stock)
    enable_indexer(model)
    ids = prompts(1, 24)
    with torch.no_grad():
        whole = model(ids).logits
        cache = cache_of(model(ids[:, :20]))
        assert cache.layers[0].indexer_keys.dtype == torch.uint8 and cache.layers[0].indexer_keys.shape == (1, 20, 68)
        cache.crop(-4)
        later = model(ids[:, 16:], **{keyword(): cache}).logits
    torch.testing.assert_close(later, whole[:, 16:], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused():
    model = tiny("deepseek_v32")
    with pytest.raises(octavo.InvalidInput, match="fp32, pow2; came 'ue8m0'"):
        enable_indexer(model, scale_format="ue8m0")
    with pytest.raises(octavo.InvalidInput, match="fp8_e4m3, float32; came 'bfloat16'"):
        enable_indexer(model, "bfloat16")
    with pytest.raises(octavo.InvalidInput, match="eval mode"):
        enable_indexer(model.train())
    model.eval()
    ids = prompts(1, 12)
    with torch.no_grad():
        cache = cache_of(model(ids))
    enable_indexer(model)
    with pytest.raises((octavo.InvalidInput, RuntimeError)), torch.no_grad():
        model(ids, **{keyword(): cache})
    with pytest.raises(octavo.Unsupported, match="one of deepseek_v32, glm_moe_dsa; the model has llama"):
        fields = {name: value for name, value in _COMMON.items() if name != "head_dim"}
        enable_indexer(transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval())
    with pytest.raises(octavo.Unsupported):
        enable(model)
    disable(model)
    disable_indexer(model)
    assert not any("forward" in layer.self_attn.indexer.__dict__ for layer in model.model.layers)
