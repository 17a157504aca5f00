"""Pages and turns of octavo serve: prefix reuse, eviction, queueing, preemption; without a model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from serve_models import Heard, greedy

from octavo.serve import pages as pages_module
from octavo.serve.pages import ROOT, PrefixPages, digest
from octavo.serve.requests import Sequence
from octavo.serve.scheduler import Scheduler, Share

SIZE = 4


class Pool:
    """PagePool's counting without memory."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.references = num_pages, [0] * num_pages

    @property
    def used_pages(self) -> int:
        return sum(count > 0 for count in self.references)

    def take(self, count: int) -> list[int]:
        found = [page for page, owners in enumerate(self.references) if not owners][:count]
        assert len(found) == count
        self.share(found)
        return found

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert self.references[page] > 0, "released twice"
            self.references[page] -= 1


def scheduler(num_pages: int, max_batch: int = 8, step_tokens: int = 64, prefix_cache: bool = True) -> Scheduler:
    pool: Any = Pool(num_pages)
    return Scheduler(PrefixPages(pool, SIZE, prefix_cache), max_batch, step_tokens)


def sequence(prompt: list[int], new: int = 3, after: Sequence | None = None) -> Sequence:
    return Heard(prompt, greedy(new), after).sequence


def step(turns: Scheduler, token: int = 7) -> list[Share]:
    """One step as the engine does it: every share is computed, the samplers get `token`, the full-grown leave."""
    shares = turns.plan()
    for share in shares:
        turns.computed(share)
    for share in shares:
        one = share.sequence
        if share.samples:
            one.tokens.append(token)
            if one.new_tokens == one.sampling.max_tokens:
                one.done = True
                turns.remove(one)
    return shares


def finish(turns: Scheduler) -> None:
    for _ in range(1000):
        if not turns.busy:
            return
        assert step(turns), "nothing moves"
    raise AssertionError("never ends")


def test_a_digest_stands_for_all_tokens_before_it():
    assert digest(ROOT, [1, 2]) != digest(ROOT, [1, 3])
    assert digest(digest(ROOT, [1]), [2]) != digest(digest(ROOT, [3]), [2])
    assert digest(ROOT, [258]) != digest(ROOT, [2, 1])  # a token is not its bytes
    assert len(digest(ROOT, [])) == 32


def test_a_prompt_that_begins_alike_shares_whole_pages_and_computes_the_rest():
    turns = scheduler(16)
    first, second = sequence(list(range(10))), sequence([*range(8), 99, 98, 97])
    turns.add(first)
    finish(turns)
    assert turns.pages.in_use == 0 and turns.pages.available == 16  # kept pages may be taken
    turns.add(second)
    share = step(turns)[0]
    assert (share.start, share.count) == (8, 3) and second.cached == 8


def test_a_repeated_prompt_computes_at_least_its_last_token():
    turns = scheduler(16)
    turns.add(sequence(list(range(8))))
    finish(turns)
    again = sequence(list(range(8)))
    turns.add(again)
    assert [(share.start, share.count) for share in step(turns)] == [(4, 4)]
    finish(turns)
    assert again.cached == 4


def test_generated_tokens_are_found_too():
    """A conversation goes on with the reply in its prompt."""
    turns = scheduler(16)
    turns.add(sequence([1, 2, 3], new=6))
    finish(turns)
    longer = sequence([1, 2, 3, 7, 7, 7, 7, 7, 5, 6])
    turns.add(longer)
    step(turns)
    assert longer.cached == 8


def test_equal_digests_of_different_tokens_share_nothing(monkeypatch):
    monkeypatch.setattr(pages_module, "digest", lambda parent, tokens: b"the same")
    turns = scheduler(16)
    turns.add(sequence(list(range(8))))
    finish(turns)
    other = sequence(list(range(50, 60)))
    turns.add(other)
    finish(turns)
    assert other.cached == 0


def test_without_the_prefix_cache_nothing_is_kept():
    turns = scheduler(16, prefix_cache=False)
    for _ in range(2):
        again = sequence(list(range(10)))
        turns.add(again)
        finish(turns)
        assert again.cached == 0 and turns.pages.pool.used_pages == 0


def test_the_longest_unused_pages_make_room_and_of_a_prefix_its_end():
    turns = scheduler(5)
    turns.add(sequence(list(range(12)), new=1))  # fills pages 0, 1, 2 of tokens
    finish(turns)
    turns.add(sequence(list(range(50, 61)), new=1))  # 3 pages; 2 are free, so one kept page goes
    finish(turns)
    again = sequence(list(range(12)), new=1)
    turns.add(again)
    finish(turns)
    assert again.cached == 8  # its third page made room, the first two did not


def test_the_same_prompt_twice_in_one_step_keeps_one_page():
    turns = scheduler(16)
    for _ in range(2):
        turns.add(sequence(list(range(9))))
    finish(turns)
    assert turns.pages.pool.used_pages == 2 and turns.pages.in_use == 0


def test_a_second_choice_waits_for_the_first_ones_pages():
    turns = scheduler(16, step_tokens=8)
    first = sequence(list(range(12)))
    second = sequence(list(range(12)), after=first)
    turns.add(first)
    turns.add(second)
    assert [share.sequence for share in step(turns)] == [first]
    assert [share.sequence for share in step(turns)] == [first]
    step(turns)
    assert second.cached == 8
    finish(turns)
    ended = sequence(list(range(20, 30)))
    ended.done = True  # cancelled: nobody waits for it
    waiting = sequence(list(range(20, 30)), after=ended)
    turns.add(waiting)
    assert step(turns)[0].sequence is waiting


def test_a_step_holds_its_budget_and_decodes_come_first():
    turns = scheduler(64, max_batch=4, step_tokens=10)
    for start in (0, 100):
        turns.add(sequence(list(range(start, start + 15)), new=10))
    seen = []
    for _ in range(6):
        shares = step(turns)
        counts = [share.count for share in shares]
        assert sum(counts) <= 10 and counts == sorted(counts, key=lambda count: count > 1)
        seen.append(counts)
    assert seen[:4] == [[10], [5, 5], [1, 9], [1, 1]]


def test_no_more_run_at_once_than_may():
    turns = scheduler(64, max_batch=2)
    for start in range(5):
        turns.add(sequence([start]))
    step(turns)
    assert len(turns.running) == 2 and len(turns.waiting) == 3
    finish(turns)


def test_when_pages_run_out_the_youngest_makes_way_and_all_end():
    turns = scheduler(4, prefix_cache=False)
    old, young = sequence([1, 2, 3], new=12), sequence([4, 5, 6], new=12)
    turns.add(old)
    turns.add(young)
    finish(turns)
    assert turns.preemptions > 0
    assert old.new_tokens == young.new_tokens == 12 and turns.pages.in_use == 0


def test_a_queue_keeps_its_order():
    turns = scheduler(4, prefix_cache=False)
    big, small = sequence(list(range(14)), new=1), sequence([1], new=1)
    running = sequence(list(range(20, 25)), new=3)
    for one in (running, big, small):
        turns.add(one)
    assert [share.sequence for share in step(turns)] == [running]  # big has no room, and small does not overtake it
    finish(turns)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_ends_with_every_page_free_and_nobody_on_anothers_page(seed):
    chance = random.Random(seed)
    turns = scheduler(chance.randint(9, 20), max_batch=chance.randint(1, 6), step_tokens=chance.randint(1, 20))
    every: list[Sequence] = []
    for _ in range(300):
        if chance.random() < 0.3 and len(every) < 40:
            prompt = [chance.randint(0, 1) for _ in range(chance.randint(1, 20))]
            after = chance.choice(every) if every and chance.random() < 0.2 else None
            every.append(sequence(after.prompt if after else prompt, new=chance.randint(1, 15), after=after))
            turns.add(every[-1])
        if every and chance.random() < 0.05:
            gone = chance.choice(every)
            gone.done = True
            turns.remove(gone)
        step(turns, token=chance.randint(0, 1))
        check(turns)
    finish(turns)
    assert turns.pages.in_use == 0 and turns.pages.available == turns.pages.pool.num_pages
    assert all(one.done for one in every)


def check(turns: Scheduler) -> None:
    """Two sequences that own one page agree on all tokens up to its end; what is being written is nobody else's."""
    holds: dict[int, tuple[int, ...]] = {}
    for one in turns.running:
        assert len(set(one.pages)) == len(one.pages)
        full = one.computed // SIZE
        for index, page in enumerate(one.pages):
            if index < full:
                upto = tuple(one.tokens[: (index + 1) * SIZE])
                assert holds.setdefault(page, upto) == upto
            else:
                assert sum(page in other.pages for other in turns.running) == 1
                assert turns.pages.pool.references[page] == 1
