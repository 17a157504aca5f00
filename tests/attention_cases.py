"""Triton over the grid of attention, called as `octavo.ops` calls kernels: a poisoned output, a workspace of 0xFF."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo import tuning
from octavo.calls import AttentionCall
from octavo.device import Device
from octavo.formats import TORCH_DTYPES
from octavo.testing.grid import AXES, FP8_ERROR, Cell, faults, grid
from octavo.testing.inputs import Batch

__all__ = ["AXES", "FP8_ERROR", "Cell", "alone", "call_of", "faults", "grid", "run", "with_rows_of_no_sequence"]


def call_of(batch: Batch, num_decodes: int | None = None, max_query_len: int | None = None) -> AttentionCall:
    """The call of a batch."""
    spec, rows, device = batch.spec, batch.q.shape[0], batch.q.device
    facts = Device.named("h200") if device.type == "cpu" else Device.detect(device)
    context = batch.page_table.shape[1] * spec.page_size
    size = tuning.split_workspace_bytes(spec, facts, batch.seq_lens.shape[0], max(rows, 1), context)
    out = torch.empty(rows, spec.num_q_heads, spec.value_dim, dtype=TORCH_DTYPES[spec.out_dtype], device=device)
    out.view(torch.uint8).fill_(0xFF)
    lse = torch.full((rows, spec.num_q_heads), float("nan"), device=device) if spec.lse else None
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    return batch.call(out, lse, workspace, num_decodes, max_query_len)


def alone(batch: Batch, index: int, rows: slice) -> Batch:
    """The batch of its sequence `index` alone, whose query rows are `rows`."""
    return replace(
        batch,
        q=batch.q[rows],
        seq_lens=batch.seq_lens[index : index + 1],
        page_table=batch.page_table[index : index + 1],
        query_starts=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=batch.q.device),
    )


def run(batch: Batch, **plan: int | None) -> torch.Tensor:
    """Attention of a batch by Triton's kernels; its lse is left as `batch.lse`."""
    from octavo.kernels.triton.decode import decode
    from octavo.kernels.triton.prefill import prefill

    call = call_of(batch, **plan)
    if call.num_decodes != batch.seq_lens.shape[0]:
        prefill(call)
    if call.num_decodes != 0:
        decode(call)
    batch.lse = call.lse
    return call.out


def with_rows_of_no_sequence(batch: Batch, before: int, after: int) -> Batch:
    """The batch with query rows before its first sequence and after its last."""
    q = torch.cat([batch.q[:1].expand(before, -1, -1), batch.q, batch.q[:1].expand(after, -1, -1)])
    return replace(batch, q=q.contiguous(), query_starts=batch.query_starts + before)
