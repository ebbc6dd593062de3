"""Whatever TRL's DPO trainer does, ours does flat, with the same figures and the same weights at the end."""

import math
from functools import partial

import pytest
import torch
from datasets import load_from_disk
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback
from trl import DPOTrainer
from trl.experimental import bema_for_ref_model

from scripts.benchmark.differences import difference
from tests.helpers.offloading import offloading_on_cpu
from tests.helpers.tiny import DATA, DTYPES, arguments, different_pairs, lora, make_model, preference_data
from tests.runs import LAYOUTS, TOLERANCE, assert_as_close, assert_same, compare, run
from trl_paddingfree import PaddingFreeDPOTrainer
from trl_paddingfree.core.flat import calls

SEED = 40417
COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


with_lora = partial(arguments, "dpo")


def test_a_reference_that_bema_updates_trains_the_same_with_trls_trainer_for_it():
    class Own(bema_for_ref_model.DPOTrainer, PaddingFreeDPOTrainer):
        pass

    def trained(layout, trainer_class):
        callback = bema_for_ref_model.BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
        given = {**arguments("dpo", adapters=False), "callbacks": [callback]}
        return run("dpo", layout, trainer_class=trainer_class, train_dataset=preference_data(12, SEED), **given)

    padded = trained("padded", bema_for_ref_model.DPOTrainer)
    assert len({entry["rewards/chosen"] for entry in padded.log_history if "loss" in entry}) > 1
    for layout in LAYOUTS:
        ours = trained(layout, Own)
        assert_same(padded, ours)
        for one, other in zip(padded.trainer.ref_model.parameters(), ours.trainer.ref_model.parameters(), strict=True):
            assert difference(one, other) <= TOLERANCE


def test_accuracies_are_those_of_padded_trl():
    """`assert_same` leaves them out, for rounding decides them where a pair is identical: here, none is."""
    padded = compare("dpo", lambda: arguments("dpo", False), different_pairs(24, SEED), ignored=()).padded
    assert any(0 < entry.get("rewards/accuracies", 0) < 1 for entry in padded.log_history)


def test_cached_reference_log_probs_are_read_and_train_the_same(model_dir, tmp_path, monkeypatch):
    preference_data(12, SEED).save_to_disk(tmp_path)

    def trained(layout):
        # The function that drops rows by `max_length` holds the whole config, and the name of the cache depends on it
        options = {"precompute_ref_log_probs": True, "max_length": None, "peft_config": lora()}
        return run("dpo", layout, model=model_dir, train_dataset=load_from_disk(tmp_path), **options)

    def compute(*args):
        raise AssertionError("computed again")

    first = trained("shared")
    monkeypatch.setattr(DPOTrainer, "compute_ref_log_probs", compute)
    assert_same(first, trained("shared"), tolerance=0)
    # Padded TRL finds the same cache: our checks leave the dataset as it is
    assert_same(trained("padded"), first)


def test_dropout_is_left_on_if_asked_and_evaluation_is_without():
    # The random numbers of a padded batch fall on other tokens: training is the same in distribution only
    options = {"eval_strategy": "steps", "eval_on_start": True, "steps": 1, "disable_dropout": False}
    options |= {"train_dataset": preference_data(8, SEED), "eval_dataset": preference_data(6, SEED + 1)}

    def logs(layout, dropout):
        given = {**with_lora(model=make_model(attention_dropout=dropout)), "peft_config": lora(lora_dropout=dropout)}
        return run("dpo", layout, **given, **options).log_history

    (padded, _), without = logs("padded", 0.3)[:2], logs("flat", 0.0)[1]
    figures = [x for x in padded if x.startswith("eval_") and "per_second" not in x and "runtime" not in x]
    for layout in LAYOUTS:
        evaluated, trained = logs(layout, 0.3)[:2]
        assert all(difference(padded[name], evaluated[name]) <= TOLERANCE for name in figures)
        assert abs(trained["logps/chosen"] - without["logps/chosen"]) > 0.1


# Low precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "weights"])
def test_bf16_is_as_near_to_float32_as_padded_bf16(dtype):
    def trained(layout, dtype, **options):
        given = with_lora(model=make_model().to(torch.bfloat16).to(dtype))
        return run("dpo", layout, **given, train_dataset=preference_data(16, SEED), **options)

    options = {"bf16": dtype == torch.float32}
    exact, padded = trained("padded", torch.float32), trained("padded", dtype, **options)
    assert exact.losses != padded.losses  # bf16 does round
    for layout in LAYOUTS:
        assert_as_close(exact, padded, trained(layout, dtype, **options))


# Speed options


@pytest.mark.slow
def test_training_that_is_compiled_to_machine_code_is_the_same():
    """Compiling C++ takes a minute: once is enough. `test_compiled.py` traces everything else."""

    def make():
        return {**with_lora(model=make_model(num_hidden_layers=1)), "peft_config": lora(target_modules=["q_proj"])}

    # The compiler asks for float32 by its name
    options = {"steps": 1, "precompute_ref_log_probs": True, "tolerance": TOLERANCE}
    compare("dpo", make, preference_data(8, SEED), "shared", **options, ours={"torch_compile": True})


@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_activations_that_are_moved_away_and_back_train_the_same(task):
    """By TRL's own code."""
    with offloading_on_cpu(task) as moved:
        compare(task, lambda: arguments(task), DATA[task](8, SEED), steps=2, ours={"activation_offloading": True})
    assert sum(moved)


@pytest.mark.gpu
@pytest.mark.trl_1
@pytest.mark.parametrize("option", ["activation_offloading", "use_liger_kernel"])
def test_options_that_need_a_gpu_train_the_same(option):
    if option == "use_liger_kernel":
        pytest.importorskip("liger_kernel")
    # float32 on a GPU: matrix products of other shapes take other kernels
    compare("dpo", with_lora, preference_data(12, SEED), tolerance=1e-3, use_cpu=False, **{option: True})


# What padding-free promises


def test_a_new_adapter_starts_at_ln_2(model_dir):
    for layout in LAYOUTS:
        first = run("dpo", layout, model=model_dir, peft_config=LoraConfig(), steps=1)
        # Policy and reference run the same kernels on the same numbers: what is left is writing ln 2 in float32
        assert first.losses[0] == pytest.approx(math.log(2), abs=1e-7)


def trained_once(layout, make, dataset, **options):
    """A trainer that has trained for one step at learning rate 0, which is where TRL sets the last things up."""
    return run("dpo", layout, **make(), train_dataset=dataset, steps=1, learning_rate=0.0, **options).trainer


def log_probs(trainer, pairs):
    batch = trainer.data_collator(pairs)
    labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, -100)
    trainer.model.eval()
    with torch.no_grad():
        return trainer.model(**batch, labels=labels, fused_lm_head=True).log_probs


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_does_not_move_by_one_bit_when_the_pair_beside_it_changes(layout, dtype, tokenizer):
    def make():
        return with_lora(model=make_model(dtype=dtype))

    trainer = trained_once(layout, make, preference_data(12, SEED))
    a, b = ({name: row[name] for name in COLUMNS} for row in trainer.train_dataset.select([0, 5]))
    # Every word becomes another one, and no two the same: the rows share what they shared before
    first = tokenizer.convert_tokens_to_ids("w0")
    other = {
        name: [first + (token - first + 31) % 60 if token >= first else token for token in ids]
        for name, ids in b.items()
    }
    for order in (1, -1):  # beside it in second place, and in first
        layouts = [trainer.data_collator([a, beside][::order])["flat_batch"].layout.segments for beside in (b, other)]
        assert layouts[0] == layouts[1]
        before, after = (log_probs(trainer, [a, beside][::order]) for beside in (b, other))
        mine = [0, 2] if order == 1 else [1, 3]
        assert torch.equal(before[mine], after[mine])
        assert not torch.equal(before, after)


class TokensSeen(TrainerCallback):
    """Counts what reaches the embedding between the start and the end of training."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.tokens = []
        self.hook = model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: self.tokens.append(inputs[0].flatten())
        )

    def on_train_end(self, *args, **kwargs):
        self.hook.remove()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_embedding_sees_exactly_the_tokens_that_are_counted(layout, tokenizer):
    seen = TokensSeen()
    result = run("dpo", layout, **with_lora(), callbacks=[seen], train_dataset=preference_data(12, SEED))
    tokens = torch.cat(seen.tokens)
    counts = result.trainer.runtime.counts.logged
    assert len(tokens) == 2 * counts.computed  # once for the policy and once for the reference
    assert not (tokens == tokenizer.pad_token_id).any()
    rows = [
        row["prompt_ids"] + row[name]
        for row in result.trainer.train_dataset  # the run is one epoch
        for name in ("chosen_ids", "rejected_ids")
    ]
    assert counts.real == sum(map(len, rows))
    assert counts.computed == counts.real if layout == "flat" else counts.computed < 0.8 * counts.real


def step_flops(trainer, pairs):
    """FLOPs of one training step."""
    trainer.model.train()
    with FlopCounterMode(display=False) as counter:
        trainer.compute_loss(trainer.model, trainer.data_collator(pairs)).backward()
    return counter.get_total_flops()


@pytest.mark.slow
def test_one_flat_step_costs_what_its_sequences_cost_one_by_one(monkeypatch):
    monkeypatch.setattr(calls, "PAIRS_OF_A_CALL", 0)  # short segments are padded, where that is faster than calls

    def make():
        eager = partial(make_model, attn_implementation="eager")  # the counter knows nothing of SDPA on a CPU
        return arguments("dpo", False, eager(num_hidden_layers=3), make=lambda seed: eager())

    trainers = {layout: trained_once(layout, make, preference_data(12, SEED)) for layout in ("padded", *LAYOUTS)}
    pairs = [{name: row[name] for name in COLUMNS} for row in trainers["padded"].train_dataset]
    flops = {layout: step_flops(trainer, pairs) for layout, trainer in trainers.items()}

    # Plain transformers, without padding, without our code: every sequence through policy and reference
    model, ref_model = trainers["padded"].model, trainers["padded"].ref_model
    with FlopCounterMode(display=False) as counter:
        for pair in pairs:
            for name in ("chosen_ids", "rejected_ids"):
                input_ids = torch.tensor([pair["prompt_ids"] + pair[name]])
                scored = len(pair[name])
                with torch.no_grad():
                    ref_model.lm_head(ref_model.model(input_ids).last_hidden_state[:, -scored - 1 : -1])
                model.lm_head(model.model(input_ids).last_hidden_state[:, -scored - 1 : -1]).sum().backward()
    one_by_one = counter.get_total_flops()
    # TRL's fused head multiplies into a buffer of its own, which the counter does not see
    assert 0.97 * one_by_one < flops["flat"] <= 1.01 * one_by_one
    assert flops["shared"] < 0.85 * one_by_one
    assert flops["padded"] > 1.3 * one_by_one
