"""Pages of octavo.integrations: ownership, sharing, copy on write, growth and what a step writes where."""

from __future__ import annotations

import gc

import pytest
import torch

from octavo import AttentionSpec, InvalidInput, PagedCache
from octavo.integrations.pages import FIRST_PAGES, PagePool, Sequences

SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, kv_dtype="float32", page_size=4, layout="nhd")


def make_pool(num_pages: int | None = None, spec: AttentionSpec = SPEC, layers: int = 2) -> PagePool:
    return PagePool(lambda layer, pages: PagedCache.allocate(spec, pages, "cpu"), layers, num_pages)


def write(pool: PagePool, sequences: Sequences, values: list[list[float]], valid: torch.Tensor | None = None) -> None:
    """Advance by one step whose tokens are constant vectors of `values` [B][T]."""
    x = torch.tensor(values, dtype=torch.float32)
    step = sequences.advance(x.shape[0], x.shape[1], valid, None)
    tokens = x.flatten()[:, None, None].expand(-1, 1, 16)
    for cache in pool.caches:
        cache.append(tokens, None if cache.spec.mla else tokens, step.slots)


def read(pool: PagePool, sequences: Sequences) -> list[list[float]]:
    """What each row holds, the same in both layers and in K and V."""
    found = []
    for row, length in enumerate(sequences.lengths):
        pages = torch.tensor(sequences.owned[row], dtype=torch.int32)
        parts = [part[:, 0, 0].tolist() for cache in pool.caches for part in cache.gather(pages, length)]
        assert all(part == parts[0] for part in parts)
        found.append(parts[0])
    return found


def test_rows_hold_their_tokens_without_their_padding():
    pool = make_pool()
    sequences = Sequences(pool, windowed=False)
    valid = torch.tensor([[False, False, True, True, True], [True, True, True, True, True]])
    write(pool, sequences, [[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]], valid)
    write(pool, sequences, [[9], [10]])
    assert sequences.lengths == [4, 6] and sequences.columns == 6
    assert read(pool, sequences) == [[1, 2, 3, 9], [4, 5, 6, 7, 8, 10]]
    assert pool.used_pages == 3


def test_a_step_says_where_tokens_go():
    sequences = Sequences(make_pool(), windowed=False)
    valid = torch.tensor([[False, True, True], [True, True, True]])
    step = sequences.advance(2, 3, valid, None)
    first, second = sequences.owned[0][0], sequences.owned[1][0]
    assert step.slots.tolist() == [-1, 4 * first, 4 * first + 1, 4 * second, 4 * second + 1, 4 * second + 2]
    assert step.rows is not None and step.rows.tolist() == [1, 2, 3, 4, 5]
    assert step.seq_lens.tolist() == [2, 3] and step.query_starts.tolist() == [0, 2, 5]
    assert step.page_table[:, 0].tolist() == [first, second]


def test_a_step_is_planned_on_the_host_whatever_the_default_device():
    sequences = Sequences(make_pool(), windowed=True)
    valid = torch.tensor([[False, True, True], [True, True, True]])
    with torch.device("meta"):  # which would lose the numbers
        sequences.advance(2, 3, valid, [0, 0])
        sequences.select([1, 0])
        step = sequences.advance(2, 2, None, [3, 2])
    assert step.seq_lens.tolist() == [5, 4] and step.query_starts.tolist() == [0, 2, 4]


def test_selected_rows_share_pages_until_they_write():
    pool = make_pool()
    sequences = Sequences(pool, windowed=False)
    write(pool, sequences, [[1, 2, 3, 4, 5, 6]])
    sequences.select([0, 0, 0])
    assert pool.used_pages == 2 and read(pool, sequences) == [[1, 2, 3, 4, 5, 6]] * 3
    write(pool, sequences, [[7], [8], [9]])
    assert read(pool, sequences) == [[1, 2, 3, 4, 5, 6, last] for last in (7, 8, 9)]
    assert pool.used_pages == 4  # the full page is still shared, the last one is not
    sequences.select([2, 0, 2])
    write(pool, sequences, [[10], [11], [12]])
    assert read(pool, sequences) == [[1, 2, 3, 4, 5, 6, *end] for end in ((9, 10), (7, 11), (9, 12))]
    assert pool.used_pages == 4


def test_crop_gives_pages_back_and_the_next_tokens_overwrite():
    pool = make_pool()
    sequences = Sequences(pool, windowed=False)
    write(pool, sequences, [[1, 2, 3, 4, 5, 6]])
    sequences.crop(3)
    assert pool.used_pages == 1 and sequences.columns == 3
    write(pool, sequences, [[7, 8, 9]])
    assert read(pool, sequences) == [[1, 2, 3, 7, 8, 9]]


def test_crop_of_a_shared_page_leaves_the_other_row_alone():
    pool = make_pool()
    sequences = Sequences(pool, windowed=False)
    write(pool, sequences, [[1, 2, 3]])
    other = Sequences(pool, windowed=False)
    write(pool, other, [[0, 0, 0]])
    pool.share(sequences.owned[0])
    kept = list(sequences.owned[0])
    sequences.crop(1)
    write(pool, sequences, [[9]])
    assert read(pool, sequences) == [[1, 2, 9]]
    k, _ = pool.caches[0].gather(torch.tensor(kept, dtype=torch.int32), 3)
    assert k[:, 0, 0].tolist() == [1, 2, 3]


def test_crop_stops_at_padding():
    sequences = Sequences(make_pool(), windowed=False)
    sequences.advance(2, 3, torch.tensor([[False, True, True], [True, True, True]]), None)
    with pytest.raises(InvalidInput, match="at most 2 columns"):
        sequences.crop(3)


@pytest.mark.parametrize("granularity", ["tensor", "token_head"])
def test_growth_keeps_bytes_and_scales(granularity):
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, page_size=32, scale_granularity=granularity)
    pool = make_pool(spec=spec)
    sequences = Sequences(pool, windowed=False)
    values = [float(1 + i % 7) for i in range(32 * FIRST_PAGES - 5)]
    write(pool, sequences, [values])
    before = pool.caches[0]
    write(pool, sequences, [[2.0] * 40])
    assert pool.num_pages == 2 * FIRST_PAGES and pool.caches[0] is not before
    assert read(pool, sequences)[0] == pytest.approx([*values, *[2.0] * 40], rel=1e-6)


def test_mla_pages_are_copied_once():
    spec = AttentionSpec(
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=16,
        head_dim_v=8,
        page_size=4,
        layout="nhd",
        mla=True,
        kv_dtype="float32",
    )
    pool = make_pool(spec=spec)
    sequences = Sequences(pool, windowed=False)
    write(pool, sequences, [[1, 2]])
    sequences.select([0, 0])
    write(pool, sequences, [[3], [4]])
    assert read(pool, sequences) == [[1, 2, 3], [1, 2, 4]]


def test_a_fixed_pool_says_what_is_missing_and_changes_nothing():
    pool = make_pool(num_pages=2)
    sequences = Sequences(pool, windowed=False)
    write(pool, sequences, [[1, 2, 3, 4, 5]])
    with pytest.raises(InvalidInput, match=r"num_pages.*1 more pages.*0 free of 2"):
        sequences.advance(1, 4, None, None)
    assert sequences.lengths == [5] and read(pool, sequences) == [[1, 2, 3, 4, 5]]
    sequences.reset()
    assert pool.used_pages == 0


def test_pages_return_with_their_sequences():
    pool = make_pool()
    sequences = Sequences(pool, windowed=False)
    write(pool, sequences, [[1, 2, 3, 4, 5]])
    sequences.select([0, 0])
    assert pool.used_pages == 2
    del sequences
    gc.collect()
    assert pool.used_pages == 0 and set(pool.references) == {0}


def test_another_batch_or_history_is_refused():
    sequences = Sequences(make_pool(), windowed=False)
    sequences.advance(2, 3, None, [0, 0])
    with pytest.raises(InvalidInput, match="holds 2 sequences"):
        sequences.advance(3, 1, None, None)
    with pytest.raises(InvalidInput, match=r"\[3, 3\] tokens.*came \[3, 2\]"):
        sequences.advance(2, 1, None, [3, 2])
    assert sequences.lengths == [3, 3]


@pytest.mark.parametrize("steps", [[[[1, 0, 1]]], [[[1, 1, 0]], [[1]]], [[[1]], [[0, 1]]]])
def test_padding_between_tokens_is_refused_under_a_window(steps):
    def run(windowed: bool) -> list[int]:
        sequences = Sequences(make_pool(), windowed)
        for step in steps:
            valid = torch.tensor(step, dtype=torch.bool)
            sequences.advance(1, valid.shape[1], valid, None)
        return sequences.lengths

    with pytest.raises(InvalidInput, match="pad on the left"):
        run(windowed=True)
    assert run(windowed=False) == [sum(sum(step[0]) for step in steps)]
