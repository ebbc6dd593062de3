"""Collators that pad, of transformers and of the user's own: SFT takes them, and gives padded TRL's figures."""

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    default_data_collator,
)
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.reward_trainer import DataCollatorForPreference as DataCollatorForReward
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TrlCollator

from tests.helpers.architectures import tiny_model
from tests.helpers.folders import STATES
from tests.helpers.tiny import DATA, SEED, arguments, different_pairs, following_rotary, make_model, make_tokenizer
from tests.runs import compare, make_trainer
from trl_paddingfree import PreferenceCollator

LENGTHS = (5, 9, 12, 7, 3, 11, 8, 6)
COLUMNS = {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}


def rows(lengths=LENGTHS):
    """Tokens, some of which rows start alike with, and labels without those of prompts."""
    rng = random.Random(SEED)
    ids = [[7, 8, *(rng.randrange(5, 60) for _ in range(n - 2))] for n in lengths]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in ids]


def tokenizer(side):
    made = make_tokenizer()
    made.padding_side = side
    return made


def padded_rows(side="right", dtype=int):
    """Rows that were padded when they were tokenized."""
    padded, width = [], max(LENGTHS)
    for row in rows():
        n = len(row["input_ids"])
        fill = {"input_ids": [0], "labels": [-100], "attention_mask": [dtype(0)]}
        given = {**row, "attention_mask": [dtype(1)] * n}
        more = {name: x * (width - n) for name, x in fill.items()}
        padded.append({k: x + more[k] if side == "right" else more[k] + x for k, x in given.items()})
    return Dataset.from_list(padded)


def documents(examples, width=16):
    """A function of the user's that fills two rows, without a mask: positions tell where documents begin."""
    half = len(examples) // 2
    batch = {"input_ids": [], "labels": [], "position_ids": []}
    for chosen in (examples[:half], examples[half:]):
        joined = {
            "input_ids": [x for each in chosen for x in each["input_ids"]],
            "labels": [x for each in chosen for x in (-100, *each["labels"][1:])],
            "position_ids": [i for each in chosen for i in range(len(each["input_ids"]))],
        }
        for name, values in joined.items():
            batch[name].append(values[:width] + list(range(width - len(values))) * (name == "position_ids"))
            batch[name][-1] += [-100 if name == "labels" else 0] * (width - len(batch[name][-1]))
    return {name: torch.tensor(values) for name, values in batch.items()}


def own(examples, side="right", given=()):
    """A function of the user's: `given` names what it gives beside tokens and labels."""
    length = max(len(example["input_ids"]) for example in examples)
    batch = {name: torch.full((len(examples), length), fill) for name, fill in (("input_ids", 0), ("labels", -100))}
    mask = torch.zeros(len(examples), length, dtype=torch.bool if "bool" in given else torch.long)
    for row, example in enumerate(examples):
        n = len(example["input_ids"])
        place = slice(0, n) if side == "right" else slice(length - n, length)
        batch["input_ids"][row, place] = torch.tensor(example["input_ids"])
        batch["labels"][row, place] = torch.tensor(example["labels"])
        mask[row, place] = 1
    positions = {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)} if "positions" in given else {}
    return {**batch, "attention_mask": mask, **positions}


@dataclass
class Subclass(TrlCollator):
    """Of TRL's own, as users write one."""

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        batch["labels"][:, :4] = -100
        return batch


# By name: a collator, given the side of padding, the data if not plain rows, and options
COLLATORS = {
    "seq2seq": (lambda side: DataCollatorForSeq2Seq(tokenizer(side)), None, {}),
    "seq2seq, of 8": (lambda side: DataCollatorForSeq2Seq(tokenizer(side), pad_to_multiple_of=8), None, {}),
    "seq2seq, of max_length": (
        lambda side: DataCollatorForSeq2Seq(tokenizer(side), padding="max_length", max_length=20),
        None,
        {},
    ),
    "padding": (
        lambda side: DataCollatorWithPadding(tokenizer(side), pad_to_multiple_of=4),
        lambda side: Dataset.from_list(rows([8] * 8)),
        {},
    ),
    "language modeling": (
        lambda side: DataCollatorForLanguageModeling(tokenizer("right"), mlm=False),
        lambda side: Dataset.from_list(rows()).remove_columns("labels"),
        COLUMNS,
    ),
    "flattening": (lambda side: DataCollatorWithFlattening(), None, {}),
    "flattening, for kernels": (
        lambda side: DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=2
        ),
        None,
        {},
    ),
    "default": (lambda side: default_data_collator, padded_rows, COLUMNS),
    "default, boolean": (lambda side: default_data_collator, partial(padded_rows, dtype=bool), COLUMNS),
    "own": (lambda side: partial(own, side=side), None, {}),
    "own, boolean with positions": (lambda side: partial(own, side=side, given=("bool", "positions")), None, {}),
    "own, documents": (lambda side: documents, None, {}),
    "TRL's, changed": (lambda side: Subclass(pad_token_id=0), None, {}),
}
TRAINED = [(name, side) for name in COLLATORS for side in ("right", "left")]
WAYS = {
    "": {},
    "in parts": {"max_tokens_per_micro_batch": 14},
    "in slices": {"max_tokens_per_micro_batch": 7},
    "planned": {"memory_budget": 8},
}


def compared(name, side="right", model=make_model, **options):
    make, data, of_collator = COLLATORS[name]
    dataset = Dataset.from_list(rows()) if data is None else data(side)
    given = {"train_dataset": dataset, "eval_dataset": dataset.select(range(3)), "eval_strategy": "steps"}
    given |= {"eval_steps": 2, "per_device_eval_batch_size": 2, **of_collator, **options}
    return compare("sft", lambda: {**arguments("sft", model=model()), "data_collator": make(side)}, **given)


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("name", "side"), TRAINED)
def test_collators_that_pad_give_padded_trls_figures(name, side):
    found = compared(name, side)
    counts = found.ours.trainer.total_counts()
    assert counts.computed <= counts.real <= counts.padded
    assert found.ours.log_history[0]["num_tokens"] == found.padded.log_history[0]["num_tokens"]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("way", [way for way in WAYS if way])
@pytest.mark.parametrize("name", ["seq2seq", "flattening", "own, documents", "own, boolean with positions"])
def test_they_run_within_budgets(name, way):
    side = random.Random(f"{SEED} {name} {way}").choice(["right", "left"])
    compared(name, side, layouts="flat", ours=WAYS[way])


# Of models that tell positions, or padding, in ways of their own
MODELS = {
    "absolute positions": ("seq2seq", "left", "gpt2", dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)),
    "positions by mask": ("seq2seq", "left", "opt", {"dropout": 0.0}),
    "positions by mask, given": ("own, boolean with positions", "left", "opt", {"dropout": 0.0}),
    "sliding windows": ("seq2seq", "left", "gemma3_text", {}),
    "experts": ("seq2seq", "left", "mixtral", {"output_router_logits": True}),
    "experts, documents": ("flattening", "right", "mixtral", {"output_router_logits": True}),
    "a state": ("seq2seq", "right", "lfm2", {}),
}
MODELS |= {
    f"rotary, {kind}, {side}": (name, side, "llama", following_rotary(24, kind))
    for kind in ("dynamic", "longrope")
    for side, name in (("left", "seq2seq, of 32"), ("right", "seq2seq, of 32"))
}
COLLATORS["seq2seq, of 32"] = (lambda side: DataCollatorForSeq2Seq(tokenizer(side), pad_to_multiple_of=32), None, {})


@pytest.mark.drawn(4)
@pytest.mark.parametrize("named", [pytest.param(x, marks=STATES) if x == "a state" else x for x in MODELS])
def test_positions_and_padding_are_the_models(named):
    name, side, model_type, overrides = MODELS[named]
    made = tiny_model if model_type == "lfm2" else make_model  # of few layers, with both kinds among them
    compared(name, side, lambda: made(model_type, **overrides), steps=2)


def mean_of_logits(outputs, labels, num_items_in_batch=None):
    """A loss of the user's own, of rows as the collator gave them."""
    scored = labels[:, 1:] != -100
    picked = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return -(picked * scored).sum() / scored.sum().clamp(min=1)


def shapes_and_sums(prediction):
    kept = prediction.label_ids != -100
    return {"kept": int(kept.sum()), "columns": kept.shape[1], "sum": float(np.abs(prediction.predictions[kept]).sum())}


OPTIONS = {
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "workers": {"dataloader_num_workers": 1},
    "stream": {"train_dataset": Dataset.from_list(rows()).to_iterable_dataset()},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "a loss": {"compute_loss_func": mean_of_logits},
    "metrics": {"compute_metrics": shapes_and_sums},
    "dft": {"loss_type": "dft"},
}


@pytest.mark.trl_1
@pytest.mark.drawn(5)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["seq2seq", "flattening", "own, documents"])
def test_options_read_rows_as_the_collator_gave_them(name, option):
    side = "right" if name != "seq2seq" else random.Random(f"{SEED} {option}").choice(["right", "left"])
    compared(name, side, layouts="flat", steps=2, **OPTIONS[option])


def test_examples_move_between_micro_batches_of_a_given_collator():
    """Whose labels are all of its tokens: with one loss for a step, it does not matter which examples share a batch."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "steps": 2}
    figures = ("entropy", "mean_token_accuracy")
    compared("seq2seq", layouts="flat", ours={"arrange_micro_batches": "tokens"}, ignored=figures, **options)


# --- other trainers ---------------------------------------------------------------------------------------------------


def left_out(base):
    """A subclass of a collator of TRL's, as users write one: it swaps a token, and has an `__init__` of its own."""

    class Own(base):
        def __init__(self, note):
            super().__init__(pad_token_id=0)
            self.note = note

        def torch_call(self, examples):
            batch = super().torch_call(examples)
            batch["input_ids"][batch["input_ids"] == 7] = 9
            return batch

    return Own("no field of a dataclass")


@pytest.mark.parametrize(
    ("task", "base"),
    [("dpo", DataCollatorForPreference), ("reward", DataCollatorForReward), ("kto", DataCollatorForUnpairedPreference)],
)
def test_subclasses_of_trls_collators_are_taken_by_all_trainers(task, base):
    data = different_pairs if task == "reward" else DATA[task]  # rounding decides which of two equal rows is better
    options = {"train_dataset": data(8, SEED), "steps": 2}
    found = compare(task, lambda: {**arguments(task), "data_collator": left_out(base)}, **options)
    assert found.ours.trainer.data_collator.note == "no field of a dataclass"
    options |= {"layouts": "flat", "ours": {"max_tokens_per_micro_batch": 60}}
    compare(task, lambda: {**arguments(task), "data_collator": left_out(base)}, **options)


# --- what is refused --------------------------------------------------------------------------------------------------


def giving(edit, collate=own):
    """A collator whose batch is edited by a function."""

    def edited(examples):
        return edit(collate(examples))

    return edited


def with_hole(batch):
    batch["attention_mask"][1, 3] = 0
    return batch


def without(*names):
    return lambda batch: {name: value for name, value in batch.items() if name not in names}


def tokens_of(batch):
    """Labels of all that is no padding, as transformers' collator for language modeling gives them."""
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def restarting(batch):
    return {**batch, "position_ids": torch.tensor([0, 1, 0]).repeat(8)[: batch["input_ids"].size(1)].expand(4, -1)}


# By name: the collator, and what the message says
REFUSED = {
    "no labels": (giving(without("labels")), r"gives no `labels`, only \['input_ids', 'attention_mask'\]"),
    "neither mask nor positions": (giving(without("attention_mask")), "neither an `attention_mask` nor `position_ids`"),
    "a mask of four dimensions": (
        giving(lambda batch: {**batch, "attention_mask": batch["attention_mask"][:, None, None]}),
        r"`attention_mask` of shape \(4, 1, 1, \d+\) for `input_ids` of shape",
    ),
    "embeddings": (
        giving(lambda batch: {**batch, "inputs_embeds": torch.zeros(4, 12, 64)}),
        "gives `inputs_embeds`, and a flat batch is made of tokens",
    ),
    "pixels": (
        giving(lambda batch: {**batch, "pixel_values": torch.zeros(4, 3, 8, 8)}),
        "gives `pixel_values`, .* the dataset's column `image` or `images`",
    ),
    "a hole": (giving(with_hole), "Row 1 of `attention_mask` has padding between its tokens"),
    "labels on padding": (
        giving(lambda batch: {**batch, "labels": batch["input_ids"].clone()}),
        "`labels` that score padding in row .* set labels to -100",
    ),
    "a first token that padding predicts": (
        giving(lambda batch: {**batch, "labels": tokens_of(batch)}, partial(own, side="left")),
        "padding on its left would predict.* `tokenizer.padding_side = 'right'`",
    ),
    "positions that restart beside a mask": (giving(restarting), "do not count row 0 up one by one"),
    "lists": (giving(lambda batch: {n: x.tolist() for n, x in batch.items()}), "`input_ids` of type list, not a ten"),
    "arrays": (partial(DataCollatorForSeq2Seq(tokenizer("right")), return_tensors="np"), "of type ndarray, not a ten"),
    "floats": (giving(lambda batch: {**batch, "labels": batch["labels"].float()}), "`labels` of type torch.float32"),
    "a document's first token": (
        giving(lambda batch: {**batch, "labels": batch["input_ids"]}, documents),
        "gives a label to token .* of row 0, the first of a document",
    ),
    "other documents": (
        giving(lambda batch: {**batch, "cu_seq_lens_q": torch.tensor([0, 16, 32])}, documents),
        "gives `cu_seq_lens_q` of documents that differ",
    ),
    "a mask and documents": (
        giving(lambda batch: {**batch, "seq_idx": batch["attention_mask"]}),
        "gives an `attention_mask` and `seq_idx`",
    ),
    "a class": (DataCollatorForSeq2Seq, "is the class DataCollatorForSeq2Seq"),
    "another trainer's": (PreferenceCollator(pad_token_id=0), "is a PreferenceCollator"),
}


def batches(collate, **given):
    trainer = make_trainer("sft", "ours", train_dataset=Dataset.from_list(rows()), data_collator=collate, **given)
    yield from trainer.get_train_dataloader()


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_another_meaning_is_refused_by_name(name):
    collate, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        next(batches(collate))


@STATES
def test_padding_on_the_left_of_layers_that_carry_a_state_is_refused():
    given = batches(DataCollatorForSeq2Seq(tokenizer("left")), **arguments("sft", model=tiny_model("lfm2")))
    with pytest.raises(ValueError, match=r"\(DataCollatorForSeq2Seq\) pads row \d on the left, and the model carries"):
        next(given)


@pytest.mark.parametrize("task", ["dpo", "reward", "kto"])
def test_other_trainers_say_which_collators_they_take(task):
    for collate, given in ((default_data_collator, "a function"), (DataCollatorForSeq2Seq(None), "a DataCollatorFor")):
        message = f"`data_collator` is {given}.*derives from TRL's `DataCollatorFor\\w+`, or from `trl_paddingfree"
        with pytest.raises(ValueError, match=message):
            make_trainer(task, "ours", data_collator=collate)
