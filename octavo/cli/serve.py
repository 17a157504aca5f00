"""`octavo serve MODEL`: an OpenAI-compatible server over an FP8 paged cache, or vLLM or SGLang with octavo plugged in.

Progress goes to stderr; stdout gets the plan and the address.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInput
from ..spec import one_of
from .progress import for_messages, quiet, saying
from .target import target_device

if TYPE_CHECKING:
    from ..serve.server import ServeOptions

ENGINES = ("transformers", "vllm", "sglang")
EXTRAS = "transformers,serve"
# What typer does not know is the named engine's own.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id, or smollm2-135m.")],
    engine: Annotated[
        str, typer.Option(help="transformers (octavo's own), vllm or sglang: theirs; other arguments are passed on.")
    ] = "transformers",
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_e4m3 (fp8), fp8_e5m2, bfloat16, float16 or auto.")] = "fp8",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    backend: Annotated[
        str, typer.Option(help="gluon, triton, reference or auto. A named one never falls back.")
    ] = "auto",
    tp: Annotated[int, typer.Option(min=1, help="GPUs (or CPU processes) that the heads are divided over.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    served_name: Annotated[str | None, typer.Option(help="What clients call the model; else its own name.")] = None,
    max_context: Annotated[int | None, typer.Option(min=2, help="Most tokens of prompt and reply.")] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="Most replies generated at once.")] = None,
    step_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of a step.")] = None,
    cache_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens the cache holds; else what fits.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the pages of prompts that begin alike.")] = True,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send; else OCTAVO_API_KEY, if set.")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(min=0, help="Time to finish replies in when stopped.")] = 30.0,
) -> None:
    """Serve a model on /v1/chat/completions and /v1/completions until interrupted.

    Exit code 1 if the engine stopped by itself, 2 for a model or an option that cannot be served.
    """
    one_of("--engine", engine, ENGINES)
    if engine != "transformers":
        from ..serve import handover

        arguments = handover.command(engine, model, kv_cache_dtype, tp, host, port, context.args)
        handover.check_installed(engine)
        handover.start(*arguments)
    if context.args:
        raise InvalidInput(f"unknown arguments with --engine transformers: {' '.join(context.args)}")
    if not math.isfinite(drain_seconds):
        raise InvalidInput("--drain-seconds must be a finite number", drain_seconds)
    from ..quality.load import require

    require(("transformers", "safetensors", "fastapi", "uvicorn", "prometheus_client", "jinja2"), EXTRAS)
    from ..serve import ranks, server

    if tp > 1 and not ranks.launched():
        server.listen(host, port).close()  # what is wrong is one line here; from a rank it is torchrun's report
        ranks.launch(tp, sys.argv[sys.argv.index("serve") + 1 :])
    options = server.ServeOptions(
        model=model,
        device=target_device(device),
        kv_cache_dtype=kv_cache_dtype,
        page_size=page_size,
        backend=None if backend == "auto" else backend,
        tp=tp,
        max_context=max_context,
        max_batch=max_batch,
        step_tokens=step_tokens,
        cache_tokens=cache_tokens,
        prefix_cache=prefix_cache,
        served_name=served_name,
        host=host,
        port=port,
        api_key=server.read_key(api_key_file),
        drain_seconds=drain_seconds,
    )
    raise typer.Exit(_run(options))


def _run(options: ServeOptions) -> int:
    from ..serve import server

    quiet()
    progress = for_messages()
    status: Any = progress.status("Starting") if progress.is_terminal else nullcontext()
    with status as line:

        def show(text: str) -> None:
            if progress.is_terminal:
                line.stop()
            typer.echo(text)

        return server.serve(options, saying(progress, line), show)
