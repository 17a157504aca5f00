"""Triton tells a hook what it compiles, where one is set; engines set one when they have warmed up."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Binds the launches of a module's aot_cases for a Hopper that is not there; the hook ends each before it is compiled.
BIND = """
import json, sys
from importlib import import_module
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from octavo.device import Device

class Absent:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

told = []
def hook(*, compile, **rest):
    told.append(json.loads(compile["specialization_data"])["constant_vals"])
    return True

driver.set_active(Absent())
knobs.runtime.jit_cache_hook = hook
for label, kernel, arguments in import_module(sys.argv[1]).aot_cases(Device.named("h200")):
    kernel.warmup(grid=(1,), **arguments)
print(json.dumps(told))
"""
FIELD = {  # one of the constants of each
    "octavo.kernels.gluon.decode": "columns",
    "octavo.kernels.gluon.mqa_logits": None,
    "octavo.kernels.gluon.plan": "columns",
    "octavo.kernels.gluon.prefill": "pack",
    "octavo.kernels.gluon.prefill_plan": "pack",
    "octavo.kernels.triton.append": "page_size",
    "octavo.kernels.triton.decode": None,
    "octavo.kernels.triton.index_append": "page_size",
    "octavo.kernels.triton.merge_states": "interpreted",
    "octavo.kernels.triton.mqa_logits": None,
    "octavo.kernels.triton.prefill": None,
    "octavo.kernels.triton.topk": "k",
}


@pytest.mark.parametrize("module", FIELD)
def test_a_hook_is_told_what_a_kernel_is_compiled_with(module):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    bound = subprocess.run([sys.executable, "-c", BIND, module], capture_output=True, text=True, env=env)
    assert bound.returncode == 0, bound.stderr[-2000:]
    told = json.loads(bound.stdout)
    constants = [[v for v in values if isinstance(v, dict)] for values in told]
    assert len(told) >= 3 and all(len(of_one) == 1 for of_one in constants)
    assert FIELD[module] is None or all(isinstance(c[FIELD[module]], int) for (c,) in constants)
