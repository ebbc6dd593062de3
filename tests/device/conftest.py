"""Tests on the pretend device: `TRL_PADDINGFREE_DEVICE=pretend python -m pytest tests/device`."""

import os

import pytest
import torch

from tests import pretend_device

# Without a device, most runs would only skip these tests
is_asked_for = os.environ.get("TRL_PADDINGFREE_DEVICE") == pretend_device.NAME
collect_ignore_glob = [] if is_asked_for or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def device(request):
    if "gpu" in request.keywords:  # what the pretend device says of CUDA
        yield torch.device("cuda")
        return
    if reason := pretend_device.why_off():
        # Who asks for it wants to see it
        (pytest.fail if is_asked_for else pytest.skip)(reason)
    total = pretend_device.memory.total
    yield pretend_device.DEVICE
    pretend_device.arrive()
    pretend_device.memory.total = total
