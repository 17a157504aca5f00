"""The command `octavo`: finds the command's file, and turns what ends a command early into one line and an exit code.

A command is octavo/cli/<name>.py with a function <name> that typer can read. Its file is imported only when the command
runs, so that `octavo explain` loads neither transformers nor matplotlib.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
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
            typer.echo(f"octavo: {printable(str(error))}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:  # of a command that has nothing to say of it
            typer.echo("octavo: interrupted", err=True)
            raise typer.Exit(130) from None
        except OSError as error:
            if error in output_errors() or not (error.filename or error.errno in _FULL):
                raise
            place = "" if error.filename is None else f": {printable(str(error.filename))}"
            typer.echo(f"octavo: {error.strerror}{place}", err=True)
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


def printable(text: str) -> str:
    """`text` with what moves a terminal's cursor written out: an error may quote a file of anybody's."""
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


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


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # what a write says without naming its file


class _Watched:
    """A standard stream that keeps the error of its own that a command ran into.

    rich and typer turn a closed pipe into exit code 1, which here is a failed check, and a full device into a trace.
    """

    def __init__(self, stream: Any) -> None:
        self.of = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def write(self, text: str) -> Any:
        return self._tried(self.of.write, text)

    def flush(self) -> Any:
        return self._tried(self.of.flush)

    def _tried(self, do: Any, *arguments: Any) -> Any:
        try:
            return do(*arguments)
        except OSError as error:
            self.error = error
            raise


_streams: list[_Watched] = []  # standard output and error of `main`


def output_errors() -> list[OSError]:
    """The errors that standard output and error ran into."""
    return [stream.error for stream in _streams if stream.error is not None]


def main() -> None:
    """Entry point of the script `octavo` and of `python -m octavo`.

    Whoever stops reading what a command prints ends it in silence, with the code of SIGPIPE; output that cannot be
    written is one line and exit code 2.
    """
    streams = sys.stdout, sys.stderr
    _streams[:] = [_Watched(stream) for stream in streams if stream is not None]
    sys.stdout, sys.stderr = (next((w for w in _streams if w.of is s), None) for s in streams)  # type: ignore
    code: Any = 0
    try:
        app()
    except SystemExit as left:
        code = left.code
    except KeyboardInterrupt:  # while a command's imports run
        typer.echo("octavo: interrupted", err=True)
        code = 130
    except OSError as error:
        if error not in output_errors():
            raise
    finally:
        for stream in _streams:
            with contextlib.suppress(OSError):
                stream.flush()
        sys.stdout, sys.stderr = streams
    raise SystemExit(_without_output(output_errors()) if output_errors() else code)


def _without_output(failed: list[OSError]) -> int:
    """The exit code of a command whose output failed; what is still to be written goes nowhere, without a trace."""
    closed = any(error.errno == errno.EPIPE for error in failed)
    if not closed:
        with contextlib.suppress(OSError):
            typer.echo(f"octavo: output cannot be written: {failed[0].strerror}", err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _streams:
        if stream.error is not None:
            os.dup2(nowhere, stream.of.fileno())
    return 128 + signal.SIGPIPE if closed else 2
