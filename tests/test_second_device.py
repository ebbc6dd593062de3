"""Trainers on the pretend device, in a process of their own: the default run sees a tensor on the wrong device."""

import sys

import pytest
import torch
from packaging.version import Version

from tests.helpers.launching import finished
from tests.pretend_device import LOWEST

FOLDER = "tests/device"
TESTS = (
    f"{FOLDER}/test_trainers.py::test_a_trainer_computes_what_it_computes_on_the_cpu",
    f"{FOLDER}/test_waiting.py::test_a_step_waits_in_named_places_only_and_less_than_in_padded_trl",
)
# One that collates and one that generates, with adapters, and what the first waits for
WHICH = "lora and (dpo or sft or grpo) or named_places and dpo"


@pytest.mark.skipif(Version(torch.__version__) < Version(LOWEST), reason=f"the pretend device needs PyTorch {LOWEST}")
def test_trainers_compute_on_the_pretend_device_what_they_compute_on_the_cpu_and_wait_for_nothing_more():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, "-k", WHICH]
    assert "4 passed" in finished(command, 600, TRL_PADDINGFREE_DEVICE="pretend").stdout
