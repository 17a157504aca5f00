"""Device facts: by name, from torch's properties, and the words for what is not known."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from octavo.device import ARCHITECTURES, FP8_DOT, KNOWN, Device, from_properties
from octavo.errors import InvalidInput

ARCH_OF = {
    "a100": "sm_80",
    "a10": "sm_86",
    "l40s": "sm_89",
    "h100": "sm_90",
    "h200": "sm_90",
    "b200": "sm_100",
    "b300": "sm_103",
    "rtx5090": "sm_120",
    "gb10": "sm_121",
    "cpu": "cpu",
}


def test_every_named_device_has_its_architecture_and_its_facts() -> None:
    assert {name: Device.named(name).arch for name in KNOWN} == ARCH_OF
    assert set(ARCH_OF.values()) - {"cpu"} == set(ARCHITECTURES)
    for device in KNOWN.values():
        if device.arch != "cpu":
            assert device.num_sms >= 48 and device.memory_gb >= 24 and device.bandwidth_gbs > 200
            assert device.shared_memory in (99 * 1024, 163 * 1024, 227 * 1024)


def test_fp8_products_are_a_list_of_families() -> None:
    assert {d.arch for d in KNOWN.values() if not d.fp8_dot} == {"cpu", "sm_80", "sm_86"}
    assert not Device("tomorrow's", "sm_130").fp8_dot and "sm_130" not in FP8_DOT


def test_of_takes_every_form() -> None:
    assert Device.of("H200") is Device.named("h200")
    assert Device.of(Device.named("b200")) is Device.named("b200")
    assert Device.of("cpu") == Device.of(torch.device("cpu")) == Device.detect("cpu") == Device.named("cpu")
    if not torch.cuda.is_available():
        assert Device.of(None) == Device.of("auto") == Device.named("cpu")


@pytest.mark.parametrize("wrong", ["h900", "cuda:77", torch.device("meta"), 3.5, "sm_90"])
def test_an_unknown_device_is_invalid_and_the_message_says_what_came(wrong: object) -> None:
    with pytest.raises(InvalidInput, match=str(wrong)):
        Device.of(wrong)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InvalidInput) as raised:
        Device.named("gtx")
    assert all(name in str(raised.value) for name in KNOWN)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA GB200", "b200"),
    ],
)
def test_properties_become_facts(name: str, known: str) -> None:
    expected = Device.named(known)
    major, minor = divmod(int(expected.arch.removeprefix("sm_")), 10)
    properties = SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=expected.num_sms,
        shared_memory_per_block_optin=expected.shared_memory,
        total_memory=int(expected.memory_gb * 1e9),
    )
    device = from_properties(properties)
    assert (device.name, device.arch, device.num_sms) == (name, expected.arch, expected.num_sms)
    assert (device.shared_memory, device.memory_gb) == (expected.shared_memory, expected.memory_gb)
    assert device.bandwidth_gbs == expected.bandwidth_gbs


def test_rocm_and_unknown_products_are_facts_too() -> None:
    properties = SimpleNamespace(
        name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+", multi_processor_count=304, total_memory=192 * 10**9
    )
    device = from_properties(properties, rocm=True)
    assert (device.arch, device.bandwidth_gbs, device.fp8_dot) == ("gfx942", 0.0, False)


@pytest.mark.parametrize(
    ("version", "parsed"), [("3.6.0", (3, 6)), ("3.10.1+git", (3, 10)), ("4", (4, 0)), ("", (0, 0)), ("main", (0, 0))]
)
def test_triton_versions_compare_as_numbers(version: str, parsed: tuple[int, int]) -> None:
    assert Device("x", "sm_90", triton_version=version).triton == parsed


def test_a_named_device_needs_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from octavo.device import Device; Device.of('b200'); print({'torch', 'triton'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
