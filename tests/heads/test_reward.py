"""Reward models, padded TRL beside ours: losses, rewards and their least and greatest."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from trl import RewardTrainer

from tests.helpers.flat_and_padded import install
from tests.helpers.tiny import SEED, arguments, different_pairs, preference_data, reward_model
from tests.runs import LAYOUTS, assert_same, compare, run
from trl_paddingfree import FlatBatch, PaddingFreeRewardTrainer
from trl_paddingfree.core.check.prove import check_flat
from trl_paddingfree.core.model.routes import choose_route


@pytest.fixture(scope="module")
def data():
    return different_pairs(25, SEED)


plain = partial(arguments, "reward", adapters=False)


def trained(layout, data, **options):
    return run("reward", layout, **plain(), train_dataset=data, **options)


def test_parts_have_the_least_and_the_greatest_reward_of_the_whole(data):
    arranged, size = {"arrange_micro_batches": "prefix"}, {"per_device_train_batch_size": 8}
    parted = compare("reward", plain, data, "shared", ours={**arranged, "max_tokens_per_micro_batch": 70}, **size).ours
    whole = trained("shared", data, **arranged, **size)
    assert parted.trainer.total_counts().computed > whole.trainer.total_counts().computed


def test_the_longest_row_is_what_a_pair_starts_with_and_the_longer_rest(data):
    trainer = trained("shared", data, steps=1).trainer
    longest = max(len(row[column]) for row in trainer.train_dataset for column in trainer.task.token_columns)
    assert trainer.exceeds(longest - 1)
    assert not trainer.exceeds(longest)


def test_a_row_without_tokens_is_refused():
    model = reward_model()
    install(model)
    batch = FlatBatch.from_rows([[5, 6, 7], []], [[-100] * 3, []])
    with pytest.raises(ValueError, match="1 of 2 rows have no token to read"):
        model(input_ids=torch.tensor([[5, 6, 7], [0, 0, 0]]), flat_batch=batch)


@pytest.mark.parametrize("end", [9, 0], ids=["token", "padding-token"])
def test_a_reward_is_read_within_its_row_whatever_pads_it(end):
    model = reward_model().eval()
    alone = model(input_ids=torch.tensor([[8, end]])).logits
    install(model)
    batch = FlatBatch.from_rows([[5, 6, 7, 4], [8, end]], [[-100] * 4, [-100] * 2])
    for padding in (0, 3):
        rewards = model(input_ids=torch.tensor([[5, 6, 7, 4], [8, end, padding, padding]]), flat_batch=batch).logits
        torch.testing.assert_close(rewards[1:], alone)


def test_a_loss_may_be_the_models_own_given_labels_of_rows(data):
    def with_own(base):
        class Own(base):
            def compute_loss(self, model, inputs, *args, **kwargs):
                labels = inputs["attention_mask"].sum(1, keepdim=True) / 100
                inputs = {name: x for name, x in inputs.items() if name != "margin"}
                return model(**inputs, labels=labels, use_cache=False).loss

        return Own

    padded = trained("padded", data, trainer_class=with_own(RewardTrainer))
    for layout in LAYOUTS:
        ours = trained(layout, data, trainer_class=with_own(PaddingFreeRewardTrainer))
        assert_same(padded, ours)


def test_a_head_that_sees_other_rows_is_caught(monkeypatch):
    from trl_paddingfree.core.model.mixers import Mixers

    model = reward_model()
    route = choose_route(model)
    assert check_flat(model, route).passed
    monkeypatch.setattr(Mixers, "arguments", lambda *args: {"attention_mask": None})
    assert not check_flat(model, route).passed


def test_a_saved_reward_model_gives_the_same_rewards(data, tmp_path):
    trainer = trained("shared", data, steps=1).trainer
    trainer.save_model(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_identical_sequences_have_one_reward():
    pairs = preference_data(3, SEED).select([2, 2, 2, 2])
    figures = trained("shared", pairs, steps=1).log_history[0]
    assert (figures["margin"], figures["accuracy"]) == (0, 0)
    assert figures["loss"] == pytest.approx(0.6931, abs=1e-4)
