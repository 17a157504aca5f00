"""The web application: OpenAI's routes over an Engine."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..errors import LEAVING
from ..notices import log
from .engine import Engine, News, hand_out
from .errors import INTERNAL, ApiError, overloaded
from .prompts import Prompts
from .replies import Reply
from .requests import Sampling
from .schemas import ChatRequest, CompletionRequest, Shared
from .streams import Choices, ClientGone, EventStream, unless
from .text import TokenNames

Body = TypeVar("Body", bound=Shared)
T = TypeVar("T")

DRAINED = 4  # times body_bytes that are read and dropped so that a client hears 413 instead of a broken pipe
MANY = 1000
CLOSED = 499  # a client's own hang-up, for the counters: nobody reads it


@dataclass(frozen=True)
class WebOptions:
    """How the server meets the world.

    Attributes:
        body_bytes: longest body of a request.
        body_seconds: longest time that a body may take to arrive.
        api_key: what clients must send as a bearer token; None: nothing.
    """

    body_bytes: int
    body_seconds: float = 60.0
    api_key: str | None = None


def build(engine: Engine, prompts: Prompts, options: WebOptions) -> FastAPI:
    """The application. Its start tells `engine` to hand out news on the event loop; its end closes both."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def post(news: News) -> None:
            loop.call_soon_threadsafe(hand_out, news)

        def shut() -> None:
            loop.call_soon_threadsafe(server.shut.set)

        engine.post, engine.shut = post, shut
        yield
        await asyncio.to_thread(engine.close)
        prompts.close()

    server = _Server(engine, prompts, options)
    # No pages that a browser would fetch scripts for, and no path that is another with a slash.
    paths = {"docs_url": None, "redoc_url": None, "openapi_url": None, "redirect_slashes": False}
    app = FastAPI(title="octavo", lifespan=lifespan, **paths)
    app.state.prompts = prompts
    app.add_middleware(AnswerFailures)
    app.add_middleware(CountRequests, metrics=engine.metrics)  # around the other
    _add_error_handlers(app)
    key = [Depends(server.check_key)]
    app.get("/health")(server.health)
    app.get("/metrics")(server.metrics)
    app.get("/v1/models", dependencies=key)(server.models)
    app.get("/v1/models/{name:path}", dependencies=key)(server.model)
    app.post("/v1/chat/completions", dependencies=key)(server.chat)
    app.post("/v1/completions", dependencies=key)(server.completions)
    return app


class _Server:
    """The routes. shut: set when the engine takes no more requests."""

    def __init__(self, engine: Engine, prompts: Prompts, options: WebOptions) -> None:
        self.shut = asyncio.Event()
        self._engine, self._prompts, self._options = engine, prompts, options
        self._names = TokenNames(engine.tokenizer)

    async def check_key(self, request: Request) -> None:
        """401 unless the request carries the server's key; compared in constant time."""
        wanted = self._options.api_key
        if wanted is None:
            return
        sent = request.headers.get("authorization", "").encode("latin-1")  # as the bytes came
        kind, _, given = sent.partition(b" ")
        # A key from the environment may be no UTF-8.
        if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), wanted.encode(errors="surrogateescape")):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    async def health(self) -> Response:
        """200 while requests are taken."""
        if self._engine.accepting:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": self._engine.failed or "shutting down"}, 503)

    async def metrics(self) -> Response:
        """Prometheus' text."""
        return Response(self._engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict[str, Any]:
        """It by name."""
        self._check_model(name)
        return self._card()

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._read(request, ChatRequest)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        prompt = await self._while_open(self._prompts.of_chat(body))
        shown = (body.top_logprobs or 0) if body.logprobs else None
        sampling = self._prompts.sampling(body, prompt, None, shown)
        return await self._answer(request, body, [(prompt, sampling)], [""])

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._read(request, CompletionRequest)
        if body.best_of is not None and body.best_of != body.choices:
            raise ApiError(400, "best_of must be n: replies are not ranked", "best_of")
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo does not go with logprobs: a prompt's are not computed", "echo")
        ids = await self._while_open(self._prompts.of_completion(body))
        prompts = [(prompt, self._prompts.sampling(body, prompt, 16, body.logprobs)) for prompt in ids]
        echoes = [self._text(prompt) for prompt in ids] if body.echo else [""] * len(ids)
        return await self._answer(request, body, prompts, echoes)

    def _text(self, prompt: list[int]) -> str:
        return self._engine.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    async def _answer(
        self, request: Request, body: Shared, prompts: list[tuple[list[int], Sampling]], echoes: list[str]
    ) -> Response:
        names = None if prompts[0][1].logprobs is None else self._names
        options = body.stream_options
        usage_chunk = bool(body.stream and options and options.include_usage)
        name, chat = self._prompts.facts.name, isinstance(body, ChatRequest)
        reply = Reply(name, chat, names, echoes, body.choices, usage_chunk)
        choices = Choices(self._engine, prompts, body.choices)
        if body.stream:
            return EventStream(reply.chunks(choices), choices.cancel)
        try:
            return JSONResponse(reply.whole(await choices.all(request.receive)))
        finally:
            choices.cancel()

    async def _while_open(self, work: Awaitable[T]) -> T:
        """What `work` returns; 503 where the engine takes no more requests before: the answer would be no anyway."""
        return await unless(self.shut.wait(), lambda: overloaded(self._engine.why_shut), work)

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """The body, within its bounds, as `kind`."""
        if not self._engine.accepting:
            raise overloaded(self._engine.why_shut)
        arriving = asyncio.wait_for(read_body(request, self._options.body_bytes), self._options.body_seconds)
        try:
            raw = await self._while_open(arriving)
        except ClientDisconnect:
            raise ClientGone from None
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as error:
            raise _as_api_error(error) from None
        self._check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream to be true", "stream_options")
        return body

    def _check_model(self, name: str) -> None:
        if name != self._prompts.facts.name:
            message = f"The model `{name[:128]}` does not exist; this server has `{self._prompts.facts.name}`."
            raise ApiError(404, message, "model", "model_not_found")

    def _card(self) -> dict[str, Any]:
        facts = self._prompts.facts
        return {
            "id": facts.name,
            "object": "model",
            "created": 0,
            "owned_by": "octavo",
            "max_model_len": facts.max_context,
        }


async def read_body(request: Request, limit: int) -> bytes:
    """The body; 413 where it is longer than `limit`, after reading so much more that most clients hear it."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > DRAINED * limit:
            break
    if size > limit:
        raise ApiError(413, f"the body must be at most {limit} bytes", headers={"Connection": "close"})
    return b"".join(parts)


def _as_api_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, in the words of its check."""
    if error.error_count() > MANY:  # listing them would take seconds
        return ApiError(400, f"the body has {error.error_count()} unknown or wrong fields")
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param)
    where = ".".join(str(part) for part in first["loc"])
    return ApiError(400, f"{where or 'the body'}: {first['msg'].removeprefix('Value error, ')}", param)


def _add_error_handlers(app: FastAPI) -> None:
    def answer(error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def web(request: Request, error: HTTPException) -> Response:
        words = {404: f"unknown path {request.url.path[:128]}", 405: f"{request.method} is not allowed here"}
        headers = dict(error.headers or {})
        return answer(ApiError(error.status_code, words.get(error.status_code, str(error.detail)), headers=headers))

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLOSED)


class AnswerFailures:
    """Answers 500 to what nothing else handles, a tokenizer's panic included; the log has what it was. ASGI."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        """Pass on, and answer where that raised before it answered."""
        begun = False

        async def noted(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except (asyncio.CancelledError, *LEAVING):
            raise
        except BaseException as error:
            if begun or scope["type"] != "http":
                raise RuntimeError("a request failed in the middle of its answer") from error
            log.exception("a request failed")
            await JSONResponse(ApiError(500, INTERNAL).body(), 500)(scope, receive, send)


class CountRequests:
    """Counts answers by route and status; ASGI, so that streams pass through as they are."""

    ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/models": "models"}

    def __init__(self, app: Any, metrics: Any) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        """Pass on, and count when the answer begins."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self.ROUTES.get(scope["path"], "other")

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(route, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counted)
