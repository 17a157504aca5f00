"""Hypothesis strategies of attention, append and merges: inputs that nobody would write down, for a CPU and for a GPU.

An `Example` is small and hashable; its `batch` is made from a seed, so that one that fails is one line to repeat. A GPU
compiles a kernel for each spec: there the strategies draw from `GPU_SPECS`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from ..cache import PagedCache
from ..device import KNOWN, Device
from ..formats import FORMATS, TORCH_DTYPES, cast
from ..layouts import layout_reasons
from ..reference.attention import first_token
from ..spec import GRANULARITIES, KV_DTYPES, LAYOUTS, OUT_DTYPES, PRECISIONS, QUERY_DTYPES, AttentionSpec
from .grid import AXES
from .inputs import Batch, page_table_for, slots_of
from .poison import poison

SHAPES = ("normal", "zeros", "outlier channel", "offset", "token magnitudes", "one token")
Arguments = dict[str, torch.Tensor]
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**9)


@dataclass(frozen=True)
class Values:
    """Numbers of a query, of keys or of values: 10^exponent times what `shape` names."""

    shape: str = "normal"
    exponent: int = 0

    def make(self, size: tuple[int, ...], limit: float, generator: torch.Generator) -> torch.Tensor:
        """fp32 [tokens, heads, dim], finite, at most `limit`."""
        x = torch.randn(size, generator=generator)
        if self.shape == "zeros":
            x = x * 0
        elif self.shape == "outlier channel":
            x[..., size[-1] // 3] *= 100
        elif self.shape == "offset":
            x = x + 10
        elif self.shape == "token magnitudes":
            x = x * 2.0 ** torch.randint(-8, 9, (size[0], 1, 1), generator=generator)
        elif self.shape == "one token" and size[0]:
            x[int(torch.randint(0, size[0], (), generator=generator))] *= 200
        return (x * 10.0**self.exponent).clamp(-limit, limit)


@dataclass(frozen=True)
class Inputs:
    """A call's tensors before its cache is made of them.

    Attributes:
        spec: what is computed. num_pages: of the pool. strided: the query's rows are to lie apart.
        tensors: on one device: k, v and their slots; live, the slots that some row sees; seq_lens, page_table,
            query_starts, q; k_scale, v_scale, q_scale, out_scale, sinks where the spec wants them.
    """

    spec: AttentionSpec
    num_pages: int
    strided: bool
    tensors: Arguments

    def to(self, device: torch.device | str) -> Inputs:
        """The same on another device."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    def batch(self) -> Batch:
        """Appended where they are; every byte that no live token owns is NaN."""
        spec, given = self.spec, self.tensors
        k, v, q = given["k"], given["v"], given["q"]
        cache = PagedCache.allocate(spec, self.num_pages, k.device, given.get("k_scale"), given.get("v_scale"))
        cache.append(k, v, given["slots"])
        poison(cache, given["live"], 0xFF)
        if self.strided:
            rows, heads, dim = q.shape
            whole = torch.zeros(rows + 1, 2 * heads, dim, device=q.device).to(q.dtype)
            whole[:rows, ::2] = q
            q = whole[:rows, ::2]
        arguments = {name: given[name] for name in ("q_scale", "out_scale", "sinks") if name in given}
        step = given["seq_lens"], given["page_table"], given["query_starts"]
        return Batch(spec, q, cache, *step, k, v, arguments)


@dataclass(frozen=True)
class Example:
    """One call of attention.

    Attributes:
        spec: what is computed.
        decodes, prefills: (tokens, query rows) of the sequences, decodes first; no rows or no tokens is padding.
        before, after: query rows that belong to no sequence.
        told: what the host knows: nothing, decodes (how many), or rows too (the most of a sequence).
        q, k, v: their numbers. k_scale, v_scale: of an FP8 cache; heads: each head has another, by this factor.
        shared: sequences share their first pages. holes: pages in the middle that are not in the pool.
        strided: the query's rows lie apart. seed: of all numbers and pages.
    """

    spec: AttentionSpec
    decodes: tuple[tuple[int, int], ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()
    before: int = 0
    after: int = 0
    told: str = "nothing"
    q: Values = Values()
    k: Values = Values()
    v: Values = Values()
    k_scale: float = 1.0
    v_scale: float = 1.0
    heads: float = 1.0
    shared: bool = False
    holes: bool = False
    strided: bool = False
    seed: int = 0

    @property
    def plan(self) -> dict[str, int | None]:
        """What the host tells `Attention.plan`."""
        sequences = (*self.decodes, *self.prefills)
        longest = max((rows for _, rows in sequences), default=0)
        return {
            "num_decodes": None if self.told == "nothing" else len(self.decodes),
            "max_query_len": longest if self.told == "rows" else None,
        }

    def batch(self, device: str, multiple: int = 1) -> Batch:
        """Its tensors; every byte that no live token owns is NaN.

        multiple: of the pool's pages and of the page table's width. A GPU compiles a kernel for numbers that are
        multiples of 16 and another for those that are not; 16 leaves the choice to rows and sequences alone.
        """
        return self.inputs(multiple).to(device).batch()

    def inputs(self, multiple: int = 1) -> Inputs:
        """What `batch` makes its cache of, on the CPU."""
        spec, generator = self.spec, torch.Generator().manual_seed(self.seed)
        sequences = (*self.decodes, *self.prefills)
        lens, rows = [n for n, _ in sequences], [n for _, n in sequences]
        live = sum(-(-n // spec.page_size) for n in lens)
        table, num_pages = page_table_for(lens, spec.page_size, generator, 3 + -(live + 3) % multiple)
        beyond = torch.randint(0, len(GARBAGE), (len(lens), -table.shape[1] % multiple), generator=generator)
        table = torch.cat([table, torch.tensor(GARBAGE, dtype=torch.int32)[beyond]], 1)
        if self.shared:
            for row, length in enumerate(lens):
                pages = min(-(-length // spec.page_size), -(-lens[0] // spec.page_size))
                table[row, :pages] = table[0, :pages]
        limit = 6e4 if spec.kv_dtype == "float16" else 1e9
        dtype = torch.float16 if spec.kv_dtype == "float16" else torch.bfloat16
        k = self.k.make((sum(lens), spec.num_kv_heads, spec.head_dim), limit, generator).to(dtype)
        v = self.v.make((sum(lens), spec.num_kv_heads, spec.value_dim), limit, generator).to(dtype)
        slots = slots_of(table, spec.page_size, lens)
        live = [
            slots_of(table[row : row + 1], spec.page_size, [tokens])[self._first(tokens, asked) :]
            for row, (tokens, asked) in enumerate(sequences)
        ]
        if self.holes:
            for row, length in enumerate(lens):
                at = int(torch.randint(0, max(1, -(-length // spec.page_size)), (), generator=generator))
                table[row, at] = GARBAGE[row % len(GARBAGE)]
        tensors = {
            "k": k,
            "v": v,
            "slots": slots,
            "live": torch.cat(live) if live else slots,
            "seq_lens": torch.tensor(lens, dtype=torch.int32),
            "page_table": table,
            "query_starts": (torch.tensor([0, *rows]).cumsum(0) + self.before).to(torch.int32),
        }
        query = self._query(self.before + sum(rows) + self.after, generator)
        return Inputs(spec, num_pages, self.strided, {**tensors, **self._scales(), **query})

    def _first(self, length: int, rows: int) -> int:
        """The first token of a sequence that any row sees: what lies before it may be anything."""
        return min(length, first_token(self.spec, length - rows)) if rows else 0

    def _scales(self) -> Arguments:
        """The scales that a cache is given: a 16-bit one has none, append makes those of single tokens."""
        spec = self.spec
        if not spec.fp8 or spec.scale_granularity == "token_head":
            return {}
        k, v = torch.tensor(self.k_scale), torch.tensor(self.v_scale)
        if spec.scale_granularity == "head":
            factors = self.heads ** torch.arange(spec.num_kv_heads)
            k, v = k * factors, v / factors
        return {"k_scale": k, "v_scale": v}

    def _query(self, rows: int, generator: torch.Generator) -> Arguments:
        """The query, and scales and sinks as the spec wants them."""
        spec = self.spec
        x = self.q.make((rows, spec.num_q_heads, spec.head_dim), 6e4, generator)
        made: Arguments = {}
        if spec.query_dtype == "fp8_e4m3":
            scale = torch.tensor(10.0**self.q.exponent / 8)
            if self.heads != 1:
                scale = scale * (1 + torch.arange(spec.num_q_heads) % 3)
            made["q_scale"] = scale
            x = cast(x / scale.reshape(-1, 1), FORMATS["fp8_e4m3"]).view(torch.float8_e4m3fn)
        made["q"] = x.to(TORCH_DTYPES[spec.query_dtype])
        if spec.out_dtype == "fp8_e4m3":
            made["out_scale"] = torch.tensor(10.0**self.v.exponent / 64)
        if spec.sinks:
            sinks = torch.randn(spec.num_q_heads, generator=generator) * 3
            sinks[self.seed % spec.num_q_heads] = -math.inf if self.seed % 5 == 0 else 40.0
            made["sinks"] = sinks.to(torch.bfloat16) if self.seed % 2 else sinks
        return made


def _held(spec: AttentionSpec) -> bool:
    """Whether Triton's kernels take it."""
    return not layout_reasons(spec) and (spec.query_dtype != "fp8_e4m3" or spec.kv_dtype == "fp8_e4m3")


@st.composite
def triton_specs(draw: st.DrawFn) -> AttentionSpec:
    """Specs that Triton's kernels take, every axis of the grid in them; head_dim and ratio small more often."""
    layout = draw(st.sampled_from(LAYOUTS))
    kv_dtype = draw(st.sampled_from(("fp8_e4m3", "fp8_e5m2") if layout == "leaf" else AXES["kv_dtype"]))
    sizes = [size for size in AXES["page_size"] if layout != "leaf" or size % 32 == 0]
    dims = draw(st.sampled_from(AXES["dims"][:4]) | st.sampled_from(AXES["dims"]))
    ratio = draw(st.integers(1, 8) | st.sampled_from(AXES["ratio"]))
    heads = draw(st.integers(1, 2 if ratio <= 8 else 1))
    spec = AttentionSpec(
        heads * ratio,
        heads,
        *dims,
        query_dtype=draw(st.sampled_from(AXES["query_dtype"] if kv_dtype == "fp8_e4m3" else AXES["query_dtype"][:2])),
        kv_dtype=kv_dtype,
        out_dtype=draw(st.sampled_from(AXES["out_dtype"])),
        page_size=draw(st.sampled_from(sizes)),
        layout=layout,
        scale_granularity=draw(st.sampled_from(GRANULARITIES)),
        softmax_scale=draw(st.none() | st.floats(1e-3, 2.0)),
        window=draw(st.none() | st.integers(1, 150)),
        sinks=draw(st.booleans()),
        softcap=draw(st.none() | st.floats(0.5, 50.0)),
        lse=draw(st.booleans()),
        max_query_len=draw(st.integers(1, 4) | st.just(16)),
        precision=draw(st.sampled_from(PRECISIONS)),
        batch_invariant=draw(st.booleans()),
    )
    assert _held(spec)
    return spec


_LLAMA: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
_FULL: dict[str, Any] = {"sinks": True, "softcap": 30.0, "window": 100, "lse": True, "max_query_len": 4}
GPU_SPECS = tuple(
    AttentionSpec(**{**_LLAMA, **fields})
    for fields in (
        {},
        {"lse": True, "precision": "exact", "scale_granularity": "head"},
        {"head_dim": 64, "num_q_heads": 16, **_FULL},
        {"head_dim": 256, "num_q_heads": 4, "lse": True},
        {"page_size": 32, "max_query_len": 4, "query_dtype": "fp8_e4m3", "out_dtype": "fp8_e4m3"},
        {"page_size": 128, "num_q_heads": 24, "batch_invariant": True, "query_dtype": "float16"},
        {"head_dim": 192, "head_dim_v": 128, "num_q_heads": 2, "out_dtype": "float32", "window": 33},
        {"scale_granularity": "token_head", **_FULL},
        {"layout": "nhd", "page_size": 16, "kv_dtype": "fp8_e5m2", "lse": True, "out_dtype": "float16"},
        {"layout": "nhd", "page_size": 1, "scale_granularity": "token_head", "softcap": 20.0},
        {"layout": "hnd", "page_size": 24, "kv_dtype": "bfloat16", "head_dim": 80, "sinks": True, "lse": True},
        {"layout": "nhd", "kv_dtype": "float16", "query_dtype": "float16", "window": 7, "batch_invariant": True},
        {"layout": "hnd", "head_dim": 512, "num_q_heads": 2, "num_kv_heads": 1, "precision": "exact"},
        {"layout": "nhd", "num_q_heads": 71, "num_kv_heads": 1, "head_dim": 64, "max_query_len": 16, "lse": True},
    )
)


@st.composite
def values(draw: st.DrawFn, largest: int = 3) -> Values:
    """Numbers from 1e-3 on."""
    return Values(draw(st.sampled_from(SHAPES)), draw(st.just(0) | st.integers(-3, largest)))


@st.composite
def examples(
    draw: st.DrawFn, specs: st.SearchStrategy[AttentionSpec], most_tokens: int = 100, most_rows: int = 12
) -> Example:
    """Calls of specs: lengths at the edges of pages and of tiles, padding, rows that see nothing, every plan."""
    spec = draw(specs)
    page = spec.page_size
    edges = sorted({n for m in (1, 2, 3) for n in (m * page - 1, m * page, m * page + 1) if n <= most_tokens} | {0, 1})
    lens = st.sampled_from(edges) | st.integers(0, most_tokens)
    most_rows = max(1, min(most_rows, 256 // spec.num_q_heads))
    short = st.tuples(lens, st.integers(0, min(spec.max_query_len, most_rows)))
    long = st.tuples(lens, st.integers(0, most_rows))
    decodes = draw(st.lists(short, max_size=4))
    prefills = draw(st.lists(long, max_size=2))
    if draw(st.integers(0, 15)) == 0 and decodes:  # long enough to be cut
        decodes[0] = (draw(st.integers(260, 600)), max(1, decodes[0][1]))
    scales = st.just(1.0) | st.sampled_from((1e-4, 1e-2, 0.37, 25.0, 1e4))
    return Example(
        spec,
        tuple(decodes),
        tuple(prefills),
        before=draw(st.just(0) | st.integers(0, 3)),
        after=draw(st.just(0) | st.integers(0, 20)),
        told=draw(st.sampled_from(("nothing", "decodes", "rows"))),
        q=draw(values()),
        k=draw(values()),
        v=draw(values()),
        k_scale=draw(scales),
        v_scale=draw(scales),
        heads=draw(st.sampled_from((1.0, 1.7))),
        shared=draw(st.booleans()),
        holes=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


@st.composite
def append_fields(draw: st.DrawFn) -> dict[str, Any]:
    """One append: spec, dtype `x`, `rows`, `slots`, `values`, `form`, `padded`, `scales`, as tests/append_cases names
    them.
    """
    layout = draw(st.sampled_from(LAYOUTS))
    kv_dtype = draw(st.sampled_from(KV_DTYPES[:2] if layout == "leaf" else KV_DTYPES))
    heads, dim = draw(st.integers(1, 3)), 16 * draw(st.integers(1, 12))
    dim_v = draw(st.none() | st.integers(1, 12).map(lambda n: 16 * n))
    size = draw(st.sampled_from((32, 64, 96, 128) if layout == "leaf" else AXES["page_size"][:-1]))
    spec = AttentionSpec(
        heads,
        heads,
        dim,
        dim_v,
        kv_dtype=kv_dtype,
        layout=layout,
        page_size=size,
        scale_granularity=draw(st.sampled_from(GRANULARITIES)),
    )
    return {
        "spec": spec,
        "x": draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        "rows": draw(st.integers(1, 80)),
        "slots": draw(st.sampled_from(("prompt", "decode", "holes"))),
        "values": draw(st.sampled_from(("usual", "huge", "wild", "edges"))),
        "form": draw(st.sampled_from(("contiguous", "fused", "transposed"))),
        "padded": draw(st.booleans()),
        "scales": draw(st.booleans()),
    }


@st.composite
def partial_states(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """(outs [n, T, Hq, Dv], lses [n, T, Hq]) of attention over parts, some of which saw nothing and hold NaN."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    shape = draw(st.tuples(st.integers(1, 19), st.integers(0, 5), st.integers(1, 4), st.sampled_from((1, 16, 80, 128))))
    outs = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-3, 3))
    lses = torch.randn(shape[:3], generator=generator) * 10.0 ** draw(st.integers(-1, 4))
    unseen = torch.rand(shape[:3], generator=generator) < draw(st.sampled_from((0.0, 0.3, 1.0)))
    outs = outs.masked_fill(unseen[..., None], math.nan)
    return outs.to(draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))), lses.masked_fill(
        unseen, -math.inf
    )


@st.composite
def any_spec_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of an AttentionSpec: most are well formed, any may be not."""
    numbers = st.integers(1, 1024) | st.integers(-3, 2**40)
    wrong = st.none() | st.booleans() | st.text(max_size=3) | st.floats() | st.integers()
    makers: dict[str, st.SearchStrategy[Any]] = {
        "query_dtype": st.sampled_from(QUERY_DTYPES),
        "kv_dtype": st.sampled_from(KV_DTYPES),
        "out_dtype": st.sampled_from(OUT_DTYPES),
        "layout": st.sampled_from(LAYOUTS),
        "scale_granularity": st.sampled_from(GRANULARITIES),
        "precision": st.sampled_from(PRECISIONS),
        "page_size": st.sampled_from(AXES["page_size"]) | numbers,
        "head_dim_v": st.none() | numbers,
        "softmax_scale": st.none() | st.floats(),
        "softcap": st.none() | st.floats(),
        "window": st.none() | numbers,
        "attention_chunk": st.none() | numbers,
        "max_query_len": st.integers(1, 20) | numbers,
    }
    for name in ("causal", "sinks", "lse", "batch_invariant", "alibi", "prefix_mask", "mla"):
        makers[name] = st.booleans()
    heads = draw(st.integers(1, 16) | numbers)
    fields: dict[str, Any] = {"num_kv_heads": heads, "num_q_heads": heads * draw(st.integers(1, 130))}
    fields["head_dim"] = draw(st.sampled_from(AXES["dims"]))[0]
    for name in draw(st.sets(st.sampled_from(sorted(makers)), max_size=8)):
        fields[name] = draw(makers[name])
    if draw(st.integers(0, 4)) == 0:
        fields[draw(st.sampled_from([f.name for f in dataclasses.fields(AttentionSpec)]))] = draw(wrong)
    return fields


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """Named devices, some with another Triton or fewer SMs, and ones that octavo does not know."""
    device = draw(st.sampled_from(sorted(KNOWN.values(), key=lambda d: d.name)))
    version = draw(st.sampled_from(("3.6.0", "3.5.1", "4.0", "", "nightly", "3.6.0+git1234")))
    arch = draw(st.sampled_from((device.arch, device.arch, "sm_75", "sm_130", "gfx942")))
    num_sms = draw(st.sampled_from((device.num_sms, 0, 1, 999)))
    return replace(device, triton_version=version, arch=arch, num_sms=num_sms)
