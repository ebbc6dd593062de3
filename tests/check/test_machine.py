"""What is said of a machine's accelerators."""

from types import SimpleNamespace

import pytest
import torch

from trl_paddingfree.check.machine import environment

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
    if properties is not None:
        module.get_device_properties = lambda index: SimpleNamespace(**properties)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    found = environment()
    assert found["gpus"] == [words] * 2
    assert found["attention"]["varlen"] == ("yes" if kind == "cuda" else "needs a CUDA GPU")


def test_a_machine_without_an_accelerator_has_none(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert environment()["gpus"] == []
