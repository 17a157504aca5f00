"""A vLLM of one release for tests: its classes have the signatures and fields that were recorded of it, and no code.

What octavo calls of vLLM has a body here, in a few lines; everything else raises NotImplementedError. A name, parameter
or field that the release does not have does not exist here either.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

RECORDS = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("vllm_interface/*"))}
T = TypeVar("T")
BODIES = {  # Class.method: what octavo relies on
    "AttentionMetadataBuilder.__init__": "self.vllm_config, self.kv_cache_spec = vllm_config, kv_cache_spec",
    "AttentionMetadataBuilder._init_reorder_batch_threshold": "self.reorder_batch_threshold = reorder_batch_threshold",
    "AttentionImplBase.__new__": "self = object.__new__(cls); self.dcp_world_size = RANKS(); return self",
    "AttentionBackendEnum.get_path": "return PATHS.get(self.name)",
    "AttentionBackendEnum.is_overridden": "return self.name in PATHS",
    "CUDAGraphMode.mixed_mode": "return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self",
}
FUNCTION_BODIES = {"register_backend": "PATHS[backend.name] = class_path"}
COMPUTED = {"FULL_DECODE_ONLY": (2, 0), "FULL_AND_PIECEWISE": (2, 1), "supported_dtypes": [torch.float16]}


def class_of(name: str, record: dict[str, Any], names: dict[str, Any]) -> type:
    """The recorded class, with the bodies above."""
    fields = {n: COMPUTED.get(n, ...) if v == "..." else v and eval(v) for n, v in record["fields"].items()}
    if "Enum" in " ".join(record["bases"]):
        mixed = "str, " if "str" in record["bases"] else ""
        lines = [f"class {name}({mixed}enum.Enum):", *(f"    {n} = {v!r}" for n, v in fields.items() if v is not ...)]
    elif name == "CommonAttentionMetadata":
        return dataclasses.make_dataclass(
            name,
            [
                (n, Any) if v is None else (n, Any, dataclasses.field(default=eval(v)))
                for n, v in record["fields"].items()
            ],
            kw_only=True,
        )
    else:
        known = {"ABC", "Generic", *names}
        bases = [b.replace("ABC", "abc.ABC").replace("[M]", "[T]") for b in record["bases"] if b.split("[")[0] in known]
        lines = [f"class {name}({', '.join(bases)}):", *(f"    {n} = {v!r}" for n, v in fields.items() if v is not ...)]
    for method, text in record["methods"].items():
        *kinds, parameters = text.partition("(")[0].split() + ["(" + text.partition("(")[2]]
        decorators = [{"abstractmethod": "abc.abstractmethod"}.get(k, k) for k in reversed(kinds)]
        lines += [f"    @{d}" for d in decorators]
        body = BODIES.get(f"{name}.{method}", "raise NotImplementedError")
        lines += [f"    def {method}{parameters}:", f"        {body}"]
    scope = {"abc": abc, "enum": enum, "Generic": Generic, "T": T, **names}
    exec("\n".join([*lines, "    pass"]).replace("torch.float16", "'float16'"), scope)
    names[name] = scope[name]
    return scope[name]


def modules_of(release: str, config: Any) -> dict[str, types.ModuleType]:
    """The modules of `release` that octavo imports from; `config` is the current vLLM configuration."""
    record, modules = RECORDS[release], {}

    def module(name: str) -> types.ModuleType:
        for i in range(name.count(".") + 1):
            part = ".".join(name.split(".")[: i + 1])
            if part not in modules:
                modules[part] = types.ModuleType(part)
                modules[part].__path__ = []
        return modules[name]

    paths: dict[str, str] = {}
    names: dict[str, Any] = {
        "PATHS": paths,
        "RANKS": lambda: 1 if config is None else config.parallel_config.decode_context_parallel_size,
    }
    for where, classes in record["classes"].items():
        order = sorted(classes, key=lambda name: (name not in ("AttentionImplBase", "KVCacheSpec"), name))
        for name in order:
            setattr(module(where), name, class_of(name, classes[name], names))
    for where, functions in record["functions"].items():
        for name, parameters in functions.items():
            body = FUNCTION_BODIES.get(name, "raise NotImplementedError")
            exec(f"def {name}{parameters}:\n    {body}", scope := {"PATHS": paths})
            setattr(module(where), name, scope[name])
    if "KVCacheLayout" in names:
        module("vllm.v1.kv_cache_interface").KVCacheLayout = names["KVCacheLayout"]
    module("vllm").__version__ = record["version"]
    module("vllm.envs").VLLM_BATCH_INVARIANT = False
    module("vllm.distributed.parallel_state")
    module("vllm.config").get_current_vllm_config_or_none = lambda: config
    capability = SimpleNamespace(major=9, minor=0)
    module("vllm.platforms").current_platform = SimpleNamespace(
        is_cuda=lambda: True,
        get_device_name=lambda: "NVIDIA H200",
        get_device_capability=lambda: capability,
    )
    return modules


def install(monkeypatch: Any, release: str, config: Any = None) -> None:
    """Make `import vllm` find the stub of `release`, and octavo's plug-in be imported anew over it, for one test."""
    for name in [n for n in sys.modules if n == "vllm" or n.startswith(("vllm.", "octavo.integrations._vllm"))]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules_of(release, config).items():
        monkeypatch.setitem(sys.modules, name, module)
