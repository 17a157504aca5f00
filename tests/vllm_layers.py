"""Layers, memory and batches as vLLM hands them to octavo, over the stub of a release; and attention as a formula."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from vllm_stub import RECORDS, install

from octavo.formats import FORMATS, dequantise, quantise

BLOCK = 32
PAGES = 40


class Vllm:
    """One release with octavo plugged in, and a model of a few layers."""

    def __init__(self, monkeypatch: Any, release: str, **config: Any) -> None:
        self.release = release
        self.config = configuration(**config)
        install(monkeypatch, release, self.config)
        self.backend = importlib.import_module("octavo.integrations._vllm_backend")
        self.engine = importlib.import_module("vllm.v1.attention.backend")
        self.layers = self.config.compilation_config.static_forward_context

    def layer(self, name: str = "layers.0", heads: int = 4, kv_heads: int = 2, dim: int = 64, **options: Any) -> Any:
        """A layer with the attributes that vLLM's has, its memory bound."""
        kv_cache_dtype, target = options.pop("kv_cache_dtype", "fp8"), options.pop("target", None)
        given = [heads, dim, 0.2, kv_heads, options.pop("alibi", None), options.pop("window", None), kv_cache_dtype]
        given += [options.pop("softcap", None), "decoder", target]
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            impl = self.backend.OctavoImpl(*given, **options)
        finally:
            torch.set_default_dtype(before)
        facts = {
            "layer_name": name,
            "impl": impl,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": dim,
            "head_size_v": dim,
            "kv_cache_dtype": kv_cache_dtype,
            "kv_sharing_target_layer_name": target,
            "query_quant": None,
            **{f"_{which}_scale": torch.tensor(1.0) for which in "qkv"},
        }
        assert facts.keys() <= set(RECORDS[self.release]["layer"]["attributes"])
        layer = SimpleNamespace(**facts)
        layer.kv_cache = self.layers[target].kv_cache if target else self.memory(layer)
        self.layers[name] = layer
        return layer

    def memory(self, layer: Any, block: int = BLOCK) -> torch.Tensor:
        """A cache as the release lays it out, full of what an earlier owner left."""
        element = torch.uint8 if layer.kv_cache_dtype.startswith("fp8") else torch.bfloat16
        shape = (PAGES, layer.num_kv_heads, block, layer.head_size + layer.head_size_v)
        order = (0, 1, 2, 3)
        if hasattr(self.backend.OctavoBackend, "get_kv_cache_shape"):
            shape = self.backend.OctavoBackend.get_kv_cache_shape(
                *shape[:1], block, *shape[1:2], layer.head_size, "fp8"
            )
            order = self.backend.OctavoBackend.get_kv_cache_stride_order()
        raw = torch.full([shape[i] for i in order], 77, dtype=torch.uint8).to(element)
        return raw.permute([order.index(i) for i in range(4)])

    def builder(self, *layers: Any, block: int = BLOCK, **fields: Any) -> Any:
        """The builder of a group of layers."""
        spec = SimpleNamespace(block_size=block, **fields)
        names = [layer.layer_name for layer in layers]
        return self.backend.OctavoBackend.get_builder_cls()(spec, names, self.config, torch.device("cpu"))

    def batch(self, rows: list[int], lengths: list[int], **fields: Any) -> Any:
        """CommonAttentionMetadata of sequences with so many new rows and tokens; sequence i owns pages 5 j + i."""
        starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
        places = [(i, n - r + j) for i, (r, n) in enumerate(zip(rows, lengths, strict=True)) for j in range(r)]
        table = torch.stack([torch.arange(8) * 5 + i for i in range(len(rows))]).to(torch.int32)
        slots = [int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for i, p in places]
        return self.engine.CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(rows),
            max_seq_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            **fields,
        )


def configuration(drafts: int = 0, ranks: int = 1, mode: Any = None, adaptive: bool = False) -> Any:
    """What octavo reads of a VllmConfig."""
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts, parallel_drafting=False, enable_adaptive_verification=adaptive
    )
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4]
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=256),
        model_config=SimpleNamespace(
            max_model_len=256, get_num_attention_heads=lambda parallel: 4, get_num_kv_heads=lambda parallel: 2
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=1),
        speculative_config=speculative if drafts else None,
        use_v2_model_runner=True,
        additional_config={},
    )


class Sequences:
    """Queries, keys and values of a few sequences, given to a layer step by step, and what attention over them is."""

    def __init__(self, layer: Any, lengths: tuple[int, ...] = (100, 61, 130), seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((layer.num_heads, 0), (layer.num_kv_heads, 0), (layer.num_kv_heads, 1))
        dims = (layer.head_size, layer.head_size_v)
        self.parts = [
            [torch.randn(n, heads, dims[v], generator=generator).to(torch.bfloat16) for n in lengths]
            for heads, v in shapes
        ]
        self.layer, self.done = layer, [0] * len(lengths)

    def step(self, vllm: Vllm, builder: Any, rows: list[int], pad: int = 0, **fields: Any) -> tuple[Any, Any]:
        """The output of the next rows[i] rows of each sequence in one batch, and the formula's."""
        first, self.done = self.done, [a + b for a, b in zip(self.done, rows, strict=True)]
        pairs = list(zip(first, self.done, strict=True))
        q, k, v = (torch.cat([x[a:b] for x, (a, b) in zip(part, pairs, strict=True)]) for part in self.parts)
        q, k, v = (torch.cat([x, torch.full_like(x[:1], float("nan")).expand(pad, -1, -1)]) for x in (q, k, v))
        common = vllm.batch(rows, self.done, **fields)
        metadata = builder.build(0, common)
        layer, out = self.layer, torch.full((len(q), self.layer.num_heads, self.layer.head_size_v), float("nan"))
        out = out.to(torch.bfloat16)
        if layer.kv_sharing_target_layer_name is None:
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, common.slot_mapping)
        layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output=out)
        right = [self.formula(i, a, b) for i, (a, b) in enumerate(pairs)]
        return out, torch.cat(right)

    def formula(self, i: int, begin: int, end: int) -> torch.Tensor:
        """Attention of rows [begin, end) of sequence i over its stored keys and values, in fp64: [rows, heads, Dv]."""
        layer, spec = self.layer, self.layer.impl.spec
        owner = layer.impl._owner
        q, k, v = (part[i][:end] for part in self.parts)
        scales = [s.reshape(-1, 1) if spec.fp8 else None for s in (owner._k_scale, owner._v_scale)]
        format = FORMATS[spec.kv_dtype]
        k, v = (
            dequantise(quantise(x, s, format), s, format)
            .double()
            .repeat_interleave(layer.num_heads // layer.num_kv_heads, 1)
            for x, s in zip((k, v), scales, strict=True)
        )
        scores = torch.einsum("ihd,jhd->hij", q[begin:].double(), k) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        at, token = torch.arange(begin, end)[:, None], torch.arange(end)[None]
        unseen = (token > at) | ((token <= at - spec.window) if spec.window else torch.zeros(1, 1, dtype=torch.bool))
        scores = scores.masked_fill(unseen, float("-inf"))
        if layer.impl.sinks is not None:
            sinks = layer.impl.sinks.double()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([scores, sinks], -1)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :end], v)
