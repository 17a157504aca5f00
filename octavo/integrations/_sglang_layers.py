"""SGLang's attention layers as octavo's: a spec and a cache each, one Attention a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..attention import Attention
from ..cache import PagedCache
from ..choose import choose
from ..device import device_of
from ..errors import Unsupported
from ..formats import TORCH_DTYPES
from ..notices import log
from ..spec import AttentionSpec, dtype_name
from ._kernel_reasons import kernel_reasons
from ._sglang_support import backend_names, option, verify_rows
from .sglang import NAMES


@dataclass(frozen=True)
class Bounds:
    """Most sequences and query rows of a batch, and tokens of a sequence."""

    batch: int
    rows: int
    context: int


@dataclass
class Layer:
    """One RadixAttention.

    Attributes:
        spec: of its kind, without sinks: those come with the call.
        cache: the pool's memory of it.
        windowed: its pages are numbered by the windowed pool.
        attention: its kind's, from the first call on.
    """

    spec: AttentionSpec
    cache: PagedCache
    windowed: bool
    attention: Attention | None = None


def stored_as(runner: Any, precision: str) -> dict[str, Any]:
    """How `runner`'s pool is stored and read, as fields of every layer's spec.

    FP8 pages are leaf pages where octavo is both halves of a hybrid backend: another's half reads SGLang's layout.
    """
    kv_dtype = dtype_name(runner.kv_cache_dtype)
    alone = all(name in NAMES for name in backend_names())
    return {
        "kv_dtype": kv_dtype,
        "page_size": int(runner.page_size or 1),
        "layout": "leaf" if alone and kv_dtype.startswith("fp8") else "nhd",
        "precision": precision,
        "max_query_len": verify_rows(),
    }


def bounds_of(runner: Any) -> Bounds:
    """The largest batch: the request pool's sequences; a query row for each slot of the KV pool, and padding's."""
    requests, columns = runner.req_to_token_pool.req_to_token.shape
    chunk, prompt = option("schedule.chunked_prefill_size"), option("schedule.max_prefill_tokens")
    rows = max(runner.token_to_kv_pool.size, columns, chunk or 0, prompt or 0) + requests * verify_rows()
    return Bounds(batch=requests, rows=rows, context=columns + int(runner.page_size or 1))


def layer_spec(layer: Any, dtype: torch.dtype, stored: dict[str, Any]) -> AttentionSpec:
    """What a RadixAttention computes on a query of `dtype` over a pool that is `stored_as` this.

    Raises Unsupported, with every reason, for what octavo's masks and caps are not.
    """
    broken = []
    if layer.attn_type.value != "decoder":
        broken.append(f"needs decoder attention; found {layer.attn_type.value}")
    if layer.is_cross_attention:
        broken.append("needs self-attention; found cross-attention")
    if layer.use_irope:
        broken.append("needs no chunked-local mask; found use_irope")
    if layer.pos_encoding_mode != "NONE":
        broken.append(f"needs no position bias; found pos_encoding_mode {layer.pos_encoding_mode}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        broken.append(f"needs a softcap of tanh; found {layer.logit_capping_method}")
    if layer.xai_temperature_len > 0:
        broken.append(f"needs no temperature by length; found xai_temperature_len={layer.xai_temperature_len}")
    if broken:
        raise Unsupported(f"octavo cannot run layer {layer.layer_id}", broken)
    # SGLang counts the tokens before a row, octavo the row too.
    window = layer.sliding_window_size + 1 if layer.sliding_window_size > -1 else None
    return AttentionSpec(
        num_q_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        head_dim_v=layer.v_head_dim,
        query_dtype=dtype_name(dtype),
        out_dtype=dtype_name(dtype),
        softmax_scale=float(layer.scaling),
        window=window,
        softcap=float(layer.logit_cap) if layer.logit_cap else None,
        **stored,
    )


class Kinds:
    """One Attention for each kind of layer, which share a workspace and are planned together."""

    def __init__(self, specs: list[AttentionSpec], bounds: Bounds, device: torch.device) -> None:
        found = (kernel_reasons(spec, device_of(device)) for spec in dict.fromkeys(specs))
        broken = list(dict.fromkeys(reason for reasons in found for reason in reasons))
        if broken:
            nearest = "--page-size 64" if any("page_size" in reason for reason in broken) else None
            raise Unsupported("octavo cannot run the model's attention layers", broken, nearest)
        for spec in dict.fromkeys(specs):
            log.info("attention layers of SGLang: %s", choose(spec, device_of(device)))
        self._bounds, self._device = bounds, device
        most = max(self._workspace_bytes(spec) for spec in specs)
        self._workspace = torch.empty(most, dtype=torch.uint8, device=device)
        self._made: dict[tuple[AttentionSpec, bool], Attention] = {}
        self._step: Any = None

    def attention(self, spec: AttentionSpec, windowed: bool) -> Attention:
        """The kind's Attention; a kind that was not met before is planned for the step that is under way.

        windowed: whether its pages are numbered by the windowed pool.
        """
        made = self._made.get((spec, windowed))
        if made is None:
            made = self._made[spec, windowed] = self._make(spec)
            self._plan(made, windowed)
        return made

    def plan(self, step: Any) -> None:
        """Plan every kind for `step`, a Step of the backend."""
        self._step = step
        for (_, windowed), made in self._made.items():
            self._plan(made, windowed)

    def _plan(self, attention: Attention, windowed: bool) -> None:
        step = self._step
        attention.plan(
            step.seq_lens,
            step.windowed_table if windowed else step.page_table,
            step.query_starts,
            num_decodes=step.num_decodes,
            max_query_len=step.max_query_len,
        )

    def _make(self, spec: AttentionSpec) -> Attention:
        fits = self._workspace_bytes(spec) <= self._workspace.numel()
        return Attention(
            spec,
            max_batch=self._bounds.batch,
            max_query_tokens=self._bounds.rows,
            max_context=self._bounds.context,
            device=self._device,
            workspace=self._workspace if fits else None,
        )

    def _workspace_bytes(self, spec: AttentionSpec) -> int:
        b = self._bounds
        return choose(spec, device_of(self._device)).workspace_bytes(b.batch, b.rows, b.context)


def query_of(q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """A query as [T, Hq, D] of the spec's dtype; qk-norm may leave it in another."""
    q = q.reshape(-1, spec.num_q_heads, spec.head_dim)
    dtype = TORCH_DTYPES[spec.query_dtype]
    return q if q.dtype == dtype else q.to(dtype)
