"""What --device means where a command runs something."""

from __future__ import annotations

import torch

from ..errors import InvalidInput


def target_device(name: str) -> torch.device:
    """The torch device of `auto` (a GPU if there is one), `cpu` or `cuda`; InvalidInput for others or a missing one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise InvalidInput("--device must be auto, cpu or cuda", repr(name))
    if name != "cpu" and not torch.cuda.is_available():
        raise InvalidInput(f"--device {name} needs a GPU that torch sees; there is none")
    return torch.device(name)
