"""What a vLLM configuration asks of octavo, as an AttentionSpec, and why octavo cannot do it, in octavo's words."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..device import Device, from_properties
from ..errors import InvalidInput, Unsupported
from ..layouts import layout_reasons
from ..spec import AttentionSpec, dtype_name
from ._kernel_reasons import kernel_reasons
from ._vllm_releases import KERNEL_BLOCKS, PREFERRED_BLOCK, decode_rows, kernel_block, precision

KV_DTYPES = {
    "auto": None,  # the model's
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
MLA_VALUE = 512  # elements of DeepSeek's latent that are the value


def layer_spec(
    heads: tuple[int, int], head_size: int, dtype: Any, kv_cache_dtype: str | None, **fields: Any
) -> AttentionSpec:
    """The spec of a vLLM layer: leaf pages for FP8, where they can hold its heads, else the heads' own order."""
    query = dtype_name(dtype)
    spec = AttentionSpec(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_size,
        query_dtype=query,
        out_dtype=query,
        kv_dtype=KV_DTYPES[kv_cache_dtype or "auto"] or query,
        **{"page_size": PREFERRED_BLOCK, "layout": "hnd", **fields},
    )
    leaf = replace(spec, layout="leaf")
    dims_fit = not layout_reasons(replace(leaf, page_size=PREFERRED_BLOCK))
    return leaf if spec.fp8 and dims_fit else spec


def device_of_capability(capability: Any) -> Device:
    """The GPU as vLLM knows it; no CUDA context is made, so that vLLM may still fork."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return Device.detect()
    major, minor = (capability.major, capability.minor) if hasattr(capability, "major") else capability
    facts = SimpleNamespace(
        name=current_platform.get_device_name(), major=major, minor=minor, multi_processor_count=0, total_memory=0
    )
    return from_properties(facts)


def device_here() -> Device:
    """The GPU that this process runs on, by vLLM's word."""
    from vllm.platforms import current_platform

    return device_of_capability(current_platform.get_device_capability())


def check(spec: AttentionSpec, device: Device) -> None:
    """Raise Unsupported, with every reason, unless a kernel runs `spec` on `device`."""
    reasons = kernel_reasons(spec, device)
    if reasons:
        raise Unsupported("octavo cannot run this attention layer of vLLM's", reasons)


def configuration_reasons(asked: dict[str, Any], vllm_config: Any) -> list[str]:
    """Why octavo cannot be the backend of what vLLM's selector asks: one sentence each, empty if it can.

    asked: the arguments of vLLM's validate_configuration by name; what an older vLLM lacks is as good as not asked.
    """
    reasons = [sentence for wanted, sentence in NOT_AT_ALL if asked.get(wanted)]
    kv_cache_dtype, attn_type = asked["kv_cache_dtype"], str(getattr(asked["attn_type"], "value", asked["attn_type"]))
    if attn_type != "decoder":
        reasons.append(f"needs decoder attention over a KV cache; found {attn_type}")
    if (kv_cache_dtype or "auto") not in KV_DTYPES:
        reasons.append(f"needs kv_cache_dtype {', '.join(KV_DTYPES)}; found {kv_cache_dtype}")
        kv_cache_dtype = None
    block_size = asked["block_size"]
    if block_size is not None and kernel_block(block_size) is None:
        sizes = ", ".join(map(str, sorted(KERNEL_BLOCKS)))
        reasons.append(f"needs a block_size that is a multiple of one of {sizes}; found {block_size}")
    if vllm_config is not None:
        reasons += parallel_reasons(vllm_config, asked)
    try:
        spec = configuration_spec({**asked, "kv_cache_dtype": kv_cache_dtype}, vllm_config)
    except InvalidInput as malformed:
        return [*reasons, str(malformed)]
    return reasons + kernel_reasons(spec, device_of_capability(asked["device_capability"]))


NOT_AT_ALL = (
    (
        "use_sparse",
        "needs dense attention; found sparse attention (octavo has the indexer's logits, not the sparse kernel)",
    ),
    ("use_pcp", "needs no prefill context parallelism; found prefill_context_parallel_size above 1"),
    ("use_rswa", "needs a plain sliding window; found reference sliding window attention"),
)


def parallel_reasons(vllm_config: Any, asked: dict[str, Any]) -> list[str]:
    """Why octavo cannot share a sequence's cache among ranks as configured."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return []
    found = []
    if parallel.cp_kv_cache_interleave_size != 1:
        found.append(
            "decode context parallelism needs cp_kv_cache_interleave_size 1; "
            f"found {parallel.cp_kv_cache_interleave_size}"
        )
    heads = _head_counts(vllm_config)[1]
    if heads != 1:
        found.append(f"decode context parallelism needs one KV head a rank; found {heads}")
    for wanted, words in (("has_sliding_window", "no sliding window"), ("has_sink", "no attention sinks")):
        if asked.get(wanted):
            found.append(f"decode context parallelism needs {words}; found {wanted}")
    return found


def configuration_spec(asked: dict[str, Any], vllm_config: Any) -> AttentionSpec:
    """The spec of what vLLM's selector asks, as far as it is known then: the head counts are the model's."""
    ranks = 1 if vllm_config is None else vllm_config.parallel_config.decode_context_parallel_size
    head_size, fields = asked["head_size"], {}
    heads = _head_counts(vllm_config)
    if asked["use_mla"]:
        heads = (heads[0], 1)
        fields = {"mla": True, "head_dim_v": min(MLA_VALUE, head_size), "layout": "nhd"}
    block_size = asked["block_size"]
    return layer_spec(
        (heads[0] * ranks, heads[1]),
        head_size,
        asked["dtype"],
        asked["kv_cache_dtype"],
        page_size=kernel_block(block_size or PREFERRED_BLOCK) or PREFERRED_BLOCK,
        scale_granularity="head" if asked["use_per_head_quant_scales"] else "tensor",
        causal=not asked.get("use_non_causal", False),
        window=1 if asked.get("has_sliding_window") else None,
        sinks=bool(asked["has_sink"]),
        lse=ranks > 1,
        max_query_len=1 if vllm_config is None or ranks > 1 else decode_rows(vllm_config),
        batch_invariant=bool(asked.get("use_batch_invariant")),
        prefix_mask=bool(asked["use_mm_prefix"]),
        precision=precision(vllm_config),
        **fields,
    )


def _head_counts(vllm_config: Any) -> tuple[int, int]:
    """Query and KV heads of a rank; 1 and 1 where the model has no such counts, as layers of mixed models."""
    model = getattr(vllm_config, "model_config", None)
    if model is None:
        return (1, 1)
    query = model.get_num_attention_heads(vllm_config.parallel_config)
    kv = model.get_num_kv_heads(vllm_config.parallel_config)
    return (query, kv) if kv and query % kv == 0 else (1, 1)
