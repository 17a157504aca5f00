"""An engine's release read as source: what both recorders of interfaces (record_*_interface.py) share.

Nothing of it is imported, so that any Python will do and no dependency is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def release_in(folder: Path, package: str) -> str:
    """The release of `package` whose unpacked wheel is in `folder`."""
    return next(folder.glob(f"{package}-*.dist-info")).name.removeprefix(f"{package}-").removesuffix(".dist-info")


def tree_of(folder: Path, module: str) -> ast.Module | None:
    """The syntax tree of a module or of a package's own file; None where the release has no such file."""
    path = folder.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text()) if path.is_file() else None


def signature(function: Function, default: Callable[[ast.expr], str] = ast.unparse) -> str:
    """Parameters without annotations, "(self, q, *, out=None)"; `default` writes the value of one that has one."""
    a = function.args
    plain = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(a.defaults)), *a.defaults]

    def written(parameter: ast.arg, value: ast.expr | None) -> str:
        return parameter.arg if value is None else f"{parameter.arg}={default(value)}"

    parts = [written(p, d) for p, d in zip(plain, defaults, strict=True)]
    if a.posonlyargs:
        parts.insert(len(a.posonlyargs), "/")
    if a.vararg or a.kwonlyargs:
        parts.append("*" + (a.vararg.arg if a.vararg else ""))
    parts += [written(p, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        parts.append("**" + a.kwarg.arg)
    return f"({', '.join(parts)})"
