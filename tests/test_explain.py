"""`octavo explain` as a user types it: what it prints, as tables and JSON, its exit codes and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.choose import choose
from octavo.cli.main import COMMANDS, app
from octavo.configs import KNOWN_MODELS
from octavo.device import KNOWN
from octavo.plan_text import layer_ranges
from octavo.spec import AttentionSpec

PUBLIC_FAILURE = "--model llama-3.1-8b --device b200 --tp 8 --kv-cache-dtype fp8_e4m3 --page-size 64"


@pytest.fixture(autouse=True)
def no_backend_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_BACKEND", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def explain(arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `octavo explain`; an exception that is not an exit is a failure."""
    result = CliRunner().invoke(app, ["explain", *arguments.split()])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_public_failure_has_a_plan_for_both_phases() -> None:
    code, out, _ = explain(PUBLIC_FAILURE)
    assert code == 0
    plan = choose(AttentionSpec(4, 1, 128), "b200")
    for line in plan.plan_lines(98):
        assert f"  {line}" in out.splitlines()
    for phase in ("prefill", "decode"):
        assert any(line.split()[:2] == [phase, plan.phase(phase).backend] for line in out.splitlines())
    assert "needs Hopper (sm_90); found b200 (sm_100)" in out


def test_a_named_backend_that_cannot_exits_2_with_all_its_reasons() -> None:
    code, out, _ = explain(f"{PUBLIC_FAILURE} --backend gluon")
    assert code == 2
    gluon = choose(AttentionSpec(4, 1, 128), "b200")
    for phase in ("prefill", "decode"):
        for reason in gluon.phase(phase).verdicts["gluon"].reasons:
            assert reason in out
    assert "nearest supported" in out and "Traceback" not in out


@pytest.mark.parametrize("model", KNOWN_MODELS)
@pytest.mark.parametrize("device", KNOWN)
def test_every_known_model_on_every_device(model: str, device: str) -> None:
    code, out, _ = explain(f"--model {model} --device {device} --kv-cache-dtype fp8")
    assert code == 0
    assert "None" not in out
    assert max(len(line) for line in out.splitlines()) <= 100


def test_layout_is_leaf_where_it_can_be_and_says_why_not() -> None:
    assert "layout leaf (FP8 as the tensor cores read it)" in explain(PUBLIC_FAILURE)[1]
    flat = " ".join(explain("--model llama-3.1-8b --device h200 --kv-cache-dtype fp8 --page-size 16")[1].split())
    assert "layout nhd (layout leaf needs a page_size that is a multiple of 32; it is 16)" in flat
    assert "layout nhd (layout leaf holds FP8 only" in explain("--model llama-3.1-8b --device h200")[1]
    assert "layout hnd (as asked)" in explain(f"{PUBLIC_FAILURE} --layout hnd")[1]


def test_the_size_of_the_cache_by_hand() -> None:
    code, out, _ = explain(f"{PUBLIC_FAILURE} --memory 1 --json")
    cache = json.loads(out)["cache"]
    assert code == 0
    assert cache["bytes_per_token"] == 32 * 256 and cache["bytes_per_token_16_bit"] == 32 * 512
    assert cache["tokens"] == 10**9 // (8192 * 64) * 64 and cache["tokens_16_bit"] == 10**9 // (16384 * 64) * 64
    by_token = json.loads(explain(f"{PUBLIC_FAILURE} --scale-granularity token_head --json")[1])["cache"]
    assert by_token["bytes_per_token"] == 32 * (256 + 8)
    indexed = json.loads(explain("--model deepseek-v3.2 --device h200 --kv-cache-dtype fp8 --json")[1])["cache"]
    assert indexed["bytes_per_token"] == 61 * (576 + 132) and indexed["bytes_per_token_16_bit"] == 61 * (1152 + 132)


def test_json_is_whole_also_when_it_is_a_refusal() -> None:
    code, out, _ = explain("--model gpt-oss-120b --device a100 --kv-cache-dtype fp8 --page-size 64 --json")
    answer = json.loads(out)
    assert code == 0 and [kind["name"] for kind in answer["kinds"]] == ["sliding_window", "full"]
    assert answer["kinds"][0]["decode"]["verdicts"]["gluon"]["verdict"] == "cannot"
    assert AttentionSpec(**answer["kinds"][0]["spec"]).window == 128
    code, out, _ = explain(f"{PUBLIC_FAILURE} --backend gluon --json")
    kind = json.loads(out)["kinds"][0]
    assert code == 2 and not kind["supported"] and len(kind["reasons"]) >= 1 and kind["nearest"]


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = explain(f"--model {tmp_path} --device l40s --kv-cache-dtype fp8 --query-len 4")
    assert code == 0
    assert "8 query and 8 KV heads of 64" in out and "full: 1 layer (0)" in out and "4 query rows" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model nobody --device h200", "llama-3.1-8b"),
        ("--model llama-3.1-8b --device h900", "rtx5090"),
        ("--model llama-3.1-8b --device h200 --backend cutlass", "gluon, triton, reference"),
        ("--model llama-3.1-8b --device h200 --layout nchw", "leaf, nhd, hnd"),
        ("--model llama-3.1-8b --device h200 --kv-cache-dtype int4", "fp8_e4m3"),
        ("--model llama-3.1-8b --device h200 --scale-granularity block", "token_head"),
        ("--model llama-3.1-8b --device h200 --tp 3", "tp 3"),
        ("--model llama-3.1-8b --device h200 --page-size 0", "page_size"),
        ("--model llama-3.1-8b --device h200 --memory -1", "memory"),
        ("--model llama-3.1-8b --device h200 --query-len 0", "max_query_len"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: str, words: str) -> None:
    code, out, err = explain(arguments)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("octavo: ") and len(err.splitlines()) == 1


def test_it_loads_no_torch_and_nothing_optional() -> None:
    code = (
        "import sys; from octavo.cli.main import app\n"
        f"try: app(['explain', *{PUBLIC_FAILURE.split()!r}])\n"
        "except SystemExit as leave: assert not leave.code\n"
        "print(sorted({'torch', 'triton', 'transformers', 'matplotlib', 'jinja2'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_help_lists_every_command_without_importing_one() -> None:
    code = (
        "import sys; from octavo.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as leave: assert not leave.code\n"
        "print([name for name in sys.modules if name.startswith('octavo.cli.')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "['octavo.cli.main']"
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_list_is_there(name: str) -> None:
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for model in KNOWN_MODELS:
        out = explain(f"--model {model} --device b200 --kv-cache-dtype fp8 --page-size 16")[1]
        assert max(len(line) for line in out.splitlines()) <= min(columns, 100), model


def test_layer_ranges() -> None:
    assert layer_ranges((0,)) == "0"
    assert layer_ranges((3, 4, 5)) == "3-5"
    assert layer_ranges((1, 3, 5)) == "1-5 by 2"
    assert layer_ranges((0, 1, 2, 3, 4, 6, 7)) == "0, 1, 2, 3, 4, ... 7"
