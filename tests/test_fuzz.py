"""Fuzz: Triton's kernels under the interpreter on inputs that hypothesis makes up, and plans of any spec.

200 examples of attention in `make test`, the same each time; 2,000 others in `make test-all`. What fails is printed
with the line that repeats it (`@reproduce_failure`) and the seed (`--hypothesis-seed`).
"""

from __future__ import annotations

import math
import time

import append_cases
import attention_cases as grid
import indexer_cases
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels.conftest import interpreter  # noqa: F401 - a fixture, and Triton's interpreter switched on

from octavo import AttentionSpec, InvalidInput, Unsupported, choose
from octavo.backends import BY_NAME
from octavo.device import KNOWN
from octavo.reference.merge_states import merge_states as reference_merge
from octavo.testing import bounds, fuzz

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # numpy's
interpreted = pytest.mark.usefixtures("interpreter")


def some(examples: int, same: bool = True):
    """Settings of `examples` examples, the same ones each time or others."""
    return settings(
        max_examples=examples,
        derandomize=same,
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def attention_faults(example: fuzz.Example) -> list[str]:
    """What is wrong with Triton's result of an example, its kernels launched as `octavo.ops` does."""
    from octavo.kernels.triton.decode import decode
    from octavo.kernels.triton.prefill import prefill

    batch, told = example.batch("cpu"), example.plan["num_decodes"]
    call = grid.call_of(batch, **example.plan)
    if told != batch.seq_lens.shape[0] or told == 0:
        prefill(call)
    if told != 0:
        decode(call)
    batch.lse = call.lse
    return bounds.faults(batch, call.out, ("triton", "triton"), KNOWN["cpu"], told)


@interpreted
@some(200)
@given(fuzz.examples(fuzz.triton_specs()))
def test_attention(example):
    assert attention_faults(example) == []


@interpreted
@pytest.mark.slow
@some(2000, same=False)
@given(fuzz.examples(fuzz.triton_specs()))
def test_attention_at_length(example):
    assert attention_faults(example) == []


@interpreted
@pytest.mark.parametrize(("prefills", "seed"), [(((0, 0), (71, 5)), 298), (((71, 1),), 0)])
def test_attention_under_a_sink_that_is_far_above_all_tokens(prefills, seed):
    """Weights of 2^-100 and less: over the last tile's maximum, which is a lower one, fp32 does not hold the sink's."""
    spec = AttentionSpec(8, 2, 80, kv_dtype="bfloat16", page_size=24, layout="hnd", sinks=True, lse=True)
    q, k = fuzz.Values(exponent=1), fuzz.Values("offset")
    assert attention_faults(fuzz.Example(spec, (), prefills, q=q, k=k, told="nothing", seed=seed)) == []


@interpreted
@pytest.mark.parametrize("seed", range(3))
def test_attention_of_scores_at_which_p_bits_are_rounded(seed):
    """Scores of 2^27: 8 less is a tie between 0 and 16 less, and a P of 2^16 is no e4m3."""
    q, k = fuzz.Values("offset", 3), fuzz.Values("offset", 2)
    example = fuzz.Example(AttentionSpec(8, 2, 128), (), ((1, 2),), q=q, k=k, k_scale=25.0, seed=seed)
    assert attention_faults(example) == []


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_attention_of_largest_scores_that_p_bits_move_to_the_next_binade(seed):
    """Between -16 and -8 powers of two a largest score less 8 is rounded: the lse was 8 powers of two too low."""
    q, k = fuzz.Values("normal", 0), fuzz.Values("offset", 0)
    spec = AttentionSpec(8, 2, 64, lse=True)
    assert attention_faults(fuzz.Example(spec, ((20, 1),), ((63, 5),), q=q, k=k, k_scale=0.03, seed=seed)) == []


@some(150)
@given(fuzz.examples(st.sampled_from(fuzz.GPU_SPECS), most_tokens=600, most_rows=100))
def test_attention_of_the_reference(example):
    """What the GPU's fuzz makes, by fp32: the inputs are well formed, and the limits hold what is exact."""
    batch = example.batch("cpu")
    out = batch.run("reference", **example.plan)
    backends = ("reference", "reference")
    assert bounds.faults(batch, out, backends, KNOWN["cpu"], example.plan["num_decodes"]) == []


@interpreted
@some(60)
@given(fuzz.append_fields(), st.integers(0, 1000))
def test_append(fields, seed):
    from octavo.kernels.triton.append import append

    assert append_cases.compare(append_cases.Case(**fields), append, "cpu", seed) == []


@interpreted
@some(60)
@given(fuzz.partial_states())
def test_merge_states(states):
    from octavo.kernels.triton.merge_states import merge_states

    out, lse = merge_states(*states)
    right, right_lse = reference_merge(*states)
    assert torch.equal(lse.isfinite(), right_lse.isfinite())
    assert torch.allclose(lse, right_lse, rtol=2.0**-20, atol=2.0**-20)
    # exp of a difference of lse of size m is off by 2^-24 m; the output's last bit may differ beside.
    size = states[1].masked_fill(states[1] == -math.inf, 0).abs().amax() if states[1].numel() else 0
    off = float(2.0**-21 * (1 + size)) * states[0].float().nan_to_num(0).abs().amax(0)
    off = off + torch.finfo(out.dtype).eps * right.float().abs() + torch.finfo(out.dtype).tiny
    assert bool(((out.float() - right.float()).abs() <= off).all())


lengths = st.sampled_from((0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)) | st.integers(0, 180)
logit_fields = {
    "heads": st.sampled_from((1, 8, 16, 32, 64, 128)) | st.integers(1, 128),
    "dim": st.sampled_from((64, 128)),
    "out": st.sampled_from((torch.float32, torch.bfloat16)),
    "fill": st.sampled_from((None, 0.0, -math.inf)),
}
paged_cases = st.builds(
    indexer_cases.PagedCase,
    lens=st.lists(lengths, max_size=5).map(tuple),
    n=st.integers(1, 8),
    page_size=st.sampled_from((16, 32, 64, 128)),
    scale_format=st.sampled_from(("fp32", "pow2", "ue8m0")),
    lens_form=st.sampled_from(("vector", "matrix", "strided")),
    max_context=st.integers(1, 300),
    hole=st.booleans(),
    strided=st.booleans(),
    **logit_fields,
)
ragged_cases = st.integers(1, 200).flatmap(
    lambda keys: st.builds(
        indexer_cases.RaggedCase,
        rows=st.integers(1, min(24, keys)),
        keys=st.just(keys),
        causal=st.booleans(),
        compressed=st.booleans(),
        width=st.integers(keys, keys + 40),
        **logit_fields,
    )
)
topk_cases = st.builds(
    indexer_cases.TopkCase,
    rows=st.integers(1, 4),
    width=st.integers(1, 400) | st.integers(1, 400) | st.sampled_from((8191, 8192, 8193, 20000)),
    k=st.integers(1, 70) | st.sampled_from((512, 2048)),
    kind=st.sampled_from(("normal", "ties", "zeros", "sorted", "infinities", "wide", "equal")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    full=st.booleans(),
)
index_appends = st.builds(
    indexer_cases.AppendCase,
    dim=st.sampled_from((64, 128)),
    page_size=st.sampled_from((16, 32, 64, 128)),
    scale_format=st.sampled_from(("fp32", "pow2", "ue8m0")),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    rows=st.integers(2, 90),
    wild=st.booleans(),
    strided=st.booleans(),
)


@interpreted
@some(60)
@given(st.one_of(paged_cases, ragged_cases, topk_cases, index_appends))
def test_indexer(case):
    from octavo.kernels.triton.index_append import index_append
    from octavo.kernels.triton.mqa_logits import mqa_logits, paged_mqa_logits
    from octavo.kernels.triton.topk import topk_indices

    if isinstance(case, indexer_cases.PagedCase):
        found = indexer_cases.compare_paged(case, paged_mqa_logits, "cpu", 0.0)
    elif isinstance(case, indexer_cases.RaggedCase):
        found = indexer_cases.compare_ragged(case, mqa_logits, "cpu", 0.0)
    elif isinstance(case, indexer_cases.TopkCase):
        found = indexer_cases.compare_topk(case, topk_indices, "cpu")
    else:
        found = indexer_cases.compare_append(case, index_append, "cpu")
    assert found == []


@some(400)
@given(fuzz.any_spec_fields(), fuzz.devices(), st.sampled_from((None, "auto", *BY_NAME, "cuda", 3)))
def test_every_spec_is_planned_or_refused(fields, device, backend):
    started = time.thread_time()
    try:
        choice = choose(AttentionSpec(**fields), device, backend)
        str(choice), choice.graph_support
        assert choice.workspace_bytes(7, 100, 5000) >= 0
    except (InvalidInput, Unsupported) as refusal:
        assert str(refusal)
    assert time.thread_time() - started < 0.05


@some(30)
@given(fuzz.examples(st.sampled_from(fuzz.GPU_SPECS)))
def test_pools_and_tables_are_of_the_size_that_is_asked_for(example):
    """What a GPU compiles for; the tokens, and so the results, are those of the plain batch."""
    plain, wide = example.batch("cpu"), example.batch("cpu", 16)
    assert wide.page_table.shape[1] % 16 == 0 == wide.cache.num_pages % 16
    assert wide.seq_lens.equal(plain.seq_lens) and wide.query_starts.equal(plain.query_starts)
    assert wide.q.shape == plain.q.shape
