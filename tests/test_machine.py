"""What is said of a machine's accelerators."""

from types import SimpleNamespace

import pytest
import torch

from trl_paddingfree import machine
from trl_paddingfree.core.device import PeakMemory

GIB = 2**30
H200 = {"name": "H200", "total_memory": 139 * GIB, "major": 9, "minor": 0}
KINDS = {
    "cuda": (H200, "H200, 139 GiB, compute capability 9.0"),
    "xpu": ({"name": "Arc", "total_memory": 16 * GIB}, "Arc, 16 GiB"),
    "mps": (None, "mps"),  # PyTorch knows no properties of it
}


@pytest.mark.parametrize("kind", KINDS)
def test_accelerators_are_described_as_far_as_pytorch_knows_them(monkeypatch, kind):
    properties, words = KINDS[kind]
    module = SimpleNamespace()
    monkeypatch.setattr(machine, "package_versions", lambda: {"torch": "2.13.0"})
    if properties is not None:
        module.get_device_properties = lambda index: SimpleNamespace(**properties)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    found = machine.hardware()
    assert found["gpus"] == [words] * 2
    assert found["attention"]["varlen"] == ("from compute capability 8.0 on" if kind == "cuda" else "needs a CUDA GPU")


def test_a_machine_without_an_accelerator_has_none(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(machine, "package_versions", lambda: {"torch": "2.13.0", "flash-attn": "2.8.0"})
    assert machine.hardware()["gpus"] == []
    assert machine.hardware()["attention"]["flash"] == ["flash-attn"]


def test_a_build_for_cpus_is_not_asked_unless_a_plugin_brings_other_devices(monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "accelerators", lambda: asked.append(1) or ("npu", ["an NPU"]))
    monkeypatch.setattr(machine, "package_versions", lambda: {"torch": "2.13.0+cpu"})
    plugins = []
    monkeypatch.setattr(machine, "entry_points", lambda group: plugins if group == "torch.backends" else None)
    assert (machine.hardware()["gpus"], asked) == ([], [])
    plugins.append("torch_npu")
    assert machine.hardware()["gpus"] == ["an NPU"]


def test_what_mps_cannot_count_is_not_asked(monkeypatch):
    def refuse(device):
        raise RuntimeError("INTERNAL ASSERT FAILED: Allocator for mps is not a DeviceAllocator")

    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", refuse)
    memory = PeakMemory(torch.device("mps"))
    assert memory.begin() == 0 < memory.highest
