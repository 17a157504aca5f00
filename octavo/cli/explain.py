"""`octavo explain`: the plan of a model on a device, why, and every rejection with its reason. No GPU, no weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..choose import Choice, choose
from ..configs import load_config
from ..device import Device
from ..errors import InvalidInput, Unsupported
from ..indexer_choose import IndexerChoice, choose_indexer
from ..layouts import layout_reasons
from ..models import LayerKind, Model, model_kinds
from ..plan_text import columns, layer_ranges
from ..rules import head_dims
from ..spec import LAYOUTS, AttentionSpec, one_of

DEFAULT_MEMORY_GB = 10.0


@dataclass(frozen=True)
class Plan:
    """What explain found for one layer kind: its choice or its refusal, and why its layout."""

    kind: LayerKind
    outcome: Choice | Unsupported
    layout_why: str

    @property
    def spec(self) -> AttentionSpec:
        return self.kind.spec


def explain(
    model: Annotated[str, typer.Option(help="Known name, or a folder or file with a config.json.")],
    device: Annotated[
        str, typer.Option(help="a100, a10, l40s, h100, h200, b200, b300, rtx5090, gb10, cpu or auto.")
    ] = "auto",
    tp: Annotated[int, typer.Option(help="Ranks that the heads are divided over.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_e4m3 (fp8), fp8_e5m2, bfloat16, float16 or auto.")] = "auto",
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    layout: Annotated[str, typer.Option(help="leaf, nhd, hnd or auto.")] = "auto",
    backend: Annotated[
        str, typer.Option(help="gluon, triton, reference or auto. A named one never falls back.")
    ] = "auto",
    scale_granularity: Annotated[
        str, typer.Option(help="tensor, head, token_head, or auto: the checkpoint's.")
    ] = "auto",
    memory: Annotated[float, typer.Option(help="GB (1e9 bytes) that a rank gives its cache.")] = DEFAULT_MEMORY_GB,
    query_len: Annotated[int, typer.Option(help="Query rows a sequence in decode; above 1 to verify drafts.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Print which backend runs prefill and decode of each kind of layer, why, and why each other one does not."""
    if layout != "auto":
        one_of("layout", layout, LAYOUTS)
    if not 0 < memory <= 1e9:
        raise InvalidInput("memory must be a positive number of GB, at most 1e9", memory)
    on = Device.of(device)
    fields = {"page_size": page_size, "max_query_len": query_len, "layout": "nhd"}
    fields["scale_granularity"] = None if scale_granularity == "auto" else scale_granularity
    shape = model_kinds(load_config(model), tp=tp, kv_dtype=kv_cache_dtype, name=model, **fields)
    plans = [plan(kind, on, layout, backend) for kind in shape.kinds]
    indexer = indexer_plan(shape, on, backend)
    if as_json:
        typer.echo(json.dumps(as_dict(shape, on, plans, memory, indexer), indent=2))
    else:
        typer.echo("\n".join(lines(shape, on, plans, memory, indexer)))
    if any(isinstance(outcome, Unsupported) for outcome in (indexer, *(p.outcome for p in plans))):
        raise typer.Exit(2)


def _outcome(spec: AttentionSpec, device: Device, backend: str) -> Choice | Unsupported:
    try:
        return choose(spec, device, backend)
    except Unsupported as refusal:
        return refusal


def indexer_plan(model: Model, device: Device, backend: str) -> IndexerChoice | Unsupported | None:
    """The plan of the model's indexer, or why there is none; None for a model without one."""
    if model.indexer is None:
        return None
    try:
        return choose_indexer(model.indexer, device, backend)
    except Unsupported as refusal:
        return refusal


def plan(kind: LayerKind, device: Device, layout: str, backend: str) -> Plan:
    """The plan of one layer kind. Layout "auto" is leaf where it can hold the cache and something runs it, else nhd."""
    if layout != "auto":
        kind = dataclasses.replace(kind, spec=dataclasses.replace(kind.spec, layout=layout))
        return Plan(kind, _outcome(kind.spec, device, backend), "as asked")
    nhd = kind
    kind = dataclasses.replace(kind, spec=dataclasses.replace(kind.spec, layout="leaf"))
    cannot = layout_reasons(kind.spec)
    if cannot:
        return Plan(nhd, _outcome(nhd.spec, device, backend), "; ".join(cannot))
    leaf = _outcome(kind.spec, device, backend)
    if isinstance(leaf, Choice):
        return Plan(kind, leaf, "FP8 as the tensor cores read it")
    other = _outcome(nhd.spec, device, backend)
    if isinstance(other, Choice):
        return Plan(nhd, other, f"no backend runs leaf on {device}")
    return Plan(kind, leaf, "FP8 as the tensor cores read it")


def sixteen_bit(spec: AttentionSpec) -> AttentionSpec:
    """The same layer with a 16-bit cache: what the cache's size is compared with."""
    return dataclasses.replace(spec, kv_dtype="bfloat16", layout="nhd")


def cache_sizes(model: Model, plans: list[Plan], memory: float) -> dict[str, Any]:
    """Bytes per token and rank of each layer kind and in all, of a 16-bit cache, and the tokens that `memory` GB holds.

    Every layer is counted at every token, windowed ones too: what a cache that frees no page behind a window takes.
    """
    kinds = [
        {
            "name": p.kind.name,
            "layers": len(p.kind.layers),
            "bytes_per_token": p.kind.bytes_per_token,
            "bytes_per_token_16_bit": len(p.kind.layers) * sixteen_bit(p.spec).bytes_per_token,
        }
        for p in plans
    ]
    if model.indexer is not None:
        index = model.indexer_bytes_per_token
        layers = sum(len(p.kind.layers) for p in plans)
        kinds.append(
            {"name": "index keys", "layers": layers, "bytes_per_token": index, "bytes_per_token_16_bit": index}
        )
    total = sum(k["bytes_per_token"] for k in kinds)
    total_16 = sum(k["bytes_per_token_16_bit"] for k in kinds)
    page = plans[0].spec.page_size
    return {
        "kinds": kinds,
        "bytes_per_token": total,
        "bytes_per_token_16_bit": total_16,
        "memory_gb": memory,
        "tokens": int(memory * 1e9) // (total * page) * page,
        "tokens_16_bit": int(memory * 1e9) // (total_16 * page) * page,
    }


def as_dict(
    model: Model,
    device: Device,
    plans: list[Plan],
    memory: float,
    indexer: IndexerChoice | Unsupported | None = None,
) -> dict[str, Any]:
    """The answer for --json."""
    index: dict[str, Any] | None = dataclasses.asdict(model.indexer) if model.indexer else None
    if index is not None and isinstance(indexer, IndexerChoice):
        index |= {"supported": True, **indexer.as_dict()}
    elif index is not None and isinstance(indexer, Unsupported):
        index |= {"supported": False, "reasons": list(indexer.reasons), "nearest": indexer.nearest}
    kinds = []
    for p in plans:
        entry = {
            "name": p.kind.name,
            "layers": list(p.kind.layers),
            "layout_why": p.layout_why,
            "spec": p.spec.as_dict(),
        }
        if isinstance(p.outcome, Choice):
            entry |= {"supported": True, **p.outcome.as_dict()}
        else:
            entry |= {"supported": False, "reasons": list(p.outcome.reasons), "nearest": p.outcome.nearest}
        kinds.append(entry)
    return {
        "model": model.name,
        "model_type": model.model_type,
        "tp": model.tp,
        "device": dataclasses.asdict(device),
        "notes": list(model.notes),
        "indexer": index,
        "kinds": kinds,
        "cache": cache_sizes(model, plans, memory),
    }


def lines(
    model: Model,
    device: Device,
    plans: list[Plan],
    memory: float,
    indexer: IndexerChoice | Unsupported | None = None,
) -> list[str]:
    """The answer for people."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 100)
    ranks = f"one of {model.tp} ranks (tp {model.tp})" if model.tp > 1 else "one rank"
    out = [_title(f"{model.name} on {device}, {ranks}")]
    for note in model.notes:
        out += textwrap.wrap(note, width, initial_indent="  * ", subsequent_indent="    ")
    for p in plans:
        count = len(p.kind.layers)
        out += ["", _title(f"{p.kind.name}: {count} layer{'s' if count > 1 else ''} ({layer_ranges(p.kind.layers)})")]
        out += textwrap.wrap(_heads(p.spec), width, initial_indent="  ", subsequent_indent="  ")
        out += textwrap.wrap(_cache(p), width, initial_indent="  ", subsequent_indent="  ")
        if isinstance(p.outcome, Choice):
            out += ["  " + line for line in p.outcome.plan_lines(width - 2)]
        else:
            out += _refusal(p.outcome, width)
    if model.indexer is not None and indexer is not None:
        spec = model.indexer
        out += ["", _title(f"indexer: {spec.num_heads} heads of {spec.head_dim}, top {spec.top_k}, in every layer")]
        if isinstance(indexer, IndexerChoice):
            out += ["  " + line for line in indexer.plan_lines(width - 2)]
        else:
            out += _refusal(indexer, width)
    return out + ["", _title("cache on each rank"), *_size_lines(cache_sizes(model, plans, memory), width)]


def _title(text: str) -> str:
    return typer.style(text, bold=True)


def _heads(spec: AttentionSpec) -> str:
    words = [
        f"{spec.num_q_heads} query and {spec.num_kv_heads} KV heads of {head_dims(spec)}",
        f"query {spec.query_dtype}",
    ]
    for name in ("window", "softcap", "attention_chunk"):
        if getattr(spec, name) is not None:
            words.append(f"{name.replace('_', ' ')} {getattr(spec, name):g}")
    words += [name for name in ("sinks", "alibi") if getattr(spec, name)] + ([] if spec.causal else ["not causal"])
    if spec.max_query_len > 1:
        words.append(f"{spec.max_query_len} query rows a sequence in decode")
    return ", ".join(words)


def _cache(p: Plan) -> str:
    scales = f", a scale per {p.spec.scale_granularity.replace('_', ' and ')}" if p.spec.fp8 else ""
    return f"cache {p.spec.kv_dtype}{scales}, pages of {p.spec.page_size}, layout {p.spec.layout} ({p.layout_why})"


def _refusal(refusal: Unsupported, width: int) -> list[str]:
    out = ["  cannot run, for every broken rule:"]
    for reason in refusal.reasons:
        out += textwrap.wrap(reason, width, initial_indent="    - ", subsequent_indent="      ")
    if refusal.nearest:
        out += textwrap.wrap(
            f"nearest supported: {refusal.nearest}", width, initial_indent="  ", subsequent_indent="    "
        )
    return out


def _size_lines(sizes: dict[str, Any], width: int) -> list[str]:
    rows = [("layer kind", "layers", "bytes a token", "in 16 bits", "share")]
    for k in [*sizes["kinds"], {**sizes, "name": "all", "layers": sum(k["layers"] for k in sizes["kinds"])}]:
        share = k["bytes_per_token"] / k["bytes_per_token_16_bit"]
        layers = "" if k["name"] == "all" else str(k["layers"])
        rows.append(
            (k["name"], layers, f"{k['bytes_per_token']:,}", f"{k['bytes_per_token_16_bit']:,}", f"{share:.0%}")
        )
    if len(sizes["kinds"]) == 1:
        rows.pop()
    table = ["  " + line for line in columns(rows, right=(1, 2, 3, 4))]
    held = (
        f"  {sizes['memory_gb']:g} GB hold {sizes['tokens']:,} tokens; with a 16-bit cache {sizes['tokens_16_bit']:,}"
    )
    if any(k["name"] == "sliding_window" for k in sizes["kinds"]):
        held += " (no page behind a window freed)"
    return [*table, *textwrap.wrap(held, width, subsequent_indent="    ")]
