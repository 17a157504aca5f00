"""Models: from a Hugging Face config.json (or a known name) to one AttentionSpec per kind of layer on one rank.

Reads dictionaries only; neither weights nor transformers are needed. What is not taken literally from the config
(a KV head that is copied, a family taken as a plain decoder, a dtype that follows the checkpoint) is said in `notes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .configs import Config, checkpoint_kv, integer, resolve_kv_dtype, text_config
from .errors import InvalidInput, OctavoError, Unsupported
from .spec import AttentionSpec, IndexerSpec, dtype_name, positive

# Families whose attention is checked against transformers' own; any other is taken as a plain decoder, with a note.
FAMILIES = frozenset({
    "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_oss",
    "granite", "llama", "llama4", "llama4_text", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe",
})  # fmt: skip
# Every n-th layer is full, the others slide, where layer_types is not given.
WINDOW_PATTERN = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}
# How many layers apart the full (no rope) layers of chunked-local models are.
CHUNK_INTERVAL = 4
# Keys (with a value) of what one spec per kind of layer does not describe, and what that is.
NOT_DESCRIBED = {
    "is_encoder_decoder": "cross attention",
    "num_kv_shared_layers": "layers that share another layer's keys and values",
    "global_head_dim": "another head_dim in full layers",
    "per_layer_config": "another head shape in some layers",
    "compress_ratios": "compressed keys and values",
}
# Keys of models that mix attention with recurrent layers; understood only where layer_types says which is which.
HYBRID = ("attn_layer_period", "linear_attn_config", "hybrid_override_pattern", "layers_block_type", "block_types")
NO_ATTENTION = ("linear_attention", "mamba", "conv", "moe")
ATTENTION = {
    "full_attention": "full", "attention": "full", "indexed_attention": "full", "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding_window", "chunked_attention": "chunked",
}  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """Layers that share one spec: the name tables use, and their indices."""

    name: str
    layers: tuple[int, ...]
    spec: AttentionSpec

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the caches of all layers of this kind, on one rank."""
        return len(self.layers) * self.spec.bytes_per_token


@dataclass(frozen=True)
class Model:
    """The attention of a model on one of `tp` ranks.

    Attributes:
        name, model_type: what it was asked for as, and its family.
        tp: ranks that the heads are divided over.
        kinds: one entry per kind of layer.
        indexer: of DeepSeek sparse attention; one in every layer.
        notes: what was decided that the config does not say literally; a line each.
    """

    name: str
    model_type: str
    tp: int
    kinds: tuple[LayerKind, ...]
    indexer: IndexerSpec | None
    notes: tuple[str, ...]

    @property
    def indexer_bytes_per_token(self) -> int:
        """Bytes of one token in the index caches of all layers: a key, and a scale of 4 bytes in every format."""
        if self.indexer is None:
            return 0
        return sum(len(kind.layers) for kind in self.kinds) * (self.indexer.head_dim + 4)


def layer_types(text: Config) -> list[str]:
    """Of each layer: full, sliding_window, chunked, or none where it has no attention."""
    count = integer(text, "num_hidden_layers")
    family = text.get("model_type", "")
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    given = text.get("layer_types")
    if given:
        unknown = sorted({str(t) for t in given} - {*ATTENTION, *NO_ATTENTION})
        if unknown:
            raise Unsupported(
                f"no attention spec for {family}",
                [f"needs layers of {', '.join(ATTENTION)}; found {', '.join(unknown)}"],
            )
        if len(given) != count:
            raise InvalidInput(f"layer_types needs num_hidden_layers = {count} entries", len(given))
        return [ATTENTION.get(t, "none") for t in given]
    hybrid = [key for key in HYBRID if text.get(key)]
    if hybrid:
        raise Unsupported(
            f"no attention spec for {family}", [f"needs layer_types in the config; found {', '.join(hybrid)}"]
        )
    if text.get("full_attention_interval"):
        return ["none" if (i + 1) % text["full_attention_interval"] else "full" for i in range(count)]
    if text.get("attention_chunk_size"):
        step = text.get("no_rope_layer_interval", CHUNK_INTERVAL)
        rope = text.get("no_rope_layers") or [(i + 1) % step for i in range(count)]
        return ["chunked" if rope[i] else "full" for i in range(count)]
    if family in WINDOW_PATTERN:
        pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or WINDOW_PATTERN[family]
        return ["sliding_window" if (i + 1) % pattern else "full" for i in range(count)]
    if window is None:
        return ["full"] * count
    first = text.get("max_window_layers", 0) if "use_sliding_window" in text else 0
    return ["sliding_window" if i >= first else "full" for i in range(count)]


def mla_scale(text: Config) -> float:
    """softmax scale of DeepSeek's MLA: (nope + rope) ** -0.5, times mscale squared under YaRN (as transformers does).

    mscale = 0.1 mscale_all_dim ln(factor) + 1 (Peng et al. 2023, YaRN, eq. 22, as DeepSeek applies it).
    """
    scale = (integer(text, "qk_nope_head_dim") + integer(text, "qk_rope_head_dim")) ** -0.5
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    all_dim, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1.0)
    if all_dim and factor > 1 and rope.get("rope_type", rope.get("type", "default")) != "default":
        scale *= (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    return scale


def _split_heads(heads: int, kv_heads: int, tp: int, notes: list[str]) -> tuple[int, int]:
    """Query and KV heads of one rank."""
    if heads % tp:
        raise InvalidInput("tp must divide num_attention_heads", f"tp {tp} and {heads} heads")
    if kv_heads % tp == 0:
        return heads // tp, kv_heads // tp
    if tp % kv_heads:
        raise InvalidInput(
            "tp must divide num_key_value_heads or be a multiple of it", f"tp {tp} and {kv_heads} KV heads"
        )
    notes.append(f"{kv_heads} KV heads on {tp} ranks: each is held by {tp // kv_heads} ranks")
    return heads // tp, 1


def _head_fields(text: Config, tp: int, notes: list[str]) -> dict[str, Any]:
    """Spec fields that say the shape of a head and how many a rank has."""
    heads = integer(text, "num_attention_heads")
    if text.get("kv_lora_rank"):
        latent = integer(text, "kv_lora_rank")
        heads, _ = _split_heads(heads, heads, tp, notes)
        notes.append("MLA: one latent key of kv_lora_rank + qk_rope_head_dim a token, the same on every rank")
        dims = {"head_dim": latent + integer(text, "qk_rope_head_dim"), "head_dim_v": latent}
        return {"num_q_heads": heads, "num_kv_heads": 1, "mla": True, "softmax_scale": mla_scale(text), **dims}
    multi_query = text.get("multi_query") and not text.get("new_decoder_architecture")
    given = text.get("num_key_value_heads") is not None
    kv_heads = 1 if multi_query else integer(text, "num_key_value_heads") if given else heads
    heads, kv_heads = _split_heads(heads, kv_heads, tp, notes)
    fields: dict[str, Any] = {"num_q_heads": heads, "num_kv_heads": kv_heads}
    if text.get("head_dim") is not None:
        fields["head_dim"] = integer(text, "head_dim")
    else:
        hidden, whole = integer(text, "hidden_size"), integer(text, "num_attention_heads")
        if hidden % whole:
            raise InvalidInput("the config needs head_dim, as num_attention_heads does not divide hidden_size", hidden)
        fields["head_dim"] = hidden // whole
    if text.get("query_pre_attn_scalar"):
        fields["softmax_scale"] = float(text["query_pre_attn_scalar"]) ** -0.5
    elif text.get("attention_multiplier"):
        fields["softmax_scale"] = float(text["attention_multiplier"])
    return fields


def _refuse_others(config: Config, text: Config) -> None:
    """Raise Unsupported for a config that a spec per layer kind does not describe."""
    reasons = [f"needs a decoder without {what}; found {key}" for key, what in NOT_DESCRIBED.items() if text.get(key)]
    masked = [a for a in config.get("architectures") or () if str(a).endswith("MaskedLM")]
    reasons += [f"needs a causal language model; found {name}" for name in masked]
    if reasons:
        raise Unsupported(f"no attention spec for {text.get('model_type') or 'this config'}", reasons)


def _indexer(text: Config, page_size: int, max_query_len: int) -> IndexerSpec | None:
    if not text.get("index_n_heads"):
        return None
    pow2 = (text.get("quantization_config") or {}).get("scale_fmt") == "ue8m0"
    return IndexerSpec(
        num_heads=integer(text, "index_n_heads"),
        head_dim=integer(text, "index_head_dim"),
        page_size=page_size,
        scale_format="pow2" if pow2 else "fp32",
        max_query_len=max_query_len,
        top_k=integer(text, "index_topk") if text.get("index_topk") else 2048,
    )


MOST_LAYERS = 10_000  # of any config that is meant


def _dtypes(text: Config, notes: list[str]) -> dict[str, str]:
    """query_dtype and out_dtype: the checkpoint's, or bfloat16 where it says none that queries can have."""
    own = dtype_name(text.get("dtype") or "bfloat16")
    if own not in ("bfloat16", "float16", "float32"):
        notes.append(f"query dtype bfloat16, as the config's dtype is {own}")
        own = "bfloat16"
    return {"query_dtype": own, "out_dtype": own}


def model_kinds(config: Config, *, tp: int = 1, kv_dtype: str = "auto", name: str = "", **fields: Any) -> Model:
    """The attention of a model on one rank, layer kind by layer kind.

    Args:
        config: a config.json as a dictionary (`configs.load_config`), with or without a nested text_config.
        tp: ranks that the heads are divided over. KV heads are copied where there are more ranks than heads.
        kv_dtype: of the cache; "auto" follows the checkpoint.
        name: what to call the model.
        fields: further fields of AttentionSpec: page_size, layout, max_query_len, precision, ... They win over the
            config's; scale_granularity=None or none is the checkpoint's, or tensor.

    Raises:
        InvalidInput: a key that is needed is not there, tp does not divide the heads, or the dtypes clash.
        Unsupported: attention that no spec describes; the reasons name the keys found.
    """
    positive("tp", tp)
    try:
        return _model_kinds(config, tp, kv_dtype, name, fields)
    except OctavoError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        # A config is anybody's JSON: a key of another type than its family's fails wherever it is first used.
        raise InvalidInput("the config's values must have the types of its family", f"{error}") from error


def _model_kinds(config: Config, tp: int, kv_dtype: str, name: str, fields: dict[str, Any]) -> Model:
    text = text_config(config)
    if integer(text, "num_hidden_layers") > MOST_LAYERS:
        raise InvalidInput(f"the config needs num_hidden_layers of at most {MOST_LAYERS}", text["num_hidden_layers"])
    _refuse_others(config, text)
    family = str(text.get("model_type") or config.get("model_type") or "unnamed")
    notes: list[str] = []
    if family not in FAMILIES:
        notes.append(f"family {family} is not one octavo is checked against: taken as a plain decoder")
    types = layer_types(text)
    fields["kv_dtype"], why = resolve_kv_dtype(config, kv_dtype)
    notes.append(why)
    if fields.get("scale_granularity") is None:
        declared = checkpoint_kv(config)
        taken = declared is not None and not declared.reasons and fields["kv_dtype"] == "fp8_e4m3"
        fields["scale_granularity"] = declared.granularity if declared and taken else "tensor"
    elif (declared := checkpoint_kv(config)) and declared.granularity != fields["scale_granularity"]:
        given = fields["scale_granularity"]
        notes.append(f"scales per {given}, as given: the checkpoint's, per {declared.granularity}, are not used")
    common = {**_head_fields(text, tp, notes), **_dtypes(text, notes)}
    alibi = text.get("alibi") or family == "bloom" or (text.get("attn_config") or {}).get("alibi")
    common |= {
        "softcap": text.get("attn_logit_softcapping") or None,
        "sinks": family == "gpt_oss",
        "alibi": bool(alibi),
    }
    # Encoders made of decoders look both ways, and transformers halves their window then.
    both_ways = text.get("use_bidirectional_attention") in (True, "all")
    common["causal"] = not both_ways
    if config.get("vision_config") and family.startswith("gemma3"):
        notes.append(
            "text only: the mask of image tokens, which see each other, is prefix_mask, and nothing runs it yet"
        )
    kinds = []
    for kind in dict.fromkeys(t for t in types if t != "none"):
        own: dict[str, Any] = {}
        if kind == "sliding_window":
            window = integer(text, "sliding_window")
            own["window"] = window // 2 + 1 if both_ways else window
        elif kind == "chunked":
            own["attention_chunk"] = integer(text, "attention_chunk_size")
        spec = AttentionSpec(**{**common, **own, **fields})
        kinds.append(LayerKind(spec.kind, tuple(i for i, t in enumerate(types) if t == kind), spec))
    if "none" in types:
        notes.append(f"{types.count('none')} of {len(types)} layers have no attention and no KV cache")
    if not kinds:
        raise Unsupported(
            f"no attention spec for {family}", ["needs a layer with attention; found none in layer_types"]
        )
    first = kinds[0].spec
    indexer = _indexer(text, first.page_size, first.max_query_len)
    if indexer is not None:
        notes.append(
            f"sparse attention: an indexer of {indexer.num_heads} heads of {indexer.head_dim} in every layer picks "
            f"{text.get('index_topk', 2048)} tokens; the plan is that of dense attention over the latent"
        )
    return Model(name or family, family, tp, tuple(kinds), indexer, tuple(notes))
