"""`octavo bench`: time kernels over models' shapes, checked against fp64 first; records as JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInput
from .progress import bar, for_messages, is_number

if TYPE_CHECKING:
    from ..bench.cases import Case
    from ..bench.indexer_cases import IndexerCase
    from ..bench.records import Record


def bench(
    out: Annotated[Path, typer.Option(help="JSONL file that records are appended to; those there are not run again.")],
    matrix: Annotated[bool, typer.Option(help="All models, tp 1 and 8, concurrency 16, 64 and 512.")] = False,
    peers: Annotated[bool, typer.Option(help="Other libraries too, those that are installed.")] = False,
    models: Annotated[str | None, typer.Option(help="Known names or folders, with commas.")] = None,
    tp: Annotated[str | None, typer.Option(help="Ranks that heads are divided over, with commas.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Sequences of a decode step, with commas.")] = None,
    context: Annotated[str | None, typer.Option(help="Their tokens, and tokens of a prompt, with commas.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="fp8_e4m3, fp8_e5m2, bfloat16, with commas.")] = None,
    ops: Annotated[str | None, typer.Option(help="decode, verify, prefill, append, with commas.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="vllm or sglang: steps of the whole engine; these alone where nothing is selected."),
    ] = None,
    site: Annotated[Path | None, typer.Option(help="A folder with the engine's packages.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds that a cell is repeated for.")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="Each new record as a line on stdout.")] = False,
) -> None:
    """Measure decode, verify, prefill and append at the shapes of models: accuracy on sampled rows, then time.

    Every record is flushed: interrupt it (exit code 130) and run it again to go on. Without a GPU the reference runs
    tiny cases, which shows that it works, not how fast octavo is. Exit code 1 if a result of ours is wrong or fails.
    """
    from ..bench.engines import steps

    progress = for_messages()
    asked = {
        "models": _words(models),
        "tps": _numbers("--tp", tp),
        "concurrencies": _numbers("--concurrency", concurrency),
        "contexts": _numbers("--context", context),
        "kv_dtypes": _words(kv_cache_dtype),
        "ops": _words(ops),
    }
    if engine is not None:
        steps.check(engine, site)
        if not matrix and not any(asked.values()):
            steps.measure(engine, out, site)
            return
    run = _Run(out, asked, matrix, peers, device, seconds, progress)
    wrong = 0
    try:
        for record in run.records():
            wrong += _is_wrong(record)
            if as_json:
                typer.echo(record.to_json())
            else:
                progress.print(line(record), markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        progress.print(f"octavo: interrupted; {run.done} of {run.total} cells are in {out}, run it again to go on")
        raise typer.Exit(130) from None
    progress.print(f"{run.done} of {run.total} cells are in {out}")
    if engine is not None:
        steps.measure(engine, out, site)
    if wrong:
        progress.print(f"octavo: {wrong} results of octavo's are wrong or failed")
        raise typer.Exit(1)


class _Run:
    """One run of the command: what is to be measured, and how far it is."""

    def __init__(
        self,
        out: Path,
        asked: dict[str, tuple[Any, ...] | None],
        matrix: bool,
        peers: bool,
        device: str,
        seconds: float,
        progress: Any,
    ) -> None:
        from ..bench import matrix as cells
        from ..bench.records import RecordFile
        from ..device import Device
        from ..spec import dtype_name
        from .target import target_device

        self.device, self.seconds, self.progress = target_device(device), seconds, progress
        facts = Device.of(self.device)
        on_cpu = facts.arch == "cpu"
        chosen = cells.TINY if on_cpu else cells.WHOLE if matrix else cells.Selection()
        given = {name: values for name, values in asked.items() if values is not None}
        if "contexts" in given:
            given["prompts"] = given["contexts"]
        if "kv_dtypes" in given:
            given["kv_dtypes"] = tuple(dtype_name(name) for name in given["kv_dtypes"])
        selection = replace(chosen, **given)
        memory = None if on_cpu else facts.memory_gb * 1e9
        tokens = cells.TINY_TOKENS if on_cpu else cells.PREFILL_TOKENS
        self.cells = [(case, cells.backends_of(case, facts, peers)) for case in cells.cases(selection, memory, tokens)]
        self.total = sum(len(backends) for _, backends in self.cells)
        if not self.total:
            raise InvalidInput(
                "there must be something to measure: a model whose attention is not latent, an op, a cell that fits in "
                f"{cells.LARGEST_SHARE:.0%} of the device's memory",
                "none",
            )
        self.file = RecordFile(out)
        self.there = self.file.done()
        self.done = 0

    def records(self) -> Iterator[Record]:
        """New records, each written before it is yielded."""
        from ..bench.matrix import compare
        from ..bench.measure import of_run

        todo = [(case, self._missing(case, backends)) for case, backends in self.cells]
        todo = [(case, backends) for case, backends in todo if backends]
        self.done = self.total - sum(len(backends) for _, backends in todo)
        if not todo:
            return
        if self.device.type == "cpu":
            words = "no GPU here: the reference on tiny cases, which shows that it works, not how fast octavo is"
            self.progress.print(words, soft_wrap=True)
        with self.file, bar(self.progress, "Measuring", self.total - self.done) as advance:
            common = of_run(self.device, self.seconds)
            for case, backends in todo:
                for record in compare(case, backends, self.device, **common):
                    self.file.write(record)
                    self.done += 1
                    advance()
                    yield record
                _free(self.device)

    def _missing(self, case: Case | IndexerCase, backends: list[str]) -> list[str]:
        from ..bench.matrix import backend_name

        return [b for b in backends if (case.name, backend_name(case, b, self.device)) not in self.there]


def _free(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _is_wrong(record: Record) -> bool:
    """Whether a backend of octavo's gave a wrong result, or none."""
    from ..backends import BY_NAME
    from ..bench.measure import FAILED

    return record.backend in BY_NAME and (record.error or "").startswith(("wrong", FAILED))


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    words = _words(text)
    if words is None:
        return None
    if not words or not all(is_number(word) and int(word) for word in words):
        raise InvalidInput(f"{option} must be positive numbers with commas between them", repr(text)[:80])
    return tuple(dict.fromkeys(int(word) for word in words))


def line(record: Record) -> str:
    """One record in words: what it took, the rate that bounds it as a share of its ceiling, and its error."""
    name = f"{record.case:52} {record.backend:15}"
    if record.us is None:
        return f"{name} {(record.error or '').splitlines()[0][:100]}"
    error = "" if record.rel_err is None else f"error {record.rel_err:.1e} (bf16 {record.rel_err_bf16 or 0:.1e})"
    return f"{name} {record.us:10.1f} us  {speed(record):24} {error}"


def speed(record: Record) -> str:
    """The rate that bounds a record's op, of a memory-bound one with the share of the run's copy, where measured."""
    from ..bench.records import COMPUTE_BOUND, ceiling, rate

    value, unit = rate(record)
    if record.op in COMPUTE_BOUND:
        return f"{value:.0f} {unit}"
    copy = ceiling(record)
    return f"{value:.2f} {unit}" + (f", {value / copy:.2f} of copy" if copy else "")
