"""What is checked of data, by the task that reads it."""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from trl import SFTConfig

from ..core.data.lengths import AnyDataset, column_names, has_images
from ..core.data.task import Task
from ..core.trainers.configs import Arguments, given_datasets
from ..core.trainers.refusals import is_ours
from .columns import columns_read, refuse_wrong_values
from .streams import with_rows_checked, with_tokens_checked
from .templates import refuse_broken_template
from .validate import (
    log_unread,
    refuse_bad_tokens,
    refuse_missing_prompts,
    refuse_misspelt_roles,
    refuse_unknown_tokens,
    refuse_unread,
    refuse_unread_instructions,
)

# By the names of tasks, what reads the data, and the columns that it reads, the first of these that there are. SFT has
# rules of its own
_PAIR = ("chosen", "rejected")
_GENERATES = {"grpo": "GRPO", "rloo": "RLOO", "distillation": "distillation"}
_READ: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "dpo": ("DPO", (("prompt", *_PAIR), _PAIR)),
    "kto": ("KTO", (("prompt", "completion", "label"), _PAIR)),
    "reward": ("a reward model", (_PAIR, ("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"))),
    **{name: (words, (("prompt",),)) for name, words in _GENERATES.items()},
}
CHECKED = (*_READ, "sft")


def has_tokens(dataset: AnyDataset, task: Task) -> bool:
    """Whether data has tokens already, in columns that TRL reads as they are."""
    return any({*column_names(dataset)}.issuperset(each) for each in _tokenized(task))


def _tokenized(task: Task) -> list[tuple[str, ...]]:
    return [each for each in _READ[task.name][1] if each[0].endswith("ids")] if task.name in _READ else []


def refuse_given(trainer_class: Any, arguments: Arguments) -> list[AnyDataset]:
    """
    Refuse data among the arguments of a trainer that its task cannot read, and log which columns TRL does not. Returns
    the datasets whose rows were looked at.
    """
    config, task = arguments["args"], trainer_class.task
    reads_rows = _reads_rows(trainer_class, arguments)
    looked_at: list[AnyDataset] = []
    for name, dataset in given_datasets(arguments):
        if isinstance(dataset, Dataset) and not len(dataset):
            raise ValueError(f"The {name} data has no rows. Look at what selected them, or pass other data.")
        if arguments.get("formatting_func") is None:  # it reads what it likes
            refuse_misspelt_roles(dataset, name, task)
            if not arguments.get("data_collator") and not arguments.get("environment_factory"):
                log_unread(dataset, name, task, _text_field(config))
        if isinstance(config, SFTConfig):
            refuse_bad_tokens(dataset, name)
        if reads_rows:  # TRL prepares data once it has loaded the models
            refuse_rows(dataset, name, task, config)
            looked_at.append(dataset)
            if not vars(config).get("chat_template_path"):
                refuse_broken_template(dataset, tokenizer_of(arguments.get("processing_class")))
    return looked_at


def refuse_rows(dataset: AnyDataset, name: str, task: Task, config: TrainingArguments) -> None:
    """Refuse raw data that TRL is to prepare if the task cannot read it."""
    text_field = _text_field(config)
    if task.name == "sft":
        refuse_unread_instructions(dataset, name, text_field)
    elif task.name in _READ:
        reader, formats = _READ[task.name]
        refuse_unread(dataset, name, reader, *(_tokenized(task) if has_tokens(dataset, task) else formats))
    refuse_wrong_values(dataset, name, task, text_field)
    if task.name == "dpo":
        refuse_missing_prompts(dataset, name)


def rows_checked(dataset: AnyDataset, name: str, task: Task, config: TrainingArguments) -> AnyDataset:
    """Raw data that TRL is to prepare; a stream of it also refuses later rows that the task cannot read."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    return with_rows_checked(dataset, name, columns_read(column_names(dataset), task, _text_field(config)))


def tokens_checked(
    models: Mapping[str, PreTrainedModel], processor: Any, data: Any, columns: Sequence[str], only: str = "train"
) -> Any:
    """
    Prepared data, one dataset or several by name, once tokens are refused that one of the `models`, by the names of
    their arguments, has no embeddings for. The `processor` may have made them. Streams are replaced by ones that also
    refuse such tokens in later rows.
    """
    if (fewest := fewest_embeddings(models)) is None:
        return data
    size, model = fewest
    tokenizer = tokenizer_of(processor)
    who, advice = "the model", "Tokenize with the model's own tokenizer."
    if model != "model":
        who, advice = f"`{model}`", "Pass one with the vocabulary of the model."
    elif isinstance(tokenizer, PreTrainedTokenizerBase) and (number := len(tokenizer)) > size:
        advice = (
            f"The tokenizer has {number} tokens: pass the model's own as `processing_class`, or call "
            f"`model.resize_token_embeddings({number})`."
        )
    known = f"{who} has tokens 0 to {size - 1}. {advice}"
    columns = [column for column in columns if column.endswith("ids") or column == "labels"]

    def checked(dataset: Any, name: str) -> Any:
        if not isinstance(dataset, Dataset | IterableDataset):
            return dataset
        refuse_unknown_tokens(dataset, name, columns, size, known)
        return with_tokens_checked(dataset, name, columns, size, known)

    return {name: checked(each, name) for name, each in data.items()} if isinstance(data, dict) else checked(data, only)


def fewest_embeddings(models: Mapping[str, PreTrainedModel]) -> tuple[int, str] | None:
    """The least number of tokens that one of the models has embeddings for, and its name; `None` if none says."""
    sizes = {name: _embeddings_of(model) for name, model in models.items()}
    known = [(size, name) for name, size in sizes.items() if size is not None]
    return min(known, key=lambda each: each[0], default=None)


def _embeddings_of(model: PreTrainedModel) -> int | None:
    """How many tokens the embeddings of a model have, or had before they were sharded; `None` if it does not say."""
    modules = model.get_input_embeddings().modules()  # adapters may wrap the embeddings
    return next((vars(module)["num_embeddings"] for module in modules if "num_embeddings" in vars(module)), None)


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor, or the tokenizer that it is."""
    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor


def _text_field(config: TrainingArguments) -> str:
    return vars(config).get("dataset_text_field", "text")


def _reads_rows(trainer_class: Any, arguments: Arguments) -> bool:
    """Whether TRL prepares the data for one of our tasks: a function or method of the user's may read anything."""
    prepares = hasattr(trainer_class.trl_trainer, "_prepare_dataset")
    if trainer_class.task.name not in CHECKED and prepares:
        return False
    methods = ("_prepare_dataset",) if prepares else ("_prepare_inputs", "_generate_and_score_completions")
    makes_rows = any(arguments.get(name) for name in ("formatting_func", "environment_factory", "rollout_func"))
    skips = (vars(arguments["args"]).get("dataset_kwargs") or {}).get("skip_prepare_dataset")
    return all(is_ours(trainer_class, method) for method in methods) and not (
        makes_rows or skips or has_images(arguments.get("train_dataset"))
    )
