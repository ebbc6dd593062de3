"""From a prompt with its answers to the pairs that TRL's collators read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from datasets import Dataset
from pyarrow.compute import list_flatten, list_value_length

from ..core.data.lengths import Example, tables_of
from ..core.data.rows import CollatedRows, ReadAs
from ..core.flat.batch import Inputs
from .examples import Choice, answers_of, as_pair, has_answers

# Columns of prepared data, beside those of tokens: where the prompt ends in each answer's row (DPO), the numbers of the
# chosen and the rejected answer of each pair, and the reference's log-probabilities of both
STARTS, PAIRS, REFERENCES = "prompt_lengths", "answer_pairs", "ref_logps"
COLUMNS = ("prompt_ids", "answer_ids", STARTS, PAIRS, REFERENCES)


class Examples(ReadAs):
    """
    Prompts with several answers, read as pairs, each as TRL's preparation gives it. Other examples stay as they are.

    Rows that are equal are computed once, whatever the pairs that they are in. DPO's prompt ends in a pair where it
    ends in either of its two rows, whichever is first: TRL splits where tokens part.

    >>> answers = {"prompt_ids": [1, 2], "answer_ids": [[3], [4, 5], [6]], "answer_pairs": [[0, 2], [1, 2]]}
    >>> Examples().examples([answers | {"prompt_lengths": [2, 1, 2]}])[1]
    {'prompt_ids': [1], 'chosen_ids': [2, 4, 5], 'rejected_ids': [2, 6]}
    >>> Examples().examples([answers])[0]
    {'chosen_ids': [1, 2, 3], 'rejected_ids': [1, 2, 6]}
    """

    def examples(self, examples: list[Example]) -> list[Example]:
        return [pair for example in examples for pair in pairs_of(example)]

    def rows(self, rows: CollatedRows, examples: list[Example]) -> CollatedRows:
        sizes = [len(example.get(PAIRS, [None])) for example in examples]
        # A collator that leaves out pairs does not say which
        return PromptRows(rows.rows, len(sizes), sizes) if sum(sizes) == rows.num_items else rows


@dataclass(frozen=True)
class RawExamples(ReadAs):
    """Prompts with images and several answers, which TRL does not prepare, read as pairs. Others stay as they are."""

    choice: Choice

    def examples(self, examples: list[Example]) -> list[Example]:
        pairs = []
        for example in examples:
            if not has_answers(example):
                pairs.append(example)
                continue
            answers, chosen = answers_of(example, self.choice)
            pairs += [as_pair(example, answers[i], answers[j]) for i, j in chosen]
        return pairs


@dataclass
class PaddedPairs:
    """The collator of a trainer that pads, given the pairs of prompts with several answers."""

    collate: Callable[[list[Example]], Inputs]
    read_as: ReadAs

    def __call__(self, examples: list[Example]) -> Inputs:
        return self.collate(self.read_as.examples(examples))


@dataclass(frozen=True)
class PromptRows(CollatedRows):
    """The rows of some prompts, of which each has pairs that stay together: they share the prompt, and answers."""

    sizes: Sequence[int]  # the number of pairs of each prompt

    def take(self, examples: Sequence[int], collator: Any) -> CollatedRows:
        """The rows of some prompts, padded as they are in the whole batch."""
        ends = [*accumulate(self.sizes)]
        pairs = [pair for i in examples for pair in range(ends[i] - self.sizes[i], ends[i])]
        rows = CollatedRows(self.rows, sum(self.sizes)).take(pairs, collator).rows
        return PromptRows(rows, len(examples), [self.sizes[i] for i in examples])


def rows_of(example: Example) -> list[list[int]]:
    """The tokens of each answer of a prepared example, after those of the prompt."""
    return [[*example["prompt_ids"], *answer] for answer in example["answer_ids"]]


def pairs_of(example: Example) -> list[Example]:
    """The pairs of one prompt, as TRL's collators read them; the example itself if it has no answers."""
    if PAIRS not in example:
        return [example]
    rows = rows_of(example)
    starts = example.get(STARTS)
    others = {name: value for name, value in example.items() if name not in COLUMNS}
    pairs = []
    for number, (i, j) in enumerate(example[PAIRS]):
        pair: Example = dict(others)
        start = 0
        if starts is not None:
            start = min(starts[i], starts[j])
            pair["prompt_ids"] = rows[i][:start]
        pair |= {"chosen_ids": rows[i][start:], "rejected_ids": rows[j][start:]}
        if (logps := example.get(REFERENCES)) is not None:
            pair["ref_chosen_logps"], pair["ref_rejected_logps"] = logps[number]
        pairs.append(pair)
    return pairs


def answer_lengths(dataset: Dataset) -> np.ndarray:
    """
    `(examples, 1 + answers)` int64: tokens of each prompt and of its answers in prepared data, -1 for each answer that
    an example has less than others.
    """
    prompts, numbers, lengths = [], [], []
    for table in tables_of(dataset, "prompt_ids", "answer_ids"):
        prompts.append(list_value_length(table["prompt_ids"]).to_numpy())
        numbers.append(list_value_length(table["answer_ids"]).to_numpy())
        lengths.append(list_value_length(list_flatten(table["answer_ids"])).to_numpy())
    number = np.concatenate(numbers)
    is_answer = np.arange(number.max()) < number[:, None]
    found = np.full(is_answer.shape, -1)
    found[is_answer] = np.concatenate(lengths)
    return np.concatenate([np.concatenate(prompts)[:, None], found], 1)
