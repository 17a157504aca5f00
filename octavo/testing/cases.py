"""Inputs that tell a good FP8 KV-cache library from a bad one, each with its right answer in closed form.

Every backend runs them, on a CPU and on a GPU: a builder takes the device, a test the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..cache import PagedCache
from ..spec import AttentionSpec
from .inputs import Batch, make_batch, page_table_for, slots_of
from .poison import poison


def batch_of(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **arguments: torch.Tensor,
) -> Batch:
    """A batch of given q [T, Hq, D], k [tokens, Hk, D], v [tokens, Hk, Dv] on q's device, through shuffled pages."""
    device = q.device
    table, num_pages = page_table_for(seq_lens, spec.page_size, torch.Generator().manual_seed(1))
    table = table.to(device)
    cache = PagedCache.allocate(spec, num_pages, device, k_scale, v_scale)
    cache.append(k, v, slots_of(table, spec.page_size, seq_lens))
    starts = torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(list(seq_lens), dtype=torch.int32, device=device)
    return Batch(spec, q, cache, lens, table, starts, k, v, arguments)


def scale_probe(spec: AttentionSpec, rows: int = 1, device: str | None = None) -> tuple[Batch, float]:
    """Z2 and Z3: two tokens, stored K0[0] = 64, V = +1 and -1, k_scale 1/16, v_scale 1/2, query e0, softmax scale 1.

    The last row must give tanh(2) / 2 = 0.48201 from an FP8 cache (k_scale dropped .500, v_scale dropped .964, k_scale
    twice .062), and 1.0 from a 16-bit cache, which has no scales whatever is set.
    """
    spec = replace(spec, softmax_scale=1.0)
    tokens = max(2, rows)
    k = torch.zeros(tokens, spec.num_kv_heads, spec.head_dim, device=device)
    v = torch.ones(tokens, spec.num_kv_heads, spec.value_dim, device=device)
    k[tokens - 2, :, 0] = 64.0
    v[tokens - 1] = -1.0
    if tokens > 2:  # the tokens before the two: far below, so that they weigh nothing
        k[: tokens - 2, :, 0] = -448.0
    q = torch.zeros(rows, spec.num_q_heads, spec.head_dim, dtype=torch.bfloat16, device=device)
    q[..., 0] = 1.0
    k_scale, v_scale = (1 / 16, 1 / 2) if spec.fp8 else (1.0, 1.0)
    k, v = (k * k_scale).to(torch.bfloat16), (v * v_scale).to(torch.bfloat16)
    batch = batch_of(spec, q, k, v, [tokens], [rows], k_scale=1 / 16, v_scale=1 / 2)
    return batch, math.tanh(2.0) / 2 if spec.fp8 else 1.0


def sink_probe(
    spec: AttentionSpec, sink: float, v_scale: float = 0.5, device: str | None = None
) -> tuple[Batch, float]:
    """Z11: uniform scores over 3 tokens of stored V 1, and a sink of `sink`: 3 / (3 + exp(sink)) x v_scale."""
    spec = replace(spec, sinks=True)
    ones = torch.ones(3, spec.num_kv_heads, spec.value_dim, dtype=torch.bfloat16, device=device) * v_scale
    k = torch.zeros(3, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=device)
    q = torch.ones(1, spec.num_q_heads, spec.head_dim, dtype=torch.bfloat16, device=device)
    sinks = torch.full((spec.num_q_heads,), sink, device=device)
    batch = batch_of(spec, q, k, ones, [3], [1], k_scale=0.25, v_scale=v_scale, sinks=sinks)
    return batch, 3.0 / (3.0 + math.exp(sink)) * v_scale


def long_flat_tail(
    spec: AttentionSpec, tokens: int, sink_at: int, tail_weight: float, rows: int = 1, device: str | None = None
) -> tuple[Batch, float]:
    """Z16: one key 18 ln 2 above the rest with V = 0, the others V = 1 with weights x `tail_weight`.

    At 131,072 tokens the answer is 0.33333 / 0.34694 / 0.37255 for weights 1 / 1.0625 / 1.1875: w n / (w n + 2^18).
    Weights are set by the tail's V, not by its scores: K of the tail is 0, so its scores are exact. `rows` identical
    queries at the end; the last one sees every token.
    """
    spec = replace(spec, softmax_scale=1.0)
    # Scores must be exact in e4m3: q . k = 18 ln 2 through a query of ln 2 x 18 / 16 on a key of 16.
    k = torch.zeros(tokens, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=device)
    v = torch.ones(tokens, spec.num_kv_heads, spec.value_dim, dtype=torch.bfloat16, device=device)
    q = torch.zeros(rows, spec.num_q_heads, spec.head_dim, dtype=torch.bfloat16, device=device)
    # 18 ln 2 = 12.4766: two bf16 terms carry it to 2^-17 relative.
    high = torch.tensor(18 * math.log(2)).to(torch.bfloat16)
    low = torch.tensor(18 * math.log(2) - float(high)).to(torch.bfloat16)
    q[..., 0], q[..., 1] = high, low
    k[sink_at, :, 0:2] = 1.0
    v[sink_at] = 0.0
    # A tail weight w: a third query element against keys of the tail; log w needs no exact FP8 key but an exact query.
    log_weight = torch.tensor(math.log(tail_weight))
    for element in (2, 3):
        part = log_weight.to(torch.bfloat16)
        q[..., element] = part
        log_weight = log_weight - part.float()
        k[:, :, element] = 1.0
        k[sink_at, :, element] = 0.0
    weight = tail_weight * (tokens - 1)
    return batch_of(spec, q, k, v, [tokens], [rows]), weight / (weight + 2.0**18)


def poisoned(batch: Batch, live: Sequence[tuple[int, int]] | None = None) -> tuple[Batch, Batch]:
    """Z6: the batch twice, every byte no live token owns set to 0x7F (NaN) and to 0.

    live: (sequence, token) pairs that stay; None: every token of every sequence.
    """
    size = batch.spec.page_size
    if live is None:
        live_slots = slots_of(batch.page_table, size, batch.seq_lens.tolist())
    else:
        live_slots = torch.stack([batch.page_table[b, t // size].long() * size + t % size for b, t in live])
    result = []
    for value in (0x7F, 0):
        cache = batch.cache.convert(batch.spec.layout)
        poison(cache, live_slots, value)
        result.append(replace(batch, cache=cache))
    return result[0], result[1]


def random_batches(spec: AttentionSpec, seeds: int, lens: Callable[[int], list[int]], rows: int) -> list[Batch]:
    """`seeds` batches of `rows` query rows a sequence, lengths lens(seed)."""
    return [
        make_batch(spec, lens(seed), [rows] * len(lens(seed)), seed=seed, k_scale=1 / 16, v_scale=1 / 2)
        for seed in range(seeds)
    ]
