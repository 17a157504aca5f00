"""in_sglang's sides that are read twice: exact attention over the bytes that octavo's SGLang backend wrote.

Runs on the installed SGLang's own classes, or on stand-ins for them; no engine and no GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import sglang_stand_in as stand_in
import torch
from sglang_served import E4M3, Served, assert_exact, mha_pool, publish_options, radix, runner_of

from octavo.bench.engines import in_sglang, same_bytes
from octavo.bench.engines.same_bytes import READS, WRITES
from octavo.integrations import sglang as plugin

with stand_in.present():
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from octavo.bench.engines._same_bytes_backend import SameBytesBackend


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    with stand_in.present():
        publish_options(monkeypatch)
        for name in same_bytes.NAMES:  # gone again afterwards
            monkeypatch.setitem(plugin.NAMES, name, same_bytes.NAMES[name])
        yield


def extend(served: Served, count: int, name: str | None, request: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The next `count` tokens of a request, named `name`: their query and the backend's output."""
    fields, q, k, v = served.batch(ForwardMode.EXTEND, (count,), [request])
    fields.rids = name and [name]
    served.backend.init_forward_metadata(fields)
    return q, served.backend.forward(q.flatten(1), k, v, served.layer, fields)


KINDS = {
    "plain": {},
    "window": {"sliding_window_size": 63},
    "softcap": {"logit_cap": 20.0},
    "uneven": {"v_head_dim": 32},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", same_bytes.NAMES)
def test_a_second_reading_attends_to_what_the_first_one_stored(name, kind):
    """Its queries, keys, values and pages are others."""
    layer = radix(**KINDS[kind])
    layer.k_scale, layer.v_scale = torch.nn.Parameter(torch.tensor(0.02)), torch.nn.Parameter(torch.tensor(0.5))
    pool = mha_pool(E4M3, v_head_dim=layer.v_head_dim)
    backend = SameBytesBackend(runner_of(layer, pool=pool), same_bytes.NAMES[name])
    assert backend._stored["layout"] == "leaf"
    served = Served(backend, layer, sequences=2)
    for count in (70, 40):
        q, out = extend(served, count, WRITES + "a")
        assert_exact(out, served.exact(q, (count,), [0]))
    for begin, count in ((0, 70), (70, 40)):
        q, out = extend(served, count, READS + "a", request=1)
        of_its_own = served.exact(q, (count,), [1])
        seen, held = begin + count, (served.k[0], served.v[0])
        served.k[0], served.v[0] = (x[:seen] for x in held)
        assert_exact(out, served.exact(q, (count,), [0]))
        served.k[0], served.v[0] = held
        assert (out.double() - of_its_own).abs().max() > 0.1, "the two requests' keys and values differ"


def test_sinks_are_part_of_both_readings():
    layer = radix()
    backend = SameBytesBackend(runner_of(layer), "exact")
    served = Served(backend, layer)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0], dtype=torch.bfloat16)
    fields, q, k, v = served.batch(ForwardMode.EXTEND, (70,))
    for name in (WRITES, READS):
        fields.rids = [name]
        backend.init_forward_metadata(fields)
        out = backend.forward(q.flatten(1), k, v, layer, fields, sinks=sinks)
        assert_exact(out, served.exact(q, (70,), sinks=sinks))


def test_other_requests_and_decodes_are_octavos_own(monkeypatch):
    layer = radix()
    backend = SameBytesBackend(runner_of(layer), "exact")
    served = Served(backend, layer)
    monkeypatch.setattr(backend, "_keep", lambda made: pytest.fail("nothing is kept of other requests"))
    monkeypatch.setattr(backend, "_attend_exactly", lambda *_: pytest.fail("octavo attends to other requests"))
    for name in (None, "0123abcd"):
        q, out = extend(served, 70, name)
        assert_exact(out, served.exact(q, (70,)))
    for name in (WRITES, READS):
        fields, q, k, v = served.batch(ForwardMode.DECODE, (1,))
        fields.rids = [name]
        backend.init_forward_metadata(fields)
        assert_exact(backend.forward(q.flatten(1), k, v, layer, fields), served.exact(q, (1,)))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([(READS + "a", 70)], "reads-a from token 0 on: what is kept is of ''"),
        ([(WRITES + "a", 70), (READS + "b", 70)], "reads-b from token 70 on: what is kept is of 'a'"),
        ([(None, 70), (WRITES + "a", 7)], "writes-a from token 70 on: what is kept is of ''"),
        ([(WRITES + "a", 70), (READS + "a", 7)], "reads-a needs 77 tokens; 70 are kept"),
    ],
)
def test_bytes_that_were_not_kept_are_no_measurement(steps, words):
    layer = radix()
    served = Served(SameBytesBackend(runner_of(layer), "exact"), layer)
    *before, (name, count) = steps
    for earlier, tokens in before:
        extend(served, tokens, earlier)
    with pytest.raises(RuntimeError, match=words):
        extend(served, count, name)


def test_a_request_that_is_read_twice_is_alone_in_its_batch():
    layer = radix()
    backend = SameBytesBackend(runner_of(layer), "exact")
    fields, *_ = Served(backend, layer).batch(ForwardMode.EXTEND, (70, 5))
    fields.rids = [WRITES + "a", "0123abcd"]
    with pytest.raises(RuntimeError, match="alone in its batch, of 2 requests"):
        backend.init_forward_metadata(fields)


def test_the_plug_in_brings_octavos_names_and_its_own(monkeypatch):
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda package: plugin.TESTED[0])
    for name in same_bytes.NAMES:
        monkeypatch.delitem(plugin.NAMES, name)
        attention_registry.ATTENTION_BACKENDS.pop(name, None)
    same_bytes.register()
    made = {n: attention_registry.ATTENTION_BACKENDS[n](runner_of(radix())) for n in plugin.NAMES}
    assert {n for n, backend in made.items() if isinstance(backend, SameBytesBackend)} == set(same_bytes.NAMES)
    assert plugin.NAMES.keys() == {"octavo", "octavo-exact", *same_bytes.NAMES}
    precisions = {n: next(iter(backend._layers.values())).spec.precision for n, backend in made.items()}
    assert precisions == {"octavo": "fast", "octavo-exact": "exact", **same_bytes.NAMES}
    for name in same_bytes.NAMES:
        attention_registry.ATTENTION_BACKENDS.pop(name)
        plugin._choices().ATTENTION_BACKEND_CHOICES.remove(name)


class Engine:
    """Scores every token with a loss that says who reads it; or finds a part of a window in a cache."""

    def __init__(self, cached: int = 0) -> None:
        self.cached, self.asked = cached, []

    def generate(self, *, input_ids: list[int], rid: str, **asked: Any) -> dict[str, Any]:
        assert asked["sampling_params"]["max_new_tokens"] == 1 and asked["return_logprob"]
        self.asked.append(rid)
        exact = rid.startswith(READS)
        loss = (2.0 if exact else 2.001 + len(self.asked) // 2 % 3 / 1000) + len(self.asked) // 2 % 2
        entries = [(None, input_ids[0], None), *((-loss, token, None) for token in input_ids[1:])]
        return {"meta_info": {"id": rid, "cached_tokens": self.cached, "input_token_logprobs": entries}}


def measure(engine: Engine, windows: int, tokens: int = 4) -> dict[str, Any]:
    return same_bytes.measure(engine, [list(range(tokens))] * windows, lambda found: pytest.fail("few windows"))


def test_windows_are_read_in_pairs_and_their_differences_have_an_interval():
    engine = Engine()
    found = measure(engine, 4)
    assert engine.asked == [f"{kind}{i}" for i in range(4) for kind in (WRITES, READS)]
    assert found["scored_tokens"] == 12 and len(found["window_losses"]) == len(found["exact_window_losses"]) == 4
    assert found["perplexity"] / found["exact_perplexity"] - 1 == pytest.approx(found["change"]["value"])
    means = [sum(found[name]) / 4 for name in ("window_losses", "exact_window_losses")]
    assert found["change"]["value"] == pytest.approx(math.exp(means[0] - means[1]) - 1)
    assert found["change"]["low"] < found["change"]["value"] < found["change"]["high"]
    with pytest.raises(RuntimeError, match="writes-0 was to be read whole: 3 tokens of 4 were scored, 64 came"):
        measure(Engine(cached=64), 1)


def test_what_was_found_is_left_while_windows_are_read():
    left: list[dict[str, Any]] = []
    found = same_bytes.measure(Engine(), [[5, 6, 7, 8]] * (2 * same_bytes.EACH + 1), left.append)
    assert [len(part["window_losses"]) for part in left] == [same_bytes.EACH, 2 * same_bytes.EACH]
    assert found["window_losses"][: 2 * same_bytes.EACH] == left[1]["window_losses"]


def test_a_table_says_how_far_a_side_is_from_exact_attention(capsys):
    read = {"same-bytes:fp8_e4m3": measure(Engine(), 2), "same-bytes-exact:fp8_e4m3": measure(Engine(), 1)}
    in_sglang.print_text(read)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [name for name, _ in lines] == [*read]
    for (_, line), interval in zip(lines, (True, False), strict=True):
        assert "of exact attention's" in line and ("(" in line) == interval
