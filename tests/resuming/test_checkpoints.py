"""Runs that are killed, terminated, or meet a full disk go on as if nothing had happened."""

import json
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.architectures import tiny_model
from tests.helpers.launching import PER_MICRO_BATCH, ROOT, TIMEOUT, alone, assert_same_run, command, launch
from tests.helpers.tiny import SEED, saved
from tests.runs import make_trainer
from trl_paddingfree.resuming import checkpoints
from trl_paddingfree.resuming.checkpoints import checkpoint_to_resume, found_together, is_whole, problem_of

# Counts and sums that TRL and transformers start anew when a run is resumed
RESTARTED = (*PER_MICRO_BATCH, "num_tokens", "train_loss")


def start(*args):
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command(*args), cwd=ROOT, **silent)


def stop(process, with_saving):
    """`kill -9`, of the launcher and of the processes that it started, or SIGTERM, which leaves time for saving."""
    if with_saving:
        process.terminate()
        assert process.wait(TIMEOUT) == 0
        return
    for running in [*psutil.Process(process.pid).children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):  # gone with the one before
            running.kill()
    assert process.wait() == -signal.SIGKILL


def wait_for(checkpoint, process):
    deadline = time.monotonic() + TIMEOUT
    while not is_whole(checkpoint):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "with_saving"), [(1, False), (2, False), (1, True)])
def test_a_run_that_is_stopped_resumes_to_the_uninterrupted_trajectory(model_dir, tmp_path, ranks, with_saving):
    """On as many processes as it ran on, and on another number; killed, or with `enable_jit_checkpoint`."""
    options = {"gradient_accumulation_steps": 2, "arrange_micro_batches": "tokens", "lr_scheduler_type": "constant"}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "enable_jit_checkpoint": with_saving}
    stopped, size = tmp_path / "stopped", {"per_device_train_batch_size": 4 // ranks}
    process = start(ranks, ("dpo", model_dir, stopped, {**options, **saving, **size, "max_steps": 1_000_000}))
    wait_for(stopped / f"checkpoint-{2 + (SEED + ranks) % 3}", process)
    stop(process, with_saving)
    checkpoint = checkpoint_to_resume(True, str(stopped))
    step = int(checkpoint.split("-")[-1])
    options["max_steps"] = step + 3
    whole = alone("dpo", model_dir, tmp_path / "whole", {**options, "per_device_train_batch_size": 4})
    if with_saving:  # before the log of its step
        whole["log"] = [entry for entry in whole["log"] if entry["step"] > step]
    for n in (1, 2):
        resumed = {**options, "per_device_train_batch_size": 4 // n, "resume": checkpoint}
        run = "dpo", model_dir, tmp_path / f"resumed on {n}", resumed
        assert_same_run(whole, alone(*run) if n == 1 else launch(n, run)[0], ignore=RESTARTED)


def test_a_run_resumed_without_its_place_in_the_data_goes_on_as_padded_trl_does(model_dir, tmp_path):
    """`ignore_data_skip` begins the epoch again: with the examples of its first steps, in the order of another draw."""
    options = {"max_steps": 4, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    ours, resumed = {"arrange_micro_batches": "tokens", "max_tokens_per_micro_batch": 200}, {}
    for name, given in {"padded": {"padding_free": False}, "ours": ours}.items():
        alone("dpo", model_dir, tmp_path / name, {**options, **given, "max_steps": 2})
        again = {**options, **given, "ignore_data_skip": True, "resume": str(tmp_path / name / "checkpoint-2")}
        resumed[name] = alone("dpo", model_dir, tmp_path / f"{name} again", again)
    assert_same_run(resumed["padded"], resumed["ours"], ignore=RESTARTED)


def test_a_run_on_images_resumes_to_the_uninterrupted_trajectory(vision_dir, tmp_path):
    """In the midst of an epoch, with another number of workers; its weights are named otherwise in files."""
    options = {"images": True, "max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    whole = alone("dpo", vision_dir, tmp_path / "whole", {**options, "save_strategy": "steps", "save_steps": 1})
    resumed = {**options, "dataloader_num_workers": 1, "resume": str(tmp_path / "whole" / "checkpoint-2")}
    run = alone("dpo", vision_dir, tmp_path / "resumed", resumed)
    assert [entry["step"] for entry in run["log"]] == [entry["step"] for entry in whole["log"]]
    assert_same_run(whole, run, ignore=RESTARTED)


def test_the_best_model_and_a_resumed_one_have_their_weights_where_files_name_them_otherwise(tokenizer, tmp_path):
    """Mixtral has one tensor for all experts of a layer in memory, and one for each in files."""
    folder = saved(tmp_path / "model", tiny_model("mixtral", pad_token_id=0), tokenizer)
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "evaluate": 4}
    whole = alone("sft", folder, tmp_path / "whole", options)
    resumed = {**options, "resume": str(tmp_path / "whole" / "checkpoint-2")}
    assert_same_run(whole, alone("sft", folder, tmp_path / "resumed", resumed), ignore=RESTARTED)
    best = {**options, "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    log = alone("sft", folder, tmp_path / "best", best)["log"]
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert losses[0] == max(losses) > losses[-1]
    weights = load_file(tmp_path / "best" / "model.safetensors")
    for key, weight in load_file(tmp_path / "best" / "checkpoint-1" / "model.safetensors").items():
        assert torch.equal(weights[key], weight), key


def test_a_checkpoint_of_another_model_is_refused(model_dir, tokenizer, tmp_path):
    folder = saved(tmp_path / "model", tiny_model("gpt2", pad_token_id=0), tokenizer)
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    alone("sft", folder, tmp_path / "gpt2", options)
    resumed = {**options, "max_steps": 2, "resume": str(tmp_path / "gpt2" / "checkpoint-1")}
    with pytest.raises(ValueError, match=r"checkpoint-1' has no weights for .* of LlamaForCausalLM"):
        alone("sft", model_dir, tmp_path / "llama", resumed)


def test_a_full_disk_while_saving_leaves_the_checkpoint_before(model_dir, tmp_path):
    options = {"max_steps": 4, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
    whole = alone("dpo", model_dir, tmp_path / "whole", {**options, "save_strategy": "no"})
    full = tmp_path / "full"
    (full / "checkpoint-4").mkdir(parents=True)
    (full / "checkpoint-4" / "optimizer.pt").symlink_to("/dev/full")
    with pytest.raises(Exception, match="No space left on device|unexpected pos"):
        alone("dpo", model_dir, full, options)
    assert checkpoint_to_resume(True, str(full)) == str(full / "checkpoint-2")
    (full / "checkpoint-4" / "optimizer.pt").unlink()
    resumed = alone("dpo", model_dir, full, {**options, "resume": True})
    assert is_whole(full / "checkpoint-4")
    assert_same_run(whole, resumed, ignore=RESTARTED)


@pytest.fixture(scope="module")
def checkpoint(model_dir, tmp_path_factory):
    """The last of two checkpoints of a run of adapters."""
    output = tmp_path_factory.mktemp("run") / "out"
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    alone("sft", model_dir, output, {**options, "lora": True})
    return output / "checkpoint-2"


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


# What happens to a file of a checkpoint, and what is said
DAMAGE = {
    "optimizer.pt": (Path.unlink, "it has no optimizer.pt"),
    "scheduler.pt": (Path.unlink, "it has no scheduler.pt"),
    "rng_state.pth": (Path.unlink, "it has no rng_state.pth"),
    "adapter_model.safetensors": (Path.unlink, "it has no weights"),
    "trainer_state.json": (cut, "trainer_state.json, which is written last, is missing or cut off"),
    "half adapter_model.safetensors": (cut, "adapter_model.safetensors is damaged .SafetensorError: .*incomplete"),
    "half optimizer.pt": (cut, "optimizer.pt is damaged .BadZipFile"),
    "junk scheduler.pt": (lambda file: file.write_bytes(b"junk"), "scheduler.pt is damaged .BadZipFile"),
    "half rng_state.pth": (cut, "rng_state.pth is damaged"),
    "a list in trainer_state.json": (lambda file: file.write_text("[1]"), "trainer_state.json, which is written last"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_with_its_file_and_the_one_before_is_resumed(checkpoint, tmp_path, name, caplog):
    """transformers would start the optimizer and the schedule anew without a word if one of their files is missing."""
    damage, said = DAMAGE[name]
    folder = shutil.copytree(checkpoint.parent, tmp_path / "out")
    damage(folder / "checkpoint-2" / name.split()[-1])
    with pytest.raises(ValueError, match=f"checkpoint-2'` is not a complete checkpoint: {said}.*checkpoint-1' is com"):
        checkpoint_to_resume(str(folder / "checkpoint-2"), str(folder), engine="no")
    assert checkpoint_to_resume(True, str(folder), engine="no") == str(folder / "checkpoint-1")
    assert "checkpoint-1, the newest complete checkpoint, and not from checkpoint-2: " in caplog.text
    shutil.rmtree(folder / "checkpoint-1")
    with pytest.raises(ValueError, match=f"no complete checkpoint .checkpoint-2: {said}.*leave it out to start"):
        checkpoint_to_resume("true", str(folder))


def test_weights_alone_are_resumed_where_only_they_are_saved(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).unlink()
    assert checkpoint_to_resume(True, str(tmp_path), only_model=True) == str(folder)
    with pytest.raises(ValueError, match="With `save_only_model=True`, training goes on from weights alone"):
        checkpoint_to_resume(True, str(tmp_path))


def test_processes_that_find_different_checkpoints_resume_from_none(monkeypatch):
    gathered, others = [], ["checkpoint-4"]
    monkeypatch.setattr(checkpoints, "gather_object", lambda own: gathered.extend(own) or [*own, *others])
    assert found_together(lambda: "out/checkpoint-4") == "out/checkpoint-4"
    for other, listed in (("checkpoint-2", "checkpoint-2, checkpoint-4"), (None, "checkpoint-4, none")):
        others[0] = other
        with pytest.raises(ValueError, match=rf"different checkpoints \({listed}\), .*: name one"):
            found_together(lambda: "out/checkpoint-4")
    gathered.clear()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        found_together(lambda: checkpoint_to_resume(True, "nowhere"))
    assert gathered == [None]  # the others are told before it raises


def test_a_trainer_asks_the_other_processes_for_theirs(checkpoint, monkeypatch):
    trainer = make_trainer("sft", "ours", output_dir=str(checkpoint.parent))
    monkeypatch.setattr(checkpoints, "gather_object", lambda own: [*own, None])
    with pytest.raises(ValueError, match="different checkpoints"):
        trainer.train(resume_from_checkpoint=True)


def test_a_missing_part_of_weights_in_several_files_is_named(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors, which model.safetensors.index.json names"):
        checkpoint_to_resume(str(folder), str(tmp_path))
    index.write_text('{"weight_map": ')
    with pytest.raises(ValueError, match=r"model.safetensors.index.json is damaged"):
        checkpoint_to_resume(str(folder), str(tmp_path))


def test_the_optimizer_must_be_that_of_the_engine_that_computes(checkpoint, tmp_path):
    """One that DeepSpeed has sharded is not read by a run without it, which would start a new one."""
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    (folder / "optimizer.pt").unlink()
    (folder / "global_step2").mkdir()
    assert problem_of(folder) == problem_of(folder, engine="deepspeed") == ""
    assert problem_of(folder, engine="no") == "it has no optimizer.pt"
    assert problem_of(folder, engine="fsdp") == "it has no optimizer.bin"
    (folder / "optimizer_0").mkdir()
    assert problem_of(folder, engine="fsdp") == ""


def test_folders_with_other_names_and_those_that_are_not_there_are_no_checkpoints(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"has no complete checkpoint: leave it out"):
        checkpoint_to_resume(True, str(tmp_path))
    for name in ("checkpoint-²", "checkpoint-best", "checkpoint-"):
        (tmp_path / name).mkdir()
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-10")
    shutil.copytree(checkpoint, tmp_path / "checkpoint-9")
    assert checkpoint_to_resume("true", str(tmp_path)) == checkpoint_to_resume(True, str(tmp_path)) == str(folder)
    assert checkpoint_to_resume(str(tmp_path / "checkpoint-9"), str(tmp_path)) == str(tmp_path / "checkpoint-9")
    with pytest.raises(
        ValueError, match=r"checkpoint-11'` is not a complete checkpoint: there is no such folder. '.*10'"
    ):
        checkpoint_to_resume(str(tmp_path / "checkpoint-11"), str(tmp_path))


@pytest.mark.parametrize("written", ['{"asked": ', "[1, 2]", b"\xff\xfe", "{}", '{"asked": [null, 64]}'])
def test_what_a_budget_has_learnt_is_planned_anew_if_it_cannot_be_read(written, tmp_path, caplog):
    planner = make_trainer("sft", "flat", max_tokens_per_micro_batch=64).planner
    limit, file = planner.limit, tmp_path / planner.state_file
    file.write_bytes(written if isinstance(written, bytes) else written.encode())
    if "64" in str(written):
        file.write_text(json.dumps({"asked": planner.asked}))
    planner.restore(tmp_path)
    assert planner.limit == limit
    # Releases before 0.5 have saved no `asked`
    assert (f"{file} cannot be read (" in caplog.text) == (written != "{}")
