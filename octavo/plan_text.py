"""A plan in words: specs, numbers of layers, reasons and aligned columns, as choose and explain print them."""

from __future__ import annotations

import textwrap

from .rules import head_dims
from .spec import AttentionSpec

WIDTH = 100  # columns of a printed plan


def columns(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Rows of equal length as aligned lines; the columns in `right` are set flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = (
        [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in cells]


def layer_ranges(layers: tuple[int, ...]) -> str:
    """Numbers as ranges: "0-31"; evenly spaced "0-34 by 2"; otherwise the first five and the last."""
    first, last = layers[0], layers[-1]
    if layers == tuple(range(first, last + 1)):
        return f"{first}" if first == last else f"{first}-{last}"
    step = layers[1] - first
    if layers == tuple(range(first, last + 1, step)):
        return f"{first}-{last} by {step}"
    shown = ", ".join(str(i) for i in layers[:5])
    return shown if len(layers) <= 5 else f"{shown}, ... {last}"


def merge_reasons(against: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """(names, reason) of reasons by phase or operation: each once, in order; those of all first, named ""."""
    merged: dict[str, list[str]] = {}
    for name, sentences in against.items():
        for sentence in sentences:
            merged.setdefault(sentence, []).append(name)
    pairs = [("" if len(names) == len(against) else ", ".join(names), reason) for reason, names in merged.items()]
    return sorted(pairs, key=lambda pair: pair[0] != "")


def phrase(names: str, reason: str) -> str:
    """A reason with the phases or operations that it is about, if not all."""
    return f"{names} {reason}" if names else reason


def reason_lines(pairs: list[tuple[str, str]], width: int) -> list[str]:
    """Reasons as an indented list."""
    return [
        line
        for pair in pairs
        for line in textwrap.wrap(phrase(*pair), width, initial_indent="  - ", subsequent_indent="    ")
    ]


def describe(spec: AttentionSpec) -> str:
    """A spec in one line: heads, what is cached and how, and what is not plain about the attention."""
    parts = [
        f"{spec.num_q_heads} query / {spec.num_kv_heads} KV heads of {head_dims(spec)}",
        f"{spec.query_dtype} query",
    ]
    cache = f"{spec.kv_dtype} cache ({spec.layout}, page {spec.page_size}"
    parts.append(cache + (f", a scale per {spec.scale_granularity})" if spec.fp8 else ")"))
    for name in ("window", "attention_chunk", "softcap"):
        if getattr(spec, name) is not None:
            parts.append(f"{name} {getattr(spec, name):g}")
    parts += [
        name for name in ("sinks", "lse", "batch_invariant", "alibi", "prefix_mask", "mla") if getattr(spec, name)
    ]
    if not spec.causal:
        parts.append("not causal")
    if spec.max_query_len > 1:
        parts.append(f"{spec.max_query_len} query rows in decode")
    if spec.precision != "fast":
        parts.append(f"precision {spec.precision}")
    return ", ".join(parts)
