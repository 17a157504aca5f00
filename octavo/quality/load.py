"""A causal language model and its tokenizer from one argument: nothing, a folder, or a hub id.

Whatever cannot be read raises InvalidInput with one line that says what and why.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import LEAVING, InvalidInput, first_line
from ..notices import log
from . import smollm2

LOWEST = {"transformers": (5, 17)}  # of what older releases fail at with an error that does not say so
# Up to so many parameters a CPU runs the model in float32. bfloat16 is 3 times as fast where the processor has it, but
# two correct computations in it differ by some 0.05 % of the perplexity over 8,000 tokens (measured: eager against
# sdpa), which would hide a kernel's error (`trial.KERNEL_LIMIT`); in float32 they agree to 1e-6.
FLOAT32_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, its name, and in words where it was read from."""

    model: Any
    tokenizer: Any
    name: str
    source: str

    @property
    def parameters(self) -> int:
        """How many numbers the model has learnt."""
        return sum(p.numel() for p in self.model.parameters())


def measured(loaded: LoadedModel, device: torch.device) -> tuple[Any, str]:
    """The model on `device` as its caches are measured, in float32 where that tells more, and its own 16-bit dtype."""
    model = loaded.model.to(device)
    sixteen = "float16" if model.dtype == torch.float16 else "bfloat16"
    if device.type == "cpu" and loaded.parameters <= FLOAT32_PARAMETERS:
        model = model.float()
    return model, sixteen


def context_of(model: Any) -> int | None:
    """Tokens that the model's config says it holds; None where it says nothing."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def check_context(most: int | None, length: int) -> None:
    """Raise InvalidInput for more tokens than a model's context holds."""
    if most is not None and length > most:
        raise InvalidInput(f"the model's context holds {most} tokens", length)


def require(packages: Iterable[str], extras: str) -> None:
    """Raise InvalidInput naming the pip command unless every import name in `packages` is installed, and new enough."""
    packages = list(packages)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInput(f'{" and ".join(missing)} not installed: pip install "octavo[{extras}]"')
    for name in LOWEST.keys() & set(packages):
        found = importlib.metadata.version(name)
        if tuple(int(part) for part in found.split(".")[:2]) < LOWEST[name]:
            least = ".".join(map(str, LOWEST[name]))
            raise InvalidInput(f'{name} must be {least} or newer: pip install -U "octavo[{extras}]"', found)


def load(name: str | None, say: Callable[[str], None]) -> LoadedModel:
    """What a command's model argument means: None is the default model, else a folder or a hub id."""
    return load_default(say) if name is None else load_named(name, say)


def load_default(say: Callable[[str], None]) -> LoadedModel:
    """SmolLM2-135M-Instruct in bf16: the kept copy if there is one, else the installed GGUF file, which is then kept.

    `say` is called with a line before anything that takes seconds.
    """
    folder = smollm2.copy_folder()
    if (folder / "config.json").is_file():
        say(f"Reading {smollm2.NAME}")
        try:
            model, tokenizer = read_model(str(folder), str(folder), local=True)
        except InvalidInput as error:
            raise InvalidInput(f"{error}; delete this folder and run again") from error
        return LoadedModel(model, tokenizer, smollm2.NAME, f"{smollm2.PACKAGE} {smollm2.VERSION} (kept as bf16)")
    gguf = smollm2.find_gguf()
    require(("gguf", "accelerate"), "transformers,report")
    say(f"Checking {gguf.name}")
    smollm2.check_digest(gguf)
    say(f"Unpacking {gguf.name}, once")
    model, tokenizer = smollm2.unpack(gguf)
    try:
        smollm2.keep_copy(model, tokenizer, folder)
    except OSError as error:
        log.warning("no copy of the model is kept, the next run unpacks it again: %s", first_line(error))
    return LoadedModel(model.eval(), tokenizer, smollm2.NAME, f"{smollm2.PACKAGE} {smollm2.VERSION}")


def load_named(name: str, say: Callable[[str], None]) -> LoadedModel:
    """The model in the local folder `name`, else the hub's model `name`, in the dtype that its config states."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidInput(f"{name} holds no config.json, so it is not a model's folder")
        say(f"Reading {name}")
        model, tokenizer = read_model(str(folder), name, local=True)
        return LoadedModel(model, tokenizer, folder.resolve().name, "a local folder")
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InvalidInput(f"the model must be a folder with a config.json or a hub id; {name} is not a folder")
    say(f"Fetching {name}")
    model, tokenizer = read_model(name, name, local=False)
    return LoadedModel(model, tokenizer, name, "the model hub")


def read_model(where: str, name: str, local: bool, **placed: Any) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer) of a folder or hub id `where`, called `name` in errors.

    Weights come from safetensors alone, and code that a checkpoint brings is not run. `placed` goes to the model's
    `from_pretrained`. Raises InvalidInput for whatever a loader raises.
    """
    import transformers

    common = {"local_files_only": local, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **common)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where, dtype="auto", use_safetensors=True, **placed, **common
        )
    except LEAVING:
        raise
    except BaseException as error:  # each is a model that cannot be read; a tokenizer's panic is no Exception
        raise InvalidInput(f"cannot read a causal language model from {name}: {first_line(error)}") from error
    return model.eval(), tokenizer
