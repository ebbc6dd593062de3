"""The options that this package adds to TRL's configurations."""

import warnings
from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

from datasets import Dataset, IterableDataset
from transformers import TrainingArguments
from transformers.utils import is_torch_xla_available, logging
from trl.trainer.utils import get_config_model_id

from ...capabilities import classes_of
from ..data.lengths import AnyDataset
from ..device import has_accelerator
from ..spelling import did_you_mean
from .options import CoreOptions

if TYPE_CHECKING:  # the same bases, for editors and type checkers
    from ...answers.options import Options as AnswersOptions
    from ...argument_checks.options import Options as ArgumentsOptions
    from ...arranging.options import Options as ArrangingOptions
    from ...budgets.options import Options as BudgetsOptions
    from ...groups.options import Options as GroupsOptions
    from ...proof.options import Options as ProofOptions

    class ComposedOptions(
        AnswersOptions, ArgumentsOptions, ProofOptions, GroupsOptions, BudgetsOptions, ArrangingOptions, CoreOptions
    ):
        pass
else:

    class ComposedOptions(*classes_of("options", "Options"), CoreOptions):
        """The options of the core, with those of the capabilities that are there."""


logger = logging.get_logger(__name__)

Arguments: TypeAlias = dict[str, Any]  # of TRL's trainers, by name

# The values that a type allows, in words
_ALLOWED: dict[object, str] = {bool: "`True` or `False`", int: "a whole number of at least {least}", NoneType: "`None`"}


def silence() -> None:
    """Silence the deprecation warnings for the old names by which TRL still calls gradient checkpointing."""
    warnings.filterwarnings("ignore", message=".*checkpointing.* is deprecated", category=FutureWarning)


def config_of(trainer_class: Any, arguments: Arguments) -> TrainingArguments:
    """The configuration among a trainer's arguments; by default one of ours, with TRL's default `output_dir`."""
    trl_config = trainer_class.trl_config
    if (config := arguments.get("args")) is None:
        model = arguments["model"]
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        config = trainer_class.config_class(f"{name.split('/')[-1]}-{trainer_class.trl_trainer._name}")
    if not isinstance(config, trl_config):
        raise ValueError(
            f"`args` is a {type(config).__name__}, and {trainer_class.__name__} takes a "
            f"{trainer_class.config_class.__name__}, or TRL's {trl_config.__name__}."
        )
    refuse_wrong_options(config)  # again: attributes may have been set since it was made
    return config


def refuse_wrong_options(config: Any) -> None:
    """
    Refuse values that our options cannot have, in a configuration of ours or of TRL's, and name those that they can.
    What these are is said where [`~trl_paddingfree.core.trainers.options.option`] is.
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
