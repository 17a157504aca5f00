"""Every kernel compiles for every architecture without a GPU; its default tiles spill nothing and fit shared memory."""

from __future__ import annotations

import pytest

from octavo.device import ARCHITECTURES, KNOWN
from octavo.testing.aot import DEVICES, Compiled, in_a_subprocess

# Modules with aot_cases (octavo.testing.aot): one row each.
MODULES = (
    "octavo.kernels.triton.append",
    "octavo.kernels.triton.prefill",
    "octavo.kernels.triton.decode",
    "octavo.kernels.triton.index_append",
    "octavo.kernels.triton.mqa_logits",
    "octavo.kernels.triton.topk",
    "octavo.kernels.triton.merge_states",
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("module", MODULES)
def test_default_tiles_fit_every_architecture(module, device):
    compiled = in_a_subprocess([module], [device])
    assert {c.arch for c in compiled} == {KNOWN[device].arch} and len(compiled) >= 4
    assert [fault for c in compiled for fault in c.faults] == []
    assert all(0 < c.registers * c.num_warps * 32 <= 65536 for c in compiled)


@pytest.mark.parametrize("module", ["octavo.kernels.gluon.plan", "octavo.kernels.gluon.prefill_plan"])
def test_the_plans_of_hopper_compile(module):
    compiled = in_a_subprocess([module], ["h200"])
    assert len(compiled) >= 3 and [fault for c in compiled for fault in c.faults] == []


def test_every_architecture_has_a_device():
    assert tuple(KNOWN[device].arch for device in DEVICES) == ARCHITECTURES


def test_spills_and_shared_memory_are_faults():
    fits = Compiled("m", "case", "l40s", "sm_89", 64, 0, 0, 100, 101376, 4)
    assert fits.faults == []
    wrong = Compiled("m", "case", "l40s", "sm_89", 255, 24, 8, 101377, 101376, 4)
    assert wrong.faults == [
        "m case on l40s (sm_89) spills 24 bytes",
        "m case on l40s (sm_89) takes 101377 bytes of shared memory of 101376",
    ]


def test_a_module_that_cannot_be_compiled_is_told():
    with pytest.raises(RuntimeError, match="aot_cases"):
        in_a_subprocess(["octavo.spec"], ["h200"])
