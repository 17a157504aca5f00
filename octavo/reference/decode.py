"""decode: the decode sequences of a batch, by the formula in attention.py."""

from __future__ import annotations

from ..calls import AttentionCall
from .attention import attention


def decode(call: AttentionCall) -> None:
    """Write the rows of every decode sequence of `call`."""
    attention(call, "decode")
