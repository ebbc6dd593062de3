"""One file per TRL trainer, and what they share: the trainers by their task, from which commands choose."""

from typing import Any

from .dpo import PaddingFreeDPOTrainer
from .grpo import PaddingFreeGRPOTrainer
from .kto import PaddingFreeKTOTrainer
from .reward import PaddingFreeRewardTrainer
from .rloo import PaddingFreeRLOOTrainer
from .sft import PaddingFreeSFTTrainer

# Data is that of the first task whose columns it has
TRAINERS: dict[str, Any] = {
    trainer.task.name: trainer
    for trainer in (
        PaddingFreeDPOTrainer,
        PaddingFreeKTOTrainer,
        PaddingFreeSFTTrainer,
        PaddingFreeGRPOTrainer,
        PaddingFreeRewardTrainer,
        PaddingFreeRLOOTrainer,
    )
}
TASKS = tuple(trainer.task for trainer in TRAINERS.values())
