"""What `octavo accuracy` prints: figures of every side, pass keys by context, and the worst layers and heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..quality.trial import SIXTEEN
from .progress import for_tables, show_table

WORST = 4  # heads that are told of each variant


def show(results: dict[str, Any], out: Path) -> None:
    """All tables, then where the file is."""
    console = for_tables(130)
    model, text, env = results["model"], results["text"], results["environment"]
    name = env.get("gpu") if env.get("gpu") != "none" else env.get("cpu")
    console.print(Text(f"{model['name']}, {model['parameters'] / 1e6:.3g} M parameters, {model['dtype']}, on {name}"))
    windows = "window" if text["windows"] == 1 else "windows"
    intervals = "95 % intervals" if text["windows"] > 1 else "no intervals of one window"
    console.print(Text(f"{text['windows']} {windows} of {text['length']} tokens of {text['source']}; {intervals}"))
    show_table(console, _figures(results))
    if results["retrieval"]:
        show_table(console, _retrieval(results))
    show_table(console, _heads(results))
    for task, sides in results.get("lm_eval", {}).items():
        show_table(console, _task(task, sides))
    console.print(Text(f"wrote {out} in {results['seconds']} s"))


def _percent(estimate: dict[str, Any], digits: int = 2) -> str:
    """A share with its interval; a bare figure where there is none."""
    return _with_interval({k: None if v is None else v * 100 for k, v in estimate.items()}, digits, " %")


def _with_interval(estimate: dict[str, Any], digits: int, unit: str = "") -> str:
    value = f"{estimate['value']:.{digits}f}{unit}"
    if estimate["low"] is None:
        return value
    return f"{value} ({estimate['low']:.{digits}f} to {estimate['high']:.{digits}f})"


def _figures(results: dict[str, Any]) -> Table:
    table = Table(title="Text", title_justify="left")
    table.add_column("cache", no_wrap=True)
    for column in ("bytes a token", "perplexity", "change", "KL, millinats", "same top-1", "top-1 right"):
        table.add_column(column, justify="right")
    sizes = {v["name"]: v["bytes_per_token"] for v in results["variants"]}
    for name, side in results["sides"].items():
        cells = [f"{sizes.get(name, results['bytes_per_token_16_bit']):,}", f"{side['perplexity']['value']:.3f}"]
        if name == SIXTEEN:
            cells += ["", "", ""]
        else:
            kl = {k: None if v is None else v * 1e3 for k, v in side["kl"].items()}
            cells += [_percent(side["change"]), _with_interval(kl, 2), _percent(side["same_top"], 1)]
        table.add_row(name, *cells, _percent({**side["top"], "low": None}, 1))
    return table


def _retrieval(results: dict[str, Any]) -> Table:
    trials = results["retrieval"][0]["trials"]
    table = Table(title=f"Pass keys given back, of {trials}", title_justify="left")
    table.add_column("tokens", justify="right")
    for name in results["sides"]:
        table.add_column(name, justify="right")
    for row in results["retrieval"]:
        table.add_row(f"{row['context']:,}", *(str(sum(row["right"][name])) for name in results["sides"]))
    return table


def _heads(results: dict[str, Any]) -> Table:
    table = Table(title="Error of the stored keys and values", title_justify="left")
    table.add_column("cache", no_wrap=True)
    for column in ("all layers", "beyond the range"):
        table.add_column(column, justify="right")
    table.add_column("worst heads, as layer.head")
    for name, layers in results["layers"].items():
        errors = [layer[f"{side}_rel_err"] for layer in layers for side in ("k", "v")]
        beyond = sum(layer[f"{side}_saturated"] for layer in layers for side in ("k", "v"))
        heads = [
            (error, f"{side} {layer['layer']}.{head}")
            for layer in layers
            for side in ("k", "v")
            for head, error in enumerate(layer["heads"][f"{side}_rel_err"])
        ]
        worst = ", ".join(f"{where} {error:.2%}" for error, where in sorted(heads, reverse=True)[:WORST])
        table.add_row(name, f"{min(errors):.2%} to {max(errors):.2%}", f"{beyond:,}", worst)
    return table


def _task(task: str, sides: dict[str, Any]) -> Table:
    """One task of lm-eval: a row a side, a column a metric, with its standard error."""
    metrics = list(dict.fromkeys(name for found in sides.values() for name in found))
    table = Table(title=Text(f"lm-eval: {task}"), title_justify="left")
    table.add_column("cache", no_wrap=True)
    for name in metrics:
        table.add_column(Text(name), justify="right")
    for side, found in sides.items():
        cells = []
        for name in metrics:
            estimate = found.get(name, {"value": float("nan"), "stderr": None})
            error = "" if estimate["stderr"] is None else f" ± {estimate['stderr']:.4f}"
            cells.append(f"{estimate['value']:.4f}{error}")
        table.add_row(side, *cells)
    return table
