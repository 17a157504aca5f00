"""A copy of a checkpoint's folder that declares its KV scales as compressed-tensors does: engines read them from there.

Weights are hard-linked where the file system can, else copied. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..configs import read_json
from ..errors import InvalidInput
from .calibrate import Calibration

SCALES_FILE = "kv_cache_scales.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ATTENTION = re.compile(r"^(.*\blayers\.(\d+)\.self_attn)\.")


def write_checkpoint(found: Calibration, source: Path, out: Path) -> None:
    """Write `out`: the checkpoint in the folder `source` with k_scale and v_scale beside each layer's attention.

    Raises InvalidInput for a source without safetensors, one that is quantised already in another way, scales that are
    not e4m3's, and an `out` that exists.
    """
    config, weight_map = _prepared(source, out, found.kv_dtype, found.granularity)
    scales = _tensors(found, weight_map)
    weight_map |= dict.fromkeys(scales, SCALES_FILE)
    try:
        _write(config, weight_map, scales, source, out.absolute())
    except OSError as error:  # a folder that cannot be written, a disk that is full
        raise InvalidInput(f"{out} must be writable", error.strerror) from error


def _write(
    config: dict[str, Any], weight_map: dict[str, str], scales: dict[str, torch.Tensor], source: Path, out: Path
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for path in source.iterdir():
            if path.is_file() and path.name not in ("config.json", INDEX_FILE, SCALES_FILE):
                _link(path.resolve(), temporary / path.name)
        from safetensors.torch import save_file

        save_file(scales, temporary / SCALES_FILE, {"format": "pt"})
        total = sum(p.stat().st_size for p in temporary.glob("*.safetensors"))
        _write_json(temporary / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(temporary / "config.json", config)
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_checkpoint(source: Path, out: Path, kv_dtype: str, granularity: str, layers: int) -> None:
    """Raise what `write_checkpoint` would raise, before there are scales."""
    _, weight_map = _prepared(source, out, kv_dtype, granularity)
    _attention_names(weight_map, list(range(layers)))


def _prepared(source: Path, out: Path, kv_dtype: str, granularity: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The config that declares the scales, and the weight map of the source; InvalidInput where there can be none."""
    if kv_dtype != "fp8_e4m3":
        raise InvalidInput("compressed-tensors holds scales of fp8_e4m3", kv_dtype)
    if out.exists():
        raise InvalidInput(f"{out} must not exist yet")
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if not files:
        raise InvalidInput(f"{source} must be a model's folder with safetensors files")
    config = read_json(source / "config.json")
    config["quantization_config"] = _scheme(config.get("quantization_config"), granularity)
    return config, _weight_map(source, files)


def _scheme(present: Any, granularity: str) -> dict[str, Any]:
    """quantization_config with a kv_cache_scheme: the one that is there, or one that quantises nothing else."""
    method = present.get("quant_method") if isinstance(present, dict) else present
    if present and method != "compressed-tensors":
        raise InvalidInput("the checkpoint must not be quantised, or with compressed-tensors", repr(method))
    plain = {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen"}
    strategy = "tensor" if granularity == "tensor" else "attn_head"
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    return {"config_groups": {}, "ignore": [], **plain, **(present or {}), "kv_cache_scheme": scheme}


def _weight_map(source: Path, files: list[Path]) -> dict[str, str]:
    """Name of each tensor -> its file."""
    if (source / INDEX_FILE).is_file():
        listed = read_json(source / INDEX_FILE).get("weight_map")
        if not isinstance(listed, dict):
            raise InvalidInput(f"{source / INDEX_FILE} must hold a weight_map", type(listed).__name__)
        return dict(listed)
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file.name)
    return found


def _tensors(found: Calibration, weight_map: dict[str, str]) -> dict[str, torch.Tensor]:
    """The scales by the names of the checkpoint's own layers."""
    names = _attention_names(weight_map, [layer["layer"] for layer in found.layers])
    return {
        f"{names[layer['layer']]}.{side}_scale": torch.tensor(layer[side]["scale"], dtype=torch.float32).reshape(-1)
        for layer in found.layers
        for side in ("k", "v")
    }


def _attention_names(weight_map: dict[str, str], layers: list[int]) -> dict[int, str]:
    """What the checkpoint calls the attention of each layer."""
    names: dict[int, str] = {}
    for name in weight_map:
        if match := _ATTENTION.match(name):
            names.setdefault(int(match[2]), match[1])
    missing = [layer for layer in layers if layer not in names]
    if missing:
        raise InvalidInput("the checkpoint must have a self_attn of every layer", f"none of layers {missing}")
    return names


def _link(source: Path, to: Path) -> None:
    try:
        os.link(source, to)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, to)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
