"""Rows that the user has tokenized: bad ones are refused by number, own lengths mean what they mean in TRL."""

import random

import pytest
from datasets import Dataset, LargeList, List, Value

from tests.helpers.folders import missing, needs
from tests.helpers.tiny import SEED, make_model
from tests.runs import compare, run
from trl_paddingfree import LanguageModelingCollator


def rows(n=10, **columns):
    rng = random.Random(SEED)
    ids = [[rng.randrange(5, 69) for _ in range(rng.randint(2, 30))] for _ in range(n)]
    return [{"input_ids": row, **{name: make(row) for name, make in columns.items()}} for row in ids]


def train(dataset, tokenizer, **options):
    return run("sft", "ours", model=make_model(), train_dataset=dataset, processing_class=tokenizer, **options)


def changed(data, row, **columns):
    data[row] |= columns
    return data


BAD = {
    "floats": (
        [{"input_ids": [1.0, 2.5]}],
        r"`input_ids` of the train data is of type list<item: double>, and tokens are.* Cast them",
    ),
    "float labels": ([{"input_ids": [1, 2], "labels": [1.0, 2.0]}], "`labels` of the train data is of type list"),
    "nothing": (changed(rows(), 3, input_ids=None), "Row 3 of the train data: `input_ids` is None"),
    "labels too long": (
        changed(rows(labels=list), 4, input_ids=[5, 6], labels=[5, 6, 7]),
        "Row 4 of the train data: `labels` has 3 entries, `input_ids` has 2",
    ),
    "negative": (
        changed(rows(), 7, input_ids=[5, -1]),
        "`input_ids` of the train data has the token -1, and the model",
    ),
    "unknown": (changed(rows(), 7, input_ids=[5, 69]), "has the token 69, and the model has tokens 0 to 68"),
    "unknown label": (changed(rows(labels=list), 7, input_ids=[5], labels=[-7]), "`labels` of the train data has the"),
}


@needs("data_checks")
@pytest.mark.parametrize("name", BAD)
def test_bad_tokens_are_refused_by_row(tokenizer, name):
    data, message = BAD[name]
    for bad, skip in ((data, False), ([{"labels": row["input_ids"], **row} for row in data], True)):
        with pytest.raises(ValueError, match=message):
            train(Dataset.from_list(bad), tokenizer, dataset_kwargs={"skip_prepare_dataset": skip}, steps=1)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"input_ids": []}, "An empty row comes first: leave it out with `dataset.filter`"),
        ({"input_ids": [1.0, 2.0]}, "`input_ids` are of type torch.float32"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 2 `input_ids`, 1 `labels`"),
        ({"input_ids": [1, 2], "seq_lengths": [1]}, "`seq_lengths` that sum to 1"),
    ],
)
def test_the_collator_refuses_what_only_a_stream_can_still_bring(example, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelingCollator(0, padding_free=True)([example])


@pytest.mark.parametrize(("skip", "max_length"), [(False, None), (True, 12)], ids=["prepared", "as it is"])
def test_own_lengths_without_packing_are_ignored_as_in_trl(tokenizer, skip, max_length):
    data = Dataset.from_list(rows(labels=list, seq_lengths=lambda row: [1, len(row) - 1]))
    options = {"max_length": max_length, "dataset_kwargs": {"skip_prepare_dataset": skip}, "eval_strategy": "steps"}
    options |= {"steps": 1, "eval_steps": 1, "eval_dataset": {"some": data}, "processing_class": tokenizer}
    ours = {}
    for _ in range(2):  # the second time with the collator of the first trainer, which is flat
        trainer = compare("sft", lambda: {"model": make_model()}, data, "flat", ours=ours, **options).ours.trainer
        ours["data_collator"] = trainer.data_collator


@pytest.mark.parametrize("kind", [List(Value("int64"), length=12), LargeList(Value("int32"))], ids=["fixed", "large"])
def test_tokens_in_lists_of_another_kind_train_as_in_trl(tokenizer, kind):
    rng = random.Random(SEED)
    data = Dataset.from_list([{"input_ids": [rng.randrange(5, 69) for _ in range(12)]} for _ in range(8)])
    data = data.cast_column("input_ids", kind)
    compare("sft", lambda: {"model": make_model()}, data, "flat", steps=2, processing_class=tokenizer)
    if missing("data_checks"):
        return
    with pytest.raises(ValueError, match="has the token 69, and the model has tokens 0 to 68"):
        train(Dataset.from_list([{"input_ids": [69] * 12}]).cast_column("input_ids", kind), tokenizer, steps=1)
