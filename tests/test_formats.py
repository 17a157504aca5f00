"""The law of quantise and dequantise: bit for bit torch's cast inside the range, saturating outside."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import InvalidInput
from octavo.formats import FORMATS, cast, check_scale, decode, dequantise, quantise, token_scale

FP8 = ("fp8_e4m3", "fp8_e5m2")


def all_bf16() -> torch.Tensor:
    """Every bf16 bit pattern, as fp32."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


@pytest.mark.parametrize("name", FP8)
def test_cast_equals_torch_inside_the_range(name):
    f = FORMATS[name]
    x = all_bf16()
    x = x[x.isfinite() & (x.abs() <= f.max)]
    # Midpoints between neighbours and the floats beside them, where rounding decides.
    codes = torch.arange(256, dtype=torch.uint8).view(f.dtype).float()
    values = codes[codes.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    x = torch.cat([x, middle, torch.nextafter(middle, values[1:]), torch.nextafter(middle, values[:-1])])
    assert torch.equal(cast(x, f), x.to(f.dtype).view(torch.uint8))


@pytest.mark.parametrize("name", FP8)
def test_cast_saturates_and_writes_nan_as_zero(name):
    f = FORMATS[name]
    x = torch.tensor([f.max * 1.01, 1e30, float("inf"), -f.max * 2, -float("inf"), float("nan"), -0.0])
    assert decode(cast(x, f), f).tolist() == [f.max, f.max, f.max, -f.max, -f.max, 0.0, 0.0]
    assert cast(x, f)[5] == 0 and cast(x, f)[6] == 0x80  # NaN is plus zero; the sign of -0 stays


@pytest.mark.parametrize("name", FP8)
def test_every_code_survives_a_round_trip(name):
    f = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    finite = decode(codes, f).isfinite()
    assert torch.equal(cast(decode(codes, f), f)[finite], codes[finite])
    assert int((~finite).sum()) == (2 if name == "fp8_e4m3" else 8)


def test_rounding_is_to_nearest_even():
    # 17 lies between 16 and 18, the neighbours in e4m3; 16 has the even mantissa. 19 lies between 18 and 20.
    f = FORMATS["fp8_e4m3"]
    assert decode(cast(torch.tensor([17.0, 19.0, 31.66]), f), f).tolist() == [16.0, 20.0, 32.0]


def test_subnormals():
    f = FORMATS["fp8_e4m3"]
    smallest = 2.0**-9
    x = torch.tensor([smallest, smallest / 2, smallest * 0.51, 3 * smallest / 2])
    assert decode(cast(x, f), f).tolist() == [smallest, 0.0, smallest, 2 * smallest]


def test_quantise_divides_and_dequantise_multiplies():
    f = FORMATS["fp8_e4m3"]
    x, scale = torch.tensor([[1.0, 7.0], [30.0, -448.0]]), torch.tensor([0.5, 2.0])[:, None]
    stored = quantise(x, scale, f)
    assert decode(stored, f).tolist() == [[2.0, 14.0], [15.0, -224.0]]
    assert torch.equal(dequantise(stored, scale, f), x)
    assert dequantise(stored, scale, f, torch.float64).dtype == torch.float64


def test_a_16_bit_format_is_a_plain_cast():
    x = torch.tensor([1.00390625, float("nan"), float("inf")])
    assert torch.equal(quantise(x, torch.tensor(4.0), FORMATS["bfloat16"])[:1], x[:1].to(torch.bfloat16))
    assert cast(x, FORMATS["float16"])[1].isnan()


def test_token_scale():
    f = FORMATS["fp8_e4m3"]
    x = torch.tensor([[448.0, -1.0], [0.0, 0.0], [-7.0, 3.5], [float("inf"), 14.0], [float("nan"), 1e-44]])
    scale = token_scale(x, f)
    assert scale[:4].tolist() == [1.0, 1.0, 7.0 / 448, 14.0 / 448]
    assert scale[4] == 2.0**-126
    assert decode(quantise(x, scale[:, None], f), f)[3].tolist() == [448.0, 448.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_bad_scales_are_refused_with_their_value(bad):
    with pytest.raises(InvalidInput, match="k_scale must be finite and positive"):
        check_scale("k_scale", torch.tensor([1.0, bad]), (2,))
    with pytest.raises(InvalidInput, match=r"must have shape \[2\]; came \[3\]"):
        check_scale("k_scale", torch.ones(3), (2,))
