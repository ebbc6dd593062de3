"""The trainers by task, from which the commands choose."""

from typing import Any

from ..versions import naming_versions

with naming_versions():
    from . import distillation, dpo, grpo, kto, reward, rloo, sft

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
