"""What padding wastes on a dataset and what sharing saves, counted on real batches, without a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from datasets import Dataset, concatenate_datasets
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerBase

from ..capabilities import module_of
from ..core.data.lengths import token_lengths
from ..core.data.task import Task
from ..core.flat.counts import BatchCounts, Counted


class RowsOf(Protocol):
    """The rows of a task, from raw data to batches: [`TextRows`], or those of a capability."""

    unit: str  # what a row is, in the plural
    task: Task

    def prepare(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Dataset:
        """The columns that the collator reads, as TRL makes them, given `max_length` and `truncation_mode`."""

    def lengths(self, rows: Dataset) -> np.ndarray:
        """`(rows, sequences)` int64: tokens of each sequence of each row, -1 for one that is not there."""

    def collator(self, **options: Any) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
        """The collator."""

    def figures(self, rows: Dataset, total: BatchCounts) -> dict[str, float]:
        """What else there is to say of `rows` whose batches have these counts in all."""


class TextRows:
    """Rows that each are one example of a task."""

    def __init__(self, task: Task):
        self.task, self.unit = task, task.unit

    def prepare(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Dataset:
        if self.task.prepare is None:
            raise ValueError(f"The task {self.task.name!r} has no `prepare`: give it one that tokenizes raw data.")
        return self.task.prepare(dataset, tokenizer, **options).select_columns(self.task.columns)

    def lengths(self, rows: Dataset) -> np.ndarray:
        return np.stack([token_lengths(rows, sequence).sum(1) for sequence in self.task.sequences], 1)

    def collator(self, **options: Any) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
        return self.task.make_collator(**options)

    def figures(self, rows: Dataset, total: BatchCounts) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class WasteReport:
    """What a dataset costs with padding and without."""

    task: Task
    num_rows: int
    num_sampled: int
    num_truncated: int  # of those sampled: rows that `max_length` cuts
    num_dropped: int  # of those sampled: rows that TRL drops because nothing is left to learn from
    max_length: int | None
    lengths: tuple[int, ...]  # of every sequence before truncation, in tokens; two per preference pair
    batches: dict[int, tuple[BatchCounts, ...]]  # by batch size, in `unit`s
    unit: str  # what a row is, in the plural
    more: dict[str, float] = field(default_factory=dict)  # figures of the rows of a capability

    def as_dict(self) -> dict[str, Any]:
        """The report as plain numbers, for JSON."""
        p50, p90, p99 = np.percentile(self.lengths, [50, 90, 99]).tolist()
        counted = ("num_rows", "num_sampled", "num_truncated", "num_dropped", "max_length")
        return {
            "task": self.task.name,
            **{name: vars(self)[name] for name in counted},
            **self.more,
            "lengths": {
                "mean": float(np.mean(self.lengths)),
                "p50": p50,
                "p90": p90,
                "p99": p99,
                "max": max(self.lengths),
            },
            "batch_sizes": [{"batch_size": size, **waste_of(batches)} for size, batches in self.batches.items()],
        }


def waste_of(batches: Sequence[BatchCounts]) -> dict[str, float]:
    """
    Totals of batches, padded and not. Predicted speed-ups assume that time is proportional to tokens.

    >>> waste = waste_of([BatchCounts(computed=60, real=80, padded=100, distinct=58)])
    >>> waste["wasted_by_padding"], waste["saved_by_sharing"], waste["predicted_speed_up"]
    (0.19999999999999996, 0.25, 1.25)
    """
    total = sum(batches, BatchCounts())
    return {
        "num_batches": len(batches),
        "padded_slots": total.padded,
        "real_tokens": total.real,
        "computed_tokens": total.computed,
        "repeated_by_state_layers": total.repeated,
        "wasted_by_padding": 1 - total.real / total.padded,  # share of the slots
        "saved_by_sharing": 1 - total.computed / total.real,  # share of the tokens: those that another row has, too
        "predicted_speed_up": total.padded / total.real,
        "predicted_speed_up_with_sharing": total.padded / total.computed,
    }


def measure(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    batch_sizes: Sequence[int],
    *,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    sample: int | None = 2000,
    seed: int = 0,
    in_order: bool = False,
    count_images: "Callable[..., Counted] | None" = None,
    rows_of: RowsOf | None = None,
    **options: object,
) -> WasteReport:
    """
    Measure what padding wastes on a dataset in one of TRL's formats and what sharing saves.

    The `sample` and the batches are drawn at random or, with `in_order`, taken in order from the start. Data with
    images needs the model's processor in place of its tokenizer, and `count_images`, such as
    [`~trl_paddingfree.images.savings.image_counts`]. `rows_of` are those of the task, if each is not one of its
    examples. `options` are passed to the task's collator.
    """

    def order(number: int):
        return np.arange(number) if in_order else np.random.default_rng(seed).permutation(number)

    num_rows = len(dataset)
    if not task.truncates:
        max_length = None
    if sample is not None and sample < num_rows:
        dataset = dataset.select(order(num_rows)[:sample])
    rows_of, figures = rows_of or TextRows(task), None
    if count_images is not None:
        num_left, lengths, count = count_images(dataset, tokenizer, task, max_length, options)
    else:
        options |= {"max_length": max_length, "truncation_mode": truncation_mode}
        rows, lengths, count = _text_counts(dataset, tokenizer, rows_of, in_order, options)
        num_left, figures = len(rows), partial(rows_of.figures, rows)
    if not num_left:
        raise ValueError(
            f"No row is left: all {len(dataset)} prompts fill `max_length={max_length}`. Raise `max_length`."
        )
    by_size, drawn = {}, order(num_left)
    # The first size is counted in any case, as the batch that there is
    for size in [min(batch_sizes[0], num_left), *(size for size in batch_sizes[1:] if size <= num_left)]:
        batches = np.split(drawn, range(size, num_left, size))
        by_size[size] = tuple(map(count, tqdm(batches, f"Batches of {size}", leave=False)))
    num_dropped = len(dataset) - num_left
    is_long = lengths.max(1) > (np.inf if max_length is None else max_length)
    return WasteReport(
        task=task,
        num_rows=num_rows,
        num_sampled=len(dataset),
        num_truncated=int(is_long.sum()) - num_dropped,
        num_dropped=num_dropped,
        max_length=max_length,
        lengths=tuple(lengths[lengths >= 0].tolist()),
        batches=by_size,
        unit=rows_of.unit,
        more={} if figures is None else figures(sum(next(iter(by_size.values())), BatchCounts())),
    )


def _text_counts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, rows_of: RowsOf, in_order: bool, options: dict[str, Any]
) -> tuple[Dataset, np.ndarray, Callable[[np.ndarray], BatchCounts]]:
    """
    Count rows of text, tokenized as by TRL's trainers and collated as in training. Rows that are cut come last, unless
    `in_order` keeps them in place, which takes longer. Returns the rows, their lengths and what counts a batch.
    """
    if rows_of.task.name == "sft" and (checks := module_of("data_checks", "validate")) is not None:
        checks.refuse_unread_instructions(dataset, "inspected")
    max_length, prepare = options["max_length"], partial(rows_of.prepare, truncation_mode=options["truncation_mode"])
    rows = prepare(dataset, tokenizer, max_length=None)
    lengths = rows_of.lengths(rows)
    is_long = lengths.max(1) > (np.inf if max_length is None else max_length)
    if in_order:  # TRL does not say which rows it drops, so their places would be lost: cut all rows at once, or none
        is_long[:] = is_long.any()
    if is_long.any():  # only these can lose tokens, or be dropped
        cut = prepare(dataset.select(np.flatnonzero(is_long)), tokenizer, max_length=max_length)
        rows = concatenate_datasets([rows.select(np.flatnonzero(~is_long)), cut])
    rows = rows.with_format("arrow")  # a table of rows is much faster than one by one
    collator = rows_of.collator(prefix_sharing=True, **options)

    def count(index):
        return collator(rows[index].to_pylist())["flat_batch"].counts

    return rows.with_format(None), lengths, count
