"""Examples with several answers, as users write them: which answers there are, and which pairs of them train.

Two forms: `prompt`, `completions` and `scores`, or `prompt`, `chosen` and `rejected` of which one or both are lists of
answers. An answer is a text or a list of messages, as TRL reads them in `chosen` and `rejected`.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from reprlib import repr as short
from typing import Any

from ..core.data.lengths import Example
from ..messages import message_problem

SCORED = ("completions", "scores")
LISTED = ("chosen", "rejected")
Pair = tuple[int, int]  # the numbers of the chosen answer, and of the rejected one


@dataclass(frozen=True)
class Choice:
    """Which pairs of scored answers train: [`~trl_paddingfree.answers.options.Options`]."""

    answer_pairs: str = "all"
    min_score_margin: float = 0.0

    def pairs(self, scores: Sequence[float]) -> list[Pair]:
        """
        The pairs of answers with these `scores`, higher is better.

        >>> Choice().pairs([1, 3, 3, 0])
        [(0, 3), (1, 0), (1, 3), (2, 0), (2, 3)]
        >>> Choice("best", min_score_margin=3).pairs([1, 3, 3, 0]), Choice("extremes").pairs([1, 3, 3, 0])
        ([(1, 3)], [(1, 3)])
        """
        numbers = range(len(scores))
        best, worst = (each(numbers, key=scores.__getitem__) for each in (max, min))  # the earlier one among equals
        better = numbers if self.answer_pairs == "all" else [best]
        worse = [worst] if self.answer_pairs == "extremes" else numbers
        return [(i, j) for i in better for j in worse if scores[i] > scores[j] and self._differ(scores[i] - scores[j])]

    def _differ(self, margin: float) -> bool:
        """Whether scores differ enough by this `margin`, but for rounding: 0.3 and 0.2 differ by 0.1."""
        least = self.min_score_margin
        return margin >= least or math.isclose(margin, least, rel_tol=1e-6)

    def __str__(self) -> str:
        return f"`answer_pairs={self.answer_pairs!r}` with `min_score_margin={self.min_score_margin}`"


def has_answers(example: Mapping[str, Any]) -> bool:
    """
    Whether an example has several answers: `completions`, or a list of answers as `chosen` or `rejected`.

    >>> has_answers({"prompt": "1 + 1 =", "completions": [" 2", " 3"], "scores": [1, 0]})
    True
    >>> message = {"role": "assistant", "content": "2"}
    >>> has_answers({"prompt": "?", "chosen": [message], "rejected": [[message]]}), has_answers({"chosen": [message]})
    (True, False)
    """
    return _is_scored(example) or any(_is_list_of_answers(example.get(column)) for column in LISTED)


def _is_scored(columns: Collection[str]) -> bool:
    """Whether the answers of an example with these columns are `completions`."""
    return "completions" in columns and not {*LISTED} <= {*columns}


def _is_list_of_answers(value: object) -> bool:
    """Whether a value is a list of answers, and not one answer: a text, or a list of messages."""
    return isinstance(value, list) and bool(value) and not isinstance(value[0], dict)


def answers_of(example: Example, choice: Choice) -> tuple[list[Any], list[Pair]]:
    """
    The answers of an example, and the pairs of them that train. Raises a `ValueError` that says what is wrong with the
    example, without its row.
    """
    if "prompt" not in example:
        raise ValueError(
            f"there is no `prompt`, only {', '.join(f'`{column}`' for column in example)}: the answers of a prompt "
            "need it in a column of its own"
        )
    prompt = example["prompt"]
    if problem := message_problem(prompt):
        raise ValueError(f"`prompt` is {problem}: it is a text or a list of messages")
    kind = str if isinstance(prompt, str) else list
    if _is_scored(example):
        answers = _checked(example["completions"], "completions", kind)
        return answers, choice.pairs(_scores_of(example, len(answers)))
    columns = []
    for column in LISTED:
        value = example.get(column)
        is_one = isinstance(value, str) or isinstance(value, list) and value and isinstance(value[0], dict)
        columns.append(_checked([value] if is_one else value, column, kind))
    better, worse = map(len, columns)
    return [*columns[0], *columns[1]], [(i, better + j) for i in range(better) for j in range(worse)]


def parsed(example: Example, index: int, name: str, choice: Choice) -> tuple[list[Any], list[Pair]]:
    """[`answers_of`] row `index` of a dataset, which an error names."""
    try:
        return answers_of(example, choice)
    except ValueError as error:
        raise ValueError(
            f"Row {index} of the {name} data: {error}. Correct the row, or leave it out with `dataset.filter`."
        ) from None


def _checked(answers: object, column: str, kind: type) -> list[Any]:
    """The answers in a column; refuses what is no list of them, and those of another kind than the prompt."""
    if not isinstance(answers, list) or not answers:
        raise ValueError(f"`{column}` is {short(answers)}: it is a list of answers")
    for i, answer in enumerate(answers):
        if problem := message_problem(answer):
            raise ValueError(
                f"`{column}[{i}]` is {problem}: an answer is a text, or a list of messages such as "
                "[{'role': 'assistant', 'content': '...'}]"
            )
        if not isinstance(answer, kind):
            is_text, others = "a text", "a list of messages"
            if kind is str:
                is_text, others = others, is_text
            raise ValueError(f"`{column}[{i}]` is {is_text}, and `prompt` is {others}: both are of one kind")
    return answers


def _scores_of(example: Example, number: int) -> list[float]:
    """The scores of an example with so many answers."""
    if "scores" not in example:
        raise ValueError("there are `completions` and no `scores`: there is one for each completion, higher is better")
    scores = example["scores"]
    if not isinstance(scores, list):
        raise ValueError(f"`scores` is {short(scores)}: it is a list of numbers, one for each of the `completions`")
    if len(scores) != number:
        raise ValueError(f"`scores` has {len(scores)} entries, `completions` has {number}: there is one score for each")
    for i, score in enumerate(scores):
        if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
            raise ValueError(f"`scores[{i}]` is {short(score)}: scores are numbers, higher is better")
    return scores


def columns_of_answers(columns: Collection[str]) -> list[str]:
    """Those of a dataset's columns that hold answers and their scores."""
    listed: Iterable[str] = SCORED if _is_scored(columns) else LISTED
    return [column for column in listed if column in columns]


def as_pair(example: Example, chosen: Any, rejected: Any) -> Example:
    """Two answers of an example as TRL reads a pair, with the other columns."""
    columns = {*columns_of_answers(example)}
    others = {name: value for name, value in example.items() if name not in columns}
    return {**others, **dict(zip(LISTED, (chosen, rejected), strict=True))}
