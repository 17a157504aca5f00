"""Data of models.py: the configs behind the known names, other spellings of keys, and what families leave out."""

from __future__ import annotations

from typing import Any

DEEPSEEK_YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}

# The attention fields of each published config.json.
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    },
    "llama-3.1-70b": {
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    },
    "qwen3-32b": {
        "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "sliding_window": None,
        "use_sliding_window": False, "max_window_layers": 64, "torch_dtype": "bfloat16",
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "torch_dtype": "bfloat16",
    },
    "gemma-3-27b": {
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024,
            "max_position_embeddings": 131072,
        },
    },
    "deepseek-v3.2": {
        "model_type": "deepseek_v32", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
        "max_position_embeddings": 163840, "rope_scaling": DEEPSEEK_YARN, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"},
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    },
}  # fmt: skip

# Other names of the same key, in older configs.
ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "hidden_size": ("n_embd", "d_model"),
    "dtype": ("torch_dtype",),
}
# What transformers fills in where a published config leaves it out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gpt_oss": {"sliding_window": 128},
    "cohere2": {"sliding_window": 4096},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
}  # fmt: skip
