"""What checks of data add to the trainers: bad rows are refused before models load, and where TRL prepares them."""

import inspect
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, ProcessorMixin

from ..core.data.lengths import AnyDataset, column_names, has_images
from ..core.model.restored import random_state_restored
from ..core.trainers import collated
from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import Arguments
from ..core.trainers.runtime import when_flat
from .tasks import (
    CHECKED,
    fewest_embeddings,
    has_tokens,
    refuse_given,
    refuse_rows,
    rows_checked,
    tokenizer_of,
    tokens_checked,
)
from .templates import naming_prompts, naming_row
from .validate import check_preferences, first_prompts, log_dropped, refuse_empty_prompts

# By the names that errors have for them, the arguments of a trainer that are datasets
_DATASETS = {"train": "train_dataset", "eval": "eval_dataset"}


class DataChecked(FlatTrainer):
    """What is checked of the data of all trainers."""

    _looked_at: Sequence[AnyDataset] = ()  # raw data that was checked before models were loaded

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        self._looked_at = refuse_given(type(self), arguments)

    def before_flat(self) -> None:
        with random_state_restored(self.model):  # transforms of the data may draw
            self.refuse_unknown_tokens()
        super().before_flat()

    def after_init(self) -> None:
        super().after_init()
        self._looked_at = ()  # later calls bring other data

    def refuse_unknown_tokens(self) -> None:
        """Refuse prepared data with tokens that a model has no embeddings for: on a GPU, the process would abort."""
        for name, option in _DATASETS.items():
            data = self._tokens_checked(vars(self).get(option), self._read_columns(), name)
            if data is not None:
                setattr(self, option, data)

    def _tokens_checked(self, data: Any, columns: Sequence[str], name: str) -> Any:
        return tokens_checked(self._models(), self.processing_class, data, columns, name)

    def _models(self) -> dict[str, PreTrainedModel]:
        """The models that read the data, by the names of their arguments."""
        given = {"model": self.model, "ref_model": self.ref_model}
        return {name: self.flat_base(model) for name, model in given.items() if model is not None}

    def _read_columns(self) -> list[str]:
        """Columns of prepared data that the collator reads."""
        return self.task.columns


class DataCheckedCollated(DataChecked, collated.Collated):
    """For trainers with a collator, whose data TRL prepares."""

    def _read_columns(self) -> list[str]:
        return [*dict.fromkeys([*super()._read_columns(), *self.token_columns])]

    @when_flat
    def _prepare_dataset(self, dataset, processing_class, *others, **named):
        def prepare():
            return super(DataCheckedCollated, self)._prepare_dataset(dataset, processing_class, *others, **named)  # type: ignore[misc]

        if (task := self.task).name not in CHECKED:
            return prepare()
        call = inspect.signature(self.trl_trainer._prepare_dataset).bind(
            self, dataset, processing_class, *others, **named
        )
        given = call.arguments
        name, args, tokenizer = given["dataset_name"], given["args"], tokenizer_of(processing_class)
        if not isinstance(dataset, Dataset | IterableDataset):
            raise ValueError(
                f"The {name} data is a {type(dataset).__name__}, and no dataset: load one with `load_dataset`, or make "
                "one with `Dataset.from_list(...)`."
            )
        if given.get("formatting_func") is None:
            if not any(dataset is each for each in self._looked_at):
                refuse_rows(dataset, name, task, args)
            dataset = rows_checked(dataset, name, task, args)
        if task.unit == "pairs" and not has_tokens(dataset, task):
            dataset = check_preferences(dataset, tokenizer, name, args)
        with naming_row(dataset, tokenizer, name):
            prepared = prepare()
        if not given.get("packing"):
            # TRL turns a pair into two examples of KTO
            per_row = 2 if task.name == "kto" and {"chosen", "rejected"} <= {*column_names(dataset)} else 1
            why = "is too short for" if task.name == "reward" else "leaves nothing to learn from"
            log_dropped(name, dataset, prepared, args.max_length, why, per_row)
        return prepared


class DataCheckedOnline(DataChecked):
    """For trainers that generate their rows, from prompts that become tokens when they are drawn."""

    knows_prompts: bool  # of all trainers that generate

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        for name, option in _DATASETS.items() if self._looked_at else ():
            if isinstance(data := arguments.get(option), IterableDataset):
                arguments[option] = rows_checked(data, name, self.task, arguments["args"])

    def refuse_unknown_tokens(self) -> None:
        data: Any = self.train_dataset
        tokenizer: Any = self.processing_class
        if has_images(data) or not self.knows_prompts:
            return
        for prompt in first_prompts(data):  # what a template refuses, or has no token, is said now
            self._tokenize_prompts([prompt])
        fewest = fewest_embeddings(self._models())
        # Only a tokenizer that is too large is worth a look at all prompts
        if not isinstance(data, Dataset) or fewest is None or isinstance(tokenizer, ProcessorMixin):
            return
        if len(tokenizer) > fewest[0]:
            prompts = Dataset.from_dict({"prompt_ids": self._tokenize_prompts(list(data["prompt"]))[0]})
            self._tokens_checked(prompts, ["prompt_ids"], "train")

    @when_flat
    def _tokenize_prompts(self, prompts, *args, **kwargs):
        with naming_prompts(prompts, tokenizer_of(self.processing_class)):
            tokenized = super()._tokenize_prompts(prompts, *args, **kwargs)  # type: ignore[misc]
        refuse_empty_prompts(prompts, tokenized[0])
        return tokenized


Collated = DataCheckedCollated
Online = DataCheckedOnline
