"""A model for serving: read without running anything a checkpoint brings, on its device or this rank's share of it.

Weights come from safetensors or GGUF files; pickled ones are refused, and code in a checkpoint is never run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput
from ..integrations.transformers import Handle, enable
from ..quality import load as quality_load
from ..quality import smollm2
from ..quality.load import LoadedModel
from ..spec import positive

DEFAULT_NAME = "smollm2-135m"
GPU_SHARE = 0.85  # of the memory that is free once the model is there
CPU_BYTES = 2 << 30
GIB = 1 << 30


def load_model(name: str, device: torch.device, tp: int, say: Callable[[str], None]) -> LoadedModel:
    """The model and tokenizer that `name` means: smollm2-135m, a folder, a .gguf file, or a hub id.

    With tp > 1 the process group is there already and each rank reads its share, as transformers' plan has it.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InvalidInput("MODEL must be a folder, a .gguf file or a hub id; there is no such file", name)
        if tp > 1:
            raise InvalidInput("tensor parallel needs a safetensors folder; MODEL is a GGUF file", path.name)
        say(f"Unpacking {path.name}")
        model, tokenizer = smollm2.unpack(path)
        return LoadedModel(model.to(device).eval(), tokenizer, path.stem, "a GGUF file")
    if name == DEFAULT_NAME:
        loaded = quality_load.load_default(say)
        if tp == 1:
            loaded.model.to(device)
            return loaded
        return _read(str(smollm2.copy_folder()), DEFAULT_NAME, device, tp, local=True)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInput(f"{name} holds no config.json, so it is not a model's folder")
        if not any(path.glob("*.safetensors")):
            raise InvalidInput(f"{name} holds no .safetensors files; pickled weights are not read")
        say(f"Reading {path.resolve().name}")
        return _read(str(path), path.resolve().name, device, tp, local=True)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InvalidInput("MODEL must be a folder with a config.json, a .gguf file or a hub id", name)
    say(f"Fetching {name}")
    return _read(name, name, device, tp, local=False)


def _read(where: str, name: str, device: torch.device, tp: int, local: bool) -> LoadedModel:
    placed: dict[str, Any] = {}
    if tp > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        placed["distributed_config"] = DistributedConfig(tp_size=tp)
    elif device.type != "cpu":
        placed["device_map"] = {"": device}  # straight to the device, not through the host's memory
    model, tokenizer = quality_load.read_model(where, name, local, **placed)
    return LoadedModel(model, tokenizer, name, "a local folder" if local else "the model hub")


def enable_paged(
    model: Any, kv_cache_dtype: str, page_size: int, backend: str | None, cache_tokens: int | None
) -> Handle:
    """Give `model` a cache of a fixed number of pages: for `cache_tokens`, or for the memory that may be had."""
    handle = enable(model, kv_cache_dtype, page_size=page_size, backend=backend)
    if cache_tokens is None:
        cache_tokens = _free_bytes(handle) // handle.bytes_per_token
    positive("--cache-tokens", cache_tokens)
    pages = _least(-(-cache_tokens // page_size), handle.caches[0].device)
    return enable(model, kv_cache_dtype, page_size=page_size, backend=backend, num_pages=pages)


def _free_bytes(handle: Handle) -> int:
    device = handle.caches[0].device
    if device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) - GIB  # steps need room too


def _least(pages: int, device: torch.device) -> int:
    """The fewest of all ranks: they share page tables."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return pages
    found = torch.tensor([pages], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found)


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a reply: the generation config's and the tokenizer's."""
    found = [tokenizer.eos_token_id]
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        found += eos if isinstance(eos, (list, tuple)) else [eos]
    return frozenset(token for token in found if isinstance(token, int))
