"""Text as tokens come, and the choice of tokens from logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from serve_models import byte_tokenizer, greedy

from octavo.serve.requests import Sampling, Sequence
from octavo.serve.sampling import choose_tokens
from octavo.serve.text import TextStream, TokenNames

TOKENIZER = byte_tokenizer()


def stream(text: str, stop: tuple[str, ...] = (), prompt: str = "") -> tuple[list[str], TextStream]:
    """What each byte of `text` lets out, and at last the rest."""
    made = TextStream(TOKENIZER, list(prompt.encode()), stop)
    parts = []
    for byte in text.encode():
        parts.append(made.push(byte))
        if made.stopped:
            return parts, made
    return [*parts, made.finish()], made


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語です", "👩‍👩‍👧 family", "tab\tnew\nline  two"])
def test_parts_join_to_the_text_and_characters_come_whole(text):
    parts, _ = stream(text, prompt="é before ")
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_the_end_of_a_character_that_never_comes_is_shown():
    made = TextStream(TOKENIZER, [], ())
    assert made.push("é".encode()[0]) == ""
    assert made.finish() == "\ufffd"


def test_bytes_that_are_no_text_do_not_hold_a_stream_for_ever():
    made = TextStream(TOKENIZER, [], ())
    shown = [made.push(0xFF) for _ in range(40)]
    assert any(shown) and len(made._window) < 40


def test_special_tokens_are_no_text():
    made = TextStream(TOKENIZER, [], ())
    assert [made.push(token) for token in (65, 257, 66)] == ["A", "", "B"]


def test_a_stop_string_ends_the_text_before_itself_and_nothing_of_it_is_let_out():
    parts, made = stream("one END two", stop=("END",))
    assert "".join(parts) == "one " and made.stopped
    assert made.push(65) == ""


def test_the_beginning_of_a_stop_string_is_held_until_it_is_none():
    parts, made = stream("aab", stop=("aaa",))
    assert parts == ["", "", "aab", ""] and not made.stopped
    parts, _ = stream("xaa", stop=("aaa",))
    assert parts == ["x", "", "", "aa"]


def test_of_several_stop_strings_the_earliest_counts():
    assert "".join(stream("a, b; c", stop=(";", ","))[0]) == "a"
    assert "".join(stream("abcd", stop=("bcd", "c"))[0]) == "ab"


def test_names_of_tokens_have_their_bytes():
    names = TokenNames(TOKENIZER)
    assert names.text(65) == "A" and names.bytes(65) == [65]
    assert names.bytes(0xC3) == [0xC3] and names.text(0xC3) == "\ufffd"
    assert names.text(257) == "<end>"


def one(sampling: Sampling, counts: dict[int, int] | None = None) -> Sequence:
    made = Sequence([1], sampling, lambda event: None)
    made.counts = counts or {}
    return made


def tokens(logits: Any, *sequences: Sequence) -> list[int]:
    rows = torch.as_tensor(logits, dtype=torch.float32)
    return [choice.token for choice in choose_tokens(rows, list(sequences)) if choice is not None]


def many(sampling: dict[str, Any], logits: list[float], draws: int = 2000) -> torch.Tensor:
    """How often each token is drawn, of `draws` seeds."""
    made = [one(Sampling(1, seed=seed, **sampling)) for seed in range(draws)]
    return torch.bincount(torch.tensor(tokens([logits] * draws, *made)), minlength=len(logits)) / draws


def test_temperature_0_is_the_most_probable_token():
    assert tokens([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]], one(greedy(1)), one(greedy(1))) == [1, 0]


def test_draws_follow_the_distribution():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    error = 4 * math.sqrt(0.25 / 2000)  # four standard deviations of the widest share
    expected = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert (many({}, logits) - expected).abs().max() < error
    squared = expected.sqrt() / expected.sqrt().sum()
    assert (many({"temperature": 2.0}, logits) - squared).abs().max() < error


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.0}, [1, 0, 0, 0]),
        ({"min_p": 0.25}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_k": 1, "min_p": 1.0}, [1, 0, 0, 0]),
    ],
)
def test_cuts_leave_the_most_probable_tokens_in_proportion(sampling, kept):
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    found = many(sampling, logits)
    assert (found - torch.tensor(kept)).abs().max() < 4 * math.sqrt(0.25 / 2000)
    assert [bool(share) for share in found.tolist()] == [bool(share) for share in kept]


def test_a_seed_draws_alike_whoever_is_beside_it():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    for cuts in ({}, {"top_p": 0.9}):
        alone = tokens(logits[:1], one(Sampling(1, seed=5, **cuts)))
        beside = [one(Sampling(1, seed=5, **cuts)), one(Sampling(1, seed=9, top_k=3)), one(greedy(1))]
        assert tokens(logits, *beside)[0] == alone[0]


def test_penalties_and_biases_change_one_row_only():
    logits = [[2.0, 1.5, 0.0]] * 4
    rows = [
        one(greedy(1), {0: 1}),
        one(greedy(1, presence_penalty=1.0), {0: 1}),
        one(greedy(1, frequency_penalty=0.4), {0: 2}),
        one(greedy(1, logit_bias=((2, 100.0), (0, -100.0)))),
    ]
    assert tokens(logits, *rows) == [0, 1, 1, 2]


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    sampling = greedy(1, logprobs=2, logit_bias=((2, 100.0),))
    choice = choose_tokens(logits, [one(sampling)])[0]
    expected = logits[0].log_softmax(-1).tolist()
    assert choice is not None and choice.token == 2
    assert choice.logprob == pytest.approx(expected[2]) and [token for token, _ in choice.top] == [0, 1]
    assert [value for _, value in choice.top] == pytest.approx(expected[:2])


def test_the_logprob_of_an_impossible_token_is_a_number():
    """JSON has no infinity."""
    logits = torch.tensor([[2.0, float("-inf"), float("-inf")]])
    choice = choose_tokens(logits, [one(greedy(1, logprobs=2))])[0]
    assert choice is not None and [value for _, value in choice.top] == [0.0, -9999.0]


def test_logits_that_are_not_numbers_choose_nothing_in_that_row_only():
    logits = torch.tensor([[1.0, float("nan"), 0.0], [1.0, 2.0, 0.0], [float("-inf")] * 3])
    found = choose_tokens(logits, [one(greedy(1)), one(greedy(1)), one(Sampling(1, seed=1))])
    assert [choice is None for choice in found] == [True, False, True]
