"""DeepGEMM's names over octavo: old and new signatures give octavo's own logits; what it cannot, it says."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo.indexer_calls import IndexBytes
from octavo.integrations import deepgemm

E4M3 = torch.float8_e4m3fn
INF = float("inf")


@pytest.fixture
def step():
    """A cache of three sequences and a query of two rows each."""
    generator = torch.Generator().manual_seed(2)
    cache = octavo.IndexerCache.allocate(9, device="cpu")
    table = torch.randperm(9, generator=generator).to(torch.int32).reshape(3, 3)
    k = torch.randn(9 * 64, 128, generator=generator)
    cache.append(k, torch.arange(9 * 64))
    q = torch.randn(3, 2, 64, 128, generator=generator).to(E4M3)
    return cache, table, q, torch.randn(6, 64, generator=generator), torch.tensor([5, 64, 190], dtype=torch.int32)


def test_paged_logits_by_either_generations_signature(step):
    cache, table, q, weights, lens = step
    want = octavo.paged_mqa_logits(q, cache, weights, lens, table, 192, fill=-INF)
    meta = deepgemm.get_paged_mqa_logits_metadata(lens, 64, 132)
    assert meta.shape == (133, 2) and meta.dtype == torch.int32
    clean = {"clean_logits": True}
    each = torch.stack([lens - 1, lens], 1)
    for got in (
        deepgemm.fp8_paged_mqa_logits(q, cache.pages, weights, lens, table, meta, 192, True),
        deepgemm.fp8_paged_mqa_logits(q, cache.pages.squeeze(2), weights, lens, table, meta, 192, clean_logits=True),
        deepgemm.fp8_paged_mqa_logits(
            q=q,
            fused_kv_cache=cache.pages,
            weights=weights,
            context_lens=each,
            block_table=table,
            schedule_meta=meta,
            max_context_len=192,
            **clean,
        ),
        deepgemm.fp8_fp4_paged_mqa_logits((q, None), cache.pages, weights, lens, table, meta, 192, **clean),
        deepgemm.fp8_paged_mqa_logits(q, cache.pages, weights, lens, table, meta, 192, True, None),
    ):
        assert torch.equal(got, want) and got.stride(0) == 256
    kept = deepgemm.fp8_paged_mqa_logits(q, cache.pages, weights, lens, table, meta, 192)
    assert torch.equal(kept[5, :190], want[5, :190])
    half = deepgemm.fp8_paged_mqa_logits(q, cache.pages, weights, lens, table, meta, 192, True, torch.bfloat16)
    assert torch.equal(half, want.bfloat16())
    one = deepgemm.fp8_paged_mqa_logits(q[:, :1], cache.pages, weights[::2], lens[:, None], table, meta, 192, True)
    assert (one > -INF).sum(1).tolist() == lens.tolist()


def test_ragged_logits_full_and_compressed(step):
    cache, _, q, weights, _ = step
    k = IndexBytes(cache.pages, "fp32").keys()[:3].reshape(192, 128).view(E4M3)
    scale = torch.rand(192) + 0.5
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 9, 50, 60, 190], [3, 192, 99, 50, 70, 192]))
    q = q.flatten(0, 1)
    want = octavo.mqa_logits(q, k, scale, weights, starts, ends, fill=-INF)
    for got in (
        deepgemm.fp8_mqa_logits(q, (k, scale), weights, starts, ends),
        deepgemm.fp8_mqa_logits(q, (k, scale), weights, ks=starts, ke=ends, clean_logits=True),
        deepgemm.fp8_fp4_mqa_logits((q, None), (k, scale), weights, starts, cu_seq_len_k_end=ends),
        deepgemm.fp8_mqa_logits(q, (k, scale.view(torch.uint8).view(192, 4)), weights, starts, ends),
    ):
        assert torch.equal(got, want)
    narrow = deepgemm.fp8_mqa_logits(q, (k, scale), weights, starts, ends, clean_logits=False, max_seqlen_k=100)
    assert narrow.shape == (6, 100) and torch.equal(narrow[2, :90], want[2, 9:99])
    assert torch.equal(narrow[1], want[1, :100])


def test_what_only_deepgemm_has_is_refused(step):
    cache, table, q, weights, lens = step
    with pytest.raises(octavo.Unsupported, match="it has a scale"):
        deepgemm.fp8_fp4_mqa_logits((q, torch.ones(1)), None, weights, lens, lens)
    with pytest.raises(octavo.Unsupported, match="indices are given"):
        deepgemm.get_paged_mqa_logits_metadata(lens, 64, 132, lens)
    with pytest.raises(octavo.Unsupported, match="indices are given"):
        deepgemm.fp8_paged_mqa_logits(q, cache.pages, weights, lens, table, None, 192, False, indices=lens)
    with pytest.raises(octavo.InvalidInput, match="max_context_len"):
        deepgemm.fp8_paged_mqa_logits(q, cache.pages, weights, lens, table, None)
    with pytest.raises(octavo.InvalidInput, match="weights must be float32"):
        deepgemm.fp8_paged_mqa_logits(q, cache.pages, weights[:2], lens, table, None, 192)


def test_without_a_gpu_there_are_no_sms():
    assert deepgemm.get_num_sms() == 0 or torch.cuda.is_available()
