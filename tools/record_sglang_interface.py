"""Record what octavo's plug-in uses of an SGLang release: classes, signatures, attributes, options; as JSON.

    pip download --no-deps sglang==0.5.17 && unzip sglang-0.5.17-*.whl -d FOLDER
    python tools/record_sglang_interface.py FOLDER

Writes tests/signatures/sglang-<release>.json, which the tests compare the plug-in with: a release that renamed
something is seen before anyone runs it.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from interface_source import Function, release_in, signature, tree_of

# Module: names; a name is a class, a function or a constant of the module, wherever it stands there.
WANTED: dict[str, list[str]] = {
    "sglang.srt.plugins": ["GENERAL_PLUGINS_GROUP", "load_plugins"],
    "sglang.srt.layers.attention.attention_registry": ["ATTENTION_BACKENDS", "register_attention_backend"],
    "sglang.srt.server_args": ["ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"],
    "sglang.srt.arg_groups.choices": ["ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"],
    "sglang.srt.layers.attention.base_attn_backend": ["AttentionBackend"],
    "sglang.srt.layers.attention.hybrid_attn_backend": ["HybridAttnBackend"],
    "sglang.srt.layers.radix_attention": ["AttentionType", "RadixAttention"],
    "sglang.srt.mem_cache.memory_pool": ["KVCache", "MHATokenToKVPool", "ReqToTokenPool"],
    "sglang.srt.mem_cache.swa_memory_pool": ["SWAKVPool"],
    "sglang.srt.model_executor.cuda_graph_config": ["Backend", "CudaGraphConfig", "PhaseConfig"],
    "sglang.srt.model_executor.forward_batch_info": ["ForwardBatch", "ForwardMode"],
    "sglang.srt.model_executor.forward_context": ["get_req_to_token_pool", "get_token_to_kv_pool"],
    "sglang.srt.model_executor.model_runner": ["ModelRunner"],
    "sglang.srt.runtime_context": [
        *("get_disagg", "get_exec", "get_memory", "get_parallel", "get_schedule", "get_spec", "ParallelContext"),
    ],
    "sglang.srt.speculative.eagle_info": ["EagleVerifyInput"],
}
# The files in which options are declared as annotated fields of classes, with the namespace they belong to.
OPTIONS = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py")


def record_class(node: ast.ClassDef) -> dict[str, Any]:
    """Bases, methods with signatures, attributes and constants.

    abstract: marked so, or with nothing in the body but `raise NotImplementedError`. attributes: names of the class
    body and whatever a method assigns to self. constants: the strings among the former.
    """
    functions = [f for f in node.body if isinstance(f, Function)]
    marks = {f.name: {ast.unparse(d).split("(")[0].split(".")[-1] for d in f.decorator_list} for f in functions}
    attributes = {name for statement in node.body for name in _assigned(statement)}
    stored = [
        t for f in functions for t in ast.walk(f) if isinstance(t, ast.Attribute) and isinstance(t.ctx, ast.Store)
    ]
    attributes |= {t.attr for t in stored if isinstance(t.value, ast.Name) and t.value.id == "self"}
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "methods": {f.name: signature(f) for f in functions},
        "abstract": sorted(f.name for f in functions if "abstractmethod" in marks[f.name] or _only_raises(f)),
        "properties": sorted(n for n, m in marks.items() if m & {"property", "cached_property"}),
        "attributes": sorted(attributes),
        "constants": {
            name: text
            for statement in node.body
            for name in _assigned(statement)
            if isinstance(text := _literal(statement), str) and text != "constant"
        },
    }


def _only_raises(function: Function) -> bool:
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    raised = body[0].exc if len(body) == 1 and isinstance(body[0], ast.Raise) else None
    return raised is not None and ast.unparse(raised).startswith("NotImplementedError")


def _assigned(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def record_module(tree: ast.Module, names: list[str]) -> dict[str, Any]:
    """What each of `names` is in a module; a name that it only imports is "imported", one it lacks is left out."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in names:
            found.setdefault(node.name, record_class(node))
        elif isinstance(node, Function) and node.name in names:
            found.setdefault(node.name, signature(node))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in names:
                    found.setdefault(alias.asname or alias.name, "imported")
    for statement in tree.body:
        for name in _assigned(statement):
            if name in names:
                found[name] = _literal(statement)
    return found


def _literal(statement: ast.stmt) -> Any:
    """The assigned value where it is written out, else "constant"."""
    value = getattr(statement, "value", None)
    try:
        return "constant" if value is None else ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return "constant"


def record_options(trees: list[ast.Module]) -> list[str]:
    """ "namespace.field" of each option: its class's _NS_PATH, or the NS(...) in its annotation."""
    options = set()
    for tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            own = [s.value for s in node.body if isinstance(s, ast.Assign) and _assigned(s) == ["_NS_PATH"]]
            for field in node.body:
                marks = [
                    call.args[0]
                    for call in ast.walk(field.annotation if isinstance(field, ast.AnnAssign) else ast.Pass())
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "NS"
                ]
                options |= {f"{ast.literal_eval(path)}.{name}" for path in marks or own for name in _assigned(field)}
    return sorted(options)


def record(folder: Path) -> dict[str, Any]:
    """Everything of WANTED and OPTIONS that the unpacked release in `folder` has."""
    trees = {module: tree_of(folder, module) for module in WANTED}
    modules = {module: record_module(tree, WANTED[module]) for module, tree in trees.items() if tree is not None}
    files = [path for pattern in OPTIONS for path in sorted(folder.glob(pattern))]
    options = record_options([ast.parse(path.read_text()) for path in files])
    return {"engine": "sglang", "release": release_in(folder, "sglang"), "modules": modules, "options": options}


def main() -> None:
    """Write <out>/sglang-<release>.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that the release's wheel was unpacked in")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "tests" / "signatures")
    arguments = parser.parse_args()
    found = record(arguments.folder)
    path = arguments.out / f"sglang-{found['release']}.json"
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(path)


if __name__ == "__main__":
    main()
