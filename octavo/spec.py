"""What is asked for: frozen, hashable descriptions of one attention layer kind and one indexer.

A spec says nothing about a machine. ``octavo.choose`` joins it with a ``Device``; the cache and the kernels read
their shapes from it. Fields are checked here for being well formed; whether a kernel exists is a question of rules.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import InvalidInput

QUERY_DTYPES = ("bfloat16", "float16", "fp8_e4m3", "float32")
KV_DTYPES = ("fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32")
OUT_DTYPES = ("bfloat16", "float16", "float32", "fp8_e4m3")
LAYOUTS = ("leaf", "nhd", "hnd")
GRANULARITIES = ("tensor", "head", "token_head")
PRECISIONS = ("fast", "exact")
SCALE_FORMATS = ("fp32", "pow2", "ue8m0")  # of an index cache

# Other spellings in use: torch's own, and the ones of engines' command lines.
_DTYPE_ALIASES = {
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
}


def dtype_name(dtype: Any) -> str:
    """octavo's name of a dtype given as a name, an alias (``fp8``, ``bf16``) or a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_ALIASES.get(name, name)


def one_of(field: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise InvalidInput, listing the known names, unless `value` is one of them."""
    if value not in known:
        raise InvalidInput(f"{field} must be one of {', '.join(known)}", repr(value))


def positive(field: str, value: Any) -> None:
    """Raise InvalidInput unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"{field} must be a positive integer", repr(value))


def _positive_or_none(field: str, value: Any) -> None:
    if value is not None:
        positive(field, value)


@dataclass(frozen=True)
class AttentionSpec:
    """One layer kind: head shape, dtypes, cache format and mask. See docs/architecture.md for how it travels.

    Attributes:
        num_q_heads, num_kv_heads: heads on this rank; the first is a multiple of the second.
        head_dim, head_dim_v: elements of a query/key head and of a value head (None: head_dim).
        query_dtype: what the caller passes: bfloat16, float16, fp8_e4m3 (with q_scale), float32 (reference).
        kv_dtype: fp8_e4m3 (also "fp8"), fp8_e5m2, bfloat16, float16, float32 (reference).
        out_dtype: bfloat16, float16, float32, or fp8_e4m3 (then run takes out_scale).
        page_size: tokens a page.
        layout: leaf (FP8 only), nhd or hnd; docs/cache-layout.md draws them.
        scale_granularity: tensor, head or token_head; of no meaning for a 16-bit cache.
        softmax_scale: multiplies q . k; None is head_dim ** -0.5.
        causal: bottom-right aligned: row i of n sees the first seq_len - n + i + 1 tokens.
        window: a row sees itself and window - 1 tokens before it; None is no limit.
        sinks: a learned logit per query head joins the softmax's denominator.
        softcap: scores become softcap * tanh(score / softcap).
        lse: run also writes the natural log-sum-exp.
        max_query_len: most rows a sequence has in a decode batch; more than 1 for draft verification.
        precision: of prefill: fast (e4m3 query and P) or exact (as exact as bf16 attention).
        batch_invariant: a row's result does not depend on the other rows of the batch.
        alibi: a linear bias per head, of the slopes of Press et al. 2021.
        attention_chunk: chunked-local attention: a row sees only tokens of its own chunk of this many.
        prefix_mask: image-prefix masks: tokens of one image see each other whatever their order.
        mla: multi-head latent attention: one latent key of head_dim a token, whose first head_dim_v elements are
            the value; stored once.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    query_dtype: str = "bfloat16"
    kv_dtype: str = "fp8_e4m3"
    out_dtype: str = "bfloat16"
    page_size: int = 64
    layout: str = "leaf"
    scale_granularity: str = "tensor"
    softmax_scale: float | None = None
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    lse: bool = False
    max_query_len: int = 1
    precision: str = "fast"
    batch_invariant: bool = False
    alibi: bool = False
    attention_chunk: int | None = None
    prefix_mask: bool = False
    mla: bool = False

    def __post_init__(self) -> None:
        for name in ("query_dtype", "kv_dtype", "out_dtype"):
            object.__setattr__(self, name, dtype_name(getattr(self, name)))
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "page_size", "max_query_len"):
            positive(name, getattr(self, name))
        _positive_or_none("window", self.window)
        if self.window is not None:  # some engines' "no window" is a huge one; kernels do this arithmetic in int32
            object.__setattr__(self, "window", min(self.window, 1 << 30))
        _positive_or_none("attention_chunk", self.attention_chunk)
        if self.num_q_heads % self.num_kv_heads:
            raise InvalidInput(
                "num_q_heads must be a multiple of num_kv_heads", f"{self.num_q_heads} and {self.num_kv_heads}"
            )
        one_of("query_dtype", self.query_dtype, QUERY_DTYPES)
        one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        one_of("out_dtype", self.out_dtype, OUT_DTYPES)
        one_of("layout", self.layout, LAYOUTS)
        one_of("scale_granularity", self.scale_granularity, GRANULARITIES)
        one_of("precision", self.precision, PRECISIONS)
        for name in ("softmax_scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} must be None or a positive finite number", repr(value))
        for name in ("causal", "sinks", "lse", "batch_invariant", "alibi", "prefix_mask", "mla"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name} must be True or False", repr(getattr(self, name)))
        if self.mla and (self.num_kv_heads != 1 or self.value_dim > self.head_dim):
            raise InvalidInput(
                "mla needs one KV head and head_dim_v <= head_dim (the value is the head of the latent key)",
                f"num_kv_heads {self.num_kv_heads}, head_dim {self.head_dim}, head_dim_v {self.head_dim_v}",
            )

    @property
    def value_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What multiplies q . k."""
        return self.head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)

    @property
    def fp8(self) -> bool:
        """Whether the cache holds FP8, and so has scales."""
        return self.kv_dtype.startswith("fp8")

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one stored element."""
        return 1 if self.fp8 else 4 if self.kv_dtype == "float32" else 2

    @property
    def kind(self) -> str:
        """mla, sliding_window, chunked or full: the word tables use for this layer kind."""
        if self.mla:
            return "mla"
        if self.window is not None:
            return "sliding_window"
        return "chunked" if self.attention_chunk is not None else "full"

    @property
    def cache_fields(self) -> dict[str, Any]:
        """What a cache and an attention over it must agree on."""
        names = ("num_kv_heads", "head_dim", "head_dim_v", "kv_dtype", "page_size", "layout", "mla")
        agreed = {name: getattr(self, name) for name in names}
        if self.fp8:
            agreed["scale_granularity"] = self.scale_granularity
        return agreed

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer's cache, its token_head scales included."""
        stored = self.head_dim if self.mla else self.head_dim + self.value_dim
        total = self.num_kv_heads * stored * self.kv_itemsize
        if self.fp8 and self.scale_granularity == "token_head":
            total += 4 * self.num_kv_heads * (1 if self.mla else 2)
        return total

    def to_json(self) -> str:
        """The fields that differ from their defaults, as one canonical line; `from_json` reads it back."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return json.dumps(given, sort_keys=True, separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> AttentionSpec:
        """The spec that `to_json` wrote as `text`."""
        return AttentionSpec(**json.loads(text))

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, for records and --json."""
        return asdict(self)


@dataclass(frozen=True)
class IndexerSpec:
    """The FP8 MQA indexer of DeepSeek sparse attention: `num_heads` query heads of `head_dim` over one key head.

    Attributes:
        num_heads: query heads. The reference takes any; kernels 16 to 128 (docs/rules.md).
        head_dim: of queries and keys. The reference takes any; kernels 64 and 128.
        page_size: tokens a page of the index cache.
        scale_format: fp32 (amax / 448), pow2 (that, rounded up to a power of two) or ue8m0 (pow2's exponent byte, four
            times).
        max_query_len: most query rows a sequence has (next_n).
        top_k: tokens that are chosen a query row.
        out_dtype: of the logits, float32 or bfloat16.
        page_alignment: bytes, a power of two, that divide the cache's address and its page stride; 16 stands for more.
    """

    num_heads: int = 64
    head_dim: int = 128
    page_size: int = 64
    scale_format: str = "fp32"
    max_query_len: int = 1
    top_k: int = 2048
    out_dtype: str = "float32"
    page_alignment: int = 16

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "page_size", "max_query_len", "top_k", "page_alignment"):
            positive(name, getattr(self, name))
        one_of("scale_format", self.scale_format, SCALE_FORMATS)
        one_of("out_dtype", self.out_dtype, ("float32", "bfloat16"))
