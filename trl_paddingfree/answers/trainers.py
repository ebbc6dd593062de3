"""What data with several answers per prompt changes in a trainer of pairs: DPO's, and that of reward models."""

from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset

from ..core.data.lengths import AnyDataset, Example, has_images, has_known_lengths
from ..core.data.rows import ReadAs
from ..core.flat.batch import Inputs
from ..core.flat.counts import of_all_processes
from ..core.model.restored import random_state_restored
from ..core.trainers import collated
from ..core.trainers.base import FlatTrainer
from ..core.trainers.card import append_to_card
from ..core.trainers.configs import Arguments, given_datasets
from ..core.trainers.runtime import Step
from .collate import (
    COLUMNS,
    PAIRS,
    REFERENCES,
    STARTS,
    Examples,
    PaddedPairs,
    RawExamples,
    answer_lengths,
    rows_of,
)
from .examples import LISTED, SCORED, Choice, as_pair, columns_of_answers, has_answers, parsed
from .gather import GatherDifferentNumbers
from .prepare import Preparation, with_pairs

# Rows that are looked at before a model is loaded
_FIRST = 100
# Columns that prepared data has, and no other
_PREPARED = {"answer_ids", PAIRS}


class Answers(FlatTrainer):
    """Refuses the options and the data of this folder where a trainer reads no pairs."""

    def refuse_even_padded(self, arguments: Arguments) -> None:
        super().refuse_even_padded(arguments)
        if self._answer_choice != Choice():
            self._refuse_choice(arguments)

    def _refuse_choice(self, arguments: Arguments) -> None:
        """Refuse the options that choose pairs, if there are none to choose from."""
        raise ValueError(f"{self._answer_choice}: {self.trl_trainer.__name__} reads no pairs. Leave the options out.")

    def refuse_arguments(self, arguments: Arguments) -> None:
        try:
            super().refuse_arguments(arguments)
        except ValueError as error:
            datasets = [] if self.task.unit == "pairs" else given_datasets(arguments)
            if any(has_answers(next(iter(dataset), {})) for _, dataset in datasets):
                error.add_note(
                    f"{self.trl_trainer.__name__} reads one answer per row: give each a row of its own. Rows that "
                    "share a prompt share its computation."
                )
            raise

    @property
    def _answer_choice(self) -> Choice:
        """Which pairs of a prompt's answers train."""
        options: Any = self.runtime.options
        return Choice(options.answer_pairs, options.min_score_margin)


class AnswersCollated(Answers, collated.Collated):
    """For trainers with a collator."""

    _reads_answers: bool = False  # whether data was prepared that has several answers per prompt
    # That this process has trained on since the last log, if the data that the trainer was made with has answers
    _new_pairs: int | None = None
    _own_eval_dataset: Any = None  # with images, once what has no pair is left out

    @property
    def _trains_on_answers(self) -> bool:
        """Whether the training data is prepared, of known lengths, and has several answers per prompt."""
        return has_known_lengths(self.train_dataset, _PREPARED)

    # --- data -------------------------------------------------------------------------------------------------------

    def _has_answers(self, dataset: Any) -> bool:
        """Whether raw data of this task has several answers per prompt."""
        # TRL says what is wrong with what is no dataset
        if self.task.unit != "pairs" or not isinstance(dataset, Dataset | IterableDataset):
            return False
        first = self._first_of(dataset)
        return has_answers(first) and {*self.task.token_columns}.isdisjoint(first)

    def _first_of(self, dataset: AnyDataset) -> Example:
        """The first example, or an empty one. Transforms that draw go on as if nobody had looked."""
        with random_state_restored(vars(self).get("model", torch.nn.Module())):  # `evaluate` may come within training
            return next(iter(dataset), {})

    def _refuse_choice(self, arguments: Arguments) -> None:
        if self.task.unit != "pairs":
            super()._refuse_choice(arguments)
        elif not any("scores" in next(iter(data)) for data in self._answers_in(arguments).values()):
            raise ValueError(
                f"{self._answer_choice}: the options choose pairs by `scores`, and the data has none. All `chosen` "
                "answers meet all `rejected` ones. Leave the options out."
            )

    def _answers_in(self, arguments: Arguments) -> dict[str, AnyDataset]:
        """The raw data, by name, that has several answers per prompt."""
        return {name: data for name, data in given_datasets(arguments) if self._has_answers(data)}

    def refuse_arguments(self, arguments: Arguments) -> None:
        if self.task.unit != "pairs":
            super().refuse_arguments(arguments)
            return
        # What else is checked of data is checked of pairs
        pairs = {name: self._first_pairs(data, name) for name, data in self._answers_in(arguments).items()}
        evaluated = arguments.get("eval_dataset")
        given = {"train_dataset": pairs.get("train", arguments.get("train_dataset"))}
        if isinstance(evaluated, dict):
            given["eval_dataset"] = {name: pairs.get(name, data) for name, data in evaluated.items()}
        else:
            given["eval_dataset"] = pairs.get("eval", evaluated)
        super().refuse_arguments(arguments | given)

    def _first_pairs(self, dataset: AnyDataset, name: str) -> AnyDataset:
        """A pair of each of the first rows, after refusing what is wrong with them."""
        if isinstance(dataset, Dataset):
            if dataset.format["type"] == "custom":
                raise ValueError(
                    f"The {name} data has several answers per prompt, and a transform: apply it with `dataset.map`."
                )
            dataset = dataset.with_format(None)
        first = list(islice(dataset, _FIRST))
        self._refuse_other_columns(first[0], name)
        found: list[Example] = []
        for index, example in enumerate(first):
            answers, _ = parsed(example, index, name, self._answer_choice)
            found.append(as_pair(example, answers[0], answers[-1]))

        def stream():
            return IterableDataset.from_generator(found.__iter__)

        if not isinstance(dataset, Dataset):
            return stream()
        if not any(parsed(example, index, name, self._answer_choice)[1] for index, example in enumerate(dataset)):
            raise ValueError(
                f"The {name} data has no pair by {self._answer_choice}: no prompt has two answers whose `scores` "
                "differ enough."
            )
        return stream() if has_images(dataset) else Dataset.from_list(found)  # which would encode images

    def _refuse_other_columns(self, first: Example, name: str) -> None:
        """Refuse columns beside several answers that this trainer would read for each pair."""
        columns = " and ".join(f"`{column}`" for column in columns_of_answers(first))
        if found := [column for column in self.task.reads if column not in LISTED and column in first]:
            raise ValueError(
                f"The {name} data has a column `{found[0]}`, which is one value for each pair, and several answers per "
                f"prompt ({columns}): leave it out with `dataset.remove_columns('{found[0]}')`, or give each pair a "
                "row of its own."
            )

    def _prepare_dataset(self, dataset, processing_class, args, *others, **named):
        is_prepared = isinstance(dataset, Dataset | IterableDataset) and self._first_of(dataset).keys() >= _PREPARED
        if not is_prepared and not self._has_answers(dataset):
            return super()._prepare_dataset(dataset, processing_class, args, *others, **named)  # type: ignore[misc]
        self._read_answers()
        if is_prepared:  # `evaluate` prepares again
            return dataset
        name = named["dataset_name"] if "dataset_name" in named else others[-1]
        self._first_pairs(dataset, name)
        if isinstance(next(iter(dataset))["prompt"], str) and processing_class.eos_token is None:
            raise ValueError(
                f"The {name} data is plain text, and the tokenizer has no `eos_token` to end an answer with: set "
                "`tokenizer.eos_token`, and pass the tokenizer as `processing_class`."
            )

        def as_trl(noted):
            return self.trl_trainer._prepare_dataset(self, noted, processing_class, args, *others, **named)

        prepare = Preparation(as_trl, self._answer_choice, name, args.dataset_num_proc)
        return prepare(dataset, args.main_process_first)

    @property
    def _read_as(self) -> ReadAs:
        """How the collator reads examples."""
        return RawExamples(self._answer_choice) if self._is_vision_dataset else Examples()

    def _read_answers(self) -> None:
        """Have the collator read answers, from now on, and the processes gather different numbers of pairs."""
        self._reads_answers = True
        if (accelerator := vars(self).get("accelerator")) is None:  # it is still to be made, and the collator
            return
        if accelerator.num_processes > 1 and not isinstance(accelerator.gather, GatherDifferentNumbers):
            accelerator.gather = GatherDifferentNumbers(accelerator.gather)
        if not self.runtime.pads:
            if self.runtime.models:
                self.data_collator = self.data_collator.changed(read_as=self._read_as)
            return
        # Those of streams would be cut into as many equal parts as there are processes, wherever pairs end
        accelerator.dataloader_config.dispatch_batches = False
        if (collator := vars(self).get("data_collator")) is not None and not isinstance(collator, PaddedPairs):
            self.data_collator: Any = PaddedPairs(collator, self._read_as)

    def _init(self, arguments: Arguments) -> None:
        super()._init(arguments)
        if self.runtime.pads:
            self._take_raw_answers()
        if self._reads_answers:
            self._new_pairs = 0
            self._read_answers()  # TRL has made the collator and the accelerator last

    def before_flat(self) -> None:
        self._take_raw_answers()
        super().before_flat()

    def _take_raw_answers(self) -> None:
        """Leave out prompts with images that have no pair: TRL prepares no such data, and the collator reads it raw."""
        if not self._is_vision_dataset:
            return

        # Those of padding-free trainers were looked at before models were loaded
        is_new = self.runtime.pads
        with random_state_restored(self.model):  # transforms of the data may draw
            self.train_dataset: Any = self._taken(self.train_dataset, "train", is_new)
            self.eval_dataset: Any = self._taken(self.eval_dataset, "eval", is_new)
        self._own_eval_dataset = self.eval_dataset

    def _taken(self, dataset: Any, name: str, is_new: bool) -> Any:
        if isinstance(dataset, dict):
            return {key: self._taken(each, key, is_new) for key, each in dataset.items()}
        if not self._has_answers(dataset):
            return dataset
        if is_new:
            self._first_pairs(dataset, name)
        self._reads_answers = True
        return with_pairs(dataset, self._answer_choice, name)

    def get_eval_dataloader(self, eval_dataset=None):
        is_new = eval_dataset is not self._own_eval_dataset  # given to `evaluate`, or set later
        if is_new and self._is_vision_dataset and self._has_answers(eval_dataset):
            with random_state_restored(self.model):  # transforms of the data may draw
                eval_dataset = self._taken(eval_dataset, "eval", is_new=True)
            self._read_answers()
        return super().get_eval_dataloader(eval_dataset)

    def _flat_collator(self):
        collator = super()._flat_collator()
        return collator.changed(read_as=self._read_as) if self._reads_answers else collator

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if self._reads_answers:
            self._signature_columns: Any = list(dict.fromkeys([*self._signature_columns, *COLUMNS, *SCORED]))

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        if not has_known_lengths(dataset, (PAIRS,)):
            return super()._precompute_ref_logps(dataset, name, batch_size)
        # Each answer once, as a pair with itself, whose two equal rows are computed once; or beside each other answer,
        # on whose length its log-probability depends
        beside = self.args.ld_alpha is not None
        options = {"batched": True, "remove_columns": dataset.column_names, "fn_kwargs": {"beside": beside}}
        logps = super()._precompute_ref_logps(dataset.map(_alone, **options), name, batch_size)["ref_chosen_logps"]
        found, of_pairs = iter(logps), []
        for starts, pairs in zip(dataset[STARTS], dataset[PAIRS], strict=True):
            values = {key: next(found) for key in _distinct(starts, pairs, beside)}
            of_pairs.append([[values[key] for key in _keys(starts, pair, beside)] for pair in pairs])
        return dataset.add_column(REFERENCES, of_pairs)

    # --- lengths ----------------------------------------------------------------------------------------------------

    @property
    def token_columns(self):
        return ("prompt_ids", "answer_ids") if self._trains_on_answers else super().token_columns

    def example_lengths(self) -> np.ndarray:
        return answer_lengths(self.train_dataset) if self._trains_on_answers else super().example_lengths()

    # --- figures ----------------------------------------------------------------------------------------------------

    @property
    def sample_unit(self) -> str:
        return super().sample_unit if self._new_pairs is None else "prompts"

    def after_init(self) -> None:
        super().after_init()
        if self._reads_answers:
            self.runtime.around_step.append(self._count_pairs)

    def begin_training(self, model: torch.nn.Module) -> None:
        super().begin_training(model)
        if self._new_pairs is not None:
            self._new_pairs = 0  # those of an earlier run do not count

    def _count_pairs(self, step: Step, is_normalized: bool, inputs: Inputs) -> torch.Tensor:
        """Around TRL's step."""
        assert self._new_pairs is not None
        self._new_pairs += len(inputs["input_ids"]) // len(LISTED)
        return step(inputs)

    def logged_figures(self) -> dict[str, float]:
        figures = super().logged_figures()
        if self._new_pairs is None:
            return figures
        of_processes, self._new_pairs = of_all_processes([self._new_pairs], self.accelerator), 0
        return figures | {"flat/pairs": of_processes.sum().item()}  # each group of processes counts once

    def create_model_card(self, *args, **kwargs) -> None:
        super().create_model_card(*args, **kwargs)
        if self._new_pairs is not None and self.is_world_process_zero():
            said = f"\nPairs of several answers per prompt were chosen by {self._answer_choice}.\n"
            append_to_card(self.args.output_dir, said)


class AnswersOnline(Answers):
    """For trainers that generate their rows."""


Key = tuple[int, int, int]  # an answer, another beside it, and where their prompt ends


def _keys(starts: list[int], pair: list[int], beside: bool) -> list[Key]:
    """What the log-probabilities of both answers of a pair depend on."""
    (i, j), start = pair, min(starts[i] for i in pair)
    return [(i, j if beside else i, start), (j, i if beside else j, start)]


def _distinct(starts: list[int], pairs: list[list[int]], beside: bool) -> list[Key]:
    """That of all pairs, each once."""
    return [*dict.fromkeys(key for pair in pairs for key in _keys(starts, pair, beside))]


def _alone(batch: dict[str, list], beside: bool) -> dict[str, list]:
    """Pairs whose chosen answers are those of some examples, as [`_distinct`] lists them."""
    alone = []
    for values in zip(*batch.values(), strict=True):
        example = dict(zip(batch, values, strict=True))
        rows = rows_of(example)
        for i, j, start in _distinct(example[STARTS], example[PAIRS], beside):
            alone.append(
                {"prompt_ids": rows[i][:start], "chosen_ids": rows[i][start:], "rejected_ids": rows[j][start:]}
            )
    return {name: [example[name] for example in alone] for name in ("prompt_ids", "chosen_ids", "rejected_ids")}


Collated = AnswersCollated
Online = AnswersOnline
