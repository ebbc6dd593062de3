"""KTO, padded TRL beside ours: matched and mismatched rows, each with its own flat batch."""

import logging
import os

import pytest
import torch
from trl import KTOConfig
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from tests.helpers.tiny import lora, make_model, make_tokenizer, preference_data, unpaired
from tests.runs import assert_same, compare, run
from trl_paddingfree import UnpairedPreferenceCollator

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])


@pytest.fixture(scope="module")
def data():
    return unpaired(24, SEED)


def with_lora():
    return {"model": make_model(), "processing_class": make_tokenizer(), "peft_config": lora()}


def with_reference():
    return {"model": make_model(), "processing_class": make_tokenizer(), "ref_model": make_model(seed=1)}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (with_lora, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}),
        (with_reference, {"max_length": 20, "desirable_weight": 1.5, "beta": 0.5}),
        (with_reference, {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"}),
        (with_reference, {"precompute_ref_log_probs": True, "pad_to_multiple_of": 8}),
    ],
    ids=["lora", "reference", "apo", "precomputed"],
)
def test_training_follows_padded_trl(data, make, options):
    compare("kto", make, data, **options)


def test_paired_data_evaluation_and_trls_own_config(data):
    def make():
        return {**with_lora(), "eval_dataset": data.select(range(6))}

    options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    options["train_dataset"] = preference_data(8, SEED)
    padded = run("kto", "padded", **make(), **options)
    ours = run("kto", "ours", **make(), **options, config_class=KTOConfig)
    assert_same(padded, ours)
    assert ours.trainer.method == "padding-free (segment, shared prefixes)"


def with_a_column_that_kto_does_not_read(rows):
    return rows.add_column("chosen", ["w1 w2"] * len(rows))


@pytest.mark.parametrize(
    ("rows", "per_row"),
    [(unpaired(24, 0), 1), (preference_data(24, 0), 2), (with_a_column_that_kto_does_not_read(unpaired(24, 0)), 1)],
    ids=["unpaired", "pairs", "stray column"],
)
def test_examples_without_a_completion_left_are_counted_and_no_others(rows, per_row, caplog):
    total = len(rows) * per_row
    with caplog.at_level(logging.WARNING):
        trained = run("kto", "shared", **with_lora(), train_dataset=rows, steps=1, max_length=16)
        kept = len(trained.trainer.train_dataset)
        assert 0 < kept < total
        assert f"The train data: dropped {total - kept} of {total} examples, which `max_length=16`" in caplog.text
        caplog.clear()
        run("kto", "shared", **with_lora(), train_dataset=rows, steps=1)
    assert "dropped" not in caplog.text
    with pytest.raises(ValueError, match=f"dropped {total} of {total} examples, .* Raise `max_length`"):
        run("kto", "shared", **with_lora(), train_dataset=rows, steps=1, max_length=1, memory_budget=8)


def test_matched_and_mismatched_rows_of_one_width_are_kept_apart(data):
    """With rows of one shape, the flat batch of the others would go unnoticed."""
    words = ["w1 w2", "w3 w4", "w5 w6", "w7 w8"]
    rows = [{"prompt": "w9 w10", "completion": f" {words[i % 4]}", "label": i % 2 == 0} for i in range(12)]
    compare("kto", with_reference, data.from_list(rows))


def test_precomputed_references_are_computed_flat(data, monkeypatch):
    from trl_paddingfree.model import flat_model

    calls, flat_forward = [], flat_model.flat_forward
    monkeypatch.setattr(flat_model, "flat_forward", lambda *args, **kw: calls.append(1) or flat_forward(*args, **kw))
    trained = run("kto", "shared", **with_reference(), train_dataset=data, steps=1, precompute_ref_log_probs=True)
    before_training = len(trained.trainer.train_dataset) // 4 * 2
    # Of both models: rows, twice with other tokens, beyond the positions. With gradients twice, without them once
    checks = 2 * 4 + 2 + 1
    assert len(calls) == before_training + checks + 2


def test_parts_of_a_loss_without_divergence_follow_padded_trl(data):
    # One kind alone in a part has no margin there, and one in the whole
    ordered = data.sort("label")
    options = {"loss_type": "apo_zero_unpaired", "per_device_train_batch_size": 8, "train_sampling_strategy": "random"}
    compare("kto", with_reference, ordered, ("shared",), **options, ours={"max_tokens_per_micro_batch": 48})


def test_a_loss_with_a_divergence_keeps_its_micro_batches(data):
    with pytest.raises(ValueError, match="arrange_micro_batches.*`loss_type='kto'`"):
        run("kto", "shared", **with_lora(), train_dataset=data, arrange_micro_batches="tokens")


def test_parts_of_a_loss_with_a_divergence_follow_padded_trl(data):
    parts = {"max_tokens_per_micro_batch": 48}
    compare("kto", with_lora, data, ("shared",), per_device_train_batch_size=8, ours=parts)


def test_without_padding_free_the_collator_is_trls():
    examples = [{"prompt_ids": [1, 2], "completion_ids": [3], "KL_completion_ids": [4, 5], "label": True}]
    ours, theirs = UnpairedPreferenceCollator(0)(examples), DataCollatorForUnpairedPreference(0)(examples)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_stream_of_completions_follows_padded_trl(data):
    compare("kto", with_lora, data.to_iterable_dataset(), ("shared",))
