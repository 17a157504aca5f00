"""PagedCache: the bytes of one layer's keys and values, with the dtype, layout and scales they are to be read by.

Those four travel as one object, so that a wrong mix cannot be expressed: no kernel is handed loose bytes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from . import ops
from .calls import CacheBytes
from .device import torch_device
from .errors import InvalidInput, Unsupported
from .formats import FORMATS, check_scale, check_tensors
from .layouts import Strides, layout_reasons, leaf_order, shapes
from .notices import say_once
from .reference.attention import gather
from .spec import AttentionSpec, dtype_name, positive

Scale = torch.Tensor | float | None
T = TypeVar("T")


class PagedCache:
    """Keys and values of one layer in pages. Made by `allocate` or `view`.

    Attributes:
        spec: shapes, kv_dtype, layout and scale granularity.
        k, v: views of the memory: uint8 for FP8, else the dtype itself. nhd [pages, P, Hk, D], hnd [pages, Hk, P, D],
            leaf [pages, Hk, P, D] and V [pages, Hk, Dv, P] with the columns in the leaf order. An MLA cache's v is the
            first Dv elements of its k.
        k_scale, v_scale: fp32 [] (tensor), [Hk] (head) or [pages, Hk, P] (token_head); None means 1.0; a 16-bit
            cache has none.
        counters: int32 [2]: rows skipped because their slot lies outside the pool (on a GPU), NaN elements written
            as 0.
    """

    def __init__(self, spec: AttentionSpec, k: torch.Tensor, v: torch.Tensor, k_scale: Scale, v_scale: Scale) -> None:
        self.spec = spec
        self.k, self.v = k, v
        self.num_pages = int(k.shape[0])
        self.device = k.device
        self._k_scale, self._v_scale = self._scales(k_scale, v_scale)
        self.counters = torch.zeros(2, dtype=torch.int32, device=k.device)
        self._spec_json = spec.to_json()
        self.append_backend = ops.cache_backend(self.device, "append")
        self.cache_fields = spec.cache_fields
        self.memory = _memory(spec, k, v)

    @classmethod
    def allocate(
        cls,
        spec: AttentionSpec,
        num_pages: int,
        device: Any = "cuda",
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> PagedCache:
        """A zeroed cache of `num_pages` pages on `device`.

        k_scale, v_scale: as in the class; a Python number fills the shape. With token_head they are made here and
        written by `append`. Raises InvalidInput for scales that are not finite and positive or of another shape, and
        for more pages than there is memory for (then nothing stays allocated), Unsupported where the layout cannot hold
        the spec.
        """
        _check_layout(spec)
        positive("num_pages", num_pages)
        device = torch_device(device)
        return in_memory(
            lambda: cls(spec, *_zeros(spec, num_pages, device), k_scale, v_scale),
            num_pages,
            spec.bytes_per_token * spec.page_size,
            device,
        )

    @classmethod
    def view(
        cls,
        spec: AttentionSpec,
        k_bytes: torch.Tensor,
        v_bytes: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> PagedCache:
        """A cache over memory that an engine owns, in the shapes that the class lists; nothing is copied.

        k_bytes, v_bytes: uint8 or the spec's own dtype; any page and head strides, any slot stride in nhd and hnd, the
        last dimension contiguous. In the leaf layout a page and head's K and V^T are contiguous each, and addresses and
        the page and head strides multiples of 16 bytes. v_bytes is None for MLA.
        Raises InvalidInput for another dtype, shape or stride, naming what was needed and what came.
        """
        _check_layout(spec)
        check_tensors(k_bytes=k_bytes)
        k = _as_storage("k_bytes", spec, k_bytes)
        if spec.mla:
            if v_bytes is not None:
                raise InvalidInput("v_bytes must be None for an MLA cache, whose value is a part of its key")
            v = k[..., : spec.value_dim]
        elif not isinstance(v_bytes, torch.Tensor):
            raise InvalidInput("v_bytes must be a tensor", type(v_bytes).__name__)
        else:
            v = _as_storage("v_bytes", spec, v_bytes)
        k_shape, v_shape = shapes(spec, k.shape[0])
        for name, tensor, shape in (("k_bytes", k, k_shape), ("v_bytes", v, v_shape)):
            if tuple(tensor.shape) != shape:
                raise InvalidInput(f"{name} must have shape {list(shape)} for layout {spec.layout}", list(tensor.shape))
            if tensor.stride(-1) != 1:
                raise InvalidInput(f"{name} must be contiguous in its last dimension", f"stride {tensor.stride(-1)}")
            if spec.layout == "leaf":
                _check_leaf_strides(name, tensor)
        if k.device != v.device:
            raise InvalidInput("k_bytes and v_bytes must be on one device", f"{k.device} and {v.device}")
        return cls(spec, k, v, k_scale, v_scale)

    def append(self, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        """Quantise and write k [T, Hk, D] and v [T, Hk, Dv] (None for MLA) to slots int64 [T] = page * P + offset.

        k and v are bfloat16, float16 or float32 of any strides and may have more rows than slots has. Slot -1 skips a
        row; a slot outside the pool is refused on a CPU (InvalidInput) and skipped and counted on a GPU. One launch.
        """
        spec = self.spec
        check_tensors(k=k, slots=slots)
        rows = slots.shape[0] if slots.dim() else 0
        _check_new("k", k, rows, spec.num_kv_heads, spec.head_dim)
        if spec.mla:
            if v is not None:
                raise InvalidInput("v must be None for an MLA cache, whose value is a part of its key")
        elif not isinstance(v, torch.Tensor):
            raise InvalidInput("v must be a tensor", type(v).__name__)
        else:
            _check_new("v", v, rows, spec.num_kv_heads, spec.value_dim)
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise InvalidInput("slots must be int64 [T]", f"{dtype_name(slots.dtype)} {list(slots.shape)}")
        devices = {t.device for t in (k, v, slots) if t is not None}
        if devices != {self.device}:
            raise InvalidInput(f"k, v and slots must be on {self.device}", " and ".join(sorted(map(str, devices))))
        written = spec.fp8 and spec.scale_granularity == "token_head"
        v_scale = None if spec.mla else self.v_scale
        ops.append(
            k,
            v,
            slots,
            self.memory.k_pool,
            self.memory.v_pool,
            None if written else self.k_scale,
            None if written else v_scale,
            self.k_scale if written else None,
            v_scale if written else None,
            self.counters,
            self.memory.strides,
            self._spec_json,
            self.append_backend,
        )

    def gather(self, page_table_row: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first n tokens of the sequence on the pages of page_table_row [max pages]: fp32 [n, Hk, D], [n, Hk, Dv].

        Raises InvalidInput for a table of another rank and for more tokens than its pages hold.
        """
        check_tensors(page_table_row=page_table_row)
        if page_table_row.dim() != 1:
            raise InvalidInput("page_table_row must be [max pages]", list(page_table_row.shape))
        if n < 0 or n > page_table_row.shape[0] * self.spec.page_size:
            raise InvalidInput(f"n must be in [0, {page_table_row.shape[0] * self.spec.page_size}]", n)
        k, v, _ = gather(self.spec, self.bytes(), page_table_row, 0, n, torch.float32)
        return k.transpose(0, 1), v.transpose(0, 1)

    def convert(self, layout: str) -> PagedCache:
        """A new cache with the same elements and scales in another layout; Unsupported where that cannot hold them."""
        target = PagedCache.allocate(dataclasses.replace(self.spec, layout=layout), self.num_pages, self.device)
        target._k_scale, target._v_scale = _clone(self.k_scale), _clone(self.v_scale)
        target.bytes().k_view(target.spec).copy_(self.bytes().k_view(self.spec))
        if not self.spec.mla:
            v, order = self._v_tokens()
            into, into_order = target._v_tokens()
            into[:, :, into_order] = v[:, :, order]
        return target

    @property
    def k_scale(self) -> torch.Tensor | None:
        """Scale of the keys; setting one checks it as `allocate` does, and a 16-bit cache keeps none."""
        return self._k_scale

    @k_scale.setter
    def k_scale(self, scale: Scale) -> None:
        self._k_scale = self._scale("k_scale", scale)
        if self.spec.mla:
            self._v_scale = self._k_scale

    @property
    def v_scale(self) -> torch.Tensor | None:
        """Scale of the values, as `k_scale`; an MLA cache has one for both, which either name sets."""
        return self._v_scale

    @v_scale.setter
    def v_scale(self, scale: Scale) -> None:
        self._v_scale = self._scale("v_scale", scale)
        if self.spec.mla:
            self._k_scale = self._v_scale

    def bytes(self) -> CacheBytes:
        """The memory and scales as a kernel takes them."""
        k_pool, v_pool, strides = self.memory
        return CacheBytes(k_pool, k_pool if v_pool is None else v_pool, Strides(*strides), self.k_scale, self.v_scale)

    def _v_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """V as [pages, Hk, P, Dv] in the order it is stored, and where token t is in it: int64 [P]."""
        view, size = self.bytes().v_view(self.spec), self.spec.page_size
        if self.spec.layout == "leaf":
            return view.transpose(2, 3), torch.tensor(leaf_order(size), device=self.device)
        return view, torch.arange(size, device=self.device)

    def _scales(self, k_scale: Scale, v_scale: Scale) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both scales that a cache is made with."""
        if self.spec.mla:
            if self.spec.fp8 and v_scale is not None and v_scale is not k_scale:
                raise InvalidInput("an MLA cache has one scale: v_scale must be None or k_scale itself")
            scale = self._scale("k_scale", k_scale)
            return scale, scale
        if self.spec.fp8 and (k_scale is None) != (v_scale is None):
            say_once(f"{'k' if k_scale is None else 'v'}_scale is missing and means 1.0")
        return self._scale("k_scale", k_scale), self._scale("v_scale", v_scale)

    def _scale(self, name: str, scale: Scale) -> torch.Tensor | None:
        spec = self.spec
        if not spec.fp8:
            if scale is not None:
                say_once(f"a {spec.kv_dtype} cache has no scales: the given ones are not used")
            return None
        shape = {
            "tensor": (),
            "head": (spec.num_kv_heads,),
            "token_head": (self.num_pages, spec.num_kv_heads, spec.page_size),
        }[spec.scale_granularity]
        if scale is None:
            made = spec.scale_granularity == "token_head"
            return torch.ones(shape, dtype=torch.float32, device=self.device) if made else None
        if not isinstance(scale, torch.Tensor):
            check_scale(name, scale, ())
            return torch.full(shape, float(scale), dtype=torch.float32, device=self.device)
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            check_scale(name, scale, shape)
        return scale.detach().reshape(shape).to(self.device, torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        """Without the flat aliases: pickled, they would be memory apart from k and v."""
        return {name: value for name, value in self.__dict__.items() if name != "memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.memory = _memory(self.spec, self.k, self.v)

    def __repr__(self) -> str:
        s = self.spec
        return (
            f"PagedCache({self.num_pages} pages of {s.page_size}, {s.num_kv_heads} x {s.head_dim}/{s.value_dim}, "
            f"{s.kv_dtype}, {s.layout}, scales {s.scale_granularity if s.fp8 else 'none'}, {self.device})"
        )


def _zeros(spec: AttentionSpec, num_pages: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `num_pages` pages in the spec's layout."""
    storage = FORMATS[spec.kv_dtype].storage
    k_shape, v_shape = shapes(spec, num_pages)
    if spec.mla:
        k = torch.zeros(k_shape, dtype=storage, device=device)
        return k, k[..., : spec.value_dim]
    if spec.layout != "leaf":
        k = torch.zeros(k_shape, dtype=storage, device=device)
        return k, torch.zeros(v_shape, dtype=storage, device=device)
    k_head = spec.page_size * spec.head_dim
    pool_shape = (num_pages, spec.num_kv_heads, k_head + spec.page_size * spec.value_dim)
    pool = torch.zeros(pool_shape, dtype=storage, device=device)
    return pool[..., :k_head].unflatten(-1, k_shape[2:]), pool[..., k_head:].unflatten(-1, v_shape[2:])


def in_memory(make: Callable[[], T], num_pages: int, page: int, device: torch.device) -> T:
    """What `make` allocates, pages of `page` bytes; InvalidInput where they do not fit, saying how many would.

    Then nothing stays allocated.
    """
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        error.__traceback__ = None  # its frames hold what was allocated by then
        free = _free_bytes(device)
        raise InvalidInput(
            f"num_pages must fit in the memory of {device}, of which {free:,} bytes are free: "
            f"{free // page:,} pages of {page:,} bytes",
            f"{num_pages:,} pages, {num_pages * page:,} bytes",
        ) from error


def _out_of_memory(error: Exception) -> bool:
    """Whether torch says that there is not enough memory: on a CPU it has no class for that."""
    words = ("not enough memory", "can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


def _free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device, those that torch keeps for itself included."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def expand_page_table(page_table: torch.Tensor, page_size: int, kernel_page_size: int) -> torch.Tensor:
    """Page ids of an engine's pages as ids of the smaller pages that a cache is viewed in, on the device.

    page_table int32 [B, n] in pages of `page_size` tokens -> int32 [B, n * r], r = page_size / kernel_page_size: page p
    becomes pages p r .. p r + r - 1. Ids that are negative, or too large for int32 afterwards, become -1. Raises
    InvalidInput unless kernel_page_size divides page_size.
    """
    positive("page_size", page_size)
    positive("kernel_page_size", kernel_page_size)
    if page_size % kernel_page_size:
        raise InvalidInput("the kernel's page size must divide the engine's", f"{kernel_page_size} and {page_size}")
    ratio = page_size // kernel_page_size
    ids = page_table.to(torch.int64)[..., None] * ratio + torch.arange(ratio, device=page_table.device)
    ids = torch.where((page_table[..., None] < 0) | (ids > torch.iinfo(torch.int32).max), -1, ids)
    return ids.flatten(-2).to(torch.int32)


class Memory(NamedTuple):
    """Flat aliases of the memory under K and V (v_pool None where one covers both) and `Strides` into them as a list.

    An op handed one flat pool mutates one input, which torch.compile can follow; two overlapping views it cannot.
    """

    k_pool: torch.Tensor
    v_pool: torch.Tensor | None
    strides: list[int]


def _memory(spec: AttentionSpec, k: torch.Tensor, v: torch.Tensor) -> Memory:
    together = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    k_start, v_start = int(k.storage_offset()), int(v.storage_offset())
    start = min(k_start, v_start) if together else k_start
    end = max(_end(k), _end(v)) if together else _end(k)
    k_pool = k.as_strided((end - start,), (1,), start)
    v_pool = None if together else v.as_strided((_end(v) - v_start,), (1,), v_start)
    k_page, k_head, k_slot = _page_head_slot(spec, k)
    v_page, v_head, v_slot = _page_head_slot(spec, v)
    v_offset = v_start - start if together else 0
    strides = Strides(k.shape[0], k_start - start, k_page, k_head, k_slot, v_offset, v_page, v_head, v_slot)
    return Memory(k_pool, v_pool, list(strides))


def _page_head_slot(spec: AttentionSpec, t: torch.Tensor) -> tuple[int, int, int]:
    page, one, two, _ = t.stride()
    return (page, two, one) if spec.layout == "nhd" else (page, one, two)


def _end(t: torch.Tensor) -> int:
    return int(t.storage_offset()) + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1


def _clone(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.clone()


def _check_layout(spec: AttentionSpec) -> None:
    reasons = layout_reasons(spec)
    if reasons:
        raise Unsupported(f"layout {spec.layout} cannot hold this cache", reasons, "layout='nhd'")


def _as_storage(name: str, spec: AttentionSpec, t: torch.Tensor) -> torch.Tensor:
    """`t` as storage elements; its dtype must be the spec's, or uint8 for FP8."""
    format = FORMATS[spec.kv_dtype]
    if t.dtype not in (format.dtype, format.storage):
        raise InvalidInput(f"{name} must hold {spec.kv_dtype}, the spec's kv_dtype", dtype_name(t.dtype))
    if t.dim() != 4:
        raise InvalidInput(f"{name} must have 4 dimensions", list(t.shape))
    return t if t.dtype == format.storage else t.view(format.storage)


def _check_leaf_strides(name: str, t: torch.Tensor) -> None:
    if t.stride(2) != t.shape[3]:
        raise InvalidInput(f"{name} must be contiguous within a page and head for layout leaf", f"strides {t.stride()}")
    if t.stride(0) % 16 or t.stride(1) % 16 or t.data_ptr() % 16:
        raise InvalidInput(
            f"{name} must have its address and its page and head strides at multiples of 16 bytes for layout leaf",
            f"address {t.data_ptr() % 16} mod 16, strides {t.stride()}",
        )


def _check_new(name: str, x: torch.Tensor, rows: int, heads: int, dim: int) -> None:
    if x.dim() != 3 or x.shape[0] < rows or tuple(x.shape[1:]) != (heads, dim):
        raise InvalidInput(f"{name} must be [{rows}, {heads}, {dim}]", list(x.shape))
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InvalidInput(f"{name} must be bfloat16, float16 or float32", dtype_name(x.dtype))
