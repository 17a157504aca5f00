"""octavo inside vLLM: the plug-in that `vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype fp8` uses.

Installing octavo is all: vLLM finds `register` through its entry point group in every process it starts. The plug-in
`octavo_indexer` puts octavo's logits in DeepGEMM's place, and only where VLLM_PLUGINS names it. docs/integrations.md
says what is supported; `_vllm_releases.py` holds all that differs between releases.
"""

from __future__ import annotations

import os
from typing import Any

from ..notices import say_once
from ._vllm_releases import RELEASES, release_of, unknown_release, version

__all__ = ["RELEASES", "Refusal", "register", "register_indexer"]

BACKEND = "octavo.integrations._vllm_backend.OctavoBackend"
REFUSAL = "octavo.integrations.vllm.Refusal"
INDEXER_PLUGIN = "octavo_indexer"


class _Refusing(type):
    """A class that answers whatever a release of vLLM asks of a backend with the reason why octavo is none there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(_reason())


class Refusal(metaclass=_Refusing):
    """Stands for the backend in a release that octavo does not know: selecting it says so."""

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """The one reason."""
        return [_reason()]


def register() -> None:
    """Make octavo the backend CUSTOM of this process's vLLM; vLLM calls it by the entry point, perhaps several times.

    Changes nothing for those who select another backend. In a release that octavo does not know, selecting it fails
    with that sentence. Another plug-in's CUSTOM backend is left alone, and said.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        say_once(unknown_release(version()))
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() not in (BACKEND, REFUSAL):
        say_once(
            f"vLLM's CUSTOM attention backend is {custom.get_path()} already, and octavo leaves it: "
            "VLLM_PLUGINS=octavo loads octavo alone"
        )
        return
    register_backend(custom, REFUSAL if release_of(version()) is None else BACKEND)


def register_indexer() -> None:
    """Put octavo's logits in DeepGEMM's place in this process's vLLM, if VLLM_PLUGINS names `octavo_indexer`."""
    if INDEXER_PLUGIN not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return  # vLLM loads every installed plug-in where VLLM_PLUGINS is unset
    from ._vllm_indexer import replace_logits

    replace_logits()


def _reason() -> str:
    return unknown_release(version())
