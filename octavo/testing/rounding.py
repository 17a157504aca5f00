"""What attention kernels round: the numbers that `bounds` derives its limits from, and queries as kernels make them.

An e4m3 query has one right form for each number, whatever else a kernel does: it is made here again, as the kernel
makes it, so that no limit has to allow for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from .. import hopper_tuning, tuning
from ..device import Device
from ..formats import FORMATS, cast, decode
from ..spec import AttentionSpec

FP32 = 2.0**-24  # half a unit in the last place of 1; u of a format of n significant bits is 2^-n
BF16, FP16, E4M3 = 2.0**-8, 2.0**-11, 2.0**-4
FP16_FLOOR, E4M3_FLOOR = 2.0**-25, 2.0**-10  # half the distance of the smallest numbers
E4M3_NORMAL, E4M3_MAX = 2.0**-6, FORMATS["fp8_e4m3"].max
E4M3_MOST = E4M3 / (1 + E4M3)  # what is half way above a power of two is off by the most, of itself
STEPS = 2 * FP32  # what one fp32 operation of the hardware's errs, approximations of 2^x and 1 / x included
# An FP8 tensor core aligns DEPTH products and the sum so far to the largest of them, and keeps 14 bits of each: what is
# cut off is less than CUT of the largest.
CUT, DEPTH = 2.0**-13, 32


@dataclass(frozen=True)
class Rounding:
    """What a kernel rounds, as `bounds` uses it; fp32 everywhere else.

    Attributes:
        form: how an e4m3 query is made (`queries`); empty: the query is taken as it is, but for `query`, `query_floor`.
        query, query_floor: what an element is off by, of itself and of its row's largest.
        score: what a sum of products is off by, of sum |q k|. half: of the sums so far, after each step.
        scaled, score_floor, cap: what follows is off by, of |s_j| + max |s|, by itself, and of a softcap.
        total: what a denominator is off by. weight, weight_floor: P, of itself and of the largest P of its tile.
        top: what the one largest P of a row is off by, in place of `weight`: it is a power of two, or nearly.
        top_slope: more of it, of the size of its score in powers of two plus 6.
        product: what a sum of P V is off by, of sum |p v|.
        cut, cut_product: whether tensor cores cut the sums of scores, and of P V.
        tail: the second terms of a query are added to the sums of the first.
        blocks: tokens of a fresh accumulator of P V, from token 0 on, or (paged) from a page on; of several sizes it is
            not known which. None: one accumulator for all, from the last `step` tokens, at multiples of it, back.
        slack: a maximum is left where it is until it is exceeded by more, in nats; 0: every tile has its own.
        most_factor: of a score in powers of two, made of an e4m3 query whose largest is 224 at least.
    """

    form: str = ""
    query: float = 0.0
    query_floor: float = 0.0
    score: float = 0.0
    half: float = 0.0
    scaled: float = 8 * STEPS
    score_floor: float = 0.0
    cap: float = 16 * STEPS
    total: float = 0.0
    weight: float = 0.0
    weight_floor: float = 0.0
    top: float | None = None
    top_slope: float = 0.0
    product: float = 0.0
    cut: bool = False
    cut_product: bool = False
    tail: bool = False
    blocks: tuple[int, ...] = ()
    step: int = DEPTH
    paged: bool = False
    slack: float = 0.0
    most_factor: float = math.inf


def rounding_of(spec: AttentionSpec, backend: str, phase: str, device: Device, tokens: int) -> Rounding:
    """The rounding of a backend's kernel of `phase` on `device` (the CPU: interpreted) over at most `tokens` tokens."""
    plain = Rounding(score=(spec.head_dim + 8) * STEPS, product=(tokens + 8) * STEPS, total=(tokens + 8) * STEPS)
    if backend == "reference":
        return plain
    fast = phase == "prefill" and spec.precision == "fast" and spec.kv_dtype == "fp8_e4m3"
    if backend == "gluon":
        return _of_fast_prefill(spec, plain) if fast else _of_pairs(spec, phase, plain)
    interpreted = device.arch == "cpu"
    if fast and (device.fp8_dot or interpreted):
        made = replace(plain, form="" if spec.query_dtype == "fp8_e4m3" else "by maximum", cut=not interpreted)
        if spec.layout != "leaf":
            return replace(made, weight=FP16, weight_floor=FP16_FLOOR)
        # P is 2^8 at most, and 2^8 where it is largest.
        tile = tuning.prefill_tile(spec, Device.named("h200") if interpreted else device, fp8_dot=True).tokens
        top = None if spec.scale_granularity == "token_head" else 2.0**-12
        made = replace(made, weight=E4M3_MOST, weight_floor=E4M3_FLOOR / 256, top=top)
        return replace(made, cut_product=not interpreted, blocks=(tile,), step=tile)
    if spec.kv_dtype == "bfloat16":
        return replace(plain, query=BF16 if spec.query_dtype == "float16" else 0.0, weight=BF16)
    # fp16 holds a query of any dtype once its row is scaled to 2^14, but for what is 2^-28 below the row's largest
    return replace(plain, query_floor=2.0**-39, weight=FP16, weight_floor=FP16_FLOOR)


def _of_fast_prefill(spec: AttentionSpec, plain: Rounding) -> Rounding:
    """Of Hopper's fast prefill.

    fp16 from the first sum on: a score once for each DEPTH products, twice after; the argument of 2^x, below 16, by
    2^-8; 2^x itself, a parabola, by 2^-9, and 0 below 2^-15; sums of P, by pairs; a tanh by 2^-10. The largest P is
    2^6, less what an fp16 maximum is rounded up by, 2^-10 of it at most, and e4m3 makes 2^6 of it.
    """
    block = hopper_tuning.prefill_tile(spec).block
    return replace(
        plain,
        form="by sum",
        score=0.0,
        half=2 * FP16,
        scaled=2 * FP16,
        score_floor=2.0**-7,
        cap=2.0**-9,
        total=2.0**-8,
        weight=E4M3_MOST + 2.0**-8,
        weight_floor=2.0**-14,
        top=2.0**-8,
        top_slope=2.0**-10 * math.log(2),
        cut=True,
        cut_product=True,
        blocks=(block,) if spec.head_dim <= 128 else (),
        step=block,
        slack=2.5 * math.log(2),
        most_factor=65504.0 if spec.softcap is None else math.inf,
    )


def _of_pairs(spec: AttentionSpec, phase: str, plain: Rounding) -> Rounding:
    """Of Hopper's decode, and of its exact prefill: query and P are two e4m3 terms.

    decode: x = hi + lo / 16, lo is e4m3 of 16 (x - hi): 8 significant bits, and half of 2^-9 / 16 where lo is
    subnormal; P is 2^8 at most, so that this is 2^-22 of it. prefill: x = hi + lo, lo is e4m3 of x - hi: 8 bits too,
    but half of 2^-9 where lo is subnormal, and as much for an hi that is: 2^-9 in all, of 2^8. A P is an fp16 number
    before. Queries are scaled to (224, 448] and made in the same way.
    """
    if phase == "decode":
        tiles = [hopper_tuning.decode_tile(spec, rows) for rows in range(1, spec.max_query_len + 1)]
        blocks = tuple(sorted({tile.pages * spec.page_size for tile in tiles}))
        made = replace(plain, form="hi + lo / 16", weight=BF16, weight_floor=2.0**-21, paged=True)
    else:
        blocks = (hopper_tuning.prefill_tile(spec).block,)
        floor = (2 * E4M3_FLOOR + FP16_FLOOR) / 256
        two = spec.query_dtype != "fp8_e4m3"
        made = replace(plain, form="hi + lo" if two else "", weight=BF16 + FP16, weight_floor=floor, tail=two)
    return replace(made, score=0.0, cut=True, cut_product=True, blocks=blocks)


def queries(x: torch.Tensor, form: str, repeated: bool) -> tuple[torch.Tensor, ...]:
    """Query rows x [.., D], fp64, as a kernel makes them: fp64 [.., D], how far they may be from that [.., D], the
    smallest number that is normal there [.., 1], and the size of the second of two terms [.., D], of one term [.., 0].

    Something is open where the last bits of a scale decide, or a scale is one of two powers of two: the hardware's
    division may differ from this one's, and a sum by its order. hi + lo / 16 is also x itself, which decode takes for
    sequences of one token. repeated: a finer scale may be taken, which is none for numbers that are normal.
    """
    size, none, one = x.abs(), torch.zeros_like(x), x[..., :0]
    if not form:
        return x, none, torch.full_like(x[..., :1], E4M3_NORMAL), one
    if form == "by maximum":
        scale = E4M3_MAX / size.amax(-1, keepdim=True).clamp_min(1e-30)
        made = [_e4m3(x * (scale * (1 + side * 4 * STEPS))) / scale for side in (-1, 1)]
        return (made[0] + made[1]) / 2, (made[0] - made[1]).abs() / 2, E4M3_NORMAL / scale, one
    of_row = size.sum(-1, keepdim=True) * 3.5 if form == "by sum" else size.amax(-1, keepdim=True)
    scales = [_power_below(E4M3_MAX / (of_row * (1 + side * 2.0**-16)).clamp_min(1e-30)) for side in (1, -1)]
    terms = [_terms(x, scale, form) for scale in (scales[:1] if scales[0].equal(scales[1]) else scales)]
    made = [first + second for first, second in terms]
    if form == "by sum" and repeated:
        tiny = size * scales[0] < E4M3_NORMAL
        made += [torch.where(tiny, x * (1 + side * E4M3), made[0]) for side in (-1, 1)]
    if form == "hi + lo / 16":
        made.append(x)
    low, high = torch.stack(made).aminmax(dim=0)
    second = one if form == "by sum" else terms[0][1].abs()
    return (low + high) / 2, (high - low) / 2, E4M3_NORMAL / scales[0], second


def _terms(x: torch.Tensor, scale: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms of x, of which the second may be 0: e4m3 of x times scale, over scale."""
    x = x * scale
    hi = _e4m3(x)
    if form == "by sum":
        return hi / scale, torch.zeros_like(x)
    more = 16.0 if form == "hi + lo / 16" else 1.0
    return hi / scale, _e4m3((x - hi) * more) / (more * scale)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """x rounded to e4m3, saturating, in fp64."""
    return decode(cast(x, FORMATS["fp8_e4m3"]), FORMATS["fp8_e4m3"], torch.float64)


def _power_below(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is at most x."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)
