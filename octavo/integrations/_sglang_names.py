"""Names of SGLang's that octavo goes by; nothing is imported."""

from __future__ import annotations

# Passes over prompts: with chunks of others' prompts, and with decodes as chunks of one token.
EXTENDS = ("EXTEND", "MIXED")
# Methods of a pool that read or write single slots, or hand its memory to others, in SGLang's own layout.
CLOSED = (
    "set_kv_buffer",
    "set_kv_buffer_prefix_valid",
    "move_kv_cache",
    "get_cpu_copy",
    "load_cpu_copy",
    "get_contiguous_buf_infos",
)
