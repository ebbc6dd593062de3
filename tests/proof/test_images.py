"""Rows with images go through the model alone with their own pixels."""

import functools

import pytest
import torch

from tests.helpers.tiny import SEED
from tests.helpers.vision import BUILDABLE, SAMPLE, VISION_DATA, on_images, vision_prompts_of
from tests.proof.test_trainers import assert_looked, assert_same_bits
from tests.runs import make_trainer, train
from trl_paddingfree import UnprovenModelError
from trl_paddingfree.proof.look import _SEEDS, Pass, Rows

# How often each looks in two steps
LOOKS = {"dpo": 4, "sft": 2, "kto": 6, "grpo": 2, "rloo": 4, "distillation": 4}


def trained(task, kind, check_steps=1, **options):
    given = {**on_images(kind, task), "train_dataset": VISION_DATA[task](8, 0), **options}
    if task == "rloo":  # TRL would load a reference by the name of the model
        given["beta"] = 0.0
    return train(make_trainer(task, "shared", check_steps=check_steps, logging_steps=1, steps=2, **given))


@pytest.mark.parametrize("task", LOOKS)
def test_rows_with_images_are_compared_and_looks_leave_no_trace(task):
    without, looked = (trained(task, "llava", every) for every in (0, 1))
    assert_same_bits(without, looked)
    assert_looked(looked, LOOKS[task])


@pytest.mark.parametrize("kind", SAMPLE)
def test_an_architecture_has_the_pixels_of_a_row(kind):
    assert_looked(trained("dpo", kind), LOOKS["dpo"])


@pytest.mark.models
@pytest.mark.parametrize("kind", BUILDABLE)
def test_every_architecture_has_the_pixels_of_a_row(kind):
    for task in ("dpo", "sft"):
        assert_looked(trained(task, kind), LOOKS[task])
    if kind != "llava_onevision":  # TRL samples image tokens
        run = trained("distillation", kind, train_dataset=vision_prompts_of(kind, 8, 0))
        assert_looked(run, LOOKS["distillation"])


@pytest.mark.parametrize("budget", [{"max_tokens_per_micro_batch": 60}, {"max_tokens_per_micro_batch": 12}], ids=str)
def test_rows_with_images_are_compared_under_a_budget(budget):
    run = trained("dpo", "llava", **budget)
    found = run.trainer._looks.found
    assert found.number
    assert found.largest_error < 1e-5
    assert all("in slices" in reason for reason in found.not_compared)


@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_images_of_another_row_are_found(task):
    options = {"check_steps": 1, "steps": 1, "per_device_train_batch_size": 8}
    # Of GRPO, two prompts, whose images differ: among more of them, some have the same, which leaves nothing to swap
    data = VISION_DATA[task](2 if task == "grpo" else 8, SEED)
    trainer = make_trainer(task, "shared", **options, **on_images("llava", task), train_dataset=data)
    backbone = trainer.model.base_model
    features = backbone.get_image_features

    @functools.wraps(features)
    def wrong(*args, **kwargs):
        outputs = features(*args, **kwargs)
        found = outputs.pooler_output
        outputs.pooler_output = [*found[1:], found[0]] if len(found) > 1 else found
        return outputs

    backbone.get_image_features = wrong
    with pytest.raises(UnprovenModelError, match="(answers to|gradients of) row"):
        trainer.train()


@pytest.mark.parametrize("kind", ["llava", *SAMPLE])
def test_other_tokens_leave_placeholders_of_images_in_their_places(kind, monkeypatch):
    """The first draw of each look is off, so that the others decide."""
    flat = Rows.flat

    def wrong_at_first(rows):
        found = flat(rows)
        return found if rows.seed >= _SEEDS else Pass(found.answers, found.at_tokens * 2)

    monkeypatch.setattr(Rows, "flat", wrong_at_first)
    given = on_images(kind, "sft")
    given["model"].to(torch.bfloat16)
    data = VISION_DATA["sft"](8, 0)
    run = train(make_trainer("sft", "shared", check_steps=1, steps=1, train_dataset=data, **given))
    assert run.trainer._looks.found.doubts == 1
