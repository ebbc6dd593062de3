"""Rows are the truth: whoever edits them is obeyed, as by padded TRL, or told that it is too late."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DynamicCache, TrainerCallback
from trl import SFTTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.helpers.architectures import tiny_model, with_head
from tests.helpers.flat_and_padded import flat_model, install, tree
from tests.helpers.folders import skip_without
from tests.helpers.random_draws import MODEL_TYPES
from tests.helpers.tiny import DATA, ROUTED, SEED, make_model
from tests.runs import LAYOUTS, PER_MICRO_BATCH, assert_same, make_trainer, run, train
from trl_paddingfree import FlatBatch, FlatCollator, LanguageModelingCollator, PaddingFreeSFTTrainer, PreferenceCollator
from trl_paddingfree.core.model.edits import EditedRowsError, edits
from trl_paddingfree.registry import TRAINERS

IN_PARTS = {"max_tokens_per_micro_batch": 40, "per_device_train_batch_size": 8}
# float32 on CPU (eps = 1.2e-7), relative to the largest logit: sums over at most a few hundred terms
FLOAT32 = 2e-5


def other_tokens(batch):
    batch["input_ids"] = torch.where(batch["attention_mask"] == 1, (batch["input_ids"] * 7 + 3) % 60 + 5, 0)
    if "labels" in batch:
        batch["labels"] = batch["input_ids"].masked_fill(batch["labels"] == -100, -100)
    return batch


def more_scored(batch):
    if "labels" in batch:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    else:
        batch["completion_mask"] = batch["attention_mask"].clone()
    return batch


def fewer_scored(batch):
    name = "labels" if "labels" in batch else "completion_mask"
    batch[name][:, 5:9] = -100 if name == "labels" else 0
    return batch


def nothing_scored(batch):
    name, value = ("labels", -100) if "labels" in batch else ("completion_mask", 0)
    return {**batch, name: torch.full_like(batch[name], value)}


def fewer_rows(batch):
    rows = len(batch["input_ids"]) // 2
    keep = torch.arange(rows) * 2 if "labels" in batch else torch.tensor([0, 1, rows, rows + 1])
    return {name: rows[keep] if torch.is_tensor(rows) else rows for name, rows in batch.items()}


def swapped_rows(batch):
    order = torch.arange(len(batch["input_ids"])).flip(0)
    return {name: rows[order] if torch.is_tensor(rows) else rows for name, rows in batch.items()}


def cut_rows(batch):
    return {name: rows[:, :-1] if torch.is_tensor(rows) else rows for name, rows in batch.items()}


EDITS = [other_tokens, more_scored, fewer_scored, fewer_rows, swapped_rows, cut_rows]
COLLATORS = {
    "dpo": (DataCollatorForPreference, PreferenceCollator),
    "sft": (DataCollatorForLanguageModeling, LanguageModelingCollator),
}


def editing(collator_class, edit=lambda batch: batch, examples=lambda examples: examples, of=0):
    class Editing(collator_class):
        def __init__(self, edit):  # a signature of its own, and an attribute that is no field
            super().__init__(of)
            self.edit = edit

        def torch_call(self, given):
            return self.edit(super().torch_call(examples(given)))

    return Editing(edit)


def stepping(trainer_class, edit):
    """A trainer that edits what it is about to train on."""

    class Stepping(trainer_class):
        def training_step(self, model, inputs, *args):
            return super().training_step(model, edit(inputs), *args)

    return Stepping


def common(task, model_dir, **options):
    return {"model": model_dir, "train_dataset": DATA[task](12, SEED), "steps": 2, **options}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("task", COLLATORS)
def test_edits_of_a_collator_are_trained_on(model_dir, task, edit):
    expected, actual = (
        run(task, layout, **common(task, model_dir), data_collator=editing(collator_class, edit))
        for layout, collator_class in zip(("padded", "shared"), COLLATORS[task], strict=True)
    )
    assert_same(expected, actual)


def masked_at_random(batch):
    for drawn in (random.random(), np.random.random(), torch.rand(()).item()):
        batch["labels"][:, int(8 * drawn)] = -100
    return batch


# Of collators of one's own: an edit, what becomes of examples, and options
OWN = {
    "draws": (masked_at_random, list, {}),
    "leaves out": (dict, lambda given: given[1:], {}),
    "tokenizes": (
        dict,
        lambda given: [{"input_ids": [*range(5, 8 + x["n"])]} for x in given],
        {
            "train_dataset": Dataset.from_dict({"n": range(12)}),
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "remove_unused_columns": False,
        },
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_budget_does_not_mind_what_a_collator_does(model_dir, name):
    edit, examples, options = OWN[name]
    options = common("sft", model_dir, **options)
    theirs, ours = (editing(collator_class, edit, examples) for collator_class in COLLATORS["sft"])
    budgeted = run("sft", "ours", **options, data_collator=ours, memory_budget=8)
    assert_same(run("sft", "padded", **options, data_collator=theirs), budgeted)
    if name == "tokenizes":
        with pytest.raises(ValueError, match="of one without tokens are not"):
            run("sft", "ours", **options, data_collator=ours, arrange_micro_batches="tokens")


def test_trls_collator_is_taken_over_and_one_that_was_set_since_is_named(model_dir):
    collator = DataCollatorForPreference(0)
    collator.note = "no field"
    options = common("dpo", model_dir, eval_dataset=DATA["dpo"](4, SEED), data_collator=collator, **IN_PARTS)
    trainer = make_trainer("dpo", "ours", **options)
    assert trainer.data_collator.note == collator.note
    flat = trainer.evaluate()["eval_loss"]
    trainer.data_collator = collator
    assert trainer.evaluate()["eval_loss"] == pytest.approx(flat, rel=FLOAT32)
    with pytest.raises(EditedRowsError, match="`data_collator` that was set after"):
        trainer.train()


def doubled(batch):
    return {**batch, "weights": 2 * batch.get("weights", batch["input_ids"])}


APO = {"loss_type": "apo_zero_unpaired", **IN_PARTS}
WEIGHED = {"data_collator": editing(LanguageModelingCollator, doubled), **IN_PARTS}
LATER = {
    "dpo": (other_tokens, {}, "were edited after .*: other tokens.*Edit them in `torch_call`"),
    "dpo, a whole whose parts are computed": (more_scored, IN_PARTS, "more or other tokens to score"),
    "dpo, fewer in parts": (nothing_scored, IN_PARTS, "or fewer where it runs in parts"),
    "kto, label": (lambda batch: {**batch, "label": ~batch["label"]}, APO, "`label` of a micro-batch was added or cha"),
    "kto, own": (lambda batch: {**batch, "own": torch.ones(8)}, APO, "`own` of a micro-batch was added or changed"),
    "sft, weights": (doubled, WEIGHED, "`weights` of a micro-batch was added or changed"),
    "sft, lost": (lambda batch: {"input_ids": batch["input_ids"]}, {}, r"no `flat_batch`, only \['input_ids'\]"),
}


@pytest.mark.parametrize("name", LATER)
def test_later_edits_are_refused(model_dir, name):
    task, (edit, options, message) = name.split(",")[0], LATER[name]
    skip_without(task, options)
    with pytest.raises(EditedRowsError, match=message):
        run(task, "ours", trainer_class=stepping(TRAINERS[task], edit), **common(task, model_dir, **options))


@pytest.mark.parametrize(("place", "task"), [("trainer_class", "dpo"), ("data_collator", "sft")])
def test_edits_between_collator_and_step_are_refused(model_dir, place, task):
    class Preparing(TRAINERS[task]):
        def _prepare_inputs(self, inputs):
            return other_tokens(super()._prepare_inputs(inputs))

    @dataclass
    class Calling(COLLATORS[task][1]):
        def __call__(self, features, return_tensors=None):
            return other_tokens(super().__call__(features, return_tensors))

    given = {place: Preparing if place == "trainer_class" else Calling(0)}
    with pytest.raises(EditedRowsError, match="other tokens"):
        run(task, "ours", **common(task, model_dir), **given)


def test_a_data_loader_of_ones_own_is_told_what_a_budget_needs(model_dir):
    class Loading(PaddingFreeSFTTrainer):
        def get_train_dataloader(self):
            size, collator = self.args.per_device_train_batch_size, self.data_collator.changed(keeps_rows=keeps_rows)
            return self.accelerator.prepare(DataLoader(self.train_dataset, size, collate_fn=collator))

    options = common("sft", model_dir)
    keeps_rows = False
    whole = run("sft", "ours", trainer_class=Loading, **options)
    options["max_tokens_per_micro_batch"] = 100
    with pytest.raises(EditedRowsError, match="keeps_rows=True"):
        run("sft", "ours", trainer_class=Loading, **options)
    keeps_rows = True
    assert_same(whole, run("sft", "ours", trainer_class=Loading, **options), ignored=PER_MICRO_BATCH)
    del options["max_tokens_per_micro_batch"]  # nobody needs the rows then
    assert_same(whole, run("sft", "ours", trainer_class=Loading, **options))


@pytest.mark.parametrize("is_own", [False, True])
def test_a_callback_may_change_the_collator(model_dir, is_own):
    class Own(DataCollatorForPreference):
        pass

    def trained(layout, **options):
        if is_own:
            options["data_collator"] = Own(pad_token_id=0)
        trainer = make_trainer("dpo", layout, **common("dpo", model_dir, **options | {"steps": 3}))
        callback = TrainerCallback()
        callback.on_step_end = lambda *args, **kwargs: setattr(trainer.data_collator, "max_length", 12)
        trainer.add_callback(callback)
        return train(trainer)

    padded = trained("padded")
    assert not is_own or padded.trainer.data_collator.max_length == 12
    for options in ({}, {"max_tokens_per_micro_batch": 40}):
        assert_same(padded, trained("shared", **options))


def test_an_attribute_reaches_the_collator_whose_rows_are_made_flat():
    class Own(DataCollatorForPreference):
        calls, rate = 0, 0.5  # set on the class

        def torch_call(self, examples):
            self.calls += 1
            self.seen = self.rate
            return super().torch_call(examples)

    own = Own(pad_token_id=0)
    ours = PreferenceCollator.of(own)
    pair = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}
    ours([pair])
    ours.rate, ours.max_length, ours.prefix_sharing = 0.25, 2, False
    ours.epoch = 3  # a new one
    assert ours([pair])["input_ids"].tolist() == [[1, 2], [1, 2]]
    assert (own.calls, own.seen, own.rate, own.epoch) == (2, 0.25, 0.25, 3)
    assert not hasattr(own, "prefix_sharing")

    class Between(DataCollatorForPreference):
        pass

    class OfBetween(FlatCollator, Between):
        pass

    of_between = OfBetween.of(Own(pad_token_id=0))
    of_between.max_length, of_between.keeps_rows = 3, True
    assert (of_between.collate.max_length, hasattr(of_between.collate, "keeps_rows")) == (3, False)


@pytest.mark.parametrize("kind", ["transform", "stream"])
def test_rows_that_are_drawn_at_random_are_those_of_padded_trl(kind):
    """Nothing reads a row between seeding and training, or its draws count for nothing."""

    def draw(rows):
        drawn = [5 + int(50 * x) for x in (random.random(), np.random.random(), torch.rand(()).item())]
        ids = [[*ids, *drawn] for ids in rows["input_ids"]]
        return {"input_ids": ids, "labels": ids}

    runs = []
    for layout in ("padded", "flat"):
        rows = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 8})
        if kind == "stream":
            rows = rows.to_iterable_dataset().map(draw, batched=True, batch_size=2)
        else:
            rows = rows.with_transform(draw)
        options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "train_sampling_strategy": "sequential"}
        runs.append(run("sft", layout, train_dataset=rows, steps=2, **options))
    assert_same(*runs)


def test_a_mask_with_gaps_is_refused():
    def gap(batch):
        batch["attention_mask"][0, 1] = 0
        return batch

    collator = editing(LanguageModelingCollator, gap)
    collator.padding_free = True
    with pytest.raises(ValueError, match="gaps, or padding on the left"):
        collator([{"input_ids": [1, 2, 3]}])


def test_a_label_in_the_padding_and_another_mask_are_edits():
    batch = FlatBatch.from_rows([[1, 2, 3], [4]], [[-100, 2, 3], [-100]])
    for name, rows, edited in (
        ("labels", [[-100, 2, 3], [-100, 5, -100]], [False, False, True, False]),
        ("attention_mask", [[1, 1, 1], [1, 1, 0]], [False, True, False, False]),
        ("attention_mask", [[0] * 3] * 2, [False] * 4),
        ("input_ids", [[1, 2, 3], [4, 8, 9]], [False] * 4),  # what stands in the padding
        ("position_ids", [[0, 1, 2], [0, 7, 7]], [False] * 4),
        ("position_ids", [[0, 1, 2], [1, 0, 0]], [False, False, False, True]),
    ):
        assert edits(batch, {name: torch.tensor(rows)}).tolist() == edited


# --- A loss of one's own -------------------------------------------------------------------------------------------


def fused(model, inputs, number=None):
    return model(**inputs, fused_lm_head=True, use_cache=False).loss


def of_logits(model, inputs, number):
    outputs = model(**inputs, num_items_in_batch=number)
    return outputs["loss"] + outputs.logits.float().logsumexp(-1)[:, 0].mean()


def of_hidden_states(model, inputs, number):
    """By a second call beside the flat one, as the refusal of `output_hidden_states` recommends."""
    rows = {name: value for name, value in inputs.items() if name != "flat_batch"}
    states = model(**rows, output_hidden_states=True).hidden_states[1]
    return fused(model, inputs) + states[:, 0].pow(2).mean()


def with_loss(trainer_class, loss):
    class Own(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(model, inputs, num_items_in_batch)

    return Own


@pytest.mark.parametrize(
    ("loss", "model_type"),
    [(fused, "mixtral"), (of_logits, "llama"), (of_logits, "mixtral"), (of_hidden_states, "llama")],
)
def test_a_loss_that_reads_the_models_own_trains_the_same(tokenizer, loss, model_type):
    def trained(layout, trainer_class):
        model = make_model(model_type, **(ROUTED if model_type == "mixtral" else {}))
        given = {**common("sft", model), "processing_class": tokenizer, "trainer_class": with_loss(trainer_class, loss)}
        return run("sft", layout, **given)

    padded = trained("padded", SFTTrainer)
    for layout in LAYOUTS:
        assert_same(padded, trained(layout, PaddingFreeSFTTrainer))


def test_a_loss_that_parts_cannot_be_weighted_in_is_refused(model_dir):
    own = with_loss(PaddingFreeSFTTrainer, fused)
    own.part_sizes = PaddingFreeSFTTrainer.part_sizes
    with pytest.raises(ValueError, match="`Own.compute_loss` does not call `super"):
        run("sft", "ours", trainer_class=own, **common("sft", model_dir, **IN_PARTS))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_and_loss_of_shared_rows_are_those_of_each_row(model_type):
    """Also of models whose own forward calls another backbone than TRL's head does (OPT)."""
    model = with_head(tiny_model(model_type, attn_implementation="eager"))
    rows = tree(SEED)
    width = max(map(len, rows))
    labels = torch.tensor([([-100] * 3 + row[3:] + [-100] * width)[:width] for row in rows])
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
        install(model)
        batch = FlatBatch.from_rows(rows, rows)
        without, outputs = model(flat_batch=batch).logits, model(flat_batch=batch, labels=labels)
    for row, logits, flat, beside_loss in zip(rows, alone, without, outputs.logits, strict=True):
        for ours in (flat, beside_loss):
            assert (ours[: len(row)] - logits).abs().max() < FLOAT32 * (1 + logits.abs().max())
            assert (ours[len(row) :] == 0).all()
    expected = torch.nn.functional.cross_entropy(without[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=FLOAT32)


def test_what_flat_outputs_cannot_give_is_named():
    model = tiny_model("gpt2", attn_implementation="sdpa")
    flat_model(model)
    batch, rows = FlatBatch.from_rows([[1, 2, 3]], [[1, 2, 3]]), torch.zeros(1, 3, dtype=int)
    given = {"use_cache": True, "logits_to_keep": 1, "token_type_ids": rows, "return_dict": False}
    given["past_key_values"] = DynamicCache()  # it would hold the keys of the flat row
    refused = {name: f"`{name}` was given to the model beside" for name in given}
    refused |= {f"output_{name}": f"has no `{name}` of rows" for name in ("hidden_states", "attentions")}
    refused["position_ids"], given["position_ids"] = "edited after .*: other `position_ids`", rows
    refused["return_dict"] = "`return_dict=False`: the answer to a flat batch has names"
    for name, message in refused.items():
        with pytest.raises(ValueError, match=message):
            model(flat_batch=batch, **{name: given.get(name, True)})
    with pytest.raises(ValueError, match="`shift_labels` was given to the model beside"):
        model(flat_batch=batch, labels=batch.input_ids, shift_labels=rows, fused_lm_head=True)
    with pytest.raises(TypeError, match="by name"):
        model(torch.tensor([[1, 2, 3]]), flat_batch=batch)
    model.config.output_hidden_states = True
    for asked in ({}, {"output_hidden_states": None}, {"output_hidden_states": True}):
        with pytest.raises(ValueError, match="a flat batch has no `hidden_states` of rows"):
            model(flat_batch=batch, **asked)
    assert "hidden_states" not in model(flat_batch=batch, output_hidden_states=False)
