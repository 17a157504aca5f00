"""prefill: the prefill sequences of a batch, by the formula in attention.py."""

from __future__ import annotations

from ..calls import AttentionCall
from .attention import attention


def prefill(call: AttentionCall) -> None:
    """Write the rows of every prefill sequence of `call`."""
    attention(call, "prefill")
