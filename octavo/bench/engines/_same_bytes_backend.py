"""octavo's SGLang backend that can read a request's bytes twice. Imports sglang: load it inside a function.

A request whose id begins with WRITES is served as ever, and what its layers' pages hold of it afterwards is copied. One
of READS, of the same tokens, attends to those copies; what it stores itself is read by nobody.
"""

from __future__ import annotations

from typing import Any

import torch

from ...integrations._sglang_backend import OctavoAttentionBackend
from ...integrations._sglang_layers import Layer, query_of
from ...integrations._sglang_names import EXTENDS
from ...quality.exact import exact_attention
from ...reference.attention import gather, visible_tokens
from .same_bytes import READS, WRITES


class SameBytesBackend(OctavoAttentionBackend):
    """What SGLang calls; requests of other names, and batches without names, are octavo's own business."""

    def __init__(self, runner: Any, precision: str = "fast") -> None:
        super().__init__(runner, precision)
        self._request = ""  # of this pass; empty: none that is looked at
        self._begin = self._end = 0  # its tokens of this pass
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer: k [Hk, n, D], v [Hk, n, Dv], fp32
        self._kept_of = ""  # the request that wrote them, without its prefix

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """As octavo's; says whose bytes this pass writes or reads."""
        super().init_forward_metadata(forward_batch)
        self._request = ""
        named = [name for name in forward_batch.rids or () if name.startswith((WRITES, READS))]
        if not named or forward_batch.forward_mode.name not in EXTENDS:
            return
        if forward_batch.batch_size != 1:
            raise RuntimeError(f"{named[0]} must be alone in its batch, of {forward_batch.batch_size} requests")
        (self._request,) = named
        self._end = int(forward_batch.seq_lens[0])
        self._begin = self._end - int(forward_batch.extend_seq_lens[0])
        of = self._request.removeprefix(WRITES).removeprefix(READS)
        if self._request.startswith(WRITES) and self._begin == 0:
            self._kept, self._kept_of = {}, of
        if of != self._kept_of:
            raise RuntimeError(f"{self._request} from token {self._begin} on: what is kept is of {self._kept_of!r}")

    def _attend(self, made: Layer, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        if self._request.startswith(READS):
            return self._attend_exactly(made, q, out, sinks)
        super()._attend(made, q, out, sinks)
        if self._request:
            self._keep(made)
        return out

    def _keep(self, made: Layer) -> None:
        """Copy this pass's tokens of the layer back from its pages, behind those of the request's earlier passes."""
        step = self.forward_metadata
        assert step is not None
        table = step.windowed_table if made.windowed else step.page_table
        assert table is not None
        k, v, _ = gather(made.spec, made.cache.bytes(), table[0], self._begin, self._end, torch.float32)
        if self._begin:
            earlier = self._of(made, self._begin)
            k, v = (torch.cat(parts, 1) for parts in zip(earlier, (k, v), strict=True))
        self._kept[id(made)] = (k, v)

    def _of(self, made: Layer, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `tokens` that are kept of the layer."""
        k, v = self._kept[id(made)]
        if k.shape[1] < tokens:
            raise RuntimeError(f"{self._request} needs {tokens} tokens; {k.shape[1]} are kept")
        return k[:, :tokens], v[:, :tokens]

    def _attend_exactly(
        self, made: Layer, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Write to `out` what a softmax in fp64 makes of the query and the copies."""
        spec, rows = made.spec, self._end - self._begin
        k, v = self._of(made, self._end)
        tokens = torch.arange(self._end, device=q.device)
        hidden = ~visible_tokens(spec, tokens[self._begin :], tokens)
        mask = torch.zeros(hidden.shape, dtype=torch.float64, device=q.device).masked_fill_(hidden, float("-inf"))
        query = query_of(q, spec)[:rows].transpose(0, 1)
        found, _ = exact_attention(
            made, query[None], k[None], v[None], mask[None, None], spec.scale, softcap=spec.softcap, s_aux=sinks
        )
        out[:rows] = found.view(rows, -1)
        out[rows:] = 0
        return out
