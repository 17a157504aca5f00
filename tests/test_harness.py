"""lm-eval through the paged caches: log-likelihoods are of what the cache holds, tasks run on every side."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is an extra")
from transformers_models import prompts, tiny  # noqa: E402

from octavo.errors import InvalidInput  # noqa: E402
from octavo.integrations import transformers as plugin  # noqa: E402
from octavo.quality import harness, passes  # noqa: E402


@pytest.fixture
def sides():
    model = tiny("llama", max_position_embeddings=512)
    exact, fp8 = passes.twin(model), passes.twin(model)
    handles = plugin.enable(exact, kv_cache_dtype="float32"), plugin.enable(fp8, kv_cache_dtype="fp8_e4m3")
    yield (
        model,
        passes.Side("exact", exact, lambda _: handles[0].new_cache()),
        passes.Side("fp8", fp8, lambda _: handles[1].new_cache()),
    )


@pytest.mark.parametrize("length", [3, 9, 200])
def test_tokens_go_through_the_cache(sides, length):
    model, exact, fp8 = sides
    tokens = prompts(2, length)
    with torch.no_grad():
        stock = model(tokens).logits
    torch.testing.assert_close(harness.through_cache(exact, tokens), stock, rtol=1e-4, atol=1e-4)
    rounded = harness.through_cache(fp8, tokens)
    assert 1e-3 < float((rounded - stock).norm() / stock.norm()) < 0.2  # what it reads is FP8


def test_metrics_have_their_errors():
    found = harness._metrics(
        {
            "alias": "x",
            "sample_len": 6,
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "f1,strict": 1,
            "f1_stderr,strict": "N/A",
        }
        | {"nan,none": float("nan"), "em,none": 0.0, "em_stderr,none": float("nan")}
    )
    assert found == {"acc": {"value": 0.5, "stderr": 0.1}, "f1 (strict)": {"value": 1.0, "stderr": None}} | {
        "em": {"value": 0.0, "stderr": None}
    }


def test_without_lm_eval_the_command_says_how_to_get_it(monkeypatch, tmp_path, model_folder):
    from typer.testing import CliRunner

    from octavo.cli.main import app

    monkeypatch.chdir(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else found(name, *a))
    result = CliRunner().invoke(app, ["accuracy", str(model_folder), "--quick", "--tasks", "hellaswag"])
    assert result.exit_code == 2 and "pip install lm-eval" in result.stderr


TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["Paris", "Rome"]
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{"question": f"{i}: the capital of Italy is", "answer": i % 2} for i in range(6)]
    (tmp_path / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "capitals.yaml").write_text(TASK.format(file=tmp_path / "capitals.jsonl"))
    return tmp_path


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_a_task_runs_on_every_side(sides, task_folder, model_folder, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task_folder / "cache"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder).eval()
    handle = plugin.enable(model, kv_cache_dtype="fp8_e4m3")
    side = passes.Side("fp8", model, lambda _: handle.new_cache())
    called = []
    monkeypatch.setattr(harness, "through_cache", lambda *a, stock=harness.through_cache: called.append(1) or stock(*a))
    found = harness.evaluate([side], tokenizer, ["capitals"], limit=4, include=str(task_folder))
    assert called and set(found) == {"capitals"} and 0 <= found["capitals"]["fp8"]["acc"]["value"] <= 1
    assert found["capitals"]["fp8"]["acc"]["stderr"] is not None
    with pytest.raises(InvalidInput, match="no-such-task"):
        harness.evaluate([side], tokenizer, ["no-such-task"])
