"""Tiny random models of every family that octavo.integrations.transformers lists, in fp32, for its tests."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is an extra")

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that attention is far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # else a random model repeats its last token
    "attn_implementation": "eager",
}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"layer_types": _TWO_KINDS, "use_sliding_window": True, "sliding_window": 6}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gpt_oss": (
        "GptOss",
        {"layer_types": _TWO_KINDS, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma2": (
        "Gemma2",
        {
            "layer_types": _TWO_KINDS,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3_text": ("Gemma3", {"layer_types": _TWO_KINDS, "sliding_window": 6, "query_pre_attn_scalar": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
FAMILY_NAMES = tuple(_FAMILIES)


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 model of `family` in eval mode, the same for the same arguments."""
    name, fields = _FAMILIES[family]
    config_name = f"{name}TextConfig" if family == "gemma3_text" else f"{name}Config"
    config = getattr(transformers, config_name)(**{**_COMMON, **fields, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(0.0, 3.0)
    model.generation_config.pad_token_id = 0
    return model


def prompts(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """int64 [batch, length] of token ids that are no special ones."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch: int, length: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask where row i begins with 2 i columns of padding."""
    ids = prompts(batch, length, seed)
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, : 2 * row] = 0
        mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: Any, ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **keywords).logits


def cache_of(output: Any) -> Any:
    """The cache in a model's output, by the name that this transformers gives it."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def keyword() -> str:
    """The argument that a model takes a cache by."""
    known = inspect.signature(transformers.LlamaModel.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def save_with_letters(folder: Path, **changes: Any) -> Path:
    """A tiny random Llama with a tokenizer of one token a byte and a chat template, saved into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{letter: i + 3 for i, letter in enumerate(alphabet)}}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(folder)
    tiny("llama", vocab_size=len(vocabulary), **changes).save_pretrained(folder)
    return folder
