"""Arguments of a trainer that it would fail on after models and data are loaded."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin, SchedulerType, TrainingArguments, get_scheduler
from transformers.utils import logging

from ..core.trainers.configs import Arguments
from ..core.trainers.refusals import MODELS

logger = logging.get_logger(__name__)

# Arguments of trainers that take an object, and how one is made. Python reports a class in its place as a missing
# attribute
_INSTANCES = {
    **dict.fromkeys((*MODELS, "processing_class"), ".from_pretrained(...)"),
    **dict.fromkeys(("args", "data_collator", "peft_config", "quantization_config"), "(...)"),
    **dict.fromkeys(("train_dataset", "eval_dataset"), ".from_list(...)"),
}


def _refuse_containers(arguments: Arguments) -> None:
    """Refuse single objects in place of several."""
    callbacks, optimizers = arguments.get("callbacks"), arguments.get("optimizers", (None, None))
    if not isinstance(callbacks, list | None):
        raise ValueError(f"`callbacks` is {_short(callbacks)}, and must be a list: pass `callbacks=[...]`.")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise ValueError(
            f"`optimizers` is {_short(optimizers)}, and must be a pair: pass `optimizers=(optimizer, scheduler)`, with "
            "`None` for what `args` should make."
        )


def _short(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def refuse_classes(arguments: Arguments) -> None:
    """Refuse classes in place of objects, single objects in place of several, and what is no model nor its name."""
    _refuse_containers(arguments)
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


def refuse_no_padding_token(arguments: Arguments) -> None:
    """Refuse a tokenizer that has no token to pad with, unless a collator was given, which may need none."""
    tokenizer: Any = arguments.get("processing_class")
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = tokenizer.tokenizer
    if arguments.get("data_collator") is not None or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    # Not all of TRL's configurations have these. A template comes with the `eos_token` of its tokenizer, or as a file
    pad_token, eos_token, template = (
        vars(arguments["args"]).get(name) for name in ("pad_token", "eos_token", "chat_template_path")
    )
    is_given = pad_token or eos_token or (template and not template.endswith((".jinja", ".j2")))
    if not is_given and tokenizer.pad_token is tokenizer.eos_token is None:
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has neither a `pad_token` nor an `eos_token` to stand in for "
            "it. Set `tokenizer.pad_token` to one of its tokens and pass it as `processing_class`."
        )


def refuse_wrong_schedule(config: TrainingArguments, given_optimizer: torch.optim.Optimizer | None) -> None:
    """
    Refuse arguments that the schedule of the learning rate does not take, and one that lacks some: transformers makes
    it once training begins. Here it is made for an optimizer of a few numbers, with the groups and the learning rate of
    the one that trains.
    """
    if config.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return  # its configuration may have a schedule of its own
    name = SchedulerType(config.lr_scheduler_type).value
    given: Any = config.lr_scheduler_kwargs  # transformers has parsed a string
    groups, rate = 2, config.learning_rate  # of weights that decay and others
    if given_optimizer is not None:
        defaults = getattr(given_optimizer, "defaults", {})  # which wrappers may lack
        groups, rate = len(given_optimizer.param_groups), defaults.get("lr", rate)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(groups)], lr=rate)
    try:
        get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=given)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`lr_scheduler_kwargs={given!r}` does not fit `lr_scheduler_type={name!r}`: {str(error).rstrip('.')}. "
            "Correct one of them."
        ) from error


def warn_of_precision(in_force: str, config: TrainingArguments) -> None:
    """Warn if `accelerate launch` overrides the precision that the configuration asks for."""
    asked = "bf16" if config.bf16 else "fp16" if config.fp16 else "no"
    if in_force != asked:
        logger.warning(
            f"Training runs with `mixed_precision={in_force!r}`, as `accelerate launch` was told (by its "
            f"configuration or `--mixed_precision`), in spite of `bf16={config.bf16}, fp16={config.fp16}`. Change one "
            "of them."
        )


def warn_of_no_steps(config: TrainingArguments) -> None:
    """Warn if training ends before its first step."""
    if config.max_steps <= 0 and not math.ceil(config.num_train_epochs):
        logger.warning(
            f"`num_train_epochs={config.num_train_epochs}` without `max_steps`: training ends before its first step, "
            "as in TRL."
        )
