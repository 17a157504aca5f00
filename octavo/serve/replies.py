"""The shapes of OpenAI's answers: chat and text completions, whole and in chunks."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from ..errors import LEAVING
from ..notices import log
from .errors import INTERNAL, ApiError
from .requests import Event, TokenChoice
from .streams import Choices
from .text import TokenNames


class Reply:
    """How one request is answered.

    chat: in the shapes of chat completions, else of text completions. names: of tokens, for logprobs; None: none.
    echoes: text before the replies to each prompt. n: replies to each. usage_chunk: whether a stream ends with counts.
    """

    def __init__(
        self, model: str, chat: bool, names: TokenNames | None, echoes: list[str], n: int, usage_chunk: bool
    ) -> None:
        prefixes = [text for text in echoes for _ in range(n)]
        self.n = n
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        self.chat, self.names, self.prefixes, self.usage_chunk = chat, names, prefixes, usage_chunk
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        self._told = [len(text) for text in prefixes]  # characters of each choice so far

    def whole(self, news: list[list[Event]]) -> dict[str, Any]:
        """The answer when all has been generated."""
        choices = []
        for index, events in enumerate(news):
            text = self.prefixes[index] + "".join(event.text for event in events)
            choices.append(self._choice(index, text, events, events[-1].finish, delta=False))
        return {**self.head, "choices": choices, "usage": usage([events[-1] for events in news], self.n)}

    async def chunks(self, choices: Choices) -> AsyncIterator[str]:
        """The data of a stream's events as they come; an error is its last one but [DONE]."""
        if self.chat:
            self.head["object"] = "chat.completion.chunk"
        began: set[int] = set()
        last: dict[int, Event] = {}
        try:
            async for index, event in choices.events():
                if index not in began:
                    began.add(index)
                    if self.chat or self.prefixes[index]:
                        yield self._line([self._choice(index, self.prefixes[index], [], None, delta=True, first=True)])
                last[index] = event
                if event.text or event.tokens:
                    yield self._line([self._choice(index, event.text, [event], None, delta=True)])
                if event.finish:
                    yield self._line([self._choice(index, "", [], event.finish, delta=True)])
            if self.usage_chunk:
                yield self._line([], usage([last[index] for index in sorted(last)], self.n))
        except ApiError as error:
            yield json.dumps(error.body())
        except (asyncio.CancelledError, GeneratorExit, *LEAVING):
            raise
        except BaseException:
            log.exception("a stream failed")
            yield json.dumps(ApiError(500, INTERNAL).body())
        yield "[DONE]"

    def _line(self, choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> str:
        shown = {"usage": counts} if self.usage_chunk else {}
        return json.dumps({**self.head, "choices": choices, **shown})

    def _choice(
        self, index: int, text: str, events: list[Event], finish: str | None, *, delta: bool, first: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": None}
        tokens = [token for event in events for token in event.tokens]
        if self.names is not None and (tokens or not delta):
            choice["logprobs"] = chat_logprobs(self.names, tokens) if self.chat else text_logprobs(self.names, tokens)
        if not self.chat:
            offsets = self._offsets(index, events)
            if choice["logprobs"] is not None:
                choice["logprobs"]["text_offset"] = offsets
            return {**choice, "text": text}
        if not delta:
            return {**choice, "message": {"role": "assistant", "content": text, "refusal": None}}
        if first:
            return {**choice, "delta": {"role": "assistant", "content": ""}}
        return {**choice, "delta": {"content": text} if text or not finish else {}}

    def _offsets(self, index: int, events: list[Event]) -> list[int]:
        """Where each token's text begins: where the text ends that is certain before it, so never beyond the reply."""
        offsets = []
        for event in events:
            offsets += [self._told[index]] * len(event.tokens)
            self._told[index] += len(event.text)
        return offsets


def chat_logprobs(names: TokenNames, tokens: list[TokenChoice]) -> dict[str, Any]:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": logprob, "bytes": names.bytes(token)}

    return {
        "content": [
            {**shown(choice.token, choice.logprob), "top_logprobs": [shown(*other) for other in choice.top]}
            for choice in tokens
        ],
        "refusal": None,
    }


def text_logprobs(names: TokenNames, tokens: list[TokenChoice]) -> dict[str, Any]:
    """As text completions have them, without text_offset."""
    return {
        "tokens": [names.text(choice.token) for choice in tokens],
        "token_logprobs": [choice.logprob for choice in tokens],
        "top_logprobs": [{names.text(token): value for token, value in choice.top} for choice in tokens],
    }


def usage(last: list[Event], n: int) -> dict[str, Any]:
    """Counts over the last news of all choices; a prompt counts once, however many (`n`) replies it has."""
    prompts = sum(event.prompt_tokens for event in last[::n])
    new = sum(event.new_tokens for event in last)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": new,
        "total_tokens": prompts + new,
        "prompt_tokens_details": {"cached_tokens": sum(event.cached_tokens for event in last[::n])},
    }
