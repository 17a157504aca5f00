"""Attention: the buffers of one layer kind, plan once a step, run once a layer.

Choosing happened before (`octavo.choose`), at construction. plan keeps references to the step's device tensors and
refreshes the schedule that its layers share; run only checks shapes and launches.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from .cache import PagedCache
from .choose import choose
from .device import torch_device
from .errors import InvalidInput
from .formats import TORCH_DTYPES, check_tensors
from .rules import PHASES
from .spec import AttentionSpec, dtype_name, positive


class Attention:
    """Attention of one layer kind over paged caches.

    Args:
        spec: what is computed.
        max_batch: most sequences of a call.
        max_query_tokens: most query rows of a call.
        max_context: most tokens of a sequence.
        device: where; also names the rules to choose by.
        workspace: another Attention's `workspace` to share, uint8 and at least `workspace_bytes` long; None: its own.
        backend: a backend's name, which then runs or is refused; None: the first that may.

    Attributes:
        choice: the `Choice` in use. workspace: uint8 device buffer; a share of it may be handed to another Attention.

    Raises Unsupported with every broken rule, and InvalidInput for a workspace too small.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        max_batch: int,
        max_query_tokens: int,
        max_context: int,
        device: Any = "cuda",
        workspace: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("max_query_tokens", max_query_tokens),
            ("max_context", max_context),
        ):
            positive(name, value)
        self.spec = spec
        self.device = torch_device(device)
        self.choice = choose(spec, self.device, backend)
        self.max_batch, self.max_query_tokens, self.max_context = max_batch, max_query_tokens, max_context
        self.workspace_bytes = self.choice.workspace_bytes(max_batch, max_query_tokens, max_context)
        if workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        check_tensors(workspace=workspace)
        if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
            raise InvalidInput("workspace must be uint8 [n], contiguous", f"{workspace.dtype} {list(workspace.shape)}")
        elif workspace.numel() < self.workspace_bytes or workspace.device != self.device:
            raise InvalidInput(
                f"workspace must hold {self.workspace_bytes} bytes on {self.device}",
                f"{workspace.numel()} on {workspace.device}",
            )
        self.workspace = workspace
        # Of its own, not in the workspace: kinds that share a workspace each keep their step's schedule.
        self._schedules = {
            phase: torch.empty(ints, dtype=torch.int32, device=self.device)
            for phase in PHASES
            if (ints := self.choice.schedule_ints(phase, max_batch, max_query_tokens))
        }
        self._spec_json = spec.to_json()
        self._cache_fields = spec.cache_fields
        self._query_dtype = TORCH_DTYPES[spec.query_dtype]
        self._out_dtype = TORCH_DTYPES[spec.out_dtype]
        self._step: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._num_decodes: int | None = None
        self._max_query_len: int | None = None

    def plan(
        self,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        query_starts: torch.Tensor,
        *,
        num_decodes: int | None = None,
        max_query_len: int | None = None,
    ) -> None:
        """Set the batch that the next runs are for; copies nothing to the host, keeps references to the three tensors.

        From plan to the end of the step's last run nothing may write to them, on this stream or another: Hopper's
        decode reads them before the kernel before it has ended.

        seq_lens int32 [B]: tokens in the cache, the new ones included; 0 or less is padding.
        page_table int32 [>= B, max pages]: page ids; what lies beyond a sequence's pages may be anything.
        query_starts int32 [B + 1]: first query row of each sequence, then the end; decode sequences come first.
        num_decodes: how many sequences are decodes, if the host knows; None: those of at most spec.max_query_len rows.
        max_query_len: most query rows of any sequence, if the host knows.
        """
        check_tensors(seq_lens=seq_lens, page_table=page_table, query_starts=query_starts)
        batch = seq_lens.shape[0] if seq_lens.dim() == 1 else -1
        _check_int32("seq_lens", seq_lens, "[B]", batch >= 0, self.device)
        table_fits = page_table.dim() == 2 and page_table.shape[0] >= batch
        _check_int32("page_table", page_table, f"[{batch} or more, max pages]", table_fits, self.device)
        _check_int32(
            "query_starts", query_starts, f"[{batch + 1}]", tuple(query_starts.shape) == (batch + 1,), self.device
        )
        for name, tensor in (("seq_lens", seq_lens), ("page_table", page_table), ("query_starts", query_starts)):
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise InvalidInput(f"{name} must be contiguous in its last dimension", f"strides {tensor.stride()}")
        if batch > self.max_batch:
            raise InvalidInput(f"at most max_batch = {self.max_batch} sequences", batch)
        for name, count, most in (("num_decodes", num_decodes, batch), ("max_query_len", max_query_len, None)):
            if count is None:
                continue
            if not isinstance(count, (int, torch.SymInt)) or count < 0 or (most is not None and count > most):
                limit = "not negative" if most is None else f"in [0, {most}]"
                raise InvalidInput(f"{name} must be an integer, {limit}", repr(count))
        self._step = (seq_lens, page_table, query_starts)
        self._num_decodes, self._max_query_len = num_decodes, max_query_len
        for phase, schedule in self._schedules.items():
            backend = self.choice.phase(phase).backend
            ops.plan(*self._step, schedule, self._spec_json, phase, backend, num_decodes, max_query_len)

    def run(
        self,
        q: torch.Tensor,
        cache: PagedCache,
        *,
        q_scale: torch.Tensor | None = None,
        out_scale: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the planned batch over one layer's cache: q [T, Hq, D] -> [T, Hq, Dv] of spec.out_dtype.

        q_scale: fp32 [] or [Hq], of an e4m3 query; out_scale: fp32 [], of an e4m3 output (out = stored * out_scale);
        sinks: fp32 or bf16 [Hq], with spec.sinks; out: written and returned, None: a new tensor; lse: fp32 [T, Hq],
        written, with spec.lse: natural logarithm, -inf for a row that sees nothing (its output is 0).
        Rows that belong to no sequence become 0 and -inf. Raises InvalidInput before anything is launched.
        """
        if self._step is None:
            raise InvalidInput("plan must be called before run")
        self._check_query(q)
        self._check_cache(cache)
        self._check_scales(q_scale, out_scale)
        self._check_sinks_and_lse(sinks, lse, q.shape[0])
        shape = (q.shape[0], self.spec.num_q_heads, self.spec.value_dim)
        if out is None:
            out = torch.empty(shape, dtype=self._out_dtype, device=q.device)
        else:
            _check_tensor("out", out, shape, (self._out_dtype,), self.device)
        seq_lens, page_table, query_starts = self._step
        memory = cache.memory
        ops.attention(
            q,
            memory.k_pool,
            memory.v_pool,
            cache.k_scale,
            cache.v_scale,
            seq_lens,
            page_table,
            query_starts,
            q_scale,
            out_scale,
            sinks,
            self.workspace,
            self._schedules.get("decode"),
            self._schedules.get("prefill"),
            out,
            lse,
            memory.strides,
            self._spec_json,
            self.choice.prefill.backend,
            self.choice.decode.backend,
            self._num_decodes,
            self._max_query_len,
        )
        return out

    def _check_query(self, q: torch.Tensor) -> None:
        check_tensors(q=q)
        rows = q.shape[0]
        shape = (rows, self.spec.num_q_heads, self.spec.head_dim)
        _check_tensor("q", q, shape, (self._query_dtype,), self.device)
        if rows > self.max_query_tokens:
            raise InvalidInput(f"at most max_query_tokens = {self.max_query_tokens} query rows", rows)
        if q.stride(-1) != 1:
            raise InvalidInput("q must be contiguous in its last dimension", f"strides {q.stride()}")

    def _check_scales(self, q_scale: torch.Tensor | None, out_scale: torch.Tensor | None) -> None:
        spec = self.spec
        for name, scale, dtype in (("q_scale", q_scale, spec.query_dtype), ("out_scale", out_scale, spec.out_dtype)):
            if scale is None:
                continue
            if dtype != "fp8_e4m3":
                raise InvalidInput(f"{name} goes with fp8_e4m3 alone", dtype)
            check_tensors(**{name: scale})
            shape = (spec.num_q_heads,) if name == "q_scale" and scale.numel() != 1 else ()
            single = scale.reshape(()) if scale.numel() == 1 else scale
            _check_tensor(name, single, shape, (torch.float32,), self.device)

    def _check_sinks_and_lse(self, sinks: torch.Tensor | None, lse: torch.Tensor | None, rows: int) -> None:
        spec = self.spec
        if (sinks is None) == spec.sinks:
            raise InvalidInput(f"sinks must {'' if spec.sinks else 'not '}be given: spec.sinks is {spec.sinks}")
        if sinks is not None:
            check_tensors(sinks=sinks)
            _check_tensor("sinks", sinks, (spec.num_q_heads,), (torch.float32, torch.bfloat16), self.device)
        if (lse is None) == spec.lse:
            raise InvalidInput(f"lse must {'' if spec.lse else 'not '}be given: spec.lse is {spec.lse}")
        if lse is not None:
            _check_tensor("lse", lse, (rows, spec.num_q_heads), (torch.float32,), self.device)

    def _check_cache(self, cache: PagedCache) -> None:
        if not isinstance(cache, PagedCache):
            raise InvalidInput("cache must be a PagedCache", type(cache).__name__)
        if cache.cache_fields == self._cache_fields and cache.device == self.device:
            return
        if cache.device != self.device:
            raise InvalidInput(f"cache must be on {self.device}", cache.device)
        needed, came = self._cache_fields, cache.cache_fields
        differ = [name for name in {**needed, **came} if needed.get(name) != came.get(name)]
        raise InvalidInput(
            "the cache must be of the attention's kind: " + ", ".join(f"{n}={needed.get(n)}" for n in differ),
            ", ".join(f"{n}={came.get(n)}" for n in differ),
        )


def attention(
    spec: AttentionSpec,
    q: torch.Tensor,
    cache: PagedCache,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    num_decodes: int | None = None,
    max_query_len: int | None = None,
    backend: str | None = None,
    **run_arguments: Any,
) -> torch.Tensor:
    """The one-call form of `Attention`, with buffers of its own: q [T, Hq, D] -> [T, Hq, Dv] of spec.out_dtype.

    seq_lens int32 [B], page_table int32 [>= B, max pages], query_starts int32 [B + 1], num_decodes and max_query_len
    are those of `Attention.plan`; q, cache and what else is given (q_scale, out_scale, sinks, out, lse) those of
    `Attention.run`; backend that of `choose`. Raises InvalidInput as they do, Unsupported where no backend may.
    """
    check_tensors(q=q, seq_lens=seq_lens, page_table=page_table)
    made = Attention(
        spec,
        max_batch=max(seq_lens.shape[0], 1),
        max_query_tokens=max(q.shape[0], 1),
        max_context=max(page_table.shape[-1], 1) * spec.page_size,
        device=q.device,
        backend=backend,
    )
    made.plan(seq_lens, page_table, query_starts, num_decodes=num_decodes, max_query_len=max_query_len)
    return made.run(q, cache, **run_arguments)


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of keys.

    outs [n, T, Hq, Dv], lses fp32 [n, T, Hq] -> out [T, Hq, Dv] of outs' dtype, lse fp32 [T, Hq].
    A part with lse -inf has no say. Where attention has sinks, pass them to one of the parts only.
    """
    check_tensors(outs=outs, lses=lses)
    if outs.dim() != 4 or outs.shape[0] < 1 or tuple(lses.shape) != tuple(outs.shape[:3]):
        raise InvalidInput(
            "outs must be [n, T, Hq, Dv] and lses [n, T, Hq]", f"{list(outs.shape)} and {list(lses.shape)}"
        )
    if lses.dtype != torch.float32 or lses.device != outs.device:
        raise InvalidInput(f"lses must be float32 on {outs.device}", f"{dtype_name(lses.dtype)} on {lses.device}")
    return ops.merge_states(outs, lses, ops.cache_backend(outs.device, "merge_states"))


def _check_int32(name: str, t: torch.Tensor, shape: str, shape_holds: bool, device: torch.device) -> None:
    if t.dtype != torch.int32 or t.device != device or not shape_holds:
        raise InvalidInput(
            f"{name} must be int32 {shape} on {device}", f"{dtype_name(t.dtype)} {list(t.shape)} on {t.device}"
        )


def _check_tensor(
    name: str, t: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if tuple(t.shape) != shape or t.dtype not in dtypes or t.device != device:
        wanted = " or ".join(dtype_name(d) for d in dtypes)
        raise InvalidInput(
            f"{name} must be {wanted} {list(shape)} on {device}", f"{dtype_name(t.dtype)} {list(t.shape)} on {t.device}"
        )
