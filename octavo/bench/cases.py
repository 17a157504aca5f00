"""Named cases: one op over one spec and one batch's lengths. A name is a path, "decode/32x8/d128/b64/ctx4096"."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layouts import layout_reasons
from ..spec import AttentionSpec
from .roofline import Work, append_work, attention_work


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        name: what records call it, without the backend. op: one of `records.OPS`.
        spec: what is computed, layout and page size included.
        seq_lens, query_lens: of each sequence; for append, each sequence gets query_lens new tokens at its end.
        appends: an attention call appends the keys and values of its query rows first; counted with it.
    """

    name: str
    op: str
    spec: AttentionSpec
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    appends: bool = False

    @property
    def work(self) -> Work:
        """The fewest bytes and operations."""
        append = append_work(self.spec, sum(self.query_lens))
        if self.op == "append":
            return append
        attention = attention_work(self.spec, self.seq_lens, self.query_lens)
        return Work(attention.bytes + append.bytes, attention.flops) if self.appends else attention

    def with_append(self) -> Case:
        """The case with an append before it."""
        return replace(self, name=f"append+{self.name}", appends=True)


def decode(spec: AttentionSpec, batch: int, context: int) -> Case:
    """`batch` sequences of `context` tokens, spec.max_query_len rows each: "verify" where that is more than one."""
    op = "decode" if spec.max_query_len == 1 else "verify"
    name = f"{op}/{_shape(spec)}/b{batch}/ctx{context}"
    return Case(name, op, spec, (context,) * batch, (spec.max_query_len,) * batch)


def prefill(spec: AttentionSpec, batch: int, rows: int, context: int | None = None) -> Case:
    """`batch` sequences of `context` tokens (None: rows), of which the last `rows` are queries."""
    context = context or rows
    return Case(
        f"prefill/{_shape(spec)}/b{batch}/q{rows}/ctx{context}", "prefill", spec, (context,) * batch, (rows,) * batch
    )


def append(spec: AttentionSpec, batch: int, tokens: int) -> Case:
    """`tokens` new tokens to each of `batch` sequences."""
    return Case(f"append/{_shape(spec)}/b{batch}/t{tokens}", "append", spec, (tokens,) * batch, (tokens,) * batch)


def in_layouts(spec: AttentionSpec) -> list[AttentionSpec]:
    """The spec in every layout that can hold it."""
    specs = [replace(spec, layout=layout) for layout in ("leaf", "nhd", "hnd")]
    return [s for s in specs if not layout_reasons(s)]


def _shape(spec: AttentionSpec) -> str:
    dims = f"d{spec.head_dim}" if spec.head_dim == spec.value_dim else f"d{spec.head_dim}-{spec.value_dim}"
    parts = [f"{spec.num_q_heads}x{spec.num_kv_heads}", dims, spec.kv_dtype, f"{spec.layout}{spec.page_size}"]
    if spec.max_query_len > 1:
        parts.append(f"n{spec.max_query_len}")
    if spec.window:
        parts.append(f"w{spec.window}")
    if spec.precision != "fast":
        parts.append(spec.precision)
    return "/".join(parts)
