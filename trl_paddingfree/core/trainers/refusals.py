"""Refusals of what flat batches rule out: each `ValueError` names an argument, its value, and what to change."""

import os
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from datasets import IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import logging
from trl import SFTConfig

from .. import upstream
from ..data.collate import FlatCollator
from ..data.lengths import column_names
from ..model.adapters import why_padded, why_padded_by
from ..model.flat_model import UNCOMPILED
from .configs import Arguments, PaddingFreeOptions, given_datasets

logger = logging.get_logger(__name__)


MODELS = ("model", "ref_model", "teacher_model")


def refuse_unflattenable(arguments: Arguments) -> None:
    """Refuse trainer arguments that rule out flat batches."""
    config, model, peft_config = arguments["args"], arguments["model"], arguments.get("peft_config")
    if reason := why_padded_by(model.active_peft_config if isinstance(model, PeftModel) else peft_config):
        raise ValueError(f"{reason}, or set `padding_free=False`.")
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
    # With a stream, TRL itself handles `dispatch_batches`
    is_stream = isinstance(arguments.get("train_dataset"), IterableDataset)
    for option, reason in (
        ("dispatch_batches", "cuts batches along their first dimension, which a flat batch does not have"),
        ("split_batches", "divides `per_device_train_batch_size` among processes, of which each counts on it"),
    ):
        if vars(config.accelerator_config)[option] and not (is_stream and option == "dispatch_batches"):
            raise ValueError(
                f"`accelerator_config={{'{option}': True}}` {reason}. Leave `{option}` out, or set "
                "`padding_free=False`."
            )
    if config.per_device_train_batch_size == 1 and isinstance(config, SFTConfig) and not config.packing:
        logger.warning(
            "`padding_free=True` with `per_device_train_batch_size=1`: there is next to nothing to gain, because a "
            "batch of one example has almost no padding. Use a larger batch and fewer "
            "`gradient_accumulation_steps`."
        )


def is_ours(trainer_class: type, method: str) -> bool:
    """Whether no subclass of the user's has overridden a method of our trainers or TRL's, or has brought it."""
    owner = next((cls for cls in trainer_class.__mro__ if method in vars(cls)), None)
    return owner is None or owner.__module__.startswith(("trl_paddingfree.", "trl."))


def refuse_collator(given: object, collator: type[FlatCollator]) -> None:
    """Refuse a `given` collator, whose rows the class `collator` cannot make flat."""
    ours = collator.__module__ == "trl_paddingfree.core.data.collate"  # which the package exports
    name = f"`{'trl_paddingfree' if ours else collator.__module__}.{collator.__name__}`"
    trl = " or ".join(f"`{base.__name__}`" for base in collator.trl_collators())
    either = f"TRL's {trl}, or from {name}," if collator.takes_subclasses else f"{name},"
    raise ValueError(
        f"`data_collator` is a {type(given).__name__}, and this trainer cannot make its batches flat. Leave it out, "
        f"pass one that derives from {either} or set `padding_free=False`."
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
            "does not reach, with padding or without: padded and flat runs draw different masks. To compare figures, "
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


def refuse_images(arguments: Arguments) -> None:
    """Refuse data with images for a trainer that trains on text only."""
    for _, dataset in given_datasets(arguments):
        if names := [name for name in column_names(dataset) if name in ("image", "images")]:
            raise ValueError(
                f"The data has a column `{names[0]}`, and this trainer trains on text only. Leave the column out with "
                f"`dataset.remove_columns('{names[0]}')`, or set `padding_free=False`."
            )
