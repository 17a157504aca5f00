"""How far attention may be from fp64: in the worst case, element by element, and row by row, from how a kernel rounds.

`grid.faults` compares with what bf16 attention errs on ordinary numbers. Inputs that are made to be difficult need
what holds for every input. Of one row with exact scores s_j, of the query as the kernel makes it (`rounding.queries`),
weights p_j = exp(s_j) / Z (Z with the sink) and values v_j, a kernel has

* scores off by |d_j| <= D_j. A query element is off by e, half of what `queries` leaves open, or by `query` |q| and
  `query_floor` max |q|; a sum of products by `score` sum |q| |k_j|, and by what tensor cores cut (`cuts`); whatever
  follows by `scaled` (|s_j| + max |s|), `score_floor`, and `cap` times a softcap: D_j = softmax_scale (sum (e + `score`
  |q|) |k_j| + cut + ...) + `scaled` (|s_j| + max |s|) + ... (a softcap's slope is at most 1: no D_j gets larger).
* a denominator off by the factor sum p_j e^(d_j) <= e^L, L = log sum p_j e^(D_j). It is at least e^-L as well: by
  Cauchy and Schwarz sum p_j e^(D_j) times sum p_j e^(-D_j) is at least 1. Adding it up errs by `total` of it.
* so with X_j = D_j + L + total the weight that it really has lies between p_j e^(-X_j) and p_j e^(X_j) =: up_j; as
  weights add up to 1, up_j is at most 1, and the weight at least 1 - sum of the other up_i. `change`_j is the larger
  distance of p_j to these ends.
* P rounded before it is multiplied: by w_j of itself, which is `weight`, or `top` where j is the largest (`_weights`),
  and by at most `weight_floor` of the largest P times V scale of its tile, which is no larger than that of the row.
  Sums of products err by `product` sum |p v|, and by what is cut.

Together |out - exact| <= sum_j |v_j| (change_j + (w_j + product) up_j) + weight_floor sum_j (|v_j| / c_j) max_i up_i
c_i + cut, with c the scale of a token's value (1 where there is one scale for all), and |lse - exact| <= L + total. The
last rounding needs no term: it is monotone, so a result lies between the rounded ends of its interval.

That is met if the errors of all tokens conspire against one element, and n tokens' are sqrt(n) times less if they do
not: `norms` bounds whole rows, by the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..device import Device
from ..formats import FORMATS, cast, decode
from ..reference.attention import first_token, gather, visible_tokens
from ..spec import AttentionSpec
from .cuts import of_products, of_scores, product
from .inputs import Batch
from .norms import Row, norm_limit, outside
from .rounding import E4M3_NORMAL, STEPS, Rounding, queries, rounding_of


@dataclass
class Limits:
    """Where a result must lie.

    Attributes:
        low, high: of out, fp64 [T, Hq, Dv]. lse_low, lse_high: of lse, fp64 [T, Hq].
        exact: fp64 out [T, Hq, Dv] of the query as the kernel makes it. norm: the most that a row is from it [T, Hq].
    """

    low: torch.Tensor
    high: torch.Tensor
    lse_low: torch.Tensor
    lse_high: torch.Tensor
    exact: torch.Tensor
    norm: torch.Tensor


def limits(batch: Batch, backends: tuple[str, str], device: Device, num_decodes: int | None = None) -> Limits:
    """The limits of a batch's result where `backends` run (prefill, decode); reads lengths on the host.

    Rows of no sequence, and those that see nothing, are 0 and -inf.
    """
    spec, total_rows = batch.spec, batch.q.shape[0]
    low, high, exact = torch.zeros(
        3, total_rows, spec.num_q_heads, spec.value_dim, dtype=torch.float64, device=batch.q.device
    )
    lse_low, lse_high = torch.full((2, *low.shape[:2]), -math.inf, dtype=torch.float64, device=low.device)
    found = Limits(low, high, lse_low, lse_high, exact, torch.zeros_like(lse_low))
    starts = [min(max(start, 0), total_rows) for start in batch.query_starts.tolist()]
    for index, length in enumerate(batch.seq_lens.tolist()):
        first, rows = starts[index], starts[index + 1] - starts[index]
        length = min(length, batch.page_table.shape[1] * spec.page_size)
        if rows <= 0 or length <= 0:
            continue
        decodes = rows <= spec.max_query_len if num_decodes is None else index < num_decodes
        phase = "decode" if decodes else "prefill"
        rounding = rounding_of(spec, backends[decodes], phase, device, length)
        _sequence(batch, index, slice(first, first + rows), length, rounding, found)
    return found


@dataclass(frozen=True)
class _Scores:
    """Exact scores of a sequence's rows, -inf where a row does not see [heads, rows, group, n], a sink's at the end.

    Attributes:
        worst, likely: what they are off by at most, and as a rule. sees: rows that see anything.
    """

    s: torch.Tensor
    worst: torch.Tensor
    likely: torch.Tensor
    sees: torch.Tensor


def _sequence(batch: Batch, index: int, span: slice, length: int, rounding: Rounding, found: Limits) -> None:
    """Write the limits of one sequence's rows."""
    spec, rows = batch.spec, span.stop - span.start
    begin = first_token(spec, length - rows)
    k, v, live = gather(spec, batch.cache.bytes(), batch.page_table[index], begin, length, torch.float64)
    positions = torch.arange(length - rows, length, device=k.device)
    visible = live & visible_tokens(spec, positions, torch.arange(begin, length, device=k.device))
    k_scale, v_scale = (
        _scales(batch, side, index, begin, length) for side in (batch.cache.k_scale, batch.cache.v_scale)
    )
    scores = _scores(batch, span, k, k_scale, visible[None, :, None], rounding)
    s, worst = scores.s, scores.worst
    if spec.sinks:
        v, v_scale = (pad(x, (0, 0, 0, 1), value=value) for x, value in ((v, 0.0), (v_scale, 1.0)))
    norm = torch.logsumexp(s, -1, keepdim=True)
    log_p = torch.where(s > -math.inf, s - norm, -math.inf)
    p = log_p.exp()
    log_sum = torch.logsumexp(log_p + worst, -1, keepdim=True).clamp_min(0.0)
    spread = worst + log_sum + rounding.total
    up = (log_p + spread).clamp_max(0.0).exp()  # not of p, which underflows where an error may bring it back
    least = torch.maximum(p * (-spread).exp(), 1 - (up.sum(-1, keepdim=True) - up)).minimum(p)
    change = torch.maximum(up - p, p - least)
    errs = change + (_weights(scores, begin, length - begin, rounding) + rounding.product) * up + 16 * STEPS * (p + up)
    exact, sizes = product(p, v), v.abs()
    error = product(errs, sizes)
    floor = _floor(spec, up, sizes, v_scale, rounding)
    lost = likely = torch.zeros_like(exact)
    if rounding.cut_product:
        before = begin % spec.page_size if rounding.paged else begin
        lost, likely = of_products(p, up, v, E4M3_NORMAL * v_scale, error, before, rounding)
    row = Row(p, v, exact, scores.likely, likely, floor, spec.sinks)
    of_row = norm_limit(spec, batch.arguments.get("out_scale"), row, rounding)

    def placed(x: torch.Tensor, otherwise: float) -> torch.Tensor:
        x = torch.where(scores.sees[..., None], x, otherwise)
        return x.permute(1, 0, 2, 3).reshape(rows, spec.num_q_heads, x.shape[-1])

    found.exact[span], found.norm[span] = placed(exact, 0.0), placed(of_row, 0.0)[..., 0]
    error = error + floor + lost
    lse_error = log_sum + rounding.total + rounding.scaled * (1 + norm.abs())
    for out, lse, sign in ((found.low, found.lse_low, -1), (found.high, found.lse_high, 1)):
        out[span] = placed(exact + sign * error, 0.0)
        lse[span] = placed(norm + sign * lse_error, -math.inf)[..., 0]


def _scores(
    batch: Batch, span: slice, k: torch.Tensor, k_scale: torch.Tensor, visible: torch.Tensor, rounding: Rounding
) -> _Scores:
    """Scores of rows over keys k [heads, n, D], of which they see `visible` [1, rows, 1, n]."""
    spec, rows, heads, group = batch.spec, span.stop - span.start, batch.spec.num_kv_heads, batch.spec.group_size
    of_query = _query(batch, span, rounding)
    q, loose, smallest, second = (x.view(rows, heads, group, x.shape[-1]).permute(1, 0, 2, 3) for x in of_query)
    most = q.abs().amax(-1, keepdim=True)
    loose = loose + (rounding.query + rounding.score) * q.abs() + rounding.query_floor * most
    off = product(loose, k.abs().transpose(1, 2)) if bool(loose.any()) else torch.zeros(())
    s = product(q, k.transpose(1, 2)) * spec.scale
    cut = likely = torch.zeros(())
    if rounding.cut:
        cut, likely, sums = of_scores(q, k, second, (smallest, E4M3_NORMAL * k_scale), rounding.tail)
        off = off + rounding.half * sums if rounding.half else off
    off = off * spec.scale + rounding.score_floor + rounding.scaled * s.abs()
    if rounding.most_factor < math.inf and batch.cache.k_scale is not None:
        factor = most * batch.cache.k_scale.double().reshape(-1, 1, 1, 1) * (spec.scale * math.log2(math.e) / 224)
        off = off + (1 - rounding.most_factor / factor).clamp_min(0.0) * s.abs()
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
        off = off + rounding.cap * spec.softcap
    cut, likely = (x.expand_as(s) * spec.scale for x in (cut, likely))
    s = torch.where(visible, s, -math.inf)
    size = torch.where(visible, s.abs(), 0.0).amax(-1, keepdim=True) if s.shape[-1] else s.sum(-1, keepdim=True)
    if spec.sinks:
        sink = batch.arguments["sinks"].double().view(heads, 1, group, 1).expand(-1, rows, -1, -1)
        size = torch.maximum(size, torch.where(sink.isfinite(), sink.abs(), 0.0))
        s = torch.cat([s, sink], -1)
        off, cut, likely = (pad(x, (0, 1)) for x in (off, cut, likely))
    off = off + rounding.scaled * size
    return _Scores(s, off + cut, off + likely, visible.any(-1))


def _weights(scores: _Scores, begin: int, tokens: int, rounding: Rounding) -> torch.Tensor | float:
    """What each P is off by, of itself, before its product.

    A row's largest is a power of two, or nearly, if its tile's maximum is what P is relative to, and if no error of a
    score makes another one the largest. Hopper's fast prefill goes from the last tile back, and a maximum that is not
    exceeded by more than `slack` stays.
    """
    if rounding.top is None or tokens == 0:
        return rounding.weight
    s, worst = scores.s[..., :tokens], scores.worst[..., :tokens]
    best, at = s.max(-1, keepdim=True)
    others = (s + worst).scatter(-1, at, -math.inf)
    least = best - worst.gather(-1, at)
    bits = best.abs() * math.log2(math.e) + 6
    alone = (least > others.amax(-1, keepdim=True)) & (bits < 64)
    if rounding.slack:
        tile = (begin + torch.arange(tokens, device=s.device)) // rounding.step
        before = torch.where(tile > tile[at], others, -math.inf).amax(-1, keepdim=True)
        alone &= least > before + rounding.slack + 0.125
    top = torch.where(alone, rounding.top + rounding.top_slope * bits, rounding.weight)
    return torch.full_like(scores.s, rounding.weight).scatter(-1, at, top)


def _floor(
    spec: AttentionSpec, up: torch.Tensor, sizes: torch.Tensor, v_scale: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """What an element is off by however small it is, of weights up to `up` and values of `sizes` [heads, n, Dv].

    P's smallest numbers; and what is smaller than 2^-126 is flushed to 0 or loses bits: weights, V's scale over a
    denominator, results.
    """
    c = v_scale if spec.scale_granularity == "token_head" else torch.ones_like(v_scale)
    largest_p = (up * c.transpose(1, 2)[:, :, None]).amax(-1, keepdim=True)
    flushed = 2.0**-126 * (1 + (sizes / v_scale.clamp_max(1.0)).sum(1)[:, None, None])
    return rounding.weight_floor * largest_p * (sizes / c).sum(1)[:, None, None] + flushed


def _query(batch: Batch, span: slice, rounding: Rounding) -> tuple[torch.Tensor, ...]:
    """Query rows as a kernel makes them, fp64, an e4m3 one with its scale; what is open of each element; the smallest
    numbers that are normal; the second of two terms.
    """
    spec, q = batch.spec, batch.q[span]
    scale = torch.ones((), dtype=torch.float64, device=q.device)
    if spec.query_dtype == "fp8_e4m3":
        q = decode(q.view(torch.uint8), FORMATS["fp8_e4m3"], torch.float64)
        if (given := batch.arguments.get("q_scale")) is not None:
            scale = given.double().reshape(-1, 1)
    q = q.double()
    k_scale = batch.cache.k_scale
    repeated = spec.softcap is None and k_scale is not None and bool(k_scale.max() * spec.scale > 1)
    made = queries(q, rounding.form, repeated)
    return tuple(x * scale for x in made)


def _scales(batch: Batch, scale: torch.Tensor | None, index: int, begin: int, end: int) -> torch.Tensor:
    """Scales of a cache's tokens [heads, n, 1], 1 where there are none or the page is not there."""
    spec, count = batch.spec, end - begin
    found = torch.ones(spec.num_kv_heads, count, 1, dtype=torch.float64, device=batch.q.device)
    if not spec.fp8 or scale is None:
        return found
    if spec.scale_granularity != "token_head":
        return found * scale.double().reshape(-1, 1, 1)
    tokens = torch.arange(begin, end, device=batch.q.device)
    ids = batch.page_table[index, tokens // spec.page_size].long()
    there = (ids >= 0) & (ids < batch.cache.num_pages)
    taken = scale[torch.where(there, ids, 0), :, tokens % spec.page_size].T.double()
    return torch.where(there, taken, found[..., 0])[..., None]


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
    over = outside(out.double(), limit.exact, limit.norm, spec, scale)
    if not found and bool((over > 1).any()):
        at = over.argmax().item()
        row, head = divmod(int(at), spec.num_q_heads)
        which = f"out[{row}, {head}] is {float(over.max()):.3g} times as far from fp64 as it may be"
        found.append(f"{which}; {int((over > 1).sum())} of {over.numel()} rows are too far")
    return found
