"""Rows of a stream, looked at as they are drawn: a bad one is named by its number before anything computes it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from datasets import IterableDataset

from ..core.data.lengths import AnyDataset, Example
from .columns import refuse_wrong_row
from .validate import refuse_unknown_tokens_of

Look = Callable[[Example, int], Example]  # raises an error for a bad row, of this number; changes nothing


def _looked_at(stream: IterableDataset, look: Look) -> IterableDataset:
    return stream.map(look, with_indices=True, features=stream.features)


def with_rows_checked(dataset: AnyDataset, name: str, read: Mapping[str, str]) -> AnyDataset:
    """A stream that refuses rows with wrong values, by the columns that are `read` and what they hold."""
    if not isinstance(dataset, IterableDataset) or not read:
        return dataset
    return _looked_at(dataset, partial(_look_at_values, name=name, read=read))


def with_tokens_checked(dataset: AnyDataset, name: str, columns: Sequence[str], size: int, known: str) -> AnyDataset:
    """A stream that refuses tokens beyond the `size` rows of a model's embeddings, and says which are `known`."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    return _looked_at(dataset, partial(_look_at_tokens, name=name, columns=columns, size=size, known=known))


def _look_at_values(example: Example, index: int, name: str, read: Mapping[str, str]) -> Example:
    refuse_wrong_row(example, index, name, read)
    return {}


def _look_at_tokens(example: Example, index: int, name: str, columns: Sequence[str], size: int, known: str) -> Example:
    refuse_unknown_tokens_of(example, f"Row {index} of the {name} data: `{{column}}`", columns, size, known)
    return {}
