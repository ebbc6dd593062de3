"""What type checkers see of the constructors: read by mypy, and never run. It has to find the mistake of each line."""

from trl_paddingfree import (
    PaddingFreeDistillationTrainer,
    PaddingFreeDPOConfig,
    PaddingFreeDPOTrainer,
    PaddingFreeGRPOTrainer,
    PaddingFreeKTOTrainer,
    PaddingFreeRewardTrainer,
    PaddingFreeRLOOTrainer,
    PaddingFreeSFTConfig,
    PaddingFreeSFTTrainer,
)

PaddingFreeDPOTrainer("model", train_datset=None)  # type: ignore[call-arg]
PaddingFreeSFTTrainer("model", train_datset=None)  # type: ignore[call-arg]
PaddingFreeRewardTrainer("model", train_datset=None)  # type: ignore[call-arg]
PaddingFreeKTOTrainer("model", train_datset=None)  # type: ignore[call-arg]
PaddingFreeGRPOTrainer("model", reward_fncs=None)  # type: ignore[call-arg]
PaddingFreeRLOOTrainer("model", reward_fncs=None)  # type: ignore[call-arg]
PaddingFreeDistillationTrainer("model", teacher_modl=None)  # type: ignore[call-arg]
PaddingFreeDPOConfig("out", bata=0.1)  # type: ignore[call-arg]
PaddingFreeDPOConfig("out", flat_attention="segmnt")  # type: ignore[arg-type]
PaddingFreeSFTConfig("out", arrange_micro_batches="token")  # type: ignore[arg-type]
