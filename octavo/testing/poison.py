"""Fill every byte of a cache that no live token owns, to show that none of them reaches a result."""

from __future__ import annotations

import torch

from ..cache import PagedCache
from ..layouts import leaf_order


def poison(cache: PagedCache, live_slots: torch.Tensor, value: int = 0x7F) -> None:
    """Set every byte outside `live_slots` (int64, page * P + offset) to `value`.

    0x7F is NaN in e4m3, e5m2 and, doubled, fp16; 0xFF is NaN in bf16 too. token_head scales of dead tokens become NaN.
    """
    spec = cache.spec
    pages, size = cache.num_pages, spec.page_size
    dead = torch.ones(pages * size, dtype=torch.bool, device=cache.device)
    dead[live_slots] = False
    dead = dead.view(pages, size)
    for which in ("k",) if spec.mla else ("k", "v"):
        memory = cache.bytes()
        view = memory.k_view(spec) if which == "k" else memory.v_view(spec)
        mask = dead
        if which == "v" and spec.layout == "leaf":
            view = view.transpose(2, 3)
            order = torch.tensor(leaf_order(size), device=cache.device)
            mask = torch.empty_like(dead)
            mask[:, order] = dead
        filler = torch.full((view.element_size(),), value, dtype=torch.uint8, device=cache.device).view(view.dtype)
        view.copy_(torch.where(mask[:, None, :, None], filler, view))
    if spec.scale_granularity == "token_head" and spec.fp8:
        for scale in (cache.k_scale, cache.v_scale):
            if scale is not None:
                scale.masked_fill_(dead[:, None, :], float("nan"))
