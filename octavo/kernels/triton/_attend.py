"""The inner loop of attention, shared by prefill and decode: rows of one KV head over a range of tiles of tokens.

Rows are packed: query rows times the query heads of one KV head. Whole tiles that every row sees run without masks,
first; then the tiles at either end run with them. A tile's P is taken relative to the tile's own maximum, and the
accumulators are rescaled to it (`reference` below), so that no sink elsewhere costs a flat tail its precision; the
running maximum only keeps the reference from falling so far that the accumulators could overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import (
    LOG2E,
    NEVER,
    first_visible,
    head_scale,
    in_value_order,
    load_keys,
    load_values,
    product,
    settled,
    stored_to_operand,
    tile_pages,
    to_operand,
    token_scales,
)

SLACK = tl.constexpr(30.0)  # bits by which a tile's reference may lie below the running maximum


@triton.jit
def score_factor(c: tl.constexpr):
    """What q . k (unscaled by scales) is multiplied by, so that `tile_scores` comes out in powers of two."""
    if c.softcap is None:
        return c.softmax_scale * LOG2E
    else:
        return 2.0 * LOG2E * c.softmax_scale / c.softcap


@triton.jit
def row_factors(factor, memory, head, c: tl.constexpr):
    """What rows of q . k are multiplied by; above 0, so that the factor of a masked score leaves it at -inf."""
    k_scale = head_scale(memory.k_scale, memory.k_scale_strides, head, c)
    return tl.maximum(factor * (k_scale * score_factor(c)), 1e-37)


@triton.jit
def capped(x, c: tl.constexpr):
    """softcap * tanh(score / softcap) in powers of two, of x = 2 log2(e) score / softcap."""
    return (1.0 - 2.0 / (1.0 + tl.exp2(x))) * (c.softcap * LOG2E)


@triton.jit
def tile_step(q, factor, limit, state, first, begin, end, head, table, memory, c: tl.constexpr, masked: tl.constexpr):
    """One tile of tokens from `first` on; `state` is (acc [rows, dim_v], total, reference, peak [rows]).

    limit: the last token each row sees. begin, end: what any of the rows sees.
    """
    kind_k: tl.constexpr = c.dot_k
    kind_v: tl.constexpr = c.dot_v
    acc, total, reference, peak = state
    page, live = tile_pages(first, begin, end, table, c, masked)
    k = stored_to_operand(load_keys(first, begin, end, page, live, head, memory, c, masked), kind_k, c)
    s = product(q, tl.trans(k), c)  # [rows, tokens]
    plain: tl.constexpr = c.softcap is None and c.scales != "token_head"
    if not plain:
        s = s * factor[:, None]
        if c.scales == "token_head":
            k_scale = token_scales(memory.k_scale, memory.k_scale_strides, first, begin, end, page, live, head, c)
            s = s * k_scale[None, :]
        if c.softcap is not None:
            s = capped(s, c)
    if masked:
        token = (first + tl.arange(0, c.tokens))[None, :]
        visible = token <= limit[:, None]
        if c.window is not None:
            visible = visible & (token > limit[:, None] - c.window)
        visible = visible & (live if c.one_page else live[None, :])
        s = tl.where(visible, s, float("-inf"))
    elif not c.one_page:
        s = tl.where(live[None, :], s, float("-inf"))
    tile_peak = tl.max(s, 1)
    if plain:
        tile_peak = tile_peak * factor  # positive, so the maximum stays the maximum
    if c.one_page:
        tile_peak = tl.where(live, tile_peak, float("-inf"))
    peak = tl.maximum(peak, tile_peak)
    new = tl.maximum(tile_peak, peak - SLACK)
    new = tl.where(tile_peak == float("-inf"), reference, new)  # a tile that a row does not see leaves it as it was
    alpha = tl.exp2(reference - new)
    lowered = new - c.p_bits  # P is 2^p_bits at its largest, in `acc` and `total` alike
    if c.p_bits > 0:
        # Rounded, it may lie a little lower, and of scores of 2^24 and more so much that P would exceed e4m3, 2^8.8;
        # then P is 1 at most.
        lowered = tl.where(new - lowered > c.p_bits + 0.5, new, lowered)
    if c.one_page:
        lowered = tl.where(live, lowered, float("inf"))  # a page that is not there: every P is 0
    # No multiply-add (enable_fp_fusion), or s factor would not be rounded as the maximum was, and of scores of 2^25 P
    # be anything. A softcap bounds them.
    p = tl.exp2((s * factor[:, None] if plain else s) - lowered[:, None])
    total = total * alpha + tl.sum(p, 1)
    v = stored_to_operand(load_values(first, begin, end, page, live, head, memory, c, masked), kind_v, c)
    if c.settle_v:
        v = settled(v)
    if c.scales == "token_head":
        # P times the V scales, divided by the largest of the row: at most 2^p_bits again, whatever the scales are.
        v_scale = token_scales(memory.v_scale, memory.v_scale_strides, first, begin, end, page, live, head, c)
        p = p * v_scale[None, :]
        most = tl.maximum(tl.max(p, 1), 1.1754944e-38)  # a normal number: its inverse is one
        p = p * (1.0 / most)[:, None] * c.p_most
        pv = product(in_value_order(to_operand(p, kind_v, c), c), v, c)
        acc = acc * alpha[:, None] + pv * (most * (1.0 / c.p_most))[:, None]
    else:
        acc = acc * alpha[:, None] + product(in_value_order(to_operand(p, kind_v, c), c), v, c)
    return acc, total, new, peak


@triton.jit
def attend(q, factor, limit, position, last_position, low, high, head, table, memory, c: tl.constexpr):
    """Rows over tiles [low, high): (acc fp32 [rows, dim_v padded], total, reference and peak fp32 [rows]).

    acc and total are sums over the tokens of 2^(score - reference) v and 2^(score - reference), both times 2^p_bits;
    peak is the largest score, at most SLACK above the reference.
    position, last_position: of the first and the last of the rows; limit: of each, -1 for none.
    """
    begin = first_visible(position, c)
    end = last_position + 1
    # Tiles that every row sees whole.
    full_low = tl.minimum(tl.maximum(tl.cdiv(first_visible(last_position, c), c.tokens), low), high)
    full_high = tl.minimum(tl.maximum(tl.maximum(position + 1, 0) // c.tokens, full_low), high)
    if c.batch_invariant and c.window is not None:
        # Which tiles are whole depends on a row's neighbours, and the order of the sums on that: one loop, in order.
        full_low = low
        full_high = low
    acc = tl.full([c.rows, c.dim_v_padded], 0.0, tl.float32)
    total = tl.full([c.rows], 0.0, tl.float32)
    reference = tl.full([c.rows], NEVER, tl.float32)
    peak = tl.full([c.rows], NEVER, tl.float32)
    for tile in tl.range(full_low, full_high):
        acc, total, reference, peak = tile_step(
            q, factor, limit, (acc, total, reference, peak), tile * c.tokens, begin, end, head, table, memory, c, False
        )
    left = full_low - low
    for i in tl.range(0, left + high - full_high, num_stages=1):
        tile = tl.where(i < left, low + i, full_high + i - left)
        acc, total, reference, peak = tile_step(
            q, factor, limit, (acc, total, reference, peak), tile * c.tokens, begin, end, head, table, memory, c, True
        )
    return acc, total, reference, peak


@triton.jit
def under_sinks(acc, total, reference, peak, output, c: tl.constexpr):
    """(acc, total, what they are relative to) for `finish`: where sinks join, relative to the largest score.

    A sink may be 2^126 times all tokens together and leave them what fp32 holds; of a lower reference, less.
    """
    if output.sinks is None:
        return acc, total, reference - c.p_bits
    else:
        shift = tl.exp2(reference - c.p_bits - peak)
        return acc * shift[:, None], total * shift, peak
