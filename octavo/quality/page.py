"""The demo's report: its results as figures and a page."""

from __future__ import annotations

from typing import Any

from ..bench import plots, report
from .trial import EXACT, FORMAT_LIMIT, FP8, SIXTEEN, STOCK, headline

LABELS = {
    SIXTEEN: "16-bit cache",
    FP8: "FP8 cache",
    EXACT: "exact, same bytes",
    STOCK: "transformers' own",
}
COLORS = {SIXTEEN: plots.BLUE, FP8: plots.ORANGE, EXACT: plots.GREEN, STOCK: plots.GREY}
# Root of squared error over squared value when numbers spread evenly over a binade are rounded to that many bits of
# mantissa: 2^-m / sqrt(12) over sqrt(3 / (2 ln 2)), the root mean square of such numbers in [1, 2).
ROUNDING = {"fp8_e4m3": 0.0245, "fp8_e5m2": 0.0491}


def demo_page(results: dict[str, Any]) -> str:
    """The HTML page of a demo's results."""
    return report.render(
        "demo.html",
        results=results,
        labels=LABELS,
        headline=headline(results),
        quality_figures=[_perplexity(results), _change(results), _divergence(results), _positions(results)],
        cache_figures=[_error(results), _bytes(results)],
        facts=_facts(results),
    )


def _facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    """What was run, by name."""
    model, cache, text = results["model"], results["cache"], results["text"]
    environment = dict(results["environment"])
    scales = cache["scale_granularity"].replace("_", " and ")
    return [
        ("model", f"{model['name']}, {model['parameters']:,} parameters, {model['layers']} layers; {model['source']}"),
        ("arithmetic", f"{model['dtype']} on {environment.pop('device')}"),
        (
            "cache",
            f"{cache['kv_dtype']}, layout {cache['layout']}, pages of {cache['page_size']}, a scale per {scales}",
        ),
        ("text", f"{text['source']}: {', '.join(text['names'])}"),
        ("digest of the tokens", f"{text['digest']} (the same digest means the same tokens)"),
        ("time", f"{results['time']}, {results['seconds']:.0f} s in all"),
        *environment.items(),
    ]


def _row(side: str, estimate: dict[str, float]) -> plots.Row:
    return plots.Row(LABELS[side], estimate["value"], COLORS[side], estimate["low"], estimate["high"])


def _perplexity(results: dict[str, Any]) -> report.Figure:
    sides = results["quality"]["sides"]
    rows = [_row(side, sides[side]["perplexity"]) for side in sides]
    text = results["text"]
    return report.Figure(
        "Perplexity",
        plots.bars(rows, "perplexity (lower is better)"),
        "; ".join(f"{LABELS[side]}: {sides[side]['perplexity']['value']:.2f}" for side in sides),
        f"exp of the mean loss over {text['scored_tokens']:,} tokens in {text['windows']} windows, with bootstrap 95 % "
        "intervals over windows. They are wide because some windows are harder text than others, which all sides "
        "share: the next figure compares the sides window by window.",
    )


def _change(results: dict[str, Any]) -> report.Figure:
    sides = results["quality"]["sides"]
    rows = [_row(side, sides[side]["change"]) for side in sides if side != SIXTEEN]
    limited = any(check["limit"] == FORMAT_LIMIT for check in results["checks"])
    dashed = f" Dashed: what FP8 may lose, {report.percent(FORMAT_LIMIT, 1)}." if limited else ""
    return report.Figure(
        "Change of perplexity against the 16-bit cache",
        plots.changes(rows, "change of perplexity, %", FORMAT_LIMIT if limited else None),
        "; ".join(f"{row.name}: {row.value:+.2%}" for row in rows),
        "The same windows on both sides of each comparison, so the difficulty of the text cancels; paired bootstrap "
        "95 % intervals over windows. FP8 and exact attention at the same place mean that the loss is the format's, "
        f"not the attention's.{dashed}",
    )


def _divergence(results: dict[str, Any]) -> report.Figure:
    histogram, fp8 = results["quality"]["kl_histogram"], results["quality"]["sides"][FP8]
    marks = {name: fp8["kl_quantiles"][key] for name, key in (("median", "p50"), ("90 %", "p90"), ("99 %", "p99"))}
    return report.Figure(
        "How far each next-token distribution moves",
        plots.histogram(
            histogram["edges"], histogram["counts"], COLORS[FP8], "KL(16-bit || FP8) per token, nats", marks
        ),
        f"Histogram of KL divergence; mean {fp8['kl']['value']:.4f}, "
        + ", ".join(f"{name} {value:.4f}" for name, value in marks.items()),
        f"KL divergence of the FP8 side's distribution over the vocabulary from the 16-bit one, for each scored token. "
        f"Mean {fp8['kl']['value']:.4f} nats; 99 % of tokens lie below {fp8['kl_quantiles']['p99']:.3f}.",
    )


def _positions(results: dict[str, Any]) -> report.Figure:
    found, text = results["quality"]["kl_by_position"], results["text"]
    step, means = found["tokens_per_mean"], found["means"]
    middles = [step * (index + 0.5) for index in range(len(means))]
    return report.Figure(
        "Divergence along the window",
        plots.lines(middles, {"mean KL": means}, "token in the window", "nats"),
        f"Mean KL from {means[0]:.4f} at the beginning of a window to {means[-1]:.4f} at its end",
        f"Mean KL(16-bit || FP8) of {step} tokens at a time over all windows: do errors pile up as the cache fills? "
        f"The last {text['tail']} tokens are decode steps of one row.",
    )


def _error(results: dict[str, Any]) -> report.Figure:
    layers, kv_dtype = results["layers"], results["cache"]["kv_dtype"]
    series = {name: [100 * s[f"{name.lower()}_rel_err"] for s in layers] for name in ("K", "V")}
    rounding = ROUNDING.get(kv_dtype)
    reference = (f"rounding to {kv_dtype.removeprefix('fp8_')}", 100 * rounding) if rounding else None
    saturated = sum(s["k_saturated"] + s["v_saturated"] for s in layers)
    return report.Figure(
        "Error of the stored keys and values",
        plots.lines([s["layer"] for s in layers], series, "layer", "relative error, %", reference),
        ", ".join(f"{name}: {min(v):.2f} % to {max(v):.2f} %" for name, v in series.items()),
        "Root of squared error over squared value of what is read back from the pages, over all tokens of the windows. "
        "Dashed: what rounding alone costs numbers spread evenly inside the format's range. "
        f"Elements beyond the range: {saturated:,}.",
    )


def _bytes(results: dict[str, Any]) -> report.Figure:
    cache = results["cache"]
    rows = [
        plots.Row(LABELS[SIXTEEN], cache["bytes_per_token_16_bit"], COLORS[SIXTEEN]),
        plots.Row(LABELS[FP8], cache["bytes_per_token"], COLORS[FP8]),
    ]
    return report.Figure(
        "Bytes of cache per token",
        plots.sizes(rows, "bytes per token, all layers"),
        "; ".join(f"{row.name}: {row.value:,}" for row in rows),
        f"Keys and values of all {results['model']['layers']} layers, scales per token included where there are any. "
        f"One GiB holds {cache['tokens_per_gib']:,} tokens; with 16 bits {cache['tokens_per_gib_16_bit']:,}.",
    )
