"""torch.library ops over tensors, so that torch.compile(fullgraph=True) and CUDA graphs see one op each.

Mutated tensors are declared; everything else an op needs travels as ints and strings that mean the same in every process
(a spec is its JSON, a backend its name), because compiled graphs are cached across processes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module

import torch

from .backends import MODULES
from .calls import AppendCall, AttentionCall, CacheBytes
from .layouts import Strides
from .spec import AttentionSpec

_library = torch.library.Library("octavo", "DEF")

_library.define(
    "append(Tensor k, Tensor? v, Tensor slots, Tensor(a!) k_pool, Tensor(b!)? v_pool, Tensor? k_scale, Tensor? v_scale, "
    "Tensor(c!)? k_token_scale, Tensor(d!)? v_token_scale, Tensor(e!) counters, int[] strides, str spec, str backend) -> ()"
)
_library.define(
    "attention(Tensor q, Tensor k_pool, Tensor? v_pool, Tensor? k_scale, Tensor? v_scale, Tensor seq_lens, "
    "Tensor page_table, Tensor query_starts, Tensor? q_scale, Tensor? out_scale, Tensor? sinks, Tensor(a!) workspace, "
    "Tensor(b!) out, Tensor(c!)? lse, int[] strides, str spec, str prefill, str decode, SymInt? num_decodes, "
    "SymInt? max_query_len) -> ()"
)
