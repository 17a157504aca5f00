"""Named cases of the indexer: paged and ragged logits, top-k, and the append of its keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..spec import IndexerSpec
from .roofline import Work

DEEPSEEK = IndexerSpec(num_heads=64, head_dim=128, page_size=64, scale_format="fp32")


@dataclass(frozen=True)
class IndexerCase:
    """One thing to measure.

    Attributes:
        name: what records call it, without the backend. op: paged_mqa_logits, mqa_logits, topk or append.
        spec: of the indexer; spec.max_query_len is the query rows of each sequence of a paged case.
        lens: paged: of each sequence. topk: of each row. mqa_logits: the keys that each row sees, from the first on.
        keys: mqa_logits: of the run. topk: the width of the logits. append: the new keys. paged: of all sequences.
    """

    name: str
    op: str
    spec: IndexerSpec
    lens: tuple[int, ...] = field(repr=False)
    keys: int

    @property
    def pairs(self) -> int:
        """Logits that are written, or looked at."""
        if self.op != "paged_mqa_logits":
            return sum(self.lens)
        n = self.spec.max_query_len
        return sum(max(0, length - i) for length in self.lens for i in range(n))

    @property
    def work(self) -> Work:
        """The fewest bytes and operations: keys, queries and weights read once, each visible logit written once."""
        spec, pairs = self.spec, self.pairs
        token = spec.head_dim + 4
        if self.op == "append":
            return Work(self.keys * (2 * spec.head_dim + token + 8), 0)
        logit = 4 if spec.out_dtype == "float32" else 2
        if self.op == "topk":
            return Work(pairs * logit + 4 * spec.top_k * len(self.lens), 0)
        rows = len(self.lens) * (spec.max_query_len if self.op == "paged_mqa_logits" else 1)
        ends = rows * spec.num_heads * (spec.head_dim + 4)
        return Work(self.keys * token + ends + pairs * logit, 2 * spec.num_heads * spec.head_dim * pairs)


def paged(batch: int, context: int, n: int = 1, spec: IndexerSpec = DEEPSEEK) -> IndexerCase:
    """`batch` sequences of `context` tokens, n query rows each."""
    spec = replace(spec, max_query_len=n)
    name = f"paged_mqa_logits/{_shape(spec)}/b{batch}/ctx{context}"
    return IndexerCase(name, "paged_mqa_logits", spec, (context,) * batch, batch * context)


def paged_uneven(batch: int, mean: int, n: int = 1, spec: IndexerSpec = DEEPSEEK) -> IndexerCase:
    """`batch` sequences of lengths from mean / 8 to 15 mean / 8, evenly spread and then shuffled by a fixed rule."""
    spec = replace(spec, max_query_len=n)
    step = max(1, batch - 1)
    lens = tuple(mean // 8 + 14 * mean // 8 * (i * 37 % batch) // step for i in range(batch))
    name = f"paged_mqa_logits/{_shape(spec)}/b{batch}/uneven{mean}"
    return IndexerCase(name, "paged_mqa_logits", spec, lens, sum(lens))


def ragged(rows: int, keys: int, causal: bool, spec: IndexerSpec = DEEPSEEK) -> IndexerCase:
    """The last `rows` of `keys` tokens over all keys, or causally over those up to their own."""
    lens = tuple(keys - rows + 1 + i if causal else keys for i in range(rows))
    kind = "causal" if causal else "full"
    return IndexerCase(f"mqa_logits/{_shape(spec)}/q{rows}/k{keys}/{kind}", "mqa_logits", spec, lens, keys)


def topk(rows: int, width: int, spec: IndexerSpec = DEEPSEEK) -> IndexerCase:
    """The spec.top_k best of `rows` rows of `width` normal logits."""
    name = f"topk/k{spec.top_k}/{spec.out_dtype}/r{rows}/n{width}"
    return IndexerCase(name, "topk", spec, (width,) * rows, width)


def append(tokens: int, spec: IndexerSpec = DEEPSEEK) -> IndexerCase:
    """`tokens` new keys, each to a slot anywhere."""
    return IndexerCase(f"append/indexer/{_shape(spec)}/t{tokens}", "append", spec, (), tokens)


def hopper_grid() -> list[IndexerCase]:
    """The grid that octavo's indexer is held to on an H200."""
    made = [paged(b, n, rows) for rows in (1, 2, 4) for b in (1, 16, 64, 256) for n in (4096, 32768, 131072)]
    made += [paged_uneven(64, 8192, rows) for rows in (1, 2, 4)]
    made += [ragged(s, t, causal) for s, t in ((2048, 8192), (8192, 8192), (2048, 65536)) for causal in (False, True)]
    made += [topk(64, 131072), topk(1, 131072), topk(256, 32768), topk(64, 8192), topk(1, 1 << 20), topk(2048, 65536)]
    return [*made, append(1), append(64), append(8192)]


def _shape(spec: IndexerSpec) -> str:
    parts = [f"h{spec.num_heads}", f"d{spec.head_dim}", f"page{spec.page_size}", spec.scale_format]
    if spec.max_query_len > 1:
        parts.append(f"n{spec.max_query_len}")
    if spec.out_dtype != "float32":
        parts.append(spec.out_dtype)
    return "/".join(parts)
