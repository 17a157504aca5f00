"""The command `octavo`: finds the command's file, and turns octavo's errors into one message and exit code 2.

A command is octavo/cli/<name>.py with a function <name> that typer can read. Its file is imported only when the command
runs, so that `octavo explain` loads neither transformers nor matplotlib.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import OctavoError

# Name and what `octavo --help` says of it, so that listing the commands imports none.
COMMANDS = {
    "explain": "Which backend runs each layer kind, and why not the others; no GPU needed.",
    "check": "The support table of this machine, cell by cell against fp64.",
    "accuracy": "What FP8 caches cost a model: perplexity, KL, retrieval, error by layer and head.",
    "bench": "Time kernels over models' shapes, checked first; records as JSON lines.",
    "calibrate": "Scales of an FP8 KV cache from real text, and what each costs.",
    "demo": "A small real model through the FP8 paged cache beside the 16-bit one.",
    "report": "Records as one page with figures and tables, and as Markdown.",
    "serve": "An OpenAI-compatible server over an FP8 paged cache.",
    "warmup": "Compile what a model's plan needs, so that serving compiles nothing.",
}


class LazyGroup(TyperGroup):
    """Commands by the name of their file."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"octavo.cli.{cmd_name}")
        command = typer.Typer(add_completion=False, rich_markup_mode=None)
        command.command(cmd_name, context_settings=getattr(module, "CONTEXT", None))(getattr(module, cmd_name))
        return typer.main.get_command(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OctavoError as error:
            typer.echo(f"octavo: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="FP8 KV-cache attention: which kernel runs, how well and how fast. Exit codes: 0 done, 1 a check failed, "
    "2 bad input or unsupported.",
)


def _version(show: bool) -> None:
    if show:
        from .. import __version__

        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    """Makes `app` a group of commands."""


def main() -> None:
    """Entry point of the script `octavo` and of `python -m octavo`."""
    try:
        app()
    except KeyboardInterrupt:  # while a command's imports run
        typer.echo("octavo: interrupted", err=True)
        raise SystemExit(130) from None
