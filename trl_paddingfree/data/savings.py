"""What padding wastes on a data set and what sharing saves, counted on real batches, without a model."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..flat.batch import BatchCounts
from .image_savings import counter
from .prepare import tokenize
from .task import Task


@dataclass(frozen=True)
class BatchWaste:
    """
    What the batches of one size hold.

    Args:
        batch_size (`int`):
            Examples per batch: pairs for DPO, rows for SFT.
        batches (`tuple[BatchCounts, ...]`):
            The counts of each batch, with shared prefixes.

    Examples:
    ```python
    >>> from trl_paddingfree import BatchCounts
    >>> from trl_paddingfree.data.savings import BatchWaste
    >>> waste = BatchWaste(2, (BatchCounts(computed=60, real=80, padded=100, distinct=58),))
    >>> f"{waste.padding:.0%} of the slots are padding, {waste.sharing:.0%} of the tokens are there twice"
    '20% of the slots are padding, 25% of the tokens are there twice'
    >>> f"{waste.padding_free_speed_up:.2f}x, with sharing {waste.sharing_speed_up:.2f}x"
    '1.25x, with sharing 1.67x'

    ```
    """

    batch_size: int
    batches: tuple[BatchCounts, ...]

    @cached_property
    def total(self) -> BatchCounts:
        """The counts of all batches together."""
        return sum(self.batches, BatchCounts())

    @property
    def padding(self) -> float:
        """Share of the padded batches' slots that hold padding."""
        return 1 - self.total.real / self.total.padded

    @property
    def sharing(self) -> float:
        """Share of the real tokens that need no computing because another row of the batch has them."""
        return 1 - self.total.computed / self.total.real

    @property
    def padding_free_speed_up(self) -> float:
        """Slots of the padded batches per real token: the speed-up of a model whose time goes by its tokens."""
        return self.total.padded / self.total.real

    @property
    def sharing_speed_up(self) -> float:
        """The same per token that is computed once prefixes are shared."""
        return self.total.padded / self.total.computed


@dataclass(frozen=True)
class WasteReport:
    """
    What a data set costs with padding and without.

    Args:
        task ([`Task`]):
            What the data is for.
        num_rows (`int`):
            Rows of the data set.
        num_sampled (`int`):
            Rows that were looked at.
        num_truncated (`int`):
            Of these, rows that `max_length` cuts.
        num_dropped (`int`):
            Of these, rows that TRL drops because nothing to learn from is left.
        max_length (`int`, *optional*):
            Maximum length of a sequence, in tokens.
        lengths (`tuple[int, ...]`):
            Length of every sequence before truncation, in tokens; two per preference pair.
        waste (`tuple[BatchWaste, ...]`):
            One entry per batch size.
    """

    task: Task
    num_rows: int
    num_sampled: int
    num_truncated: int
    num_dropped: int
    max_length: int | None
    lengths: tuple[int, ...]
    waste: tuple[BatchWaste, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain numbers, for JSON."""
        p50, p90, p99 = np.percentile(self.lengths, [50, 90, 99]).tolist()
        return {
            "task": self.task.name,
            "num_rows": self.num_rows,
            "num_sampled": self.num_sampled,
            "num_truncated": self.num_truncated,
            "num_dropped": self.num_dropped,
            "max_length": self.max_length,
            "lengths": {"mean": float(np.mean(self.lengths)), "p50": p50, "p90": p90, "p99": p99}
            | {"max": max(self.lengths)},
            "batch_sizes": [
                {
                    "batch_size": waste.batch_size,
                    "num_batches": len(waste.batches),
                    "padded_slots": waste.total.padded,
                    "real_tokens": waste.total.real,
                    "computed_tokens": waste.total.computed,
                    "repeated_by_state_layers": waste.total.repeated,
                    "wasted_by_padding": waste.padding,
                    "saved_by_sharing": waste.sharing,
                    "predicted_speed_up": waste.padding_free_speed_up,
                    "predicted_speed_up_with_sharing": waste.sharing_speed_up,
                }
                for waste in self.waste
            ],
        }


def count_batches(
    rows: Dataset,
    task: Task,
    batch_size: int,
    *,
    max_length: int | None,
    truncation_mode: str,
    seed: int | None,
    **options: Any,
) -> Iterator[BatchCounts]:
    """
    Collate one epoch of batches, as in training, and count.

    Args:
        rows ([`~datasets.Dataset`]):
            Tokenized rows, from [`tokenize`].
        task ([`Task`]):
            What the data is for.
        batch_size (`int`):
            Examples per batch.
        max_length (`int`, *optional*):
            Maximum length of a sequence, in tokens.
        truncation_mode (`str`):
            `"keep_start"` or `"keep_end"`.
        seed (`int`, *optional*):
            Seed of the order of the rows; `None` leaves them in theirs.
        **options:
            Further options of the task's collator.
    """
    options = {"max_length": max_length, "truncation_mode": truncation_mode, **options}
    collator = task.make_collator(prefix_sharing=True, **options)
    rows = rows.select_columns(task.columns)
    order = np.arange(len(rows)) if seed is None else np.random.default_rng(seed).permutation(len(rows))
    for start in range(0, len(order), batch_size):
        batch = rows[order[start : start + batch_size]]
        examples = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        yield collator(examples)["flat_batch"].counts


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
    image_token_id: int | None = None,
    track: Callable[[Iterable[BatchCounts], int, str], Iterable[BatchCounts]] | None = None,
    **options: Any,
) -> WasteReport:
    """
    Measure what padding wastes on a data set and what sharing saves.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rows in one of TRL's formats.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer, or its processor for data with images.
        task ([`Task`]):
            What the data is for.
        batch_sizes (`Sequence[int]`):
            Examples per batch: pairs for DPO, rows for SFT, prompts for GRPO.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum length of a sequence, in tokens. Prompts alone are never truncated.
        truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            `"keep_start"` or `"keep_end"`.
        sample (`int`, *optional*, defaults to `2000`):
            Look at so many rows, drawn at random, if there are more. `None`: look at all.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sample and of the batches.
        in_order (`bool`, *optional*, defaults to `False`):
            Whether the sample and the batches are of neighbours, in the order of the rows. Of text only.
        image_token_id (`int`, *optional*):
            The model's placeholder token, for data with images.
        track (`Callable`, *optional*):
            Shows progress: gets the batches, how many will come, and what they are.
        **options:
            Further options of the task's collator: `num_generations` and `max_completion_length` of prompts.

    Raises:
        `ValueError`: If nothing is left of the rows.
    """
    num_rows, max_length = len(dataset), max_length if task.truncates else None
    if sample is not None and sample < num_rows:
        drawn = np.arange(num_rows) if in_order else np.random.default_rng(seed).permutation(num_rows)
        dataset = dataset.select(drawn[:sample])
    rows: Any
    if image_token_id is not None:
        rows, lengths, count = counter(dataset, tokenizer, task, max_length, image_token_id, seed)
    else:
        rows, lengths = tokenize(dataset, tokenizer, task, max_length, truncation_mode, in_order)
        options |= {"max_length": max_length, "truncation_mode": truncation_mode, "seed": None if in_order else seed}

        def count(batch_size: int) -> Iterable[BatchCounts]:
            return count_batches(rows, task, batch_size, **options)

    num_dropped = len(dataset) - len(rows)
    if not len(rows):
        raise ValueError(
            f"None of {len(dataset)} rows is left: every prompt fills `max_length={max_length}`. Raise `max_length`."
        )
    num_long = 0 if max_length is None else sum(max(row) > max_length for row in lengths)
    waste: list[BatchWaste] = []
    for batch_size in batch_sizes:
        if waste and batch_size > len(rows):
            break
        counts = count(batch_size)
        if track is not None:
            counts = track(counts, math.ceil(len(rows) / batch_size), f"Batches of {batch_size}")
        waste.append(BatchWaste(batch_size, tuple(counts)))
    return WasteReport(
        task=task,
        num_rows=num_rows,
        num_sampled=len(dataset),
        num_truncated=num_long - num_dropped,
        num_dropped=num_dropped,
        max_length=max_length,
        lengths=tuple(length for row in lengths for length in row),
        waste=tuple(waste),
    )
