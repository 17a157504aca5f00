"""The one table of backends: what each needs, as rules. To add a backend, add a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import hopper_tuning, tuning
from .device import ARCHITECTURES, Device
from .layouts import layout_reasons
from .rules import PHASES, Rule, alternatives, architecture, at_most, head_dims, one_of, rules_table, shapes, without
from .spec import AttentionSpec

# Functions that are in this repository, a file <package of the backend>/<name>.py each (a test compares). The rule made
# of it is what keeps a plan from saying yes to a kernel that is only planned.
WRITTEN: dict[str, frozenset[str]] = {
    "gluon": frozenset({"decode", "plan", "prefill", "prefill_plan", "mqa_logits"}),
    "triton": frozenset({"append", "prefill", "decode", "merge_states", "index_append", "mqa_logits", "topk"}),
    "reference": frozenset({"prefill", "decode", "append", "merge_states", "index_append", "mqa_logits", "topk"}),
}


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: what a user calls it.
        phases: phases that it is meant to have.
        rules: all that have to hold; `Rule.phases` narrows one to a phase.
        module: package that holds its functions.
        graphs: whether its launches can be captured in a CUDA graph.
        compute_query_dtype: (spec, device, phase) -> what is multiplied in place of the query.
        workspace_bytes: (spec, device, max_batch, max_query_tokens, max_context) -> bytes.
        schedule_ints: (spec, device, phase, max_batch, max_query_tokens) -> int32 that its plan of the phase writes;
            None: it has no plan.
    """

    name: str
    phases: tuple[str, ...]
    rules: tuple[Rule, ...]
    module: str
    graphs: bool
    compute_query_dtype: Callable[[AttentionSpec, Device, str], str]
    workspace_bytes: Callable[[AttentionSpec, Device, int, int, int], int]
    schedule_ints: Callable[[AttentionSpec, Device, str, int, int], int] | None = None

    def broken(self, spec: AttentionSpec, device: Device, phase: str) -> tuple[Rule, ...]:
        """Every rule that does not hold."""
        return tuple(rule for rule in self.rules if rule.broken(spec, device, phase))

    def reasons(self, spec: AttentionSpec, device: Device, phase: str) -> tuple[str, ...]:
        """Why it cannot run `phase`: one or more sentences for every broken rule; empty if it may."""
        return tuple(reason for rule in self.rules for reason in rule.reasons(spec, device, phase))


def written(backend: str) -> Rule:
    """The rule that this repository has the kernel."""
    return Rule(
        needs="a kernel in this repository",
        holds=lambda spec, device, phase: phase in WRITTEN[backend],
        found=lambda spec, device, phase: "none yet",
    )


def _layout_change(spec: AttentionSpec) -> dict[str, Any]:
    """Another page size where that is all that is wrong with leaf; else nhd, which holds every cache."""
    if spec.mla and spec.layout != "leaf":
        return {"scale_granularity": "tensor"}
    only_page = spec.fp8 and not spec.mla and spec.head_dim % 16 == 0 == spec.value_dim % 16
    return {"page_size": 64} if only_page else {"layout": "nhd"}


LAYOUT = Rule(
    needs="a layout that can hold the cache (docs/cache-layout.md)",
    holds=lambda spec, device, phase: not layout_reasons(spec),
    found=lambda spec, device, phase: layout_reasons(spec),
    nearest=_layout_change,
)
PREFIX_MASK = without("prefix_mask", "no image-prefix mask (a mask for each sequence, which plan does not take)")
# What no kernel does so far: masks and biases that would be one more branch in every inner loop.
PLAIN_ATTENTION = (
    without("causal", "causal attention", value=True),
    without("alibi", "no ALiBi bias"),
    without("attention_chunk", "no chunked-local mask", value=None),
    PREFIX_MASK,
    without("mla", "K and V of their own (an MLA latent of 576 does not fit the tiles; only the reference takes it)"),
)
TRITON_VERSION = Rule(
    needs="triton 3.6 or newer",
    holds=lambda spec, device, phase: device.triton >= (3, 6),
    found=lambda spec, device, phase: device.triton_version or "no triton",
)
SIXTEEN_BIT_OR_E4M3 = one_of("query_dtype", ("bfloat16", "float16", "fp8_e4m3"), "bfloat16")


def _triton_query(spec: AttentionSpec, device: Device, phase: str) -> str:
    if phase == "prefill" and spec.precision == "fast" and spec.kv_dtype == "fp8_e4m3" and device.fp8_dot:
        return "fp8_e4m3"
    return "bfloat16" if spec.kv_dtype == "bfloat16" else "float16"  # FP8 to float16 is exact


def _gluon_query(spec: AttentionSpec, device: Device, phase: str) -> str:
    one_term = spec.query_dtype == "fp8_e4m3" or (phase == "prefill" and spec.precision == "fast")
    return "fp8_e4m3" if one_term else "fp8_e4m3 x2"


def _gluon_workspace_bytes(spec: AttentionSpec, device: Device, *bounds: int) -> int:
    return max(
        hopper_tuning.decode_workspace_bytes(spec, device, *bounds),
        hopper_tuning.prefill_workspace_bytes(spec, device, *bounds),
    )


def _gluon_schedule_ints(spec: AttentionSpec, device: Device, phase: str, max_batch: int, max_query_tokens: int) -> int:
    if phase == "decode":
        return hopper_tuning.decode_schedule_ints(spec, device, max_batch)
    return hopper_tuning.prefill_schedule_ints(spec, device, max_batch, max_query_tokens)


BACKENDS = (
    Backend(
        name="gluon",
        phases=PHASES,
        module="octavo.kernels.gluon",
        graphs=True,
        compute_query_dtype=_gluon_query,
        workspace_bytes=_gluon_workspace_bytes,
        schedule_ints=_gluon_schedule_ints,
        rules=(
            architecture(("sm_90",), "Hopper (sm_90)"),
            TRITON_VERSION,
            written("gluon"),
            one_of("layout", ("leaf",), "leaf", " (tiles are tensor-core operands as they lie in memory)"),
            LAYOUT,
            one_of("kv_dtype", ("fp8_e4m3",), "fp8_e4m3"),
            one_of("page_size", (32, 64, 128), 64),
            shapes(("64", "128", "256"), phases=("prefill",)),
            Rule(
                needs="page_size 32 or 64 under exact prefill of heads of 256 by 16-bit queries (shared memory)",
                holds=lambda spec, device, phase: (
                    (head_dims(spec), spec.page_size) != ("256", 128) or hopper_tuning.prefill_fits(spec)
                ),
                found=lambda spec, device, phase: str(spec.page_size),
                nearest=lambda spec: {"page_size": 64},
                phases=("prefill",),
            ),
            shapes(("64", "128", "192/128", "256"), phases=("decode",)),
            at_most("group_size", 32, "a ratio of query to KV heads"),
            one_of("scale_granularity", ("tensor", "head"), "tensor"),
            SIXTEEN_BIT_OR_E4M3,
            at_most("max_query_len", 8, "max_query_len", mends=True, phases=("decode",)),
            *PLAIN_ATTENTION,
        ),
    ),
    Backend(
        name="triton",
        phases=PHASES,
        module="octavo.kernels.triton",
        graphs=True,
        compute_query_dtype=_triton_query,
        workspace_bytes=tuning.split_workspace_bytes,
        rules=(
            architecture(ARCHITECTURES, f"a GPU of {alternatives(ARCHITECTURES)}"),
            TRITON_VERSION,
            written("triton"),
            LAYOUT,
            shapes(("64", "80", "96", "128", "192/128", "256", "512")),
            at_most("group_size", 128, "a ratio of query to KV heads"),
            SIXTEEN_BIT_OR_E4M3,
            one_of("kv_dtype", ("fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"), "bfloat16"),
            Rule(
                needs="kv_dtype fp8_e4m3 under an fp8_e4m3 query",
                holds=lambda spec, device, phase: spec.query_dtype != "fp8_e4m3" or spec.kv_dtype == "fp8_e4m3",
                found=lambda spec, device, phase: spec.kv_dtype,
                nearest=lambda spec: {"query_dtype": "bfloat16"},
            ),
            at_most("max_query_len", 16, "max_query_len", mends=True, phases=("decode",)),
            *PLAIN_ATTENTION,
        ),
    ),
    Backend(
        name="reference",
        phases=PHASES,
        module="octavo.reference",
        graphs=False,  # it reads the lengths on the host
        compute_query_dtype=lambda spec, device, phase: "float32",
        workspace_bytes=tuning.no_workspace,
        rules=(written("reference"), LAYOUT, PREFIX_MASK),
    ),
)
BY_NAME = {backend.name: backend for backend in BACKENDS}


def rules_markdown() -> str:
    """The first part of docs/rules.md: every rule of every backend of attention, a table a backend."""
    lines = [
        "# Rules of the backends",
        "",
        "Printed from `octavo/backends.py` and `octavo/indexer_backends.py` by `python tools/refresh_docs.py`; a test",
        "keeps it current. A backend may run a phase when all rules hold. The planner takes the first that may, in the",
        "order below.",
    ]
    for backend in BACKENDS:
        there = ", ".join(sorted(WRITTEN[backend.name])) or "none yet"
        lines += [
            "",
            f"## {backend.name}",
            "",
            f"Written: {there}. CUDA graphs: {'yes' if backend.graphs else 'no'}.",
            "",
            *rules_table(backend.rules, PHASES),
        ]
    return "\n".join(lines) + "\n"
