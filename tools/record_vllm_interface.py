"""Record what octavo's plug-in uses of a vLLM release, as data that tests hold the plug-in against.

    python tools/record_vllm_interface.py FOLDER        # one that holds vllm/: an unpacked wheel, or site-packages

Reads source and imports nothing, so a release need not be installed. Writes tests/vllm_interface/<release>.json:
signatures and fields of the classes that octavo derives from or is handed, and the calls that vLLM's layers make.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from interface_source import release_in, signature, tree_of

CLASSES = {
    "vllm.v1.attention.backend": (
        "AttentionBackend",
        "AttentionImplBase",
        "AttentionImpl",
        "AttentionMetadataBuilder",
        "CommonAttentionMetadata",
        "AttentionType",
        "AttentionCGSupport",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum",),
    "vllm.v1.attention.selector": ("AttentionSelectorConfig",),
    "vllm.config.compilation": ("CUDAGraphMode",),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
    "vllm.v1.kv_cache_interface": ("KVCacheSpec", "AttentionSpec"),
}
FUNCTIONS = {
    "vllm.v1.attention.backends.registry": ("register_backend",),
    "vllm.config.vllm": ("get_current_vllm_config_or_none",),
    "vllm.utils.deep_gemm": (
        "fp8_fp4_mqa_logits",
        "fp8_fp4_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
        "is_deep_gemm_supported",
    ),
}
LAYER = "vllm.model_executor.layers.attention.attention"
CALLS = ("impl_cls", "do_kv_cache_update", "forward")  # of an implementation, by vLLM's layer


def call_signature(function: ast.FunctionDef) -> str:
    """Parameters with "..." for every default: what a call must and may pass."""
    return signature(function, lambda value: "...")


def describe_class(node: ast.ClassDef) -> dict[str, Any]:
    """Bases, methods with their signatures, and the names assigned in the body, with literal values where there are."""
    methods, fields = {}, {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            marks = {ast.unparse(d).split(".")[-1] for d in item.decorator_list}
            kinds = [k for k in ("abstractmethod", "staticmethod", "classmethod", "property") if k in marks]
            methods[item.name] = " ".join([*kinds, call_signature(item)])
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            fields[item.target.id] = literal(item.value)
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            fields[item.targets[0].id] = literal(item.value)
    return {"bases": [ast.unparse(b) for b in node.bases], "fields": fields, "methods": methods}


def literal(node: ast.expr | None) -> str | None:
    """A literal as it is written, "..." for what is computed, None for a field without a value."""
    if node is None:
        return None
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return "..."


def describe_layer(tree: ast.Module) -> dict[str, Any]:
    """Attributes that vLLM's attention layer has, and the calls that it makes of an implementation."""
    attributes: set[str] = set()
    calls: dict[str, dict[str, Any]] = {}
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id in ("self", "layer"):
            attributes.add(node.attr)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "register_buffer" and isinstance(node.args[0], ast.Constant):
                attributes.add(node.args[0].value)
            owner = ast.unparse(node.func)
            if name in CALLS and ("impl" in owner) and name not in calls:
                positional = [a for a in node.args if not isinstance(a, ast.Starred)]
                keywords = [k.arg for k in node.keywords if k.arg]
                calls[name] = {"positional": len(positional), "keywords": keywords}
    return {"attributes": sorted(attributes), "calls": calls}


def record(folder: Path) -> dict[str, Any]:
    """Everything that octavo uses of the release in `folder`."""
    found: dict[str, Any] = {"version": release_in(folder, "vllm"), "classes": {}, "functions": {}}
    for module, wanted in CLASSES.items():
        nodes = {n.name: n for n in getattr(tree_of(folder, module), "body", []) if isinstance(n, ast.ClassDef)}
        found["classes"][module] = {name: describe_class(nodes[name]) for name in wanted if name in nodes}
    for module, wanted in FUNCTIONS.items():
        nodes = {n.name: n for n in getattr(tree_of(folder, module), "body", []) if isinstance(n, ast.FunctionDef)}
        found["functions"][module] = {name: call_signature(nodes[name]) for name in wanted if name in nodes}
    layer = tree_of(folder, LAYER)
    assert layer is not None, f"{folder} holds no {LAYER}"
    found["layer"] = describe_layer(layer)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "tests" / "vllm_interface")
    arguments = parser.parse_args()
    found = record(arguments.folder)
    path = arguments.out / (".".join(found["version"].split(".")[:2]) + ".json")
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{path}: vLLM {found['version']}")


if __name__ == "__main__":
    main()
