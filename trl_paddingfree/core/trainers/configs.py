"""The options that this package adds to TRL's configurations."""

import inspect
import re
import warnings
from dataclasses import dataclass
from numbers import Integral
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from datasets import Dataset, IterableDataset
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments
from transformers.utils import is_torch_xla_available, logging
from trl import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
from trl.trainer.utils import get_config_model_id

from ...capabilities import classes_of
from ..data.lengths import AnyDataset
from ..device import has_accelerator
from ..spelling import did_you_mean
from .options import SHARING, CoreOptions, option

if TYPE_CHECKING:  # the same bases, for editors and type checkers
    from ...answers.options import Options as AnswersOptions
    from ...arranging.options import Options as ArrangingOptions
    from ...budgets.options import Options as BudgetsOptions
    from ...groups.options import Options as GroupsOptions
    from ...proof.options import Options as ProofOptions

    class ComposedOptions(AnswersOptions, ProofOptions, GroupsOptions, BudgetsOptions, ArrangingOptions, CoreOptions):
        pass
else:

    class ComposedOptions(*classes_of("options", "Options"), CoreOptions):
        """The options of the core, with those of the capabilities that are there."""


logger = logging.get_logger(__name__)

Arguments: TypeAlias = dict[str, Any]  # of TRL's trainers, by name

# The values that a type allows, in words
_ALLOWED: dict[object, str] = {bool: "`True` or `False`", int: "a whole number of at least {least}", NoneType: "`None`"}
# Minimum sizes: transformers would fail only after loading model and data. One token leaves nothing to predict
_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_length": 2,
}
# Options of checkpoints: PyTorch's, transformers' and TRL's
_OF_CHECKPOINTS = {
    "preserve_rng_state",
    "every_n_layers",
    "offload",
    "selective",
    *inspect.signature(checkpoint).parameters,
}


def silence() -> None:
    """Silence the deprecation warnings for the old names by which TRL still calls gradient checkpointing."""
    warnings.filterwarnings("ignore", message=".*checkpointing.* is deprecated", category=FutureWarning)


def config_of(trainer_class: Any, arguments: Arguments) -> TrainingArguments:
    """The configuration among a trainer's arguments; by default one of ours, with TRL's default `output_dir`."""
    trl_trainer, trl_config = trainer_class.trl_trainer, trainer_class.trl_config
    if (config := arguments.get("args")) is None:
        model = arguments["model"]
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        config = trainer_class.config_class(f"{name.split('/')[-1]}-{trl_trainer._name}")
    if not isinstance(config, trl_config):
        raise ValueError(
            f"`args` is a {type(config).__name__}, and {trainer_class.__name__} takes a "
            f"{trainer_class.config_class.__name__}, or TRL's {trl_config.__name__}."
        )
    refuse_wrong_options(config)  # again: attributes may have been set since it was made
    given, known = vars(config).get("loss_type") or (), valid_losses(trl_config)
    for loss in [given] if isinstance(given, str) else given:  # user-defined trainers may have others
        if known and loss not in known and trainer_class.__module__.startswith("trl_paddingfree."):
            meant = did_you_mean(str(loss), known, "loss_type={!r}")
            raise ValueError(
                f"`loss_type={loss!r}` is not a loss of TRL's {trl_trainer.__name__}, which has "
                f"{', '.join(map(repr, known))}.{meant}"
            )
    return config


def valid_losses(config_class: type) -> list[str]:
    """The losses that the documentation of a configuration lists, or that of its base of TRL's; if any."""
    for base in config_class.__mro__:
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        if documented := re.search(r"^( *)loss_type \(.*\n((?:\1 .*\n|\n)*)", text, re.MULTILINE):
            return [*dict.fromkeys(re.findall(r"`['\"](\w+)['\"]`", documented[2]))]
    return []


def refuse_wrong_options(config: Any) -> None:
    """
    Refuse invalid values of options, in a configuration of ours or of TRL's, and name the valid ones. What is valid is
    said where [`~trl_paddingfree.core.trainers.options.option`] is.
    """
    values = vars(config)
    if isinstance(config, PaddingFreeOptions):
        config.check_values()
    for name, hint in get_type_hints(PaddingFreeOptions, include_extras=True).items():
        hint, least = get_args(hint) if get_origin(hint) is Annotated else (hint, 1)
        kinds = _kinds(hint)
        words = [kind for kind in kinds if isinstance(kind, str)]
        # TRL's own configurations have only some of the options
        if name not in values or not {*kinds} - {*words} <= _ALLOWED.keys():
            continue
        value = values[name]
        expected = [f"one of {', '.join(map(repr, words))}"] if words else []
        expected += [phrase.format(least=least) for kind, phrase in _ALLOWED.items() if kind in kinds]
        kind = type(value) if value is None or isinstance(value, bool) else value
        if isinstance(kind, Integral) and int(kind) >= least:
            kind = int
        if kind not in kinds:
            meant = did_you_mean(str(value), words, f"{name}={{!r}}", 0.5)
            raise ValueError(f"`{name}={value!r}` must be {' or '.join(expected)}.{meant}")
    _refuse_strings(config)
    for name, least in _LEAST.items():
        if isinstance(size := values.get(name), int) and size < least:
            raise ValueError(f"`{name}={size}` must be at least {least}.")
    kwargs = values.get("gradient_checkpointing_kwargs")
    for name in set(kwargs) - _OF_CHECKPOINTS if isinstance(kwargs, dict) else ():
        if meant := did_you_mean(name, _OF_CHECKPOINTS):
            raise ValueError(f"`gradient_checkpointing_kwargs` has `{name}`, which checkpoints do not know.{meant}")


def _refuse_strings(config: Any) -> None:
    """
    Refuse strings where an option takes a number or a truth value, and fractions where it counts: a command line and a
    YAML file convert them, and TRL fails on them minutes later, or takes `"no"` for true.
    """
    values = vars(config)
    try:
        hints = get_type_hints(type(config))
    except NameError:  # a subclass of the user's, whose annotations name what its module does not have
        return
    for name, hint in hints.items():
        value, members = values.get(name), {*get_args(hint)} if get_origin(hint) in (Union, UnionType) else {hint}
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


def _kinds(hint: object) -> list[object]:
    """The types and words that a type hint allows: a type, a union or a literal."""
    members = get_args(hint)
    return [kind for member in members for kind in _kinds(member)] if members else [hint]


def given_datasets(arguments: Arguments) -> list[tuple[str, AnyDataset]]:
    """The datasets among the arguments of a trainer, with their names."""
    eval_dataset = arguments.get("eval_dataset")
    eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    datasets = [("train", arguments.get("train_dataset")), *eval_datasets.items()]
    # Other types are left for TRL to refuse
    return [(name, dataset) for name, dataset in datasets if isinstance(dataset, Dataset | IterableDataset)]


def train_where_one_can(config: TrainingArguments) -> None:
    """
    On a machine without an accelerator, choose the CPU and float32, and say so, unless the precision or `use_cpu` is
    set. Otherwise, transformers would refuse TRL's default there: bfloat16 without `use_cpu`.
    """
    is_undecided = vars(config).get("bf16", False) is None and not config.fp16 and not config.use_cpu
    if is_undecided and not has_accelerator() and not is_torch_xla_available():
        config.use_cpu, config.bf16 = True, False
        logger.warning_once("No accelerator: training on the CPU (`use_cpu=True, bf16=False`).")


@dataclass
class PaddingFreeOptions(ComposedOptions):
    """
    Options of padding-free training, shared by all trainers and described by the help text of each field. A value that
    its type does not allow raises a `ValueError`.

    >>> from dataclasses import dataclass, fields
    >>> from trl import DPOConfig
    >>> from trl_paddingfree import PaddingFreeOptions
    >>> @dataclass
    ... class OwnConfig(PaddingFreeOptions, DPOConfig):
    ...     pass
    >>> config = OwnConfig(output_dir="out", bf16=False, report_to="none", flat_attention="segment")
    >>> config.flat_attention, config.beta
    ('segment', 0.1)
    """

    def __post_init__(self):
        silence()
        refuse_wrong_options(self)
        if isinstance(self, TrainingArguments):  # mixed in before one of TRL's configurations
            train_where_one_can(self)
            super().__post_init__()  # type: ignore[misc]


@dataclass
class PaddingFreeDPOConfig(PaddingFreeOptions, DPOConfig):
    """TRL's [`~trl.DPOConfig`] with the [`PaddingFreeOptions`]."""


@dataclass
class PaddingFreeSFTConfig(PaddingFreeOptions, SFTConfig):
    """TRL's [`~trl.SFTConfig`] with the [`PaddingFreeOptions`]. `prefix_sharing` defaults to `False`."""

    prefix_sharing: bool = option(False, SHARING)


@dataclass
class PaddingFreeRewardConfig(PaddingFreeOptions, RewardConfig):
    """TRL's [`~trl.RewardConfig`] with the [`PaddingFreeOptions`]."""


@dataclass
class PaddingFreeKTOConfig(PaddingFreeOptions, KTOConfig):
    """TRL's [`~trl.KTOConfig`] with the [`PaddingFreeOptions`]."""


@dataclass
class PaddingFreeGRPOConfig(PaddingFreeOptions, GRPOConfig):
    """TRL's [`~trl.GRPOConfig`] with the [`PaddingFreeOptions`]."""


@dataclass
class PaddingFreeRLOOConfig(PaddingFreeOptions, RLOOConfig):
    """TRL's [`~trl.RLOOConfig`] with the [`PaddingFreeOptions`]."""


@dataclass
class PaddingFreeDistillationConfig(PaddingFreeOptions, DistillationConfig):
    """TRL's [`~trl.DistillationConfig`] with the [`PaddingFreeOptions`]."""
