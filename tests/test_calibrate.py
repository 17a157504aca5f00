"""Calibration: scales that are what they say, errors that were measured, files that load, and `octavo calibrate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers", reason="transformers is an extra")
from transformers_models import prompts, tiny  # noqa: E402

from octavo.cli.main import app  # noqa: E402
from octavo.errors import InvalidInput, Unsupported  # noqa: E402
from octavo.formats import FORMATS, dequantise, quantise  # noqa: E402
from octavo.integrations import checkpoint_scales as checkpoint  # noqa: E402
from octavo.integrations import transformers as plugin  # noqa: E402
from octavo.quality import calibrate as quality  # noqa: E402
from octavo.quality.calibrate import Calibration, Extent, Tally, calibrate, load_scales  # noqa: E402
from octavo.quality.scaled_checkpoint import write_checkpoint  # noqa: E402

E4M3 = FORMATS["fp8_e4m3"]
TOKENS = prompts(3, 40)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield tiny("llama")


def stored_keys(model: Any, layer: int) -> torch.Tensor:
    """Keys of all windows [Hk, tokens, D], by transformers' own cache."""
    with torch.no_grad():
        caches = [model(row[None], use_cache=True)[_cache_name()] for row in TOKENS]
    return torch.cat([cache.layers[layer].keys[0] for cache in caches], 1)


def _cache_name() -> str:
    from transformers_models import keyword

    return keyword()


def rel_err(x: torch.Tensor, scale: torch.Tensor) -> float:
    return float((dequantise(quantise(x, scale, E4M3), scale, E4M3) - x).norm() / x.norm())


def test_amax_makes_the_largest_magnitude_the_largest_number(model):
    for granularity in ("tensor", "head"):
        layers = calibrate(model, TOKENS, method="amax", granularity=granularity)
        for layer in range(2):
            k = stored_keys(model, layer)
            amax = k.abs().amax((1, 2)) if granularity == "head" else k.abs().max()
            got = torch.tensor(layers[layer]["k"]["scale"])
            torch.testing.assert_close(got, amax / 448, rtol=1e-6, atol=0)
            assert layers[layer]["k"]["clipped"] == 0


def test_errors_are_of_the_scale_that_is_told(model):
    for method in quality.METHODS:
        for layer, found in enumerate(calibrate(model, TOKENS, method=method, percentile=99.0)):
            k = stored_keys(model, layer)
            assert found["k"]["rel_err"] == pytest.approx(rel_err(k, torch.tensor(found["k"]["scale"])), rel=1e-4)
            assert found["k"]["rel_err_at_1"] == pytest.approx(rel_err(k, torch.tensor(1.0)), rel=1e-4)


def test_mse_is_never_worse_than_the_others(model):
    by = {m: calibrate(model, TOKENS, method=m, granularity="head") for m in quality.METHODS}
    for side in ("k", "v"):
        for layer in range(2):
            best = by["mse"][layer][side]
            assert all(best["rel_err"] <= by[m][layer][side]["rel_err"] + 1e-12 for m in quality.METHODS)
            assert best["rel_err"] <= best["rel_err_at_1"]


def test_a_percentile_clips_what_lies_above_it():
    x = torch.randn(2, 5000, 8, generator=torch.Generator().manual_seed(0))
    x[1, 0, 0] = 1e4
    extent = Extent.of(x[:, :2500]) + Extent.of(x[:, 2500:])
    for percent in (50.0, 99.0, 99.9):
        exact = x.abs().flatten(1).quantile(percent / 100, dim=1)
        got = extent.percentile(percent)
        assert bool(((got >= exact * 0.999) & (got <= exact * 2 ** (1 / 32) * 1.001)).all())
    assert torch.equal(extent.percentile(100.0), extent.amax)
    tally = Tally.of(extent.percentile(99.0)[None] / E4M3.max)
    tally.add(x, E4M3)
    assert 0.005 < tally.clipped(torch.zeros(2, dtype=torch.int64)) < 0.0101
    merged = extent.merged()
    assert float(merged.amax) == 1e4 and int(merged.counts.sum()) == x.numel()


def test_zeros_have_a_scale(model):
    extent = Extent.of(torch.zeros(2, 4, 8))
    scales = quality._candidates(extent, E4M3, "head", 99.9)
    assert bool((scales > 0).all()) and bool(scales.isfinite().all())


def test_one_is_as_good_only_where_it_is():
    def calibration(rel_err_at_1: float, clipped_at_1: float) -> Calibration:
        side = {"scale": 0.1, "amax": 40.0, "rel_err": 0.026, "clipped": 0.0}
        side |= {"rel_err_at_1": rel_err_at_1, "clipped_at_1": clipped_at_1}
        return Calibration("fp8_e4m3", "tensor", "mse", 99.99, "m", {}, [{"layer": 0, "k": side, "v": side}])

    assert calibration(0.0265, 0.0).one_is_as_good
    assert not calibration(0.03, 0.0).one_is_as_good and not calibration(0.026, 1e-6).one_is_as_good


def test_the_layer_that_a_bad_scale_ruins_is_proposed_for_16_bits():
    model = tiny("llama", num_hidden_layers=4)
    layers = calibrate(model, TOKENS)
    layers[2]["v"]["scale"] = 1e-4  # clips nearly everything
    seen: list[int] = []
    found = quality.sensitivity(model, TOKENS, layers, "fp8_e4m3", seen.append)
    assert sum(seen) == TOKENS.numel() * 5
    losses = [one["kl"]["value"] for one in found]
    assert max(losses) == losses[2] > 10 * sorted(losses)[-2] and min(losses) > 0
    result = Calibration("fp8_e4m3", "tensor", "mse", 99.99, "m", {}, layers, found)
    assert result.sixteen_bit_layers == [2]
    for one in found:
        one["kl"]["value"] = 1.0
    assert result.sixteen_bit_layers == []


def test_windowed_layers_are_seen_whole():
    model = tiny("gemma2")  # its first layer keeps 6 tokens
    for layer in quality.keys_and_values(model, TOKENS[:1]).__next__():
        assert layer[0].shape[1] == layer[1].shape[1] == 40


def test_latent_attention_is_refused():
    with pytest.raises(Unsupported, match="latent"):
        calibrate(tiny("deepseek_v3"), TOKENS)


def written(model: Any, path: Path, granularity: str = "head") -> Calibration:
    found = Calibration("fp8_e4m3", granularity, "amax", 99.99, "m", {}, [])
    found.layers = calibrate(model, TOKENS, method="amax", granularity=granularity)
    path.write_text(json.dumps(found.as_dict()))
    return found


@pytest.mark.parametrize("granularity", quality.GRANULARITIES)
def test_a_file_of_scales_enables_a_model(model, tmp_path, granularity):
    found = written(model, tmp_path / "scales.json", granularity)
    k, v = load_scales(tmp_path / "scales.json")
    handle = plugin.enable(model, scale_granularity=granularity, k_scale=k, v_scale=v)
    try:
        with torch.no_grad():
            model(TOKENS)
        for layer, cache in enumerate(handle.pool.caches):
            assert torch.equal(cache.k_scale, torch.tensor(found.layers[layer]["k"]["scale"]))
            assert torch.equal(cache.v_scale, torch.tensor(found.layers[layer]["v"]["scale"]))
    finally:
        plugin.disable(model)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "scales.json"),
        ("[]", "scales.json"),
        ('{"schema": 2, "layers": [1]}', "schema 1"),
        ('{"schema": 1, "layers": []}', "schema 1"),
        ('{"schema": 1, "layers": [{"k": {"scale": 1.0}}]}', "layer 0 must have a v scale"),
        ('{"schema": 1, "layers": [{"k": {"scale": "wide"}}]}', "layer 0 must have a k scale"),
        ('{"schema": 1, "layers": [{"k": {"scale": 0.0}, "v": {"scale": 1.0}}]}', "finite and positive"),
        ('{"schema": 1, "layers": [{"k": {"scale": [1.0, NaN]}, "v": {"scale": 1.0}}]}', "finite and positive"),
    ],
)
def test_a_bad_file_of_scales_is_refused_in_one_line(tmp_path, content, why):
    (tmp_path / "scales.json").write_text(content)
    with pytest.raises(InvalidInput, match=why):
        load_scales(tmp_path / "scales.json")


@pytest.mark.parametrize("granularity", quality.GRANULARITIES)
def test_a_checkpoint_declares_its_scales(model_folder, tmp_path, granularity):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model_folder).eval()
    found = written(loaded, tmp_path / "scales.json", granularity)
    out = tmp_path / "scaled"
    write_checkpoint(found, model_folder, out)
    scales = checkpoint.read(out, None, 2, "auto")
    assert scales.declared is not None and scales.declared.reasons == () and scales.granularity == granularity
    for layer in range(2):
        assert torch.equal(scales.k[layer], torch.tensor(found.layers[layer]["k"]["scale"]))
        assert torch.equal(scales.v[layer], torch.tensor(found.layers[layer]["v"]["scale"]))
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["model.layers.1.self_attn.v_scale"] == "kv_cache_scales.safetensors"
    assert index["model.layers.1.self_attn.v_proj.weight"] == "model.safetensors"
    assert (out / "model.safetensors").read_bytes() == (model_folder / "model.safetensors").read_bytes()
    assert "quantization_config" not in json.loads((model_folder / "config.json").read_text())


def test_a_checkpoint_appears_whole_or_not_at_all(model, model_folder, tmp_path, monkeypatch):
    found = written(model, tmp_path / "scales.json")
    monkeypatch.setattr("octavo.quality.scaled_checkpoint._link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    (tmp_path / "into").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(found, model_folder, tmp_path / "into" / "scaled")
    assert list((tmp_path / "into").iterdir()) == []


def test_checkpoints_that_cannot_hold_the_scales_are_refused(model, model_folder, tmp_path):
    found = written(model, tmp_path / "scales.json")
    with pytest.raises(InvalidInput, match="must not exist"):
        write_checkpoint(found, model_folder, tmp_path)
    with pytest.raises(InvalidInput, match="safetensors"):
        write_checkpoint(found, tmp_path, tmp_path / "out")
    found.layers.append({**found.layers[0], "layer": 7})
    with pytest.raises(InvalidInput, match=r"none of layers \[7\]"):
        write_checkpoint(found, model_folder, tmp_path / "out")
    found.kv_dtype = "fp8_e5m2"
    with pytest.raises(InvalidInput, match="fp8_e4m3"):
        write_checkpoint(found, model_folder, tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes((model_folder / name).read_bytes())
    config = json.loads((other / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (other / "config.json").write_text(json.dumps(config))
    found.kv_dtype, found.layers = "fp8_e4m3", found.layers[:2]
    with pytest.raises(InvalidInput, match="gptq"):
        write_checkpoint(found, other, tmp_path / "out")


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("--windows", 2, "--length", 64)
    code, out, err = run(model_folder, *small, "--scale-granularity", "head", "--checkpoint", "scaled", "--json")
    assert code == 0 and "Calibrating" in err
    found = json.loads(out)
    assert found == json.loads(Path("scales.json").read_text())
    assert [len(layer["k"]["scale"]) for layer in found["layers"]] == [2, 2] and len(found["sensitivity"]) == 2
    assert found["text"]["windows"] == 2 and found["one_is_as_good"] in (True, False)
    assert checkpoint.read(Path("scaled"), None, 2, "auto").granularity == "head"
    code, out, _ = run(model_folder, *small, "--no-layers", "--out", "again.json")
    assert code == 0 and "scale per tensor, mse" in out and "wrote again.json" in out
    assert json.loads(Path("again.json").read_text())["sensitivity"] == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["./none"], "is not a folder"),
        (["--method", "best"], "--method must be one of mse, percentile, amax"),
        (["--scale-granularity", "token_head"], "--scale-granularity must be one of tensor, head"),
        (["--kv-cache-dtype", "bf16"], "--kv-cache-dtype must be one of"),
        (["--percentile", "0"], "--percentile must be in"),
        (["--out", "none/scales.json"], "does not"),
        (["--device", "tpu"], "--device must be"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert code == 2 and why in err and out == "" and len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_calibration_leaves_no_file(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quality, "keys_and_values", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    code, _, err = run(model_folder, "--windows", 2, "--length", 64)
    assert code == 130 and "no scales were written" in err and list(tmp_path.iterdir()) == []


def test_a_head_has_a_scale_of_its_own_where_it_is_the_only_one(tmp_path):
    model = tiny("llama", num_key_value_heads=1)
    written(model, tmp_path / "scales.json", "head")
    k, v = load_scales(tmp_path / "scales.json")
    assert [scale.shape for scale in (*k, *v)] == [(1,)] * 4
    assert quality.made_for(tmp_path / "scales.json", (k, v)) == ("fp8_e4m3", "head")


def test_keys_that_are_not_finite_are_refused():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(InvalidInput, match="must be finite; values of layer 1 are not"):
        calibrate(model, TOKENS)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--kv-cache-dtype", "fp8_e5m2", "--checkpoint", "out"], "compressed-tensors holds scales of fp8_e4m3"),
        (["--checkpoint", "scales.json"], "--checkpoint must be another place than --out"),
        (["--length", "300"], "context holds 256 tokens; came 300"),
    ],
)
def test_what_cannot_be_is_refused_before_calibrating(model_folder, tmp_path, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    before = list(tmp_path.iterdir())
    code, out, err = run(model_folder, "--windows", 1, "--length", 32, *arguments)
    assert code == 2 and why in err and out == "" and "Calibrating" not in err
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.safetensors.index.json", {}, "must hold a weight_map"),
        ("model.safetensors.index.json", {"weight_map": {"lm_head.weight": "x"}}, r"none of layers \[0, 1\]"),
        ("config.json", {"quantization_config": ["gptq"]}, "gptq"),
    ],
)
def test_an_odd_checkpoint_is_one_line(model, model_folder, tmp_path, name, content, why):
    found = written(model, tmp_path / "scales.json")
    source = tmp_path / "source"
    source.mkdir()
    for file in ("config.json", "model.safetensors"):
        (source / file).write_bytes((model_folder / file).read_bytes())
    (source / name).write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=why):
        write_checkpoint(found, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_scale_that_no_float_holds_is_one_line(tmp_path):
    (tmp_path / "scales.json").write_text(f'{{"schema": 1, "layers": [{{"k": {{"scale": {10**400}}}}}]}}')
    with pytest.raises(InvalidInput, match="layer 0 must have a k scale"):
        load_scales(tmp_path / "scales.json")


def test_scales_are_kept_where_the_checkpoint_is_not_written(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("--windows", 1, "--length", 32, "--no-layers", "--checkpoint", "out")
    for stop, code, why in (
        (OSError(28, "No space left on device"), 2, "out must be writable; came No space left on device"),
        (KeyboardInterrupt(), 130, "scales.json has the scales, out was not written"),
    ):

        def link(*_: Any, stop: BaseException = stop) -> None:
            raise stop

        monkeypatch.setattr("octavo.quality.scaled_checkpoint._link", link)
        Path("scales.json").unlink(missing_ok=True)
        found, out, err = run(model_folder, *small)
        assert found == code and out == "" and why in err and "no scales" not in err
        assert load_scales("scales.json") and [path.name for path in tmp_path.iterdir()] == ["scales.json"]
