"""Trainers on the pretend device, in a process of their own: the default run sees a tensor on the wrong device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

TEST = "tests/device/test_trainers.py::test_a_trainer_computes_what_it_computes_on_the_cpu"


@pytest.mark.skipif(Version(torch.__version__) < Version("2.15"), reason="the pretend device needs PyTorch 2.15")
def test_every_trainer_computes_on_the_pretend_device_what_it_computes_on_the_cpu():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST, "-k", "lora"]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRL_PADDINGFREE_DEVICE": "pretend"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout
    assert "6 passed" in run.stdout
