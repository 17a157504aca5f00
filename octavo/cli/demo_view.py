"""What `octavo demo` prints: plan, answers and scores as tables. A model's words are shown as text, never as markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..quality.page import LABELS
from ..quality.trial import FP8, SIXTEEN
from .progress import for_tables

FORMAT_COLOR, SIXTEEN_COLOR = "dark_orange", "dodger_blue2"
WIDTH = 100  # of what is piped: 80 columns would wrap the plan's sentences twice


def _heading(console: Console, words: str) -> None:
    console.print()
    console.print(Text(words, style="bold"))


def show_plan(results: dict[str, Any]) -> None:
    """The model's line, the cache's line, and the plan."""
    console, model, cache = for_tables(WIDTH), results["model"], results["cache"]
    _heading(console, f"{model['name']} on {results['environment']['device']}")
    console.print(
        Text(
            f"{model['parameters'] / 1e6:.3g} M parameters, {model['layers']} layers, {model['dtype']}, "
            f"from {model['source']}"
        )
    )
    console.print(
        Text(
            f"cache {cache['kv_dtype']}, layout {cache['layout']}, pages of {cache['page_size']}: "
            f"{cache['bytes_per_token']:,} bytes a token, {cache['bytes_per_token_16_bit']:,} with 16 bits"
        )
    )
    _heading(console, "Plan")
    console.print(Text(results["plan"]))


def show_answers(results: dict[str, Any]) -> None:
    """The answers side by side; where they differ is coloured."""
    console = for_tables(WIDTH)
    _heading(console, "Answers, greedy; coloured from where they differ")
    table = Table(show_lines=True, expand=True)
    table.add_column(LABELS[SIXTEEN], ratio=1)
    table.add_column(LABELS[FP8], ratio=1)
    for answer in results["answers"]:
        one, other = answer["text_16_bit"], answer["text_fp8"]
        same = answer["same_characters"]
        prompt = Text(answer["prompt"] + "\n", style="bold")
        longest = max(answer["tokens_16_bit"], answer["tokens_fp8"])
        told = "the same tokens" if answer["same_tokens"] == longest else f"{answer['same_tokens']} tokens the same"
        table.add_row(
            Text.assemble(prompt, one[:same], (one[same:], SIXTEEN_COLOR)),
            Text.assemble((told + "\n", "dim"), other[:same], (other[same:], FORMAT_COLOR)),
        )
    console.print(table)


def show_scores(results: dict[str, Any]) -> None:
    """Perplexity, divergence and agreement by side; the cache's error; the checks; where the report is."""
    console, text, quality = for_tables(WIDTH), results["text"], results["quality"]
    _heading(console, f"{text['windows']} windows of {text['length']:,} tokens: {text['source']}")
    console.print(
        Text(
            f"read back from the cache in chunks of {text['chunk']}, the last {text['tail']} tokens one by one",
            style="dim",
        )
    )
    console.print(_sides(quality))
    exact = quality["exact_why_not"] or "a plain softmax in float64 over the bytes that the FP8 cache holds"
    console.print(Text(f"change, KL and top token against the 16-bit cache; exact: {exact}", style="dim"))
    _heading(console, f"{results['cache']['kv_dtype']} keys and values as read back, by layer")
    console.print(_layers(results["layers"]))
    _heading(console, "Checks")
    verdicts = {None: ("too few tokens", "dim"), True: ("holds", "green"), False: ("DOES NOT HOLD", "bold red")}
    for check in results["checks"]:
        word, style = verdicts[check["passed"]]
        told = f": {check['change']:+.4%}, limit {check['limit']:.1%}  {check['name']}"
        console.print(Text.assemble("  ", (word, style), told))
    console.print()
    console.print(Text(f"Report: {results['report']}   ({results['seconds']:.0f} s)"), soft_wrap=True)


def _sides(quality: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("")
    for name in ("perplexity", "95 %", "change", "95 % (paired)", "mean KL", "same top"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, side in quality["sides"].items():
        perplexity = side["perplexity"]
        cells = [f"{perplexity['value']:.3f}", _span(perplexity, 1, 2)]
        if "change" in side:
            change = side["change"]
            cells += [f"{change['value']:+.3%}", _span(change, 100, 2, " %")]
            cells += [f"{side['kl']['value']:.1e}", f"{side['same_top']['value']:.2%}"]
        table.add_row(LABELS[name], *cells)
    return table


def _span(estimate: dict[str, Any], scale: float, digits: int, unit: str = "") -> str:
    if estimate["low"] is None:
        return "-"
    return f"{estimate['low'] * scale:.{digits}f} to {estimate['high'] * scale:.{digits}f}{unit}"


def _layers(layers: list[dict[str, Any]]) -> Table:
    """The layers two by two, so that thirty fit a screen."""
    table = Table()
    half = (len(layers) + 1) // 2
    for name in ("layer", "K error", "V error", "beyond range") * (2 if len(layers) > 1 else 1):
        table.add_column(name, justify="right", no_wrap=True)
    for left in range(half):
        cells = []
        for stats in layers[left::half][:2]:
            cells += [str(stats["layer"]), f"{stats['k_rel_err']:.2%}", f"{stats['v_rel_err']:.2%}"]
            cells.append(f"{stats['k_saturated'] + stats['v_saturated']:,}")
        table.add_row(*cells)
    return table
