"""The fewest bytes and operations of a case, and the ceilings a machine has for them, measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..formats import TORCH_DTYPES
from ..spec import AttentionSpec
from .timing import time_calls


@dataclass(frozen=True)
class Work:
    """What must be done at least: bytes (each input read once, each output written once) and operations."""

    bytes: int
    flops: int


def attention_work(spec: AttentionSpec, seq_lens: Sequence[int], query_lens: Sequence[int]) -> Work:
    """Keys and values that any row sees, queries and outputs; 2 (D + Dv) operations a visible pair and query head."""
    tokens = pairs = rows = 0
    for length, n in zip(seq_lens, query_lens, strict=True):
        n = min(n, length)
        rows += n
        for p in range(length - n, length) if spec.window else ():
            pairs += min(p + 1, spec.window or 0)
        if not spec.window:
            pairs += n * (length - n) + n * (n + 1) // 2 if spec.causal else n * length
        tokens += min(length, spec.window + n - 1) if spec.window else length
    query, out = TORCH_DTYPES[spec.query_dtype].itemsize, TORCH_DTYPES[spec.out_dtype].itemsize
    ends = spec.num_q_heads * (spec.head_dim * query + spec.value_dim * out)
    return Work(
        tokens * spec.bytes_per_token + rows * ends, 2 * pairs * spec.num_q_heads * (spec.head_dim + spec.value_dim)
    )


def append_work(spec: AttentionSpec, tokens: int, source_itemsize: int = 2) -> Work:
    """Of append: new keys and values read once and written once; its few operations do not count."""
    stored = spec.head_dim if spec.mla else spec.head_dim + spec.value_dim
    return Work(tokens * (spec.num_kv_heads * stored * source_itemsize + spec.bytes_per_token + 8), 0)


@dataclass(frozen=True)
class Ceilings:
    """Device copy (bytes read plus written) and read in TB/s, FP8 matrix product in TFLOP/s; None: not measured."""

    copy_tbs: float | None = None
    read_tbs: float | None = None
    fp8_tflops: float | None = None


def measure_ceilings(device: torch.device | str, gib: float = 2.0) -> Ceilings:
    """Copy and read `gib` GiB and multiply 8192^3 in e4m3, random data; on a CPU nothing is measured."""
    device = torch.device(device)
    if device.type != "cuda":
        return Ceilings()
    n = int(gib * 2**30) // 4
    source = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy = _eager_us(lambda: target.copy_(source))  # in a graph it becomes a memcpy node, at two thirds of the rate
    floats = source.bitwise_and(0x3FFFFFFF).view(torch.float32)
    read = time_calls([lambda: floats.sum()], device)
    a = torch.randn(8192, 8192, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    product = time_calls(
        [
            lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
        ],
        device,
    )
    return Ceilings(8 * n / copy / 1e6, 4 * n / read.us / 1e6, 2 * 8192**3 / product.us / 1e6)


def _eager_us(call: Callable[[], object], repeats: int = 15) -> float:
    """Median microseconds of `call` by device events, launched one by one: for calls of milliseconds."""
    samples = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples[2:])
