"""The trainers by their task, from which commands choose."""

from typing import Any

from ..versions import naming_versions

with naming_versions():
    from . import distillation, dpo, grpo, kto, reward, rloo, sft

# Data is that of the first task whose columns it has
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
