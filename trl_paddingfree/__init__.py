"""TRL's trainers with almost no padding and with shared prefixes computed once: the same results from fewer tokens."""

import importlib
from typing import TYPE_CHECKING

from .versions import naming_versions

__version__ = "0.6.0"

# Imported on first use: `import trl_paddingfree` costs nothing and changes nothing
_MODULES = {
    "check.anywhere": ("padding_free",),
    "check.packed": ("check_packed",),
    "check.prove": ("CheckResult", "UnprovenModelError"),
    "data.collate": ("concatenated_inputs",),
    "data.task": ("Task",),
    "data.turns": ("split_turns",),
    "flat.batch": ("FlatBatch",),
    "flat.counts": ("BatchCounts",),
    "flat.segments": ("Segments",),
    "model.flat_model": ("FlatModel",),
    "trainers.collated": ("CollatedTrainer",),
    "trainers.configs": ("PaddingFreeOptions",),
    "trainers.online": ("OnlineTrainer",),
    "trainers.runtime": ("when_flat",),
}
_COLLATORS = ("Flat", "LanguageModeling", "Preference", "Reward", "UnpairedPreference")
_TRAINERS = ("DPO", "Distillation", "GRPO", "KTO", "RLOO", "Reward", "SFT")
_EXPORTS = {
    **{name: module for module, names in _MODULES.items() for name in names},
    **{f"{name}Collator": "data.collate" for name in _COLLATORS},
    **{f"PaddingFree{name}Config": "trainers.configs" for name in _TRAINERS},
    **{f"PaddingFree{name}Trainer": f"trainers.{name.lower()}" for name in _TRAINERS},
}
__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from .check.anywhere import padding_free
    from .check.packed import check_packed
    from .check.prove import CheckResult, UnprovenModelError
    from .data.collate import (
        FlatCollator,
        LanguageModelingCollator,
        PreferenceCollator,
        RewardCollator,
        UnpairedPreferenceCollator,
        concatenated_inputs,
    )
    from .data.task import Task
    from .data.turns import split_turns
    from .flat.batch import FlatBatch
    from .flat.counts import BatchCounts
    from .flat.segments import Segments
    from .model.flat_model import FlatModel
    from .trainers.collated import CollatedTrainer
    from .trainers.configs import (
        PaddingFreeDistillationConfig,
        PaddingFreeDPOConfig,
        PaddingFreeGRPOConfig,
        PaddingFreeKTOConfig,
        PaddingFreeOptions,
        PaddingFreeRewardConfig,
        PaddingFreeRLOOConfig,
        PaddingFreeSFTConfig,
    )
    from .trainers.distillation import PaddingFreeDistillationTrainer
    from .trainers.dpo import PaddingFreeDPOTrainer
    from .trainers.grpo import PaddingFreeGRPOTrainer
    from .trainers.kto import PaddingFreeKTOTrainer
    from .trainers.online import OnlineTrainer
    from .trainers.reward import PaddingFreeRewardTrainer
    from .trainers.rloo import PaddingFreeRLOOTrainer
    from .trainers.runtime import when_flat
    from .trainers.sft import PaddingFreeSFTTrainer


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_versions():
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
