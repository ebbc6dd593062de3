"""
What values TRL's options can have. Wrong ones are refused when a configuration is made: TRL and PyTorch would fail on
them minutes later, or train on nonsense.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch.utils.checkpoint import checkpoint

from ..core.spelling import did_you_mean

# Ranges of numbers, in words, and the options that have to lie in them. TRL and transformers take any number. Below
# zero, `beta` and weights of a loss turn it around: the model learns what it should not, and logs that it does well
_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        "at least 0",
        lambda x: x >= 0,
        ("learning_rate", "weight_decay", "adam_epsilon", "neftune_noise_alpha", "num_train_epochs", "beta")
        + ("desirable_weight", "undesirable_weight", "center_rewards_coefficient", "epsilon", "epsilon_high", "delta")
        + ("dataset_num_proc", "dataloader_num_workers"),
    ),
    (
        "at least 1",
        lambda x: x >= 1,
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        + ("pad_to_multiple_of", "dataloader_prefetch_factor", "ref_model_sync_steps", "num_iterations")
        + ("steps_per_generation", "max_completion_length"),
    ),
    ("at least 2", lambda x: x >= 2, ("max_length",)),  # one token leaves nothing to predict
    ("more than 0", lambda x: x > 0, ("temperature", "repetition_penalty", "discopop_tau")),
    (
        "a number from 0 to 1",
        lambda x: 0 <= x <= 1,
        ("label_smoothing", "label_smoothing_factor", "ld_alpha", "ref_model_mixup_alpha", "min_p")
        + ("top_entropy_quantile",),
    ),
    ("more than 0 and at most 1", lambda x: 0 < x <= 1, ("top_p",)),
    ("at least 0 and less than 1", lambda x: 0 <= x < 1, ("adam_beta1", "adam_beta2")),
    (f"a whole number from 0 to {2**32 - 1}", lambda x: 0 <= x < 2**32, ("seed",)),
)
# In Python, PyTorch takes more backends than the command line offers, such as "cpu:gloo,cuda:nccl"
_TAKES_MORE = "ddp_backend"
_RENAMED = ("packing_strategy", "bfd-requeue")  # TRL takes the old word, and warns
# Options whose words only the documentation of TRL's configurations lists
DOCUMENTED = (
    "loss_type", "f_divergence_type", "importance_sampling_level", "scale_rewards", "multi_objective_aggregation",
    "vllm_mode",
)  # fmt: skip
# Options of checkpoints: PyTorch's, transformers' and TRL's
_OF_CHECKPOINTS = {
    "preserve_rng_state",
    "every_n_layers",
    "offload",
    "selective",
    *inspect.signature(checkpoint).parameters,
}


def documented_words(config_class: type, name: str) -> list[str]:
    """The words that the documentation of a configuration, or of its base of TRL's, lists for an option; if any."""
    for base in config_class.__mro__:
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        if documented := re.search(rf"^( *){name} \(.*\n((?:\1 .*\n|\n)*)", text, re.MULTILINE):
            if possible := re.search(r"Possible values are:? ([^.]*)\.", documented[2]):
                return [*dict.fromkeys(re.findall(r"`['\"]?(\w+)['\"]?`", possible[1]))]
            return [*dict.fromkeys(re.findall(r"`['\"](\w+)['\"]`", documented[2]))]
    return []


def refuse_unknown_words(config: Any, trainer_class: Any, name: str) -> None:
    """Refuse words of an option that TRL's trainer does not know: it would say so once it computes its first loss."""
    trl_trainer, config_class = trainer_class.trl_trainer, trainer_class.trl_config
    given, known = vars(config).get(name), documented_words(config_class, name)
    if given == [] and name == "loss_type":
        raise ValueError(f"`{name}=[]` has no loss: name at least one of {', '.join(map(repr, known))}.")
    for word in given if isinstance(given, list) else [given]:
        if known and isinstance(word, str) and word not in known:
            meant = did_you_mean(word, known, f"{name}={{!r}}")
            what = "a loss" if name == "loss_type" else "a value"
            raise ValueError(
                f"`{name}={word!r}` is not {what} of TRL's {trl_trainer.__name__}, which has "
                f"{', '.join(map(repr, known))}.{meant}"
            )


def words_of(config_classes: Sequence[type]) -> dict[str, list[str]]:
    """By option, the words that the documentation of these configurations lists, if the option takes no other value."""
    names = (name for name in DOCUMENTED if name != "scale_rewards")  # which may also be a truth value
    return {name: [word for config in config_classes for word in documented_words(config, name)] for name in names}


def refuse_wrong_values(config: Any) -> None:
    """Refuse values that the options of a configuration, ours or TRL's, cannot have, and name those that they can."""
    _refuse_types(config)
    values = vars(config)
    for phrase, holds, names in _RANGES:
        for name in names:
            value = values.get(name)
            if isinstance(value, int | float) and not holds(value):
                raise ValueError(f"`{name}={value!r}` must be {phrase}.")
    for field in fields(config):
        # As on the command line. transformers and TRL would only compare, and take other words for the default
        known, value = [*(field.metadata.get("choices") or ())], values.get(field.name)
        is_wrong = isinstance(value, str) and value not in known and value != field.default
        if known and is_wrong and (field.name, value) != _RENAMED and field.name not in (*DOCUMENTED, _TAKES_MORE):
            raise _not_among(field.name, value, known)
    if isinstance(given := values.get("optim_args"), str) and any(x.count("=") != 1 for x in given.split(",")):
        raise ValueError(f"`optim_args={given!r}` must be pairs such as `'rank=8,scale=0.5'`.")
    kwargs = values.get("gradient_checkpointing_kwargs")
    for name in set(kwargs) - _OF_CHECKPOINTS if isinstance(kwargs, dict) else ():
        if meant := did_you_mean(name, _OF_CHECKPOINTS):
            raise ValueError(f"`gradient_checkpointing_kwargs` has `{name}`, which checkpoints do not know.{meant}")


def _refuse_types(config: Any) -> None:
    """
    Refuse strings where an option takes a number or a truth value, fractions where it counts, truth values and unknown
    words where it takes one of a few: a command line and a YAML file convert them, and TRL fails on them minutes later,
    or takes `"no"` for true.
    """
    values = vars(config)
    try:
        hints = get_type_hints(type(config))
    except NameError:  # a subclass of the user's, whose annotations name what its module does not have
        return
    classes = [cls for cls in type(config).__mro__ if cls.__module__.startswith("trl_paddingfree.")]
    ours = {name for cls in classes for name in vars(cls).get("__annotations__", ())}  # the core checks their values
    for name, hint in hints.items():
        if name in ours:
            continue
        value, members = values.get(name), {*get_args(hint)} if get_origin(hint) in (Union, UnionType) else {hint}
        words = [each.value for kind in members if isinstance(kind, type) and issubclass(kind, Enum) for each in kind]
        if words and isinstance(value, str | bool) and not isinstance(value, Enum) and value not in words:
            raise _not_among(name, value, words)
        if not isinstance(value, str | float) or not members - {NoneType} <= {bool, int, float}:
            continue
        if isinstance(value, float):
            if members - {NoneType} == {int}:
                raise ValueError(f"`{name}={value!r}` must be a whole number: write `{name}={value:.0f}`.")
            continue
        if bool in members:
            raise ValueError(f"`{name}={value!r}` is a string, and must be `True` or `False`, without quotes.")
        number = "a number" if float in members else "a whole number"
        try:
            float(value)
        except ValueError:
            raise ValueError(f"`{name}={value!r}` is a string, and must be {number}.") from None
        raise ValueError(f"`{name}={value!r}` is a string, and must be {number}: write `{name}={value.strip()}`.")


def _not_among(name: str, value: str | bool, words: list[str]) -> ValueError:
    """The error for a value of an option that is none of its words."""
    meant = did_you_mean(str(value), words, f"{name}={{!r}}", 0.6)
    if value is False and "no" in words:  # as YAML reads `no`
        meant = f" Write `{name}='no'`, in quotes."
    return ValueError(f"`{name}={value!r}` must be one of {', '.join(map(repr, words))}.{meant}")
