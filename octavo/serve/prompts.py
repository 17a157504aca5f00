"""From the body of a request to token ids and a Sampling, with every bound checked before the engine sees it."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .errors import ApiError
from .requests import Sampling
from .schemas import MAX_CHOICES, ChatRequest, CompletionRequest, Shared

THREADS = 2  # a long prompt takes a second to split; a short one need not wait for it


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
        self._copies = threading.local()  # a fast tokenizer is not made for several threads at once
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="octavo-tokens")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of_chat(self, body: ChatRequest) -> list[int]:
        """The conversation through the model's chat template."""
        messages = [message.plain() for message in body.messages]
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        return await self._aside(lambda tokenizer: _templated(tokenizer, messages, body.chat_template_kwargs or {}))

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
            return await self._aside(lambda tokenizer: [tokenizer(text)["input_ids"] for text in prompts])
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
            if not token.isascii() or not token.isdigit() or int(token[:19]) >= self.facts.vocabulary:
                raise ApiError(400, f"logit_bias must name token ids in [0, {self.facts.vocabulary})", "logit_bias")
            pairs.append((int(token), bias))
        return tuple(dict(pairs).items())

    async def _aside(self, work: Callable[[Any], Any]) -> Any:
        """work(tokenizer) on a thread, with a tokenizer of that thread's own."""

        def run() -> Any:
            if not hasattr(self._copies, "tokenizer"):
                self._copies.tokenizer = copy.deepcopy(self._tokenizer)
            return work(self._copies.tokenizer)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)


def _templated(tokenizer: Any, messages: list[dict[str, Any]], extra: dict[str, Any]) -> list[int]:
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "this model has no chat template; use /v1/completions", "messages")
    known = inspect.signature(tokenizer.apply_chat_template).parameters
    for name, value in extra.items():  # variables of the model's template, never another template or its options
        if name in known or not isinstance(value, (str, int, float, bool)):
            raise ApiError(400, f"chat_template_kwargs must not hold {name}", "chat_template_kwargs")
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **extra)
    except (TemplateError, TypeError, KeyError) as error:  # a template refuses roles or their order by raising
        raise ApiError(400, f"the model's chat template refuses this conversation: {error}", "messages") from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]
