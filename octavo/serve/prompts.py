"""From the body of a request to token ids and a Sampling, with every bound checked before the engine sees it."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from .aside import Aside, TookTooLong
from .errors import ApiError, overloaded
from .requests import Sampling
from .schemas import MAX_CHOICES, ChatRequest, CompletionRequest, Shared

THREADS = 2  # a long prompt takes a second to split; a short one need not wait for it
TEMPLATE_SECONDS = 10.0  # that a chat template may take: it only joins strings, but it is a program
SPLIT_SECONDS = 120.0  # that a prompt's text may take to become tokens: a second or so for a million characters
MAX_DIGITS = 19  # of a token id in logit_bias


@dataclass(frozen=True)
class ModelFacts:
    """What bounds a request, and what it does not say itself.

    Attributes:
        name: what clients call the model.
        vocabulary: number of token ids that have an embedding.
        max_context: most tokens of prompt and reply.
        temperature, top_p, top_k: where a request has none.
    """

    name: str
    vocabulary: int
    max_context: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Prompts:
    """Token ids of requests, made off the event loop."""

    def __init__(self, tokenizer: Any, facts: ModelFacts) -> None:
        self.facts = facts
        self._tokenizer = tokenizer
        self._most_characters = facts.max_context * max(len(piece) for piece in tokenizer.get_vocab())
        # Each thread has its own: a fast tokenizer is not made for several at once.
        self._aside = Aside(THREADS, lambda: copy.deepcopy(tokenizer))

    def close(self) -> None:
        """End the threads; does not wait for them."""
        self._aside.close()

    def join(self, seconds: float) -> bool:
        """Whether the threads have ended, after at most so long."""
        return self._aside.join(seconds)

    async def of_chat(self, body: ChatRequest) -> list[int]:
        """The conversation through the model's chat template."""
        messages = [message.plain() for message in body.messages]
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        extra = _checked_extra(self._tokenizer, body.chat_template_kwargs or {})
        try:
            text = await self._aside.run(lambda own: _templated(own, messages, extra), TEMPLATE_SECONDS)
        except TookTooLong:
            words = f"the model's chat template did not end within {TEMPLATE_SECONDS:g} seconds on this conversation"
            raise ApiError(400, words, "messages") from None
        self._check_length(len(text), "messages")
        return (await self._split([text], add_special_tokens=False))[0]  # the template writes them

    async def of_completion(self, body: CompletionRequest) -> list[list[int]]:
        """One list of ids for each prompt."""
        given = body.prompt
        if isinstance(given, str):
            given = [given]
        if not given:
            raise ApiError(400, "prompt must not be empty", "prompt")
        prompts: list[Any] = [given] if isinstance(given[0], int) else list(given)
        if len(prompts) * body.choices > MAX_CHOICES:
            raise ApiError(400, f"prompts times n must be at most {MAX_CHOICES}", "prompt")
        if isinstance(prompts[0], str):
            self._check_length(max(len(text) for text in prompts), "prompt")
            return await self._split(prompts)
        for ids in prompts:
            if any(not 0 <= token < self.facts.vocabulary for token in ids):
                raise ApiError(400, f"token ids must be in [0, {self.facts.vocabulary})", "prompt")
        return prompts

    def sampling(self, body: Shared, prompt: list[int], default_tokens: int | None, logprobs: int | None) -> Sampling:
        """How to go on after `prompt`; default_tokens None: to the end of the context. ApiError beyond that."""
        field, asked = "max_tokens", body.max_tokens
        if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
            field, asked = "max_completion_tokens", body.max_completion_tokens
        room = self.facts.max_context - len(prompt)
        if not prompt:
            raise ApiError(400, "the prompt must have at least one token", "prompt")
        if room < 1 or (asked or 1) > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.facts.max_context} tokens; the prompt has {len(prompt)}"
                + (f" and {asked} new ones were requested." if asked else "."),
                field if room >= 1 else ("messages" if isinstance(body, ChatRequest) else "prompt"),
                "context_length_exceeded",
            )
        facts = self.facts
        top_k = facts.top_k if body.top_k is None else body.top_k
        return Sampling(
            max_tokens=asked or min(room, default_tokens or room),
            temperature=facts.temperature if body.temperature is None else body.temperature,
            top_p=facts.top_p if body.top_p is None else body.top_p,
            top_k=max(top_k, 0),
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=self._bias(body),
            seed=body.seed,
            stop=body.stops,
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
        )

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse what cannot fit however it is split: splitting a text of megabytes takes seconds."""
        if characters > self._most_characters:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.facts.max_context} tokens; {characters} characters are "
                "more than so many of the longest tokens hold.",
                param,
                "context_length_exceeded",
            )

    def _bias(self, body: Shared) -> tuple[tuple[int, float], ...]:
        pairs = []
        for token, bias in (body.logit_bias or {}).items():
            known = len(token) <= MAX_DIGITS and token.isascii() and token.isdigit()
            if not known or int(token) >= self.facts.vocabulary:
                raise ApiError(400, f"logit_bias must name token ids in [0, {self.facts.vocabulary})", "logit_bias")
            pairs.append((int(token), bias))
        return tuple(dict(pairs).items())

    async def _split(self, texts: list[str], **options: Any) -> list[list[int]]:
        """The token ids of each text."""

        def split(own: Any) -> list[list[int]]:
            return [own(text, **options)["input_ids"] for text in texts]

        try:
            return await self._aside.run(split, SPLIT_SECONDS)
        except TookTooLong:
            raise overloaded(f"the prompt was not split into tokens within {SPLIT_SECONDS:g} seconds") from None


def _checked_extra(tokenizer: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Variables of the model's template, never another template or its options."""
    known = inspect.signature(tokenizer.apply_chat_template).parameters
    for name, value in extra.items():
        if name in known or not isinstance(value, (str, int, float, bool)):
            raise ApiError(400, f"chat_template_kwargs must not hold {name}", "chat_template_kwargs")
    return extra


def _templated(tokenizer: Any, messages: list[dict[str, Any]], extra: dict[str, Any]) -> str:
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "this model has no chat template; use /v1/completions", "messages")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **extra)
    except Exception as error:  # a template refuses roles or their order by raising, or fails at what it did not expect
        told = isinstance(error, (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError))
        why = (told and str(error)) or type(error).__name__  # an error of the system may name a path
        raise ApiError(400, f"the model's chat template refuses this conversation: {why}", "messages") from error
