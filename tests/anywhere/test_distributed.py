"""Two processes on the CPU (gloo) train a model of `padding_free` as they train it padded."""

import os
import subprocess
import sys

from tests.helpers.pages import ROOT

SECONDS = 400  # of which most is importing, on a busy machine


def test_ddp_fsdp2_and_the_trainer_of_transformers():
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    given = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": SECONDS}
    process = subprocess.run([*launched, "-m", "tests.anywhere.distributed"], **given)
    assert process.returncode == 0, process.stderr[-6000:]
    assert process.stdout.count("the same") == 2
