"""Rows that the user has tokenized: own lengths mean what they mean in TRL."""

import random

import pytest
from datasets import Dataset, LargeList, List, Value

from tests.helpers.tiny import SEED, make_model
from tests.runs import compare, run
from trl_paddingfree import LanguageModelingCollator


def rows(n=10, **columns):
    rng = random.Random(SEED)
    ids = [[rng.randrange(5, 69) for _ in range(rng.randint(2, 30))] for _ in range(n)]
    return [{"input_ids": row, **{name: make(row) for name, make in columns.items()}} for row in ids]


def train(dataset, tokenizer, **options):
    return run("sft", "ours", model=make_model(), train_dataset=dataset, processing_class=tokenizer, **options)


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
