"""A real vLLM model over octavo's backend on this machine: run by test_vllm_engine.py in a process of its own.

Without a GPU vLLM is told that there is an H200; layers, weights, caches and attention are on the CPU, where octavo's
reference runs. Prints one JSON object: what was selected and bound, and how far the hidden states of prompts,
chunks, drafts and single tokens through the paged cache are from those of plain attention over the whole sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SHAPE = {
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **SHAPE,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}


def pretend_gpu() -> None:
    """Tell vLLM and torch that there is an H200, where there is no GPU."""
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Pretended(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 140 << 30

        @classmethod
        def opaque_attention_op(cls):
            return False  # vLLM's own ops have no CPU form; without them layers call the same functions

    facts = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30,
        shared_memory_per_block_optin=232448, is_integrated=False, warp_size=32, L2_cache_size=60 << 20,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda *a, **k: facts
    torch.cuda.get_device_capability = lambda *a, **k: (9, 0)
    torch.cuda.get_device_name = lambda *a, **k: facts.name
    torch.cuda.device_count = torch.cuda._device_count_nvml = lambda: 1
    torch.cuda.is_available = lambda: True
    vllm.platforms._current_platform = Pretended()


def configure(model: str, kv_cache_dtype: str, **options: Any) -> Any:
    """vLLM's configuration, with octavo selected as a user selects it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    from octavo.integrations.vllm import register

    registry._run_in_subprocess = lambda function: function()  # a process that does not know of the pretended GPU
    register()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        attention_backend="CUSTOM",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        dtype="bfloat16",
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},
        **options,
    )
    return arguments.create_engine_config()


def load(config: Any) -> Any:
    """The model with random weights, as a worker loads it."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
    ensure_model_parallel_initialized(1, 1)
    config.device_config.device = torch.device("cpu")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = initialize_model(vllm_config=config)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(0.0 if "gemma" in type(model).__name__.lower() else 1.0)
        else:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    for layer in config.compilation_config.static_forward_context.values():
        layer.process_weights_after_loading(torch.bfloat16)
    current_platform.update_block_size_for_backend(config)
    return model


class Engine:
    """The caches and builders of vLLM's V2 runner, around one model."""

    def __init__(self, config: Any, model: Any) -> None:
        from vllm.v1.worker.gpu import attn_utils

        self.config, self.model = config, model
        self.layers = config.compilation_config.static_forward_context
        specs = attn_utils.get_kv_cache_spec(config)
        newer = hasattr(attn_utils, "allocate_kv_cache")
        self.cache_config = self._plan_memory(specs, 64 << 20, newer)
        # Tokens of an entry of a block table: newer runners split blocks into the kernels' pages behind it.
        self.units = [group.kv_cache_spec.block_size for group in self.cache_config.kv_cache_groups]
        self.groups, self.support, self.blocks = attn_utils.init_attn_backend(
            self.cache_config, config, torch.device("cpu")
        )
        self.units = self.units if newer else self.blocks
        rest = (self.layers, self.cache_config)
        if newer:
            attn_utils.init_kv_cache(*rest, torch.device("cpu"), self.blocks, config)
        else:
            dtype = config.cache_config.cache_dtype
            attn_utils.init_kv_cache([], *rest, self.groups, torch.device("cpu"), dtype, self.blocks, config)

    def _plan_memory(self, specs: dict[str, Any], size: int, newer: bool) -> Any:
        """What vLLM's engine core decides: the layout, then the groups and their blocks."""
        if not newer:
            from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

            return get_kv_cache_configs(self.config, [specs], [size])[0]
        from vllm.v1.attention.backends import utils
        from vllm.v1.core import kv_cache_planning as planning

        backends = [layer.get_attn_backend() for layer in self.layers.values()]
        names = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
        utils.resolve_kv_cache_layout(self.config, [names], list(specs.values()))
        groups = planning.get_global_kv_cache_groups(self.config, [specs])
        return planning.get_kv_cache_configs(self.config, [specs], [size], groups)[0]

    def step(self, tokens: list[torch.Tensor], lengths: list[int], padding: int = 0) -> list[torch.Tensor]:
        """Hidden states of the last tokens[i] of sequences that are lengths[i] long.

        Groups of layers share memory, so a sequence owns other pages of it in each.
        """
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.gpu import attn_utils

        counts = torch.tensor([len(t) for t in tokens])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
        positions = torch.cat([torch.arange(n - len(t), n) for t, n in zip(tokens, lengths, strict=True)])
        owner = torch.repeat_interleave(torch.arange(len(tokens)), counts)
        tables, slots = [], []
        for group, block in enumerate(self.units):
            pages = torch.arange(2048 // block) * len(self.units) + group
            table = torch.stack([pages * len(tokens) + i for i in range(len(tokens))]).to(torch.int32)
            tables.append(table)
            slots.append(table[owner, positions // block].to(torch.int64) * block + positions % block)
        metadata = attn_utils.build_attn_metadata(
            attn_groups=self.groups,
            num_reqs=len(tokens),
            num_tokens=len(positions),
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts.clone(),
            max_query_len=int(counts.max()),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            max_seq_len=max(lengths),
            block_tables=tables,
            slot_mappings=slots,
            kv_cache_config=self.cache_config,
        )
        by_layer = attn_utils.build_slot_mappings_by_layer(slots, self.cache_config)
        ids = torch.cat([*tokens, torch.zeros(padding, dtype=torch.int64)])
        places = torch.cat([positions, torch.zeros(padding, dtype=torch.int64)])
        with (
            torch.inference_mode(),
            set_forward_context(metadata, self.config, num_tokens=len(ids), slot_mapping=by_layer),
        ):
            hidden = self.model(input_ids=ids, positions=places)
        return list(hidden[: len(positions)].float().split(counts.tolist()))


def dense(engine: Engine, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states of a whole sequence with plain attention in place of octavo's, over what a cache would hold."""
    from vllm.forward_context import set_forward_context

    from octavo.formats import FORMATS, dequantise, quantise

    def stored(x: torch.Tensor, spec: Any) -> torch.Tensor:
        format = FORMATS[spec.kv_dtype]
        return dequantise(quantise(x, None, format), None, format).float()

    impls = [layer.impl for layer in engine.layers.values()]

    def plain(impl):
        def forward(layer, query, key, value, kv_cache, metadata, output, *scales, **more):
            n, spec = query.shape[0], impl.spec
            k, v = (stored(x, spec).repeat_interleave(spec.group_size, 1) for x in (key, value))
            scores = torch.einsum("ihd,jhd->hij", query.float(), k) * spec.scale
            i, j = torch.arange(n)[:, None], torch.arange(n)[None]
            hidden = (j > i) | (j <= i - spec.window if spec.window else torch.zeros(n, n, dtype=torch.bool))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            return output.copy_(torch.einsum("hij,jhd->ihd", weights, v))

        return forward

    for impl in impls:
        impl.forward = plain(impl)
    try:
        with torch.inference_mode(), set_forward_context(None, engine.config, num_tokens=len(tokens), slot_mapping={}):
            return engine.model(input_ids=tokens, positions=torch.arange(len(tokens))).float()
    finally:
        for impl in impls:
            del impl.forward


def distances(engine: Engine) -> dict[str, float]:
    """Relative distance from plain attention of steps of every form, all over one cache that they fill in turn."""
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randint(3, 128, (n,), generator=generator) for n in (150, 90, 201)]
    expected = [dense(engine, tokens) for tokens in whole]
    done = [0, 0, 0]
    found = {}

    def advance(name: str, counts: list[int], padding: int = 0) -> None:
        first = done.copy()
        for i, count in enumerate(counts):
            done[i] += count
        steps = engine.step([t[a:b] for t, a, b in zip(whole, first, done, strict=True)], done.copy(), padding)
        right = torch.cat([e[a:b] for e, a, b in zip(expected, first, done, strict=True)])
        got = torch.cat(steps)
        found[name] = float((got - right).norm() / right.norm()) if bool(got.isfinite().all()) else float("nan")

    advance("prompts", [65, 20, 130])
    advance("chunks behind them", [40, 31, 33], padding=5)
    advance("single tokens", [1, 1, 1], padding=1)
    advance("a token and two chunks", [1, 20, 10])
    advance("drafts", [4, 4, 4])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("kv_cache_dtype")
    parser.add_argument("--options", default="{}")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        pretend_gpu()
    from vllm.config import set_current_vllm_config

    config = configure(arguments.model, arguments.kv_cache_dtype, **json.loads(arguments.options))
    with set_current_vllm_config(config):
        model = load(config)
        engine = Engine(config, model)
        first = next(iter(engine.layers.values()))
        caches = {name: [str(layer.kv_cache.dtype), *layer.kv_cache.shape] for name, layer in engine.layers.items()}
        print(
            json.dumps(
                {
                    "backend": first.attn_backend.get_name(),
                    "impl": type(first.impl).__name__,
                    "graphs": engine.support.min_cg_support.name,
                    "blocks": engine.blocks,
                    "caches": caches,
                    "specs": {name: layer.impl.spec.as_dict() for name, layer in engine.layers.items()},
                    "distances": distances(engine),
                }
            )
        )


if __name__ == "__main__":
    main()
