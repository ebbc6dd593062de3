"""Training runs in processes of their own, and what they logged and ended with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import distributed_run
from tests.helpers.distributed_run import TIMEOUT
from tests.helpers.pages import ROOT
from tests.runs import PER_MICRO_BATCH, TOLERANCE

# The configurations that users are given, on CPUs and in float32
FSDP = "fsdp2.yaml --fsdp_transformer_layer_cls_to_wrap {}DecoderLayer --mixed_precision no"
ENGINES = {
    "fsdp": FSDP.format("Llama"),
    "fsdp-lfm2": FSDP.format("Lfm2"),
    "fsdp-qwen3_5": FSDP.format("Qwen3_5"),
    "fsdp-kept": f"{FSDP} --fsdp_reshard_after_forward false".format("Llama"),
    "fsdp-bf16": FSDP.format("Llama").replace("precision no", "precision bf16"),
    **{f"zero{stage}": f"zero{stage}.yaml --mixed_precision no --zero3_init_flag false" for stage in (1, 2, 3)},
}


def command(ranks, *runs, engine=None):
    """The command of `runs`, each a task, a model, a folder and options, one after another in the same processes."""
    run = ["-m", "tests.helpers.distributed_run", json.dumps(runs, default=str)]
    if engine:
        config, *options = ENGINES[engine].split()
        options += ["--num_processes", str(ranks), "--main_process_port", "0"]
        launch = ["accelerate.commands.launch", "--config_file", f"configs/accelerate/{config}"]
        return [sys.executable, "-m", *launch, *options, *run]
    return torchrun(ranks, *run) if ranks > 1 else [sys.executable, *run]


def torchrun(ranks, *program):
    """The command of a Python program on so many processes: a file or `-m` and a module, and arguments."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *program]


def finished(command, timeout, **environment):
    """The process of a command, once it has ended well, in this environment and these variables."""
    options = {"capture_output": True, "text": True, "env": {**os.environ, **environment}}
    process = subprocess.run(command, cwd=ROOT, timeout=timeout, **options)
    said = process.stdout + process.stderr
    began = re.search("Traceback|Timeout", said)
    assert process.returncode == 0, said[began.start() if began else -6000 :][:6000]
    return process


def launch(ranks, *runs, engine=None):
    """What each of `runs` logged and ended with on so many processes, which are started once: they import for long."""
    finished(command(ranks, *runs, engine=engine), TIMEOUT * (1 + len(runs)))
    return [json.loads((output / "result.json").read_text()) for _, _, output, _ in runs]


def alone(task, model, output, options):
    """The same run in this process."""
    distributed_run.run(task, model, output, options)
    return json.loads((output / "result.json").read_text())


def launch_each(task, model, folder, settings, engine=None):
    """By name, the runs of one task and model on two processes, each in a folder of its name."""
    runs = [(task, model, folder / name, given) for name, given in settings.items()]
    return dict(zip(settings, launch(2, *runs, engine=engine), strict=True))


def of_processes(output):
    """What each of two processes has written down of its own."""
    return [json.loads((output / f"result.json.{rank}").read_text()) for rank in range(2)]


def assert_same_run(one, many, weights=True, only="", ignore=PER_MICRO_BATCH):
    """Every figure of the one whose name begins with `only` but the ignored, and the weights that both have saved."""
    expected = {(e["step"], name): value for e in one["log"] for name, value in e.items() if name.startswith(only)}
    actual = {(entry["step"], name): value for entry in many["log"] for name, value in entry.items()}
    ignored = ("flat/", "runtime", "per_second", "flos", *ignore)
    names = [key for key in expected if not any(part in key[1] for part in ignored)]
    assert names
    for step, name in names:
        if "rewards/accuracies" in name and abs(expected[step, name.replace("accuracies", "margins")]) <= TOLERANCE:
            continue  # rounding breaks ties: before training, all pairs are, beside precomputed references
        got, wanted = actual[step, name], expected[step, name]
        assert got == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE), f"{step, name}: {got}, not {wanted}"
    if weights:
        (file,) = Path(one["folder"]).glob("*.safetensors")
        found = load_file(Path(many["folder"]) / file.name)
        for name, weight in load_file(file).items():
            assert (found[name] - weight).abs().max() <= TOLERANCE * (1 + weight.abs().max()), name
