"""Where the bytes of a page lie: leaf, nhd and hnd, as strides in storage elements.

docs/cache-layout.md draws them. K(p, h, t, d) = k_offset + p k_page + h k_head + t k_slot + d in all three.
V is alike in nhd and hnd; in leaf it is transposed, V(p, h, t, d) = v_offset + p v_page + h v_head + d v_slot + c(t)
with c(t) the token's column, so that both operands of Hopper's FP8 tensor cores lie in memory as they are read.
"""

from __future__ import annotations

from typing import NamedTuple

from .spec import AttentionSpec

# Column of token t % 16 in a V row of the leaf layout: the order in which a warp's accumulator registers of
# S = Q K^T become the A operand of P V without a shuffle.
LEAF_COLUMNS = (0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)


class Strides(NamedTuple):
    """Addresses of a cache in storage elements from the start of its pool(s); one flat tuple of ints for an op."""

    num_pages: int
    k_offset: int
    k_page: int
    k_head: int
    k_slot: int
    v_offset: int
    v_page: int
    v_head: int
    v_slot: int


def leaf_column(token: int) -> int:
    """Column of token `token` of a page in its V rows."""
    return 16 * (token // 16) + LEAF_COLUMNS[token % 16]


def leaf_order(size: int) -> list[int]:
    """The columns of a page's tokens in its V rows."""
    return [leaf_column(token) for token in range(size)]


def layout_reasons(spec: AttentionSpec) -> list[str]:
    """Why `spec.layout` cannot hold its cache: one sentence per broken rule with the value found; empty if it can."""
    reasons = []
    if spec.layout == "leaf":
        if not spec.fp8:
            reasons.append(f"layout leaf holds FP8 only; kv_dtype is {spec.kv_dtype}")
        if spec.page_size % 32:
            reasons.append(f"layout leaf needs a page_size that is a multiple of 32; it is {spec.page_size}")
        if spec.head_dim % 16 or spec.value_dim % 16:
            reasons.append(
                "layout leaf needs head_dim and head_dim_v that are multiples of 16; "
                f"they are {spec.head_dim} and {spec.value_dim}"
            )
        if spec.mla:
            reasons.append("layout leaf stores V transposed; an MLA value is a part of its key, with no V of its own")
    if spec.mla and spec.fp8 and spec.scale_granularity == "head":
        reasons.append("an MLA latent is one head: scale_granularity must be tensor or token_head; it is head")
    return reasons


def shapes(spec: AttentionSpec, num_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and V views of `num_pages` pages in `spec.layout`."""
    heads, page, dim, dim_v = spec.num_kv_heads, spec.page_size, spec.head_dim, spec.value_dim
    if spec.layout == "nhd":
        return (num_pages, page, heads, dim), (num_pages, page, heads, dim_v)
    if spec.layout == "hnd":
        return (num_pages, heads, page, dim), (num_pages, heads, page, dim_v)
    return (num_pages, heads, page, dim), (num_pages, heads, dim_v, page)
