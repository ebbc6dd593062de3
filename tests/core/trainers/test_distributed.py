"""Several real processes on the CPU (gloo) train what one trains, and stop together."""

import subprocess

import pytest

from tests.helpers.architectures import tiny_model
from tests.helpers.folders import needs
from tests.helpers.launching import (
    ROOT,
    TIMEOUT,
    alone,
    assert_same_run,
    command,
    finished,
    launch,
    launch_each,
    of_processes,
    torchrun,
)
from tests.helpers.tiny import ADAPTERS, make_model, saved

# Layers that would recompute by passes of their own, which DDP does not see
REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "ddp_find_unused_parameters": False,  # with it, PyTorch refuses reentrant passes by itself
}
# Runs on one process, and what differs on two, which then train on as many examples per step
PRECOMPUTED = ("dpo", {"precompute_ref_log_probs": True, "on_disk": True}, {})
CASES = {
    # Some rows, and some micro-batches of a process, have no images; workers collate, and micro-batches have parts
    "images": (
        "dpo",
        {"lora": True, "images": True, "dataloader_num_workers": 1},
        {"max_tokens_per_micro_batch": 50},
    ),
    # TRL has DDP look for weights without gradients: the tower's, on a process whose row has no images
    "images, slices": (
        "sft",
        {"images": True, "gradient_checkpointing": True, "max_steps": 4, "per_device_train_batch_size": 2},
        {"max_tokens_per_micro_batch": 12, "per_device_train_batch_size": 1},
    ),
    # Every second micro-batch, and so every one of the second process, is all prompt
    "nothing to score": ("sft", {"max_steps": 3, "train_sampling_strategy": "sequential", "unscored": True}, {}),
    # Fewer tokens than most rows have
    "slices": ("dpo", {"lora": True, **REENTRANT}, {"max_tokens_per_micro_batch": 11}),
    "layers that carry state": ("sft", {"prefix_sharing": True, "gradient_checkpointing": True}, {}),
    # Processes have different numbers of parts, each along a tree of its own
    "recurrences": ("dpo", {}, {"max_tokens_per_micro_batch": 60}),
    "precomputed": PRECOMPUTED,
}
STATES = {"layers that carry state": "lfm2", "recurrences": "qwen3_5_text"}
# bfloat16 keeps three digits of every log-probability
BFLOAT16 = 2e-2
IN_PARTS = {"max_tokens_per_micro_batch": 90}
SHARDED = {
    "dpo": ("dpo", {}, {}),
    "dpo, LoRA, parts": ("dpo", {"lora": True}, {"max_tokens_per_micro_batch": 60}),
    "dpo, slices": ("dpo", {}, {"max_tokens_per_micro_batch": 15}),
    "dpo, LoRA, slices": ("dpo", {"lora": True}, {"max_tokens_per_micro_batch": 15}),
    "sft, slices": (
        "sft",
        {"prefix_sharing": True},
        {"max_tokens_per_micro_batch": 7, "gradient_checkpointing": True},
    ),
    "precomputed": PRECOMPUTED,
    "sft": ("sft", {"prefix_sharing": True}, {}),
}


@pytest.fixture
def folder_of(model_dir, vision_dir, tokenizer, tmp_path):
    """The folder of the model of a case."""

    def made(case):
        if case in STATES:
            return saved(tmp_path / STATES[case], tiny_model(STATES[case]), tokenizer)
        return vision_dir if case.startswith("images") else model_dir

    return made


def assert_trains_as_one(folder_of, tmp_path, cases, engine=None, name="MULTI_CPU"):
    """Each of `cases` in two processes, beside one process on as many examples. Gives the runs in two."""
    whole, halved = ({"max_steps": 2, "per_device_train_batch_size": size} for size in (4, 2))
    runs = [(t, folder_of(n), tmp_path / f"{n} 2", {**halved, **g, **beside}) for n, (t, g, beside) in cases.items()]
    two = launch(2, *runs, engine=engine)
    for result, (case, (task, given, _)) in zip(two, cases.items(), strict=True):
        assert (result["world"], result["engine"]) == (2, name)
        one = alone(task, folder_of(case), tmp_path / f"{case} 1", {**whole, **given})
        assert_same_run(one, result, weights=not engine)
    return two


@pytest.mark.slow
def test_two_processes_train_what_one_trains(folder_of, tmp_path):
    assert_trains_as_one(folder_of, tmp_path, CASES)


@pytest.mark.slow
def test_fsdp2_trains_what_one_process_trains(folder_of, tmp_path):
    for run in assert_trains_as_one(folder_of, tmp_path, SHARDED, "fsdp", "FSDP"):
        assert not run["without_sync"]  # in it FSDP keeps gradients whole


@pytest.mark.slow
def test_fsdp2_trains_layers_that_carry_state(folder_of, tmp_path):
    """Their layout comes in a mask, which FSDP2 may not lose, nor may the recomputation."""
    case = "layers that carry state"
    assert_trains_as_one(folder_of, tmp_path, {case: CASES[case]}, "fsdp-lfm2", "FSDP")


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_zero_trains_what_one_process_trains(folder_of, tmp_path, engine):
    pytest.importorskip("deepspeed")
    cases = {name: SHARDED[name] for name in ("dpo, LoRA, parts", "sft")}
    assert_trains_as_one(folder_of, tmp_path, cases, engine, "DEEPSPEED")


@needs("arranging", "budgets")
def test_two_processes_train_as_with_padding(model_dir, tmp_path):
    """
    Balanced micro-batches, token budgets and evaluations that do not divide, beside TRL and one process.

    TRL's evaluation repeats examples where they do not divide: to be compared on as many processes.
    """
    options = {"lora": True, "max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options |= {"evaluate": 9, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    parts = {**options, **IN_PARTS}
    arranged = {**parts, "arrange_micro_batches": "tokens"}
    settings = {"trl": {**options, "padding_free": False}, "arranged": arranged, "parts": parts}
    many = launch_each("dpo", model_dir, tmp_path, settings)
    # Processes split their micro-batches into different numbers of parts, and all metrics are those of padded batches
    assert_same_run(many["trl"], many["parts"], ignore=())
    computed, padded = (sum(e.get("flat/computed_tokens", 0) for e in many[name]["log"]) for name in ("parts", "trl"))
    assert computed > padded == 0
    assert_same_run(many["trl"], many["arranged"], weights=False, only="eval_")
    one = alone("dpo", model_dir, tmp_path / "one", {**arranged, "per_device_train_batch_size": 8})
    one["log"] = [entry for entry in one["log"] if "eval_loss" not in entry]
    assert_same_run(one, many["arranged"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", [None, "fsdp"])
def test_losses_that_couple_examples_of_a_process_in_slices(model_dir, tmp_path, engine):
    """Of micro-batches that processes cut into different numbers of slices."""
    options = {"lora": True, "loss_type": ["sigmoid", "sft"], "max_steps": 3, "per_device_train_batch_size": 3}
    sliced = {**options, "max_tokens_per_micro_batch": 30}
    compiled = {**sliced, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    settings = {"trl": {**options, "padding_free": False}, "slices": sliced, "compiled": compiled}
    padded, *ours = launch_each("dpo", model_dir, tmp_path, settings, engine).values()
    for run in ours:
        # FSDP's norm is that of shards, in padded TRL
        assert_same_run(padded, run, ignore=("grad_norm",) if engine else ())
        assert all(entry["flat/slices"] > 1 for entry in run["log"] if "loss" in entry)


@pytest.mark.slow
def test_fsdp2_trains_on_images_what_trl_trains(vision_dir, tmp_path):
    """All weights, those of the tower among them; some rows have no images, and workers collate."""
    options = {"images": True, "max_steps": 2, "dataloader_num_workers": 1, "per_device_train_batch_size": 4}
    # One process is nothing to compare with: padded TRL has other gradient norms on two
    settings = {"trl": {**options, "padding_free": False}, "ours": options}
    runs = launch_each("sft", vision_dir, tmp_path, settings, "fsdp").values()
    assert [(run["world"], run["engine"]) for run in runs] == [(2, "FSDP")] * 2
    assert_same_run(*runs, ignore=())


@pytest.mark.slow
def test_fsdp2_casts_what_it_hands_to_the_model_and_leaves_a_flat_batch_whole(model_dir, tmp_path):
    """In mixed precision, FSDP makes all arguments of a model anew."""
    options = {"bf16": True, "max_steps": 2, "per_device_train_batch_size": 4}
    settings = {"trl": {**options, "padding_free": False}, "whole": options, "parts": {**options, **IN_PARTS}}
    runs = launch_each("dpo", model_dir, tmp_path, settings, "fsdp-bf16").values()
    names = ("loss", "grad_norm", "logps/chosen", "logps/rejected", "entropy")
    padded, *ours = ([[entry[name] for name in names] for entry in run["log"] if "loss" in entry] for run in runs)
    assert len(padded) == 2
    for figures in ours:
        for one, other in zip(figures, padded, strict=True):
            assert one == pytest.approx(other, rel=BFLOAT16)


@pytest.mark.slow
def test_fsdp2_may_leave_weights_whole_after_a_pass(tokenizer, tmp_path):
    """Of four like layers, the check differentiates all, and shares: weights look as if nothing sharded them then."""
    folder = saved(tmp_path / "model", make_model(vocab_size=len(tokenizer), num_hidden_layers=4), tokenizer)
    (run,) = launch(2, ("dpo", folder, tmp_path / "run", {"max_steps": 1}), engine="fsdp-kept")
    assert run["log"][0]["flat/saved_by_sharing"] > 0


@pytest.mark.slow
def test_a_leak_is_found_where_fsdp2_has_sharded_the_weights(model_dir, tmp_path):
    """The check runs once they are, on all processes alike: the same model without the leak passes it, and trains."""
    options = {"max_steps": 1, "per_device_train_batch_size": 2, "leaks": False}
    settings = {"right": options, "leak": {**options, "leaks": True, "refused": True}}
    right = launch_each("dpo", model_dir, tmp_path, settings, "fsdp")["right"]
    assert right["engine"] == "FSDP"
    assert right["log"][0]["flat/saved_by_sharing"] > 0
    for said in of_processes(tmp_path / "leak"):
        assert "so training it without padding would be wrong" in said


# What a memory budget holds, in tokens: with fewer, micro-batches do not fit with all layers recomputed
IN_MEMORY = {"layers": 180, "layers of parts": 60, "slices": 40}


def assert_agreement(engine, tokenizer, tmp_path, **options):
    """Processes that would choose differently compute alike: each recomputation, and each slice, gathers weights."""
    folder = saved(tmp_path / "model", make_model(vocab_size=len(tokenizer), num_hidden_layers=4), tokenizer)
    options = {"max_steps": 4, "memory_budget": 1, **options}
    one = alone("dpo", folder, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    options["per_device_train_batch_size"] = 2
    settings = {what: {**options, "tokens_in_memory": number} for what, number in IN_MEMORY.items()}
    for what, two in launch_each("dpo", folder, tmp_path, settings, engine).items():
        assert_same_run(one, two, weights=False)
        choices = of_processes(tmp_path / what)
        assert any(mine != its for (mine, _), (its, _) in zip(*choices, strict=True))
        for (mine, done), (its, other) in zip(*choices, strict=True):
            assert done[0] == other[0] == max(mine[0], its[0])
            assert done[1] == other[1] == (max(mine[1], its[1]) if done[0] == 1 else 0)
        assert any(slices > 1 if what == "slices" else 0 < layers < 4 for _, (slices, layers) in choices[0])


@pytest.mark.slow
@ADAPTERS
def test_processes_of_fsdp2_agree_on_layers_and_slices(adapters, tokenizer, tmp_path):
    assert_agreement("fsdp", tokenizer, tmp_path, lora=adapters)


def test_processes_of_zero3_agree_on_layers_and_slices(tokenizer, tmp_path):
    pytest.importorskip("deepspeed")
    assert_agreement("zero3", tokenizer, tmp_path, lora=True)


@pytest.mark.slow
def test_an_error_on_one_process_stops_all_with_its_message(model_dir, tmp_path):
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "fail_on_rank": 1}
    process = subprocess.run(
        command(2, ("dpo", model_dir, tmp_path / "2", options)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
    )
    assert process.returncode != 0
    assert "this process fails on purpose" in process.stderr


ALONE = """
import json, os, sys
from unittest import mock
import torch
from tests.helpers.tiny import arguments, preference_data
from tests.runs import make_trainer
from trl_paddingfree.core.trainers.proving import StartUpCheck

torch.distributed.init_process_group("gloo")
rank, results_of = torch.distributed.get_rank(), StartUpCheck._results_of

def fail(check, models):
    if rank == 1:
        raise MemoryError("only here")
    return results_of(check, models)

with mock.patch.object(StartUpCheck, "_results_of", fail):
    try:
        make_trainer("dpo", "shared", train_dataset=preference_data(8, 0), **arguments("dpo"))
        said = "nothing"
    except Exception as error:
        said = str(error)
open(f"{sys.argv[1]}/{rank}", "w").write(said)
torch.distributed.barrier()  # nobody has died of it
"""


def test_a_check_that_fails_on_one_process_fails_on_all(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    finished(torchrun(2, tmp_path / "alone.py", tmp_path), TIMEOUT, PYTHONPATH=str(ROOT))
    assert (tmp_path / "1").read_text() == "only here"
    assert "failed on another process" in (tmp_path / "0").read_text()
