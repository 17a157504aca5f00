"""`octavo bench`: time kernels over models' shapes, checked against fp64 first; records as JSON lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    seconds: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds that a cell is repeated for; 0.1, of the matrix 0.02 unless told."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that compile first; 0: none. With --matrix one a processor unless told."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Each new record as a line on stdout.")] = False,
) -> None:
    """Measure decode, verify, prefill and append at the shapes of models: accuracy on sampled rows, then time.

    Every record is flushed: interrupt it (exit code 130) and run it again to go on. Without a GPU the reference runs
    tiny cases, which shows that it works, not how fast octavo is. Exit code 1 if a result of ours is wrong or fails.
    """
    from ..bench.engines import steps
    from ..bench.measure import DeviceLost

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
    how = _How(matrix, peers, device, *_defaults(matrix, device, seconds, jobs))
    run = _Run(out, asked, how, progress)
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
    except DeviceLost as lost:
        where = f"{lost.record.case} on {lost.record.backend}"
        progress.print(f"octavo: the device was lost in {where}, which is recorded as such: {lost}", soft_wrap=True)
        progress.print(f"octavo: {run.done} of {run.total} cells are in {out}, run it again to go on")
        raise typer.Exit(1) from None
    progress.print(f"{run.done} of {run.total} cells are in {out}")
    if engine is not None:
        steps.measure(engine, out, site)
    if wrong:
        progress.print(f"octavo: {wrong} results of octavo's are wrong or failed")
        raise typer.Exit(1)


@dataclass(frozen=True)
class _How:
    """Options of a run: which cells, on what, repeated for how long, compiled in how many processes beforehand."""

    matrix: bool
    peers: bool
    device: str
    seconds: float
    jobs: int


def _defaults(matrix: bool, device: str, seconds: float | None, jobs: int | None) -> tuple[float, int]:
    """Seconds and jobs, where not told those that suit one model's cells or the matrix."""
    from ..bench.processes import jobs_for
    from .target import target_device

    if jobs is None:
        jobs = jobs_for(target_device(device)) if matrix else 0
    return seconds or (0.02 if matrix else 0.1), jobs


class _Run:
    """One run of the command: what is to be measured, and how far it is.

    Attributes:
        cells: cells that differ in their names alone, together, and the backends of each such group.
        total, done: records that there are to be, and that are.
    """

    def __init__(self, out: Path, asked: dict[str, tuple[Any, ...] | None], how: _How, progress: Any) -> None:
        from ..bench import matrix
        from ..bench.records import RecordFile
        from ..device import Device
        from ..spec import dtype_name
        from .target import target_device

        self.how, self.progress = how, progress
        self.device = target_device(how.device)
        facts = Device.of(self.device)
        on_cpu = facts.arch == "cpu"
        chosen = matrix.TINY if on_cpu else matrix.WHOLE if how.matrix else matrix.Selection()
        given = {name: values for name, values in asked.items() if values is not None}
        if "contexts" in given:
            given["prompts"] = given["contexts"]
        if "kv_dtypes" in given:
            given["kv_dtypes"] = tuple(dtype_name(name) for name in given["kv_dtypes"])
        selection = replace(chosen, **given)
        memory = None if on_cpu else facts.memory_gb * 1e9
        tokens = matrix.TINY_TOKENS if on_cpu else matrix.PREFILL_TOKENS
        groups = matrix.alike(matrix.cases(selection, memory, tokens))
        self.cells = [(cases, matrix.backends_of(cases[0], facts, how.peers)) for cases in groups]
        self.total = sum(len(cases) * len(backends) for cases, backends in self.cells)
        if not self.total:
            raise InvalidInput(
                "there must be something to measure: a model whose attention is not latent, an op, a cell that fits in "
                f"{matrix.LARGEST_SHARE:.0%} of the device's memory",
                "none",
            )
        self.file = RecordFile(out)
        self.there = self.file.there()
        self.done = 0

    def records(self) -> Iterator[Record]:
        """New records, each written before it is yielded."""
        from ..bench.matrix import compare
        from ..bench.measure import DeviceLost, of_run

        known = [(cases, backends, self._known(cases, backends)) for cases, backends in self.cells]
        self.done = sum(
            (case.name, name) in self.there for cases, _, names in known for case in cases for name in names
        )
        if self.done == self.total:
            return
        todo = []  # cases, backends that none of them has been measured on
        with self.file:
            for cases, backends, names in known:
                for record in self._copies(cases, names):
                    yield self._written(record)
                missing = [b for b, name in zip(backends, names, strict=True) if not self._measured(cases, name)]
                todo += [(cases, missing)] if missing else []
            if not todo:
                return
            if self.device.type == "cpu":
                words = "no GPU here: the reference on tiny cases, which shows that it works, not how fast octavo is"
                self.progress.print(words, soft_wrap=True)
            self._compile([(cases[0], backends) for cases, backends in todo])
            with bar(self.progress, "Measuring", self.total - self.done) as advance:
                common = of_run(self.device, self.how.seconds)
                for cases, backends in todo:
                    try:
                        for record in compare(cases[0], backends, self.device, **common):
                            for copy in self._all(cases, record):
                                yield copy
                                advance()
                    except DeviceLost as lost:
                        yield from self._all(cases, lost.record)
                        raise
                    _free(self.device)

    def _all(self, cases: list[Case | IndexerCase], record: Record) -> Iterator[Record]:
        """The record under the name of each of the cases, written."""
        yield from (self._written(record.named(case.name)) for case in cases)

    def _written(self, record: Record) -> Record:
        self.file.write(record)
        self.there[record.case, record.backend] = record
        self.done += 1
        return record

    def _known(self, cases: list[Case | IndexerCase], backends: list[str]) -> list[str]:
        """What the records of each of the backends are called."""
        from ..bench.matrix import backend_name

        return [backend_name(cases[0], backend, self.device) for backend in backends]

    def _measured(self, cases: list[Case | IndexerCase], backend: str) -> Record | None:
        found = (self.there.get((case.name, backend)) for case in cases)
        return next((record for record in found if record is not None), None)

    def _copies(self, cases: list[Case | IndexerCase], backends: list[str]) -> Iterator[Record]:
        """Records that are missing of cases of which one like them has been measured."""
        for backend in backends:
            one = self._measured(cases, backend)
            if one is not None:
                yield from (one.named(case.name) for case in cases if (case.name, backend) not in self.there)

    def _compile(self, cells: list[tuple[Case | IndexerCase, list[str]]]) -> None:
        """What the cells need, in several processes, where that was asked for."""
        from ..bench import ahead
        from ..bench.processes import in_processes

        found = ahead.groups(cells) if self.how.jobs else []
        if not found:
            return
        started = time.perf_counter()
        with bar(self.progress, "Compiling", sum(map(len, found))) as advance:
            for group, _ in in_processes(ahead.call_once, found, self.device, self.how.jobs):
                advance(len(found[group]))
        self.progress.print(f"compiled in {time.perf_counter() - started:.0f} s")


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
