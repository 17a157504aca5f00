"""Specs: what is well formed, what is derived, and the errors that name what came."""

from __future__ import annotations

import pickle

import pytest
import torch

from octavo import AttentionSpec, IndexerSpec, InvalidInput, Unsupported


def test_aliases_and_defaults():
    spec = AttentionSpec(32, 8, 128, kv_dtype="fp8", query_dtype=torch.bfloat16, out_dtype="bf16")
    assert (spec.kv_dtype, spec.query_dtype, spec.out_dtype) == ("fp8_e4m3", "bfloat16", "bfloat16")
    assert spec.head_dim_v == 128 and spec.scale == 128**-0.5 and spec.group_size == 4
    assert spec == AttentionSpec(32, 8, 128, head_dim_v=128) and hash(spec) == hash(AttentionSpec(32, 8, 128))


def test_kinds_and_bytes():
    assert AttentionSpec(8, 8, 64).kind == "full"
    assert AttentionSpec(8, 8, 64, window=128).kind == "sliding_window"
    assert AttentionSpec(8, 8, 64, attention_chunk=128).kind == "chunked"
    mla = AttentionSpec(128, 1, 576, head_dim_v=512, mla=True, layout="nhd")
    assert mla.kind == "mla" and mla.bytes_per_token == 576
    assert AttentionSpec(32, 8, 128).bytes_per_token == 2048
    assert AttentionSpec(32, 8, 128, kv_dtype="bfloat16").bytes_per_token == 4096
    assert AttentionSpec(32, 8, 128, scale_granularity="token_head").bytes_per_token == 2048 + 64


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(32, 8, 128),
        AttentionSpec(8, 2, 64, window=3, sinks=True, softcap=30.0, lse=True, kv_dtype="fp8_e5m2", layout="nhd"),
        AttentionSpec(16, 1, 192, head_dim_v=128, mla=True, layout="nhd", softmax_scale=0.1),
    ],
)
def test_json_and_pickle_round_trip(spec):
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_huge_window_is_one_that_kernels_can_add_to():
    assert AttentionSpec(8, 2, 64, window=2**31 - 1) == AttentionSpec(8, 2, 64, window=10**20)
    assert AttentionSpec(8, 2, 64, window=2**31).window == 2**30


def test_unsupported_survives_pickling():
    error = Unsupported("no", ["one", "two"], "page_size=64")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.reasons, copy.nearest, str(copy)) == (("one", "two"), "page_size=64", str(error))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_q_heads": 7}, "num_q_heads must be a multiple of num_kv_heads; came 7 and 2"),
        ({"kv_dtype": "int8"}, "kv_dtype must be one of fp8_e4m3, fp8_e5m2, bfloat16, float16, float32; came 'int8'"),
        ({"layout": "leef"}, "layout must be one of leaf, nhd, hnd; came 'leef'"),
        ({"page_size": 0}, "page_size must be a positive integer; came 0"),
        ({"page_size": True}, "page_size must be a positive integer; came True"),
        ({"head_dim": 64.0}, "head_dim must be a positive integer; came 64.0"),
        ({"window": 0}, "window must be a positive integer; came 0"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be None or a positive finite number; came nan"),
        ({"softcap": -1.0}, "softcap must be None or a positive finite number; came -1.0"),
        ({"causal": 1}, "causal must be True or False; came 1"),
        ({"mla": True}, "mla needs one KV head"),
        ({"precision": "best"}, "precision must be one of fast, exact; came 'best'"),
    ],
)
def test_malformed_fields_say_what_was_needed_and_what_came(changes, message):
    fields = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, **changes}
    with pytest.raises(InvalidInput, match=message.replace("(", r"\(")):
        AttentionSpec(**fields)


def test_indexer_spec():
    assert IndexerSpec().num_heads == 64
    with pytest.raises(InvalidInput, match="scale_format must be one of fp32, pow2, ue8m0"):
        IndexerSpec(scale_format="fp16")
