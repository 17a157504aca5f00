"""What octavo needs to know of a transformers model: which modules attend, and the spec of each layer.

The facts are read from the modules; `FAMILIES` lists the model types that are tested against eager attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import Unsupported
from ..layouts import layout_reasons
from ..spec import AttentionSpec, dtype_name


@dataclass(frozen=True)
class Family:
    """How one model type says what its attention does; each function takes (module, config)."""

    window: Callable[[Any, Any], int | None] = lambda module, config: getattr(module, "sliding_window", None)
    softcap: Callable[[Any, Any], float | None] = lambda module, config: None
    sinks: bool = False
    mla: bool = False


FAMILIES = {
    "llama": Family(window=lambda module, config: None),
    "qwen2": Family(),
    "qwen3": Family(),
    "mistral": Family(window=lambda module, config: config.sliding_window),
    "gpt_oss": Family(sinks=True),
    "gemma2": Family(softcap=lambda module, config: module.attn_logit_softcapping),
    "gemma3_text": Family(),
    "deepseek_v3": Family(window=lambda module, config: None, mla=True),
}


@dataclass(frozen=True)
class Shard:
    """Which part of every layer's heads this process holds under transformers' tensor parallel plan."""

    rank: int = 0
    size: int = 1

    def of(self, heads: torch.Tensor) -> torch.Tensor:
        """Its part of something with one entry for each head of the whole model; a single number is everyone's."""
        return heads.chunk(self.size)[self.rank].clone() if heads.dim() else heads


@dataclass(frozen=True)
class Attending:
    """The text decoder of a model and its attention modules in the order of their layers."""

    decoder: torch.nn.Module
    config: Any
    family: Family
    modules: list[Any]
    device: torch.device
    dtype: torch.dtype
    shard: Shard


def attending(model: Any) -> Attending:
    """Find them. Raises Unsupported, with every reason, for a model whose attention octavo would get wrong."""
    config = model.config.get_text_config(decoder=True)
    kind = config.model_type
    if kind not in FAMILIES:
        raise Unsupported(f"model type {kind}", [f"model type must be one of {', '.join(FAMILIES)}; it is {kind}"])
    decoder = model.get_decoder()
    modules = [m for m in decoder.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
    modules.sort(key=lambda module: module.layer_idx)
    devices = {module.o_proj.weight.device for module in modules}
    reasons = []
    layers = [module.layer_idx for module in modules]
    if layers != list(range(config.num_hidden_layers)):
        reasons.append(f"layers 0 to {config.num_hidden_layers - 1} must have one attention module; found {layers}")
    if len(devices) > 1:
        reasons.append(f"all layers must be on one device; they are on {', '.join(sorted(map(str, devices)))}")
    if not getattr(config, "is_causal", True) or not all(getattr(module, "is_causal", True) for module in modules):
        reasons.append("attention must be causal; this model attends in both directions")
    family = FAMILIES[kind]
    if family.mla:
        reasons += _latent_reasons(modules)
    if reasons:
        raise Unsupported(f"this {kind} model", reasons)
    weight = modules[0].o_proj.weight
    shard = _shard(weight)
    if shard.size > 1:
        _refuse_tensor_parallel(kind, family, config, shard.size)
    dtype = weight.dtype if weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else model.dtype
    return Attending(decoder, config, family, modules, weight.device, dtype, shard)


def _shard(weight: Any) -> Shard:
    """How the output projection [hidden, heads * dim] is divided: by its second dimension, or not at all."""
    if not hasattr(weight, "to_local"):
        return Shard()
    size = weight.shape[1] // weight.to_local().shape[1]
    if size == 1:
        return Shard()
    mesh_dim = next(dim for dim, placement in enumerate(weight.placements) if placement.is_shard(1))
    return Shard(weight.device_mesh.get_local_rank(mesh_dim), size)


def _refuse_tensor_parallel(kind: str, family: Family, config: Any, size: int) -> None:
    """Raise Unsupported where the ranks' shares of the heads would not be what each layer attends with."""
    reasons = []
    if family.mla or family.sinks:
        plain = ", ".join(name for name, other in FAMILIES.items() if not (other.mla or other.sinks))
        reasons.append(f"tensor parallel needs one of {plain}; the model type is {kind}")
    if config.num_key_value_heads % size:
        reasons.append(f"each rank must hold whole KV heads; there are {config.num_key_value_heads} for {size} ranks")
    if reasons:
        raise Unsupported(f"this {kind} model on {size} ranks", reasons)


def layer_specs(
    found: Attending, kv_dtype: str, page_size: int, layout: str | None, granularity: str, precision: str = "fast"
) -> list[AttentionSpec]:
    """The spec of each layer; layout None is leaf where it can hold the spec, else nhd."""
    specs = []
    for module in found.modules:
        spec = AttentionSpec(
            **_heads(module, found),
            query_dtype=dtype_name(found.dtype),
            kv_dtype=kv_dtype,
            out_dtype=dtype_name(found.dtype),
            page_size=page_size,
            layout=layout or "leaf",
            scale_granularity=granularity,
            precision=precision,
            softmax_scale=float(module.scaling),
            window=found.family.window(module, found.config),
            sinks=found.family.sinks,
            softcap=found.family.softcap(module, found.config),
        )
        specs.append(replace(spec, layout="nhd") if layout is None and layout_reasons(spec) else spec)
    return specs


def _heads(module: Any, found: Attending) -> dict[str, Any]:
    if found.family.mla:
        latent = module.kv_lora_rank
        return {
            "num_q_heads": module.num_heads,
            "num_kv_heads": 1,
            "head_dim": latent + module.qk_rope_head_dim,
            "head_dim_v": latent,
            "mla": True,
        }
    heads = found.config.num_attention_heads // found.shard.size
    return {"num_q_heads": heads, "num_kv_heads": heads // module.num_key_value_groups, "head_dim": module.head_dim}


def _latent_reasons(modules: list[Any]) -> list[str]:
    """The up-projection is multiplied into query and output, so it must be a plain matrix."""
    for module in modules:
        projection = module.kv_b_proj
        if type(projection) is not torch.nn.Linear or projection.bias is not None:
            return [f"kv_b_proj must be a plain Linear without bias; it is {type(projection).__name__}"]
        if projection.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return [f"kv_b_proj must be of 16 or 32 bits; it is {dtype_name(projection.weight.dtype)}"]
    return []


def absorb_query(module: Any, query: torch.Tensor) -> torch.Tensor:
    """MLA query [B, H, T, nope + rope] -> over the latent: [B, H, T, rank + rope], by the key half of kv_b_proj."""
    nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    up = _up_projection(module)[:, : module.qk_nope_head_dim]
    return torch.cat([torch.einsum("bhtn,hnr->bhtr", nope, up), rope], dim=-1)


def absorb_output(module: Any, out: torch.Tensor) -> torch.Tensor:
    """Attended latents [T, H, rank] -> values [T, H, v_head_dim], by the value half of kv_b_proj."""
    return torch.einsum("thr,hvr->thv", out, _up_projection(module)[:, module.qk_nope_head_dim :])


def _up_projection(module: Any) -> torch.Tensor:
    per_head = module.qk_nope_head_dim + module.v_head_dim
    return module.kv_b_proj.weight.view(module.num_heads, per_head, module.kv_lora_rank)
