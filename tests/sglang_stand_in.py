"""The parts of SGLang that octavo's plug-in touches, for tests: the installed release's, or stand-ins for them.

A stand-in does no more than its original's contract; test_sglang_signatures.py compares the plug-in itself with what
was recorded of the originals.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from enum import Enum, IntEnum, auto
from types import ModuleType, SimpleNamespace

import torch

INSTALLED = importlib.util.find_spec("sglang") is not None


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"


class RadixAttention(torch.nn.Module):
    """An attention layer: what it computes and its scales."""

    def __init__(
        self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1, sliding_window_size=-1
    ):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention = self.use_irope = False
        self.k_scale = self.v_scale = None
        self.attn_type = AttentionType.DECODER
        self.pos_encoding_mode, self.logit_capping_method, self.xai_temperature_len = "NONE", "tanh", -1


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_decode_or_idle(self):
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return self == ForwardMode.DRAFT_EXTEND_V2


class AttentionBackend:
    """Sends a layer's call to the method of its batch's mode."""

    needs_cpu_seq_lens = True

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        decode = forward_batch.forward_mode.is_decode()
        run = self.forward_decode if decode else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class MHATokenToKVPool:
    """A K and a V buffer a layer, [slots, heads, dim]; the first page is padding's."""

    def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver, **kwargs):
        self.size, self.page_size, self.dtype, self.kv_cache_layout = size, page_size, dtype, "nhd"
        stored = torch.uint8 if dtype.itemsize == 1 else dtype
        v_head_dim = kwargs.get("v_head_dim") or head_dim
        rows = size + page_size
        self.k_buffer = [torch.zeros(rows, head_num, head_dim, dtype=stored, device=device) for _ in range(layer_num)]
        self.v_buffer = [torch.zeros(rows, head_num, v_head_dim, dtype=stored, device=device) for _ in range(layer_num)]

    def get_kv_buffer(self, layer_id):
        return self.k_buffer[layer_id].view(self.dtype), self.v_buffer[layer_id].view(self.dtype)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        raise NotImplementedError

    def move_kv_cache(self, tgt_loc, src_loc):
        raise NotImplementedError


class SWAKVPool:
    """A pool for full and one for windowed layers, each with slots of its own."""

    def __init__(self, size, size_swa, swa_attention_layer_ids, full_attention_layer_ids, **kwargs):
        self.size, self.dtype = size, kwargs["dtype"]
        self.full_kv_pool = MHATokenToKVPool(size, layer_num=len(full_attention_layer_ids), **kwargs)
        self.swa_kv_pool = MHATokenToKVPool(size_swa, layer_num=len(swa_attention_layer_ids), **kwargs)
        self.layers_mapping = {layer: (i, False) for i, layer in enumerate(full_attention_layer_ids)}
        self.layers_mapping.update({layer: (i, True) for i, layer in enumerate(swa_attention_layer_ids)})
        self.full_to_swa_index_mapping = None

    def register_mapping(self, full_to_swa_index_mapping):
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def get_kv_buffer(self, layer_id):
        index, windowed = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if windowed else self.full_kv_pool).get_kv_buffer(index)


MODULES = {
    "layers.attention.attention_registry": {"ATTENTION_BACKENDS": {}, "register_attention_backend": None},
    "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
    "layers.radix_attention": {"RadixAttention": RadixAttention, "AttentionType": AttentionType},
    "mem_cache.memory_pool": {"MHATokenToKVPool": MHATokenToKVPool},
    "mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
    "model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
    "server_args": {"ATTENTION_BACKEND_CHOICES": ["triton"], "add_attention_backend_choices": None},
    "runtime_context": {},
}


def make() -> dict[str, ModuleType]:
    """The stand-ins as modules by name."""
    names = {"sglang", "sglang.srt"}
    for module in MODULES:
        parts = f"sglang.srt.{module}".split(".")
        names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    made = {name: ModuleType(name) for name in sorted(names)}
    for name, module in made.items():
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    for name, members in MODULES.items():
        vars(made[f"sglang.srt.{name}"]).update(members)
    registry, choices = made["sglang.srt.layers.attention.attention_registry"], made["sglang.srt.server_args"]
    registry.register_attention_backend = lambda name: lambda made: registry.ATTENTION_BACKENDS.setdefault(name, made)
    choices.add_attention_backend_choices = choices.ATTENTION_BACKEND_CHOICES.extend
    return made


MADE = {} if INSTALLED else make()


@contextlib.contextmanager
def present() -> Iterator[None]:
    """SGLang can be imported: the installed one, or the stand-ins, which are gone afterwards."""
    sys.modules.update(MADE)
    try:
        yield
    finally:
        for name in MADE:
            sys.modules.pop(name, None)


def graphs(prefill: str = "breakable", decode: str = "full") -> SimpleNamespace:
    """SGLang's cuda_graph_config: the kind of graph of each phase."""
    return SimpleNamespace(prefill=SimpleNamespace(backend=prefill), decode=SimpleNamespace(backend=decode))


def options(**changed: object) -> dict[str, SimpleNamespace]:
    """SGLang's published options by namespace, as octavo reads them, with `changed` in place of the defaults."""
    values: dict[str, dict[str, object]] = {
        "parallel": {"attn_dcp_size": 1, "attn_cp_size": 1, "enable_dp_attention": False},
        "disagg": {"enable_pdmux": False, "disaggregation_mode": "null"},
        "memory": dict.fromkeys(
            (
                "enable_unified_memory",
                "enable_page_major_kv_layout",
                "enable_hierarchical_cache",
                "enable_hisparse",
                "enable_lmcache",
                "enable_flexkv",
            ),
            False,
        ),
        "schedule": {"prefill_only_disable_kv_cache": False, "chunked_prefill_size": 512, "max_prefill_tokens": 512},
        "spec": dict.fromkeys(
            (
                "speculative_algorithm",
                "speculative_eagle_topk",
                "speculative_num_draft_tokens",
                "speculative_draft_attention_backend",
            )
        ),
        "exec.overlap": {"enable_two_batch_overlap": False},
        "exec.dllm": {"dllm_algorithm": None},
        "exec.kernel": {
            "attention_backend": "octavo",
            "prefill_attention_backend": None,
            "decode_attention_backend": None,
        },
        "exec.graph": {"cuda_graph_config": graphs(), "enable_torch_compile": False},
    }
    for name, value in changed.items():
        owners = [namespace for namespace in values.values() if name in namespace]
        assert len(owners) == 1, f"{name} is no option that octavo reads"
        owners[0][name] = value
    made: dict[str, SimpleNamespace] = {"exec": SimpleNamespace()}
    for path, fields in values.items():
        if path.startswith("exec."):
            setattr(made["exec"], path.split(".")[1], SimpleNamespace(**fields))
        else:
            made[path] = SimpleNamespace(**fields)
    return made
