"""One training run, started by `accelerate launch` or alone: writes what it logged and ended with to a JSON file."""

import json
import os
import sys

import torch
from accelerate import DistributedType

from tests.tiny import conversations, preference_data
from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer, PaddingFreeSFTConfig, PaddingFreeSFTTrainer


def main(task: str, model: str, output: str, options: str) -> None:
    settings = json.loads(options)
    peft = settings.pop("lora", False)
    resume, fail_on_rank = settings.pop("resume", None), settings.pop("fail_on_rank", None)
    evaluate = settings.pop("evaluate", 0)
    trainer_class, config_class, data = {
        "dpo": (PaddingFreeDPOTrainer, PaddingFreeDPOConfig, preference_data),
        "sft": (PaddingFreeSFTTrainer, PaddingFreeSFTConfig, conversations),
    }[task]
    args = config_class(
        **{
            "output_dir": os.path.dirname(output),
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "report_to": "none",
            "save_strategy": "no",
            "max_length": 48,
            "disable_tqdm": True,
            **settings,
        }
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate looks at its FSDP settings on accelerators only; PyTorch's FSDP2 itself runs on the CPU
        args.distributed_state.__dict__["distributed_type"] = DistributedType.MULTI_GPU
    kwargs = {}
    if peft:
        from peft import LoraConfig

        kwargs["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    if evaluate:
        kwargs["eval_dataset"] = data(evaluate, seed=2)
    trainer = trainer_class(model=model, args=args, train_dataset=data(48, seed=1), **kwargs)
    if fail_on_rank is not None:
        step = trainer.training_step

        def failing(*a, **k):
            if trainer.state.global_step == 1 and trainer.accelerator.process_index == fail_on_rank:
                raise RuntimeError("this process fails on purpose")
            return step(*a, **k)

        trainer.training_step = failing
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    if trainer.accelerator.is_main_process:
        with open(output, "w") as file:
            engine = trainer.accelerator.distributed_type.value
            json.dump({"log": trainer.state.log_history, "world": args.world_size, "engine": engine}, file)
    trainer.accelerator.wait_for_everyone()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
