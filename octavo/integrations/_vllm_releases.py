"""The releases of vLLM that octavo plugs into, and everything in which they differ.

0.26 asks a backend for the shape and the order of its cache; 0.33 lays out [block, head, slot, content] itself, in one
of the orders that the backend names. In both, octavo wants the bytes of one block and head together: the leaf layout.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidInput

KERNEL_BLOCKS = (128, 64, 32)  # tokens of a page that octavo's kernels take; vLLM splits larger blocks into the first
PREFERRED_BLOCK = 64
ALIGNMENT = 16  # bytes that a page starts at a multiple of: what TMA and 16-byte loads need


@dataclass(frozen=True)
class Release:
    """One line of releases.

    Attributes:
        version: major and minor.
        memory: how a backend of it describes its cache: a base class.
        v2_masks: whether parallel drafting appends mask tokens in the V2 model runner too.
    """

    version: str
    memory: type
    v2_masks: bool


class ShapeAndOrder:
    """Until 0.26: the backend says the shape of its cache and the order in which it lies in memory."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, heads, slots, content]; content is K and V of a token."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """As the shape; where one allocation holds all layers, blocks come before them."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """What vLLM and its KV connectors call that order."""
        return "HND"


class NamedLayouts:
    """Since vLLM names its layouts: [layer, block, head, slot, content] in an order that the backend can take."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Those in which slots and content of one block and head are together; the first is preferred."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC, KVCacheLayout.LHBNC)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The layer's spec with blocks that start where a page may; what octavo stores needs no other room."""
        if spec.block_stride_alignment is not None or spec.page_size_bytes % ALIGNMENT == 0:
            return spec
        return replace(spec, block_stride_alignment=ALIGNMENT)


RELEASES = (Release("0.26", ShapeAndOrder, v2_masks=True), Release("0.33", NamedLayouts, v2_masks=False))


def release_of(version: str) -> Release | None:
    """The release that vLLM `version` ("0.26.0", "0.33.1.dev2") belongs to; None: octavo does not know it."""
    return next((r for r in RELEASES if version.split(".")[:2] == r.version.split(".")), None)


def unknown_release(version: str) -> str:
    """Why octavo does not run in another vLLM, in one sentence."""
    known = " and ".join(release.version for release in RELEASES)
    return f"octavo plugs into vLLM {known}; this is vLLM {version}, whose backend interface it was not tried with"


def kernel_block(block_size: int) -> int | None:
    """The page that vLLM hands kernels for blocks of `block_size` tokens; None: no page divides it."""
    return block_size if block_size in KERNEL_BLOCKS else next((b for b in KERNEL_BLOCKS if block_size % b == 0), None)


def decode_rows(vllm_config: Any) -> int:
    """Most query rows of a sequence that is a decode: its token and its draft tokens.

    Parallel drafting appends as many mask tokens again; in the V2 runner, of some releases alone.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    drafts = (speculative.num_speculative_tokens or 0) if speculative is not None else 0
    parallel = drafts and getattr(speculative, "parallel_drafting", False)
    release = release_of(version())
    masks = parallel and ((release is not None and release.v2_masks) or not vllm_config.use_v2_model_runner)
    return 1 + drafts * (2 if masks else 1)


def device_decides_rows(vllm_config: Any) -> bool:
    """Whether sequences may have other rows on the device than the host was told: adaptive verification."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return bool(getattr(speculative, "enable_adaptive_verification", False))


def precision(vllm_config: Any) -> str:
    """What the user asks of prefill in vLLM's additional_config: {"octavo": {"precision": "exact"}}; fast without."""
    given = getattr(vllm_config, "additional_config", None)
    asked = given.get("octavo", {}) if isinstance(given, dict) else {}
    if not isinstance(asked, dict) or asked.keys() - {"precision"}:
        raise InvalidInput("additional_config['octavo'] must be {'precision': 'fast' or 'exact'}", repr(asked))
    return asked.get("precision", "fast")


def version() -> str:
    """Of the vLLM that is installed."""
    return importlib.import_module("vllm").__version__
