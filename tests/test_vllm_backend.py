"""octavo's vLLM backend on a CPU: what vLLM hands over, step by step, against attention as a formula.

Over stubs with the interfaces of both releases (vllm_stub.py); test_vllm_engine.py runs the real ones.
"""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from vllm_layers import BLOCK, Sequences, Vllm
from vllm_stub import RECORDS

from octavo import InvalidInput, Unsupported
from octavo.integrations._vllm_cache import view_cache
from octavo.layouts import leaf_column

KINDS = {
    "plain": {},
    "16 bit": {"kv_cache_dtype": "auto"},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "window": {"window": 40},
    "16 bit window": {"kv_cache_dtype": "auto", "window": 40},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])},
    "fp16 sinks": {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0]).half()},
    "one KV head": {"kv_heads": 1},
    "wide": {"dim": 128, "heads": 2},
}


@pytest.fixture(params=list(RECORDS))
def release(request):
    return request.param


def close(got, right):
    """Within the roundings of a bf16 output: half a unit in the last place, and a few of fp32's in between."""
    assert torch.isfinite(got).all()
    assert ((got.double() - right).abs() <= right.abs() * 2**-8 + right.abs().max() * 1e-5).all()


def scaled(layer, k=0.25, v=0.5):
    layer._k_scale.fill_(k)
    layer._v_scale.fill_(v)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_form_give_the_formula(monkeypatch, release, kind):
    vllm = Vllm(monkeypatch, release, drafts=3)
    layer = scaled(vllm.layer(**KINDS[kind]))
    layer.impl.process_weights_after_loading(torch.bfloat16)
    builder = vllm.builder(layer)
    sequences = Sequences(layer)
    for rows, pad in (([50, 20, 64], 0), ([1, 1, 1], 3), ([1, 30, 33], 0), ([4, 4, 4], 2), ([1, 0, 2], 1)):
        got, right = sequences.step(vllm, builder, rows, pad)
        close(got[: sum(rows)], right)
        assert got[sum(rows) :].isnan().all()  # rows of padding are nobody's to write


def test_scales_per_head(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    layer = vllm.layer()
    layer._k_scale, layer._v_scale = torch.tensor([0.25, 2.0]), torch.tensor([1.0, 0.5])
    builder = vllm.builder(layer)
    assert layer.impl.spec.scale_granularity == "head"
    got, right = Sequences(layer).step(vllm, builder, [40, 9, 1])
    close(got, right)


def test_a_scale_is_the_layers_own_tensor(monkeypatch, release):
    """What waking from sleep, or loading weights again, writes into it is what the next step reads."""
    vllm = Vllm(monkeypatch, release)
    layer = scaled(vllm.layer())
    builder = vllm.builder(layer)
    Sequences(layer).step(vllm, builder, [9, 9, 9])
    cache = layer.impl.cache(layer.kv_cache)
    assert cache.k_scale.data_ptr() == layer._k_scale.data_ptr()
    scaled(layer, 0.125, 0.75)
    got, right = Sequences(layer, seed=1).step(vllm, builder, [9, 9, 9])
    close(got, right)
    assert layer.impl.cache(layer.kv_cache) is cache
    layer._k_scale = torch.tensor(0.5)  # another tensor, and other memory, are viewed anew
    layer.kv_cache = layer.kv_cache.clone()
    got, right = Sequences(layer, seed=2).step(vllm, builder, [9, 9, 9])
    close(got, right)


def test_slots_decide_which_rows_are_written(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    layer = vllm.layer()
    vllm.builder(layer)
    before = layer.kv_cache.clone()
    key = torch.ones(6, 2, 64, dtype=torch.bfloat16)
    layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, torch.tensor([-1, BLOCK + 3, -1]))
    changed = (layer.kv_cache != before).flatten(1).sum(1).nonzero()[:, 0].tolist()
    assert changed == [1]
    k, _ = layer.impl.cache(layer.kv_cache).gather(torch.tensor([1], dtype=torch.int32), 5)
    assert (k[3] == 1).all() and (k[4] != 1).all()
    layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, torch.empty(0, dtype=torch.int64))


def test_profiling_has_neither_cache_nor_metadata(monkeypatch, release):
    layer = Vllm(monkeypatch, release).layer()
    q, out = torch.ones(3, 4, 64, dtype=torch.bfloat16), torch.full((3, 4, 64), float("nan"), dtype=torch.bfloat16)
    empty = torch.tensor([])
    layer.impl.do_kv_cache_update(layer, q, q, empty, torch.arange(3))
    layer.impl.forward(layer, q, q, q, empty, None, output=out)
    assert (out == 0).all()


def test_padded_sequences_have_no_rows_and_no_tokens(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    layer = vllm.layer()
    builder = vllm.builder(layer)
    sequences = Sequences(layer, (100, 61, 1, 1))
    close(*sequences.step(vllm, builder, [40, 9, 0, 0]))
    got, right = sequences.step(vllm, builder, [1, 1, 0, 0], pad=2)
    close(got[:2], right)


def test_layers_that_share_a_cache_read_its_owners_scales(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    owner = scaled(vllm.layer("layers.0"))
    sharing = scaled(vllm.layer("layers.1", target="layers.0"), 9.0, 9.0)
    builder = vllm.builder(owner, sharing)
    of_owner, of_sharing = Sequences(owner), Sequences(sharing)
    of_owner.step(vllm, builder, [40, 9, 30])
    close(*of_sharing.step(vllm, builder, [40, 9, 30]))
    vllm.layer("layers.2", target="layers.0", kv_cache_dtype="auto")
    with pytest.raises(Unsupported, match="needs the kv_cache_dtype of that layer, fp8; found auto"):
        vllm.builder(vllm.layers["layers.2"])


def test_kinds_have_a_plan_each_and_share_one_workspace(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    layers = [vllm.layer(f"layers.{i}", window=40 if i % 2 else None) for i in range(4)]
    builder, other = vllm.builder(*layers), vllm.builder(layers[0])
    kinds = builder.kinds
    assert kinds["layers.0"] is kinds["layers.2"] and kinds["layers.1"] is kinds["layers.3"]
    assert kinds["layers.0"] is not kinds["layers.1"] and other.kinds["layers.0"] is not kinds["layers.0"]
    attentions = [kinds["layers.0"].attention, kinds["layers.1"].attention, other.kinds["layers.0"].attention]
    assert len({a.workspace.data_ptr() for a in attentions}) == 1


def test_metadata_of_an_earlier_batch_is_planned_again(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    layer = vllm.layer()
    builder = vllm.builder(layer)
    sequences = Sequences(layer)
    sequences.step(vllm, builder, [40, 30, 20])
    common = vllm.batch([1, 1, 1], [40, 30, 20])
    metadata = builder.build(0, common)
    builder.build(0, vllm.batch([1], [1]))
    # vLLM copies metadata into classes of its own, field by field.
    copied = dataclasses.make_dataclass("Copied", [f.name for f in dataclasses.fields(metadata)])(
        *(getattr(metadata, f.name) for f in dataclasses.fields(metadata))
    )
    q = torch.cat([q[n - 1 : n] for q, n in zip(sequences.parts[0], (40, 30, 20), strict=True)])
    out = torch.full((3, 4, 64), float("nan"), dtype=torch.bfloat16)
    layer.impl.forward(layer, q, None, None, layer.kv_cache, copied, output=out)
    close(out, torch.cat([sequences.formula(i, n - 1, n) for i, n in enumerate((40, 30, 20))]))


def test_a_plan_depends_on_nothing_but_the_graph(monkeypatch, release):
    """num_decodes and max_query_len as plan gets them: the same at capture and at every replay."""
    vllm = Vllm(monkeypatch, release, drafts=3)
    layer = vllm.layer()
    builder = vllm.builder(layer)
    assert builder.decode_rows == 4

    def planned(rows):
        step = builder.build(0, vllm.batch(rows, [50] * len(rows))).step
        return step.num_decodes, step.max_query_len

    assert planned([1, 1, 1]) == planned([1, 0, 0]) == (3, 1)
    assert planned([4, 4, 4]) == planned([4, 4, 0]) == planned([2, 2, 2]) == (3, 4)
    assert planned([4, 1, 9, 20]) == (2, 20)
    assert planned([20, 1]) == (0, 20)
    vllm.config.compilation_config.cudagraph_mode = graph_mode("FULL")
    assert planned([1, 1, 1]) == planned([1, 9, 20]) == (None, None)


def graph_mode(name):
    return importlib.import_module("vllm.config.compilation").CUDAGraphMode[name]


def test_rows_that_the_device_decides_are_given_room(monkeypatch, release):
    vllm = Vllm(monkeypatch, release, drafts=3, adaptive=True)
    builder = vllm.builder(vllm.layer())
    assert builder.build(0, vllm.batch([1, 1], [9, 9])).step.max_query_len == 4


def test_mixed_graphs_are_those_of_mode_full_alone(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    builder = vllm.builder(vllm.layer())
    found = {}
    for name in ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"):
        vllm.config.compilation_config.cudagraph_mode = graph_mode(name)
        found[name] = builder.build(0, vllm.batch([1, 1], [9, 9])).step.num_decodes
    assert found == {"FULL": None, "PIECEWISE": 2, "FULL_AND_PIECEWISE": 2, "FULL_DECODE_ONLY": 2}


def test_capture_runs_sequences_of_one_token(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    builder = vllm.builder(vllm.layer())
    common = vllm.batch([1, 1], [200, 256])
    metadata = builder.build_for_cudagraph_capture(common)
    assert metadata.step.seq_lens.tolist() == [1, 1] and metadata.step.seq_lens.data_ptr() == common.seq_lens.data_ptr()


def test_a_draft_step_is_planned_over_the_same_tensors(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    layer = vllm.layer()
    builder = vllm.builder(layer)
    sequences = Sequences(layer)
    sequences.step(vllm, builder, [40, 30, 20])
    common = vllm.batch([1, 1, 1], [40, 30, 20])
    metadata = builder.build(0, common)
    common.seq_lens -= 5
    builder.update_draft_decode_metadata(metadata)
    q = torch.cat([q[n - 6 : n - 5] for q, n in zip(sequences.parts[0], (40, 30, 20), strict=True)])
    out = torch.full((3, 4, 64), float("nan"), dtype=torch.bfloat16)
    layer.impl.forward(layer, q, None, None, layer.kv_cache, metadata, output=out)
    close(out, torch.cat([sequences.formula(i, n - 6, n - 5) for i, n in enumerate((40, 30, 20))]))


def test_a_quantised_query_comes_with_its_scale(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    layer = scaled(vllm.layer())
    layer.query_quant, layer._q_scale = object(), torch.tensor(0.5)
    builder = vllm.builder(layer)
    assert layer.impl.spec.query_dtype == "fp8_e4m3"
    sequences = Sequences(layer)
    exact = [(q.float() / 0.5).to(torch.float8_e4m3fn) for q in sequences.parts[0]]
    sequences.parts[0] = [q.float() * 0.5 for q in exact]
    for i, n in enumerate((40, 30, 20)):
        sequences.done[i] = n
    common = vllm.batch([40, 30, 20], [40, 30, 20])
    k, v = (torch.cat([x[:n] for x, n in zip(part, (40, 30, 20), strict=True)]) for part in sequences.parts[1:])
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, common.slot_mapping)
    out = torch.full((90, 4, 64), float("nan"), dtype=torch.bfloat16)
    q = torch.cat([x[:n] for x, n in zip(exact, (40, 30, 20), strict=True)])
    layer.impl.forward(layer, q, k, v, layer.kv_cache, builder.build(0, common), output=out)
    close(out, torch.cat([sequences.formula(i, 0, n) for i, n in enumerate((40, 30, 20))]))


def test_a_chunked_local_layer_has_room_for_the_sequences_that_vllm_cuts(monkeypatch, release):
    """Five sequences of 256 rows in all, cut at every 16th token: two more each at most, and one for every 16 rows."""
    vllm = Vllm(monkeypatch, release)
    layer = vllm.layer()
    plain, chunked = vllm.builder(layer), vllm.builder(layer, attention_chunk_size=16)
    assert plain.kinds["layers.0"].attention.max_batch == 5
    assert chunked.kinds["layers.0"].attention.max_batch >= 2 * 5 + 256 // 16


def test_masks_that_selection_did_not_ask_for_are_refused(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    builder = vllm.builder(vllm.layer())
    for fields, reason in (
        ({"causal": False}, "needs causal attention; found causal=False"),
        ({"causal": torch.tensor([True])}, "needs causal attention; found causal=per sequence"),
        ({"mm_req_doc_ranges": {0: [(1, 3)]}}, "needs no image-prefix mask"),
        ({"rswa_prefix_lens": torch.tensor([3])}, "needs a plain sliding window"),
    ):
        with pytest.raises(Unsupported, match=reason):
            builder.build(0, vllm.batch([1], [9], **fields))
    builder.build(0, vllm.batch([1], [9], mm_req_doc_ranges={0: []}))


def test_layers_that_octavo_has_no_kernel_for_are_refused_before_weights(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    for options, reason in (
        ({"alibi": [0.5] * 4}, "triton: needs no ALiBi bias; found alibi=True"),
        ({"dim": 40}, "triton: needs head_dim 64, 80"),
        ({"chunk_lookback": 1}, "needs no chunked-local mask; found chunk_lookback"),
        ({"something_new": 3}, "needs no something_new, which octavo does not know; found 3"),
        ({"kv_cache_dtype": "nvfp4"}, "needs kv_cache_dtype auto, float16"),
    ):
        with pytest.raises(Unsupported) as refused:
            vllm.layer(**options)
        assert any(reason in found for found in refused.value.reasons), refused.value.reasons
    vllm.layer(chunk_lookback=-1)


def test_what_only_the_builder_learns_is_judged_too(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    layer = vllm.layer()
    layer.head_size_v = 32
    with pytest.raises(Unsupported, match="triton: needs head_dim 64, 80.*found 64/32"):
        vllm.builder(layer)


def test_graph_support_is_what_choose_says(monkeypatch, release):
    vllm = Vllm(monkeypatch, release)
    support = vllm.backend.OctavoMetadataBuilder.get_cudagraph_support
    assert support(vllm.config, None).name == "NEVER"  # no layers, nothing to capture
    vllm.layer("layers.0")
    vllm.layer("layers.1", kv_cache_dtype="auto")
    assert support(vllm.config, None).name == "ALWAYS"
    monkeypatch.setenv("OCTAVO_BACKEND", "reference")
    assert support(vllm.config, None).name == "NEVER"


class TestMemory:
    """view_cache needs no vLLM."""

    def spec(self, vllm, **options):
        layer = vllm.layer(**options)
        vllm.builder(layer)
        return layer, layer.impl.spec

    def test_a_block_and_head_is_k_then_v_transposed(self, monkeypatch, release):
        layer, spec = self.spec(Vllm(monkeypatch, release))
        cache = view_cache(spec, layer.kv_cache)
        assert spec.layout == "leaf"
        k, v = torch.randn(2, 1, 2, 64).to(torch.bfloat16)
        cache.append(k, v, torch.tensor([3 * BLOCK + 7]))
        run = layer.kv_cache[3, 1].reshape(-1).view(torch.float8_e4m3fn)
        assert torch.equal(run[7 * 64 : 8 * 64], k[0, 1].to(torch.float8_e4m3fn))
        assert torch.equal(run[BLOCK * 64 + leaf_column(7) :: BLOCK][:64], v[0, 1].to(torch.float8_e4m3fn))

    @pytest.mark.parametrize("dtype", ["fp8", "auto"])
    def test_pages_of_several_layers_in_one_allocation(self, monkeypatch, release, dtype):
        layer, spec = self.spec(Vllm(monkeypatch, release), kv_cache_dtype=dtype)
        element = layer.kv_cache.dtype
        every = torch.zeros(6, 3, 2, BLOCK, 128, dtype=element)  # [block, layer, head, slot, content]
        k, v = torch.randn(2, 4, 2, 64).to(torch.bfloat16)
        view_cache(spec, every[:, 1]).append(k, v, torch.tensor([0, 5, 40, 5 * BLOCK]))
        assert (every[:, 0] == 0).all() and (every[:, 2] == 0).all()
        found = view_cache(spec, every[:, 1]).gather(torch.tensor([5], dtype=torch.int32), 1)[0]
        assert torch.equal(found[0], k[3].to(torch.float8_e4m3fn).float() if dtype == "fp8" else k[3].float())

    def test_one_head_or_one_block_of_any_stride(self, monkeypatch, release):
        layer, spec = self.spec(Vllm(monkeypatch, release), kv_heads=1)
        odd = layer.kv_cache[:1].as_strided((1, 1, BLOCK, 128), (3, 5, 128, 1))
        view_cache(spec, odd).append(
            torch.ones(1, 1, 64, dtype=torch.bfloat16), torch.ones(1, 1, 64, dtype=torch.bfloat16), torch.tensor([2])
        )
        assert (layer.kv_cache[0, 0].reshape(-1)[2 * 64 : 3 * 64] == 0x38).all()

    def test_other_memory_is_refused_in_words(self, monkeypatch, release):
        layer, spec = self.spec(Vllm(monkeypatch, release))
        slots_first = torch.zeros(4, BLOCK, 2, 128, dtype=torch.uint8).transpose(1, 2)
        for memory, words in (
            (slots_first, "must hold the slots of one block and head together"),
            (layer.kv_cache[..., :100], r"must be \[blocks, 2, 32, 128\]"),
            (layer.kv_cache.to(torch.bfloat16), "must hold fp8_e4m3"),
        ):
            with pytest.raises(InvalidInput, match=words):
                view_cache(spec, memory)
