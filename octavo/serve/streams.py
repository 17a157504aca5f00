"""News of a request's sequences on the event loop, and the two ways that they reach a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from starlette.responses import Response

from .engine import Engine, Refused
from .errors import ApiError, overloaded
from .requests import Event, Sampling, Sequence

T = TypeVar("T")


class Choices:
    """The sequences of one request, numbered from 0 in the order of its prompts; use it on the event loop.

    prompts: token ids and sampling of each prompt. n: replies to each.
    """

    def __init__(self, engine: Engine, prompts: list[tuple[list[int], Sampling]], n: int) -> None:
        self._engine = engine
        self._news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._sequences: list[Sequence] = []
        for prompt, sampling in prompts:
            first = None
            for number in range(n):
                seeded = sampling if sampling.seed is None else _with_seed(sampling, number)
                sequence = Sequence(prompt, seeded, self._listener(len(self._sequences)), after=first)
                first = first or sequence
                self._sequences.append(sequence)
        try:
            engine.submit(self._sequences)
        except Refused as refused:
            raise overloaded(str(refused)) from refused

    def _listener(self, index: int) -> Callable[[Event], None]:
        return lambda event: self._news.put_nowait((index, event))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, news) until each has ended. ApiError where one ended with an error."""
        left = len(self._sequences)
        while left:
            index, event = await self._news.get()
            if event.error is not None:
                raise overloaded(event.error) if not self._engine.accepting else ApiError(500, event.error)
            left -= event.last
            yield index, event

    async def all(self, receive: Callable[[], Awaitable[Any]]) -> list[list[Event]]:
        """Every choice's news, once all have ended. Raises ClientGone where the client hangs up before."""
        found: list[list[Event]] = [[] for _ in self._sequences]

        async def collect() -> None:
            async for index, event in self.events():
                found[index].append(event)

        await unless(_hung_up(receive), ClientGone, collect())
        return found

    def cancel(self) -> None:
        """Nobody wants the rest."""
        self._engine.cancel(self._sequences)


def _with_seed(sampling: Sampling, number: int) -> Sampling:
    """The same with the seed of reply `number`, which is not that of its neighbours."""
    return replace(sampling, seed=(sampling.seed or 0) + number)


class ClientGone(Exception):
    """The client has hung up: there is nobody to answer."""


async def unless(end: Awaitable[Any], error: Callable[[], Exception], work: Awaitable[T]) -> T:
    """What `work` returns; where `end` comes before, `work` is cancelled and `error()` raised."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()


async def _hung_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. A client that hangs up ends the work behind them at once.

    lines: the data of each event. ended: called when no more are wanted, however that came.
    """

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._lines, self._ended = lines, ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send them as ASGI has it."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless(_hung_up(receive), ClientGone, self._send(send))
        except (ClientGone, OSError):
            pass
        finally:
            self._ended()

    async def _send(self, send: Any) -> None:
        async for line in self._lines:
            body = f"data: {line}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
