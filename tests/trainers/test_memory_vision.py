"""Training on images under a memory budget: the tower is predicted as well, and no decision changes a figure."""

import os

import pytest
import torch
from datasets import concatenate_datasets
from transformers.utils import is_torchvision_available

from tests.helpers.equivalence import assert_same
from tests.helpers.memory import assert_predicted, ready, step
from tests.helpers.vision import vision_messages, vision_pairs
from tests.helpers.vision_runs import train
from trl_paddingfree.memory.budget import Budget
from trl_paddingfree.memory.device import GIB

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
# Qwen's images have sizes of their own
KINDS = ["llava", *(["qwen2_5_vl"] if is_torchvision_available() else [])]


def made(kind, task, data, **options):
    """A trainer that has trained one step under a budget that holds everything."""
    return train(kind, task, "shared", data, **{"memory_budget": 8, "steps": 1, **options}).trainer


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("task", "lora"), [("dpo", True), ("sft", False)], ids=["dpo", "sft"])
def test_predicted_bytes_are_counted_ones(kind, task, lora):
    data = vision_pairs(16, SEED) if task == "dpo" else vision_messages(16, SEED)
    assert_predicted(made(kind, task, data, lora=lora, per_device_train_batch_size=8))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_recomputed_layers_computes_the_same(kind):
    data = vision_pairs(8, SEED)
    trainer = ready(made(kind, "dpo", data, lora=True))
    batch, layers = next(iter(trainer.get_train_dataloader())), trainer.flat.memory.layers
    assert len(layers) == {"llava": 3, "qwen2_5_vl": 4}[kind]  # LLaVA leaves out what the last of the tower gives
    expected = step(trainer, batch, 0)
    for number in range(1, len(layers) + 1):
        for one, other in zip(expected, step(trainer, batch, number), strict=True):
            assert one is other is None or torch.equal(one, other), number


def test_micro_batches_in_parts_count_their_images(monkeypatch):
    data = vision_pairs(8, SEED)
    memory = made("llava", "dpo", data).flat.memory
    least = memory.needs.fixed + 0.7 * (memory.predicted - memory.needs.fixed)
    whole, numbers, parts_of = train("llava", "dpo", "shared", data), [], Budget.batches

    def watch(*args):
        parts = parts_of(*args)
        numbers.append(len(parts))
        return parts

    monkeypatch.setattr(Budget, "batches", watch)
    assert_same(whole, train("llava", "dpo", "shared", data, memory_budget=least / GIB))
    assert max(numbers) > 1


def test_a_budget_wants_to_see_images():
    without = vision_pairs(12, SEED).filter(lambda row: not row["images"])
    with pytest.raises(ValueError, match="has an image in its column, so what the vision tower keeps"):
        made("llava", "dpo", without)


def test_images_are_found_behind_many_examples_without_them():
    data = vision_pairs(12, SEED)
    without = data.filter(lambda row: not row["images"])
    # More than are searched of a stream
    data = concatenate_datasets([without] * (257 // len(without) + 1) + [data])
    assert {"first", "text"} <= set(made("llava", "dpo", data).flat.check.images.names)
    with pytest.raises(ValueError, match="The first examples of the train data have no images"):
        made("llava", "dpo", data.to_iterable_dataset(), memory_budget=None)
