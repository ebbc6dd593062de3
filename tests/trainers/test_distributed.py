"""Several real processes on the CPU (gloo) train what one trains, and stop together."""

import json
import subprocess

import pytest
import transformers
from packaging.version import Version

from tests.helpers.architectures import tiny_model
from tests.helpers.launching import ROOT, TIMEOUT, alone, assert_same_run, command, environment, launch
from tests.helpers.tiny import make_model


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


def test_two_processes_train_on_images_what_one_trains(vision_dir, tmp_path):
    """Some rows, and some micro-batches of a process, have no images; workers collate, and micro-batches have parts."""
    options = {"lora": True, "images": True, "max_steps": 2, "dataloader_num_workers": 1}
    one = alone("dpo", vision_dir, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    options |= {"max_tokens_per_micro_batch": 50, "oversized_examples": "alone"}
    two = launch(2, "dpo", vision_dir, tmp_path / "2", {**options, "per_device_train_batch_size": 2})
    assert two["world"] == 2
    assert_same_run(one, two, tmp_path / "1", tmp_path / "2")


def test_processes_split_micro_batches_into_parts_of_their_own(model_dir, tmp_path):
    """Into different numbers of parts, of different numbers of pairs: all metrics are those of padded batches."""
    options = {"lora": True, "max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trl = launch(2, "dpo", model_dir, tmp_path / "trl", {**options, "padding_free": False})
    two = launch(2, "dpo", model_dir, tmp_path / "2", {**options, "max_tokens_per_micro_batch": 90})
    assert_same_run(trl, two, tmp_path / "trl", tmp_path / "2", ignore=())
    computed, whole = (sum(e.get("flat/computed_tokens", 0) for e in run["log"]) for run in (two, trl))
    assert computed > whole == 0


needs_meta_weights = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="FSDP2 does not fill the reference model of other processes, nor padded TRL's (cpu_ram_efficient_loading)",
)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        pytest.param("dpo", {}, marks=needs_meta_weights),
        ("dpo", {"lora": True, "max_tokens_per_micro_batch": 60}),
        pytest.param("dpo", {"precompute_ref_log_probs": True, "on_disk": True}, marks=needs_meta_weights),
        ("sft", {"prefix_sharing": True}),
    ],
    ids=["dpo", "dpo-lora-parts", "dpo-precomputed", "sft"],
)
def test_fsdp2_trains_what_one_process_trains(model_dir, tmp_path, task, options):
    options = {**options, "max_steps": 2}
    one = alone(task, model_dir, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    two = launch(2, task, model_dir, tmp_path / "2", {**options, "per_device_train_batch_size": 2}, engine="fsdp")
    assert (two["world"], two["engine"]) == (2, "FSDP")
    assert_same_run(one, two)


def assert_agreement(engine, tokenizer, tmp_path):
    """Processes that would choose differently recompute as many layers: each recomputation gathers weights of all."""
    folder = str(tmp_path / "model")
    make_model(vocab_size=len(tokenizer), num_hidden_layers=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    options = {"max_steps": 4, "lora": True, "memory_budget": 1}
    one = alone("dpo", folder, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    options |= {"per_device_train_batch_size": 2, "tokens_in_memory": 180}
    two = launch(2, "dpo", folder, tmp_path / "2", options, engine=engine)
    assert_same_run(one, two)
    choices = [json.loads((tmp_path / "2" / f"result.json.{rank}").read_text()) for rank in range(2)]
    assert any(0 < number < 4 for _, number in choices[0])
    assert any(mine != its for (mine, _), (its, _) in zip(*choices, strict=True))
    for (mine, number), (its, other) in zip(*choices, strict=True):
        assert number == other == max(mine, its)


def test_processes_of_fsdp2_agree_on_how_many_layers_recompute(tokenizer, tmp_path):
    assert_agreement("fsdp", tokenizer, tmp_path)


def test_processes_of_zero3_agree_on_how_many_layers_recompute(tokenizer, tmp_path):
    pytest.importorskip("deepspeed")
    assert_agreement("zero3", tokenizer, tmp_path)


@pytest.mark.parametrize("engine", [None, "fsdp-lfm2"], ids=["ddp", "fsdp2"])
def test_layers_that_carry_state_train_on_two_processes_what_they_train_on_one(engine, tokenizer, tmp_path):
    """Their layout comes in a mask: neither DDP nor FSDP2 may lose it, nor may the recomputation."""
    folder = str(tmp_path / "model")
    tiny_model("lfm2").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    options = {"max_steps": 2, "prefix_sharing": True, "gradient_checkpointing": True}
    one = alone("sft", folder, tmp_path / "1", {**options, "per_device_train_batch_size": 8})
    two = launch(2, "sft", folder, tmp_path / "2", {**options, "per_device_train_batch_size": 4}, engine=engine)
    assert (two["world"], two["engine"]) == (2, "FSDP" if engine else "MULTI_CPU")
    assert_same_run(one, two)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("task", "options"), [("dpo", {"lora": True, "max_tokens_per_micro_batch": 60}), ("sft", {"prefix_sharing": True})]
)
def test_zero_trains_what_one_process_trains(model_dir, tmp_path, task, options, engine):
    pytest.importorskip("deepspeed")
    options = {**options, "max_steps": 2}
    one = alone(task, model_dir, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    two = launch(2, task, model_dir, tmp_path / "2", {**options, "per_device_train_batch_size": 2}, engine=engine)
    assert (two["world"], two["engine"]) == (2, "DEEPSPEED")
    assert_same_run(one, two)


def test_reference_log_probs_can_be_precomputed_by_two_processes(model_dir, tmp_path):
    """Nine evaluation pairs: the last batch has one for one process, and none for the other."""
    options = {"max_steps": 2, "evaluate": 9, "eval_strategy": "steps", "eval_steps": 2, "on_disk": True}
    options |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    during = launch(2, "dpo", model_dir, tmp_path / "during", options)
    before = launch(2, "dpo", model_dir, tmp_path / "before", {**options, "precompute_ref_log_probs": True})
    # Before training every pair is a tie, which rounding breaks
    assert_same_run(during, before, tmp_path / "during", tmp_path / "before", ignore=["accuracies"])


def test_a_process_may_have_nothing_to_score(model_dir, tmp_path):
    """Every second micro-batch, and so every one of the second process, is all prompt."""
    options = {"max_steps": 3, "train_sampling_strategy": "sequential", "unscored": True}
    one = alone("sft", model_dir, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    two = launch(2, "sft", model_dir, tmp_path / "2", {**options, "per_device_train_batch_size": 2})
    assert_same_run(one, two, tmp_path / "1", tmp_path / "2")


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
