"""FP8 formats and scale granularities: the law of quantise and dequantise, written in torch.

x = stored * scale. Casting rounds to nearest even, saturates outside the range (infinities too) and writes NaN as 0.
Every kernel agrees with these functions bit for bit; division by the scale is IEEE fp32 division.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .errors import InvalidInput


@dataclass(frozen=True)
class Format:
    """One storage format of a cache: torch dtype, the dtype its bytes are held in, the largest finite FP8 value."""

    name: str
    dtype: torch.dtype
    storage: torch.dtype  # uint8 for FP8: torch's copies, fills and TMA know no FP8
    max: float


FORMATS = {
    f.name: f
    for f in (
        Format("fp8_e4m3", torch.float8_e4m3fn, torch.uint8, 448.0),
        Format("fp8_e5m2", torch.float8_e5m2, torch.uint8, 57344.0),
        Format("bfloat16", torch.bfloat16, torch.bfloat16, float("inf")),
        Format("float16", torch.float16, torch.float16, float("inf")),
        Format("float32", torch.float32, torch.float32, float("inf")),
    )
}
TORCH_DTYPES = {name: f.dtype for name, f in FORMATS.items()}


def cast(x: torch.Tensor, format: Format) -> torch.Tensor:
    """`x` as stored elements of `format`: for FP8 nearest even, saturating, NaN as 0; torch's cast otherwise."""
    if format.storage != torch.uint8:
        return x.to(format.dtype)
    x = x.to(torch.float32)
    x = torch.where(x.isnan(), 0.0, x.clamp(-format.max, format.max))
    return x.to(format.dtype).view(torch.uint8)


def decode(stored: torch.Tensor, format: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Stored elements as numbers of `dtype`, unscaled; NaN and infinity codes come out as they are."""
    return (stored.view(format.dtype) if format.storage == torch.uint8 else stored).to(dtype)


def token_scale(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Scale per row of `x` [..., D] -> fp32 [...]: amax / max over the finite elements, 1 for a row of zeros.

    The floor 2^-126 keeps the scale a normal number, so that dividing by it cannot overflow what was in range.
    """
    x = x.to(torch.float32)
    amax = torch.where(x.isfinite(), x, 0.0).abs().amax(-1)
    # By a tensor: on CUDA torch divides by a Python number as a product with its rounded reciprocal.
    return torch.where(amax > 0, (amax / amax.new_full((), format.max)).clamp_min(2.0**-126), 1.0)


def quantise(x: torch.Tensor, scale: torch.Tensor | None, format: Format) -> torch.Tensor:
    """`x` divided by `scale` (broadcast; None is 1) and cast to stored elements of `format`."""
    if format.storage != torch.uint8 or scale is None:
        return cast(x, format)
    return cast(x.to(torch.float32) / scale, format)


def dequantise(
    stored: torch.Tensor, scale: torch.Tensor | None, format: Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Stored elements times `scale` (broadcast; None is 1), as `dtype`."""
    x = decode(stored, format, dtype)
    return x if scale is None else x * scale.to(dtype)


def check_tensors(**tensors: Any) -> None:
    """Raise InvalidInput, naming it, for the first that is no tensor."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidInput(f"{name} must be a tensor", type(value).__name__)


def check_scale(name: str, scale: torch.Tensor | float, shape: tuple[int, ...]) -> None:
    """Raise InvalidInput unless `scale` has `shape` and every element is finite and positive; synchronises."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.Tensor)):
        raise InvalidInput(f"{name} must be a number or a tensor", repr(scale))
    values = torch.as_tensor(scale)
    if tuple(values.shape) != shape and not (shape == () and values.numel() == 1):
        raise InvalidInput(f"{name} must have shape {list(shape)}", list(values.shape))
    values = values.detach().to(torch.float32)
    bad = ~(values.isfinite() & (values > 0))
    if bool(bad.any()):
        raise InvalidInput(f"{name} must be finite and positive everywhere", values[bad].flatten()[0].item())
