"""Reading a Hugging Face config.json: where it is, its decoder's part, and the KV cache a checkpoint declares."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidInput, Unsupported
from .known_models import ALIASES, DEFAULTS, KNOWN_MODELS
from .spec import dtype_name

Config = Mapping[str, Any]
# A compressed-tensors kv_cache_scheme whose scales octavo reads: key to the values that it may have.
_E4M3_SCHEME: dict[str, tuple[Any, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "dynamic": (False, None),
    "symmetric": (True, None),
    "strategy": ("tensor", "attn_head", "head", None),
}


@dataclass(frozen=True)
class DeclaredCache:
    """The KV cache that a checkpoint declares.

    Attributes:
        source: where it says so, for messages.
        granularity: tensor or head.
        reasons: why octavo cannot follow it; empty where it is FP8 (e4m3) with static symmetric scales.
    """

    source: str
    granularity: str = "tensor"
    reasons: tuple[str, ...] = ()

    def dtype(self, asked: str) -> str:
        """The cache's dtype: as asked, and with "auto" the declared fp8_e4m3.

        Raises Unsupported for "auto" where octavo cannot follow, and for e5m2 with scales that are e4m3's.
        """
        if asked == "auto" and self.reasons:
            what = f"kv cache dtype auto cannot follow {self.source}"
            raise Unsupported(what, self.reasons, "an explicit kv cache dtype")
        if asked == "fp8_e5m2" and not self.reasons:
            reason = f"{self.source} has scales made for fp8_e4m3; the kv cache dtype is {asked}"
            raise Unsupported(f"{asked} cannot use the checkpoint's KV scales", [reason], "kv cache dtype fp8_e4m3")
        return "fp8_e4m3" if asked == "auto" else asked


def load_config(model: str | os.PathLike[str]) -> dict[str, Any]:
    """The config of a known name, or of a folder or file that holds a config.json. InvalidInput if it cannot be read.

    A folder's hf_quant_config.json (ModelOpt) is read too, where config.json declares no KV cache.
    """
    if str(model).lower() in KNOWN_MODELS:
        return KNOWN_MODELS[str(model).lower()]
    path = Path(model)
    if not path.exists():
        raise InvalidInput(
            f"model must be one of {', '.join(KNOWN_MODELS)}, or a folder or file with a config.json", repr(str(model))
        )
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path)
    quant = path.parent / "hf_quant_config.json"
    if checkpoint_kv(config) is None and quant.exists():
        config["quantization_config"] = {**(config.get("quantization_config") or {}), **read_json(quant)}
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InvalidInput where there is none."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        raise InvalidInput(f"{path} must be a readable JSON file", str(error)) from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} must hold a JSON object", type(config).__name__)
    return config


def text_config(config: Config) -> dict[str, Any]:
    """The decoder's part of a config: a nested text_config if there is one, with what its family leaves out."""
    nested = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), Mapping)), None)
    text = dict(config if nested is None else nested)
    for key in ("torch_dtype", "dtype", "quantization_config"):
        if text.get(key) is None and config.get(key) is not None:
            text[key] = config[key]
    for key, others in ALIASES.items():
        for other in others:
            if text.get(key) is None and text.get(other) is not None:
                text[key] = text[other]
    return {**DEFAULTS.get(text.get("model_type", ""), {}), **text}


def integer(text: Config, key: str) -> int:
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(
            f"the config needs {key}, a positive integer", "no such key" if value is None else repr(value)
        )
    return value


def checkpoint_kv(config: Config) -> DeclaredCache | None:
    """What a config's quantization_config declares for the KV cache, or None if nothing.

    Reads compressed-tensors' kv_cache_scheme, also inside ModelOpt's own block, and ModelOpt's kv_cache_quant_algo.
    """
    quant = text_config(config).get("quantization_config")
    if not isinstance(quant, Mapping):
        return None
    inner = quant.get("quantization_config")
    scheme = quant.get("kv_cache_scheme") or (inner.get("kv_cache_scheme") if isinstance(inner, Mapping) else None)
    if scheme and not isinstance(scheme, Mapping):
        reason = f"kv_cache_scheme must be an object; it is {scheme!r}"
        return DeclaredCache("quantization_config's kv_cache_scheme", "tensor", (reason,))
    if isinstance(scheme, Mapping):
        reasons = []
        for key, followed in _E4M3_SCHEME.items():
            value = getattr(scheme.get(key), "value", scheme.get(key))  # an enum, where a library parsed the config
            if value not in followed:
                known = " or ".join(str(a) for a in followed if a is not None)
                reasons.append(f"kv_cache_scheme's {key} must be {known}; it is {value}")
        granularity = "head" if scheme.get("strategy") in ("attn_head", "head") else "tensor"
        source = f"{quant.get('quant_method', 'quantization_config')}'s kv_cache_scheme"
        return DeclaredCache(source, granularity, tuple(reasons))
    nested = quant.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else quant).get("kv_cache_quant_algo")
    if not algorithm:
        return None
    reasons = [] if str(algorithm).upper() == "FP8" else [f"kv_cache_quant_algo must be FP8; it is {algorithm}"]
    return DeclaredCache("ModelOpt's kv_cache_quant_algo", "tensor", tuple(reasons))


def resolve_kv_dtype(config: Config, asked: str = "auto") -> tuple[str, str]:
    """(kv dtype, one line that says why). An explicit dtype wins; "auto" follows the checkpoint.

    Raises Unsupported as `DeclaredCache.dtype` does.
    """
    declared, given = checkpoint_kv(config), dtype_name(asked)
    if declared is None and given == "auto":
        own = dtype_name(text_config(config).get("dtype") or "bfloat16")
        own = own if own in ("bfloat16", "float16", "float32") else "bfloat16"  # weights may be of fewer bits
        return own, f"kv cache dtype auto: {own}, as the checkpoint declares no KV scales"
    if declared is None:
        no_scales = "; no KV scales in the config: 1.0" if "fp8" in given else ""
        return given, f"kv cache dtype {given}, as given{no_scales}"
    dtype = declared.dtype(given)
    if given == "auto":
        return dtype, f"kv cache dtype auto: {dtype}, as {declared.source} declares, a scale per {declared.granularity}"
    used = "used" if dtype == "fp8_e4m3" and not declared.reasons else "not used"
    return dtype, f"kv cache dtype {dtype}, as given; the scales of {declared.source} are {used}"
