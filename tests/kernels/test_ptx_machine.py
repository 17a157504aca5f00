"""What the machine that runs PTX on a CPU refuses, on a few lines of PTX each: memory of mbarriers used for data."""

from __future__ import annotations

import numpy as np
import pytest

from .ptx_machine import TENSOR_MAP, Machine, MisusedBarrier, TensorMap

AT = 64  # where in shared memory the mbarrier is
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r1], 2;"
INVALIDATE = "@%p1 mbarrier.inval.shared::cta.b64 [%r1];"
ADDRESSES = f"""
    mov.u32 %r0, %tid.x;
    setp.eq.s32 %p1, %r0, 0;
    mov.b32 %r1, {AT};
    selp.b32 %r2, 128, %r1, %p1;
    mov.b64 %rd1, {TENSOR_MAP};
    mov.b64 %rd2, {3 << 62 | 16 << 32 | AT >> 4};
    mov.b64 %rd3, {3 << 62 | 16 << 32 | 2048 >> 4};
"""  # %r2: 128 of lane 0. The last two: descriptors of rows of 32 bytes, eight of them 256 bytes after the eight before
COPY = "@%p1 cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r10, %r11, %r12, %r13}"


def run(body: str) -> Machine:
    """One warp runs `body`."""
    text = f".visible .entry kernel(.param .u64 kernel_param_0) .reqntid 32 {{ {ADDRESSES} {body} ret; }}"
    tensor = TensorMap(np.zeros(32, np.uint8), [32], [1], [32], 1, 32)
    machine = Machine(text, {}, {0: tensor}, 8192, {}, 1)
    machine.run(0)
    return machine


@pytest.mark.parametrize(
    "body",
    [
        "@%p1 st.shared.b8 [%r1+7], %r0;",
        "@%p1 st.shared.v4.b32 [%r1], {%r0, %r0, %r0, %r0};",
        "st.shared.b16 [%r2], %r0;",
        "ld.shared.b64 %rd4, [%r1];",
        "ld.shared.v2.b32 {%r10, %r11}, [%r1];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r1];",
        COPY + " [%r1], [%rd1, {%r20}], [%r1];",
        PRODUCT + ", %rd2, %rd3, 0, 1, 1;",
        PRODUCT + ", %rd3, %rd2, 0, 1, 1;",
    ],
)
def test_memory_of_a_live_mbarrier_holds_no_data(body):
    with pytest.raises(MisusedBarrier, match=rf"program 0, warp 0, .*\[{AT}\] of shared memory"):
        run(INIT + body)


@pytest.mark.parametrize(
    "body",
    [
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];",
        "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 32;",
        "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 1;",
        COPY + " [%r1+64], [%rd1, {%r20}], [%r1];",
        INVALIDATE,
    ],
)
def test_an_mbarrier_must_be_there(body):
    run(INIT + body)
    for before in ("", INIT + INVALIDATE, INIT.replace("%r1", "%r1+8")):
        with pytest.raises(MisusedBarrier, match=f"no live mbarrier at {AT} of shared memory"):
            run(before + body)


def test_an_mbarrier_begins_once():
    with pytest.raises(MisusedBarrier, match=f"init at {AT} of shared memory, which a live mbarrier has"):
        run(INIT + INIT)
    with pytest.raises(MisusedBarrier, match=f"init at {AT + 4} of shared memory, which is no multiple of 8"):
        run(INIT.replace("%r1", "%r1+4"))


def test_memory_beside_a_live_mbarrier_and_after_it():
    around = "st.shared.b32 [%r1+-4], %r0; st.shared.b32 [%r1+8], %r0;"
    other_lanes = "@%p1 st.shared.b32 [%r2], %r0;"  # point at the mbarrier, and do not write
    after = "@%p1 st.shared.b32 [%r1+4], %r0;"
    product = PRODUCT + ", %rd2, %rd3, 0, 1, 1;"
    machine = run("@%p1 st.shared.b64 [%r1], %rd3;" + INIT + around + other_lanes + INVALIDATE + after + product)
    assert machine.shared[AT : AT + 8].tolist() == 4 * [0xFF] + 4 * [0]  # what it held before is lost
    assert not run(INIT + INVALIDATE + INIT).barriers[AT].phase
