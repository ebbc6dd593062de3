"""Tasks: the columns, sequences and collators of a trainer's data, and its names."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import cached_property

from datasets import Dataset

from ..flat.batch import Inputs
from .lengths import Example

# Columns of raw data that TRL reads for any trainer
RAW_COLUMNS = ("prompt", "image", "images", "tools", "chat_template_kwargs")
Columns = tuple[str, ...]  # by name


@dataclass(frozen=True)
class Task:
    """
    What a trainer's data looks like, and what it is called.

    Args:
        name, unit (`str`):
            The name of the command, also used in its results; what a batch holds, in the plural (`"pairs"`).
        sequences (`tuple[tuple[str, ...], ...]`):
            The sequences of one prepared example, each as the columns of token ids that make it up.
        collator, vision_collator (`type`, the second *optional*):
            The collator classes that build flat batches of text and, for a trainer of your own, of data with images.
            By default, images are taken by the tasks whose `collator` has a counterpart for them.
        prepare (`Callable`, *optional*):
            TRL's own preparation: maps `(dataset, tokenizer, max_length=, truncation_mode=)` to the rows that the
            collator gets. `trl-paddingfree inspect` needs it, training does not.
        found_by, other_columns (*optional*, default to `()`):
            Sets of columns, after TRL's dataset formats: data with all columns of one set belongs to this task.
            Columns of prepared data that the collator reads besides token ids.
        reads (`tuple[str, ...]`, *optional*, defaults to `()`):
            Columns of raw data that TRL reads besides those of all tasks (`RAW_COLUMNS`); the log names any others.
            `()` if all are read, by reward functions for example, or if that is not known.
        truncates (`bool`, *optional*, defaults to `True`):
            Whether the trainer has a `max_length`.

    >>> from trl_paddingfree import PaddingFreeDPOTrainer
    >>> PaddingFreeDPOTrainer.task.unit, PaddingFreeDPOTrainer.task.token_columns
    ('pairs', ('prompt_ids', 'chosen_ids', 'rejected_ids'))
    """

    name: str
    unit: str
    sequences: tuple[Columns, ...]
    collator: type
    prepare: Callable[..., Dataset] | None = None
    found_by: tuple[Collection[str], ...] = ()
    other_columns: Columns = ()
    reads: Columns = ()
    truncates: bool = True
    vision_collator: type | None = None

    @cached_property
    def token_columns(self) -> Columns:
        """Columns of prepared data that hold token ids."""
        return tuple(dict.fromkeys(column for sequence in self.sequences for column in sequence))

    @property
    def columns(self) -> list[str]:
        """Columns of prepared data that the collator reads."""
        return [*self.token_columns, *self.other_columns]

    def make_collator(self, **options: object) -> Callable[[list[Example]], Inputs]:
        """A collator that builds flat batches, with the `options` that it accepts; TRL's preparation applies others."""
        options = {"pad_token_id": 0, "padding_free": True, **options}
        names = {field.name for field in fields(self.collator)}
        return self.collator(**{name: value for name, value in options.items() if name in names})
