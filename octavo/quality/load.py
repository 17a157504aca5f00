"""A causal language model and its tokenizer from one argument: nothing, a folder, or a hub id.

Whatever cannot be read raises InvalidInput with one line that says what and why.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from . import smollm2
from .smollm2 import first_line

LOWEST = {"transformers": (5, 17)}  # of what older releases fail at with an error that does not say so
_log = logging.getLogger("octavo")


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, its name, and in words where it was read from."""

    model: Any
    tokenizer: Any
    name: str
    source: str


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
            model, tokenizer = _from_folder(folder)
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
        _log.warning("no copy of the model is kept, the next run unpacks it again: %s", first_line(error))
    return LoadedModel(model.eval(), tokenizer, smollm2.NAME, f"{smollm2.PACKAGE} {smollm2.VERSION}")


def load_named(name: str, say: Callable[[str], None]) -> LoadedModel:
    """The model in the local folder `name`, else the hub's model `name`, in the dtype that its config states."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidInput(f"{name} holds no config.json, so it is not a model's folder")
        say(f"Reading {name}")
        model, tokenizer = _from_folder(folder)
        return LoadedModel(model, tokenizer, folder.resolve().name, "a local folder")
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InvalidInput(f"the model must be a folder with a config.json or a hub id; {name} is not a folder")
    say(f"Fetching {name}")
    model, tokenizer = _read(name, local=False)
    return LoadedModel(model, tokenizer, name, "the model hub")


def _from_folder(folder: Path) -> tuple[Any, Any]:
    return _read(str(folder), local=True)


def _read(where: str, local: bool) -> tuple[Any, Any]:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=local)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype="auto", local_files_only=local)
    except Exception as error:  # whatever a loader raises is, to the user, a model that cannot be read
        raise InvalidInput(f"cannot read a causal language model from {where}: {first_line(error)}") from error
    return model.eval(), tokenizer
