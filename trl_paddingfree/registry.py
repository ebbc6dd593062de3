"""The trainers by task, from which the commands choose."""

from typing import Any

import trl_paddingfree

# In this order: data belongs to the first task whose columns it has
_NAMES = ("DPO", "KTO", "SFT", "GRPO", "Reward", "RLOO", "Distillation")
_EXPORTS = {name.lower(): f"PaddingFree{name}Trainer" for name in _NAMES}


class _Trainers(dict[str, Any]):
    def __missing__(self, task: str) -> Any:
        if task in _EXPORTS:
            return getattr(trl_paddingfree, _EXPORTS[task])  # says which folder is missing
        raise KeyError(task)


# Without those whose folders are not there
TRAINERS = _Trainers(
    (x, getattr(trl_paddingfree, name)) for x, name in _EXPORTS.items() if name in dir(trl_paddingfree)
)
TASKS = tuple(trainer.task for trainer in TRAINERS.values())
