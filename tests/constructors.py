"""What type checkers see of the constructors: read by mypy, and never run. It has to find the mistake of each line."""

import trl_paddingfree

trl_paddingfree.PaddingFreeDPOTrainer("model", train_datset=None)  # type: ignore[call-arg]
trl_paddingfree.PaddingFreeSFTTrainer("model", train_datset=None)  # type: ignore[call-arg]
trl_paddingfree.PaddingFreeRewardTrainer("model", train_datset=None)  # type: ignore[call-arg]
trl_paddingfree.PaddingFreeKTOTrainer("model", train_datset=None)  # type: ignore[call-arg]
trl_paddingfree.PaddingFreeGRPOTrainer("model", reward_fncs=None)  # type: ignore[call-arg]
trl_paddingfree.PaddingFreeRLOOTrainer("model", reward_fncs=None)  # type: ignore[call-arg]
trl_paddingfree.PaddingFreeDistillationTrainer("model", teacher_modl=None)  # type: ignore[call-arg]
trl_paddingfree.PaddingFreeDPOConfig("out", bata=0.1)  # type: ignore[call-arg]
trl_paddingfree.PaddingFreeDPOConfig("out", flat_attention="segmnt")  # type: ignore[arg-type]
trl_paddingfree.PaddingFreeSFTConfig("out", arrange_micro_batches="token")  # type: ignore[arg-type]
