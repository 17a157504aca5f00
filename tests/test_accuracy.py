"""Accuracy: variants beside the 16-bit side, pass keys where they are said to be, and `octavo accuracy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers", reason="transformers is an extra")

from transformers_models import FAMILY_NAMES, save_with_letters, tiny  # noqa: E402

from octavo.cli import accuracy as command  # noqa: E402
from octavo.cli.main import app  # noqa: E402
from octavo.errors import InvalidInput  # noqa: E402
from octavo.quality import harness, passes, retrieval  # noqa: E402
from octavo.quality.accuracy import Subject, Variant, from_file, variants  # noqa: E402
from octavo.quality.load import LoadedModel  # noqa: E402


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["accuracy", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OCTAVO_BACKEND", raising=False)


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_folder)


@pytest.mark.parametrize("context", [160, 300])
def test_a_prompt_has_its_length_its_key_at_its_depth_and_ends_with_it(tokenizer, context):
    tokens, answers, depths = retrieval.prompts(tokenizer, context, 5)
    assert tokens.shape == (5, context) and depths == [0.0, 0.25, 0.5, 0.75, 1.0]
    keys = set()
    for row, answer, depth in zip(tokens, answers, depths, strict=True):
        text = tokenizer.decode(row)
        key = tokenizer.decode(row[-answer:]).strip()
        keys.add(key)
        assert len(key) == retrieval.DIGITS and key.isdigit()
        assert text.endswith(f"{retrieval.QUESTION} {key}") and text.count(key) == 3
        at = text.index("The pass key is ")
        room = len(text) - len(retrieval.NEEDLE.format(key=key)) - len(retrieval.QUESTION) - answer
        assert at == round(depth * room)  # a token is a letter here
    assert len(keys) == 5
    assert torch.equal(retrieval.prompts(tokenizer, context, 5)[0], tokens)


def test_a_context_too_short_for_the_question_is_refused(tokenizer):
    with pytest.raises(InvalidInput, match="at least"):
        retrieval.prompts(tokenizer, 64, 1)


def test_a_key_counts_only_if_every_token_of_it_comes_first(tokenizer, monkeypatch):
    answer = retrieval.prompts(tokenizer, 200, 4)[1][0]

    def scored(sides, tokens, **_):
        calls.append(len(tokens))
        top = torch.ones(len(tokens), tokens.shape[1] - 1, dtype=torch.bool)
        missed = top.clone()
        missed[::2, -answer] = False
        before = top.clone()
        before[:, :-answer] = False  # what comes before the answer does not matter
        return passes.Scores(top={"16-bit": before, "fp8": missed})

    calls: list[int] = []
    monkeypatch.setattr(passes, "score_windows", scored)
    sides = [passes.Side("16-bit", None, lambda _: None), passes.Side("fp8", None, lambda _: None)]
    (found,) = retrieval.measure(sides, tokenizer, [200], 4)
    assert found["right"] == {"16-bit": [True] * 4, "fp8": [False, True, False, True]}
    assert found["figures"]["fp8"]["right"]["value"] == 0.5 and found["figures"]["fp8"]["change"]["value"] == -0.5
    assert calls == [4], "trials go together"
    assert found["figures"]["16-bit"] == {"right": {"value": 1.0, "low": 1.0, "high": 1.0}}


def test_variants_are_every_combination_with_the_scales_that_fit(tmp_path):
    asked: list[tuple[str, str]] = []

    def scales(kv_dtype: str, granularity: str) -> tuple[Any, Any]:
        asked.append((kv_dtype, granularity))
        return [1], [2]

    made = variants(["fp8_e4m3", "fp8_e5m2"], ["tensor", "token_head"], ["fast", "exact"], scales)
    assert len(made) == len(set(made)) == 8 and asked == [("fp8_e4m3", "tensor"), ("fp8_e5m2", "tensor")]
    assert {v.k_scale is None for v in made if v.granularity == "token_head"} == {True}
    assert Variant("fp8_e4m3", "tensor", "fast").name == "fp8_e4m3 tensor fast"
    side = {"scale": [0.5, 0.25]}
    (tmp_path / "s.json").write_text(json.dumps({"schema": 1, "layers": [{"k": side, "v": side}]}))
    of = from_file(tmp_path / "s.json")
    assert of("fp8_e4m3", "tensor") is None and torch.equal(of("fp8_e4m3", "head")[0][0], torch.tensor([0.5, 0.25]))


def test_json_has_every_figure(model_folder):
    code, out, err = run(model_folder, "--quick", "--contexts", 200, "--json", "--kv-cache-dtype", "fp8,fp8_e5m2")
    assert code == 0 and "Scoring text" in err
    found = json.loads(out)
    assert found == json.loads(Path("accuracy.json").read_text())
    names = [v["name"] for v in found["variants"]]
    assert len(names) == 6 and list(found["sides"]) == ["16-bit", *names]
    assert found["text"]["windows"] == 2 and found["retrieval"][0]["context"] == 200
    for name in names:
        side = found["sides"][name]
        assert side["kl"]["low"] <= side["kl"]["value"] <= side["kl"]["high"] and 0 < side["kl"]["value"] < 0.1
        assert 0.5 < side["same_top"]["value"] <= 1 and side["perplexity"]["low"] is not None
        assert [len(layer["heads"]["k_rel_err"]) for layer in found["layers"][name]] == [2, 2]
    # e5m2 has one bit of precision less than e4m3: twice the error.
    error = {n: found["layers"][n][0]["k_rel_err"] for n in names}
    ratio = error["fp8_e5m2 tensor exact"] / error["fp8_e4m3 tensor exact"]
    assert 1.8 < ratio < 2.1
    scaled = {v["name"]: v["scaled"] for v in found["variants"]}
    assert scaled["fp8_e4m3 head exact"] and not scaled["fp8_e4m3 token_head exact"]


def test_what_a_person_sees(model_folder):
    code, out, _ = run(model_folder, "--quick", "--contexts", 0, "--scale-granularity", "tensor", "--scales", "none")
    assert code == 0
    assert "fp8_e4m3 tensor exact" in out and "same top-1" in out and "wrote accuracy.json" in out
    assert "Pass keys" not in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["./none"], "is not a folder"),
        (["--kv-cache-dtype", "fp8,bf16"], "--kv-cache-dtype must be one of"),
        (["--scale-granularity", "page"], "--scale-granularity must be one of"),
        (["--precision", "fast,best"], "--precision must be one of"),
        (["--contexts", "1k"], "--contexts must be numbers"),
        (["--contexts", "\u00b2"], "--contexts must be numbers"),
        (["--contexts", "9" * 5000], "--contexts must be numbers"),
        (["--scales", "none.json"], "none.json"),
        (["--data", "none.txt"], "not there"),
        (["--out", "none/a.json"], "does not"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, why):
    code, out, err = run("--quick", *arguments)
    assert code == 2 and why in err and out == "" and len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_model_holds_is_refused(model_folder):
    code, _, err = run(model_folder, "--quick", "--contexts", 512)
    assert code == 2 and "holds 256 tokens; came 512" in err and not Path("accuracy.json").exists()
    assert "Calibrating" not in err
    code, _, err = run(model_folder, "--length", 300)
    assert code == 2 and "holds 256 tokens; came 300" in err and "Calibrating" not in err
    code, _, err = run(model_folder, "--quick", "--contexts", 10)
    assert code == 2 and "at least" in err and "Scoring" not in err


def test_contexts_are_powers_of_two_up_to_the_models():
    assert command._contexts(8192, "cpu") == (512, 1024, 2048)
    assert command._contexts(8192, "cuda") == (512, 1024, 2048, 4096, 8192)
    assert command._contexts(300, "cuda") == (300,)


SMALL = ("--quick", "--windows", 1, "--length", 32, "--contexts", 0)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_is_measured_as_it_is(tmp_path, family):
    save_with_letters(tmp_path / "m")
    tiny(family, vocab_size=259).save_pretrained(tmp_path / "m")
    code, out, err = run(tmp_path / "m", *SMALL, "--json")
    assert code == 0 and "pass keys" not in err
    latent = family == "deepseek_v3"
    found = {v["scale_granularity"]: v["scaled"] for v in json.loads(out)["variants"]}
    assert found == (
        {"tensor": False, "token_head": False} if latent else dict(tensor=True, head=True, token_head=False)
    )
    assert ("its scale is 1.0" in err) == latent and ("Calibrating" in err) != latent


@pytest.mark.parametrize(("dtype", "own"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_the_16_bit_side_is_the_models_own(dtype, own):
    loaded = LoadedModel(tiny("llama").to(getattr(torch, dtype)), None, "m", "here")
    subject = Subject(loaded, [Variant("fp8_e4m3", "tensor", "exact")], torch.device("cpu"))
    assert subject.dtype == "float32" and {spec.kv_dtype for spec in subject.sixteen.specs} == {own}


def test_scales_are_used_for_what_they_were_made_for(tmp_path, model_folder):
    def file(name: str, scale: Any, **made: Any) -> Path:
        side = {"scale": scale}
        content = {"schema": 1, "layers": [{"k": side, "v": side}] * 2, **made}
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path / name

    e5m2 = from_file(file("a.json", 0.5, kv_cache_dtype="fp8_e5m2", scale_granularity="tensor"))
    assert e5m2("fp8_e5m2", "tensor") and e5m2("fp8_e4m3", "tensor") is None
    one_head = from_file(file("b.json", 0.5, kv_cache_dtype="fp8_e4m3", scale_granularity="head"))
    assert one_head("fp8_e4m3", "head") and one_head("fp8_e4m3", "tensor") is None
    of = file("c.json", [0.5, 0.25], kv_cache_dtype="fp8_e4m3", scale_granularity="head")
    code, _, err = run(model_folder, *SMALL, "--scales", of, "--json")
    assert code == 0 and "scale 1.0: fp8_e4m3 tensor exact" in " ".join(err.split())


def test_names_are_never_markup(tmp_path, capfd):
    folder = save_with_letters(tmp_path / "m[" / "b] [red]x")
    code, out, err = run(folder, *SMALL, "--out", tmp_path / "[i]a.json")
    assert code == 0 and "m[/b] [red]x" in err and "[red]x" in out and (tmp_path / "[i]a.json").exists()


def test_one_window_has_no_interval(model_folder):
    code, out, _ = run(model_folder, *SMALL)
    found = json.loads(Path("accuracy.json").read_text())
    assert code == 0 and "no intervals of one window" in out and " to " not in out.split("Error of")[0]
    assert all(side["perplexity"]["low"] is None for side in found["sides"].values())


@pytest.mark.parametrize("stop", [InvalidInput("lm-eval cannot run x", "no network"), KeyboardInterrupt()])
def test_what_was_measured_before_lm_eval_is_kept(model_folder, monkeypatch, stop):
    def evaluate(*_: Any) -> None:
        raise stop

    find = command.importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda n, *a: n == "lm_eval" or find(n, *a))
    monkeypatch.setattr(harness, "known_tasks", lambda tasks: None)
    monkeypatch.setattr(harness, "evaluate", evaluate)
    code, out, err = run(model_folder, *SMALL, "--tasks", "x")
    assert code == (130 if isinstance(stop, KeyboardInterrupt) else 2) and out == ""
    assert "has all" in err and json.loads(Path("accuracy.json").read_text())["sides"]


def test_default_contexts_are_those_that_hold_the_question(tmp_path):
    save_with_letters(tmp_path / "m", max_position_embeddings=64)
    code, out, _ = run(tmp_path / "m", "--windows", 1, "--length", 32, "--json")
    assert code == 0 and json.loads(out)["retrieval"] == []
