"""TRL's trainers with almost no padding and with shared prefixes computed once: the same results from fewer tokens."""

from typing import TYPE_CHECKING

from .capabilities import is_there, needed
from .core.versions import naming_versions

__version__ = "0.7.0"

# Imported on first use: `import trl_paddingfree` costs nothing and changes nothing
_MODULES = {
    "anywhere.prove": ("padding_free",),
    "packed.check": ("check_packed",),
    "core.check.prove": ("CheckResult", "UnprovenModelError"),
    "core.data.collate": ("concatenated_inputs",),
    "core.data.task": ("Task",),
    "cli.turns": ("split_turns",),
    "core.flat.batch": ("FlatBatch",),
    "core.flat.counts": ("BatchCounts",),
    "core.flat.segments": ("Segments",),
    "core.model.flat_model": ("FlatModel",),
    "core.trainers.composed": ("CollatedTrainer",),
    "core.trainers.configs": ("PaddingFreeOptions",),
    "online.composed": ("OnlineTrainer",),
    "core.trainers.runtime": ("when_flat",),
}
_COLLATORS = ("Flat", "LanguageModeling", "Preference", "Reward", "UnpairedPreference")
_TRAINERS = {
    "core.trainers": ("DPO", "SFT"),
    "heads": ("KTO", "Reward"),
    "online": ("Distillation", "GRPO", "RLOO"),
}
_EXPORTS = {
    **{name: module for module, names in _MODULES.items() for name in names},
    **{f"{name}Collator": "core.data.collate" for name in _COLLATORS},
    **{
        f"PaddingFree{name}{kind}": f"{folder}.{name.lower()}"
        for folder, names in _TRAINERS.items()
        for name in names
        for kind in ("Trainer", "Config")
    },
}
# Any folder but the core may be deleted: its names are gone, and all others stay
__all__ = [*(name for name, module in _EXPORTS.items() if is_there(module.partition(".")[0])), "__version__"]

if TYPE_CHECKING:
    from .anywhere.prove import padding_free
    from .cli.turns import split_turns
    from .core.check.prove import CheckResult, UnprovenModelError
    from .core.data.collate import (
        FlatCollator,
        LanguageModelingCollator,
        PreferenceCollator,
        RewardCollator,
        UnpairedPreferenceCollator,
        concatenated_inputs,
    )
    from .core.data.task import Task
    from .core.flat.batch import FlatBatch
    from .core.flat.counts import BatchCounts
    from .core.flat.segments import Segments
    from .core.model.flat_model import FlatModel
    from .core.trainers.composed import CollatedTrainer
    from .core.trainers.configs import PaddingFreeOptions
    from .core.trainers.dpo import PaddingFreeDPOConfig, PaddingFreeDPOTrainer
    from .core.trainers.runtime import when_flat
    from .core.trainers.sft import PaddingFreeSFTConfig, PaddingFreeSFTTrainer
    from .heads.kto import PaddingFreeKTOConfig, PaddingFreeKTOTrainer
    from .heads.reward import PaddingFreeRewardConfig, PaddingFreeRewardTrainer
    from .online.composed import OnlineTrainer
    from .online.distillation import PaddingFreeDistillationConfig, PaddingFreeDistillationTrainer
    from .online.grpo import PaddingFreeGRPOConfig, PaddingFreeGRPOTrainer
    from .online.rloo import PaddingFreeRLOOConfig, PaddingFreeRLOOTrainer
    from .packed.check import check_packed


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    folder, _, module = _EXPORTS[name].partition(".")
    with naming_versions():
        return getattr(needed(folder, module, f"`{name}`"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
