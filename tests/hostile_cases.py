"""Kernels on metadata of any value, over memory with fences: nothing but what a call was handed is read or written.

On a CPU each tensor lies between pages that may not be touched, its end right at the fence (16 bytes of canary apart
at most): a wild address of a kernel under Triton's interpreter ends the process. tests/test_hostile.py therefore runs
this file as a process of its own, which writes down each example before it runs it. On a GPU canaries lie around each
tensor, and compute-sanitizer sees what they do not.

    python tests/hostile_cases.py attention 200 log.txt
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

if __name__ == "__main__" and "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cache import PagedCache
from octavo.calls import AppendCall, AttentionCall
from octavo.device import Device
from octavo.formats import TORCH_DTYPES
from octavo.indexer_calls import SCALE_BYTES, IndexAppendCall, IndexBytes, LogitsCall, PagedLogitsCall
from octavo.layouts import shapes
from octavo.spec import AttentionSpec
from octavo.testing import fuzz

FENCE = 1 << 26
CANARY = 0xA5
APART = 4096  # bytes of canary on either side on a GPU
_libc = ctypes.CDLL(None, use_errno=True)


class Fenced:
    """Copies of tensors in memory with fences."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._canaries: list[torch.Tensor] = []

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        """`t`, contiguous, between fences."""
        count = t.numel() * t.element_size()
        if not count:
            return t.to(self.device)
        if self.device == "cpu":
            whole, start = self._mapped(count)
        else:
            whole = torch.full((-(-count // 16) * 16 + 2 * APART,), CANARY, dtype=torch.uint8, device=self.device)
            start = APART
        self._canaries += [whole[:start], whole[start + count :]]
        there = whole[start : start + count].view(t.dtype).view(t.shape)
        there.copy_(t)
        return there

    def _mapped(self, count: int) -> tuple[torch.Tensor, int]:
        room = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, room + 2 * FENCE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for begin in (address, address + FENCE + room):
            if _libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(FENCE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=FENCE, count=room)
        whole.fill_(CANARY)
        return whole, room - -(-count // 16) * 16

    def check(self) -> None:
        """Fails unless every canary is as it was."""
        assert all(bool((canary == CANARY).all()) for canary in self._canaries), "a canary was written over"


def ids(bits: int = 32) -> st.SearchStrategy[int]:
    """Integers of any value, small and extreme ones often."""
    most = 2 ** (bits - 1) - 1
    edges = (0, 1, -1, 2, 3, 17, 64, 100, 2**30, 2**31 - 1, -(2**31), most, most - 63, -most - 1)
    return st.sampled_from(edges) | st.integers(-3, 40) | st.integers(-most - 1, most)


def metadata(count: int, bits: int = 32) -> st.SearchStrategy[list[int]]:
    return st.lists(ids(bits), min_size=count, max_size=count)


def starts_of(batch: int, most: int) -> st.SearchStrategy[list[int]]:
    """query_starts of any values, or near what they should be but in any order."""
    return metadata(batch + 1) | st.lists(st.integers(-3, most), min_size=batch + 1, max_size=batch + 1)


def small_specs() -> st.SearchStrategy[AttentionSpec]:
    """Specs of fuzz whose pools are small."""
    return fuzz.triton_specs().filter(lambda s: s.head_dim <= 128 and s.num_q_heads <= 32)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def fenced_cache(spec: AttentionSpec, pages: int, seed: int, fenced: Fenced) -> PagedCache:
    """A cache of random bytes, NaN among them, whose pools and scales are fenced."""
    storage = torch.uint8 if spec.fp8 else TORCH_DTYPES[spec.kv_dtype]
    pools = [fenced(random_bytes(shape, storage, seed + i)) for i, shape in enumerate(shapes(spec, pages))]
    scales = []
    for _ in range(2 if spec.fp8 else 0):
        shape = {"tensor": (), "head": (spec.num_kv_heads,)}.get(
            spec.scale_granularity, (pages, spec.num_kv_heads, spec.page_size)
        )
        scales.append(fenced(torch.rand(shape) + 0.1))
    k_scale, v_scale = scales or (None, None)
    return PagedCache.view(spec, *pools, k_scale=k_scale, v_scale=v_scale)


@st.composite
def attention_calls(
    draw: st.DrawFn, specs: st.SearchStrategy[AttentionSpec] | None = None, least: int = 1
) -> dict[str, Any]:
    """Fields of a call whose metadata is of any value, starts in order sometimes.

    least: pages of the pool and of a table's row, for 1 of which a GPU would compile a kernel more.
    """
    batch, width, rows = draw(st.integers(0, 4)), draw(st.integers(least, 4)), draw(st.integers(least, 20))
    starts = draw(starts_of(batch, rows + 3))
    return {
        "spec": draw(specs or small_specs()),
        "pages": draw(st.integers(least, 5)),
        "rows": rows,
        "seq_lens": draw(metadata(batch)),
        "page_table": [draw(metadata(width)) for _ in range(batch)],
        "query_starts": sorted(starts) if draw(st.booleans()) else starts,
        "num_decodes": draw(st.none() | st.integers(0, batch)),
        "max_query_len": draw(st.none() | st.integers(0, 20)),
        "seed": draw(st.integers(0, 1000)),
    }


def run_attention(case: dict[str, Any], device: str) -> None:
    from octavo.choose import choose
    from octavo.kernels.triton.decode import decode
    from octavo.kernels.triton.prefill import prefill

    spec, rows, fenced = case["spec"], case["rows"], Fenced(device)
    cache = fenced_cache(spec, case["pages"], case["seed"], fenced)
    facts = Device.named("h200") if device == "cpu" else Device.detect(device)
    table = torch.tensor(case["page_table"] or [[]], dtype=torch.int32)[: len(case["seq_lens"])]
    context = max(1, table.shape[1]) * spec.page_size
    size = choose(spec, facts, "triton").workspace_bytes(max(1, len(case["seq_lens"])), rows, context)
    e4m3 = {"q_scale": spec.query_dtype == "fp8_e4m3", "out_scale": spec.out_dtype == "fp8_e4m3"}
    scales = {name: fenced(torch.tensor(0.5)) if needed else None for name, needed in e4m3.items()}
    out = random_bytes((rows, spec.num_q_heads, spec.value_dim), TORCH_DTYPES[spec.out_dtype], 1)
    call = AttentionCall(
        spec=spec,
        q=fenced(random_bytes((rows, spec.num_q_heads, spec.head_dim), TORCH_DTYPES[spec.query_dtype], 2)),
        cache=cache.bytes(),
        seq_lens=fenced(torch.tensor(case["seq_lens"], dtype=torch.int32)),
        page_table=fenced(table),
        query_starts=fenced(torch.tensor(case["query_starts"], dtype=torch.int32)),
        sinks=fenced(torch.zeros(spec.num_q_heads)) if spec.sinks else None,
        workspace=fenced(torch.full((size,), 0xFF, dtype=torch.uint8)),
        out=fenced(out),
        lse=fenced(torch.zeros(rows, spec.num_q_heads)) if spec.lse else None,
        num_decodes=case["num_decodes"],
        max_query_len=case["max_query_len"],
        **scales,
    )
    before = [pool.clone() for pool in (call.cache.k_pool, call.cache.v_pool)]
    prefill(call)
    decode(call)
    fenced.check()
    for pool, was in zip((call.cache.k_pool, call.cache.v_pool), before, strict=True):
        assert torch.equal(pool.view(torch.uint8), was.view(torch.uint8)), "attention wrote to the cache"


@st.composite
def append_calls(draw: st.DrawFn, specs: st.SearchStrategy[AttentionSpec] | None = None) -> dict[str, Any]:
    rows = draw(st.integers(1, 40))
    spec = draw(specs or small_specs())
    pages = draw(st.integers(1, 3))
    near = st.integers(-2, pages * spec.page_size + 2)
    slots = draw(st.lists(ids(64) | near, min_size=rows, max_size=rows))
    if draw(st.booleans()):  # a run, which may leave the pool in the middle of a tile
        first = draw(near | ids(64).filter(lambda n: n < 2**62))
        slots = list(range(first, first + rows))
    return {"spec": spec, "pages": pages, "slots": slots, "seed": draw(st.integers(0, 1000))}


def run_append(case: dict[str, Any], device: str) -> None:
    from octavo.kernels.triton.append import append

    spec, fenced, rows = case["spec"], Fenced(device), len(case["slots"])
    cache = fenced_cache(spec, case["pages"], case["seed"], fenced)
    k = fenced(random_bytes((rows, spec.num_kv_heads, spec.head_dim), torch.bfloat16, 1))
    v = fenced(random_bytes((rows, spec.num_kv_heads, spec.value_dim), torch.bfloat16, 2))
    slots, counters = fenced(torch.tensor(case["slots"])), fenced(torch.zeros(2, dtype=torch.int32))
    append(AppendCall(spec, k, v, slots, cache.bytes(), counters))
    fenced.check()
    outside = [s for s in case["slots"] if s != -1 and not 0 <= s < case["pages"] * spec.page_size]
    assert int(counters[0]) == len(outside)


@st.composite
def indexer_calls(draw: st.DrawFn, shapes: tuple[tuple[int, int, int, int], ...] | None = None) -> dict[str, Any]:
    """shapes: (heads, head_dim, page size, rows a sequence) to choose from, where each is compiled; None: any."""
    any_shape = st.tuples(
        st.integers(1, 64), st.sampled_from((64, 128)), st.sampled_from((16, 32, 64, 128)), st.integers(1, 4)
    )
    heads, dim, page_size, n = draw(any_shape if shapes is None else st.sampled_from(shapes))
    batch, keys, width = draw(st.integers(1, 4)), draw(st.integers(1, 200)), draw(st.integers(1, 3))
    return {
        "page_size": page_size,
        "dim": dim,
        "heads": heads,
        "pages": draw(st.integers(1, 4)),
        "scales": draw(st.sampled_from(("fp32", "pow2", "ue8m0"))),
        "seq_lens": draw(st.lists(metadata(n), min_size=batch, max_size=batch)),
        "a_row": draw(st.booleans()),
        "page_table": [draw(metadata(width)) for _ in range(batch)],
        "max_context": draw(st.integers(1, 300)),
        "fill": draw(st.sampled_from((None, 0.0))),
        "keys": keys,
        "starts": draw(metadata(batch * n)),
        "ends": draw(metadata(batch * n)),
        "compressed": draw(st.booleans()),
        "slots": draw(st.lists(ids(64), min_size=keys, max_size=keys)),
        "k": draw(st.integers(1, 64)),
    }


def run_indexer(case: dict[str, Any], device: str, logits: str = "triton") -> None:
    """logits: the backend of both forms of logits."""
    from octavo.kernels.triton.index_append import index_append
    from octavo.kernels.triton.topk import topk_indices

    module = importlib.import_module(f"octavo.kernels.{logits}.mqa_logits")

    fenced, dim, heads, keys = Fenced(device), case["dim"], case["heads"], case["keys"]
    lens = torch.tensor(case["seq_lens"], dtype=torch.int32)
    batch, n = lens.shape
    pages = fenced(random_bytes((case["pages"], case["page_size"], 1, dim + SCALE_BYTES), torch.uint8, 1))
    cache = IndexBytes(pages, case["scales"])
    k = fenced(random_bytes((keys, dim), torch.bfloat16, 2))
    slots, counters = fenced(torch.tensor(case["slots"])), fenced(torch.zeros(2, dtype=torch.int32))
    index_append(IndexAppendCall(k, slots, cache, counters))
    q = fenced(random_bytes((batch, n, heads, dim), torch.float8_e4m3fn, 3))
    weights, rows = fenced(torch.rand(batch * n, heads)), batch * n
    out = fenced(torch.zeros(rows, case["max_context"]))
    table = fenced(torch.tensor(case["page_table"], dtype=torch.int32))
    given = fenced(lens if case["a_row"] else lens[:, 0])
    module.paged_mqa_logits(PagedLogitsCall(q, cache, weights, given, table, case["max_context"], out, case["fill"]))
    wide = fenced(torch.zeros(rows, max(1, keys // 2) if case["compressed"] else keys))
    ranges = [fenced(torch.tensor(case[name], dtype=torch.int32)) for name in ("starts", "ends")]
    run = fenced(random_bytes((keys, dim), torch.float8_e4m3fn, 4))
    scale = fenced(torch.rand(keys))
    flat = q.view(rows, heads, dim)
    module.mqa_logits(LogitsCall(flat, run, scale, weights, *ranges, wide, case["fill"], case["compressed"]))
    chosen = fenced(torch.zeros(rows, case["k"], dtype=torch.int32))
    topk_indices(out, fenced(lens.reshape(-1)), chosen)
    assert bool(((chosen >= -1) & (chosen < out.shape[1])).all())
    fenced.check()


@st.composite
def plan_calls(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.integers(1, 6))
    spec = AttentionSpec(
        8 * draw(st.sampled_from((1, 4))),
        8,
        draw(st.sampled_from((64, 128))),
        page_size=draw(st.sampled_from((32, 64, 128))),
        window=draw(st.none() | st.integers(1, 200)),
        max_query_len=draw(st.integers(1, 8)),
        batch_invariant=draw(st.booleans()),
    )
    return {
        "spec": spec,
        "seq_lens": draw(metadata(batch)),
        "query_starts": draw(starts_of(batch, 30)),
        "width": draw(st.integers(1, 2000)),
        "num_decodes": draw(st.none() | st.integers(0, batch)),
        "max_query_len": draw(st.none() | st.integers(1, 20)),
    }


def run_decode_plan(case: dict[str, Any], device: str) -> None:
    """The schedule of Hopper's decode, made of any metadata, names sequences that there are, and units in order."""
    from octavo import hopper_tuning
    from octavo.kernels.gluon import plan as module

    facts = replace(Device.named("h200"), num_sms=6)  # few programs, so that they are soon interpreted
    module.device_of = lambda _: facts
    spec, fenced = case["spec"], Fenced(device)
    batch = len(case["seq_lens"])
    schedule = fenced(torch.full((hopper_tuning.decode_schedule_ints(spec, facts, batch),), -7, dtype=torch.int32))
    table = torch.zeros(1, case["width"], dtype=torch.int32).expand(batch, -1)
    lens, starts = (fenced(torch.tensor(case[name], dtype=torch.int32)) for name in ("seq_lens", "query_starts"))
    module.plan(spec, lens, table, starts, schedule, case["num_decodes"], case["max_query_len"])
    fenced.check()
    count = batch if case["num_decodes"] is None else case["num_decodes"]
    if count == 0:
        return
    made = module.schedule_of(spec, facts, count, case["max_query_len"], schedule)
    units = schedule[: count + 1].tolist()
    most = -(-case["width"] * spec.page_size // 64) + 1
    assert units[0] == 0 and all(0 <= b - a <= most for a, b in zip(units, units[1:], strict=False))
    begin = count + 1 + made.programs
    first, starts_of = schedule[count + 1 : begin].tolist(), schedule[begin : begin + made.programs + 1].tolist()
    assert starts_of == sorted(starts_of) and starts_of[0] == 0 and starts_of[-1] == units[-1] * made.heads
    assert all(0 <= b < count for b, s, e in zip(first, starts_of, starts_of[1:], strict=False) if e > s)


CASES: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], Callable[[Any, str], None]]] = {
    "attention": (attention_calls, run_attention),
    "append": (append_calls, run_append),
    "indexer": (indexer_calls, run_indexer),
    "decode_plan": (plan_calls, run_decode_plan),
}


def far(shape: tuple[int, ...], dtype: torch.dtype, stride: int, dim: int) -> torch.Tensor:
    """A tensor whose elements of `dim` lie `stride` apart, in memory that takes none until it is touched."""
    strides = [1] * len(shape)
    inner = [i for i in range(len(shape)) if i != dim]
    for i, j in zip(inner[-2::-1], inner[:0:-1], strict=True):
        strides[i] = strides[j] * shape[j]
    strides[dim] = stride
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    count = elements * torch.empty((), dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    return torch.frombuffer(mmap.mmap(-1, count, flags=flags), dtype=dtype).as_strided(shape, strides)


def run_far_heads(device: str) -> None:
    """Heads or elements further apart than int32 counts, of query, output, lse and parts: the same results."""
    from octavo.kernels.triton.decode import decode
    from octavo.kernels.triton.merge_states import merge_states
    from octavo.kernels.triton.mqa_logits import mqa_logits
    from octavo.kernels.triton.prefill import prefill
    from octavo.testing.inputs import make_batch

    assert device == "cpu", "on a GPU this memory would have to be there"
    spec, apart = AttentionSpec(8, 1, 64, layout="nhd", page_size=16, lse=True), 2**29
    for rows, lens in (([9], [20]), ([1], [20]), ([1], [600])):
        batch = make_batch(spec, lens, rows)
        results = []
        for head_stride in (None, apart):
            tensors = [batch.q, torch.zeros_like(batch.q), torch.zeros(batch.q.shape[:2])]
            if head_stride:
                tensors = [far(tuple(t.shape), t.dtype, head_stride, 1).copy_(t) for t in tensors]
            q, out, lse = tensors
            call = replace(batch.call(out, lse, torch.zeros(1 << 20, dtype=torch.uint8)), q=q)
            prefill(call)
            decode(call)
            results.append((out.contiguous(), lse.contiguous()))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    elements = far((1, 8, 64), torch.bfloat16, 2**26, 2)  # an output whose elements lie apart
    decode(replace(call, q=batch.q, out=elements, lse=torch.zeros(1, 8)))
    assert torch.equal(elements.contiguous(), results[0][0])
    outs, lses = torch.randn(2, 3, 8, 64), torch.randn(2, 3, 8)
    spread = far((2, 3, 8, 64), torch.float32, 2**26, 3).copy_(outs)
    assert torch.equal(merge_states(spread, lses)[0].contiguous(), merge_states(outs, lses)[0])
    turned = outs.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(merge_states(turned, lses)[0].contiguous(), merge_states(outs, lses)[0])
    q, k = torch.randn(3, 16, 64).to(torch.float8_e4m3fn), torch.randn(70, 64).to(torch.float8_e4m3fn)
    ranges = torch.zeros(3, dtype=torch.int32), torch.full((3,), 70, dtype=torch.int32)
    logits = []
    for query in (q, far((3, 16, 64), q.dtype, 2**29, 1).copy_(q), far((3, 16, 64), q.dtype, 2**26, 2).copy_(q)):
        logits.append(torch.zeros(3, 70))
        mqa_logits(LogitsCall(query, k, torch.ones(70), torch.ones(3, 16), *ranges, logits[-1], 0.0, False))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def run_wild_read(device: str) -> None:
    """Reads one element beyond a fenced tensor: what shows that the fence is one."""
    import triton
    import triton.language as tl

    @triton.jit
    def read(x, out, at):
        tl.store(out, tl.load(x + at))

    x = Fenced(device)(torch.zeros(16, dtype=torch.int32))
    read[(1,)](x, torch.zeros(1, dtype=torch.int32), 16)


ALONE = {"wild_read": run_wild_read, "far_heads": run_far_heads}


def main(name: str, examples: int, log: str, device: str = "cpu") -> None:
    """Run `examples` examples of a kind; each is written to `log` before it is run."""
    if name in ALONE:
        return ALONE[name](device)
    strategy, run = CASES[name]

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy())
    def check(case: Any) -> None:
        with open(log, "w") as file:
            file.write(repr(case))
        run(case, device)

    check()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *sys.argv[4:])
