"""Rows that the user has tokenized: bad ones are refused by number."""

import pytest
from datasets import Dataset, LargeList, List, Value

from tests.core.trainers.test_tokenized import rows, train


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


@pytest.mark.parametrize("name", BAD)
def test_bad_tokens_are_refused_by_row(tokenizer, name):
    data, message = BAD[name]
    for bad, skip in ((data, False), ([{"labels": row["input_ids"], **row} for row in data], True)):
        with pytest.raises(ValueError, match=message):
            train(Dataset.from_list(bad), tokenizer, dataset_kwargs={"skip_prepare_dataset": skip}, steps=1)


@pytest.mark.parametrize("kind", [List(Value("int64"), length=12), LargeList(Value("int32"))], ids=["fixed", "large"])
def test_lists_of_another_kind_are_looked_at_as_any(tokenizer, kind):
    data = Dataset.from_list([{"input_ids": [69] * 12}]).cast_column("input_ids", kind)
    with pytest.raises(ValueError, match="has the token 69, and the model has tokens 0 to 68"):
        train(data, tokenizer, steps=1)
