"""The trainers by task, from which the commands choose."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import trl_paddingfree

from .core.data.task import Task

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


def task_of(columns: Sequence[str], tasks: Iterable[Task], with_images: Collection[Task] = ()) -> Task:
    """
    The first of `tasks` that a dataset's columns fit. Refuses columns that fit none, and images unless the task is one
    of those `with_images`.

    >>> task_of(["prompt", "chosen", "rejected", "score"], TASKS).name, task_of(["messages"], TASKS).name
    ('dpo', 'sft')
    """
    names = set(columns)
    for task in tasks:
        if any(map(names.issuperset, task.found_by)):
            if names & {"image", "images"} and task not in with_images:
                raise ValueError(f"The dataset has columns {sorted(names)}: {task.name} does not train on images.")
            return task
    raise ValueError(
        f"The dataset has columns {sorted(names)}. Preference data needs 'chosen' and 'rejected' (and 'prompt', "
        "unless they repeat it), or 'prompt', 'completion' and 'label'; instruction data needs 'messages', "
        "'conversations', 'prompt' and 'completion', 'text' or 'input_ids'; prompts need 'prompt'. Rename yours, see "
        "https://huggingface.co/docs/trl/dataset_formats."
    )
