"""The options that this package adds to TRL's configurations."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from datasets import Dataset, IterableDataset
from transformers import TrainingArguments
from transformers.utils import is_torch_xla_available, logging
from trl import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
from trl.trainer.utils import get_config_model_id

from ...capabilities import classes_of
from ..data.lengths import AnyDataset
from ..device import has_accelerator
from .options import SHARING, CoreOptions, option
from .values import DOCUMENTED, refuse_unknown_words, refuse_wrong_values

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
    if trainer_class.__module__.startswith("trl_paddingfree."):  # user-defined trainers may know more words
        for name in DOCUMENTED:
            refuse_unknown_words(config, trl_config, name, trl_trainer)
    return config


def refuse_wrong_options(config: Any) -> None:
    """Refuse values that options cannot have, in a configuration of ours or of TRL's."""
    if isinstance(config, PaddingFreeOptions):
        config.check_values()
    refuse_wrong_values(config, PaddingFreeOptions)


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
