"""From options to a running server: load, plan, listen, and stop without losing a reply."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import uvicorn

from ..errors import InvalidInput
from ..quality.load import LoadedModel
from ..warmup import warm
from . import api, load, ranks
from .engine import Engine, EngineOptions
from .graphs import capture_decodes
from .metrics import Metrics
from .prompts import ModelFacts, Prompts
from .runner import Runner

KEY_VARIABLE = "OCTAVO_API_KEY"
KEEP_ALIVE = 30  # seconds that an idle connection stays
BACKLOG = 2048  # connections that the system holds until they are taken
LAST_WORDS = 3  # seconds to send them in, after the engine is done
BODY_BYTES = 4 << 20
BODY_BYTES_PER_TOKEN = 32  # of the context: long contexts have long bodies


@dataclass(frozen=True)
class ServeOptions:
    """What `octavo serve` was asked for; None: chosen from the model and the machine."""

    model: str
    device: torch.device
    kv_cache_dtype: str = "fp8_e4m3"
    page_size: int = 64
    backend: str | None = None
    tp: int = 1
    max_context: int | None = None
    max_batch: int | None = None
    step_tokens: int | None = None
    cache_tokens: int | None = None
    prefix_cache: bool = True
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    drain_seconds: float = 30.0


def read_key(file: Path | None) -> str | None:
    """The API key from `file`, else from the environment; None: no key is asked for."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE)
        return key.strip() or None if key else None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--api-key-file cannot be read: {type(error).__name__}", str(file)) from error
    if not key:
        raise InvalidInput("--api-key-file must hold a key", "an empty file")
    return key


def prepare(options: ServeOptions, loaded: LoadedModel) -> tuple[Runner, EngineOptions]:
    """The model with its cache, and bounds that fit both."""
    handle = load.enable_paged(
        loaded.model, options.kv_cache_dtype, options.page_size, options.backend, options.cache_tokens
    )
    gpu = options.device.type == "cuda"
    room = handle.pool.num_pages * options.page_size
    most = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or room
    context = min(most, room) if options.max_context is None else options.max_context
    if context > most or context > room:
        raise InvalidInput(f"--max-context must be at most the model's {most} and the cache's {room} tokens", context)
    bounds = EngineOptions(
        max_context=context,
        max_batch=options.max_batch or (256 if gpu else 32),
        step_tokens=options.step_tokens or (8192 if gpu else 512),
        prefix_cache=options.prefix_cache,
    )
    runner = Runner(loaded.model, handle)
    tokens = max(bounds.step_tokens, bounds.max_batch)
    pages = -(-context // options.page_size)
    handle.reserve(bounds.max_batch, tokens, pages * options.page_size)
    if gpu:  # else the first steps of several sequences would wait for kernels of theirs
        for choice in handle.choices.values():
            warm(choice, options.device, max_batch=bounds.max_batch, max_query_tokens=tokens, max_context=context)
        runner.warm_up()
    if options.tp == 1:  # the ranks' collectives stay outside graphs
        runner.graphs = capture_decodes(runner, bounds.max_batch, pages)
    return runner, bounds


def application(options: ServeOptions, loaded: LoadedModel, runner: Any, bounds: EngineOptions) -> tuple[Any, Engine]:
    """(the web application, its engine, which is started)."""
    model, tokenizer = loaded.model, loaded.tokenizer
    engine = Engine(runner, tokenizer, load.stop_tokens(model, tokenizer), bounds, Metrics())
    facts = model_facts(loaded, options.served_name, bounds.max_context)
    key = options.api_key
    limit = BODY_BYTES + BODY_BYTES_PER_TOKEN * bounds.max_context
    app = api.build(engine, Prompts(tokenizer, facts), api.WebOptions(body_bytes=limit, api_key=key))
    engine.start()
    return app, engine


def model_facts(loaded: LoadedModel, served_name: str | None, max_context: int) -> ModelFacts:
    """What requests are checked against; sampling defaults are the model's own where its generation config has them."""
    model = loaded.model
    own = getattr(model, "generation_config", None)

    def default(name: str, otherwise: float) -> Any:
        value = getattr(own, name, None) if getattr(own, "do_sample", False) else None
        return otherwise if value is None else value

    return ModelFacts(
        name=served_name or loaded.name,
        vocabulary=model.get_input_embeddings().num_embeddings,
        max_context=max_context,
        temperature=float(default("temperature", 1.0)),
        top_p=float(default("top_p", 1.0)),
        top_k=int(default("top_k", 0)),
    )


class Server(uvicorn.Server):
    """uvicorn, which at a signal gives the engine `drain_seconds` to finish; `ready` is called once it listens."""

    def __init__(
        self, app: Any, engine: Engine, drain_seconds: float, ready: Callable[[], None] = lambda: None
    ) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(drain_seconds) + LAST_WORDS + 1,  # after _hang_up: never, that is
        )
        super().__init__(config)
        self._engine, self._drain_seconds, self._ready = engine, drain_seconds, ready
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal ends the server in order; a second one leaves the replies no more time.

        uvicorn's own would leave the engine behind at the second, and raise the signal again at the end.
        """
        if self.should_exit and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain, 0.0)  # not from here: the engine's door may be held
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn, then say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Also stop when the engine did."""
        return await super().on_tick(counter) or self._engine.failed is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Streams end with their last token or with an error; then connections close."""
        self._drain(self._drain_seconds)
        await super().shutdown(sockets)

    def _drain(self, seconds: float) -> None:
        self._engine.drain(seconds)
        asyncio.get_running_loop().call_later(seconds + LAST_WORDS, self._hang_up)

    def _hang_up(self) -> None:
        """Close what is still open: a client that does not read its last words would be waited for otherwise."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; InvalidInput where the address is taken or not this machine's.

    Bound alone it would share its port with another server that has not begun to listen. Who connects before the
    server runs waits for it.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except UnicodeError as error:  # of a name with an empty or a long part
        raise InvalidInput("--host must be an address or a host's name", repr(host)) from error
    except OSError as error:
        raise InvalidInput(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return bound


def serve(options: ServeOptions, say: Callable[[str], None], show: Callable[[str], None]) -> int:
    """Load and serve until a signal; the exit code: 1 if the engine stopped by itself.

    say: a line of progress. show: the plan and the address, when they are known.
    """
    group, rank = None, 0
    if options.tp > 1:
        rank, group, device = ranks.join(options.tp, options.device)
        options = replace(options, device=device)
    leads = rank == 0
    bound = listen(options.host, options.port) if leads else None  # before minutes of loading
    loaded = load.load_model(options.model, options.device, options.tp, say if leads else _silent)
    if leads:
        say("Planning")
    runner, bounds = prepare(options, loaded)
    if not leads:
        _handle_signals(signal.SIG_IGN)  # this rank stops when rank 0 says so
        ranks.follow(runner, group)
        return 0
    leading = runner if group is None else ranks.LeadingRunner(runner, group)
    app, engine = application(options, loaded, leading, bounds)
    assert bound is not None
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{bound.getsockname()[1]}/v1"
    web = Server(app, engine, options.drain_seconds, lambda: show(address))
    _handle_signals(web.handle_exit)  # from here to the process's end: one between uvicorn's own would be lost
    show(_announcement(options, loaded, runner, bounds))
    web.run(sockets=[bound])
    code = 1 if engine.failed else 0
    if not app.state.prompts.join(LAST_WORDS):
        _leave(code)
    return code


def _handle_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _leave(code: int) -> None:
    """End the process where a thread is stuck inside a library: Python's own end would unwind it there, and abort."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _announcement(options: ServeOptions, loaded: LoadedModel, runner: Runner, bounds: EngineOptions) -> str:
    handle = runner.handle
    room = handle.pool.num_pages * runner.page_size
    size = handle.pool.num_pages * runner.page_size * handle.bytes_per_token
    ranks_of = f" on each of {options.tp} ranks" if options.tp > 1 else ""
    return (
        f"{handle.plan}\n\n"
        f"{options.served_name or loaded.name}: a cache of {room:,} tokens, {size / 1e9:.2f} GB{ranks_of}; "
        f"contexts of {bounds.max_context:,}, {bounds.max_batch} at once, {bounds.step_tokens:,} tokens a step"
    )


def _silent(line: str) -> None:
    """Ranks other than 0 say nothing."""
