"""Decode context parallelism of octavo's vLLM backend: threads stand for ranks that each hold every N-th token."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from vllm_layers import BLOCK, Sequences, Vllm, configuration
from vllm_stub import RECORDS

from octavo.integrations._vllm_ranks import Ranks, local_decodes, local_rows
from octavo.integrations._vllm_support import parallel_reasons

LENGTHS = (100, 61, 130)


@pytest.fixture(params=list(RECORDS))
def release(request):
    return request.param


class Group:
    """A communicator of threads: every rank calls the same collectives in the same order."""

    def __init__(self, size):
        self.barrier, self.given = Barrier(size, timeout=60), [None] * size

    def rank(self, rank):
        def exchange(x):
            self.given[rank] = x
            self.barrier.wait()
            everything = list(self.given)
            self.barrier.wait()
            return everything

        return SimpleNamespace(
            rank_in_group=rank,
            all_gather=lambda x, dim: torch.cat(exchange(x), dim),
            reduce_scatter=lambda x, dim: sum(y.float() for y in exchange(x)).to(x.dtype).chunk(self.size, dim)[rank],
        )

    @property
    def size(self):
        return len(self.given)


def close(got, right):
    """Each part is bf16 before the ranks add them."""
    assert torch.isfinite(got).all()
    assert ((got.double() - right).abs() <= right.abs().max() * 2**-7).all()
    assert float((got.double() - right).norm() / right.norm()) < 4e-3


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_are_attention_over_the_whole_sequence(monkeypatch, release, size):
    vllm = Vllm(monkeypatch, release, ranks=size)
    group = Group(size)
    layers, builders, sequences = [], [], []
    for rank in range(size):
        state = importlib.import_module("vllm.distributed.parallel_state")
        state.get_dcp_group = lambda rank=rank: group.rank(rank)
        layers.append(vllm.layer(f"rank{rank}", heads=2, kv_heads=1))
        builders.append(vllm.builder(layers[-1]))
        sequences.append(Sequences(layers[-1], LENGTHS, seed=rank))
        sequences[-1].parts[1:] = sequences[0].parts[1:]  # they share the KV head

    def run(rank, rows, first, done):
        layer, (queries, keys, values) = layers[rank], sequences[rank].parts
        pairs = list(zip(first, done, strict=True))
        q, k, v = (
            torch.cat([x[a:b] for x, (a, b) in zip(part, pairs, strict=True)]) for part in (queries, keys, values)
        )
        common = vllm.batch(rows, done)
        places = [(i, p) for i, (a, b) in enumerate(pairs) for p in range(a, b)]
        table = common.block_table_tensor
        local = [p // size for _, p in places]
        slots = [int(table[i, j // BLOCK]) * BLOCK + j % BLOCK for (i, _), j in zip(places, local, strict=True)]
        held = [slot if p % size == rank else -1 for slot, (_, p) in zip(slots, places, strict=True)]
        metadata = builders[rank].build(0, common)
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, torch.tensor(held))
        out = torch.full_like(q, float("nan"))
        layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output=out)
        return out

    done = [0, 0, 0]
    for rows in ([40, 1, 64], [1, 1, 1], [7, 30, 2], [1, 1, 1], [1, 0, 1]):
        first, done = done, [a + b for a, b in zip(done, rows, strict=True)]
        with ThreadPoolExecutor(size) as pool:
            outs = list(pool.map(run, range(size), [rows] * size, [first] * size, [done] * size))
        for rank, out in enumerate(outs):
            right = [sequences[rank].formula(i, a, b) for i, (a, b) in enumerate(zip(first, done, strict=True))]
            close(out, torch.cat(right))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_row_sees_the_tokens_of_its_rank_up_to_its_own(size):
    """The rows of local sequences, counted one by one, against the positions they come from."""
    counts, lengths = [5, 1, 0, 9], [30, 7, 0, 9]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    table = torch.arange(4, dtype=torch.int32)[:, None]
    total = int(starts[-1])
    for rank in range(size):
        ranks = Ranks(None, size, rank)
        local = local_rows(torch.tensor(lengths, dtype=torch.int32), table, starts, ranks, total)
        assert sorted(local.place.tolist()) == list(range(total))
        seen = {}
        for s in range(len(local.seq_lens)):
            begin, end = local.query_starts[s : s + 2].tolist()
            for row in range(begin, end):
                seen[row] = (s // size, int(local.seq_lens[s]) - (end - begin) + row - begin + 1)
        row = 0
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for position in range(length - count, length):
                here = sum(token % size == rank for token in range(position + 1))
                assert seen[int(local.place[row])] == (i, here)
                row += 1
        assert torch.equal(local.page_table[:, 0], torch.arange(4, dtype=torch.int32).repeat_interleave(size))


def test_lengths_of_single_tokens_stay_in_one_buffer():
    buffer = torch.full((8,), -7, dtype=torch.int32)
    starts = torch.arange(4, dtype=torch.int32)
    lens = torch.tensor([1, 6, 0], dtype=torch.int32)
    found = [local_decodes(lens, starts[:3, None], starts, Ranks(None, 2, rank), buffer) for rank in (0, 1)]
    assert found[0].seq_lens.data_ptr() == buffer.data_ptr() and found[1].place is None
    assert buffer.tolist() == [0, 3, 0, -7, -7, -7, -7, -7]
    assert local_decodes(lens, starts[:3, None], starts, Ranks(None, 2, 0), buffer).seq_lens.tolist() == [1, 3, 0]


def test_graphs_hold_single_tokens_and_drafts_are_rows_of_a_prompt(monkeypatch, release):
    vllm = Vllm(monkeypatch, release, ranks=2, drafts=3)
    state = importlib.import_module("vllm.distributed.parallel_state")
    state.get_dcp_group = lambda: Group(2).rank(1)
    layer = vllm.layer(kv_heads=1)
    builder = vllm.builder(layer)
    assert layer.impl.spec.lse and layer.impl.spec.num_q_heads == 8
    assert builder.get_cudagraph_support(vllm.config, None).name == "UNIFORM_SINGLE_TOKEN_DECODE"
    assert not builder.supports_draft_decode_metadata_update
    assert builder.build(0, vllm.batch([1, 1], [9, 9])).step.num_decodes == 2
    assert builder.build(0, vllm.batch([4, 4], [9, 9])).place is not None


def test_what_cannot_be_shared_is_refused_in_words():
    config = configuration(ranks=2)
    config.parallel_config.cp_kv_cache_interleave_size = 4
    found = parallel_reasons(config, {"has_sliding_window": True, "has_sink": True})
    assert [line.split("; found")[0] for line in found] == [
        "decode context parallelism needs cp_kv_cache_interleave_size 1",
        "decode context parallelism needs one KV head a rank",
        "decode context parallelism needs no sliding window",
        "decode context parallelism needs no attention sinks",
    ]
    assert parallel_reasons(configuration(), {"has_sink": True}) == []
