"""What columns of raw data must hold, for every task: wrong values are named by row and column before models load."""

from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as short
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import LargeList, List, Value
from pyarrow import types

from ..core.data.lengths import AnyDataset, Example, has_known_lengths, tables_of
from ..core.data.task import Task
from ..messages import message_problem

FIX = "Correct the row, or leave it out with `dataset.filter`."
_LABELS = "`True` or `False`"
_NUMBER = "a number"
_MESSAGES = "a list of messages, each with a `role` and a `content`"
_TEXT = "a string"
_BOTH = f"{_TEXT}, or {_MESSAGES}"
# What each column holds, by its name
_HOLDS = {**dict.fromkeys(("prompt", "chosen", "rejected", "completion"), _BOTH), "label": _LABELS, "margin": _NUMBER}
# Rows of a kind that has no other test, whose values are looked at one by one
_LOOKED_AT = 1_000


def refuse_wrong_values(dataset: AnyDataset, name: str, task: Task, text_field: str = "text") -> None:
    """
    Refuse raw data with values that `task` cannot read, by row and column: numbers in place of text, conversations
    without messages, words in place of labels, a prompt in text beside completions in messages. Of a stream, and of
    data with a transform, the first row is looked at.
    """
    columns = dataset.column_names or list(next(iter(dataset), {}))
    read = columns_read(columns, task, text_field)
    if not has_known_lengths(dataset):
        refuse_wrong_row(next(iter(dataset), {}), 0, name, read)
        return
    for column, holds in read.items():
        for row, value in _suspects(dataset, column, holds):
            if problem := _problem(value, holds):
                raise _refused(name, row, column, problem, holds)
    if len(dataset):
        _refuse_mixed(name, 0, dataset.with_format(None)[0], read)


def refuse_wrong_row(row: Example, number: int, name: str, read: Mapping[str, str]) -> None:
    """Refuse one row with values that cannot be read, by the columns that are `read` and what they must hold."""
    for column, holds in read.items():
        if column in row:
            if row[column] is None and holds != _NUMBER:
                raise ValueError(f"Row {number} of the {name} data: `{column}` is None. {FIX}")
            if problem := _problem(row[column], holds):
                raise _refused(name, number, column, problem, holds)
    _refuse_mixed(name, number, row, read)


def columns_read(columns: Sequence[str], task: Task, text_field: str) -> dict[str, str]:
    """The columns that a task reads as they are, and what they must hold; none if the data has tokens already."""
    tokens = {*task.token_columns, "input_ids", "chosen_input_ids"}
    if not tokens.isdisjoint(columns):
        return {}
    if task.name != "sft":
        read = {*columns} & {"prompt", *task.reads}  # others are for reward functions, or for nobody
        return {column: holds for column, holds in _HOLDS.items() if column in read}
    if {text_field, "messages"} <= {*columns} and "completion" not in columns:  # TRL goes by what the messages are
        return {}
    formats = ({"prompt": _BOTH, "completion": _BOTH}, {"messages": _MESSAGES}, {text_field: _TEXT})
    return next((each for each in formats if {*columns}.issuperset(each)), {})


def _problem(value: object, holds: str) -> str:
    """What is wrong with a value; empty if nothing is. `None` is refused elsewhere."""
    if value is None:
        return ""
    if holds == _LABELS:
        return "" if isinstance(value, bool | int | float) and value in (0, 1) else short(value)
    if holds == _NUMBER:
        return "" if isinstance(value, int | float) else short(value)
    if isinstance(value, str):
        return f"{short(value)}, a string" if holds == _MESSAGES else ""
    return short(value) if holds == _TEXT else message_problem(value)


def _suspects(dataset: Any, column: str, holds: str) -> Iterator[tuple[int, Any]]:
    """Rows of a column that may be wrong, with their values: most are told from whole columns, without decoding any."""
    feature, kind = dataset.features[column], dataset.features.arrow_schema.field(column).type
    is_text = isinstance(feature, Value) and (types.is_string(kind) or types.is_large_string(kind))
    if is_text and holds in (_TEXT, _BOTH) or types.is_boolean(kind) and holds == _LABELS:
        return
    plain, number = dataset.with_format(None), 0
    for table in tables_of(dataset, column):
        values = table[column].combine_chunks()
        values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        suspects: Any = range(min(len(values), max(_LOOKED_AT - number, 0)))
        if isinstance(feature, List | LargeList) and holds != _TEXT:
            suspects = _wrong_conversations(values)
        elif holds == _LABELS and (types.is_integer(kind) or types.is_floating(kind)):
            suspects = np.flatnonzero(~pc.is_in(pc.cast(values, pa.float64()), pa.array([0.0, 1.0])).to_numpy(False))
        for row in suspects:
            yield number + int(row), plain[number + int(row)][column]
        number += len(values)


def _wrong_conversations(values: Any) -> Any:
    """Which of the rows of lists are empty, or have an entry that may be no message."""
    entries, parents = pc.list_flatten(values), pc.list_parent_indices(values).to_numpy(False)
    wrong = pc.fill_null(pc.equal(pc.list_value_length(values), 0), False).to_numpy(False)
    names = entries.type.names if types.is_struct(entries.type) else []
    if not {"role", "content"} <= {*names}:
        wrong = np.ones(len(values), bool)
    else:
        kind, role = entries.type.field("content").type, entries.type.field("role").type
        is_read = types.is_string(kind) or types.is_large_string(kind) or types.is_list(kind)
        nothing = np.ones(len(entries), bool)
        if is_read and (types.is_string(role) or types.is_large_string(role)):
            nothing = pc.is_null(pc.struct_field(entries, "content")).to_numpy(False)
        nothing = nothing | pc.is_null(pc.struct_field(entries, "role")).to_numpy(False)
        wrong[parents[nothing]] = True
    return np.flatnonzero(wrong)


def _refuse_mixed(name: str, number: int, row: Example, read: Mapping[str, str]) -> None:
    """Refuse text beside messages in a row, as TRL goes by one of the columns."""
    values = {column: row.get(column) for column, holds in read.items() if holds == _BOTH}
    kinds = {column: type(value).__name__ for column, value in values.items() if value is not None}
    if len({*kinds.values()}) > 1:
        each = ", ".join(f"`{column}` is a {kind}" for column, kind in kinds.items())
        raise ValueError(
            f"Row {number} of the {name} data: {each}. All of a row's texts must be strings, or all lists of messages. "
            f"{FIX}"
        )


def _refused(name: str, row: int, column: str, problem: str, holds: str) -> ValueError:
    return ValueError(f"Row {row} of the {name} data: `{column}` is {problem}. It must be {holds}. {FIX}")
