"""Train on preference and instruction data without computing a single wasted token, exactly, on today's TRL."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Imported on first use: `import trl_paddingfree` costs nothing and changes nothing
_EXPORTS = {
    "BatchCounts": "batch",
    "FlatBatch": "batch",
    "CheckResult": "check",
    "UnprovenModelError": "check",
    "LanguageModelingCollator": "collate",
    "PreferenceCollator": "collate",
    "concatenated_inputs": "collate",
    "PaddingFreeDPOConfig": "configs",
    "PaddingFreeSFTConfig": "configs",
    "PaddingFreeDPOTrainer": "dpo",
    "PaddingFreeSFTTrainer": "sft",
    "Segments": "segments",
}
__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from .batch import BatchCounts, FlatBatch
    from .check import CheckResult, UnprovenModelError
    from .collate import LanguageModelingCollator, PreferenceCollator, concatenated_inputs
    from .configs import PaddingFreeDPOConfig, PaddingFreeSFTConfig
    from .dpo import PaddingFreeDPOTrainer
    from .segments import Segments
    from .sft import PaddingFreeSFTTrainer


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
