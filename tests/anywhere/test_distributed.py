"""Two processes on the CPU (gloo) train a model of `padding_free` as they train it padded."""

import subprocess
import sys

from tests.helpers.launching import ROOT, TIMEOUT, environment


def test_ddp_fsdp2_and_the_trainer_of_transformers():
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    given = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True, "timeout": 2 * TIMEOUT}
    process = subprocess.run([*launched, "-m", "tests.anywhere.distributed"], **given)
    assert process.returncode == 0, process.stderr[-6000:]
    assert process.stdout.count("the same") == 2
