"""octavo as SGLang's attention backend: steps, layers, pools and graphs against exact attention over the same bytes.

Runs on the installed SGLang's own classes, or on stand-ins for them; no engine and no GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sglang_stand_in as stand_in
import torch
from sglang_served import (
    E4M3,
    HK,
    HQ,
    LENGTHS,
    PAGE,
    SLOTS,
    D,
    Served,
    assert_exact,
    backend_of,
    mha_pool,
    padded,
    publish_options,
    radix,
    runner_of,
    stored,
    with_rows,
)

from octavo import Unsupported
from octavo.integrations import sglang as plugin
from octavo.layouts import leaf_column

with stand_in.present():
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from octavo.integrations._sglang_backend import OctavoAttentionBackend


@pytest.fixture(autouse=True)
def sglang():
    with stand_in.present():
        yield


@pytest.fixture
def configure(monkeypatch):
    """Publish SGLang's options: those of a plain server, but for what is changed."""
    publish_options(monkeypatch)
    return lambda **changed: publish_options(monkeypatch, **changed)


KINDS = {
    "plain": {},
    "window": {"sliding_window_size": 63},
    "softcap": {"logit_cap": 20.0},
    "uneven": {"v_head_dim": 32},
    "mqa": {"num_kv_heads": 1},
}


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_chunks_and_decodes_are_exact_over_the_pools_bytes(configure, kind, dtype):
    layer = radix(**KINDS[kind])
    pool = mha_pool(dtype, head_num=layer.tp_k_head_num, v_head_dim=layer.v_head_dim)
    served = Served(backend_of(layer, dtype=dtype, pool=pool), layer)
    assert served.backend._stored["layout"] == ("leaf" if dtype.itemsize == 1 else "nhd")
    for mode, counts in (
        (ForwardMode.EXTEND, LENGTHS),
        (ForwardMode.DECODE, (1, 1, 1)),
        (ForwardMode.MIXED, (7, 1, 40)),
        (ForwardMode.DECODE, (1, 1, 1)),
    ):
        assert_exact(*served.run(mode, counts))


def test_sinks_come_with_the_call(configure):
    layer = radix()
    served = Served(backend_of(layer), layer)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0], dtype=torch.bfloat16)
    for mode, counts in ((ForwardMode.EXTEND, LENGTHS), (ForwardMode.DECODE, (1, 1, 1))):
        assert_exact(*served.run(mode, counts, sinks=sinks))


def test_scales_are_the_layers_own_memory(configure):
    layer = radix()
    layer.k_scale, layer.v_scale = torch.nn.Parameter(torch.tensor(0.02)), torch.nn.Parameter(torch.tensor(0.5))
    served = Served(backend_of(layer), layer)
    assert_exact(*served.run(ForwardMode.EXTEND, LENGTHS))
    with torch.no_grad():
        layer.k_scale.fill_(0.004)  # reloaded weights: what is in the cache is of before, so new sequences only
    anew = Served(served.backend, layer, seed=1)
    out, exact = anew.run(ForwardMode.EXTEND, LENGTHS)
    assert_exact(out, exact)
    assert (anew.k[2].abs() / 0.004 > 448).any(), "some keys saturate, which SGLang's own writer turns into NaN"


def test_a_layer_that_shares_anothers_cache_does_not_write(configure):
    layer = radix()
    served = Served(backend_of(layer), layer)
    served.run(ForwardMode.EXTEND, LENGTHS)
    before = served.backend.token_to_kv_pool.k_buffer[0].clone()
    fields, q, k, v = served.batch(ForwardMode.DECODE, (1, 1, 1))
    served.backend.init_forward_metadata(fields)
    served.backend.forward(q.flatten(1), None, None, layer, fields)
    served.backend.forward(q.flatten(1), k, v, layer, fields, save_kv_cache=False)
    assert torch.equal(before, served.backend.token_to_kv_pool.k_buffer[0])


def test_what_a_breakable_graph_wants_written_is_written_in_place(configure):
    """There the batch of the forward call is another object: it has the output and fewer slots than keys."""
    layer = radix()
    served = Served(backend_of(layer), layer)
    fields, q, k, v = served.batch(ForwardMode.EXTEND, LENGTHS)
    served.backend.init_forward_metadata(fields)
    out = torch.full((sum(LENGTHS), HQ * D), float("nan"), dtype=torch.bfloat16)
    inside = SimpleNamespace(forward_mode=ForwardMode.EXTEND, out_cache_loc=fields.out_cache_loc, _attn_output=out)
    more = torch.cat([k, k.new_full((11, HK, D), float("nan"))])
    returned = served.backend.forward(q.flatten(1), more, torch.cat([v, v[:11]]), layer, inside)
    assert returned.data_ptr() == out.data_ptr()
    assert_exact(out, served.exact(q, LENGTHS))


def replay(served, counts, requests, mode=ForwardMode.DECODE, pad=2, capture=False):
    """A padded step as SGLang's decode graph makes it; (output, exact) of the real rows."""
    fields, q, k, v = served.batch(mode, counts, requests)
    rows = counts[0]
    slots = padded(fields, rows, pad)
    served.backend.init_forward_metadata_out_graph(fields, in_capture=capture)
    served.backend.init_forward_metadata_in_graph(fields)
    fields.out_cache_loc = slots
    q, k, v = (with_rows(x, pad * rows) for x in (q, k, v))
    out = served.backend.forward(q.flatten(1), k, v, served.layer, fields)
    return out[: len(counts) * rows], served.exact(q, counts, requests)


def test_decode_graphs_are_padded_and_keep_their_addresses(configure):
    layer = radix()
    served = Served(backend_of(layer), layer)
    served.run(ForwardMode.EXTEND, LENGTHS)
    served.backend.init_cuda_graph_state(8, 8)
    assert served.backend.get_cuda_graph_seq_len_fill_value() == 1
    seen = set()
    for step, requests in enumerate(([0, 1, 2], [2, 0, 1], [1, 2, 0])):
        assert_exact(*replay(served, (1, 1, 1), requests, capture=step == 0))
        made = served.backend.forward_metadata
        tensors = (made.seq_lens, made.page_table, made.query_starts)
        seen.add(tuple((t.data_ptr(), tuple(t.shape)) for t in tensors))
    assert len(seen) == 1
    assert_exact(*replay(served, (1,), [1], pad=3))  # a smaller graph of the same buffers


def test_the_page_table_is_a_snapshot(configure):
    layer = radix()
    served = Served(backend_of(layer), layer)
    served.run(ForwardMode.EXTEND, LENGTHS)
    fields, q, k, v = served.batch(ForwardMode.DECODE, (1, 1, 1))
    served.backend.init_forward_metadata(fields)
    served.req_to_token.fill_(-1)
    assert_exact(served.backend.forward(q.flatten(1), k, v, layer, fields), served.exact(q, (1, 1, 1)))


DRAFTS = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_draft_attention_backend": "triton",
}


def test_chains_of_drafts_are_verified(configure):
    configure(**DRAFTS)
    layer = radix()
    served = Served(backend_of(layer), layer)
    served.run(ForwardMode.EXTEND, LENGTHS)
    served.backend.init_cuda_graph_state(8, 32)
    assert_exact(*served.run(ForwardMode.TARGET_VERIFY, (4, 4, 4)))
    assert_exact(*replay(served, (4, 4, 4), [2, 0, 1], ForwardMode.TARGET_VERIFY))
    assert_exact(*served.run(ForwardMode.DECODE, (1, 1, 1)))


def test_windowed_layers_have_pages_of_their_own(configure):
    """SGLang's windowed pool is smaller; its slots are found through a mapping from those of the full pool."""
    full, windowed = radix(layer_id=0), radix(layer_id=1, sliding_window_size=63)
    pool = SWAKVPool(
        size=SLOTS,
        size_swa=SLOTS // 2,
        page_size=PAGE,
        dtype=E4M3,
        head_num=HK,
        head_dim=D,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        device="cpu",
        **({"enable_memory_saver": False} if not stand_in.INSTALLED else {}),
    )
    mapping = torch.zeros(SLOTS + PAGE + 1, dtype=torch.int64)
    pool.register_mapping(mapping)
    backend = OctavoAttentionBackend(runner_of(full, windowed, pool=pool), "exact")
    served = Served(backend, windowed)
    pages = served.req_to_token[1:4, ::PAGE].flatten().long() // PAGE
    for i, page in enumerate(pages.tolist()):
        mapping[page * PAGE : (page + 1) * PAGE] = torch.arange(PAGE) + (i + 1) * PAGE
    assert_exact(*served.run(ForwardMode.EXTEND, LENGTHS))
    backend.init_cuda_graph_state(8, 8)
    assert_exact(*replay(served, (1, 1, 1), [0, 1, 2], capture=True))
    # Tokens that left the window are given back: their slots map to 0.
    gone = served.req_to_token[3, :PAGE].long()
    mapping[gone] = 0
    assert_exact(*replay(served, (1, 1, 1), [0, 1, 2]))
    assert_exact(*served.run(ForwardMode.DECODE, (1, 1, 1)))
    assert int(pool.swa_kv_pool.k_buffer[0][0].count_nonzero()) > 0, "padding writes to slot 0"


def test_half_of_a_hybrid_backend_keeps_sglangs_layout(configure):
    """Another backend reads the same bytes: slot by slot they are what SGLang would have stored."""
    configure(decode_attention_backend="fa3")
    layer = radix()
    served = Served(backend_of(layer), layer)
    assert_exact(*served.run(ForwardMode.EXTEND, LENGTHS))
    k = served.backend.token_to_kv_pool.get_kv_buffer(0)[0]
    slots = served.req_to_token[2, : LENGTHS[1]].long()
    assert torch.equal(k[slots].double(), stored(served.k[1], E4M3, None))


def test_leaf_pages_hold_the_same_elements_where_the_layout_says(configure):
    layer = radix()
    served = Served(backend_of(layer), layer)
    served.run(ForwardMode.EXTEND, LENGTHS)
    pool = served.backend.token_to_kv_pool
    page, token = int(served.req_to_token[2, 0]) // PAGE, 37
    k = pool.k_buffer[0].view(E4M3).view(-1, HK, PAGE, D)
    v = pool.v_buffer[0].view(E4M3).view(-1, HK, D, PAGE)
    assert torch.equal(k[page, :, token].double(), stored(served.k[1][token], E4M3, None))
    assert torch.equal(v[page, :, :, leaf_column(token)].double(), stored(served.v[1][token], E4M3, None))


def test_other_ways_into_leaf_pages_are_closed(configure):
    layer = radix()
    backend = backend_of(layer)
    slots = torch.tensor([70])
    for call in (
        lambda pool: pool.set_kv_buffer(layer, slots, torch.zeros(1, HK, D), torch.zeros(1, HK, D)),
        lambda pool: pool.move_kv_cache(slots, slots),
    ):
        with pytest.raises(Unsupported, match="leaf layout"):
            call(backend.token_to_kv_pool)


def test_an_idle_batch_needs_no_plan(configure):
    layer = radix()
    served = Served(backend_of(layer), layer)
    fields = SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    served.backend.init_forward_metadata(fields)
    assert served.backend.forward(torch.zeros(0, HQ * D), None, None, layer, fields).shape == (0, HQ * D)


REFUSED_OPTIONS = {
    "attn_dcp_size": 2,
    "attn_cp_size": 2,
    "enable_dp_attention": True,
    "enable_pdmux": True,
    "disaggregation_mode": "decode",
    "enable_unified_memory": True,
    "enable_page_major_kv_layout": True,
    "enable_hierarchical_cache": True,
    "enable_hisparse": True,
    "enable_lmcache": True,
    "prefill_only_disable_kv_cache": True,
    "enable_two_batch_overlap": True,
    "dllm_algorithm": "LowConfidence",
    "enable_flexkv": True,
    "enable_torch_compile": True,
}


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_options_are_refused_in_words(configure, name):
    configure(**{name: REFUSED_OPTIONS[name]})
    with pytest.raises(Unsupported) as refusal:
        backend_of(radix())
    (reason,) = refusal.value.reasons
    assert reason.startswith("needs ") and reason.endswith(f"found {name}={REFUSED_OPTIONS[name]}")


@pytest.mark.parametrize(("phase", "kind"), [("prefill", "full"), ("prefill", "tc_piecewise"), ("decode", "breakable")])
def test_graphs_of_other_kinds_are_refused(configure, phase, kind):
    configure(cuda_graph_config=stand_in.graphs(**{phase: kind}))
    with pytest.raises(Unsupported, match=f"needs {phase} graphs that are .* or disabled; found {kind}"):
        backend_of(radix())


def test_every_need_is_tried():
    from octavo.integrations._sglang_support import NEEDS

    assert {need.option.split(".")[-1] for need in NEEDS} == REFUSED_OPTIONS.keys()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"speculative_algorithm": "NGRAM"}, "found NGRAM"),
        ({"speculative_eagle_topk": 4}, "speculative_eagle_topk 1"),
        ({"speculative_draft_attention_backend": None}, "--speculative-draft-attention-backend triton"),
        ({"speculative_draft_attention_backend": "octavo"}, "does not draft; found octavo"),
    ],
)
def test_drafts_that_are_not_chains_are_refused(configure, changed, words):
    configure(**{**DRAFTS, **changed})
    with pytest.raises(Unsupported, match=words):
        backend_of(radix())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_mla_backend": True}, "multi-head latent attention"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True, attention_chunk_size=None)}, "an encoder"),
        (
            {"model_config": SimpleNamespace(is_encoder_decoder=False, attention_chunk_size=64)},
            "attention_chunk_size=64",
        ),
        ({"token_to_kv_pool_allocator": SimpleNamespace(translate_kv_loc=len)}, "whose slots are virtual"),
        ({"pool": type("OtherPool", (MHATokenToKVPool,), {})}, "found OtherPool"),
        ({"page_size": 1}, "page_size that is a multiple of 32; it is 1"),
    ],
)
def test_models_and_pools_are_refused_in_words(configure, fields, words):
    if "pool" in fields:
        shape = {"head_num": HK, "head_dim": D, "layer_num": 1, "device": "cpu", "enable_memory_saver": False}
        fields = {"pool": fields["pool"](size=SLOTS, page_size=PAGE, dtype=E4M3, **shape)}
    with pytest.raises(Unsupported, match=words):
        backend_of(radix(), **fields)


def test_a_page_size_that_leaf_cannot_hold_names_one_that_it_can(configure):
    with pytest.raises(Unsupported) as refusal:
        backend_of(radix(), page_size=16)
    assert refusal.value.nearest == "--page-size 64"


def test_a_pool_in_another_order_is_refused(configure):
    pool = mha_pool(E4M3)
    pool.kv_cache_layout = "hnd"
    with pytest.raises(Unsupported, match="nhd; found hnd"):
        backend_of(radix(), pool=pool)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("is_cross_attention", True, "cross-attention"),
        ("use_irope", True, "use_irope"),
        ("pos_encoding_mode", "ALIBI", "ALIBI"),
        ("xai_temperature_len", 1024, "xai_temperature_len=1024"),
    ],
)
def test_layers_are_refused_in_words(configure, name, value, words):
    layer = radix()
    setattr(layer, name, value)
    with pytest.raises(Unsupported, match=words):
        backend_of(layer)


def test_calls_and_modes_are_refused_in_words(configure):
    layer = radix()
    served = Served(backend_of(layer), layer)
    fields, q, k, v = served.batch(ForwardMode.EXTEND, LENGTHS)
    served.backend.init_forward_metadata(fields)
    with pytest.raises(Unsupported, match="without q_rope"):
        served.backend.forward(q.flatten(1), k, v, layer, fields, q_rope=q)
    fields.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    with pytest.raises(Unsupported, match="found DRAFT_EXTEND_V2"):
        served.backend.init_forward_metadata(fields)
    served.backend.init_cuda_graph_state(8, 8)
    fields.forward_mode = ForwardMode.EXTEND
    with pytest.raises(Unsupported, match="a CUDA graph of EXTEND"):
        served.backend.init_forward_metadata_out_graph(fields)


def test_both_names_are_registered_once():
    plugin.register()
    plugin.register()
    choices = plugin._choices().ATTENTION_BACKEND_CHOICES
    for name in plugin.NAMES:
        assert name in attention_registry.ATTENTION_BACKENDS
        assert choices.count(name) == 1


def test_the_names_differ_in_the_precision_of_prefill(configure, monkeypatch):
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda package: plugin.TESTED[0])
    plugin.register()
    made = {name: attention_registry.ATTENTION_BACKENDS[name](runner_of(radix())) for name in plugin.NAMES}
    found = {name: next(iter(backend._layers.values())).spec.precision for name, backend in made.items()}
    assert found == plugin.NAMES
