"""torch.library ops over tensors, so that torch.compile(fullgraph=True) and CUDA graphs see one op each.

Mutated tensors are declared; everything else an op needs travels as ints and strings that mean the same in every
process (a spec is its JSON, a backend its name), because compiled graphs are cached across processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from typing import Any

import torch

from .backends import BY_NAME, TRITON_VERSION, WRITTEN
from .calls import AppendCall, AttentionCall, CacheBytes
from .device import triton_version
from .errors import OctavoError, Unsupported
from .layouts import Strides
from .spec import AttentionSpec

PLANS = {"prefill": "prefill_plan", "decode": "plan"}  # what a backend's plan of a phase is called
_library = torch.library.Library("octavo", "DEF")

_library.define(
    "append(Tensor k, Tensor? v, Tensor slots, Tensor(a!) k_pool, Tensor(b!)? v_pool, Tensor? k_scale, "
    "Tensor? v_scale, Tensor(c!)? k_token_scale, Tensor(d!)? v_token_scale, Tensor(e!) counters, int[] strides, "
    "str spec, str backend) -> ()"
)
_library.define(
    "attention(Tensor q, Tensor k_pool, Tensor? v_pool, Tensor? k_scale, Tensor? v_scale, Tensor seq_lens, "
    "Tensor page_table, Tensor query_starts, Tensor? q_scale, Tensor? out_scale, Tensor? sinks, Tensor(a!) workspace, "
    "Tensor(d!)? schedule, Tensor(e!)? prefill_schedule, Tensor(b!) out, Tensor(c!)? lse, int[] strides, str spec, "
    "str prefill, str decode, "
    "SymInt? num_decodes, SymInt? max_query_len) -> ()"
)
_library.define(
    "plan(Tensor seq_lens, Tensor page_table, Tensor query_starts, Tensor(a!) schedule, str spec, str phase, "
    "str backend, SymInt? num_decodes, SymInt? max_query_len) -> ()"
)
_library.define("merge_states(Tensor outs, Tensor lses, str backend) -> (Tensor, Tensor)")

append = torch.ops.octavo.append.default
attention = torch.ops.octavo.attention.default
merge_states = torch.ops.octavo.merge_states.default
plan = torch.ops.octavo.plan.default


@lru_cache(maxsize=64)
def kernel(backend: str, file: str, function: str | None = None) -> Callable:
    """`function` (None: named as its file) in `file` of a backend's package, imported at first use.

    Raises Unsupported where Triton has not what the file imports. An error of its compiler carries a note with the
    kernel and the spec.
    """
    try:
        found = getattr(import_module(f"{BY_NAME[backend].module}.{file}"), function or file)
    except ImportError as error:
        if not (error.name or "").startswith("triton"):
            raise
        needs = TRITON_VERSION.needs + (", with Gluon" if backend == "gluon" else "")
        there = f"found triton {triton_version() or 'none'}, which has no {error.name}"
        raise Unsupported(f"backend {backend} cannot run {file}", [f"needs {needs}; {there}"]) from error

    @wraps(found)
    def call(*arguments: Any) -> Any:
        try:
            return found(*arguments)
        except OctavoError:
            raise
        except Exception as error:
            # What add_note does, from Python 3.11 on.
            vars(error).setdefault("__notes__", []).append(_failed(backend, file, arguments))
            raise

    return call


def _failed(backend: str, file: str, arguments: tuple[Any, ...]) -> str:
    """What to know of an error inside a kernel's launch: which one, of what, and what can be done."""
    spec = next((s for a in arguments if isinstance(s := getattr(a, "spec", a), AttentionSpec)), None)
    of = "" if spec is None else f", of {spec.to_json()}"
    return (
        f"octavo: {backend}'s {file} did not compile or launch{of}. `octavo check --backend {backend}` tells what runs "
        "on this machine; backend= or OCTAVO_BACKEND takes another one"
    )


def cache_backend(device: torch.device, name: str) -> str:
    """The backend of `append` or `merge_states` on `device`: Triton's on a GPU, else the reference's."""
    written = name in WRITTEN["triton"]
    if os.environ.get("OCTAVO_BACKEND") == "triton" and written:
        return "triton"
    return "triton" if device.type == "cuda" and written else "reference"


@torch.no_grad()  # what is stored has no gradient, and a cache must not hold the graph of what it was written from
def _append(
    k: torch.Tensor,
    v: torch.Tensor | None,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_token_scale: torch.Tensor | None,
    v_token_scale: torch.Tensor | None,
    counters: torch.Tensor,
    strides: list[int],
    spec: str,
    backend: str,
) -> None:
    written = k_token_scale is not None
    cache = CacheBytes(
        k_pool,
        k_pool if v_pool is None else v_pool,
        Strides(*strides),
        k_token_scale if written else k_scale,
        v_token_scale if written else v_scale,
    )
    kernel(backend, "append")(AppendCall(AttentionSpec.from_json(spec), k, v, slots, cache, counters))


@torch.no_grad()
def _attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    q_scale: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    workspace: torch.Tensor,
    schedule: torch.Tensor | None,
    prefill_schedule: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    strides: list[int],
    spec: str,
    prefill: str,
    decode: str,
    num_decodes: int | None,
    max_query_len: int | None,
) -> None:
    cache = CacheBytes(k_pool, k_pool if v_pool is None else v_pool, Strides(*strides), k_scale, v_scale)
    call = AttentionCall(
        AttentionSpec.from_json(spec),
        q,
        cache,
        seq_lens,
        page_table,
        query_starts,
        q_scale,
        out_scale,
        sinks,
        workspace,
        out,
        lse,
        num_decodes,
        max_query_len,
        schedule,
        prefill_schedule,
    )
    # Prefill first: it also writes the rows that belong to no sequence. Where every sequence decodes, decode does.
    if num_decodes != seq_lens.shape[0] or num_decodes == 0:
        kernel(prefill, "prefill")(call)
    if num_decodes != 0:
        kernel(decode, "decode")(call)


def _plan(
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    schedule: torch.Tensor,
    spec: str,
    phase: str,
    backend: str,
    num_decodes: int | None,
    max_query_len: int | None,
) -> None:
    made = AttentionSpec.from_json(spec)
    kernel(backend, PLANS[phase])(made, seq_lens, page_table, query_starts, schedule, num_decodes, max_query_len)


def _merge_states(outs: torch.Tensor, lses: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    return kernel(backend, "merge_states")(outs, lses)


def nothing(*arguments: object) -> None:
    """The fake of an op that only writes to its arguments."""


def _fake_merge_states(outs: torch.Tensor, lses: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(outs[0]), torch.empty_like(lses[0], dtype=torch.float32)


for _name, _function, _fake in (
    ("append", _append, nothing),
    ("attention", _attention, nothing),
    ("plan", _plan, nothing),
    ("merge_states", _merge_states, _fake_merge_states),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_library)
