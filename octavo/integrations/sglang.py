"""octavo as an attention backend of SGLang.

    sglang serve --model-path MODEL --attention-backend octavo --kv-cache-dtype fp8_e4m3 --page-size 64

SGLang finds `register` through the entry point group sglang.srt.plugins and calls it in each of its processes. The two
names of NAMES differ in prefill alone: "octavo" multiplies e4m3, "octavo-exact" is as exact as 16-bit attention.
Either may be one half of SGLang's hybrid backend (--prefill-attention-backend, --decode-attention-backend).
docs/integrations.md tells what runs, what is refused and what was tried.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from ..notices import say_once

if TYPE_CHECKING:
    from ._sglang_backend import OctavoAttentionBackend

__all__ = ["NAMES", "TESTED", "register"]

NAMES = {"octavo": "fast", "octavo-exact": "exact"}  # backend's name: precision of prefill
TESTED = ("0.5.17", "0.5.23")  # releases whose interface was tried


def register() -> None:
    """Add NAMES to SGLang's attention backends and to the choices of its command line; twice is once."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    for name, precision in NAMES.items():
        if name not in ATTENTION_BACKENDS:
            register_attention_backend(name)(_factory(precision))
    choices = _choices()
    choices.add_attention_backend_choices([n for n in NAMES if n not in choices.ATTENTION_BACKEND_CHOICES])


def _choices() -> Any:
    """The module that holds the command line's choices: they moved from server_args to arg_groups.choices."""
    try:
        return importlib.import_module("sglang.srt.arg_groups.choices")
    except ModuleNotFoundError:
        return importlib.import_module("sglang.srt.server_args")


def _factory(precision: str) -> Any:
    def create(runner: Any) -> OctavoAttentionBackend:
        """What SGLang calls with its ModelRunner once the model and the KV pool are there."""
        from ._sglang_backend import OctavoAttentionBackend

        release = importlib.metadata.version("sglang")
        if release not in TESTED:
            say_once(f"SGLang {release} is untested: octavo was tried with {' and '.join(TESTED)}")
        return OctavoAttentionBackend(runner, precision)

    return create
