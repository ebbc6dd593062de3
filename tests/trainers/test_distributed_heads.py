"""Reward, KTO and GRPO in several processes."""

import subprocess
import sys

import pytest

from tests.helpers.launching import ROOT, TIMEOUT, environment


@pytest.mark.slow
def test_two_processes_follow_padded_trl_in_two_processes():
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, "-m", *torchrun, "-m", "tests.helpers.distributed_heads"]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT)
    assert run.returncode == 0, "".join(run.stderr.partition("Traceback")[1:])[:6000]
