"""Prompts with images and several answers train what padded TRL trains on their pairs; each image is computed once."""

import random
from functools import partial

import pytest
from datasets import Dataset

from tests.answers.runs import compare
from tests.helpers.folders import needs
from tests.helpers.tiny import text
from tests.helpers.vision import SAMPLE, WORDS, on_images, vision_completions, vision_pairs
from tests.runs import assert_same, make_trainer, run

pytestmark = [pytest.mark.trl_1, needs("images")]


def vision_answers(n: int, seed: int) -> Dataset:
    """Prompts with no image, one or two, and two to four answers."""
    rng, rows = random.Random(seed), []
    for row in vision_pairs(n, seed):
        answers = [row["chosen"], row["rejected"]]
        answers += [[{"role": "assistant", "content": text(rng, 1, 9, WORDS)}] for _ in range(rng.randint(0, 2))]
        scores = [float(i) for i in rng.sample(range(9), len(answers))]
        rows.append({"images": row["images"], "prompt": row["prompt"], "completions": answers, "scores": scores})
    return Dataset.from_list(rows)


DATA = vision_answers(8, 0)
CASES = {
    **{kind: (kind, {}, {}) for kind in SAMPLE},
    "best": ("llava", {"answer_pairs": "best", "gradient_accumulation_steps": 2}, {}),
    "evaluation": ("llava", {"eval_dataset": vision_answers(4, 1), "eval_strategy": "steps", "eval_steps": 1}, {}),
    "parts": ("llava", {"gradient_checkpointing": True}, {"max_tokens_per_micro_batch": 60}),
    "a stream": ("llava", {"max_steps": 3}, {"train_dataset": DATA.to_iterable_dataset()}),
}


@pytest.mark.parametrize("case", CASES)
def test_images_train_as_in_padded_trl(case):
    kind, given, ours = CASES[case]
    compare("dpo", DATA, make=partial(on_images, kind), ours=ours, **given)


def test_a_trainer_that_pads_pads_the_same_pairs():
    compare("dpo", DATA, make=partial(on_images, "llava"), layout="ours", ours={"padding_free": False})


def test_prompts_without_a_pair_are_left_out_and_images_computed_once(caplog):
    rows = [*DATA.select(range(1, 3)), {**DATA[0], "completions": DATA[0]["completions"][:1], "scores": [1.0]}]
    trainer = make_trainer("dpo", "shared", **on_images("llava", "dpo"), train_dataset=Dataset.from_list(rows))
    assert len(trainer.train_dataset) == 2
    assert "dropped 1 of 3 prompts, which have no pair" in caplog.text
    (batch,) = trainer.get_train_dataloader()
    pairs = sum(len({*row["scores"]}) * (len(row["scores"]) - 1) // 2 for row in rows[:2])
    assert len(batch["input_ids"]) == 2 * pairs
    assert len(batch["pixel_values"]) == len(rows[0]["images"]) == 2


@pytest.mark.parametrize("made_with", ["pairs", "answers"])
def test_answers_that_are_given_to_evaluate_are_read_as_in_padded_trl(made_with):
    """Also if training data has pairs, and if some prompts have none."""
    data = vision_pairs(8, 0) if made_with == "pairs" else DATA
    alone = {**DATA[0], "completions": DATA[0]["completions"][:1], "scores": [1.0]}
    evaluated, losses = Dataset.from_list([alone, *vision_answers(3, 1), alone]), []
    options = {"per_device_eval_batch_size": 1, "per_device_train_batch_size": 2}
    for padding_free in (True, False):
        given = {**on_images("llava", "dpo"), **options, "padding_free": padding_free}
        trainer = make_trainer("dpo", "ours", train_dataset=data, **given)
        losses.append(trainer.evaluate(evaluated)["eval_loss"])
        trainer.train()
        assert ("flat/pairs" in trainer.state.log_history[0]) == (padding_free and made_with == "answers")
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # rounding of float32


def test_the_trainers_own_answers_are_read_once(monkeypatch):
    given = {**on_images("llava", "dpo"), "train_dataset": DATA, "eval_dataset": DATA}
    trainer = make_trainer("dpo", "ours", **given)
    expected = trainer.evaluate()["eval_loss"]
    monkeypatch.setattr("trl_paddingfree.answers.trainers.with_pairs", lambda *args: pytest.fail("read again"))
    assert trainer.evaluate()["eval_loss"] == expected


def test_answers_that_are_set_later_are_read_as_those_given_to_evaluate():
    trainer = make_trainer("dpo", "ours", **on_images("llava", "dpo"), train_dataset=vision_pairs(8, 0))
    expected = trainer.evaluate(DATA)["eval_loss"]
    trainer.eval_dataset = DATA
    assert trainer.evaluate()["eval_loss"] == expected


def test_a_column_of_several_answers_beside_a_completion_is_left_out_as_in_trl():
    rows = vision_completions(8, 0)
    rows = rows.add_column("completions", [["w1", "w2", "w3"]] * 8).add_column("scores", [[2.0, 1.0, 0.0]] * 8)
    given = {"train_dataset": rows, "steps": 2}
    assert_same(*(run("sft", layout, **on_images("llava", "sft"), **given) for layout in ("padded", "flat")))


def test_a_bad_row_with_images_is_named():
    rows = [*DATA] * 15
    rows[110] = {**rows[110], "scores": [float("nan")] * len(rows[110]["scores"])}
    with pytest.raises(ValueError, match=r"Row 110 of the train data: `scores\[0\]` is nan"):
        make_trainer("dpo", "ours", **on_images("llava", "dpo"), train_dataset=Dataset.from_list(rows))


@pytest.mark.parametrize("padding_free", [True, False])
def test_a_transform_is_refused_by_name(padding_free):
    data = DATA.with_transform(lambda rows: rows)
    with pytest.raises(ValueError, match="several answers per prompt, and a transform"):
        make_trainer("dpo", "ours", **on_images("llava", "dpo"), train_dataset=data, padding_free=padding_free)
