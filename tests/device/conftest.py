"""Tests on the pretend device: `TRL_PADDINGFREE_DEVICE=pretend python -m pytest tests/device`."""

import os

import pytest
import torch

from tests import pretend_device
from trl_paddingfree.memory import budget


@pytest.fixture(autouse=True)
def device(request):
    if "gpu" in request.keywords:  # what the pretend device says of CUDA
        yield torch.device("cuda")
        return
    if reason := pretend_device.why_off():
        # Who asks for it wants to see it
        (pytest.fail if os.environ.get("TRL_PADDINGFREE_DEVICE") == pretend_device.NAME else pytest.skip)(reason)
    total = pretend_device.memory.total
    yield pretend_device.DEVICE
    pretend_device.arrive()
    pretend_device.memory.total = total


@pytest.fixture
def parts_made(monkeypatch):
    """In how many parts each micro-batch ran on the device that did not fit into a budget whole."""
    made, parts_that_fit = [], budget.parts_that_fit

    def watch(*args):
        parts = parts_that_fit(*args)
        if not pretend_device.why_off():
            made.append(len(parts))
        return parts

    monkeypatch.setattr(budget, "parts_that_fit", watch)
    return made
