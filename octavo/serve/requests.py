"""What travels between the web and the engine: how to sample, a sequence in the making, and what happened to it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .text import TextStream

_numbers = itertools.count()


@dataclass(frozen=True)
class Sampling:
    """How tokens of one sequence are chosen, and when it ends.

    Attributes:
        max_tokens: most new tokens.
        temperature: 0 is greedy.
        top_p, top_k, min_p: nucleus; most probable so many (0: all); at least this share of the most probable.
        presence_penalty, frequency_penalty: subtracted from the logit of a token that was generated, once and per time.
        logit_bias: added to the logits of these tokens.
        seed: the same seed chooses alike; None: a new one.
        stop: text at which it ends; not part of the reply.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: so many alternatives with each token; None: no logprobs.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True)
class TokenChoice:
    """A chosen token, its log probability, and the alternatives asked for, most probable first."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """News of a sequence.

    Attributes:
        text: certain from now on: it holds no beginning of a stop string.
        tokens: chosen since the last event; empty unless logprobs were asked for.
        finish: "stop" or "length" with the last event; None: more to come.
        error: the sequence ended because of this; for the client to read.
        prompt_tokens, cached_tokens, new_tokens: counts so far; cached ones were found in the prefix cache.
    """

    text: str = ""
    tokens: tuple[TokenChoice, ...] = ()
    finish: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    @property
    def last(self) -> bool:
        """Whether nothing comes after this."""
        return self.finish is not None or self.error is not None


@dataclass(eq=False)
class Sequence:
    """One prompt and what is generated after it; belongs to the engine's thread once submitted.

    Attributes:
        prompt: its token ids. sampling: how to go on. deliver: takes each Event; must not block.
        after: a sequence with the same prompt, whose pages this one waits to share.
        tokens: prompt and generated ones. computed: how many of them the cache holds.
        pages: owned, in order. digests: of its full pages, as far as they are known.
        cached: tokens that the first admission found in the prefix cache.
        text: what turns tokens into text.
    """

    prompt: list[int]
    sampling: Sampling
    deliver: Callable[[Event], None]
    after: Sequence | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    arrived: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    cached: int | None = None
    counts: dict[int, int] = field(default_factory=dict)
    text: TextStream | None = None
    told: float | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        seed = self.sampling.seed
        self.random = random.Random(seed) if seed is not None else random.Random()

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def most_tokens(self) -> int:
        """Tokens that the cache may come to hold: the last one is never stored."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def remaining(self) -> int:
        """Tokens that the next steps must compute before one can be chosen."""
        return len(self.tokens) - self.computed

    def event(self, text: str = "", tokens: tuple[TokenChoice, ...] = (), finish: str | None = None) -> Event:
        """An Event with the counts as they are."""
        return Event(text, tokens, finish, None, len(self.prompt), self.cached or 0, self.new_tokens)

    def failure(self, error: str) -> Event:
        """The Event that ends it with `error`."""
        return Event("", (), None, error, len(self.prompt), self.cached or 0, self.new_tokens)
