"""What sharing saves on data with several answers per prompt, for `trl-paddingfree inspect`."""

from typing import Any

import numpy as np
from datasets import Dataset

from ..core.data.collate import FlatCollator
from ..core.data.task import Task
from ..core.flat.counts import BatchCounts
from .collate import COLUMNS, PAIRS, Examples, answer_lengths
from .examples import LISTED, Choice, has_answers, parsed
from .prepare import Preparation


def is_of_answers(dataset: Dataset) -> bool:
    """Whether raw data has several answers per prompt."""
    return len(dataset) > 0 and has_answers(dataset[0])


class AnswersOf:
    """
    The rows of a task whose data is prompts with several answers. It stands in for
    [`~trl_paddingfree.cli.savings.RowsOf`].
    """

    unit = "prompts"

    def __init__(self, task: Task, **choice: Any):
        self.task, self.choice = task, Choice(**choice)

    @staticmethod
    def columns(dataset: Dataset) -> list[str]:
        """The columns by which its task is told: those of its pairs, too."""
        return [*dict.fromkeys([*dataset.column_names, *LISTED])]

    def with_pairs(self, dataset: Dataset) -> Dataset:
        """The prompts that have a pair."""

        def has_pair(example: dict[str, Any], index: int) -> bool:
            return bool(parsed(example, index, "inspected", self.choice)[1])

        found = dataset.with_format(None).filter(has_pair, with_indices=True, desc="Choosing pairs")
        if not len(found):
            raise ValueError(f"No prompt has a pair by {self.choice}. Look at `scores`.")
        return found

    def prepare(self, dataset: Dataset, tokenizer: Any, **options: Any) -> Dataset:
        """The tokens of all answers, and the pairs that are left."""
        of_task: Any = self.task.prepare
        prepare = Preparation(lambda noted: of_task(noted, tokenizer, **options), self.choice, "inspected")
        rows = prepare.of_all(dataset)
        return rows.select_columns([name for name in COLUMNS if name in rows.column_names])

    def lengths(self, rows: Dataset) -> np.ndarray:
        """`(prompts, answers)` int64: tokens of the row of each answer, -1 for one that is not there."""
        lengths = answer_lengths(rows)
        return np.where(lengths[:, 1:] < 0, -1, lengths[:, :1] + lengths[:, 1:])

    def collator(self, **options: Any) -> Any:
        """The collator of the task, which reads answers."""
        made: FlatCollator = self.task.make_collator(**options)  # type: ignore[assignment]
        return made.changed(read_as=Examples())

    def figures(self, rows: Dataset, total: BatchCounts) -> dict[str, float]:
        """Of a mean prompt: its pairs; tokens of one pair and of all its pairs in TRL, and of all its pairs here."""
        pairs = sum(map(len, rows[PAIRS]))
        return {
            "pairs_per_prompt": pairs / len(rows),
            "tokens_of_one_pair_in_trl": total.real / pairs,
            "tokens_of_all_pairs_in_trl": total.real / len(rows),
            "tokens_of_all_pairs": total.computed / len(rows),
        }
