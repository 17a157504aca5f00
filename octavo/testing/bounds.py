"""How far attention may be from fp64 in the worst case, element by element, from how a kernel rounds.

`grid.faults` compares with what bf16 attention errs on ordinary numbers. Inputs that are made to be difficult need
what holds for every input. Of one row with exact scores s_j, weights p_j = exp(s_j) / Z (Z with the sink) and values
v_j, a kernel has

* scores off by |d_j| <= D_j. A query element q is off by `query` |q| + `query_floor` max |q| + `query_floor_of_sum`
  sum |q|, a sum of products by `score` sum |q| |k_j|, whatever follows by `scaled` (|s_j| + max |s|), `score_floor`,
  and `cap` times a softcap: D_j = softmax_scale ((query + score) sum |q| |k_j| + (query_floor max |q| +
  query_floor_of_sum sum |q|) sum |k_j|) + scaled (|s_j| + max |s|) + ...
  (a softcap's slope is at most 1, so it makes no D_j larger).
* a denominator off by the factor sum p_j e^(d_j) <= e^L, L = log sum p_j e^(D_j). It is at least e^-L as well: by
  Cauchy and Schwarz sum p_j e^(D_j) times sum p_j e^(-D_j) is at least 1. Adding it up errs by `total` of it.
* so with X_j = D_j + L + total the weight that it really has lies between p_j e^(-X_j) and p_j e^(X_j) =: up_j; as
  weights add up to 1, up_j is at most 1, and the weight at least 1 - sum of the other up_i. `change`_j is the larger
  distance of p_j to these ends.
* P rounded before it is multiplied: by `weight` of itself, and by at most `weight_floor` of the largest P times V scale
  of its tile, which is no larger than that of the row. Sums of products err by `product` sum |p v|.

Together |out - exact| <= sum_j |v_j| (change_j + (weight + product) up_j) + weight_floor sum_j (|v_j| / c_j) max_i up_i
c_i, with c the scale of a token's value (1 where there is one scale for all), and |lse - exact| <= L + total. The last
rounding needs no term: it is monotone, so a result lies between the rounded ends of its interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..device import Device
from ..formats import FORMATS, cast, decode
from ..reference.attention import first_token, gather, visible_tokens
from ..spec import AttentionSpec
from .inputs import Batch

FP32 = 2.0**-24  # half a unit in the last place of 1; u of a format of n significant bits is 2^-n
BF16, FP16, E4M3 = 2.0**-8, 2.0**-11, 2.0**-4
FP16_FLOOR, E4M3_FLOOR = 2.0**-25, 2.0**-10  # half the distance of the smallest numbers
CUT = 2.0**-13  # FP8 tensor cores align 32 products and the sum so far, and keep about 14 bits
STEPS = 2 * FP32  # what one fp32 operation of the hardware's errs, approximations of 2^x and 1 / x included


@dataclass(frozen=True)
class Rounding:
    """What a kernel rounds, as the module docstring uses it; fp32 everywhere else."""

    query: float = 0.0
    query_floor: float = 0.0
    query_floor_of_sum: float = 0.0
    score: float = 0.0
    scaled: float = 8 * STEPS
    score_floor: float = 0.0
    cap: float = 16 * STEPS
    total: float = 0.0
    weight: float = 0.0
    weight_floor: float = 0.0
    product: float = 0.0
    most_factor: float = math.inf  # of a score in powers of two, made of an e4m3 query whose largest is 224 at least


def rounding_of(spec: AttentionSpec, backend: str, phase: str, device: Device, tokens: int) -> Rounding:
    """The rounding of a backend's kernel of `phase` on `device` (the CPU: interpreted) over at most `tokens` tokens."""
    sums = {"score": (spec.head_dim + 8) * STEPS, "product": (tokens + 8) * STEPS, "total": (tokens + 8) * STEPS}
    if backend == "reference":
        return Rounding(**sums)
    cut = {"score": spec.head_dim * 2 * CUT, "product": tokens * 2 * CUT, "total": sums["total"]}
    fast = phase == "prefill" and spec.precision == "fast" and spec.kv_dtype == "fp8_e4m3"
    if backend == "gluon" and fast:
        # fp16 from the first sum on: a score once for each 32 products and twice after; the argument of 2^x, below 16,
        # by 2^-8; 2^x itself, a parabola, by 2^-9, and 0 below 2^-15; sums of P, by pairs; a tanh by 2^-10.
        scores = {"score": (spec.head_dim // 32) * FP16 + cut["score"], "scaled": 2 * FP16, "score_floor": 2.0**-7}
        weights = {"weight": E4M3 + 2.0**-8, "weight_floor": 2.0**-14, "total": 2.0**-8, "product": cut["product"]}
        query = 0.0 if spec.query_dtype == "fp8_e4m3" else E4M3 + STEPS
        most = 65504.0 if spec.softcap is None else math.inf
        floor = E4M3_FLOOR / 64  # the elements of a row are scaled until they add up to 64 or more
        return Rounding(query, query_floor_of_sum=floor, cap=2.0**-9, most_factor=most, **scores, **weights)
    if backend == "gluon":  # two e4m3 terms: hi + lo / 16
        return Rounding(BF16, 2.0**-21, weight=BF16, weight_floor=2.0**-21, **cut)
    if fast:
        query = 0.0 if spec.query_dtype == "fp8_e4m3" else E4M3 + 4 * STEPS
        on_cpu = device.arch == "cpu"
        made = Rounding(query, E4M3_FLOOR / 448, **(sums if on_cpu else {**cut, "product": sums["product"]}))
        if spec.layout == "leaf":
            floor = E4M3_FLOOR / 256  # P is at most 2^8
            return replace(made, weight=E4M3, weight_floor=floor, product=(sums if on_cpu else cut)["product"])
        return replace(made, weight=FP16, weight_floor=FP16_FLOOR)
    if spec.kv_dtype == "bfloat16":
        return Rounding(BF16 if spec.query_dtype == "float16" else 0.0, weight=BF16, **sums)
    # fp16 holds a query of any dtype once its row is scaled to 2^14, but for what is 2^-28 below the row's largest
    return Rounding(0.0, 2.0**-39, weight=FP16, weight_floor=FP16_FLOOR, **sums)


@dataclass
class Limits:
    """Where a result must lie: out fp64 [T, Hq, Dv] and lse fp64 [T, Hq], each from low to high."""

    low: torch.Tensor
    high: torch.Tensor
    lse_low: torch.Tensor
    lse_high: torch.Tensor


def limits(batch: Batch, backends: tuple[str, str], device: Device, num_decodes: int | None = None) -> Limits:
    """The limits of a batch's result where `backends` run (prefill, decode); reads lengths on the host.

    Rows of no sequence, and those that see nothing, are 0 and -inf.
    """
    spec, total_rows = batch.spec, batch.q.shape[0]
    out = torch.zeros(2, total_rows, spec.num_q_heads, spec.value_dim, dtype=torch.float64, device=batch.q.device)
    lse = torch.full(out.shape[:3], float("-inf"), dtype=torch.float64, device=batch.q.device)
    starts = [min(max(start, 0), total_rows) for start in batch.query_starts.tolist()]
    for index, length in enumerate(batch.seq_lens.tolist()):
        first, rows = starts[index], starts[index + 1] - starts[index]
        length = min(length, batch.page_table.shape[1] * spec.page_size)
        if rows <= 0 or length <= 0:
            continue
        decodes = rows <= spec.max_query_len if num_decodes is None else index < num_decodes
        phase = "decode" if decodes else "prefill"
        rounding = rounding_of(spec, backends[decodes], phase, device, length)
        _sequence(batch, index, slice(first, first + rows), length, rounding, out, lse)
    return Limits(out[0], out[1], lse[0], lse[1])


def _sequence(
    batch: Batch,
    index: int,
    span: slice,
    length: int,
    rounding: Rounding,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write the limits of one sequence's rows."""
    spec, double = batch.spec, torch.float64
    rows, heads, group = span.stop - span.start, spec.num_kv_heads, spec.group_size
    begin = first_token(spec, length - rows)
    k, v, live = gather(spec, batch.cache.bytes(), batch.page_table[index], begin, length, double)
    q = _query(batch, span).view(rows, heads, group, spec.head_dim).permute(1, 0, 2, 3)
    positions = torch.arange(length - rows, length, device=k.device)
    visible = live & visible_tokens(spec, positions, torch.arange(begin, length, device=k.device))
    visible = visible[None, :, None]  # [1, rows, 1, n]
    s = _product(q, k.transpose(1, 2)) * spec.scale
    sizes = _product(q.abs(), k.abs().transpose(1, 2))
    floor = rounding.query_floor * q.abs().amax(-1, keepdim=True)
    floor = floor + rounding.query_floor_of_sum * q.abs().sum(-1, keepdim=True)
    off = spec.scale * ((rounding.query + rounding.score) * sizes + floor * k.abs().sum(-1)[:, None, None])
    off = off + rounding.score_floor + rounding.scaled * s.abs()
    if rounding.most_factor < math.inf and batch.cache.k_scale is not None:
        scale = batch.cache.k_scale.double().reshape(-1, 1, 1, 1)
        factor = q.abs().amax(-1, keepdim=True) * scale * (spec.scale * math.log2(math.e) / 224)
        off = off + (1 - rounding.most_factor / factor).clamp_min(0.0) * s.abs()
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
        off = off + rounding.cap * spec.softcap
    s = torch.where(visible, s, float("-inf"))
    sees = visible.any(-1)  # [1, rows, 1]
    size = torch.where(visible, s.abs(), 0.0).amax(-1, keepdim=True) if s.shape[-1] else s.sum(-1, keepdim=True)
    if spec.sinks:
        sink = batch.arguments["sinks"].to(double).view(heads, 1, group, 1).expand(-1, rows, -1, -1)
        size = torch.maximum(size, torch.where(sink.isfinite(), sink.abs(), 0.0))
        s, off = torch.cat([s, sink], -1), torch.cat([off, torch.zeros_like(sink)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    off = off + rounding.scaled * size
    norm = torch.logsumexp(s, -1, keepdim=True)
    log_p = torch.where(s > float("-inf"), s - norm, float("-inf"))
    p = log_p.exp()
    log_sum = torch.logsumexp(log_p + off, -1, keepdim=True).clamp_min(0.0)
    spread = off + log_sum + rounding.total
    up = (log_p + spread).clamp_max(0.0).exp()  # not of p, which underflows where an error may bring it back
    least = torch.maximum(p * (-spread).exp(), 1 - (up.sum(-1, keepdim=True) - up)).minimum(p)
    change = torch.maximum(up - p, p - least)
    c = _value_scales(batch, index, begin, length, v.shape[1])  # [heads, 1, n]
    floor = (up * c[:, :, None]).amax(-1, keepdim=True) * (v.abs() / c.transpose(1, 2)).sum(1)[:, None, None]
    errs = change + (rounding.weight + rounding.product) * up + 16 * STEPS * (p + up)
    # What is smaller than 2^-126 is flushed to 0 or loses bits: weights, V's scale over a denominator, results.
    flushed = 2.0**-126 * (1 + (v.abs() / _least_scale(batch, c)).sum(1)[:, None, None])
    error = _product(errs, v.abs()) + rounding.weight_floor * floor + flushed
    exact = _product(p, v)

    def placed(x: torch.Tensor, otherwise: float) -> torch.Tensor:
        x = torch.where(sees[..., None], x, otherwise)
        return x.permute(1, 0, 2, 3).reshape(rows, spec.num_q_heads, x.shape[-1])

    lse_error = log_sum + rounding.total + rounding.scaled * (1 + norm.abs())
    for side, sign in enumerate((-1, 1)):
        out[side, span] = placed(exact + sign * error, 0.0)
        lse[side, span] = placed(norm + sign * lse_error, float("-inf"))[..., 0]


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [heads, rows, group, m] times y [heads, m, n]; one product a head, not one a row."""
    heads, rows, group, m = x.shape
    return (x.reshape(heads, rows * group, m) @ y).view(heads, rows, group, y.shape[2])


def _query(batch: Batch, span: slice) -> torch.Tensor:
    """Query rows in fp64, an e4m3 one with its scale."""
    q = batch.q[span]
    if batch.spec.query_dtype != "fp8_e4m3":
        return q.double()
    scale = batch.arguments.get("q_scale")
    q = decode(q.view(torch.uint8), FORMATS["fp8_e4m3"], torch.float64)
    return q if scale is None else q * scale.double().reshape(-1, 1)


def _least_scale(batch: Batch, of_tokens: torch.Tensor) -> torch.Tensor:
    """V's scales [heads or 1, n or 1, 1], of `_value_scales` or per tensor and head; 1 where they are larger."""
    scale = batch.cache.v_scale
    if batch.spec.fp8 and batch.spec.scale_granularity != "token_head" and scale is not None:
        return scale.double().reshape(-1, 1, 1).clamp_max(1.0)
    return of_tokens.transpose(1, 2).clamp_max(1.0)


def _value_scales(batch: Batch, index: int, begin: int, end: int, count: int) -> torch.Tensor:
    """token_head scales of V [heads, 1, count]; 1 for other granularities, for a sink and for what is not there."""
    spec, scale = batch.spec, batch.cache.v_scale
    found = torch.ones(spec.num_kv_heads, 1, count, dtype=torch.float64, device=batch.q.device)
    if spec.fp8 and spec.scale_granularity == "token_head" and scale is not None:
        tokens = torch.arange(begin, end, device=batch.q.device)
        ids = batch.page_table[index, tokens // spec.page_size].long()
        there = (ids >= 0) & (ids < batch.cache.num_pages)
        taken = scale[torch.where(there, ids, 0), :, tokens % spec.page_size].T.double()
        found[:, 0, : end - begin] = torch.where(there, taken, 1.0)
    return found


def rounded(x: torch.Tensor, spec: AttentionSpec, scale: torch.Tensor | None) -> torch.Tensor:
    """fp64 `x` as the output's dtype holds it, as fp64 and without the output's scale."""
    if scale is not None:
        x = x / scale.double()
    if spec.out_dtype == "fp8_e4m3":
        format = FORMATS["fp8_e4m3"]
        return cast(x, format).view(format.dtype).double()
    return x.to(FORMATS[spec.out_dtype].dtype).double()


def faults(
    batch: Batch,
    out: torch.Tensor,
    backends: tuple[str, str],
    device: Device,
    num_decodes: int | None = None,
) -> list[str]:
    """What of a result of the batch (its lse as `batch.lse`) lies outside its limits, in words."""
    spec = batch.spec
    limit = limits(batch, backends, device, num_decodes)
    scale = batch.arguments.get("out_scale")
    found = []
    pairs = [("out", out.double(), rounded(limit.low, spec, scale), rounded(limit.high, spec, scale))]
    if batch.lse is not None:
        pairs.append(("lse", batch.lse.double(), limit.lse_low.float().double(), limit.lse_high.float().double()))
    for name, got, low, high in pairs:
        wrong = ~((got >= low) & (got <= high))
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            which = f"{name}{at} is {got[tuple(at)]:.6g}, not in [{low[tuple(at)]:.6g}, {high[tuple(at)]:.6g}]"
            found.append(f"{which}; {int(wrong.sum())} of {wrong.numel()} outside")
    return found
