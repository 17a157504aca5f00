"""octavo serve as its clients see it: the official client, hostile bodies, crowds, hang-ups, and the end."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serve_models import NAME, byte_tokenizer, generated, running, tiny_loaded

from octavo.integrations.transformers import enable
from octavo.quality.load import LoadedModel
from octavo.serve import server as server_module

openai = pytest.importorskip("openai", reason="the official client is a test dependency")
pytestmark = pytest.mark.usefixtures("one_thread")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def post(server: Any, path: str, body: Any, **keywords: Any) -> httpx.Response:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return httpx.post(f"{server.url}/{path}", content=content, timeout=60, **keywords)


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "hello", "max_tokens": 4, "temperature": 0, **changes}


def expected_text(prompt: str, count: int) -> str:
    """What transformers' generate writes through octavo's cache."""
    loaded = tiny_loaded()
    enable(loaded.model, "fp8", page_size=32)
    tokens = generated(loaded.model, list(prompt.encode()), count)
    return loaded.tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_completion_is_what_generate_writes(client):
    made = client.completions.create(**completion(max_tokens=24))
    assert made.choices[0].text == expected_text("hello", 24)
    assert made.choices[0].finish_reason in ("length", "stop")
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 24, 29)


def test_a_chat_goes_through_the_template_and_streams_what_it_answers_whole(client):
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == expected_text("<user>hello\n<assistant>", 20)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].object == "chat.completion.chunk"


def test_several_prompts_and_replies_are_numbered(client):
    made = client.completions.create(**completion(prompt=["hello", "world"], n=2, echo=True))
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    starts = ["hello", "hello", "world", "world"]
    assert all(choice.text.startswith(start) for choice, start in zip(made.choices, starts, strict=True))
    assert made.choices[0].text == made.choices[1].text  # greedy
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (10, 16)
    drawn = client.completions.create(**completion(temperature=1, n=3, seed=3, max_tokens=12))
    again = client.completions.create(**completion(temperature=1, n=3, seed=3, max_tokens=12, stream=True))
    texts = [choice.text for choice in drawn.choices]
    streamed = ["", "", ""]
    for chunk in again:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts and len(set(texts)) == 3


def test_token_ids_are_prompts_too(client):
    by_text = client.completions.create(**completion())
    by_ids = client.completions.create(**completion(prompt=list(b"hello")))
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_logprobs_of_both_kinds(client):
    chat = client.chat.completions.create(
        model=NAME, messages=HELLO, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 3
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob < 0 and len(entry.top_logprobs) == 2
    text = client.completions.create(**completion(max_tokens=3, logprobs=1)).choices[0].logprobs
    assert len(text.tokens) == len(text.token_logprobs) == len(text.top_logprobs) == 3
    assert text.text_offset == [0, len(text.tokens[0]), len(text.tokens[0]) + len(text.tokens[1])]


def test_a_stop_string_ends_a_reply(client):
    whole = client.completions.create(**completion(max_tokens=20)).choices[0].text
    stop = whole[5:7]
    made = client.completions.create(**completion(max_tokens=20, stop=[stop, "never"])).choices[0]
    assert made.text == whole[: whole.index(stop)] and made.finish_reason == "stop"


def test_models_health_and_metrics(server, client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    root = server.url.removesuffix("/v1")
    assert httpx.get(f"{root}/health").json() == {"status": "ok"}
    client.completions.create(**completion())
    text = httpx.get(f"{root}/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found['octavo_requests_total{endpoint="completions",status="200"}']) >= 1
    assert float(found["octavo_generated_tokens_total"]) >= 4 and float(found["octavo_cache_pages"]) == 128
    for name in ("cache_pages_used", "running", "waiting", "step_tokens_total", "preemptions_total"):
        assert f"octavo_{name}" in found
    assert float(found['octavo_step_seconds_count{kind="decode"}']) > 0


BAD = {
    "not JSON": ("completions", '{"model": "tiny", ', 400, None),
    "no JSON object": ("completions", "[1, 2]", 400, None),
    "nothing": ("completions", "", 400, None),
    "not UTF-8": ("completions", b'{"model": "\xff"}', 400, None),
    "half a surrogate": ("completions", '{"model": "tiny", "prompt": "\\ud800"}', 400, None),
    "nested without end": ("completions", "[" * 100_000, 400, None),
    "NaN": ("completions", '{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "temperature"),
    "no model": ("completions", {"prompt": "a"}, 400, "model"),
    "another model": ("completions", {"model": "gpt-5", "prompt": "a"}, 404, "model"),
    "no prompt": ("completions", {"model": NAME}, 400, "prompt"),
    "an empty prompt": ("completions", {"model": NAME, "prompt": ""}, 400, "prompt"),
    "no prompts": ("completions", {"model": NAME, "prompt": []}, 400, "prompt"),
    "a mixed prompt": ("completions", {"model": NAME, "prompt": ["a", 1]}, 400, "prompt"),
    "unknown token ids": ("completions", {"model": NAME, "prompt": [1, 9999]}, 400, "prompt"),
    "negative token ids": ("completions", {"model": NAME, "prompt": [[-1]]}, 400, "prompt"),
    "bool token ids": ("completions", {"model": NAME, "prompt": [True]}, 400, "prompt"),
    "too many prompts": ("completions", {"model": NAME, "prompt": ["a"] * 65, "n": 2}, 400, "prompt"),
    "max_tokens as text": ("completions", completion(max_tokens="4"), 400, "max_tokens"),
    "max_tokens 0": ("completions", completion(max_tokens=0), 400, "max_tokens"),
    "max_tokens beyond the context": ("completions", completion(max_tokens=252), 400, "max_tokens"),
    "max_tokens beyond everything": ("completions", completion(max_tokens=10**30), 400, "max_tokens"),
    "a prompt beyond the context": ("completions", completion(prompt="a" * 300), 400, "prompt"),
    "ids beyond the context": ("completions", completion(prompt=[7] * 256), 400, "prompt"),
    "n 0": ("completions", completion(n=0), 400, "n"),
    "n of millions": ("completions", completion(n=10**7), 400, "n"),
    "n as a list": ("completions", completion(n=[1]), 400, "n"),
    "too hot": ("completions", completion(temperature=2.5), 400, "temperature"),
    "temperature as a bool": ("completions", completion(temperature=True), 400, "temperature"),
    "top_p 2": ("completions", completion(top_p=2), 400, "top_p"),
    "an empty stop": ("completions", completion(stop=""), 400, "stop"),
    "a long stop": ("completions", completion(stop="x" * 5000), 400, "stop"),
    "too many stops": ("completions", completion(stop=["a"] * 17), 400, "stop"),
    "a stop that is none": ("completions", completion(stop=[1]), 400, "stop"),
    "a bias of no token": ("completions", completion(logit_bias={"x": 1}), 400, "logit_bias"),
    "a bias of an unknown token": ("completions", completion(logit_bias={"9" * 5000: 1}), 400, "logit_bias"),
    "a bias behind zeros": ("completions", completion(logit_bias={"0" * 19 + "9999": 1}), 400, "logit_bias"),
    "a bias too large": ("completions", completion(logit_bias={"1": 1000}), 400, "logit_bias"),
    "a seed too large": ("completions", completion(seed=2**70), 400, "seed"),
    "an unknown argument": ("completions", completion(beams=3), 400, "beams"),
    "an endless argument": ("completions", completion(**{"x" * 10**5: 3}), 400, "x" * 125 + "..."),
    "an endless variable": (
        "chat/completions",
        {"model": NAME, "messages": HELLO, "chat_template_kwargs": {"x" * 10**5: []}},
        400,
        "chat_template_kwargs",
    ),
    "best_of": ("completions", completion(best_of=4), 400, "best_of"),
    "a suffix": ("completions", completion(suffix="end"), 400, "suffix"),
    "echo with logprobs": ("completions", completion(echo=True, logprobs=1), 400, "echo"),
    "stream options without a stream": ("completions", completion(stream_options={}), 400, "stream_options"),
    "no messages": ("chat/completions", {"model": NAME, "messages": []}, 400, "messages"),
    "a message without a role": ("chat/completions", {"model": NAME, "messages": [{"content": "a"}]}, 400, "messages"),
    "a picture": (
        "chat/completions",
        {"model": NAME, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages",
    ),
    "a role that the template refuses": (
        "chat/completions",
        {"model": NAME, "messages": [{"role": "alien", "content": "a"}]},
        400,
        "messages",
    ),
    "tools": ("chat/completions", {"model": NAME, "messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
    "another template": (
        "chat/completions",
        {"model": NAME, "messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        400,
        "chat_template_kwargs",
    ),
    "JSON output": (
        "chat/completions",
        {"model": NAME, "messages": HELLO, "response_format": {"type": "json_object"}},
        400,
        "response_format",
    ),
    "top_logprobs alone": ("chat/completions", {"model": NAME, "messages": HELLO, "top_logprobs": 2}, 400, None),
    "a million wrong messages": ("chat/completions", {"model": NAME, "messages": [1] * 10**6}, 400, "messages"),
    "ten thousand unknown arguments": ("completions", {f"x{n}": 1 for n in range(10**4)}, 400, None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_its_error_in_openais_shape(server, name):
    path, body, status, param = BAD[name]
    begun = time.monotonic()
    answer = post(server, path, body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 500
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert param is None or error["param"] == param
    assert time.monotonic() - begun < 20


def test_ten_megabytes_are_refused_and_the_next_request_is_answered(server):
    for body in (completion(prompt="a" * 10_000_000), completion(prompt=[1] * 5_000_000)):
        answer = post(server, "completions", body)
        assert answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"
    longest = post(server, "completions", completion(prompt="ab " * 1_300_000))
    assert longest.status_code == 400 and longest.json()["error"]["code"] == "context_length_exceeded"
    assert post(server, "completions", completion()).status_code == 200


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(server):
    assert httpx.get(f"{server.url}/embeddings").json()["error"]["type"] == "not_found_error"
    answer = httpx.get(f"{server.url}/completions")
    assert answer.status_code == 405 and "error" in answer.json()
    assert httpx.get(f"{server.url}/models/other").json()["error"]["code"] == "model_not_found"
    assert httpx.get(f"{server.url.removesuffix('/v1')}/docs").status_code == 404
    slash = post(server, "chat/completions/", {})  # a redirect would lead off the host that a proxy has
    assert slash.status_code == 404 and slash.json()["error"]["type"] == "not_found_error"


def test_the_official_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(**completion(prompt="a" * 300))


def test_eight_clients_at_once_get_what_each_would_get_alone(client):
    prompts = [f"client {number} says" for number in range(8)]
    alone = [
        client.completions.create(**completion(prompt=prompt, max_tokens=16)).choices[0].text for prompt in prompts
    ]

    def stream(prompt: str) -> str:
        chunks = client.completions.create(**completion(prompt=prompt, max_tokens=16, stream=True))
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(stream, prompts)) == alone


def test_two_hundred_clients_on_a_small_cache_all_get_their_reply():
    """Requests queue where pages run out; none is lost, none waits for ever."""
    with running(cache_tokens=256, max_context=96, max_batch=16) as server:
        with httpx.Client(timeout=120, limits=httpx.Limits(max_connections=200)) as web:

            def ask(number: int) -> int:
                body = completion(prompt=f"{number % 40:03}", max_tokens=6, ignore_eos=True)
                answer = web.post(f"{server.url}/completions", json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()["usage"]["completion_tokens"]

            with ThreadPoolExecutor(200) as pool:
                assert list(pool.map(ask, range(200))) == [6] * 200
        assert server.engine.pages.in_use == 0 and not server.engine.scheduler.busy


def raw_post(server: Any, body: dict[str, Any], receive_bytes: int = 65536) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    host, port = server.url.split("/")[2].split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    connection.settimeout(30)
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def wait_for(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_pages(server, stream):
    scheduler, pages = server.engine.scheduler, server.engine.pages
    connection = raw_post(server, completion(max_tokens=240, stream=stream, ignore_eos=True))
    wait_for(lambda: scheduler.running)
    if stream:
        assert b"200 OK" in connection.recv(4096)
    connection.close()
    wait_for(lambda: not scheduler.busy and pages.in_use == 0)
    text = server.engine.metrics.text().decode()
    assert 'octavo_sequences_total{finish="cancelled"}' in text


def test_a_key_is_asked_for_and_compared():
    with running(api_key="s3cret-é") as server:
        for given in (None, "Bearer wrong", "s3cret", "Basic s3cret"):
            headers = {} if given is None else {"Authorization": given}
            answer = post(server, "completions", completion(), headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{server.url}/models").status_code == 401
        assert httpx.get(f"{server.url.removesuffix('/v1')}/health").status_code == 200
        right = {"Authorization": "Bearer s3cret-é".encode()}
        assert post(server, "completions", completion(), headers=right).status_code == 200


@pytest.mark.parametrize("key", ["s3cret-\udcff", "s3cret-à"])
def test_a_key_is_its_bytes(key):
    """One from the environment that is no UTF-8; one whose last byte alone would be a space."""
    raw = key.encode(errors="surrogateescape")
    with running(api_key=key) as server:
        for given, status in ((raw, 200), (b"\xff\xfe", 401), (raw[:-1], 401), (b"s3cret", 401)):
            assert (
                httpx.get(f"{server.url}/models", headers={"Authorization": b"Bearer " + given}).status_code == status
            )


def test_a_name_may_have_a_slash():
    with running(served_name="org/tiny") as server:
        assert httpx.get(f"{server.url}/models/org/tiny").json()["id"] == "org/tiny"
        assert post(server, "completions", completion(model="org/tiny")).status_code == 200
        assert post(server, "completions", completion(model=NAME)).status_code == 404


def test_a_model_without_a_template_says_so_and_still_completes():
    loaded = tiny_loaded()
    plain = LoadedModel(loaded.model, byte_tokenizer(template=None), NAME, "a test")
    with running(plain) as server:
        answer = post(server, "chat/completions", {"model": NAME, "messages": HELLO})
        assert answer.status_code == 400 and "/v1/completions" in answer.json()["error"]["message"]
        assert post(server, "completions", completion()).status_code == 200


def test_shutdown_finishes_replies_and_refuses_new_ones():
    with running(drain_seconds=30) as server:
        connection = raw_post(server, completion(max_tokens=120, ignore_eos=True))
        wait_for(lambda: server.engine.scheduler.running)
        server.stop()
        answer = everything(connection)
        assert b"200 OK" in answer and b'"completion_tokens":120' in answer
        with pytest.raises(httpx.ConnectError):
            post(server, "completions", completion())


def test_shutdown_under_load_ends_every_request_within_its_time():
    """Streams and whole replies, running and queued: each gets its end or an error, and the process is free."""
    with running(drain_seconds=0.3, max_batch=2) as server:
        bodies = [completion(max_tokens=250, stream=number % 2 == 0, ignore_eos=True) for number in range(12)]
        connections = [raw_post(server, body) for body in bodies]
        wait_for(lambda: len(server.engine.scheduler.waiting) >= 8)
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 10
        answers = [everything(connection) for connection in connections]
        for answer in answers:
            assert b"shutting down" in answer or b"[DONE]" in answer or b'"usage"' in answer
        assert sum(b"shutting down" in answer for answer in answers) >= 8


def test_a_client_that_reads_nothing_does_not_keep_the_server():
    with running(send_bytes=4096, drain_seconds=0.2) as server:
        body = completion(n=4, max_tokens=100, stream=True, logprobs=20, ignore_eos=True)
        connection = raw_post(server, body, receive_bytes=4096)
        wait_for(lambda: server.engine.scheduler.running)
        wait_for(lambda: not server.engine.scheduler.busy, 60)
        begun = time.monotonic()
        server.stop()
        assert server_module.LAST_WORDS <= time.monotonic() - begun < 20  # it was waited for, but not for ever
        connection.close()


def test_a_server_whose_engine_broke_says_so_and_ends():
    with running() as server:

        def broken() -> None:
            raise RuntimeError("/a/path/of/this/host")

        server.engine.scheduler.plan = broken
        answer = post(server, "completions", completion())
        assert answer.status_code == 503 and "the engine stopped" in answer.text and "/a/path" not in answer.text
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_an_error_in_a_stream_is_its_last_words(client, server, monkeypatch):
    def broken(token: int) -> str:
        raise RuntimeError("/a/path/of/this/host")

    add = server.engine.scheduler.add

    def add_broken(sequence: Any) -> None:
        sequence.text.push = broken
        add(sequence)

    monkeypatch.setattr(server.engine.scheduler, "add", add_broken)
    with pytest.raises(openai.APIError, match="failed on this request"):
        list(client.completions.create(**completion(stream=True)))
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**completion())
    assert "/a/path" not in str(caught.value)
    monkeypatch.undo()
    assert client.completions.create(**completion()).choices[0].text
