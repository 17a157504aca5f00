"""A real SGLang engine on this machine's CPU: run by test_sglang_engine.py in a process of its own.

A small model of random weights, chunked prefill beside decodes, and prompts with a common prefix that is found again.
Prints one JSON object: the tokens of greedy generation, and the log-probabilities of a prompt's own tokens. Of a
backend of octavo.bench.engines.same_bytes: what its two readings of the prompts' first 133 tokens found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        **SHAPE,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 48,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}


def write_checkpoint(model: str, folder: Path) -> None:
    """The model's config and random weights that make every layer matter, as a Hugging Face folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    for name, parameter in made.named_parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, (0.1 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5))
    made.save_pretrained(folder)


def prompts() -> list[list[int]]:
    """Three token sequences with a common prefix of two pages and more."""
    draw = random.Random(0)
    prefix = [draw.randrange(3, 512) for _ in range(130)]
    return [prefix + [draw.randrange(3, 512) for _ in range(n)] for n in (3, 40, 77)]


def main() -> None:
    """Generate with one backend and cache dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="what write_checkpoint made")
    parser.add_argument("backend")
    parser.add_argument("dtype", help="of the model")
    parser.add_argument("kv_cache_dtype")
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    # SGLang's own kernels run in Triton's interpreter here; octavo on a CPU is its reference.
    os.environ.update(HF_HUB_OFFLINE="1", SGLANG_USE_CPU_ENGINE="1", TRITON_INTERPRET="1", SGLANG_PLUGINS="octavo")
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before ServerArgs, which check the backend's name
    import sglang

    from octavo.bench.engines import same_bytes

    twice = arguments.backend in same_bytes.NAMES
    engine = sglang.Engine(
        model_path=arguments.folder,
        skip_tokenizer_init=True,
        device="cpu",
        dtype=arguments.dtype,
        attention_backend=arguments.backend,
        kv_cache_dtype=arguments.kv_cache_dtype,
        page_size=64,
        context_length=512,
        max_running_requests=4,
        max_total_tokens=4096,
        chunked_prefill_size=64,
        enable_mixed_chunk=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        **{"disable_overlap_schedule": True, **(same_bytes.OPTIONS if twice else {})},
        skip_server_warmup=True,
        random_seed=0,
        log_level="error",
        host="127.0.0.1",
        port=arguments.port,
    )
    if twice:
        read = same_bytes.measure(engine, [prompt[:133] for prompt in prompts()], lambda found: None)
        print("RESULT " + json.dumps(read), flush=True)
        os._exit(0)
    greedy = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    found = {"tokens": [], "cached": [], "logprobs": []}
    asked = prompts()
    for batch in (asked[:1], asked[1:]):  # the second batch finds the first one's prefix
        for answer in engine.generate(input_ids=batch, sampling_params=greedy):
            found["tokens"].append(answer["output_ids"])
            found["cached"].append(answer["meta_info"]["cached_tokens"])
    scored = {"input_ids": asked[2:], "return_logprob": True, "logprob_start_len": 0}
    (answer,) = engine.generate(sampling_params={**greedy, "max_new_tokens": 1}, **scored)
    found["logprobs"] = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)  # SGLang's children end with their parent; its shutdown waits for a GPU's


if __name__ == "__main__":
    main()
