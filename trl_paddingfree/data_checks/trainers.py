"""What checks of data add to the trainers: bad rows are refused before models load, and where TRL prepares them."""

import inspect
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import ProcessorMixin

from ..core.data.lengths import column_names, has_images
from ..core.trainers import collated
from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import Arguments, given_datasets
from ..core.trainers.runtime import when_flat
from .tasks import CHECKED, embeddings_of, has_tokens, refuse_given, refuse_rows, refuse_tokens_beyond, tokenizer_of
from .validate import check_preferences, log_dropped


class Checked(FlatTrainer):
    """What is checked of the data of all trainers."""

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        refuse_given(type(self), arguments)

    def start_flat(self) -> None:
        if not self.flat.models:
            self.refuse_unknown_tokens()
        super().start_flat()

    def refuse_unknown_tokens(self) -> None:
        """Refuse prepared data with tokens that the model has no embeddings for: on a GPU, the process would abort."""
        prepared = given_datasets({"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset})
        refuse_tokens_beyond(self.flat_base(self.model), self.processing_class, prepared, self._read_columns())

    def _read_columns(self) -> list[str]:
        """Columns of prepared data that the collator reads."""
        return self.task.columns


class Collated(Checked, collated.Collated):
    """For trainers with a collator, whose data TRL prepares."""

    def _read_columns(self) -> list[str]:
        return [*dict.fromkeys([*super()._read_columns(), *self.token_columns])]

    @when_flat
    def _prepare_dataset(self, dataset, processing_class, *others, **named):
        def prepare():
            return super(Collated, self)._prepare_dataset(dataset, processing_class, *others, **named)  # type: ignore[misc]

        if (task := self.task).name not in CHECKED:
            return prepare()
        call = inspect.signature(self.trl_trainer._prepare_dataset).bind(
            self, dataset, processing_class, *others, **named
        )
        given = call.arguments
        name, args = given["dataset_name"], given["args"]
        if given.get("formatting_func") is None:
            refuse_rows(dataset, name, task, args)
        if task.unit == "pairs" and not has_tokens(dataset, task):
            dataset = check_preferences(dataset, tokenizer_of(processing_class), name, args)
        prepared = prepare()
        if not given.get("packing"):
            # TRL turns a pair into two examples of KTO
            per_row = 2 if task.name == "kto" and {"chosen", "rejected"} <= {*column_names(dataset)} else 1
            why = "is too short for" if task.name == "reward" else "leaves nothing to learn from"
            log_dropped(name, dataset, prepared, args.max_length, why, per_row)
        return prepared


class Online(Checked):
    """For trainers that generate their rows, from prompts that become tokens when they are drawn."""

    environment_factories: Any  # set by TRL's trainers
    _tokenize_prompts: Callable[..., tuple[list[list[int]], ...]]

    def refuse_unknown_tokens(self) -> None:
        data: Any = self.train_dataset
        tokenizer: Any = self.processing_class
        size = embeddings_of(self.flat_base(self.model))
        is_text = isinstance(data, Dataset) and "prompt" in data.column_names and not has_images(data)
        makes_prompts = self.environment_factories or vars(self).get("rollout_func")
        # Only a tokenizer that is too large is worth a look at all prompts
        if not is_text or makes_prompts or size is None or isinstance(tokenizer, ProcessorMixin):
            return
        if len(tokenizer) > size:
            prompts = Dataset.from_dict({"prompt_ids": self._tokenize_prompts(list(data["prompt"]))[0]})
            refuse_tokens_beyond(self.flat_base(self.model), tokenizer, [("train", prompts)], ["prompt_ids"])
