"""The trainers by task, from which the commands choose."""

from typing import Any

from .core.versions import naming_versions

with naming_versions():
    from .core.trainers import dpo, sft
    from .heads import kto, reward
    from .online import distillation, grpo, rloo

# In this order: data belongs to the first task whose columns it has
TRAINERS: dict[str, Any] = {
    "dpo": dpo.PaddingFreeDPOTrainer,
    "kto": kto.PaddingFreeKTOTrainer,
    "sft": sft.PaddingFreeSFTTrainer,
    "grpo": grpo.PaddingFreeGRPOTrainer,
    "reward": reward.PaddingFreeRewardTrainer,
    "rloo": rloo.PaddingFreeRLOOTrainer,
    "distillation": distillation.PaddingFreeDistillationTrainer,
}
TASKS = tuple(trainer.task for trainer in TRAINERS.values())
