"""Real processes on the CPU (gloo): many train what one trains, stop together, and resume each other's runs."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import distributed_run
from tests.equivalence import TOLERANCE

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parent.parent
SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
TIMEOUT = 240  # seconds for one launch, most of which is importing
# Figures that are averages over micro-batches weigh tokens anew when another process holds the example
PER_MICRO_BATCH = ("entropy", "logits/", "mean_token_accuracy")

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_reshard_after_forward: true
mixed_precision: 'no'
use_cpu: true
"""


def command(ranks, task, model, output, options, fsdp=False):
    run = ["-m", "tests.distributed_run", task, model, str(output / "result.json"), json.dumps(options)]
    output.mkdir(exist_ok=True)
    if fsdp:
        config = output / "fsdp.yaml"
        config.write_text(FSDP)
        launch = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", str(ranks)]
        return [sys.executable, "-m", *launch, "--main_process_port", "0", *run]
    if ranks > 1:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        return [sys.executable, "-m", *torchrun, *run]
    return [sys.executable, *run]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}


def launch(*args, **kwargs):
    process = subprocess.run(
        command(*args, **kwargs), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads((args[3] / "result.json").read_text())


def alone(task, model, output, options):
    """The same run in this process."""
    output.mkdir(exist_ok=True)
    distributed_run.main(task, model, str(output / "result.json"), json.dumps(options))
    return json.loads((output / "result.json").read_text())


def assert_same_run(one, many, one_dir=None, many_dir=None, only=""):
    expected = {(e["step"], name): value for e in one["log"] for name, value in e.items() if name.startswith(only)}
    actual = {(entry["step"], name): value for entry in many["log"] for name, value in entry.items()}
    ignored = ("flat/", "runtime", "per_second", "flos", *PER_MICRO_BATCH)
    names = [key for key in expected if not any(part in key[1] for part in ignored)]
    assert names
    for key in names:
        assert actual[key] == pytest.approx(expected[key], rel=TOLERANCE, abs=TOLERANCE), key
    if one_dir is not None:
        (file,) = (path.name for path in one_dir.glob("*.safetensors"))
        weights = load_file(many_dir / file)
        for name, weight in load_file(one_dir / file).items():
            assert (weights[name] - weight).abs().max() <= TOLERANCE * (1 + weight.abs().max()), name


def test_two_processes_train_what_one_trains(model_dir, tmp_path):
    """DPO with LoRA, shared prefixes, balanced micro-batches, a token budget and an evaluation that does not divide."""
    options = {
        "lora": True,
        "max_steps": 3,
        "evaluate": 9,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "arrange_micro_batches": "tokens",
        "max_tokens_per_micro_batch": 90,
    }
    sizes = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}
    one = alone("dpo", model_dir, tmp_path / "1", {**options, **sizes, "per_device_train_batch_size": 8})
    options = {**options, **sizes, "per_device_train_batch_size": 4}
    two = launch(2, "dpo", model_dir, tmp_path / "2", options)
    assert two["world"] == 2
    # TRL's evaluation repeats examples where they do not divide: to be compared on as many processes
    trl = launch(2, "dpo", model_dir, tmp_path / "trl", {**options, "padding_free": False})
    assert_same_run(trl, two, only="eval_")
    one["log"] = [entry for entry in one["log"] if "eval_loss" not in entry]
    assert_same_run(one, two, tmp_path / "1", tmp_path / "2")


def test_four_processes_train_what_one_trains(model_dir, tmp_path):
    """SFT, normalized by the tokens of all processes."""
    options = {"max_steps": 2, "prefix_sharing": True}
    one = alone("sft", model_dir, tmp_path / "1", {**options, "per_device_train_batch_size": 8})
    four = launch(4, "sft", model_dir, tmp_path / "4", {**options, "per_device_train_batch_size": 2})
    assert four["world"] == 4
    assert_same_run(one, four, tmp_path / "1", tmp_path / "4")


@pytest.mark.parametrize(
    ("task", "options"),
    [("dpo", {}), ("dpo", {"lora": True}), ("sft", {"prefix_sharing": True})],
    ids=["dpo", "dpo-lora", "sft"],
)
def test_fsdp2_trains_what_one_process_trains(model_dir, tmp_path, task, options):
    options = {**options, "max_steps": 2}
    one = alone(task, model_dir, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    two = launch(2, task, model_dir, tmp_path / "2", {**options, "per_device_train_batch_size": 2}, fsdp=True)
    assert (two["world"], two["engine"]) == (2, "FSDP")
    assert_same_run(one, two)


def test_an_error_on_one_process_stops_all_with_its_message(model_dir, tmp_path):
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "fail_on_rank": 1}
    process = subprocess.run(
        command(2, "dpo", model_dir, tmp_path / "2", options),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert process.returncode != 0
    assert "this process fails on purpose" in process.stderr


def test_a_killed_run_resumes_to_the_uninterrupted_trajectory(model_dir, tmp_path):
    """Also on another number of processes than it was killed on."""
    common = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "arrange_micro_batches": "tokens",
        "save_strategy": "steps",
        "save_steps": 1,
    }
    options = {**common, "per_device_train_batch_size": 4}
    uninterrupted = alone("dpo", model_dir, tmp_path / "whole", options)
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command(1, "dpo", model_dir, killed, options),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + TIMEOUT
    while not (killed / "checkpoint-2" / "trainer_state.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(random.Random(SEED).random() * 0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The checkpoint being written when the process died may be incomplete: resume from the newest whole one
    whole = [path for path in killed.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    newest = max(whole, key=lambda path: int(path.name.split("-")[1]))
    resumed = alone("dpo", model_dir, tmp_path / "resumed", {**options, "resume": str(newest)})
    assert_same_run(uninterrupted, resumed, tmp_path / "whole", tmp_path / "resumed")
    two = {**common, "per_device_train_batch_size": 2, "resume": str(killed / "checkpoint-2")}
    assert_same_run(
        uninterrupted, launch(2, "dpo", model_dir, tmp_path / "two", two), tmp_path / "whole", tmp_path / "two"
    )
