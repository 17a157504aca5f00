"""The frame: plan and run on the reference, mixed batches, what is refused before a launch, torch.compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import octavo
from octavo import Attention, AttentionSpec, InvalidInput, PagedCache, Unsupported
from octavo.testing.inputs import make_batch, slots_of

SPEC = AttentionSpec(8, 2, 32, page_size=32)


def attention(spec=SPEC, **changes):
    sizes = {"max_batch": 8, "max_query_tokens": 64, "max_context": 256, "device": "cpu", **changes}
    return Attention(spec, **sizes)


def test_one_call_form_equals_plan_and_run():
    batch = make_batch(SPEC, [5, 40], [1, 9])
    out = octavo.attention(SPEC, batch.q, batch.cache, batch.seq_lens, batch.page_table, batch.query_starts)
    assert torch.equal(out, batch.run())
    given = {"num_decodes": 1, "max_query_len": 9, "out": torch.empty_like(out)}
    same = octavo.attention(SPEC, batch.q, batch.cache, batch.seq_lens, batch.page_table, batch.query_starts, **given)
    assert same is given["out"] and torch.equal(same, out)
    with pytest.raises(InvalidInput, match="num_decodes must be an integer"):
        octavo.attention(
            SPEC, batch.q, batch.cache, batch.seq_lens, batch.page_table, batch.query_starts, num_decodes=3
        )


@pytest.mark.parametrize("plan", [{}, {"num_decodes": 2}, {"num_decodes": 2, "max_query_len": 7}, {"num_decodes": 0}])
def test_a_mixed_batch_in_one_call(plan):
    batch = make_batch(SPEC, [33, 70, 50, 7], [1, 1, 7, 7])
    together = batch.run(**plan)
    starts = batch.query_starts.tolist()
    for b in range(4):
        rows = slice(starts[b], starts[b + 1])
        alone = octavo.attention(
            SPEC,
            batch.q[rows],
            batch.cache,
            batch.seq_lens[b : b + 1],
            batch.page_table[b : b + 1],
            torch.tensor([0, starts[b + 1] - starts[b]], dtype=torch.int32),
        )
        assert torch.equal(together[rows], alone)


def test_layers_share_a_plan_and_run_reads_the_storage_that_plan_was_given():
    one, two = make_batch(SPEC, [40], [1], seed=1), make_batch(SPEC, [40], [1], seed=2)
    attn = one.attention()
    attn.plan(one.seq_lens, one.page_table, one.query_starts)
    first = attn.run(one.q, one.cache)
    two.cache.k.copy_(one.cache.k)
    two.cache.v.copy_(one.cache.v)
    assert torch.equal(attn.run(one.q, two.cache), first)
    one.seq_lens.fill_(17)  # the plan holds references: the same storage, another length
    shorter = attn.run(one.q, one.cache)
    assert not torch.equal(shorter, first)
    assert torch.equal(
        shorter, octavo.attention(SPEC, one.q, one.cache, one.seq_lens, one.page_table, one.query_starts)
    )


def test_kinds_share_a_workspace():
    large = attention()
    assert (
        attention(AttentionSpec(8, 2, 32, page_size=32, window=8), workspace=large.workspace).workspace
        is large.workspace
    )
    with pytest.raises(InvalidInput, match=r"workspace must be uint8 \[n\], contiguous"):
        attention(workspace=torch.zeros(4))


def test_a_cache_of_another_kind_is_refused_naming_both():
    attn = attention()
    batch = make_batch(SPEC, [5], [1])
    attn.plan(batch.seq_lens, batch.page_table, batch.query_starts)
    e5m2 = PagedCache.allocate(AttentionSpec(8, 2, 32, page_size=32, kv_dtype="fp8_e5m2"), 4, "cpu")
    with pytest.raises(InvalidInput, match=r"kv_dtype=fp8_e4m3; came kv_dtype=fp8_e5m2"):
        attn.run(batch.q, e5m2)
    bf16 = PagedCache.allocate(AttentionSpec(8, 2, 32, page_size=16, kv_dtype="bfloat16", layout="nhd"), 4, "cpu")
    with pytest.raises(InvalidInput, match="kv_dtype=fp8_e4m3, page_size=32, layout=leaf, scale_granularity=tensor"):
        attn.run(batch.q, bf16)


BAD_PLANS = [
    ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, r"seq_lens must be int32 \[B\] on cpu; came int64 \[2\] on cpu"),
    ({"page_table": torch.zeros(1, 4, dtype=torch.int32)}, r"page_table must be int32 \[2 or more, max pages\]"),
    ({"query_starts": torch.zeros(2, dtype=torch.int32)}, r"query_starts must be int32 \[3\]"),
    ({"num_decodes": 3}, r"num_decodes must be an integer, in \[0, 2\]; came 3"),
    ({"num_decodes": 1.0}, r"num_decodes must be an integer, in \[0, 2\]; came 1.0"),
    ({"max_query_len": -1}, "max_query_len must be an integer, not negative; came -1"),
    ({"seq_lens": [1, 1]}, "seq_lens must be a tensor; came list"),
    ({"seq_lens": torch.ones(2, 2, dtype=torch.int32)[:, 0]}, "seq_lens must be contiguous in its last dimension"),
    ({"query_starts": torch.ones(3, 2, dtype=torch.int32)[:, 0]}, "query_starts must be contiguous in its last"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_PLANS)
def test_bad_plans(changes, message):
    fields = {
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "page_table": torch.zeros(2, 4, dtype=torch.int32),
        "query_starts": torch.arange(3, dtype=torch.int32),
        **changes,
    }
    with pytest.raises(InvalidInput, match=message):
        attention().plan(**fields)


def test_too_many_sequences_and_rows():
    batch = make_batch(SPEC, [3] * 9, [1] * 9)
    with pytest.raises(InvalidInput, match="at most max_batch = 8 sequences; came 9"):
        attention().plan(batch.seq_lens, batch.page_table, batch.query_starts)
    attn = attention(max_batch=9, max_query_tokens=4)
    attn.plan(batch.seq_lens, batch.page_table, batch.query_starts)
    with pytest.raises(InvalidInput, match="at most max_query_tokens = 4 query rows; came 9"):
        attn.run(batch.q, batch.cache)


BAD_RUNS = [
    ({"q": torch.zeros(1, 8, 32, dtype=torch.float16)}, r"q must be bfloat16 \[1, 8, 32\] on cpu; came float16"),
    ({"q": torch.zeros(1, 8, 64, dtype=torch.bfloat16)[..., ::2]}, "q must be contiguous in its last dimension"),
    ({"sinks": torch.zeros(8)}, "sinks must not be given: spec.sinks is False"),
    ({"lse": torch.zeros(1, 8)}, "lse must not be given: spec.lse is False"),
    ({"q_scale": torch.ones(())}, "q_scale goes with fp8_e4m3 alone; came bfloat16"),
    ({"q": None}, "q must be a tensor; came NoneType"),
    ({"cache": None}, "cache must be a PagedCache; came NoneType"),
    ({"out": torch.zeros(1, 8, 32)}, r"out must be bfloat16 \[1, 8, 32\] on cpu; came float32"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_RUNS)
def test_bad_runs(changes, message):
    batch = make_batch(SPEC, [5], [1])
    attn = attention()
    with pytest.raises(InvalidInput, match="plan must be called before run"):
        attn.run(batch.q, batch.cache)
    attn.plan(batch.seq_lens, batch.page_table, batch.query_starts)
    with pytest.raises(InvalidInput, match=message):
        attn.run(**{"q": batch.q, "cache": batch.cache, **changes})


def test_sinks_and_lse_must_come_when_the_spec_has_them():
    batch = make_batch(SPEC, [5], [1])
    attn = attention(AttentionSpec(8, 2, 32, page_size=32, lse=True))
    attn.plan(batch.seq_lens, batch.page_table, batch.query_starts)
    with pytest.raises(InvalidInput, match="lse must be given"):
        attn.run(batch.q, batch.cache)


def test_a_named_backend_runs_or_raises():
    with pytest.raises(Unsupported) as error:
        attention(backend="gluon")
    assert len(error.value.reasons) >= 2 and "gluon" in str(error.value)
    assert attention(backend="reference").choice.decode.backend == "reference"
    with pytest.raises(InvalidInput, match="gluon, triton, reference|reference, triton, gluon"):
        attention(backend="cuda")


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["leaf", "nhd"])
def test_append_and_run_trace_whole(compiler, layout):
    spec = AttentionSpec(8, 2, 32, page_size=32, layout=layout, scale_granularity="token_head")
    batch = make_batch(spec, [33, 40], [1, 1])
    attn = batch.attention()
    attn.plan(batch.seq_lens, batch.page_table, batch.query_starts, num_decodes=2, max_query_len=1)
    slots = slots_of(batch.page_table, 32, [33, 40])[[32, 72]]

    def layer(x: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        cache.append(x[:, :2] * 2, x[:, 2:4] + 1, slots)
        return attn.run(x * 0.5, cache).float() * 2

    eager, compiled = batch.cache.convert(layout), batch.cache.convert(layout)
    expected = layer(batch.q, eager)
    torch._dynamo.reset()
    got = torch.compile(layer, backend=compiler, fullgraph=True)(batch.q, compiled)
    assert torch.equal(got, expected)
    assert torch.equal(compiled.k, eager.k) and torch.equal(compiled.v, eager.v)
    assert torch.equal(compiled.k_scale, eager.k_scale)


def test_ops_pass_torchs_own_checks():
    batch = make_batch(SPEC, [5, 40], [1, 9])
    attn = batch.attention()
    memory = batch.cache.memory
    torch.library.opcheck(
        torch.ops.octavo.attention.default,
        (
            *(batch.q, memory.k_pool, memory.v_pool, None, None),
            *(batch.seq_lens, batch.page_table, batch.query_starts, None, None, None),
            *(attn.workspace, None, None, torch.zeros_like(batch.q), None, memory.strides, SPEC.to_json()),
            *("reference", "reference", None, None),
        ),
    )
    new = torch.randn(2, 2, 32)
    torch.library.opcheck(
        torch.ops.octavo.append.default,
        (
            *(new, new, torch.tensor([0, -1]), memory.k_pool, memory.v_pool, None, None, None, None),
            *(batch.cache.counters, memory.strides, SPEC.to_json(), "reference"),
        ),
    )


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"q_scale": 0.5}, "q_scale must be a tensor; came float"),
        ({"q_scale": torch.tensor(0.5, dtype=torch.float64)}, "q_scale must be float32"),
        ({"q_scale": torch.ones(3)}, r"q_scale must be float32 \[8\] on cpu; came float32 \[3\]"),
        ({"out_scale": torch.ones(8)}, r"out_scale must be float32 \[\] on cpu"),
        ({"q_scale": torch.ones((), device="meta")}, "q_scale must be float32 .* on cpu; came .* on meta"),
    ],
)
def test_scales_of_query_and_output_are_checked(scales, message):
    batch = make_batch(replace(SPEC, query_dtype="fp8_e4m3", out_dtype="fp8_e4m3"), [5], [1])
    attn = batch.attention()
    attn.plan(batch.seq_lens, batch.page_table, batch.query_starts)
    with pytest.raises(InvalidInput, match=message):
        attn.run(batch.q, batch.cache, **scales)
    per_head = attn.run(batch.q, batch.cache, q_scale=torch.full((8,), 0.25), out_scale=torch.ones(1))
    assert torch.equal(
        per_head.view(torch.uint8), attn.run(batch.q, batch.cache, q_scale=torch.tensor(0.25)).view(torch.uint8)
    )


@pytest.mark.parametrize("device", ["cuda", "h200", "", "meta", 3.5])
def test_a_device_that_is_not_there_is_refused(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    for make in (lambda: attention(device=device), lambda: PagedCache.allocate(SPEC, 1, device)):
        with pytest.raises(InvalidInput, match="device must be"):
            make()


def test_nothing_of_autograd_is_kept():
    spec = AttentionSpec(8, 2, 32, page_size=32, kv_dtype="bfloat16", layout="nhd")
    cache = PagedCache.allocate(spec, 1, "cpu")
    k = torch.randn(1, 2, 32, requires_grad=True)
    cache.append(k, k, torch.tensor([0]))
    q = torch.randn(1, 8, 32, dtype=torch.bfloat16, requires_grad=True)
    lens, starts = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    out = octavo.attention(spec, q, cache, lens, torch.zeros(1, 1, dtype=torch.int32), starts)
    assert not cache.k.requires_grad and not out.requires_grad


def test_a_row_of_a_batch_invariant_spec_is_its_own():
    spec = replace(SPEC, batch_invariant=True, out_dtype="float32", window=150)
    batch = make_batch(spec, [200], [8])
    together = batch.run()
    for row in range(8):
        length = torch.tensor([200 - 7 + row], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        alone = octavo.attention(spec, batch.q[row : row + 1], batch.cache, length, batch.page_table, starts)
        assert torch.equal(alone[0], together[row])
