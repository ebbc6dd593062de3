"""Refusals of what rules out that examples move to another micro-batch, or be looked at ahead."""

from collections.abc import Sequence
from typing import Any

from transformers import TrainingArguments

from ..core.data.lengths import AnyDataset, has_images, has_known_lengths


def refuse_to_move(options: Any, reasons: list[str]) -> None:
    """Refuse `arrange_micro_batches` for `reasons`: options under which an example's loss depends on the others."""
    if reasons:
        raise ValueError(
            f"`arrange_micro_batches={options.arrange_micro_batches!r}` changes which examples share a micro-batch, "
            f"and with {', '.join(reasons)} the loss of an example depends on the others: leave one of them out."
        )


def refuse_to_look_ahead(
    options: Any, train_dataset: AnyDataset, config: TrainingArguments, columns: Sequence[str]
) -> None:
    """
    Refuse `arrange_micro_batches` for data of unknown lengths, such as without the `columns` of tokens, and for data
    that transformers arranges itself.
    """
    arranging = f"`arrange_micro_batches={options.arrange_micro_batches!r}`"
    if has_images(train_dataset):
        raise ValueError(
            f"{arranging} needs the lengths of all examples, and TRL processes images on the fly: with images, "
            "lengths are not known before training. Leave it out."
        )
    if not has_known_lengths(train_dataset, columns):
        raise ValueError(
            f"{arranging} needs a dataset whose lengths are known in advance. Those of a stream, of a dataset with "
            "a transform and of one without tokens are not: leave it out, or load the dataset without `streaming`."
        )
    if config.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            f"{arranging} and `train_sampling_strategy='batch_rebalance'` both decide which examples share a "
            "micro-batch: leave one of them out."
        )
