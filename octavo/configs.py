"""Reading a Hugging Face config.json: where it is, its decoder's part, and the KV cache a checkpoint declares."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
    config = _read_json(path)
    quant = path.parent / "hf_quant_config.json"
    if checkpoint_kv(config) is None and quant.exists():
        config["quantization_config"] = {**(config.get("quantization_config") or {}), **_read_json(quant)}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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


def checkpoint_kv(config: Config) -> tuple[str, str] | None:
    """(kv dtype, scale granularity) that a checkpoint declares for its KV cache, or None if it declares none.

    Reads compressed-tensors' kv_cache_scheme and ModelOpt's kv_cache_quant_algo. A format octavo does not have comes
    back under its own name.
    """
    quant = text_config(config).get("quantization_config")
    if not isinstance(quant, Mapping):
        return None
    inner = quant.get("quantization_config")
    scheme = quant.get("kv_cache_scheme") or (inner.get("kv_cache_scheme") if isinstance(inner, Mapping) else None)
    if isinstance(scheme, Mapping):
        other = [
            f"{key} {scheme.get(key)}" for key, followed in _E4M3_SCHEME.items() if scheme.get(key) not in followed
        ]
        name = f"a kv_cache_scheme of {', '.join(other)}" if other else "fp8_e4m3"
        return name, "head" if scheme.get("strategy") in ("attn_head", "head") else "tensor"
    nested = quant.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else quant).get("kv_cache_quant_algo")
    if not algorithm:
        return None
    return ("fp8_e4m3" if str(algorithm).upper() == "FP8" else str(algorithm)), "tensor"


def resolve_kv_dtype(config: Config, asked: str = "auto", name: str = "the checkpoint") -> tuple[str, str]:
    """(kv dtype, one line that says why). An explicit dtype wins; "auto" follows the checkpoint.

    Raises Unsupported for e5m2 on a checkpoint whose KV scales are e4m3's, and for "auto" on a checkpoint whose KV
    format octavo does not have.
    """
    declared = checkpoint_kv(config)
    given = dtype_name(asked)
    if given == "auto":
        if declared is None:
            own = dtype_name(text_config(config).get("dtype") or "bfloat16")
            return own, f"kv cache dtype auto: {own}, as {name} has no KV scales"
        if declared[0] != "fp8_e4m3":
            raise Unsupported(
                f"kv cache dtype auto cannot follow {name}", [f"needs FP8 (e4m3) KV scales; found {declared[0]}"],
                "an explicit kv cache dtype",
            )  # fmt: skip
        return "fp8_e4m3", f"kv cache dtype auto: fp8_e4m3, as {name} has e4m3 KV scales (per {declared[1]})"
    if declared is None:
        return given, f"kv cache dtype {given}, as given" + (
            "; no KV scales in the config: 1.0" if "fp8" in given else ""
        )
    if given == "fp8_e5m2" and declared[0] == "fp8_e4m3":
        reason = f"needs kv cache dtype fp8_e4m3 or a 16-bit one, as {name}'s KV scales are e4m3's; found {given}"
        raise Unsupported(f"{given} cannot use the KV scales of {name}", [reason], "kv cache dtype fp8_e4m3")
    used = "used" if given == declared[0] else "not used"
    return given, f"kv cache dtype {given}, as given; {name}'s KV scales ({declared[0]}, per {declared[1]}) are {used}"
