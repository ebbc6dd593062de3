"""The trainers by their task: what the commands, the quick start and the benchmark choose from."""

from typing import Any

from .dpo import PaddingFreeDPOTrainer
from .sft import PaddingFreeSFTTrainer

TRAINERS: dict[str, Any] = {trainer.task.name: trainer for trainer in (PaddingFreeDPOTrainer, PaddingFreeSFTTrainer)}
TASKS = tuple(trainer.task for trainer in TRAINERS.values())
