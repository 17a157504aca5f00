"""`octavo warmup`: compile the kernels that a model's plan needs, so that serving it compiles nothing."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import typer

from ..errors import OctavoError, Unsupported, first_line
from ..plan_text import layer_ranges
from .explain import indexer_plan, plan
from .progress import bar, for_messages

Plan = TypeVar("Plan")


def warmup(
    model: Annotated[str, typer.Argument(help="Known name, or a folder or file with a config.json.")],
    tp: Annotated[int, typer.Option(help="Ranks that the heads are divided over.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_e4m3 (fp8), fp8_e5m2, bfloat16, float16 or auto.")] = "auto",
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    layout: Annotated[str, typer.Option(help="leaf, nhd, hnd or auto.")] = "auto",
    backend: Annotated[str, typer.Option(help="gluon, triton, reference or auto.")] = "auto",
    query_len: Annotated[int, typer.Option(help="Query rows a sequence in decode; above 1 to verify drafts.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Most sequences of a step.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most query rows of a step.")] = 8192,
    max_context: Annotated[int, typer.Option(min=1, help="Most tokens of a sequence.")] = 131072,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Run every shape of call that serving this model makes, once, on little data: each kernel is compiled and kept.

    Exit code 1 if a kernel does not compile or launch, 2 for bad input or a plan that is refused, 130 if interrupted.
    """
    from ..configs import load_config
    from ..device import Device
    from ..models import model_kinds
    from ..warmup import calls, indexer_calls
    from .target import target_device

    progress = for_messages()
    on = target_device(device)
    fields: dict[str, Any] = {"page_size": page_size, "max_query_len": query_len, "layout": "nhd"}
    shape = model_kinds(load_config(model), tp=tp, kv_dtype=kv_cache_dtype, name=model, **fields)
    bounds = (max_batch, max_tokens, max_context)
    results = []
    choices = [_granted(plan(kind, Device.of(on), layout, backend).outcome) for kind in shape.kinds]
    indexer = _granted(indexer_plan(shape, Device.of(on), backend))
    for kind, choice in zip(shape.kinds, choices, strict=True):
        name = f"{kind.name} (layers {layer_ranges(kind.layers)})"
        made = calls(choice, on, *bounds)
        backends = {choice.prefill.backend, choice.decode.backend}
        results.append({"kind": kind.name, "layers": list(kind.layers), **_warmed(name, backends, made, on, progress)})
        if not as_json:
            typer.echo(_line(name, results[-1]))
    if indexer is not None:
        made = indexer_calls(indexer.spec, on, *bounds, backend)
        backends = {choice.backend for choice in indexer.operations.values()}
        results.append({"kind": "indexer", "layers": [], **_warmed("indexer", backends, made, on, progress)})
        if not as_json:
            typer.echo(_line("indexer", results[-1]))
    if as_json:
        typer.echo(json.dumps({"model": shape.name, "kinds": results}, indent=2))


def _granted(outcome: Plan | Unsupported) -> Plan:
    """A plan, or raise what refuses it: before anything is compiled."""
    if isinstance(outcome, Unsupported):
        raise outcome
    return outcome


def _warmed(name: str, backends: set[str], made: list[Any], device: Any, progress: Any) -> dict[str, Any]:
    """Make the calls; what was compiled. Leaves with 1 where one does not run, with 130 where it is interrupted."""
    from ..warmup import run_all

    try:
        with bar(progress, f"Warming {name}", len(made)) as advance:
            found = run_all(made, device, advance)
    except KeyboardInterrupt:
        progress.print("octavo: interrupted; what was compiled is kept")
        raise typer.Exit(130) from None
    except OctavoError:
        raise
    except Exception as error:  # whatever a compiler or a launch raises is, to the user, a plan that cannot run
        typer.echo(f"octavo: {name} does not run: {type(error).__name__}: {first_line(error)}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        raise typer.Exit(1) from error
    return {
        "backends": sorted(backends),
        "compiled": len(found.compiled),
        "cached": len(found.cached),
        "calls": found.calls,
        "seconds": round(found.seconds, 2),
    }


def _line(name: str, found: dict[str, Any]) -> str:
    return (
        f"{name}, {' and '.join(found['backends'])}: {found['compiled']} kernels compiled, {found['cached']} were in "
        f"Triton's cache, {found['calls']} calls in {found['seconds']:.1f} s"
    )
