"""KV-cache schemes and scales that a checkpoint declares: compressed-tensors and ModelOpt, per tensor and per head.

Both store scales with x = stored * scale, the convention of this library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..configs import DeclaredCache, checkpoint_kv, load_config, read_json
from ..errors import InvalidInput
from ..formats import check_scale
from ..notices import log

# layers.3.self_attn.k_scale (compressed-tensors), .self_attn.k_proj.k_scale (ModelOpt), .self_attn.attn.k_scale (vLLM)
_SCALE = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:[kv]_proj\.|attn\.)?([kv])_scale$")
_ZERO_POINT = re.compile(r"(?:^|\.)layers\.\d+\.self_attn\.(?:[kv]_proj\.|attn\.)?[kv]_zero_point$")
_OTHER_TOWERS = ("vision", "audio")  # their layers carry the same names


@dataclass
class CheckpointScales:
    """What a checkpoint says about its KV cache.

    Attributes:
        declared: what its config declares, or that its tensors hold scales; None where neither speaks of the cache.
        k, v: fp32 scales by layer, [] or [Hk].
    """

    declared: DeclaredCache | None = None
    k: dict[int, torch.Tensor] = field(default_factory=dict)
    v: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def granularity(self) -> str:
        """head if any scale is per head, else tensor."""
        return "head" if any(s.dim() for s in (*self.k.values(), *self.v.values())) else "tensor"


def read(folder: Path | None, config: Any, num_kv_heads: int, asked: str) -> CheckpointScales:
    """What the checkpoint in `folder` (None: only `config`) says. Raises InvalidInput for a bad scale.

    config: the loaded model's config, asked where the folder has no config.json. asked: the kv_cache_dtype wanted; the
    scales themselves are read (and checked) only where an FP8 cache would use them.
    """
    found = CheckpointScales(checkpoint_kv(_config(folder, config)))
    followed = found.declared is None or not found.declared.reasons
    wanted = asked.startswith("fp8") or (asked == "auto" and found.declared is not None)
    if folder is not None and wanted and followed:
        _read_tensors(folder, found, num_kv_heads)
    return found


def _config(folder: Path | None, config: Any) -> dict[str, Any]:
    """The checkpoint's config as it lies in its folder, else what the loaded model kept of its quantization_config."""
    if folder is not None and (folder / "config.json").is_file():
        return load_config(folder)
    return {"quantization_config": _as_dict(getattr(config, "quantization_config", None))}


def choose_dtype(asked: str, model_dtype: str, found: CheckpointScales, explicit_scales: bool) -> str:
    """The cache's dtype: as asked, or with "auto" what the checkpoint declares, else the model's; one log line.

    Raises Unsupported as `DeclaredCache.dtype` does; for e5m2, unless all scales are given. An explicit FP8 cache on a
    scheme that cannot be followed leaves its scales unused, which is said.
    """
    declared = found.declared
    if declared is None:
        if asked != "auto":
            return asked
        log.info("kv_cache_dtype=auto: %s, the model's, as the checkpoint declares no KV-cache scheme", model_dtype)
        return model_dtype
    dtype = asked if explicit_scales and asked != "auto" else declared.dtype(asked)
    if asked == "auto":
        log.info("kv_cache_dtype=auto: %s, as %s declares", dtype, declared.source)
    elif declared.reasons and asked.startswith("fp8"):
        why = "; ".join(declared.reasons)
        log.warning("kv_cache_dtype=%s, as asked; its scales are 1.0 unless given: %s", asked, why)
        found.k.clear()
        found.v.clear()
    elif not declared.reasons and asked != "fp8_e4m3":
        log.info("kv_cache_dtype=%s, as asked; %s declares fp8_e4m3", asked, declared.source)
    return dtype


def per_layer(
    name: str, given: Any, read: dict[int, torch.Tensor], num_layers: int, shape: tuple[int, ...], *, expected: bool
) -> list[torch.Tensor]:
    """One fp32 scale of `shape` ([] or [Hk]) a layer.

    given: a number, a tensor, a list or a dict by layer; None: `read`, the checkpoint's. A layer without one has 1.0,
    which is said, for all layers at once, where scales were `expected`. Raises InvalidInput for a bad scale.
    """
    if given is None:
        by_layer = {layer: scale for layer, scale in read.items() if layer < num_layers}  # no draft layers
    elif isinstance(given, dict):
        by_layer = given
    elif isinstance(given, (list, tuple)):
        if len(given) != num_layers:
            raise InvalidInput(f"{name} must have one entry for each of {num_layers} layers", len(given))
        by_layer = dict(enumerate(given))
    else:
        by_layer = dict.fromkeys(range(num_layers), given)
    unknown = [layer for layer in by_layer if layer not in range(num_layers)]
    if unknown:
        raise InvalidInput(f"{name} must be of layers 0 to {num_layers - 1}", unknown)
    missing = [str(layer) for layer in range(num_layers) if layer not in by_layer]
    if missing and expected:
        log.warning("%s is missing for layers %s: it is 1.0 there", name, ", ".join(missing))
    scales = []
    for layer in range(num_layers):
        raw: Any = by_layer.get(layer, 1.0)  # whatever a caller put there: check_scale refuses what is no scale
        single = not isinstance(raw, torch.Tensor) or raw.numel() == 1
        check_scale(f"{name} of layer {layer}", raw, () if single else shape)
        scale = torch.as_tensor(raw).detach().to("cpu", torch.float32)
        scales.append((scale.reshape(()) if single else scale).expand(shape).clone())
    return scales


def folder_of(model: Any) -> Path | None:
    """The local folder that the model was loaded from, a hub snapshot included; None if there is none."""
    name = getattr(model.config, "_name_or_path", "") or ""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # not a name that the hub could have
        return None
    return Path(found).parent if found else None


def _read_tensors(folder: Path, found: CheckpointScales, num_kv_heads: int) -> None:
    """Fill `found` from the folder's safetensors files, opening only those that hold scales."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map", {}) if index.is_file() else {}
    holding = {folder / file for key, file in weight_map.items() if _SCALE.search(key) or _ZERO_POINT.search(key)}
    for file in sorted(holding) if weight_map else files:
        with safe_open(str(file), framework="pt") as tensors:
            for key in list(tensors.keys()):
                if any(tower in key for tower in _OTHER_TOWERS):
                    continue
                if match := _SCALE.search(key):
                    layer, kind = int(match[1]), match[2]
                    scale = _scale(key, tensors.get_tensor(key), num_kv_heads)
                    (found.k if kind == "k" else found.v)[layer] = scale
                    found.declared = found.declared or DeclaredCache("the checkpoint")
                elif _ZERO_POINT.search(key) and bool((tensors.get_tensor(key).to(torch.float32) != 0).any()):
                    declared = found.declared or DeclaredCache("the checkpoint")
                    reason = f"the KV cache must be symmetric; {key} is not 0"
                    found.declared = replace(declared, reasons=(*declared.reasons, reason))


def _scale(key: str, stored: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    if stored.numel() not in (1, num_kv_heads):
        raise InvalidInput(f"{key} must have 1 or {num_kv_heads} elements", f"shape {list(stored.shape)}")
    scale = stored.to(torch.float32).reshape(() if stored.numel() == 1 else (num_kv_heads,))
    check_scale(key, scale, tuple(scale.shape))
    return scale


def _as_dict(thing: Any) -> dict[str, Any]:
    if thing is None or isinstance(thing, dict):
        return thing or {}
    for method in ("to_dict", "model_dump"):
        if hasattr(thing, method):
            return getattr(thing, method)()
    return {}
