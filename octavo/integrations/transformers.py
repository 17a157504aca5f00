"""A paged FP8 (or 16-bit) KV cache for Hugging Face transformers models.

    handle = enable(model, kv_cache_dtype="fp8_e4m3")
    model.generate(**inputs)          # greedy, sampling, beams, left-padded batches
    print(handle.plan, handle.bytes_per_token)
    disable(model)

Public hooks carry it: an AttentionInterface entry, an AttentionMaskInterface entry, a Cache with its own layer class
and a forward pre-hook on the decoder. What is private is in `_make_generate_use`, with the versions it was tested with.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..cache import PagedCache
from ..choose import choose
from ..errors import InvalidInput, Unsupported
from ..notices import say_once
from ..spec import AttentionSpec, dtype_name
from . import checkpoint_scales as checkpoint
from ._transformers_handle import Handle
from ._transformers_indexer import INDEXED, IndexerHandle, disable_indexer, enable_indexer
from .pages import PagePool
from .transformers_models import FAMILIES, Attending, attending, layer_specs

if TYPE_CHECKING:
    from ._transformers_cache import PagedKVCache, PagedLayer

__all__ = [
    "FAMILIES",
    "INDEXED",
    "TESTED",
    "Handle",
    "IndexerHandle",
    "disable",
    "disable_indexer",
    "enable",
    "enable_indexer",
]

TESTED = ("5.17", "5.24")  # first and last transformers whose private parts were tried
NAME = "octavo"  # in the two interfaces

_handles: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()  # by decoder
_layers: weakref.WeakKeyDictionary[Any, tuple[Handle, int]] = weakref.WeakKeyDictionary()  # by attention module


def enable(
    model: Any,
    kv_cache_dtype: str = "fp8_e4m3",
    page_size: int = 64,
    layout: str | None = None,
    scale_granularity: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    backend: str | None = None,
    num_pages: int | None = None,
    precision: str = "fast",
) -> Handle:
    """Make `model` keep its keys and values in octavo's pages and attend over them, until `disable`.

    model: a causal model of one of FAMILIES, in eval mode; an earlier enable of it is replaced.
    kv_cache_dtype: fp8_e4m3, fp8_e5m2, bfloat16, float16, float32, or "auto": what the checkpoint declares, else the
        model's dtype. Anything explicit wins over the checkpoint.
    page_size: tokens a page.
    layout: leaf, nhd or hnd; None: leaf where it can hold the cache, else nhd.
    scale_granularity: tensor, head or token_head; None: the checkpoint's, else tensor.
    k_scale, v_scale: a number or [Hk] tensor for all layers, a list, or a dict by layer; None: the checkpoint's, else
        1.0. An MLA cache has k_scale alone.
    backend: one of octavo's backends, which then runs or is refused; None: the first that may.
    num_pages: pages of each layer, fixed; None: the pool doubles when it is full.
    precision: of prefill: fast (an e4m3 query and P where the device multiplies them) or exact (as bf16 attention).

    Raises Unsupported for a model, dtype or scale that cannot be followed, and InvalidInput for bad scales.
    """
    if not hasattr(model, "get_decoder"):
        raise InvalidInput("model must be a transformers model with a text decoder", type(model).__name__)
    found = attending(model)
    if model.training:
        raise InvalidInput("model must be in eval mode: model.eval()", "training mode")
    asked = dtype_name(kv_cache_dtype)
    explicit = k_scale is not None and v_scale is not None
    folder = None if explicit and asked != "auto" else checkpoint.folder_of(model)
    kv_heads = 1 if found.family.mla else found.config.num_key_value_heads
    scales = checkpoint.read(folder, model.config, kv_heads, asked)
    kv_dtype = checkpoint.choose_dtype(asked, dtype_name(found.dtype), scales, explicit)
    granularity = scale_granularity or ("head" if _has_heads(k_scale, v_scale) else scales.granularity)
    specs = layer_specs(found, kv_dtype, page_size, layout, granularity, precision)
    choices = {spec: choose(spec, found.device, backend) for spec in dict.fromkeys(specs)}
    make = _cache_maker(specs, found, (k_scale, v_scale), scales)
    handle = Handle(specs, choices, PagePool(make, len(specs), num_pages), backend)
    disable(model)  # only now: a refused enable leaves an earlier one as it is
    _hook(model, found, handle)
    return handle


def disable(model: Any) -> None:
    """Undo `enable`: the model is as it was, to the bit. Does nothing to a model that is not enabled."""
    if not hasattr(model, "get_decoder"):
        raise InvalidInput("model must be a transformers model with a text decoder", type(model).__name__)
    decoder = model.get_decoder()
    handle = _handles.pop(decoder, None)
    if handle is None:
        return
    for hook in handle.hooks:
        hook.remove()
    for module in [m for m in decoder.modules() if m in _layers]:
        del _layers[module]
    decoder.set_attn_implementation(handle.stock_attention)
    enabled = handle.model()  # the model or another wrapper of its decoder
    if enabled is not None:
        enabled.__dict__.pop("_prepare_cache_for_generation", None)


def _hook(model: Any, found: Any, handle: Handle) -> None:
    """Attach `handle`: interfaces, the decoder's pre-hook, then the private part."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)
    handle.stock_attention = found.config._attn_implementation
    found.decoder.set_attn_implementation(NAME)
    handle.model = weakref.ref(model)
    _handles[found.decoder] = handle
    for layer, module in enumerate(found.modules):
        _layers[module] = (handle, layer)
    handle.keyword = keyword = _make_generate_use(model, found.decoder, handle)

    def before(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        checked = _check_forward(handle, keyword, decoder, args, kwargs)
        handle.lock.acquire()  # the layers of a pass share one plan: threads take turns
        handle.holder = threading.get_ident()
        return args, checked

    def after(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if handle.holder == threading.get_ident():  # not so after a pass that was refused before it had its turn
            handle.holder = None
            handle.lock.release()
        return None if output is None else _without(output, kwargs.get(keyword))

    handle.hooks.append(found.decoder.register_forward_pre_hook(before, with_kwargs=True))
    # Also after a pass that raised: the next one must not wait for it.
    handle.hooks.append(found.decoder.register_forward_hook(after, with_kwargs=True, always_call=True))


def _make_generate_use(model: Any, decoder: Any, handle: Handle) -> str:
    """The private part: generate's cache is octavo's, and the keyword that forward takes a cache by.

    `_prepare_cache_for_generation` is shadowed on the instance (disable removes it). Tested with the versions in
    TESTED; another one is said once.
    """
    import inspect

    import transformers

    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not _release(TESTED[0]) <= release <= _release(TESTED[1]):
        say_once(f"transformers {transformers.__version__} is untested: octavo was tried on {' to '.join(TESTED)}")
    keyword = "cache" if "cache" in inspect.signature(type(decoder).forward).parameters else "past_key_values"
    stock = getattr(type(model), "_prepare_cache_for_generation", None)
    if stock is not None:

        def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            made = model_kwargs.get(keyword) is None and generation_config.use_cache is not False
            if not made:
                return stock(self, generation_config, model_kwargs, *args, **kwargs)
            if generation_config.cache_implementation is not None:
                say_once(f"octavo's cache replaces cache_implementation={generation_config.cache_implementation!r}")
            model_kwargs[keyword] = handle.new_cache()
            return None

        model._prepare_cache_for_generation = types.MethodType(prepare, model)
    return keyword


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _check_forward(
    handle: Handle, keyword: str, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Refuse what octavo cannot do before anything runs; give the forward pass a cache where it has none."""
    from transformers import Cache

    from ._transformers_cache import PagedKVCache

    if decoder.config._attn_implementation != NAME:
        raise InvalidInput(
            f"attn_implementation must stay {NAME!r} while octavo is enabled (disable the model first)",
            repr(decoder.config._attn_implementation),
        )
    asked = kwargs.get("output_attentions")
    if decoder.config.output_attentions if asked is None else asked:
        raise Unsupported(
            "output_attentions=True",
            ["paged attention never holds the attention weights; output_attentions is True"],
            "output_attentions=False, or octavo.integrations.transformers.disable(model)",
        )
    given = next((thing for thing in (*args, *kwargs.values()) if isinstance(thing, Cache)), None)
    if given is None:
        use_cache = kwargs.get("use_cache")
        cache = handle.new_cache()
        cache.for_one_pass = not (decoder.config.use_cache if use_cache is None else use_cache)
        if cache.for_one_pass:
            _refuse_packed(kwargs)
        return {**kwargs, keyword: cache}
    if not isinstance(given, PagedKVCache) or given.pool is not handle.pool:
        raise InvalidInput("the cache must come from this model's handle.new_cache()", type(given).__name__)
    return kwargs


def _without(output: Any, cache: PagedKVCache | None) -> Any:
    """A decoder's output without the cache of a forward pass with use_cache=False, which generate would go on with."""
    if cache is None or not cache.for_one_pass:
        return output
    if isinstance(output, tuple):
        return tuple(part for part in output if part is not cache)
    return type(output)(**{name: part for name, part in output.items() if part is not cache})


def _refuse_packed(kwargs: dict[str, Any]) -> None:
    """Without a cache and a mask, transformers takes jumps in position_ids for several sequences in one row."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return
    if bool((positions.diff() != 1).any()):
        raise Unsupported(
            "packed sequences", ["position_ids must be consecutive in a row; these jump"], "one sequence a row"
        )


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The AttentionMaskInterface entry: bool [B, stored + new columns], False for padding; None: no padding.

    The causal and window masks are the spec's. transformers clears allow_is_causal_skip for every mask beyond those.
    """
    if use_vmap or not allow_is_causal_skip:
        raise Unsupported(
            "this attention mask",
            ["the mask must be causal, with padding or a window; this one is bidirectional, packed or blockwise"],
            "text only, one sequence a row, without token_type_ids",
        )
    if attention_mask is not None and tuple(attention_mask.shape) != (batch_size, kv_length):
        raise InvalidInput(
            f"attention_mask must cover the cached and the new tokens: [{batch_size}, {kv_length}]",
            list(attention_mask.shape),
        )
    return attention_mask


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    octavo_layer: PagedLayer | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The AttentionInterface entry: query [B, H, T, D] over the pages -> [B, T, H, Dv]; key, value: the new tokens."""
    if module not in _layers:
        raise InvalidInput("attn_implementation 'octavo' needs octavo.integrations.transformers.enable(model)")
    handle, index = _layers[module]
    layer = handle.handed.pop(index, None) if octavo_layer is None else octavo_layer
    if layer is None:
        raise InvalidInput("attention needs the cache that octavo gave to the forward pass", "none")
    if query.requires_grad:
        raise Unsupported(
            "attention with gradients",
            ["octavo has no backward pass; gradients are enabled"],
            "torch.no_grad() around the call, or disable(model)",
        )
    spec = handle.specs[index]
    asked = {
        "scaling": (scaling, spec.scale),
        "dropout": (dropout, 0.0),
        "sliding_window": (kwargs.get("sliding_window"), spec.window),
        "softcap": (kwargs.get("softcap"), spec.softcap),
        "sinks": (kwargs.get("s_aux") is not None, spec.sinks),
        "position_bias": (kwargs.get("position_bias"), None),
    }
    for name, (came, planned) in asked.items():
        if came != planned:
            raise InvalidInput(f"{name} of layer {index} must be the planned {planned}", came)
    if attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.dim() != 2):
        raise Unsupported("this attention mask", ["attention_mask must be 2-D (padding); a prepared mask was given"])
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        sinks = sinks.detach() if sinks.dtype == torch.bfloat16 else sinks.detach().float()
    return handle.attend(layer, module, query, attention_mask, sinks), None


def _cache_maker(
    specs: list[AttentionSpec], attending: Attending, given: tuple[Any, Any], found: checkpoint.CheckpointScales
) -> Callable[[int, int], PagedCache]:
    """make(layer, num_pages) -> PagedCache with that layer's scales; the scales are checked now.

    Scales per head are the whole model's; of them each rank of a tensor parallel model keeps its heads'.
    """
    first, device = specs[0], attending.device  # make must not hold the model, which holds the caches it makes
    scales: list[list[Any]] = [[None] * len(specs), [None] * len(specs)]
    if first.mla and given[1] is not None:
        raise InvalidInput("an MLA cache has one scale: v_scale must be None", given[1])
    if first.fp8 and first.scale_granularity != "token_head":
        heads = first.num_kv_heads * attending.shard.size
        shape = () if first.scale_granularity == "tensor" else (heads,)
        expected = found.declared is not None or any(scale is not None for scale in given)
        for which, (name, read) in enumerate((("k_scale", found.k), ("v_scale", found.v))):
            if not (first.mla and name == "v_scale"):  # a latent has one scale
                whole = checkpoint.per_layer(name, given[which], read, len(specs), shape, expected=expected)
                scales[which] = [attending.shard.of(scale) for scale in whole]

    def make(layer: int, num_pages: int) -> PagedCache:
        # The pages outlive an inference_mode block, so they must not be inference tensors.
        with torch.inference_mode(False):
            return PagedCache.allocate(specs[layer], num_pages, device, scales[0][layer], scales[1][layer])

    return make


def _has_heads(*scales: Any) -> bool:
    """Whether any of k_scale, v_scale holds a tensor with a value per head."""
    for scale in scales:
        parts = scale.values() if isinstance(scale, dict) else scale if isinstance(scale, (list, tuple)) else [scale]
        if any(isinstance(part, torch.Tensor) and part.numel() > 1 for part in parts):
            return True
    return False
