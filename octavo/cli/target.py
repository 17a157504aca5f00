"""What --device means where a command runs something."""

from __future__ import annotations

import torch

from ..errors import InvalidInput, first_line


def target_device(name: str) -> torch.device:
    """The torch device of `auto` (a GPU if there is one), `cpu` or `cuda`; InvalidInput for others or a missing one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise InvalidInput("--device must be auto, cpu or cuda", repr(name))
    if name != "cpu" and not torch.cuda.is_available():
        raise InvalidInput(f"--device {name} needs a GPU that torch sees; there is none{_why()}")
    return torch.device(name)


def _why() -> str:
    """What torch says of a GPU that it cannot use: a driver older than its CUDA, for one."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f": {first_line(error)}"
    return ""
