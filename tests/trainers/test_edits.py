"""Rows are the truth: whoever edits them is obeyed, as by padded TRL, or told that it is too late."""

import os
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader
from trl import SFTTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import flat_model, tree
from tests.helpers.random_draws import MODEL_TYPES
from tests.helpers.tiny import make_model, preference_data, prompt_completions, unpaired
from tests.runs import LAYOUTS, assert_same, run
from trl_paddingfree import (
    FlatBatch,
    LanguageModelingCollator,
    PaddingFreeDPOTrainer,
    PaddingFreeKTOTrainer,
    PaddingFreeSFTTrainer,
    PreferenceCollator,
)
from trl_paddingfree.model.edits import EditedRowsError, edits
from trl_paddingfree.model.flat_model import FlatModel
from trl_paddingfree.model.routes import choose_route
from trl_paddingfree.trainers.registry import TRAINERS

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
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
DATA = {"dpo": preference_data, "sft": prompt_completions}


def editing(collator_class, edit):
    @dataclass
    class Editing(collator_class):
        def torch_call(self, examples):
            return edit(super().torch_call(examples))

    return Editing(0)


def common(task, model_dir, **options):
    return {"model": model_dir, "train_dataset": DATA[task](12, SEED), "steps": 2, **options}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("task", DATA)
def test_edits_of_a_collator_are_trained_on(model_dir, task, edit):
    expected, actual = (
        run(task, layout, **common(task, model_dir), data_collator=editing(collator_class, edit))
        for layout, collator_class in zip(("padded", "shared"), COLLATORS[task], strict=True)
    )
    assert_same(expected, actual)


@pytest.mark.parametrize("place", ["training_step", "_prepare_inputs", "collator"])
@pytest.mark.parametrize("task", DATA)
def test_later_edits_are_refused(model_dir, task, place):
    trainer_class = TRAINERS[task]

    class Stepping(trainer_class):
        def training_step(self, model, inputs, *args):
            return super().training_step(model, other_tokens(inputs), *args)

    class Preparing(trainer_class):
        def _prepare_inputs(self, inputs):
            return other_tokens(super()._prepare_inputs(inputs))

    @dataclass
    class Calling(COLLATORS[task][1]):
        def __call__(self, features, return_tensors=None):
            return other_tokens(super().__call__(features, return_tensors))

    trainer = {"training_step": Stepping, "_prepare_inputs": Preparing, "collator": trainer_class}[place]
    kwargs = {"data_collator": Calling(0)} if place == "collator" else {}
    with pytest.raises(EditedRowsError, match="were edited after .*: other tokens.*Edit them in `torch_call`"):
        run(task, "ours", trainer_class=trainer, **common(task, model_dir), **kwargs)


def test_edits_of_a_whole_whose_parts_are_computed_are_refused(model_dir):
    class Stepping(PaddingFreeDPOTrainer):
        def training_step(self, model, inputs, *args):
            return super().training_step(model, more_scored(inputs), *args)

    options = {"max_tokens_per_micro_batch": 100, "per_device_train_batch_size": 8}
    with pytest.raises(EditedRowsError, match="more or other tokens to score"):
        run("dpo", "ours", trainer_class=Stepping, **common("dpo", model_dir, **options))


@pytest.mark.parametrize("task", DATA)
def test_fewer_scored_tokens_of_a_whole_whose_parts_are_computed_are_refused(model_dir, task):
    trainer_class = TRAINERS[task]

    class Stepping(trainer_class):
        def training_step(self, model, inputs, *args):
            return super().training_step(model, nothing_scored(inputs), *args)

    with pytest.raises(EditedRowsError, match="or fewer where it runs in parts"):
        run(task, "ours", trainer_class=Stepping, **common(task, model_dir, **IN_PARTS))


@pytest.mark.parametrize(
    ("name", "change"), [("label", lambda inputs: ~inputs["label"]), ("own", lambda inputs: torch.ones(8))]
)
def test_values_beside_rows_whose_parts_are_computed_are_changed_in_the_collator(model_dir, name, change):
    class Stepping(PaddingFreeKTOTrainer):
        def training_step(self, model, inputs, *args):
            return super().training_step(model, {**inputs, name: change(inputs)}, *args)

    options = {"model": model_dir, "train_dataset": unpaired(16, SEED), "loss_type": "apo_zero_unpaired", "steps": 1}
    with pytest.raises(EditedRowsError, match=f"`{name}` of a micro-batch was added or changed after the collator"):
        run("kto", "ours", trainer_class=Stepping, **options, **IN_PARTS)


def test_inputs_that_lost_their_flat_batch_are_refused(model_dir):
    class Stepping(PaddingFreeSFTTrainer):
        def training_step(self, model, inputs, *args):
            return super().training_step(model, {"input_ids": inputs["input_ids"]}, *args)

    with pytest.raises(EditedRowsError, match=r"no `flat_batch`, only \['input_ids'\]"):
        run("sft", "ours", trainer_class=Stepping, **common("sft", model_dir))


def test_a_data_loader_of_ones_own_is_told_what_a_budget_needs(model_dir):
    class Loading(PaddingFreeSFTTrainer):
        def get_train_dataloader(self):
            size = self.args.per_device_train_batch_size
            return self.accelerator.prepare(DataLoader(self.train_dataset, size, collate_fn=self.data_collator))

    options = common("sft", model_dir)
    run("sft", "ours", trainer_class=Loading, **options)
    with pytest.raises(EditedRowsError, match="keeps_rows=True"):
        run("sft", "ours", trainer_class=Loading, **options, max_tokens_per_micro_batch=100)


def test_a_loss_that_parts_cannot_be_weighted_in_is_refused(model_dir):
    class Own(PaddingFreeSFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs, fused_lm_head=True, use_cache=False).loss

    run("sft", "ours", trainer_class=Own, **common("sft", model_dir))
    with pytest.raises(ValueError, match="`Own.compute_loss` does not call `super"):
        run("sft", "ours", trainer_class=Own, **common("sft", model_dir, **IN_PARTS))


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
    labels = torch.tensor([[-100, 2, 3], [-100, 5, -100]])
    assert edits(batch, labels=labels).tolist() == [False, False, True]
    assert edits(batch, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]])).tolist() == [False, True, False]
    assert edits(batch, attention_mask=torch.zeros(2, 3)).tolist() == [False] * 3
    assert edits(batch, torch.tensor([[1, 2, 3], [4, 8, 9]])).tolist() == [False] * 3  # what stands in the padding


# --- A loss of one's own -------------------------------------------------------------------------------------------

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3}


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_that_reads_the_models_own_trains_the_same(tokenizer, model_type, fused):
    def own(trainer_class):
        class Own(trainer_class):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                if not fused:
                    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
                    return outputs["loss"] + outputs.logits.float().logsumexp(-1)[:, 0].mean()
                return model(**inputs, fused_lm_head=True, use_cache=False).loss

        return Own

    def arguments():
        model = make_model(model_type, **(MOE if model_type == "mixtral" else {}))
        return {**common("sft", model), "processing_class": tokenizer}

    padded = run("sft", "padded", trainer_class=own(SFTTrainer), **arguments())
    assert_same(padded, run("sft", "shared", trainer_class=own(PaddingFreeSFTTrainer), **arguments()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_call_beside_the_flat_one_gives_hidden_states_of_rows(tokenizer, layout):
    """What the refusal of `output_hidden_states` recommends."""

    def own(trainer_class):
        class Own(trainer_class):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                rows = {name: value for name, value in inputs.items() if name != "flat_batch"}
                states = model(**rows, output_hidden_states=True).hidden_states[1]
                loss = model(**inputs, fused_lm_head=True, use_cache=False).loss
                return loss + states[:, 0].pow(2).mean()

        return Own

    def given():
        return {**common("sft", make_model()), "processing_class": tokenizer}

    padded = run("sft", "padded", trainer_class=own(SFTTrainer), **given())
    assert_same(padded, run("sft", layout, trainer_class=own(PaddingFreeSFTTrainer), **given()))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_and_loss_of_shared_rows_are_those_of_each_row(model_type):
    """Also of models whose own forward calls another backbone than TRL's head does (OPT)."""
    model = tiny_model(model_type, attn_implementation="eager")
    if model.base_model is model:
        model.base_model_prefix = "model"
    add_fused_lm_head(model)
    rows = tree(SEED)
    width = max(map(len, rows))
    labels = torch.tensor([([-100] * 3 + row[3:] + [-100] * width)[:width] for row in rows])
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
        FlatModel.install(model, choose_route(model))
        batch = FlatBatch.from_rows(rows, rows)
        without, outputs = model(flat_batch=batch).logits, model(flat_batch=batch, labels=labels)
    for row, logits, flat, beside_loss in zip(rows, alone, without, outputs.logits, strict=True):
        for ours in (flat, beside_loss):
            assert (ours[: len(row)] - logits).abs().max() < FLOAT32 * (1 + logits.abs().max())
            assert (ours[len(row) :] == 0).all()
    expected = torch.nn.functional.cross_entropy(without[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=FLOAT32)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("output_hidden_states", True, "has no `hidden_states` of rows"),
        ("output_attentions", True, "has no `attentions` of rows"),
        ("use_cache", True, "`use_cache` was given to the model beside a `flat_batch`"),
        ("position_ids", torch.zeros(1, 3), "`position_ids` was given to the model beside"),
        ("logits_to_keep", 1, "`logits_to_keep` was given to the model beside"),
    ],
)
def test_what_flat_outputs_cannot_give_is_named(argument, value, message):
    model = make_model()
    flat_model(model)
    batch = FlatBatch.from_rows([[1, 2, 3]], [[1, 2, 3]])
    with pytest.raises(ValueError, match=message):
        model(flat_batch=batch, **{argument: value})
    with pytest.raises(TypeError, match="by name"):
        model(torch.tensor([[1, 2, 3]]), flat_batch=batch)
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="has no `hidden_states` of rows"):
        model(flat_batch=batch)
