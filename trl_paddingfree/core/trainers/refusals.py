"""Refusals of what flat batches rule out: each `ValueError` names an argument, its value, and what to change."""

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from datasets import IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import logging
from trl import SFTConfig

from .. import upstream
from ..data.collate import FlatCollator
from ..data.lengths import column_names
from ..data.task import Task
from ..model.adapters import why_padded, why_padded_by
from ..model.flat_model import UNCOMPILED
from .configs import Arguments, PaddingFreeOptions, given_datasets
from .given_models import MODELS
from .values import trains_nothing

logger = logging.get_logger(__name__)


# Arguments of trainers that take an object, and how one is made. Python reports a class in its place as a missing
# attribute
_INSTANCES = {
    **dict.fromkeys((*MODELS, "processing_class"), ".from_pretrained(...)"),
    **dict.fromkeys(("args", "data_collator", "peft_config", "quantization_config"), "(...)"),
    **dict.fromkeys(("train_dataset", "eval_dataset"), ".from_list(...)"),
}


def refuse_classes(arguments: Arguments) -> None:
    """Refuse classes in place of objects, and what is neither a model nor the name of one."""
    for name, how in _INSTANCES.items():
        if isinstance(value := arguments.get(name), type):
            raise ValueError(
                f"`{name}` is the class {value.__name__}, and not an object of it: pass `{value.__name__}{how}`."
            )
    for name in MODELS:
        value = arguments.get(name)
        if not isinstance(value, str | torch.nn.Module) and (value is not None or name == "model"):
            wrong = f"is a {type(value).__name__}" if value is not None else "is `None`"
            fix = f"pass `str({name})`" if isinstance(value, Path) else "pass a loaded model, or its name or folder"
            raise ValueError(f"`{name}` {wrong}, and neither a model nor the name of one: {fix}.")


def refuse_unflattenable(arguments: Arguments, task: Task, collator: type[FlatCollator]) -> None:
    """
    Refuse trainer arguments that rule out flat batches, which the class `collator` makes.
    """
    config, model, peft_config = arguments["args"], arguments["model"], arguments.get("peft_config")
    if reason := why_padded_by(model.active_peft_config if isinstance(model, PeftModel) else peft_config):
        raise ValueError(f"{reason}, or set `padding_free=False`.")
    given = arguments.get("data_collator")
    if given is not None and not isinstance(given, collator):
        refuse_collator(given, task, collator)
    parallelism = config.parallelism_config
    if parallelism is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        parallelism = ParallelismConfig()  # from the environment of `accelerate launch`, as accelerate will make it
    # Before accelerate 1.12 there is no sequence parallelism
    for name, kind in (("cp_size", "context"), ("sp_size", "sequence")):
        if parallelism is not None and (size := vars(parallelism).get(name, 1)) > 1:
            raise ValueError(
                f"`parallelism_config` with `{name}={size}`: {kind} parallelism cuts rows into parts of equal length, "
                f"and a flat batch is not made of rows. Set `{name}=1`, and for DPO and SFT "
                f"`sequence_parallel_size={size}` of this package, or set `padding_free=False`."
            )
    refuse_no_folder(config.output_dir)
    tokenizer: Any = arguments.get("processing_class")
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = tokenizer.tokenizer
    # Not all of TRL's configurations have a `pad_token`
    pads = given is None and vars(config).get("pad_token") is None and isinstance(tokenizer, PreTrainedTokenizerBase)
    if pads and tokenizer.pad_token is tokenizer.eos_token is None:
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has neither a `pad_token` nor an `eos_token` to stand in for "
            "it. Set `tokenizer.pad_token` to one of its tokens and pass it as `processing_class`."
        )
    # With a stream, TRL itself handles `dispatch_batches`
    is_stream = isinstance(arguments.get("train_dataset"), IterableDataset)
    for option in ("split_batches",) if is_stream else ("dispatch_batches", "split_batches"):
        if vars(config.accelerator_config)[option]:
            raise ValueError(
                f"`accelerator_config={{'{option}': True}}` cuts batches along their first dimension, which a flat "
                f"batch does not have. Leave `{option}` out, or set `padding_free=False`."
            )
    if trains_nothing(config):
        logger.warning(
            f"`num_train_epochs={config.num_train_epochs}` without `max_steps`: training ends before its first step, "
            "as in TRL."
        )
    if config.per_device_train_batch_size == 1 and isinstance(config, SFTConfig) and not config.packing:
        logger.warning(
            "`padding_free=True` with `per_device_train_batch_size=1`: there is next to nothing to gain, because a "
            "batch of one example has almost no padding. Use a larger batch and fewer "
            "`gradient_accumulation_steps`."
        )


def is_ours(trainer_class: type, method: str) -> bool:
    """Whether no subclass of the user's has overridden a method of our trainers, or has brought it."""
    owner = next((cls for cls in trainer_class.__mro__ if method in vars(cls)), None)
    return owner is None or owner.__module__.startswith("trl_paddingfree.")


def refuse_no_folder(output_dir: str) -> None:
    """Refuse an `output_dir` that is no folder and cannot become one, before models are loaded."""
    if not output_dir:
        raise ValueError(f"`output_dir={output_dir!r}` names no folder, and checkpoints go to one: name it.")
    path = Path(output_dir)
    there = next(each for each in (path, *path.absolute().parents) if each.exists() or each.is_symlink())
    # Dangling links do not exist, and no folder can be made in their place
    kind = "a link to nothing" if not there.exists() else "" if there.is_dir() else "a file"
    if kind:
        which = "is" if there == path else f"lies below {str(there)!r}, which is"
        raise ValueError(f"`output_dir={output_dir!r}` {which} {kind}, and checkpoints go to a folder: name another.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"`output_dir={output_dir!r}` cannot be written to, because {str(there)!r} allows no writing: name another."
        )


def refuse_collator(given: object, task: Task, collator: type[FlatCollator]) -> None:
    """Refuse a collator whose rows neither the class `collator` nor the task's `padded_collator` can make flat."""
    takes_any = task.padded_collator is not None and collator is task.collator
    if collator.flattens(given) or (takes_any and callable(given) and not isinstance(given, FlatCollator)):
        return
    ours = collator.__module__ == "trl_paddingfree.core.data.collate"  # which the package exports
    name = f"`{'trl_paddingfree' if ours else collator.__module__}.{collator.__name__}`"
    trl = " or ".join(f"`{base.__name__}`" for base in collator.trl_collators())
    either = f"TRL's {trl}, or from {name}," if trl and not takes_any else f"{name},"
    raise ValueError(
        f"`data_collator` is a {type(given).__name__}, and this trainer cannot make its batches flat. Leave it out, "
        f"pass one that derives from {either} or set `padding_free=False`."
    )


def refuse_frozen(model: torch.nn.Module) -> None:
    """Refuse to train a model of which no weight trains. It may have been frozen while the trainer was made."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "No weight of the model trains: all have `requires_grad=False`. Pass a `peft_config`, or call "
            "`model.requires_grad_(True)`."
        )


def refuse_adapters(models: Iterable[torch.nn.Module]) -> None:
    """Refuse models with adapters whose output for a token depends on other tokens."""
    if reason := why_padded(models):
        raise ValueError(f"{reason}, delete the adapter if nothing uses it, or set `padding_free=False`.")


def take_out_of_compilers(arguments: Arguments) -> None:
    """Replace models that `torch.compile` has wrapped by what is within, and warn that they train uncompiled."""
    names = []
    for name in MODELS:
        if isinstance(model := arguments.get(name), torch.nn.Module):
            arguments[name], was_compiled = upstream.uncompiled(model)
            names += [f"`{name}`"] * was_compiled
    if names:
        logger.warning(f"{' and '.join(names)}: {UNCOMPILED}")


def warn_of_dropout(model: PreTrainedModel, config: TrainingArguments) -> None:
    """Warn of dropout that `disable_dropout` does not reach: padded and flat runs then draw different masks."""
    if not vars(config).get("disable_dropout"):  # TRL's configuration for SFT has none
        return
    options = vars(model.config.get_text_config())
    rates = {
        name: value
        for module in model.modules()
        for name, value in vars(module).items()
        if not isinstance(module, torch.nn.Dropout) and isinstance(value, float) and "drop" in name and value > 0
    }
    for name, value in rates.items():
        # A layer's name for it may differ from the configuration's: `attention_dropout` of GPT-J is `attn_pdrop`
        alike = [option for option in options if "drop" in option and options[option] == value]
        words = f"`{name}`" if name in options or not alike else " or ".join(f"`{option}`" for option in alike)
        logger.warning(
            f"{type(model).__name__} draws dropout by a function (`{name}={value}`), which `disable_dropout=True` "
            "does not reach, with padding either: padded and flat runs draw different masks. To compare figures, "
            f"set {words} to 0 in the model's configuration."
        )


def warn_of_padding(trainer_class: Any, config: TrainingArguments) -> None:
    """
    Warn that a trainer pads because TRL's configuration has `padding_free=False`, its default. With one of ours, name
    the options that then have no effect.
    """
    name = type(config).__name__
    does = "packs" if vars(config).get("packing") else "pads"
    as_trl = f"{does} as TRL's {trainer_class.trl_trainer.__name__} does, because"
    if not isinstance(config, PaddingFreeOptions):
        logger.warning(
            f"{trainer_class.__name__} {as_trl} {name} has `padding_free=False`, its default. Set "
            f"`{name}(padding_free=True)`, or use {trainer_class.config_class.__name__}."
        )
        return
    others = config.for_padded_too()
    idle = [
        f"`{option.name}={value!r}`"
        for option in fields(PaddingFreeOptions)
        if option.name not in others and (value := vars(config)[option.name]) and value != option.default
    ]
    if idle:
        logger.warning(
            f"{trainer_class.__name__} {as_trl} `padding_free=False`, so these have no effect: {', '.join(idle)}."
        )


def warn_of_precision(in_force: str, config: TrainingArguments) -> None:
    """Warn if `accelerate launch` overrides the precision that the configuration asks for."""
    asked = "bf16" if config.bf16 else "fp16" if config.fp16 else "no"
    if in_force != asked:
        logger.warning(
            f"Training runs with `mixed_precision={in_force!r}`, as `accelerate launch` was told (by its "
            f"configuration or `--mixed_precision`), in spite of `bf16={config.bf16}, fp16={config.fp16}`. Change one "
            "of them."
        )


def refuse_images(arguments: Arguments) -> None:
    """Refuse data with images for a trainer that trains on text only."""
    for _, dataset in given_datasets(arguments):
        if names := [name for name in column_names(dataset) if name in ("image", "images")]:
            raise ValueError(
                f"The data has a column `{names[0]}`, and this trainer trains on text only. Leave the column out with "
                f"`dataset.remove_columns('{names[0]}')`, or set `padding_free=False`."
            )
