"""The reference against the formula written out row by row in plain loops, and its edge cases in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import octavo
from octavo import AttentionSpec, InvalidInput
from octavo.reference.attention import alibi_slopes
from octavo.testing.compare import errors, exact, plain_bf16
from octavo.testing.inputs import make_batch, slots_of


def by_loops(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the definition: one row, one head, one key at a time, in Python floats."""
    spec, cache = batch.spec, batch.cache
    q = batch.q.double()
    if spec.query_dtype == "fp8_e4m3":
        q = q * float(batch.arguments["q_scale"])
    rows = q.shape[0]
    out = torch.zeros(rows, spec.num_q_heads, spec.value_dim, dtype=torch.float64)
    lse = torch.full((rows, spec.num_q_heads), -math.inf)
    slopes = alibi_slopes(spec.num_q_heads).tolist()
    for b, length in enumerate(batch.seq_lens.tolist()):
        first, end = batch.query_starts[b : b + 2].tolist()
        k, v = (x.double() for x in cache.gather(batch.page_table[b], max(length, 0)))
        for row in range(first, end):
            p = length - (end - first) + (row - first)
            for head in range(spec.num_q_heads):
                kv = head // spec.group_size
                terms = []
                for t in range(length):
                    if spec.causal and t > p or p < 0:
                        continue
                    if spec.window and abs(p - t) >= spec.window:
                        continue
                    if spec.attention_chunk and t // spec.attention_chunk != p // spec.attention_chunk:
                        continue
                    s = float(q[row, head] @ k[t, kv]) * spec.scale
                    if spec.softcap:
                        s = spec.softcap * math.tanh(s / spec.softcap)
                    if spec.alibi:
                        s -= slopes[head] * abs(p - t)
                    terms.append((s, t))
                if not terms:
                    continue
                total = sum(math.exp(s) for s, _ in terms)
                if spec.sinks:
                    total += math.exp(float(batch.arguments["sinks"][head]))
                out[row, head] = sum(math.exp(s) * v[t, kv] for s, t in terms) / total
                lse[row, head] = math.log(total)
    return out, lse


VARIANTS = [
    {},
    {"window": 5},
    {"sinks": True, "softcap": 2.0},
    {"causal": False},
    {"causal": False, "window": 4},
    {"attention_chunk": 8},
    {"alibi": True},
    {"head_dim_v": 16, "scale_granularity": "token_head"},
    {"scale_granularity": "head", "kv_dtype": "fp8_e5m2"},
    {"kv_dtype": "bfloat16", "layout": "nhd", "page_size": 7},
    {"layout": "hnd", "page_size": 1},
    {"query_dtype": "fp8_e4m3"},
    {"query_dtype": "float16", "softmax_scale": 0.5},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "plain")
def test_equals_the_formula(changes):
    fields = {"page_size": 32, "out_dtype": "float32", "lse": True, "max_query_len": 2, **changes}
    spec = AttentionSpec(6, 2, 32, **fields)
    batch = make_batch(
        spec, [9, 20, 3, 33, 0, 12], [1, 2, 5, 3, 1, 0], seed=1
    )  # 5 rows on 3 tokens: two rows see nothing
    out = batch.run()
    truth, lse = by_loops(batch)
    assert torch.allclose(out.double(), truth, rtol=0, atol=2e-6)
    assert torch.allclose(batch.lse, lse, atol=2e-6)
    in_fp64, lse_fp64 = exact(batch)
    # gather rounds stored * scale to fp32, which is exact only where the scale is a power of two.
    atol = 1e-6 if spec.scale_granularity == "token_head" else 1e-12
    assert torch.allclose(in_fp64, truth, rtol=0, atol=atol) and torch.allclose(lse_fp64, lse, atol=2e-6)


def test_equals_torch_sdpa():
    spec = AttentionSpec(8, 2, 64, kv_dtype="float32", query_dtype="float32", out_dtype="float32", layout="nhd")
    batch = make_batch(spec, [70], [70])
    expected = torch.nn.functional.scaled_dot_product_attention(
        batch.q.transpose(0, 1)[None],
        batch.k.transpose(0, 1)[None],
        batch.v.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    assert torch.allclose(batch.run(), expected[0].transpose(0, 1), atol=2e-6)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32", "fp8_e4m3"])
def test_every_output_dtype_is_as_near_as_bf16_attention(out_dtype):
    batch = make_batch(AttentionSpec(8, 2, 64, out_dtype=out_dtype), [1, 64, 130], [1, 1, 40])
    assert errors(batch, batch.run()).within(1.1)


def test_an_e4m3_query_has_a_scale_a_head():
    """As many heads as head_dim: a scale along the wrong dimension would not show in the shapes."""
    batch = make_batch(AttentionSpec(32, 8, 32, query_dtype="fp8_e4m3"), [1, 70], [1, 3])
    batch.arguments["q_scale"] = torch.linspace(0.05, 2, 32)
    assert torch.equal(plain_bf16(batch), plain_bf16(unscaled(batch)))
    assert errors(batch, batch.run()).within(1.1)


def unscaled(batch):
    """The batch with its query as fp32 numbers, the scale of each head in them."""
    q = batch.q.float() * batch.arguments["q_scale"][:, None]
    return replace(batch, spec=replace(batch.spec, query_dtype="float32"), q=q)


def test_no_key_to_attend_to_gives_zero_and_minus_infinity():
    spec = AttentionSpec(4, 2, 32, lse=True, sinks=True, out_dtype="float32")
    batch = make_batch(spec, [0, 2], [1, 4])
    out = batch.run()
    assert not out[:3].any() and bool((batch.lse[:3] == -math.inf).all())
    assert out[3:].any() and batch.lse[3:].isfinite().all()


def test_rows_of_no_sequence_are_zero():
    spec = AttentionSpec(4, 2, 32, lse=True, out_dtype="float32")
    batch = make_batch(spec, [5, 6], [1, 1])
    batch.q = torch.cat([batch.q[:1], batch.q, batch.q])  # rows before the first start and after the last
    batch.query_starts += 1
    for num_decodes in (None, 0, 2):
        out = batch.run(num_decodes=num_decodes)
        assert not out[0].any() and not out[3:].any() and out[1:3].any()
        assert bool((batch.lse[3:] == -math.inf).all())


def test_pages_that_are_not_pages_are_not_seen():
    spec = AttentionSpec(2, 1, 32, page_size=32, out_dtype="float32", lse=True)
    batch = make_batch(spec, [96], [1])
    whole = batch.run()
    batch.page_table[0, 1] = 2**31 - 1
    holed = batch.run()
    k, v = batch.cache.gather(batch.page_table[0].clamp(0, 3), 96)
    seen = torch.cat([torch.arange(32), torch.arange(64, 96)])
    scores = batch.q[0].float() @ k[seen, 0].T * spec.scale
    assert torch.allclose(holed[0], scores.softmax(-1) @ v[seen, 0], atol=1e-6) and not torch.equal(whole, holed)


def test_lengths_beyond_the_table_are_cut_to_it():
    batch = make_batch(AttentionSpec(2, 1, 32, page_size=32), [64], [1])
    batch.page_table = batch.page_table[:, :2].contiguous()
    out = batch.run()
    batch.seq_lens.fill_(2**31 - 1)
    assert torch.equal(batch.run(), out)


def test_merge_states_is_attention_over_the_union():
    spec = AttentionSpec(4, 2, 32, lse=True, out_dtype="float32", page_size=32, sinks=True)
    batch = make_batch(spec, [96], [1])
    whole, whole_lse = batch.run(), batch.lse
    parts, lses = [], []
    for page, sinks in ((0, True), (1, False), (2, False)):
        part = batch.with_spec(sinks=sinks)
        part.arguments = dict(batch.arguments) if sinks else {}
        part.page_table, part.seq_lens = (
            batch.page_table[:, page : page + 1].contiguous(),
            torch.tensor([32], dtype=torch.int32),
        )
        parts.append(part.run())
        lses.append(part.lse)
    parts.append(torch.full_like(whole, float("nan")))  # a part that saw nothing has no say, whatever it holds
    lses.append(torch.full_like(whole_lse, -math.inf))
    out, lse = octavo.merge_states(torch.stack(parts), torch.stack(lses))
    assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-6)
    out, lse = octavo.merge_states(torch.stack(parts[-1:]), torch.stack(lses[-1:]))
    assert not out.any() and bool((lse == -math.inf).all())


def test_merge_states_refuses_shapes_that_do_not_fit():
    with pytest.raises(InvalidInput, match=r"outs must be \[n, T, Hq, Dv\] and lses \[n, T, Hq\]"):
        octavo.merge_states(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5))


def test_alibi_slopes_are_the_published_ones():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.allclose(alibi_slopes(12)[8:], torch.tensor([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]))


def test_slots_of_follow_the_table():
    table = torch.tensor([[4, 1], [0, 9]])
    assert slots_of(table, 2, [3, 1]).tolist() == [8, 9, 2, 0]
