"""The matrix: models x ranks x concurrency x context x KV dtype, one case a cell, and who is measured on each.

A model with sparse attention has cells of its indexer: logits, top-k and append, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backends import BACKENDS
from ..choose import verdicts
from ..configs import load_config
from ..device import Device
from ..errors import InvalidInput
from ..indexer_choose import choose_operation
from ..models import LayerKind, model_kinds
from ..spec import AttentionSpec, IndexerSpec
from . import indexer_cases, indexer_measure, measure
from .cases import Case
from .indexer_cases import IndexerCase
from .peers import PEERS
from .records import Record

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3.2")
OPS = ("decode", "verify", "prefill", "append")
PREFILL_TOKENS = 8192  # new tokens of a prefill step: of one long prompt, or of several short ones
VERIFY_ROWS = 4
LARGEST_SHARE = 0.3  # of the device's memory that one cell's keys and values may take


@dataclass(frozen=True)
class Selection:
    """What is crossed.

    Attributes:
        models: known names or folders. tps: ranks. concurrencies: sequences of a decode step. contexts: their tokens.
        prompts: tokens of a prompt; a step takes PREFILL_TOKENS of it, or several whole ones.
        kv_dtypes: of the cache; FP8 lies in leaf pages of 64, 16 bits in nhd. ops: of OPS.
    """

    models: tuple[str, ...] = ("llama-3.1-8b",)
    tps: tuple[int, ...] = (1,)
    concurrencies: tuple[int, ...] = (64,)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    prompts: tuple[int, ...] = (1024, 8192, 32768)
    kv_dtypes: tuple[str, ...] = ("fp8_e4m3", "bfloat16")
    ops: tuple[str, ...] = ("decode", "prefill", "append")


WHOLE = Selection(models=MODELS, tps=(1, 8), concurrencies=(16, 64, 512), ops=OPS)
# Where there is no GPU: small enough for the reference, to show that the command works.
TINY = Selection(concurrencies=(2,), contexts=(256,), prompts=(128,))
TINY_TOKENS = 128


def cases(
    selection: Selection, memory_bytes: float | None = None, prefill_tokens: int = PREFILL_TOKENS
) -> list[Case | IndexerCase]:
    """Every cell, in order of model; those whose keys and values exceed LARGEST_SHARE of `memory_bytes` are left out.

    Layers of latent attention are left out too: no kernel takes them. Raises InvalidInput for an unknown model or op.
    """
    unknown = [op for op in selection.ops if op not in OPS]
    if unknown:
        raise InvalidInput(f"ops must be of {', '.join(OPS)}", ", ".join(unknown))
    made: list[Case | IndexerCase] = []
    for model in selection.models:
        for tp in selection.tps:
            for kv_dtype in selection.kv_dtypes:
                layout = "leaf" if kv_dtype.startswith("fp8") else "nhd"
                shape = model_kinds(load_config(model), tp=tp, kv_dtype=kv_dtype, name=model, layout=layout)
                for kind in shape.kinds:
                    if not kind.spec.mla:
                        prefix = _prefix(model, kind, len(shape.kinds) > 1, tp)
                        made += _of_kind(kind.spec, prefix, selection, prefill_tokens)
                if shape.indexer is not None:
                    made += _of_indexer(shape.indexer, _short(model), selection, prefill_tokens)
    if memory_bytes is not None:
        made = [case for case in made if case.work.bytes <= LARGEST_SHARE * memory_bytes]
    by_name: dict[str, Case | IndexerCase] = {}
    for case in made:
        if by_name.setdefault(case.name, case) != case:
            raise InvalidInput("models must differ in their names, which records are told apart by", case.name)
    return list(by_name.values())


def alike(cells: Sequence[Case | IndexerCase]) -> list[list[Case | IndexerCase]]:
    """Cells that differ in their names alone, together, in order: Llama 3.1 70B and Qwen3 32B have equal heads."""
    found: dict[Case | IndexerCase, list[Case | IndexerCase]] = {}
    for case in cells:
        found.setdefault(replace(case, name=""), []).append(case)
    return list(found.values())


def _prefix(model: str, kind: LayerKind, several: bool, tp: int) -> str:
    """ "gpt-oss-120b:sliding_window/tp1"."""
    return f"{_short(model)}{':' + kind.name if several else ''}/tp{tp}"


def _short(model: str) -> str:
    """A model's name in records: without the folders it lies in."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def _of_indexer(spec: IndexerSpec, model: str, selection: Selection, prefill_tokens: int) -> Iterator[IndexerCase]:
    """Cells of an indexer: paged logits and top-k of a decode step, logits of a run of keys, append."""
    name = f"{model}:indexer"
    for op in selection.ops:
        if op in ("decode", "verify"):
            n = VERIFY_ROWS if op == "verify" else 1
            rows = f"/n{n}" if n > 1 else ""
            for batch in selection.concurrencies:
                for context in selection.contexts:
                    paged = indexer_cases.paged(batch, context, n, spec)
                    yield replace(paged, name=f"{paged.op}/{name}{rows}/b{batch}/ctx{context}")
                    if n == 1 and context > spec.top_k:
                        chosen = indexer_cases.topk(batch, context, spec)
                        yield replace(chosen, name=f"topk/{name}/b{batch}/ctx{context}")
        elif op == "prefill":
            for prompt in selection.prompts:
                rows = min(prompt, prefill_tokens)
                yield replace(
                    indexer_cases.ragged(rows, prompt, True, spec), name=f"mqa_logits/{name}/q{rows}/ctx{prompt}"
                )
        else:
            for tokens in (prefill_tokens, *selection.concurrencies):
                yield replace(indexer_cases.append(tokens, spec), name=f"append/{name}/t{tokens}")


def _of_kind(spec: AttentionSpec, prefix: str, selection: Selection, prefill_tokens: int) -> Iterator[Case]:
    """Cells of one layer kind; a cache that is not fp8_e4m3 is in their names."""
    prefix += "" if spec.kv_dtype == "fp8_e4m3" else f"/{spec.kv_dtype}"
    for op in selection.ops:
        if op in ("decode", "verify"):
            of_op = replace(spec, max_query_len=VERIFY_ROWS if op == "verify" else 1)
            for batch in selection.concurrencies:
                for context in selection.contexts:
                    name = f"{op}/{prefix}/b{batch}/ctx{context}"
                    yield Case(name, op, of_op, (context,) * batch, (of_op.max_query_len,) * batch)
        elif op == "prefill":
            for prompt in selection.prompts:
                rows = min(prompt, prefill_tokens)
                batch = max(1, prefill_tokens // prompt)
                yield Case(
                    f"prefill/{prefix}/b{batch}/q{rows}/ctx{prompt}", op, spec, (prompt,) * batch, (rows,) * batch
                )
        else:
            sizes = ((1, prefill_tokens), *((batch, 1) for batch in selection.concurrencies))
            for batch, tokens in sizes:
                yield Case(f"append/{prefix}/b{batch}/t{tokens}", op, spec, (tokens,) * batch, (tokens,) * batch)


def backends_of(case: Case | IndexerCase, device: Device, peers: bool) -> list[str]:
    """Who is measured: octavo's backends that may (the reference only where nothing else may), then the peers that
    have the op, which all need a GPU.

    A cell of append has one backend, the one that caches use.
    """
    if case.op == "append":
        return ["auto"]
    if isinstance(case, IndexerCase):
        judged = choose_operation(case.spec, device, case.op).verdicts
    else:
        judged = verdicts(case.spec, device, "prefill" if case.op == "prefill" else "decode")
    able = [name for name, verdict in judged.items() if verdict.word != "cannot"]
    if device.arch == "cpu":
        return able
    able = [name for name in able if name != BACKENDS[-1].name] or able
    others = [peer.name for peer in PEERS.values() if case.op in peer.ops and peer.installed] if peers else []
    return able + others


def backend_name(case: Case | IndexerCase, backend: str, device: torch.device) -> str:
    """What a record of `backend` is called: itself, or for "auto" what octavo chooses for the case."""
    if isinstance(case, Case):
        return measure.backend_name(case, backend, device)
    return indexer_measure.backend_name(case, backend, device)


def compare(
    case: Case | IndexerCase, backends: Sequence[str], device: torch.device | str, **arguments: Any
) -> Iterator[Record]:
    """A record of `case` for each of `backends` over the same inputs; see measure.compare."""
    if isinstance(case, Case):
        return measure.compare(case, backends, device, **arguments)
    return indexer_measure.compare(case, backends, device, **arguments)
