"""Lengths of examples in tokens, and the work of computing them."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from datasets import Dataset, IterableDataset
from pyarrow.compute import fill_null, list_value_length

AnyDataset: TypeAlias = Dataset | IterableDataset
Example = dict[str, Any]  # a row of a dataset, by its columns


def has_known_lengths(dataset: AnyDataset, columns: Collection[str] = ()) -> bool:
    """
    Whether all lengths are known before training: not for a stream, or a dataset with a transform, or without the
    `columns` of tokens, which a collator may make.
    """
    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom" and {*columns} <= {*dataset.column_names}


def column_names(dataset: AnyDataset) -> list[str]:
    """The columns of a dataset. Those of a stream may have to be read from its first example."""
    return dataset.column_names or list(next(iter(dataset), {}))


def has_images(dataset: Any) -> bool:
    """Whether TRL treats a dataset as one with images. Anything but a dataset is left for TRL to reject."""
    return isinstance(dataset, Dataset | IterableDataset) and not {"image", "images"}.isdisjoint(column_names(dataset))


def tables_of(dataset: AnyDataset, *columns: str, rows: int = 10_000) -> Iterator[Any]:
    """Columns of a dataset as Arrow tables of up to `rows` rows, without decoding anything."""
    return dataset.select_columns([*columns]).with_format("arrow").iter(batch_size=rows)


def token_lengths(dataset: Dataset, columns: Sequence[str]) -> np.ndarray:
    """`(examples, columns)` int64: number of tokens in each column of a dataset, -1 where there is none."""
    lengths = [
        [fill_null(list_value_length(table[column]), -1).to_numpy() for column in columns]
        for table in tables_of(dataset, *columns)
    ]
    return np.concatenate([np.zeros((len(columns), 0)), *lengths], 1).T.astype(np.int64)


def truncated(lengths: np.ndarray, max_length: int | None, truncation_mode: str) -> np.ndarray:
    """
    `(examples, 1 + completions)` int64: tokens of the prompt and of each completion, once each row (the prompt and a
    completion) is cut to at most `max_length` tokens.

    With `"keep_end"`, the rows of an example that is cut keep different ends of the prompt, unless its completions are
    equally long. They then share nothing: the prompt counts 0 tokens, and each completion those of its whole row.
    """
    if max_length is None:
        return lengths
    prompt, completions = lengths[:, :1], lengths[:, 1:]
    is_there, whole = completions >= 0, row_lengths(lengths)
    rows = np.minimum(whole, max_length)
    if truncation_mode == "keep_start":
        shared = np.minimum(prompt, max_length)
    else:
        is_cut = (rows < whole).any(1, keepdims=True)
        longest = completions.max(1, keepdims=True)
        are_equal = ((completions == longest) | ~is_there).all(1, keepdims=True)
        room = np.maximum(max_length - longest, 0)  # what equal completions leave to the prompt
        shared = np.where(is_cut, are_equal * room, prompt)
    return np.concatenate([shared, np.where(is_there, rows - shared, -1)], 1)


def row_lengths(lengths: np.ndarray) -> np.ndarray:
    """
    `(examples, rows)` int64: tokens of each row of each example, 0 for one that is not there. `lengths` as in
    [`example_tokens`].
    """
    return lengths if lengths.shape[1] == 1 else np.where(lengths[:, 1:] < 0, 0, lengths[:, :1] + lengths[:, 1:])


def example_tokens(lengths: np.ndarray, prefix_sharing: bool) -> np.ndarray:
    """
    `(examples,)` int64: tokens to compute for each example. `lengths` are the tokens of its prompt and of each
    completion, `(examples, 1 + completions)`, or of its only row, `(examples, 1)`. Examples may have different numbers
    of completions: the length of one that is not there is -1. A shared prompt is computed once, except for its last
    token.
    """
    inherited = np.maximum(lengths[:, 0] - 1, 0) if prefix_sharing else 0
    return row_lengths(lengths).sum(1) - _repeats(lengths) * inherited


def example_work(lengths: np.ndarray, prefix_sharing: bool, hidden_size: int) -> np.ndarray:
    """
    Work of each example, with `lengths` as in [`example_tokens`], in units of one token through the linear layers.

    A transformer layer has about `12 h^2` weights, `24 h^2` operations per token; causal attention of a sequence of `n`
    tokens adds `2 h n^2`, so `n^2 / 12 h` in these units (Kaplan et al., 2020, table 1).
    """
    rows = row_lengths(lengths)
    inherited = lengths[:, 0] ** 2 if prefix_sharing else 0
    squares = (rows**2).sum(1) - _repeats(lengths) * inherited
    return example_tokens(lengths, prefix_sharing) + squares / (12 * hidden_size)


def _repeats(lengths: np.ndarray) -> np.ndarray | int:
    """How often the prompt of each example is repeated in its rows."""
    return np.maximum((lengths[:, 1:] >= 0).sum(1) - 1, 0)
