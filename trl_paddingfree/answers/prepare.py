"""TRL's preparation of pairs, for prompts with several answers: once per answer, whatever the number of pairs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers.utils import logging

from ..core.data.lengths import AnyDataset, Example
from ..core.flat.segments import common_prefix
from ..core.versions import MovedNameError
from .collate import PAIRS, STARTS, pairs_of, rows_of
from .examples import Choice, as_pair, columns_of_answers, parsed

logger = logging.get_logger(__name__)

RowFunction = Callable[[Example], Any]
# Columns that are counted and dropped: of each prompt, the pairs that its answers make, and those of equal answers
_MADE, _EQUAL = "made", "equal"


@dataclass
class NotedPreparation:
    """
    Stands in for a dataset while TRL prepares it, and notes what TRL does with a row: the functions that it maps, and
    then those by which it filters. Its only row is the `example`.
    """

    example: Example
    maps: list[RowFunction] = field(default_factory=list)
    filters: list[RowFunction] = field(default_factory=list)

    def __iter__(self) -> Iterator[Example]:
        yield self.mapped(self.example)

    @property
    def column_names(self) -> list[str]:
        """The columns of its row."""
        return [*next(iter(self))]

    def map(self, function: Callable, fn_kwargs: Mapping[str, Any] | None = None, **options: Any) -> "NotedPreparation":
        """Note a function of TRL's. Refuses what would be of more than one row."""
        if self.filters or options.keys() - {"num_proc", "desc"}:
            raise MovedNameError("trl", "_prepare_dataset", "map of single rows, followed by filters", __name__)
        self.maps.append(_called_with(function, fn_kwargs))
        return self

    def filter(self, function: Callable, fn_kwargs: Mapping[str, Any] | None = None, **_: Any) -> "NotedPreparation":
        """Note a filter of TRL's."""
        self.filters.append(_called_with(function, fn_kwargs))
        return self

    def mapped(self, example: Example) -> Example:
        """What TRL's functions make of an example, as `map` of a dataset does it."""
        for function in self.maps:
            example = {**example, **function(dict(example))}
        return example


def _called_with(function: Callable, fn_kwargs: Mapping[str, Any] | None) -> RowFunction:
    return lambda example: function(example, **(fn_kwargs or {}))


@dataclass
class Preparation:
    """
    Prepares datasets of prompts with their answers as TRL does: the tokens of each answer, and the pairs that train.

    Args:
        prepare (`Callable`):
            TRL's preparation, given a [`NotedPreparation`] in place of a dataset.
        choice ([`~trl_paddingfree.answers.examples.Choice`]):
            Which pairs train. Those that TRL drops for their length do not.
        name (`str`):
            What the dataset is called.
        num_proc (`int`, *optional*):
            TRL's `dataset_num_proc`.
    """

    prepare: Callable[[Any], Any]
    choice: Choice
    name: str
    num_proc: int | None = None

    def __call__(self, dataset: AnyDataset, main_first: Callable[..., Any]) -> AnyDataset:
        """
        The prepared dataset, without prompts that have no pair. `main_first` makes the context in which the first
        process prepares, and the others then read what it cached. Streams are prepared as they are read.

        Raises a `ValueError` that names the row and the column of what is wrong, and one if no prompt has a pair.
        """
        noted = self._noted(dataset)
        if not isinstance(dataset, Dataset):
            return self._made(dataset, noted).filter(_has_pairs).remove_columns([_MADE, _EQUAL])
        with main_first(desc=f"preparing the answers of the {self.name} data"):
            made = self._made(dataset, noted)
            desc = f"Dropping prompts without pairs from {self.name} dataset"
            kept = made.filter(_has_pairs, num_proc=self.num_proc, desc=desc)
        self._log(made, kept)
        return kept.remove_columns([_MADE, _EQUAL])

    def of_all(self, dataset: Dataset) -> Dataset:
        """The prepared dataset, without prompts that have no pair, of which there may be none left."""
        return self._made(dataset, self._noted(dataset)).filter(_has_pairs).remove_columns([_MADE, _EQUAL])

    def _noted(self, dataset: AnyDataset) -> NotedPreparation:
        """What TRL does with rows."""
        first = _first(dataset)
        answer = parsed(first, 0, self.name, self.choice)[0][0]
        return self.prepare(NotedPreparation(as_pair(first, answer, answer)))

    def _made(self, dataset: AnyDataset, noted: NotedPreparation) -> AnyDataset:
        """All prompts with the tokens of their answers, and their pairs, if there are any."""
        has_prompt = "prompt_ids" in noted.column_names  # not for reward models. Asked once: it prepares a row
        options: dict[str, Any] = {
            "with_indices": True,
            "fn_kwargs": {"noted": noted, "has_prompt": has_prompt, "choice": self.choice, "name": self.name},
            "remove_columns": columns_of_answers(dataset.column_names or _first(dataset)),
        }
        if isinstance(dataset, Dataset):
            dataset = dataset.with_format(None)  # texts and numbers, not tensors
            # Not those of the first rows, which may have no pair, and so no tokens
            columns = {name: kind for name, kind in dataset.features.items() if name not in options["remove_columns"]}
            options["features"] = Features(columns | _features(has_prompt))
            options |= {"num_proc": self.num_proc, "desc": f"Tokenizing answers of {self.name} dataset"}
        return dataset.map(_prepared, **options)

    def _log(self, made: Dataset, kept: Dataset) -> None:
        """Log what was dropped, and what is odd about what is left; refuse if nothing is."""
        of_prompts, equal, left = made[_MADE], sum(made[_EQUAL]), sum(map(len, kept[PAIRS]))
        found = []
        if (without := sum(not number for number in of_prompts)) or not sum(of_prompts):
            found.append(f"dropped {without} of {len(made)} prompts, which have no pair by {self.choice}")
        if dropped := sum(of_prompts) - left:
            found.append(
                f"dropped {dropped} of {sum(of_prompts)} pairs, and with them {len(made) - without - len(kept)} "
                "prompts, for which `max_length` leaves no room"
            )
        if not left:
            raise ValueError(f"The {self.name} data: {', '.join(found)}. Nothing is left to train on.")
        if equal:
            found.append(f"{equal} of {left} pairs have equal answers with different scores, which are kept, as in TRL")
        if found:
            logger.warning(f"The {self.name} data: {'; '.join(found)}.")


def with_pairs(dataset: AnyDataset, choice: Choice, name: str) -> AnyDataset:
    """
    Raw prompts with several answers that have a pair. Raises a `ValueError` that names the row and the column of what
    is wrong, and one if no prompt has a pair. Images are not read.
    """
    columns = ["prompt", *columns_of_answers(dataset.column_names or _first(dataset))]

    def has_pair(*values: Any) -> bool:
        *answers, index = values
        return bool(parsed(dict(zip(columns, answers, strict=True)), index, name, choice)[1])

    if not isinstance(dataset, Dataset):
        return dataset.filter(has_pair, with_indices=True, input_columns=columns)
    desc = f"Dropping prompts without pairs from {name} dataset"
    kept = dataset.filter(has_pair, with_indices=True, input_columns=columns, desc=desc)
    if dropped := len(dataset) - len(kept):
        said = f"The {name} data: dropped {dropped} of {len(dataset)} prompts, which have no pair by {choice}."
        if not kept:
            raise ValueError(f"{said} Nothing is left to train on.")
        logger.warning(said)
    return kept


def _first(dataset: AnyDataset) -> Example:
    """The first row, of texts and numbers."""
    return next(iter(dataset.with_format(None) if isinstance(dataset, Dataset) else dataset))


def _prepared(
    example: Example, index: int, noted: NotedPreparation, has_prompt: bool, choice: Choice, name: str
) -> Example:
    """
    The tokens of a prompt and its answers, and the pairs of these that train. Each answer is prepared once, as a pair
    with itself. `has_prompt`: whether TRL makes tokens of prompts.
    """
    answers, pairs = parsed(example, index, name, choice)
    # Only the answers that are in pairs, each once
    alone = {
        i: noted.mapped(as_pair(example, answers[i], answers[i])) for i in sorted({i for pair in pairs for i in pair})
    }
    rows = {i: [*each.get("prompt_ids", ()), *each["chosen_ids"]] for i, each in alone.items()}
    starts = {i: len(each["prompt_ids"]) for i, each in alone.items() if "prompt_ids" in each}  # reward models: none
    kinds = {i: (starts.get(i), tuple(row)) for i, row in rows.items()}
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds.values()))}
    made = _joined([[*row] for _, row in numbers])
    if has_prompt:
        made[STARTS] = [start for start, _ in numbers]
    found = [[numbers[kinds[i]], numbers[kinds[j]]] for i, j in pairs]
    made[PAIRS] = [
        pair
        for pair, tokens in zip(found, pairs_of(made | {PAIRS: found}), strict=True)
        if all(keeps(tokens) for keeps in noted.filters)
    ]
    rows_made = rows_of(made)
    return made | {_MADE: len(found), _EQUAL: sum(rows_made[i] == rows_made[j] for i, j in made[PAIRS])}


def _features(has_prompt: bool) -> dict[str, Any]:
    """What `_prepared` makes."""
    number = Value("int64")
    starts = {STARTS: List(number)} if has_prompt else {}
    lists = dict.fromkeys(("answer_ids", PAIRS), List(List(number)))
    return {"prompt_ids": List(number), **lists, **starts, _MADE: number, _EQUAL: number}


def _joined(rows: list[list[int]]) -> Example:
    """The tokens with which all rows begin, and those that follow in each."""
    arrays = [np.array(row, np.int64) for row in rows]
    shared = min((common_prefix(arrays[0], array) for array in arrays), default=0)
    return {"prompt_ids": rows[0][:shared] if rows else [], "answer_ids": [row[shared:] for row in rows]}


def _has_pairs(example: Example) -> bool:
    return len(example[PAIRS]) > 0
