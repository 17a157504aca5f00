"""A tiny random model with a byte-level tokenizer, engines over it and a server in a thread, for serve's tests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers_models import tiny, transformers

pytest.importorskip("fastapi", reason="fastapi is in the extra serve")
pytest.importorskip("uvicorn", reason="uvicorn is in the extra serve")

from octavo.integrations.transformers import enable  # noqa: E402
from octavo.quality.load import LoadedModel  # noqa: E402
from octavo.serve import server  # noqa: E402
from octavo.serve.engine import Engine, EngineOptions  # noqa: E402
from octavo.serve.metrics import Metrics  # noqa: E402
from octavo.serve.requests import Event, Sampling, Sequence  # noqa: E402
from octavo.serve.runner import Runner  # noqa: E402
from octavo.serve.text import BYTE_OF  # noqa: E402

NAME = "tiny"
BEGIN, END = 256, 257  # token ids after those of the bytes
VOCABULARY = 258
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token for each byte, as byte-level BPE writes them; <begin> and <end> are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({char: byte for char, byte in BYTE_OF.items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<begin>", special=True), AddedToken("<end>", special=True)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<begin>", eos_token="<end>")
    fast.chat_template = template
    return fast


def tiny_loaded(**changes: Any) -> LoadedModel:
    """A tiny llama that speaks bytes, in fp32, as serve loads models."""
    model = tiny("llama", **{"vocab_size": VOCABULARY, "eos_token_id": END, "bos_token_id": BEGIN, **changes})
    return LoadedModel(model, byte_tokenizer(), NAME, "a test")


def make_engine(model: Any, tokenizer: Any = None, num_pages: int = 64, kv: str = "fp8", **bounds: Any) -> Engine:
    """An engine over `model` with pages of 32 tokens, not started; nothing ends a reply but its length."""
    handle = enable(model, kv, page_size=32, num_pages=num_pages)
    options = EngineOptions(**{"max_context": 256, "max_batch": 8, "step_tokens": 64, **bounds})
    return Engine(Runner(model, handle), tokenizer or byte_tokenizer(), frozenset(), options, Metrics())


class Heard:
    """A sequence and the news of it, collected on the engine's thread."""

    def __init__(self, prompt: list[int], sampling: Sampling, after: Sequence | None = None) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.sequence = Sequence(prompt, sampling, self._hear, after)

    def _hear(self, event: Event) -> None:
        assert not self.ended.is_set(), "news after the last"
        self.events.append(event)
        if event.last:
            self.ended.set()

    def tokens(self, seconds: float = 60) -> list[int]:
        """The generated tokens, once it has ended."""
        assert self.ended.wait(seconds), "not ended in time"
        return self.sequence.tokens[len(self.sequence.prompt) :]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


def greedy(count: int, **changes: Any) -> Sampling:
    return replace(Sampling(count, temperature=0.0), **changes)


def run_all(engine: Engine, heard: list[Heard]) -> list[list[int]]:
    """Start `engine`, let it finish all of them, and close it."""
    engine.submit([one.sequence for one in heard])
    engine.start()
    try:
        return [one.tokens() for one in heard]
    finally:
        engine.close()


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers' generate finds greedily, through whatever cache the model has."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return found[0, len(prompt) :].tolist()


class Running:
    """A server in a thread. url: of /v1. engine: behind it. stop(): as a signal would."""

    def __init__(self, options: server.ServeOptions, loaded: LoadedModel, send_bytes: int | None) -> None:
        runner, bounds = server.prepare(options, loaded)
        app, self.engine = server.application(options, loaded, runner, bounds)
        bound = server.listen(options.host, 0)
        if send_bytes:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        listening = threading.Event()
        self.server = server.Server(app, self.engine, options.drain_seconds, listening.set)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [bound]}, daemon=True)
        self.thread.start()
        assert listening.wait(30)

    def stop(self, seconds: float = 30) -> None:
        """Ask it to stop and wait until it has."""
        self.server.should_exit = True
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the server did not stop"


@contextmanager
def running(loaded: LoadedModel | None = None, send_bytes: int | None = None, **changes: Any) -> Iterator[Running]:
    """A server of the tiny model on a free port; send_bytes: what the system holds for a client that does not read."""
    fields = {"model": NAME, "device": torch.device("cpu"), "cache_tokens": 4096, "page_size": 32, **changes}
    found = Running(server.ServeOptions(**fields), loaded or tiny_loaded(), send_bytes)
    try:
        yield found
    finally:
        found.stop()
