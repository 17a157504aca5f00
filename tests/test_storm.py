"""The serving storm, small on a CPU and in full on a GPU; and that it sees what it is there to see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.spec import AttentionSpec
from octavo.testing.storm import GARBAGE, Storm, trial

FULL = AttentionSpec(4, 2, 64, max_query_len=3, precision="exact", page_size=32)
WINDOWED = AttentionSpec(4, 1, 128, max_query_len=3, precision="exact", page_size=32, window=50)


def small(seed: int = 0, specs: tuple[AttentionSpec, ...] = (FULL, WINDOWED)) -> Storm:
    storm = Storm(list(specs), "cpu", pages=60, max_batch=6, max_context=512, seed=seed)
    storm.capture([1, 2, 3, 6])
    return storm


@pytest.mark.parametrize("seed", [0, 1])
def test_a_small_storm(seed):
    storm = small(seed)
    tally = storm.run(300)
    for name in (
        "arrived",
        "finished",
        "preempted",
        "prefixes shared",
        "drafts rejected",
        "graph steps",
        "mixed steps",
    ):
        assert tally.counts.get(name, 0) > 0, name
    assert tally.counts["rows compared"] > 1000 and tally.worst < 0.01
    held = [page for request in storm.running for page in request.pages] + [p for ps in storm.kept.values() for p in ps]
    assert sorted({*held, *storm.free}) == list(range(1, 60)) and not {*held} & {*storm.free}


def test_padding_is_hostile():
    """The storm's padded rows and stale table entries are what they claim to be."""
    storm = small()
    seen: set[int] = set()
    fill = storm._fill

    def watched(buffers, shares, batch):
        rows = fill(buffers, shares, batch)
        if batch > len(shares):
            seen.update(buffers.page_table[len(shares) : batch].flatten().tolist())
            seen.add(int(buffers.seq_lens[len(shares) : batch].max()) + 10)
        return rows

    storm._fill = watched
    storm.run(200, sampled=0)
    assert seen >= {*GARBAGE, 10, 11}


@pytest.mark.parametrize("fault", ["a lost append", "a page of another", "a dropped scale", "a short length"])
def test_the_storm_sees(fault, monkeypatch):
    storm = small()
    layer = storm.layers[0]
    if fault == "a lost append":
        stock = layer.cache.append
        monkeypatch.setattr(layer.cache, "append", lambda k, v, slots: stock(k[1:], v[1:], slots[1:]))
    elif fault == "a page of another":
        fill = storm._fill

        def swapped(buffers, shares, batch):
            rows = fill(buffers, shares, batch)
            buffers.page_table[0, 0] = 1 + int(buffers.page_table[0, 0]) % 58
            return rows

        monkeypatch.setattr(storm, "_fill", swapped)
    elif fault == "a dropped scale":
        stock_run = layer.attention.run

        def dropped(q, cache, **arguments):
            kept, cache.v_scale = cache.v_scale, torch.tensor(1.0)
            out = stock_run(q, cache, **arguments)
            cache.v_scale = kept
            return out

        monkeypatch.setattr(layer.attention, "run", dropped)
    else:
        stock_plan = layer.attention.plan
        monkeypatch.setattr(layer.attention, "plan", lambda lens, *a, **k: stock_plan(lens - 1, *a, **k))
    with pytest.raises(AssertionError, match=r"step \d+, sequence \d+ of \d+, row \d+ of \d+ at \d+"):
        storm.run(100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("backend", [None, "triton"])
def test_twenty_thousand_steps(backend):
    found = trial(20_000 if backend is None else 2000, backend)
    counts = found["counts"]
    assert len(found["bytes_allocated"]) == 1, "memory grew"
    assert counts["graphs captured"] == 256 and counts["finished"] > 100
    assert counts["graph steps"] > 500 < counts["mixed steps"] and found["worst_row_error"] > 0


def test_a_step_of_one_row_a_sequence():
    storm = small(specs=(replace(FULL, max_query_len=1), replace(WINDOWED, max_query_len=1)))
    assert storm.run(120).counts["graph steps"] > 20
