"""SGLang's attention backend over octavo's kernels. Imports sglang: load it inside a function.

Once a step: a snapshot of the requests' page tables and lengths, then each kind's plan (outside a CUDA graph, into
buffers of fixed address where one is replayed). Once a layer: append, then attend; nothing is read on the host. What a
forward call is given of its batch is only where its new tokens go: in SGLang's breakable prefill graphs it is another
object than the one the step was made from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from ..errors import Unsupported
from ..spec import AttentionSpec
from . import _sglang_pool as pool_view
from ._sglang_layers import Kinds, Layer, bounds_of, layer_spec, query_of, stored_as
from ._sglang_names import EXTENDS
from ._sglang_support import reasons
from .sglang import NAMES

ANOTHER_DRAFTER = "--speculative-draft-attention-backend triton"


@dataclass
class Step:
    """One forward pass.

    Attributes:
        seq_lens: int32 [B], the new tokens included. page_table, windowed_table: int32 [B, max pages].
        query_starts: int32 [B + 1].
        windowed_slots: int64 [T], where the new tokens go in the windowed pool; None: there is none.
        num_decodes, max_query_len: as Attention.plan takes them.
    """

    seq_lens: torch.Tensor
    page_table: torch.Tensor
    windowed_table: torch.Tensor | None
    query_starts: torch.Tensor
    windowed_slots: torch.Tensor | None
    num_decodes: int
    max_query_len: int | None


class OctavoAttentionBackend(AttentionBackend):
    """What SGLang calls. runner: its ModelRunner, with the model and the KV pool made; precision: of prefill.

    Raises Unsupported with every reason for a configuration, pool or layer that octavo cannot serve.
    """

    needs_cpu_seq_lens = False  # lengths are read on the device alone: SGLang need not copy them each step
    extend_dummy_seqs_capped_by_req_pool = True  # the plans have room for as many sequences as the request pool

    def __init__(self, runner: Any, precision: str = "fast") -> None:
        super().__init__()
        broken = reasons(runner, tuple(NAMES))
        if broken:
            raise Unsupported("octavo cannot be the attention backend of this SGLang configuration", broken)
        # These two names are SGLang's: its models reach the pools through the backend.
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.forward_metadata: Step | None = None
        self._graph: Step | None = None
        self._graph_rows = 0  # query rows of a sequence that the graph's query_starts are of
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._device = self._req_to_token.device
        self._dtype = runner.dtype
        self._stored = stored_as(runner, precision)
        self._windowed = isinstance(self.token_to_kv_pool, pool_view.SWAKVPool)
        modules = [m for m in runner.model.modules() if isinstance(m, RadixAttention)]
        specs = {module: layer_spec(module, self._dtype, self._stored) for module in modules}
        self._kinds = Kinds(list(specs.values()), bounds_of(runner), self._device)
        self._layers = {module: self._view(module, spec) for module, spec in specs.items()}
        if self._stored["layout"] == "leaf":
            pool_view.close(self.token_to_kv_pool)

    def _view(self, module: Any, spec: AttentionSpec) -> Layer:
        """A layer over its part of the pool. Its scales stay the module's memory: reloaded weights bring theirs."""
        pool, index = self.token_to_kv_pool, module.layer_id
        cache = pool_view.view(pool, index, spec, module.k_scale, module.v_scale)
        return Layer(spec, cache, pool_view.is_windowed(pool, index))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager passes, and every replay of a breakable prefill graph: there attention runs between the pieces."""
        batch, mode = forward_batch.batch_size, forward_batch.forward_mode
        if batch == 0 or mode.is_idle():
            self.forward_metadata = None
            return
        step = self._new_step(batch)
        if mode.is_decode() or mode.is_target_verify():
            rows = self._set_decode(step, forward_batch)
            torch.arange(0, (batch + 1) * rows, rows, out=step.query_starts)
        else:
            self._set_extend(step, forward_batch)
        if self._windowed:
            step.windowed_slots = torch.empty_like(forward_batch.out_cache_loc, dtype=torch.int64)
        self._snapshot(step, forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers of fixed address for the batches that are captured."""
        self._graph = self._new_step(max_bs)
        if self._windowed:
            self._graph.windowed_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self._device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture and before each replay: the graph's buffers are filled and its kinds planned.

        Padding comes as sequences of one token of request 0, whose new token goes to slot 0: nobody's.
        """
        mode, batch, graph = forward_batch.forward_mode, forward_batch.batch_size, self._graph
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise Unsupported(
                f"a CUDA graph of {mode.name}",
                [f"octavo's attention is captured in decode and in draft verification; found {mode.name}"],
                "breakable prefill graphs, SGLang's default",
            )
        assert graph is not None, "SGLang calls init_cuda_graph_state first"
        step = replace(
            graph,
            seq_lens=graph.seq_lens[:batch],
            page_table=graph.page_table[:batch],
            windowed_table=None if graph.windowed_table is None else graph.windowed_table[:batch],
            query_starts=graph.query_starts[: batch + 1],
        )
        rows = self._set_decode(step, forward_batch)
        if rows != self._graph_rows:
            starts = graph.query_starts
            torch.arange(0, starts.shape[0] * rows, rows, out=starts)
            self._graph_rows = rows
        self._snapshot(step, forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing of SGLang's is read inside a graph: the snapshot was taken before."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padding sequence in a decode graph."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The same for a graph on a CPU."""
        return 1

    def _new_step(self, batch: int) -> Step:
        pages = -(-self._req_to_token.shape[1] // self._stored["page_size"])

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        windowed = zeros(batch, pages) if self._windowed else None
        return Step(zeros(batch), zeros(batch, pages), windowed, zeros(batch + 1), None, batch, 1)

    def _set_decode(self, step: Step, forward_batch: Any) -> int:
        """Lengths and the query rows of a sequence: one, or a draft's; then SGLang's lengths are without the draft."""
        mode, draft = forward_batch.forward_mode, forward_batch.spec_info
        if draft is not None and not mode.is_target_verify() and not mode.is_idle():
            raise Unsupported("decode of a draft model", ["octavo verifies drafts and does not draft"], ANOTHER_DRAFTER)
        batch, rows = step.seq_lens.shape[0], 1
        step.seq_lens.copy_(forward_batch.seq_lens[:batch])
        if mode.is_target_verify():
            rows = self._stored["max_query_len"] if draft is None else draft.draft_token_num
            step.seq_lens.add_(rows)
        step.num_decodes, step.max_query_len = batch, rows
        return rows

    def _set_extend(self, step: Step, forward_batch: Any) -> None:
        """Prompts, chunks of prompts, and both beside decodes, which come as chunks of one token."""
        mode, batch = forward_batch.forward_mode, step.seq_lens.shape[0]
        if mode.name not in EXTENDS:
            nearest = ANOTHER_DRAFTER if mode.is_draft_extend_v2() else None
            raise Unsupported(
                f"forward mode {mode.name}", [f"needs {' or '.join(EXTENDS)}; found {mode.name}"], nearest
            )
        step.seq_lens.copy_(forward_batch.seq_lens[:batch])
        step.query_starts[1:] = torch.cumsum(forward_batch.extend_seq_lens[:batch], 0)
        lengths = forward_batch.extend_seq_lens_cpu
        step.num_decodes, step.max_query_len = 0, None if lengths is None else int(max(lengths))

    def _snapshot(self, step: Step, forward_batch: Any) -> None:
        """Copy what SGLang may change before the pass has ended, and plan."""
        requests, size = forward_batch.req_pool_indices[: step.seq_lens.shape[0]], self._stored["page_size"]
        pool_view.page_table(self._req_to_token, requests, size, None, step.page_table)
        if step.windowed_table is not None and step.windowed_slots is not None:
            mapping, new = self.token_to_kv_pool.full_to_swa_index_mapping, forward_batch.out_cache_loc
            pool_view.page_table(self._req_to_token, requests, size, mapping, step.windowed_table)
            step.windowed_slots[: new.shape[0]].copy_(mapping[new])
            step.windowed_slots[new.shape[0] :].zero_()
        self.forward_metadata = step
        self._kinds.plan(step)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q [T, Hq * D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq * Dv]; k and v None: the layer shares another's."""
        return self._forward(q, k if save_kv_cache else None, v, layer, forward_batch, kwargs, None)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As forward_decode, for prompts and for drafts under verification; written where a graph wants it."""
        out = getattr(forward_batch, "_attn_output", None)
        return self._forward(q, k if save_kv_cache else None, v, layer, forward_batch, kwargs, out)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        arguments: dict[str, Any],
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Append k and v, if any, and attend; `out`: where to, if it is of the result's size and dtype."""
        made = self._layer(layer, arguments)
        rows = q.numel() // (made.spec.num_q_heads * made.spec.head_dim)
        columns = layer.tp_q_head_num * layer.v_head_dim
        if out is None or out.numel() != rows * columns or out.dtype != self._dtype or not out.is_contiguous():
            out = torch.empty((rows, columns), dtype=self._dtype, device=self._device)
        if k is not None:
            self._append(made, k, v, forward_batch.out_cache_loc)
        return self._attend(made, q, out.view(rows, columns), arguments.get("sinks"))

    def _layer(self, module: Any, arguments: dict[str, Any]) -> Layer:
        """The layer; refuses arguments of a forward call that would change its result."""
        given = [name for name, x in arguments.items() if name != "sinks" and x is not None and x is not False]
        if given:
            raise Unsupported(f"layer {module.layer_id}", [f"needs attention without {name}" for name in given])
        made = self._layers.get(module)
        if made is None:
            made = self._layers[module] = self._view(module, layer_spec(module, self._dtype, self._stored))
        return made

    def _append(self, made: Layer, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        spec, step = made.spec, self.forward_metadata
        k, v = k.view(-1, spec.num_kv_heads, spec.head_dim), v.view(-1, spec.num_kv_heads, spec.value_dim)
        rows = min(slots.shape[0], k.shape[0])
        if made.windowed and step is not None and step.windowed_slots is not None:
            slots = step.windowed_slots
        made.cache.append(k, v, slots[:rows].to(torch.int64))

    def _attend(self, made: Layer, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        if made.attention is None:
            spec = made.spec if sinks is None else replace(made.spec, sinks=True)
            made.attention = self._kinds.attention(spec, made.windowed)
        if sinks is not None and sinks.dtype not in (torch.float32, torch.bfloat16):
            sinks = sinks.float()
        heads = out.view(-1, made.spec.num_q_heads, made.spec.value_dim)
        made.attention.run(query_of(q, made.spec), made.cache, sinks=sinks, out=heads)
        return out
