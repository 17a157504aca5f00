"""Sequences served through octavo's SGLang backend, with the exact answer beside: what its tests share."""

from __future__ import annotations

from types import SimpleNamespace

import sglang_stand_in as stand_in
import torch

with stand_in.present():
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from octavo.integrations._sglang_backend import OctavoAttentionBackend

PAGE, HQ, HK, D = 64, 4, 2, 64
SLOTS = 40 * PAGE
E4M3 = torch.float8_e4m3fn
LENGTHS = (5, 70, 130)


def radix(layer_id=0, **fields):
    named = {"num_heads": HQ, "head_dim": D, "scaling": D**-0.5, "num_kv_heads": HK, **fields}
    return RadixAttention(layer_id=layer_id, **named)


def mha_pool(dtype, page_size=PAGE, size=SLOTS, **fields):
    shape = {"head_num": HK, "head_dim": D, "layer_num": 1, "enable_memory_saver": False, **fields}
    shape.setdefault("device", "cpu")
    return MHATokenToKVPool(size=size, page_size=page_size, dtype=dtype, **shape)


def runner_of(*layers, dtype=E4M3, page_size=PAGE, pool=None, device="cpu", **fields):
    """A ModelRunner as far as a backend looks: model, pools and shapes."""
    pool = mha_pool(dtype, page_size, device=device) if pool is None else pool
    req_to_token = torch.zeros(9, 4 * PAGE, dtype=torch.int32, device=device)
    return SimpleNamespace(
        **{
            "model": torch.nn.ModuleList(layers),
            "token_to_kv_pool": pool,
            "token_to_kv_pool_allocator": SimpleNamespace(),
            "req_to_token_pool": SimpleNamespace(req_to_token=req_to_token),
            "kv_cache_dtype": dtype,
            "dtype": torch.bfloat16,
            "device": device,
            "page_size": page_size,
            "use_mla_backend": False,
            "is_draft_worker": False,
            "model_config": SimpleNamespace(is_encoder_decoder=False, attention_chunk_size=None),
            **fields,
        }
    )


class Served:
    """Sequences in a runner's pools: gives their pages out, feeds tokens through a backend, knows the exact answer."""

    def __init__(self, backend, layer, sequences=3, seed=0):
        self.backend, self.layer = backend, layer
        self.generator = torch.Generator().manual_seed(seed)
        self.req_to_token = backend.req_to_token_pool.req_to_token
        self.device = self.req_to_token.device
        self.page_size = backend._stored["page_size"]
        pages = torch.randperm(SLOTS // self.page_size - 1, generator=self.generator) + 1
        width = self.req_to_token.shape[1]
        each = -(-width // self.page_size)
        for request in range(sequences):  # request 0 is padding's
            own = pages[request * each : (request + 1) * each]
            slots = own[:, None] * self.page_size + torch.arange(self.page_size)
            self.req_to_token[request + 1] = slots.flatten()[:width]
        shape = (sequences, 0, layer.tp_k_head_num)
        self.k = list(torch.empty(*shape, layer.qk_head_dim, device=self.device))
        self.v = list(torch.empty(*shape, layer.v_head_dim, device=self.device))

    def rows(self, count, heads, dim):
        return torch.randn(count, heads, dim, generator=self.generator).to(self.device, torch.bfloat16)

    def batch(self, mode, counts, requests=None):
        """A forward batch of `counts` new tokens of the requests, with their queries, keys and values."""
        requests = list(range(len(counts))) if requests is None else requests
        starts = [self.k[r].shape[0] for r in requests]
        layer, total = self.layer, sum(counts)
        q = self.rows(total, layer.tp_q_head_num, layer.qk_head_dim)
        k = self.rows(total, layer.tp_k_head_num, layer.qk_head_dim)
        v = self.rows(total, layer.tp_k_head_num, layer.v_head_dim)
        slots = [self.req_to_token[r + 1, s : s + n] for r, s, n in zip(requests, starts, counts, strict=True)]
        verify = mode == ForwardMode.TARGET_VERIFY
        lengths = [s + (0 if verify else n) for s, n in zip(starts, counts, strict=True)]
        fields = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(counts),
            req_pool_indices=torch.tensor(requests, device=self.device) + 1,
            seq_lens=torch.tensor(lengths, device=self.device),
            extend_seq_lens=torch.tensor(counts, dtype=torch.int32, device=self.device),
            extend_seq_lens_cpu=list(counts),
            out_cache_loc=torch.cat(slots).long(),
            spec_info=SimpleNamespace(draft_token_num=counts[0]) if verify else None,
        )
        begin = 0
        for request, count in zip(requests, counts, strict=True):
            self.k[request] = torch.cat([self.k[request], k[begin : begin + count].float()])
            self.v[request] = torch.cat([self.v[request], v[begin : begin + count].float()])
            begin += count
        return fields, q, k, v

    def exact(self, q, counts, requests=None, sinks=None, multiplied=torch.float64):
        """fp64 attention of the last `counts` tokens over what a cache of the pool's dtype keeps of all.

        multiplied: probabilities are rounded to it first; bfloat16 is how attention is plainly written.
        """
        requests = list(range(len(counts))) if requests is None else requests
        layer, parts, begin = self.layer, [], 0
        group = layer.tp_q_head_num // layer.tp_k_head_num
        for request, count in zip(requests, counts, strict=True):
            k = stored(self.k[request], self.backend.token_to_kv_pool.dtype, layer.k_scale).repeat_interleave(group, 1)
            v = stored(self.v[request], self.backend.token_to_kv_pool.dtype, layer.v_scale).repeat_interleave(group, 1)
            n = k.shape[0]
            scores = torch.einsum("thd,nhd->htn", q[begin : begin + count].double(), k) * layer.scaling
            if layer.logit_cap:
                scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
            row = torch.arange(n - count, n, device=self.device)[:, None]
            before = row - torch.arange(n, device=self.device)[None]
            seen = before >= 0
            if layer.sliding_window_size > -1:
                seen &= before <= layer.sliding_window_size  # SGLang's count: tokens before the row
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], -1)
            p = scores.softmax(-1)[..., :n].to(multiplied).double()
            parts.append(torch.einsum("htn,nhd->thd", p, v).flatten(1))
            begin += count
        return torch.cat(parts)

    def run(self, mode, counts, requests=None, **arguments):
        """One eager step: the backend's output and the exact one."""
        fields, q, k, v = self.batch(mode, counts, requests)
        self.backend.init_forward_metadata(fields)
        out = self.backend.forward(q.flatten(1), k, v, self.layer, fields, **arguments)
        return out, self.exact(q, counts, requests, arguments.get("sinks"))


def stored(x, dtype, scale):
    """fp64 of what a cache keeps of x: divided by the scale, saturated at the format's largest, times the scale."""
    if dtype.itemsize > 1:
        return x.to(dtype).double()
    scale, most = 1.0 if scale is None else scale.item(), torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype).double() * scale


def assert_exact(out, exact):
    """As near as rounding the output to bf16, and fp32 arithmetic on at most 200 terms of at most 4, leave it."""
    bound = 2.0**-8 * exact.abs() + 200 * 4 * 2.0**-24
    assert not out.isnan().any()
    assert ((out.double() - exact).abs() <= bound).all()


def padded(fields, rows, pad):
    """Pad a batch in place as SGLang's decode graphs do, but for its new tokens' slots: sequences of request 0."""
    none = fields.req_pool_indices.new_zeros(pad)
    fields.batch_size += pad
    fields.req_pool_indices = torch.cat([fields.req_pool_indices, none])
    fields.seq_lens = torch.cat([fields.seq_lens, torch.ones_like(none)])
    return torch.cat([fields.out_cache_loc, fields.out_cache_loc.new_zeros(pad * rows)])


def with_rows(x, count):
    """x and `count` more rows of ones."""
    return torch.cat([x, torch.ones(count, *x.shape[1:], dtype=x.dtype, device=x.device)])


def backend_of(layer, **fields):
    """octavo's backend of a model with one layer, with a prefill as exact as 16-bit attention."""
    return OctavoAttentionBackend(runner_of(layer, **fields), "exact")


def publish_options(monkeypatch, **changed):
    """Publish SGLang's options: those of a plain server, but for what is changed."""
    from sglang.srt import runtime_context

    for name, bag in stand_in.options(**changed).items():
        monkeypatch.setattr(runtime_context, f"get_{name}", lambda bag=bag: bag, raising=False)
