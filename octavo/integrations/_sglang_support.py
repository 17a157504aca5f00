"""What a configuration of SGLang asks for, and why octavo cannot do it, in words; all reasons at once, at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAINS = ("EAGLE", "EAGLE3", "STANDALONE")  # draft algorithms whose trees are chains with a top-k of 1


@dataclass(frozen=True)
class Need:
    """One need of octavo's of an option of SGLang's.

    Attributes:
        option: its name behind that of its namespace.
        holds: whether a value will do.
        words: what is needed, as words that follow "needs".
    """

    option: str
    holds: Callable[[Any], bool]
    words: str


def _off(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return value in (None, 1)


NEEDS = (
    Need("parallel.attn_dcp_size", _one, "no decode context parallelism"),
    Need("parallel.attn_cp_size", _one, "no prefill context parallelism"),
    Need("parallel.enable_dp_attention", _off, "no data-parallel attention"),
    Need("exec.overlap.enable_two_batch_overlap", _off, "no two-batch overlap"),
    Need("exec.graph.enable_torch_compile", _off, "no torch.compile of the model"),
    Need("exec.dllm.dllm_algorithm", _off, "no diffusion language model"),
    Need("disagg.enable_pdmux", _off, "no multiplexing of prefill and decode"),
    Need("disagg.disaggregation_mode", lambda mode: mode in (None, "null"), "prefill and decode on one machine"),
    Need("memory.enable_unified_memory", _off, "a KV pool of its own (slots that are addresses, not virtual numbers)"),
    Need("memory.enable_page_major_kv_layout", _off, "a buffer for each layer"),
    Need("memory.enable_hierarchical_cache", _off, "no hierarchical cache"),
    Need("memory.enable_hisparse", _off, "no sparse host cache"),
    Need("memory.enable_lmcache", _off, "no LMCache"),
    Need("memory.enable_flexkv", _off, "no FlexKV"),
    Need("schedule.prefill_only_disable_kv_cache", _off, "a KV cache"),
)
GRAPHS = {"prefill": ("breakable", "disabled"), "decode": ("full", "disabled")}  # SGLang's names of their kinds


def option(path: str) -> Any:
    """A resolved option of this process, by the name of its namespace: "spec.speculative_algorithm"."""
    from sglang.srt import runtime_context

    top, *rest = path.split(".")
    value = getattr(runtime_context, f"get_{top}")()
    for name in rest:
        value = getattr(value, name)
    return value


def backend_names() -> tuple[str, str]:
    """The attention backends that were asked for, of prefill and of decode."""
    kernel = option("exec.kernel")
    both = kernel.attention_backend
    return kernel.prefill_attention_backend or both, kernel.decode_attention_backend or both


def verify_rows() -> int:
    """Query rows of a sequence when a draft is verified; 1 without drafts."""
    return option("spec.speculative_num_draft_tokens") if option("spec.speculative_algorithm") else 1


def reasons(runner: Any, names: tuple[str, ...]) -> list[str]:
    """Why octavo cannot serve `runner`, a ModelRunner: one sentence each, empty if it can.

    names: octavo's own, which cannot draft.
    """
    return [*_option_reasons(), *_draft_reasons(runner, names), *_model_reasons(runner), *_pool_reasons(runner)]


def _option_reasons() -> list[str]:
    found = ((need, option(need.option)) for need in NEEDS)
    broken = [
        f"needs {need.words}; found {need.option.split('.')[-1]}={value}"
        for need, value in found
        if not need.holds(value)
    ]
    graphs = option("exec.graph.cuda_graph_config")
    for phase, kinds in GRAPHS.items():
        kind = getattr(graphs, phase).backend
        if kind not in kinds:
            broken.append(f"needs {phase} graphs that are {' or '.join(kinds)}; found {kind}")
    return broken


def _draft_reasons(runner: Any, names: tuple[str, ...]) -> list[str]:
    algorithm = option("spec.speculative_algorithm")
    if algorithm is None:
        return []
    if algorithm not in CHAINS:
        return [f"needs speculative_algorithm {', '.join(CHAINS)} or none; found {algorithm}"]
    broken = []
    topk, drafter = option("spec.speculative_eagle_topk"), option("spec.speculative_draft_attention_backend")
    if topk != 1:
        broken.append(f"needs speculative_eagle_topk 1 (a chain: its mask is causal); found {topk}")
    if runner.is_draft_worker or drafter is None or drafter in names:
        broken.append(
            "needs another backend for the draft model (--speculative-draft-attention-backend triton): octavo verifies "
            f"and does not draft; found {drafter}"
        )
    return broken


def _model_reasons(runner: Any) -> list[str]:
    broken = []
    if runner.use_mla_backend:
        broken.append("needs K and V of their own; found multi-head latent attention")
    if runner.model_config.is_encoder_decoder:
        broken.append("needs a decoder; found an encoder with cross-attention")
    if runner.model_config.attention_chunk_size is not None:
        size = runner.model_config.attention_chunk_size
        broken.append(f"needs no chunked-local mask; found attention_chunk_size={size}")
    return broken


def _pool_reasons(runner: Any) -> list[str]:
    from ._sglang_pool import pools_of

    broken = []
    allocator = runner.token_to_kv_pool_allocator
    if getattr(allocator, "translate_kv_loc", None) is not None:
        broken.append(
            f"needs an allocator of the pool's own slots; found {type(allocator).__name__}, whose slots are virtual"
        )
    pools = pools_of(runner.token_to_kv_pool)
    if not pools:
        found = type(runner.token_to_kv_pool).__name__
        return [*broken, f"needs the KV pool MHATokenToKVPool, or SWAKVPool of two of them; found {found}"]
    for layout in dict.fromkeys(pool.kv_cache_layout for pool in pools):
        if layout != "nhd":
            broken.append(f"needs a pool that SGLang lays out as nhd; found {layout}")
    return broken
