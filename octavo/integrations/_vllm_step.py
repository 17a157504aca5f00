"""A step of vLLM's as octavo plans it: the metadata of a batch, and the builder that owns the attention of its layers.

Every kind of layer has one Attention; its layers share the plan, and all kinds of an engine one workspace. plan runs
before a captured graph is replayed and writes what the graph reads, so what it is told must depend on nothing but the
graph: how many sequences, and whether they have one row or up to as many as a verified draft has.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from ..attention import Attention
from ..choose import choose
from ..errors import Unsupported
from ..spec import AttentionSpec
from ._vllm_ranks import Ranks, local_decodes, local_rows
from ._vllm_releases import device_decides_rows
from ._vllm_support import check, device_here

GRAPH_SUPPORT = {
    "always": AttentionCGSupport.ALWAYS,
    "uniform_batch": AttentionCGSupport.UNIFORM_BATCH,
    "single_token_decode": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "never": AttentionCGSupport.NEVER,
}
_workspaces: weakref.WeakValueDictionary[tuple[int, torch.device], torch.Tensor] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Step:
    """What Attention.plan takes for one batch; the tensors are vLLM's own, which captured graphs keep reading."""

    seq_lens: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    num_decodes: int | None
    max_query_len: int | None


class Kind:
    """The Attention of one kind of layer and the step that it is planned for."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.step: Step | None = None

    def plan(self, step: Step) -> None:
        """Plan for `step`, whatever was planned before; one launch at most, which a graph may capture."""
        self.attention.plan(
            step.seq_lens,
            step.page_table,
            step.query_starts,
            num_decodes=step.num_decodes,
            max_query_len=step.max_query_len,
        )
        self.step = step

    def at(self, step: Step) -> Attention:
        """The attention, planned for `step`: a builder may have built another batch since."""
        if self.step is not step:
            self.plan(step)
        return self.attention


@dataclass
class OctavoMetadata:
    """What vLLM hands to every layer of a group.

    Attributes:
        num_actual_tokens: query rows that are not padding.
        step, kinds: the batch, and the kind of each layer by name.
        place: where the rows are among those of the step; None: they are its rows.
    """

    num_actual_tokens: int
    step: Step
    kinds: dict[str, Kind]
    place: torch.Tensor | None = None


class OctavoMetadataBuilder(AttentionMetadataBuilder[OctavoMetadata]):
    """Plans the batches of one group of layers that share a cache's block table."""

    # What update_draft_decode_metadata does is one launch over tensors that stay where they are.
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._rows_vary = device_decides_rows(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        self.ranks: Ranks | None = layers[layer_names[0]].impl.ranks
        specs = {name: self._spec_of(layers[name], layers) for name in layer_names}
        self.decode_rows = max(spec.max_query_len for spec in specs.values())
        bounds = self._bounds()
        needed = max(choose(spec, device).workspace_bytes(*bounds) for spec in specs.values())
        workspace = _shared_workspace(vllm_config, device, needed)
        kinds = {
            spec: Kind(
                Attention(
                    spec,
                    max_batch=bounds[0],
                    max_query_tokens=bounds[1],
                    max_context=bounds[2],
                    device=device,
                    workspace=workspace,
                )
            )
            for spec in dict.fromkeys(specs.values())
        }
        self.kinds = {name: kinds[spec] for name, spec in specs.items()}
        if self.ranks is not None:
            self.supports_draft_decode_metadata_update = False
            self._local_lens = torch.empty(bounds[0], dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """The least that `choose` says of the model's layers."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        specs = {layer.impl.spec for layer in layers if hasattr(getattr(layer, "impl", None), "spec")}
        device = device_here()
        found = [GRAPH_SUPPORT[choose(spec, device).graph_support] for spec in specs]
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            found.append(AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)
        return min(found, key=lambda support: support.value, default=AttentionCGSupport.NEVER)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> OctavoMetadata:
        """Plan the batch. Raises Unsupported for a mask that was not asked for when the backend was selected."""
        common = common_attn_metadata
        _check_mask(common)
        n = int(common.num_reqs)
        batch = (common.seq_lens[:n], common.block_table_tensor[:n], common.query_start_loc[: n + 1])
        place = None
        if self.ranks is None:
            step = Step(*batch, *self._split(common))
        elif common.max_query_len <= 1:
            local = local_decodes(*batch, self.ranks, self._local_lens)
            step = Step(local.seq_lens, local.page_table, local.query_starts, n, 1)
        else:
            local = local_rows(*batch, self.ranks, common.num_actual_tokens)
            step = Step(local.seq_lens, local.page_table, local.query_starts, None, None)
            place = local.place
        for kind in set(self.kinds.values()):
            kind.plan(step)
        return OctavoMetadata(common.num_actual_tokens, step, self.kinds, place)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> OctavoMetadata:
        """As build, with sequences of one token: launches are what is captured, and long ones would be run for it."""
        common_attn_metadata.seq_lens.fill_(1)
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: OctavoMetadata) -> None:
        """Plan again for what the same tensors hold now; vLLM may capture this between the steps of a draft."""
        for kind in set(metadata.kinds.values()):
            kind.plan(metadata.step)

    def _split(self, common: Any) -> tuple[int | None, int | None]:
        """num_decodes and max_query_len of plan; None leaves both to the device."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL:
            return None, None  # one graph replays any mixture of decodes and prompts
        n, most = int(common.num_reqs), int(common.max_query_len)
        if most <= self.decode_rows:
            return n, 1 if most <= 1 and not self._rows_vary else self.decode_rows
        starts = common.query_start_loc_cpu[: n + 1]
        is_prompt = starts[1:] - starts[:-1] > self.decode_rows
        return int(is_prompt.int().argmax()), most

    def _spec_of(self, layer: Any, layers: dict[str, Any]) -> AttentionSpec:
        """The spec of a layer with the pages, scales and query that vLLM has settled on; its impl is told."""
        target = layer.kv_sharing_target_layer_name
        owner = layers[target] if target else layer
        if owner.kv_cache_dtype != layer.kv_cache_dtype:
            raise Unsupported(
                f"layer {layer.layer_name} shares the KV cache of {target}",
                [f"needs the kv_cache_dtype of that layer, {owner.kv_cache_dtype}; found {layer.kv_cache_dtype}"],
            )
        spec = replace(
            layer.impl.spec,
            page_size=self.kv_cache_spec.block_size,
            head_dim_v=layer.head_size_v,
            scale_granularity="head" if owner._k_scale.numel() > 1 else "tensor",
            query_dtype="fp8_e4m3" if layer.query_quant is not None else layer.impl.spec.query_dtype,
        )
        check(spec, device_here())
        layer.impl.settle(spec, owner)
        return spec

    def _bounds(self) -> tuple[int, int, int]:
        """The most sequences, query rows and tokens of a sequence; graphs pad to their sizes, drafts add to them."""
        scheduler, compilation = self.vllm_config.scheduler_config, self.vllm_config.compilation_config
        captured = max(compilation.cudagraph_capture_sizes or [0])
        batch = max(scheduler.max_num_seqs, captured) * (1 if self.ranks is None else self.ranks.size)
        tokens = max(scheduler.max_num_batched_tokens, captured) + scheduler.max_num_seqs * 2 * self.decode_rows
        chunk = getattr(self.kv_cache_spec, "attention_chunk_size", None)
        if chunk:  # vLLM cuts the sequences of a chunked-local layer at its chunks, into sequences of their own
            batch = 2 * batch + tokens // chunk
        context = self.vllm_config.model_config.max_model_len + 2 * self.decode_rows
        return batch, tokens, context


def _check_mask(common: Any) -> None:
    causal = common.causal
    reasons = []
    if causal is not True:
        reasons.append(f"needs causal attention; found causal={causal if isinstance(causal, bool) else 'per sequence'}")
    if any((common.mm_req_doc_ranges or {}).values()):
        reasons.append("needs no image-prefix mask; found bidirectional ranges of multimodal tokens")
    if common.rswa_prefix_lens is not None:
        reasons.append("needs a plain sliding window; found reference sliding window attention")
    if reasons:
        raise Unsupported("octavo cannot run this batch of vLLM's", reasons)


def _shared_workspace(vllm_config: Any, device: torch.device, needed: int) -> torch.Tensor:
    """The workspace of an engine's groups, which run one after the other; a larger need makes another one."""
    key = (id(vllm_config), torch.device(device))
    workspace = _workspaces.get(key)
    if workspace is None or workspace.numel() < needed:
        workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device=device)
        _workspaces[key] = workspace
    return workspace
