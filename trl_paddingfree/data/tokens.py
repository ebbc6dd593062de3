"""Instruction data that the user has tokenized: what is refused, with the row and the fix."""

from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from pyarrow import types

from ..flat.batch import IGNORE_INDEX
from .preferences import column_names

_FIX = "Correct the row, or leave it out with `dataset.filter`."


def refuse_bad_tokens(dataset: Any, name: str) -> None:
    """
    Refuse tokenized data whose columns do not fit each other. One pass over the lengths of the rows.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            Data as the user gave it. A streaming data set is looked at by the collator, batch by batch.
        name (`str`):
            Name of the data in messages.

    Raises:
        `ValueError`: Naming the column, and the row if only some rows are wrong.
    """
    if not _is_tokenized(dataset):
        return
    columns = [column for column in ("input_ids", "labels") if column in dataset.column_names]
    for column in columns:
        kind = dataset.features.arrow_schema.field(column).type
        if not (types.is_list(kind) or types.is_large_list(kind)) or not types.is_integer(kind.value_type):
            raise ValueError(
                f"`{column}` of the {name} data is of type {kind}, and tokens are lists of whole numbers. Cast them "
                f"with `dataset.cast_column('{column}', List(Value('int64')))`."
            )
    lengths = [_lengths(dataset, column) for column in columns]
    for column, of_column in zip(columns, lengths, strict=True):
        if (missing := np.flatnonzero(of_column < 0)).size:
            raise ValueError(f"Row {missing[0]} of the {name} data: `{column}` is None. {_FIX}")
    if (wrong := np.flatnonzero(lengths[0] != lengths[-1])).size:
        row = wrong[0]
        raise ValueError(
            f"Row {row} of the {name} data: `labels` has {lengths[1][row]} entries, `input_ids` has {lengths[0][row]}: "
            f"there is one label for each token, -100 where it is not learnt. {_FIX}"
        )


def refuse_unknown_tokens(dataset: Any, name: str, vocab_size: int) -> None:
    """
    Refuse tokenized data with tokens that the model does not have.

    Args:
        dataset (`Dataset` or `IterableDataset`), name (`str`):
            As for [`refuse_bad_tokens`], which comes first.
        vocab_size (`int`):
            Number of the model's embeddings.

    Raises:
        `ValueError`: Naming the column and the token.
    """
    if not _is_tokenized(dataset):
        return
    columns = [column for column in ("input_ids", "labels") if column in dataset.column_names]
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=10_000):
        for column in columns:
            tokens = pc.list_flatten(table[column])
            if column == "labels":
                tokens = tokens.filter(pc.not_equal(tokens, IGNORE_INDEX))
            least, most = pc.min_max(tokens).as_py().values()
            if least is not None and not 0 <= least <= most < vocab_size:
                raise ValueError(
                    f"`{column}` of the {name} data has the token {least if least < 0 else most}, and the model has "
                    f"tokens 0 to {vocab_size - 1}. Tokenize with the model's own tokenizer."
                )


def _is_tokenized(dataset: Any) -> bool:
    is_plain = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"  # a transform makes rows anew
    return is_plain and "input_ids" in column_names(dataset)


def _lengths(dataset: Dataset, column: str) -> np.ndarray:
    """`(rows,)` int64: number of tokens in each row, -1 where there is none."""
    tables = dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
    lengths = [pc.fill_null(pc.list_value_length(table[column]), -1).to_numpy() for table in tables]
    return np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)


def without_lengths(dataset: Any) -> Any:
    """Data that nobody has packed, without a column `seq_lengths` of the user's own, which padded TRL does not read."""
    return dataset.remove_columns("seq_lengths") if "seq_lengths" in column_names(dataset) else dataset
