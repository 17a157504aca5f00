"""index_append: quantise the indexer's keys with one scale a token and write them to their slots.

    scale = amax / 448; k = round(x / scale) in e4m3, nearest even

Edge cases: the scale of a row of zeros is 1; NaN is written as 0 and counted, an infinity saturates and does not
enter amax; slot -1 writes nothing; a slot outside the pool is refused on a CPU before anything is written, and skipped
and counted on a GPU; two rows with one slot leave either.
"""

from __future__ import annotations

import torch

from ..formats import FORMATS, quantise, token_scale
from ..indexer_calls import SCALE_BYTES, IndexAppendCall
from .append import live_slots

E4M3 = FORMATS["fp8_e4m3"]


def index_append(call: IndexAppendCall) -> None:
    """Write call.k [T, D] and its scales to call.slots."""
    cache, slots = call.cache, call.slots
    live = live_slots(slots, cache.num_pages * cache.page_size, call.counters)
    page, offset = slots[live] // cache.page_size, slots[live] % cache.page_size
    rows = call.k[: slots.shape[0]][live]
    call.counters[1] += rows.isnan().sum().to(torch.int32)
    scale = token_scale(rows, E4M3)
    if cache.scale_format != "fp32":
        scale = round_up_to_power_of_two(scale)
    cache.keys()[page, offset] = quantise(rows, scale[:, None], E4M3)
    cache.scales()[page, offset] = encode_scale(scale, cache.scale_format)


def round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is at least `scale` (fp32, positive, normal)."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))


def encode_scale(scale: torch.Tensor, scale_format: str) -> torch.Tensor:
    """fp32 [T] as the bytes stored: uint8 [T, 4]. ue8m0 is exponent + 127, four times."""
    if scale_format != "ue8m0":
        return scale[:, None].view(torch.uint8)
    _, exponent = torch.frexp(scale)
    return (exponent + 126).to(torch.uint8)[:, None].expand(-1, SCALE_BYTES)


def decode_scale(stored: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Stored bytes uint8 [..., 4] as fp32 [...]. Of ue8m0's four equal bytes the first is read; 255 is NaN."""
    if scale_format != "ue8m0":
        return stored.contiguous().view(torch.float32)[..., 0]
    byte = stored[..., 0].to(torch.int32)
    value = torch.ldexp(torch.ones_like(byte, dtype=torch.float32), byte - 127)
    return torch.where(byte == 255, float("nan"), value)
