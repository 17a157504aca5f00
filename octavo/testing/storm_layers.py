"""What a serving storm computes with: a layer whose every row is known, and the fixed memory that a step reads."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from ..attention import Attention
from ..cache import PagedCache
from ..formats import FORMATS, dequantise, quantise
from ..spec import AttentionSpec

VOCABULARY = 509


class Layer:
    """One model's layer: its cache, its attention, and the keys and values of each token id."""

    def __init__(self, spec: AttentionSpec, pages: int, attention: Attention, seed: int) -> None:
        self.spec, self.attention = spec, attention
        device = attention.device
        generator = torch.Generator().manual_seed(seed)
        shape = (VOCABULARY, spec.num_kv_heads)
        self.k = torch.randn(*shape, spec.head_dim, generator=generator).bfloat16().to(device)
        self.v = torch.randn(*shape, spec.value_dim, generator=generator).bfloat16().to(device)
        self.q = torch.randn(VOCABULARY, spec.num_q_heads, spec.head_dim, generator=generator).bfloat16().to(device)
        self.cache = PagedCache.allocate(spec, pages, device, 1 / 16, 1 / 8)
        format = FORMATS[spec.kv_dtype]
        scales = (self.cache.k_scale, self.cache.v_scale)
        # What a token's keys and values are once stored: the law, not the cache.
        self.stored = [
            dequantise(quantise(x, scale, format), scale, format, torch.float64)
            for x, scale in zip((self.k, self.v), scales, strict=True)
        ]

    def expected(self, tokens: list[int], position: int) -> torch.Tensor:
        """Attention of the row at `position` over tokens[: position + 1], float64 [Hq, Dv]."""
        spec = self.spec
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        ids = torch.tensor(tokens[first : position + 1], device=self.k.device)
        k, v = (x[ids] for x in self.stored)
        q = self.q[tokens[position]].double().view(spec.num_kv_heads, spec.group_size, -1)
        scores = torch.einsum("hgd,nhd->hgn", q, k) * spec.scale
        return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).reshape(spec.num_q_heads, -1)


class Buffers:
    """Fixed device memory of one kind of step: what a graph reads, written anew before each."""

    def __init__(self, batch: int, rows: int, width: int, device: torch.device) -> None:
        self.device = device
        self.seq_lens = torch.ones(batch, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(batch + 1, dtype=torch.int32, device=device).clamp_max(rows)
        self.page_table = torch.zeros(batch, width, dtype=torch.int32, device=device)
        self.slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def write(self, **values: Any) -> None:
        """Copy host lists or tensors into the front of the buffers."""
        for name, value in values.items():
            source = torch.as_tensor(value, dtype=getattr(self, name).dtype)
            if source.numel():
                target = getattr(self, name)
                part = target[: source.shape[0], : source.shape[1]] if source.dim() == 2 else target[: len(source)]
                part.copy_(source)


@contextmanager
def no_synchronisation(device: torch.device) -> Any:
    """Within it whatever makes the host wait for the device raises."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
