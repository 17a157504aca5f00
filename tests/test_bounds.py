"""The limits that the fuzz holds results to: right results are within, small faults at ordinary magnitudes are not."""

from __future__ import annotations

import math
from dataclasses import replace

import attention_cases as grid
import pytest
import torch
from kernels.conftest import interpreter  # noqa: F401 - a fixture, and Triton's interpreter switched on

from octavo import AttentionSpec
from octavo.device import KNOWN, Device
from octavo.testing import bounds, cuts, fuzz, rounding
from octavo.testing.inputs import Batch, make_batch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # numpy's
interpreted = pytest.mark.usefixtures("interpreter")
CPU, H200 = KNOWN["cpu"], Device.named("h200")
REFERENCE, TRITON, GLUON = (("reference",) * 2, ("triton",) * 2, ("gluon",) * 2)


def reference_batch(**changes):
    spec = AttentionSpec(4, 2, 64, lse=True, layout="nhd", page_size=16, **changes)
    return make_batch(spec, [100, 7], [1, 5])


@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_bounds_hold_the_reference_and_are_narrow(precision):
    """The reference is inside the limits of fp32, which are some ulps of bf16 wide."""
    batch = reference_batch(precision=precision, out_dtype="float32")
    out = batch.run("reference")
    assert bounds.faults(batch, out, REFERENCE, CPU) == []
    limit = bounds.limits(batch, REFERENCE, CPU)
    assert (limit.high - limit.low).max() < 2.0**-10 * out.abs().max()


@pytest.mark.parametrize("wrong", [0.01, -0.01])
def test_bounds_see_what_is_wrong(wrong):
    """An error of 1 % in one element, a wrong lse, NaN, and a row that should be 0."""
    batch = reference_batch(precision="exact", out_dtype="float32")
    out, lse = batch.run("reference"), batch.lse

    def found(**changes):
        return bounds.faults(batch, changes.get("out", out), TRITON, CPU)

    assert found() == []
    changed = out.clone()
    changed[2, 1, 3] *= 1 + wrong * 5
    assert len(found(out=changed)) == 1
    changed[2, 1, 3] = math.nan
    assert len(found(out=changed)) == 1
    batch.lse = lse + wrong
    assert len(found()) == 1
    batch.lse, batch.seq_lens = lse, torch.tensor([100, 3], dtype=torch.int32)
    assert len(found()) == 2


# Ordinary numbers, of which some rows see one token far above the others: sequences of decode and of prefill.
STEPS = {"decode": {"decodes": ((200, 1), (77, 1))}, "prefill": {"prefills": ((200, 9), (20, 20))}}
PEAKED = fuzz.Values(exponent=1)


def batch_of(phase: str, peaked: bool = False, **fields) -> Batch:
    """Of an e4m3 query, which every kernel takes as it is: an exact result is then a right one of any of them."""
    spec = AttentionSpec(8, 2, 128, **fields)
    example = fuzz.Example(spec, k=PEAKED if peaked else fuzz.Values(), v_scale=0.37, **STEPS[phase])
    return example.batch("cpu")


def without_one_token(batch: Batch) -> Batch:
    """The same with token 100 of the first sequence on a page that is not there; pages are of one token."""
    table = batch.page_table.clone()
    table[0, 100] = -1
    return replace(batch, page_table=table)


@interpreted
@pytest.mark.parametrize(
    ("phase", "kv_dtype"), [("decode", "fp8_e4m3"), ("decode", "bfloat16"), ("prefill", "fp8_e5m2")]
)
def test_one_token_of_200_that_is_lost_is_seen(phase, kv_dtype):
    batch = batch_of(phase, layout="nhd", page_size=1, kv_dtype=kv_dtype, precision="exact")
    assert bounds.faults(batch, grid.run(batch), TRITON, CPU) == []
    out = grid.run(without_one_token(batch))
    assert len(bounds.faults(batch, out, TRITON, CPU)) == 1


@interpreted
@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("phase", STEPS)
def test_values_that_are_3_percent_too_large_or_small_are_seen(phase, precision):
    """As of a wrong scale of V; in fast prefill, whose P is e4m3, of rows with one token far above the others."""
    batch = batch_of(phase, peaked=True, precision=precision)
    out = grid.run(batch)
    assert bounds.faults(batch, out, TRITON, CPU) == []
    for wrong in (1.03, 0.97):
        assert len(bounds.faults(batch, (out.double() * wrong).to(out.dtype), TRITON, CPU)) == 1


@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("phase", STEPS)
def test_they_are_seen_within_what_hopper_kernels_round(phase, precision):
    batch = batch_of(phase, peaked=True, precision=precision, query_dtype="fp8", lse=True)
    out, told = batch.run("reference"), 2 if phase == "decode" else 0
    assert bounds.faults(batch, out, GLUON, H200, told) == []
    for wrong in (1.03, 0.97):
        assert len(bounds.faults(batch, (out.double() * wrong).to(out.dtype), GLUON, H200, told)) == 1


@pytest.mark.parametrize("phase", STEPS)
def test_one_token_is_seen_within_what_hopper_kernels_round(phase):
    """By the norms of rows: its 0.5 % of a row are within the limits of single elements."""
    spec = {"precision": "exact", "layout": "nhd", "page_size": 1, "query_dtype": "fp8"}
    batch, told = batch_of(phase, **spec), 2 if phase == "decode" else 0
    limit = bounds.limits(batch, GLUON, H200, told)
    lost = without_one_token(batch).run("reference").double()
    rows = (lost - limit.exact).norm(dim=-1) > limit.norm
    sees = slice(0, 1) if phase == "decode" else slice(0, 9)
    assert rows[sees].float().mean() > 0.5 and not rows[sees.stop :].any()


@pytest.mark.parametrize("form", ["hi + lo / 16", "hi + lo"])
def test_two_terms_of_p_are_off_by_what_is_said(form):
    """Every P that fp16 holds, as `_halves.split_pairs` and `_pipeline.split_fp8` split it; no less would do."""
    p = torch.arange(0, 0x5C01, dtype=torch.int32).to(torch.int16).view(torch.float16)  # 0 to 256
    if form == "hi + lo":
        t = p * 129
        hi = t - (t - p)
        got, phase = rounding._e4m3(hi.double()) + rounding._e4m3((p - hi).double()), "prefill"
    else:
        hi = rounding._e4m3(p.double())
        got, phase = hi + rounding._e4m3((p.double() - hi) * 16) / 16, "decode"
    of = rounding.rounding_of(AttentionSpec(8, 2, 128, precision="exact"), "gluon", phase, H200, 100)
    off = (got - p.double()).abs()
    assert of.form == form and bool((off <= of.weight * p.double() + of.weight_floor * 256).all())
    assert bool((off > of.weight_floor * 256 / 4).any())
    below = p < 2.0**-9
    assert float(off[below].max()) > of.weight_floor * 256 / 4


@pytest.mark.parametrize("form", ["by maximum", "by sum", "hi + lo / 16", "hi + lo"])
def test_queries_as_kernels_make_them(form):
    """Rows of elements of all magnitudes, of 0, of a sum of 128, of a maximum of 256: about these scales are open."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 128, generator=generator) * 2.0 ** torch.randint(-20, 2, (40, 128), generator=generator)
    x[0], x[1], x[2, 0] = 0, 1, 256
    x = x.bfloat16().double()
    made, open_, smallest, second = rounding.queries(x, form, False)
    off, most = (made - x).abs(), x.abs().amax(-1, keepdim=True)
    floor = {"by maximum": 2.0**-10 / 448, "by sum": 2.0**-10, "hi + lo / 16": 2.0**-21, "hi + lo": 2.0**-17}[form]
    bits = 2.0**-8 if form.startswith("hi") else 2.0**-4
    of = x.abs().sum(-1, keepdim=True) / 64 if form == "by sum" else most
    assert bool((off <= bits * x.abs() + floor * of + open_).all())
    assert (second.shape[-1] == 128) == form.startswith("hi") and bool((smallest > 0).all())
    if form == "hi + lo / 16":
        assert bool((open_ <= off + 1e-30).all())  # as it is, or so
    else:
        assert (open_ > 0).float().mean() < 0.01


def cut_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] b [K, N] as an FP8 tensor core adds up: 14 bits of the largest, step by step, cut toward 0."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)

    def exponent(x: torch.Tensor, least: int) -> torch.Tensor:
        return torch.where(x != 0, (torch.frexp(x).exponent - 1).clamp_min(least), -200)

    for i in range(0, a.shape[1], 32):
        terms = a[:, i : i + 32, None] * b[None, i : i + 32]
        top = (exponent(a[:, i : i + 32], -6)[..., None] + exponent(b[i : i + 32], -6)).amax(1)
        unit = 2.0 ** (torch.maximum(top, exponent(total, -200)) - 13).double()
        total = (torch.trunc(terms / unit[:, None]).sum(1) + torch.trunc(total / unit)) * unit
    return total


@pytest.mark.parametrize("keys", ["normal", "outlier channel", "offset", "token magnitudes"])
@pytest.mark.parametrize("query", ["normal", "outlier channel", "offset"])
def test_what_tensor_cores_cut_is_no_more_than_is_said(query, keys):
    generator = torch.Generator().manual_seed(0)
    q, k = (
        rounding._e4m3(fuzz.Values(shape).make((n, 1, 128), 1e9, generator).double())
        for shape, n in ((query, 32), (keys, 96))
    )
    off = (cut_product(q[:, 0], k[:, 0].T) - q[:, 0] @ k[:, 0].T).abs()
    smallest = torch.full((), 2.0**-6, dtype=torch.float64)
    most, likely, _ = cuts.of_scores(q[None], k.transpose(0, 1), q[None, ..., :0], (smallest, smallest), False)
    assert bool((off <= likely[0, :, 0]).all()) and bool((likely <= most).all())
    p = rounding._e4m3(256 * torch.rand(32, 96, generator=generator, dtype=torch.float64) ** 4)
    off = (cut_product(p, k[:, 0]) - p @ k[:, 0]).abs()
    of = rounding.rounding_of(AttentionSpec(8, 2, 128), "gluon", "prefill", H200, 96)
    p = p[None, :, None]
    most, likely = cuts.of_products(p, p, k.transpose(0, 1), smallest, 0 * likely[..., :1].double(), 0, of)
    assert bool((off <= most[0, :, 0]).all()) and bool((off.norm(dim=-1) <= likely[0, :, 0].norm(dim=-1)).all())
