"""What clients, tokenizers, chat templates and signals do to octavo serve that they should not."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
from typing import Any

import httpx
import pytest
import torch
from serve_models import NAME, TEMPLATE, byte_tokenizer, running, tiny_loaded
from test_serve_api import completion, everything, post, raw_post, wait_for

from octavo.quality.load import LoadedModel
from octavo.serve import aside, prompts, server
from octavo.serve.errors import ApiError
from octavo.serve.server import ServeOptions

OPTIONS = ServeOptions(NAME, torch.device("cpu"), cache_tokens=1024, page_size=32, port=0)
pytestmark = pytest.mark.usefixtures("one_thread")

LOOP = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
TEMPLATES = {  # by the content of a message
    "loop": LOOP,
    "zero": "{{ 1 / 0 }}",
    "type": "{{ 1 + m }}",
    "key": "{{ {}.popitem() }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "overflow": "{% for a in range(10 ** 30) %}{% endfor %}",
    "long": "{{ raise_exception('no ' * 999) }}",
}
BRANCHES = "".join(
    f"{{% for m in messages %}}{{% if m.content == '{content}' %}}{code}{{% endif %}}{{% endfor %}}"
    for content, code in TEMPLATES.items()
)


class Panic(BaseException):
    """As tokenizers' PanicException: no Exception."""


def panic(*_: Any, **__: Any) -> Any:
    raise Panic("at /a/path/of/this/host")


def chat(content: str, **changes: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 2, **changes}


def faulty() -> LoadedModel:
    """The tiny model with a template that fails, or never ends, at some contents."""
    return LoadedModel(tiny_loaded().model, byte_tokenizer(BRANCHES + TEMPLATE), NAME, "a test")


def part_of_a_post(made: Any) -> socket.socket:
    """A connection that has sent one byte less than it said."""
    body = json.dumps(completion()).encode()
    host, port = made.url.split("/")[2].split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:-1])
    wait_for(lambda: made.server.server_state.tasks)
    return connection


@pytest.fixture(scope="module")
def served():
    with running(faulty()) as found:
        yield found


@pytest.fixture
def uvicorn_log():
    """What uvicorn logs, which propagates nothing."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.parametrize("content", [content for content in TEMPLATES if content != "loop"])
def test_what_a_template_raises_is_a_refusal_of_the_conversation(served, content):
    answer = post(served, "chat/completions", chat(content))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages" and len(error["message"]) <= 500
    assert error["message"].startswith("the model's chat template refuses this conversation: ")


def test_templates_that_never_end_are_given_up_and_the_next_requests_are_answered(served, monkeypatch):
    before = {thread for thread in threading.enumerate() if thread.name == "octavo-tokens"}
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.05)
    for _ in range(prompts.THREADS + 1):
        answer = post(served, "chat/completions", chat("loop"))
        assert answer.status_code == 400 and "did not end within 0.05 seconds" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert post(served, "chat/completions", chat("hello")).status_code == 200
    wait_for(lambda: not any(thread.is_alive() for thread in before))  # interrupted, not left behind


def test_threads_that_cannot_be_interrupted_are_replaced_but_not_for_ever():
    returning = threading.Event()
    made = aside.Aside(1, object)

    async def ask() -> None:
        for _ in range(1 + aside.LEFT_BEHIND):
            with pytest.raises(aside.TookTooLong):
                await made.run(lambda _: returning.wait(), 0.01)
        with pytest.raises(ApiError, match="hold every thread"):
            await made.run(lambda _: 1, 20)
        returning.set()
        while not made._sound:
            await asyncio.sleep(0.001)
        assert await made.run(lambda _: 1, 20) == 1

    asyncio.run(ask())
    made.close()
    assert made.join(20)


def test_what_was_given_up_while_it_queued_is_not_begun():
    returning, begun = threading.Event(), []
    made = aside.Aside(1, object)

    async def ask() -> None:
        first = asyncio.ensure_future(made.run(lambda _: returning.wait(), 20))
        second = asyncio.ensure_future(made.run(begun.append, 20))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({second})
        returning.set()
        assert await first and await made.run(lambda _: 1, 20) == 1

    asyncio.run(ask())
    made.close()
    assert begun == [] and made.join(20)


def test_a_shutdown_does_not_wait_for_a_template_and_its_client_hears_of_it():
    with running(faulty()) as made:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(post(made, "chat/completions", chat("loop"))))
        asking.start()
        aside = made.server.config.app.state.prompts._aside
        wait_for(lambda: aside._jobs.qsize() == 0 and made.server.server_state.tasks)
        made.stop()
        asking.join(20)
        assert answers[0].status_code == 503 and "shutting down" in answers[0].text
        assert aside.join(20)


def test_a_body_that_is_still_coming_at_a_shutdown_is_answered():
    with running(faulty()) as made:
        connection = part_of_a_post(made)
        made.stop()
        assert b"503 Service Unavailable" in everything(connection)


def test_a_client_that_hangs_up_within_its_body_is_no_error(served, uvicorn_log):
    part_of_a_post(served).close()
    wait_for(lambda: 'endpoint="completions",status="499"' in served.engine.metrics.text().decode())
    assert uvicorn_log == []


@pytest.mark.parametrize(
    ("broken", "changes"),
    [("__call__", {}), ("decode", {"echo": True}), ("decode", {}), ("names", {"logprobs": 1})],
)
def test_a_tokenizers_panic_is_the_failure_of_one_request(served, monkeypatch, caplog, broken, changes):
    """While the prompt is split, while it is echoed, in the engine, and while tokens are named."""
    body = completion(**changes)
    with monkeypatch.context() as patched:
        if broken == "names":
            patched.setattr("octavo.serve.text.TokenNames.text", panic)
        else:
            patched.setattr(type(served.engine.tokenizer), broken, panic)
        answer, streamed = (post(served, "completions", {**body, "stream": stream}) for stream in (False, True))
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "failed on this request" in answer.text and "failed on this request" in streamed.text
    assert "/a/path" not in answer.text + streamed.text and "Panic" in caplog.text
    assert 'endpoint="completions",status="500"' in served.engine.metrics.text().decode()
    assert post(served, "completions", body).status_code == 200


def test_offsets_of_tokens_lie_within_the_text(served):
    """Parts of characters are shown as U+FFFD each, special tokens with their name, stop strings not at all."""
    bias = {str(0xC3): 100, str(0xA9): 99.5}
    for changes in (
        {"max_tokens": 60},
        {"max_tokens": 9, "logit_bias": bias, "frequency_penalty": 2},
        {"stop": "\ufffd"},
    ):
        body = completion(logprobs=0, **changes)
        (choice,) = post(served, "completions", body).json()["choices"]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(choice["text"])
        lines = post(served, "completions", {**body, "stream": True}).text.split("\n\n")
        found = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines if line.startswith("data: {")]
        assert [at for part in found if part for at in part["text_offset"]] == offsets


def test_a_second_signal_ends_what_is_left_at_once_and_in_order(uvicorn_log):
    with running(drain_seconds=600) as made:
        stream, whole = (
            raw_post(made, completion(n=32, max_tokens=240, stream=s, ignore_eos=True)) for s in (True, False)
        )
        wait_for(lambda: made.engine.scheduler.running)
        made.server.handle_exit(signal.SIGINT, None)
        wait_for(lambda: not made.engine.accepting)
        assert made.engine.scheduler.busy
        made.server.handle_exit(signal.SIGINT, None)
        answers = everything(stream), everything(whole)
        assert b"shutting down" in answers[0] and b"[DONE]" in answers[0] and b"503" in answers[1]
        made.thread.join(20)
        assert not made.thread.is_alive() and not made.engine._thread.is_alive()
        made.server.handle_exit(signal.SIGINT, None)  # too late for anything
    assert uvicorn_log == []


def test_a_client_that_reads_nothing_is_cut_off_after_a_second_signal(uvicorn_log, monkeypatch):
    monkeypatch.setattr(server, "LAST_WORDS", 0.1)
    with running(send_bytes=4096, drain_seconds=600) as made:
        body = completion(n=4, max_tokens=100, stream=True, logprobs=20, ignore_eos=True)
        connection = raw_post(made, body, receive_bytes=4096)
        wait_for(lambda: made.engine.scheduler.running)
        wait_for(lambda: not made.engine.scheduler.busy, 60)
        for _ in range(2):
            made.server.handle_exit(signal.SIGTERM, None)
        made.thread.join(20)
        assert not made.thread.is_alive()
        connection.close()
    assert uvicorn_log == []


def test_a_signal_just_before_the_server_listens_ends_it(monkeypatch):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        assert not text.startswith("http"), "the signal was lost"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(server.load, "load_model", lambda *_: tiny_loaded())
    try:
        assert server.serve(OPTIONS, lambda _: None, show) == 0
        signal.raise_signal(signal.SIGTERM)  # nor does one afterwards change the exit code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert len(shown) == 1


def test_a_thread_that_is_stuck_does_not_keep_the_process_or_its_exit_code(monkeypatch):
    left: list[int] = []
    monkeypatch.setattr(server.Server, "run", lambda *_, **__: None)
    monkeypatch.setattr(server, "_handle_signals", lambda _: None)
    monkeypatch.setattr(server.load, "load_model", lambda *_: tiny_loaded())
    monkeypatch.setattr(prompts.Prompts, "join", lambda *_: False)
    monkeypatch.setattr(server.os, "_exit", left.append)
    server.serve(OPTIONS, lambda _: None, lambda _: None)
    assert left == [0]
