"""The evidence document's chapter of models: of each, bytes of a token, FP8 beside 16 bits, and every cell."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..backends import BY_NAME
from . import evidence as data
from . import evidence_page
from .evidence import OTHER_SHAPES, Cell, Evidence, Pair, model_of
from .evidence_page import plain, ratio
from .evidence_text import Document, code, micro, shown, table
from .records import OPS, Record, ceiling, rate
from .report import Figure

TITLES = {
    "decode": "decode: one new token a sequence",
    "verify": "verify: several new rows a sequence, drafts to check",
    "prefill": "prefill: a prompt, or a piece of one",
    "append": "append: new keys and values into the cache",
    "mqa_logits": "the indexer's logits over a prompt",
    "paged_mqa_logits": "the indexer's logits over the cache, a step",
    "topk": "the indexer's top-k",
    "plan": "plan: once a step, for all layers",
}
KERNELS = tuple(op for op in OPS if op in TITLES)


def by_model(evidence: Evidence, pairs: Sequence[Pair], made: Document, figures: str) -> list[str]:
    """The chapter; its figures are kept in `made` and are in the folder `figures`."""
    groups = _groups(evidence)
    lines = ["## Model by model", "", *_legend(), ""] if groups else []
    for group in groups:
        lines += [f"### {plain(group)}", "", *_twin(evidence, group), *_tokens(evidence, group)]
        for figure in _speed(evidence, group):
            lines += shown(figure, made, figures)
        lines += _pair_table([pair for pair in pairs if model_of(pair.case) == group])
        for op in KERNELS:
            lines += _cells(op, [cell for cell in evidence.of_op(op) if model_of(cell.case) == group])
    return lines


def _groups(evidence: Evidence) -> list[str]:
    found = dict.fromkeys(model_of(cell.case) for cell in evidence.cells if cell.op in KERNELS)
    return sorted(found, key=lambda name: name == OTHER_SHAPES)


def _legend() -> list[str]:
    return [
        "Microseconds of one layer's call, median; the fastest of a run in bold. In a name: `tp8` one of 8 ranks, `b` "
        "sequences, `ctx` tokens of each, `q` their new rows in prefill, `n` in verify, `t` in append; `bfloat16` a "
        "16-bit cache, FP8 where none is named. *Ceiling*: the rate of octavo's fastest over the same run's device "
        "copy, of prefill and the logits of a prompt over its FP8 matrix product. *Peer*: the fastest other library's "
        "time over octavo's. *Error*: of octavo's fastest, relative error to float64 over that of attention "
        "written in bf16. Why a backend runs a layer or does not: `octavo explain --model NAME --device NAME`.",
    ]


def _twin(evidence: Evidence, group: str) -> list[str]:
    """That its shapes were measured under another model's name, where they were."""
    of = [record for cell in evidence.cells if model_of(cell.case) == group for record in cell.records.values()]
    names = dict.fromkeys(model_of(record.same_as) for record in of if record.same_as)
    return (
        [f"Shapes that it shares with {', '.join(map(plain, names))} were measured once, for both.", ""]
        if names
        else []
    )


def _tokens(evidence: Evidence, group: str) -> list[str]:
    """What a token takes in one layer's cache, of each number of ranks and kind of cache."""
    found: dict[str, None] = {}
    for cell in evidence.of_op("decode") if group != OTHER_SHAPES else ():
        for record in cell.records.values():
            spec = data.spec_of(record) if model_of(cell.case) == group and record.backend in BY_NAME else None
            if spec is not None:
                ranks = next((part for part in cell.case.split("/") if re.fullmatch(r"tp[0-9]+", part)), "tp1")
                found[f"{spec.bytes_per_token:,} ({ranks}, {spec.kv_dtype})"] = None
    return [f"Bytes a token and layer on a rank: {', '.join(found)}.", ""] if found else []


def _speed(evidence: Evidence, group: str) -> list[Figure]:
    """A figure of each operation that is plotted against context: one rank, FP8, most backends, about 64 sequences."""
    figures = []
    for op in ("decode", "prefill", "paged_mqa_logits"):
        found = [(key, of) for key, of in data.series(evidence, op).items() if model_of(f"{op}/{key[0]}/b1") == group]

        def rank(one: tuple[tuple[str, int], dict[str, dict[int, Record]]]) -> tuple[bool, int, int, str]:
            (subject, batch), of = one
            words = set(subject.split("/"))
            return bool(words & {"tp8", "bfloat16", "exact", "append"}), -len(of), abs(batch - 64), subject

        if found:
            (subject, batch), of = min(found, key=rank)
            figures.append(evidence_page.speed_figure(op, subject, batch, of))
    return figures


def _pair_table(pairs: Sequence[Pair]) -> list[str]:
    if not pairs:
        return []
    rows = [
        [code(f"{pair.op}/{_rest(pair.case)}"), f"{micro(pair.fp8[1])} {plain(pair.fp8[0])}"]
        + [f"{micro(pair.sixteen[1])} {plain(pair.sixteen[0])}", f"{pair.gain:.2f}"]
        for pair in pairs
    ]
    return table(["FP8 beside 16 bits, µs", "fastest in FP8", "fastest in 16 bits", "times as fast in FP8"], rows)


def _cells(op: str, cells: Sequence[Cell]) -> list[str]:
    """One table: a row a case, of whatever runs it was measured in; a column a backend."""
    if not cells:
        return []
    by_case: dict[str, list[Cell]] = {}
    for cell in cells:
        by_case.setdefault(cell.case, []).append(cell)
    names = sorted({name for cell in cells for name in cell.records}, key=lambda name: (name not in BY_NAME, name))
    header = [TITLES[op], *map(plain, names), "ceiling", "peer", "error"]
    rows = []
    for case, of in by_case.items():
        row = [code(_rest(case))]
        row += [next((_time(cell, name) for cell in of if name in cell.records), "") for name in names]
        ratios = [cell.ratio for cell in of if cell.ratio is not None]
        share, error = _quality(of)
        rows.append([*row, share, ratio(ratios[0]) if ratios else "", error])
    return table(header, rows)


def _rest(case: str) -> str:
    """A case's name in its group's tables."""
    return "/".join(case.split("/")[1 if model_of(case) == OTHER_SHAPES else 2 :])


def _time(cell: Cell, name: str) -> str:
    record = cell.records[name]
    if record.us is None:
        return evidence_page.word(record)
    fastest = len(cell.timed) > 1 and record.us == min(cell.timed.values())
    return f"**{micro(record.us)}**" if fastest else micro(record.us)


def _quality(cells: Sequence[Cell]) -> tuple[str, str]:
    """(share of the ceiling, error over bf16 attention's) of octavo's fastest."""
    own = [r for cell in cells for name, r in cell.records.items() if name in BY_NAME and r.us is not None]
    if not own:
        return "", ""
    best = min(own, key=lambda record: record.us or 0.0)
    limit = ceiling(best)
    share = f"{rate(best)[0] / limit:.2f}" if limit else ""
    return share, f"{best.rel_err / best.rel_err_bf16:.2f}" if best.rel_err and best.rel_err_bf16 else ""
