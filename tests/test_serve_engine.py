"""The engine of octavo serve against transformers' generate: same tokens, whoever else runs and whatever goes wrong."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from serve_models import NAME, Heard, generated, greedy, make_engine, run_all, tiny_loaded
from transformers_models import FAMILY_NAMES, prompts, tiny

from octavo import InvalidInput, Unsupported
from octavo.integrations.transformers import enable
from octavo.serve import server
from octavo.serve.engine import INTERNAL, NOT_NUMBERS, SHUTDOWN, Engine, Refused
from octavo.serve.graphs import DecodeGraphs, batch_sizes, capture_decodes
from octavo.serve.metrics import Metrics
from octavo.serve.requests import Sampling
from octavo.serve.runner import Batch, Runner, check_positions
from octavo.serve.scheduler import Share
from octavo.serve.text import TextStream
from octavo.warmup import watched

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (5, 70, 33, 9)


def some_prompts() -> list[list[int]]:
    return [prompts(1, length, seed=length)[0].tolist() for length in LENGTHS]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_mixed_batches_generate_what_each_prompt_generates_alone(family):
    """Prompts in pieces beside decodes, with a window in the families that have one."""
    model = tiny(family)
    alone = [generated(model, prompt, 12) for prompt in some_prompts()]
    engine = make_engine(model, kv="auto", step_tokens=24, max_batch=3)
    heard = [Heard(prompt, greedy(12)) for prompt in some_prompts()]
    assert run_all(engine, heard) == alone
    assert engine.pages.in_use == 0


def test_an_fp8_cache_generates_what_octavos_cache_generates_in_transformers():
    loaded = tiny_loaded()
    prompt = prompts(1, 40)[0].tolist()
    enable(loaded.model, "fp8", page_size=32)
    expected = generated(loaded.model, prompt, 24)
    engine = make_engine(loaded.model, loaded.tokenizer, kv="fp8")
    assert run_all(engine, [Heard(prompt, greedy(24))]) == [expected]


def test_a_full_cache_preempts_and_loses_nothing():
    model = tiny("llama")
    alone = [generated(model, prompt, 40) for prompt in some_prompts()]
    engine = make_engine(model, num_pages=5, kv="auto", max_context=160)
    assert run_all(engine, [Heard(prompt, greedy(40)) for prompt in some_prompts()]) == alone
    assert engine.scheduler.preemptions > 0 and engine.pages.in_use == 0


def test_a_prefix_is_reused_and_changes_no_token():
    model = tiny("llama")
    prompt = prompts(1, 80)[0].tolist()
    longer = [*prompt, 3, 4, 5]
    expected = [generated(model, prompt, 8), generated(model, longer, 8)]
    engine = make_engine(model, kv="auto")
    first, second = Heard(prompt, greedy(8)), Heard(longer, greedy(8))
    engine.submit([first.sequence])
    engine.start()
    found = [first.tokens()]
    engine.submit([second.sequence])
    found.append(second.tokens())
    engine.close()
    assert found == expected
    assert (first.events[-1].cached_tokens, second.events[-1].cached_tokens) == (0, 64)


def test_the_text_is_the_tokens_text_and_ends_before_a_stop_string():
    loaded = tiny_loaded()
    prompt = list(b"hello")
    tokens = generated(loaded.model, prompt, 20)
    whole = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    stop = loaded.tokenizer.decode(tokens[6:8])
    engine = make_engine(loaded.model, loaded.tokenizer, kv="auto")
    plain, stopped = Heard(prompt, greedy(20)), Heard(prompt, greedy(20, stop=(stop,)))
    run_all(engine, [plain, stopped])
    assert plain.text == whole and plain.events[-1].finish == "length"
    assert stopped.text == whole[: whole.index(stop)] and stopped.events[-1].finish == "stop"


def test_an_end_token_ends_a_reply_unless_ignored():
    loaded = tiny_loaded()
    prompt = list(b"hello")
    tokens = generated(loaded.model, prompt, 10)
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    engine = make_engine(loaded.model, loaded.tokenizer, kv="auto")
    engine.stop_tokens = frozenset([end])
    ended, ignoring = Heard(prompt, greedy(10)), Heard(prompt, greedy(10, ignore_eos=True))
    found = run_all(engine, [ended, ignoring])
    assert found == [tokens[: tokens.index(end) + 1], tokens]
    assert ended.events[-1].finish == "stop" and ended.events[-1].new_tokens == tokens.index(end) + 1


def test_what_fails_with_one_request_leaves_the_others_as_they_are():
    """A token that the model cannot run: its request ends with an error, its neighbours with their tokens."""
    model = tiny("llama")
    alone = [generated(model, prompt, 10) for prompt in some_prompts()]
    used = {token for tokens in (*some_prompts(), *alone) for token in tokens}
    poison = next(token for token in range(97) if token not in used)
    engine = make_engine(model, kv="auto")

    def refuse(module, args):
        if bool((args[0] == poison).any()):
            raise RuntimeError("injected")

    model.get_input_embeddings().register_forward_pre_hook(refuse)
    bad = Heard([5, poison, 6], greedy(10))
    good = [Heard(prompt, greedy(10)) for prompt in some_prompts()]
    found = run_all(engine, [good[0], bad, *good[1:]])
    assert [found[0], *found[2:]] == alone
    assert bad.events[-1].error == INTERNAL and engine.failed is None and engine.pages.in_use == 0


class Panic(BaseException):
    """As tokenizers' PanicException: no Exception."""


def test_what_is_no_exception_ends_its_request_and_not_the_engine(monkeypatch):
    engine = make_engine(tiny("llama"), kv="auto")
    bad, good = Heard([5, 6], greedy(3)), Heard([7, 8], greedy(3))
    run, push = engine._run, TextStream.push

    def failing(shares):
        if any(share.sequence is bad.sequence for share in shares):
            raise Panic
        return run(shares)

    def pushing(text, token):
        if text is bad.sequence.text:
            raise Panic
        return push(text, token)

    monkeypatch.setattr(engine, "_run", failing)
    assert len(run_all(engine, [bad, good])[1]) == 3 and bad.events[-1].error == INTERNAL and engine.failed is None
    engine = make_engine(tiny("llama"), kv="auto")
    bad, good = Heard([5, 6], greedy(3)), Heard([7, 8], greedy(3))
    monkeypatch.setattr(TextStream, "push", pushing)
    assert len(run_all(engine, [bad, good])[1]) == 3 and bad.events[-1].error == INTERNAL and engine.failed is None


def test_an_engine_that_something_else_ends_says_so(monkeypatch):
    engine = make_engine(tiny("llama"), kv="auto")

    def plan():
        raise Panic

    monkeypatch.setattr(engine.scheduler, "plan", plan)
    one = Heard([5, 6], greedy(3))
    run_all(engine, [one])
    assert one.events[-1].error == engine.failed == "the engine stopped: Panic"


def test_a_stop_string_that_only_the_end_shows_is_why_it_ended():
    """The first byte of a character is U+FFFD once nothing follows it."""
    loaded = tiny_loaded()
    engine = make_engine(loaded.model, loaded.tokenizer, kv="auto")
    made = [Heard([5, 6], greedy(1, logit_bias=((0xC3, 100.0),), stop=stop)) for stop in ((), ("\ufffd",))]
    run_all(engine, made)
    assert [(one.text, one.events[-1].finish) for one in made] == [("\ufffd", "length"), ("", "stop")]


def test_draining_again_leaves_less_time_never_more():
    engine = make_engine(tiny("llama"), kv="auto", max_batch=2)
    heard = [Heard(prompt, greedy(180)) for prompt in some_prompts()]
    engine.submit([one.sequence for one in heard])
    for seconds in (60, 0, 60):
        engine.drain(seconds)
    engine.start()
    assert all(one.ended.wait(20) and one.events[-1].error == SHUTDOWN for one in heard)
    engine.close()


def test_logits_that_are_not_numbers_end_their_request_alone():
    model = tiny("llama")
    prompt, other = prompts(1, 10)[0].tolist(), [77, 77]
    expected = generated(model, prompt, 6)
    engine = make_engine(model, kv="auto")
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = float("nan")
    bad, good = Heard(other, greedy(6)), Heard(prompt, greedy(6))
    assert run_all(engine, [bad, good])[1] == expected
    assert bad.events[-1].error == NOT_NUMBERS


def test_cancelled_requests_free_their_pages_and_are_not_heard_of_again():
    engine = make_engine(tiny("llama"), kv="auto", max_batch=2)
    heard = [Heard(prompt, greedy(150)) for prompt in some_prompts()]
    engine.submit([one.sequence for one in heard])
    engine.start()
    while not heard[0].events:
        time.sleep(0.01)
    engine.cancel([one.sequence for one in heard[:3]])  # running and waiting ones
    assert len(heard[3].tokens()) == 150
    engine.close()
    assert engine.pages.in_use == 0 and not any(one.ended.is_set() for one in heard[:3])


def test_a_closed_engine_tells_everyone_and_takes_no_more():
    engine = make_engine(tiny("llama"), kv="auto", max_batch=2)
    heard = [Heard(prompt, greedy(180)) for prompt in some_prompts()]
    engine.submit([one.sequence for one in heard])
    engine.start()
    while not heard[0].events:
        time.sleep(0.01)
    engine.close()
    assert all(one.events[-1].error == SHUTDOWN for one in heard)
    with pytest.raises(Refused):
        engine.submit([Heard([1], greedy(1)).sequence])


def test_draining_finishes_what_there_is():
    engine = make_engine(tiny("llama"), kv="auto", max_batch=2)
    heard = [Heard(prompt, greedy(20)) for prompt in some_prompts()]
    engine.submit([one.sequence for one in heard])
    engine.start()
    engine.drain(60)
    with pytest.raises(Refused):
        engine.submit([Heard([1], greedy(1)).sequence])
    assert [len(one.tokens()) for one in heard] == [20] * 4
    engine.close()


def test_the_queue_has_an_end():
    engine = make_engine(tiny("llama"), kv="auto", max_waiting=2)
    engine.submit([Heard([1], greedy(1)).sequence])
    with pytest.raises(Refused, match="waiting"):
        engine.submit([Heard([1], greedy(1)).sequence] * 2)


def test_the_queue_counts_sequences_not_requests():
    engine = make_engine(tiny("llama"), kv="auto", max_waiting=5)
    engine.submit([Heard([1], greedy(1)).sequence for _ in range(4)])
    assert engine.waiting == 4
    with pytest.raises(Refused, match="waiting"):
        engine.submit([Heard([1], greedy(1)).sequence for _ in range(2)])
    last = Heard([1], greedy(1))
    assert run_all(engine, [last]) and engine.waiting == 0


def test_submitting_from_many_threads_loses_nobody():
    engine = make_engine(tiny("llama"), kv="auto", max_waiting=100)
    engine.start()
    heard = [Heard([number + 2, 5, 9], greedy(3)) for number in range(24)]
    threads = [threading.Thread(target=engine.submit, args=([one.sequence],)) for one in heard]
    for thread in threads:
        thread.start()
    assert [len(one.tokens()) for one in heard] == [3] * 24
    engine.close()


def test_a_seed_gives_the_same_reply_in_company():
    loaded = tiny_loaded()
    sampling = Sampling(12, temperature=1.0, top_p=0.9, seed=4)
    alone = run_all(make_engine(loaded.model, loaded.tokenizer, kv="auto"), [Heard([5, 6, 7], sampling)])
    company = [Heard(prompt, Sampling(12, seed=1)) for prompt in some_prompts()]
    engine = make_engine(loaded.model, loaded.tokenizer, kv="auto")
    assert run_all(engine, [*company, Heard([5, 6, 7], sampling)])[-1] == alone[0]


def test_a_batch_survives_its_way_to_another_rank():
    one = Heard(list(range(2, 40)), greedy(3)).sequence
    one.pages = [3, 1]
    batch = Batch.of([Share(one, 0, 30)], 32)
    header, packed = batch.packed()
    again = Batch.unpacked(header.tolist(), packed)
    assert packed.numel() == Batch.packed_size(header.tolist())
    for name in ("tokens", "positions", "slots", "lengths", "counts", "table", "sampled"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
    assert batch.slots.tolist() == list(range(96, 126)) and batch.num_decodes == 0


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_warming_up_writes_nothing(family):
    model = tiny(family)
    runner = Runner(model, enable(model, "fp8", page_size=32, num_pages=2))
    for cache in runner.handle.caches:
        cache.k.fill_(7)
    runner.warm_up()
    assert all(bool((cache.k == 7).all()) for cache in runner.handle.caches)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_batch_are_refused(kind):
    class Config:
        rope_parameters = {"full_attention": {"rope_type": kind}}

    with pytest.raises(Unsupported, match=kind):
        check_positions(Config())


def test_a_pass_with_other_tokens_than_its_step_is_refused_and_the_next_one_runs():
    model = tiny("qwen3")
    runner = Runner(model, enable(model, "auto", page_size=8, num_pages=8))
    one = Heard([5, 6], greedy(1)).sequence
    one.pages = [0]
    batch = Batch.of([Share(one, 0, 2)], 8)
    three = torch.tensor([5, 6, 7])
    with pytest.raises(InvalidInput, match="every layer"):
        runner.run(replace(batch, tokens=three, positions=three))
    assert runner.run(batch).shape == (1, 97)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_padded_decode_steps_over_fixed_buffers_choose_the_same_tokens(family):
    """What a CUDA graph would replay, run again instead of replayed: buffers, padding and sizes."""
    model = tiny(family)
    alone = [generated(model, prompt, 12) for prompt in some_prompts()]
    engine = make_engine(model, kv="auto", max_batch=7)
    sizes = []

    def capture(work):
        def replay():
            sizes.append(work())
            return sizes[-1]

        return replay

    engine.runner.graphs = DecodeGraphs(engine.runner, 7, 8, capture)
    heard = [Heard(prompt, greedy(12 + more)) for prompt, more in zip(some_prompts(), (0, 3, 0, 0), strict=True)]
    assert [tokens[:12] for tokens in run_all(engine, heard)] == alone
    assert {len(logits) for logits in sizes} >= {1, 4} and batch_sizes(7) == [7, 4, 2, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_a_server_that_is_ready_compiles_nothing():
    loaded = tiny_loaded(head_dim=64)
    loaded.model.to("cuda", torch.bfloat16)
    options = server.ServeOptions(NAME, torch.device("cuda"), cache_tokens=8192, step_tokens=512, max_batch=16)
    runner, bounds = server.prepare(options, loaded)
    engine = Engine(runner, loaded.tokenizer, frozenset(), bounds, Metrics())
    lengths = (5, 70, 33, 9, 128, 64, 1, 17, 90)
    heard = [Heard(prompts(1, n, seed=n)[0].tolist(), greedy(20 + n % 7)) for n in lengths]
    with watched() as found:
        run_all(engine, heard)
    assert found.compiled == [] and found.cached == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_cuda_graphs_have_the_logits_of_launched_steps(family):
    """Within what other sizes of products round: a step's padding may not be seen in them."""
    runner = (engine := make_engine(tiny(family, head_dim=64).to("cuda", torch.bfloat16), max_batch=7)).runner
    runner.handle.reserve(8, 64, 256)
    graphs = capture_decodes(runner, 7, 8)
    assert graphs is not None
    off = []

    class Both:
        fits = staticmethod(graphs.fits)

        @staticmethod
        def run(batch):
            runner.graphs = None
            launched = runner.run(batch).float()
            runner.graphs = Both
            replayed = graphs.run(batch)  # appends the same once more
            off.append(float((replayed.float() - launched).norm() / launched.norm()))
            return replayed

    runner.graphs = Both
    assert all(len(found) == 24 for found in run_all(engine, [Heard(prompt, greedy(24)) for prompt in some_prompts()]))
    assert len(off) >= 23 and max(off) < 0.03, off
