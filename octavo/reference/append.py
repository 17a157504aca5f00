"""append: quantise new keys and values and write them to their slots.

Edge cases: slot -1 writes nothing; a slot outside the pool is refused on a CPU before anything is written, and
skipped and counted on a GPU, where refusing would need a synchronisation; two rows with one slot leave either.
"""

from __future__ import annotations

import torch

from ..calls import AppendCall
from ..errors import InvalidInput
from ..formats import FORMATS, quantise, token_scale
from ..layouts import leaf_order


def append(call: AppendCall) -> None:
    """Write call.k and call.v [T, Hk, D] to call.slots; token_head scales are computed and written too."""
    spec, slots = call.spec, call.slots
    live = live_slots(slots, call.cache.strides.num_pages * spec.page_size, call.counters)
    page, offset = slots[live] // spec.page_size, slots[live] % spec.page_size
    _write(call, call.k, call.cache.k_view(spec), call.cache.k_scale, live, page, offset)
    if not spec.mla:
        assert call.v is not None
        v_view = call.cache.v_view(spec)
        if spec.layout == "leaf":
            columns = torch.tensor(leaf_order(spec.page_size), device=slots.device)
            _write(call, call.v, v_view.transpose(2, 3), call.cache.v_scale, live, page, columns[offset], offset)
        else:
            _write(call, call.v, v_view, call.cache.v_scale, live, page, offset)


def live_slots(slots: torch.Tensor, capacity: int, counters: torch.Tensor) -> torch.Tensor:
    """bool [T]: the rows to write. Slots outside the pool: InvalidInput on a CPU, counted in counters[0] on a GPU."""
    live = (slots >= 0) & (slots < capacity)
    outside = ~live & (slots != -1)
    if slots.device.type != "cpu":
        counters[0] += outside.sum()
    elif bool(outside.any()):
        raise InvalidInput(f"slots must be -1 or in [0, {capacity})", int(slots[outside][0]))
    return live


def _write(
    call: AppendCall,
    x: torch.Tensor,
    view: torch.Tensor,
    scale: torch.Tensor | None,
    live: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    token: torch.Tensor | None = None,
) -> None:
    """Write the live rows of x [T, Hk, D] to view [pages, Hk, P, D] at (page, :, offset); `token` is the scales'."""
    format = FORMATS[call.spec.kv_dtype]
    rows = x[: live.shape[0]][live]
    if call.spec.fp8:
        call.counters[1] += rows.isnan().sum().to(torch.int32)
        if call.spec.scale_granularity == "token_head":
            assert scale is not None
            per_row = token_scale(rows, format)
            scale[page, :, offset if token is None else token] = per_row
            scale = per_row[..., None]
        elif scale is not None and scale.dim() == 1:
            scale = scale[:, None]
    view[page, :, offset] = quantise(rows, scale, format)
