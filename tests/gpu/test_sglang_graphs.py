"""octavo's SGLang backend on a GPU: prompts, then decode and draft verification replayed in real CUDA graphs.

SGLang's own classes where it is installed, else stand-ins; what a captured graph may not do is seen with either.
"""

from __future__ import annotations

import pytest
import sglang_stand_in as stand_in
import torch
from sglang_served import (
    E4M3,
    LENGTHS,
    PAGE,
    SLOTS,
    ForwardMode,
    Served,
    backend_of,
    mha_pool,
    padded,
    publish_options,
    radix,
    with_rows,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")]


@pytest.fixture(autouse=True)
def sglang():
    with stand_in.present():
        yield


SHAPE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
DRAFTS = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_draft_attention_backend": "triton",
}
KINDS = {
    "leaf": (E4M3, {}),
    "window": (E4M3, {"sliding_window_size": 63}),
    "16-bit": (torch.bfloat16, {}),
}


def serve(kind):
    dtype, fields = KINDS[kind]
    layer = radix(**SHAPE, **fields)
    layer.scaling = 128**-0.5
    pool = mha_pool(dtype, size=SLOTS, page_size=PAGE, head_num=8, head_dim=128, device="cuda")
    return Served(backend_of(layer, dtype=dtype, device="cuda", pool=pool), layer)


def assert_as_exact_as_16_bits(served, out, q, counts, requests=None):
    """At most 1.1 times as far from fp64 as attention with probabilities and result in bf16."""
    exact = served.exact(q, counts, requests)
    plain = served.exact(q, counts, requests, multiplied=torch.bfloat16).to(torch.bfloat16)
    assert not out.isnan().any()
    assert (out.double() - exact).norm() <= 1.1 * (plain.double() - exact).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_eager_decode(monkeypatch, kind):
    publish_options(monkeypatch)
    served = serve(kind)
    for mode, counts in ((ForwardMode.EXTEND, LENGTHS), (ForwardMode.DECODE, (1, 1, 1))):
        fields, q, k, v = served.batch(mode, counts)
        served.backend.init_forward_metadata(fields)
        out = served.backend.forward(q.flatten(1), k, v, served.layer, fields)
        assert_as_exact_as_16_bits(served, out, q, counts)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_replayed_over_new_lengths_and_pages(monkeypatch, kind, rows):
    publish_options(monkeypatch, **(DRAFTS if rows > 1 else {}))
    mode = ForwardMode.DECODE if rows == 1 else ForwardMode.TARGET_VERIFY
    served, pad = serve(kind), 2
    fields, q, k, v = served.batch(ForwardMode.EXTEND, LENGTHS)
    served.backend.init_forward_metadata(fields)
    served.backend.forward(q.flatten(1), k, v, served.layer, fields)
    served.backend.init_cuda_graph_state(8, 8 * rows)

    def prepare(requests, capture):
        fields, q, k, v = served.batch(mode, (rows,) * 3, requests)
        slots = padded(fields, rows, pad)
        served.backend.init_forward_metadata_out_graph(fields, in_capture=capture)
        return fields, q, [with_rows(x, pad * rows) for x in (q, k, v)], slots

    fields, _, fixed, slots = prepare([0, 1, 2], capture=True)
    fields.out_cache_loc = slots

    def forward():
        return served.backend.forward(fixed[0].flatten(1), fixed[1], fixed[2], served.layer, fields)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # SGLang warms up twice before it captures
        forward()
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for requests in ([2, 0, 1], [1, 2, 0]):
        _, q, now, new = prepare(requests, capture=False)
        for kept, x in zip((*fixed, slots), (*now, new), strict=True):
            kept.copy_(x)
        out.fill_(float("nan"))
        graph.replay()
        assert_as_exact_as_16_bits(served, out[: 3 * rows], q, (rows,) * 3, requests)
