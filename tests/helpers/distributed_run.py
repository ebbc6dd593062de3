"""Training runs, started by `accelerate launch` or alone: each writes what it logged and ended with to a JSON file."""

import faulthandler
import json
import os
import random
import sys

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from datasets import Dataset, load_from_disk

from tests.helpers.tiny import conversations, preference_data
from tests.helpers.vision import vision_messages, vision_pairs
from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer, PaddingFreeSFTConfig, PaddingFreeSFTTrainer
from trl_paddingfree.memory.kept_bytes import LOADS
from trl_paddingfree.memory.needs import MemoryNeeds
from trl_paddingfree.memory.plan import MemoryBudget
from trl_paddingfree.trainers.base import FlatTrainer


def from_disk(dataset: Dataset, folder: str) -> Dataset:
    """A data set as one from a file."""
    if not os.path.exists(folder):
        dataset.save_to_disk(folder)
    return load_from_disk(folder)


def tokens_to_score_in_every_second_pair() -> Dataset:
    """Token ids, in pairs of rows that are scored or not."""
    rng, rows = random.Random(0), []
    for i in range(48):
        ids = [rng.randrange(5, 60) for _ in range(rng.randint(2, 20))]
        rows.append({"input_ids": ids, "labels": ids if i // 2 % 2 == 0 else [-100] * len(ids)})
    return Dataset.from_list(rows)


def watch_decisions(budget: int) -> list[tuple[int, int]]:
    """
    Have a memory budget hold `budget` tokens, one for each layer that keeps its activations.

    Returns:
        `list[tuple[int, int]]`: For each forward pass that trains, how many layers this process alone would have
        recompute, and how many do. Filled while training.
    """
    decisions: list[tuple[int, int]] = []
    plan, start = FlatTrainer.plan_steps, MemoryBudget.decide

    def plan_steps(trainer):
        is_new = trainer.flat.memory is None
        plan(trainer)
        if is_new and (memory := trainer.flat.memory) is not None:
            per_token = np.array(LOADS) == "tokens"
            nothing, one = 0.0 * per_token, 1.0 * per_token
            layers = len(memory.layers)
            memory.needs = MemoryNeeds(0, [one] * layers, [nothing] * layers, nothing, nothing, (0, 0), nothing)
            memory.budget = budget

    def note(memory, batch, number):
        start(memory, batch, number)
        decisions.append((memory.num_recomputed(batch), number))

    FlatTrainer.plan_steps, MemoryBudget.decide = plan_steps, note
    return decisions


def run(task: str, model: str, output: str, options: dict) -> None:
    """
    Train. With `seconds` among the options, the process says where it hangs, and ends, if it takes longer; with
    `refused`, the run has to fail, and what each process says of it is written down.
    """
    settings = dict(options)
    seconds, refused = settings.pop("seconds", None), settings.pop("refused", False)
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        if not refused:
            return train(task, model, output, settings)
        try:
            train(task, model, output, settings)
            said = None
        except Exception as error:
            said = str(error)
        with open(f"{output}.{torch.distributed.get_rank()}", "w") as file:
            json.dump(said, file)
        with open(output, "w") as file:  # by all of them: none may come before another has trained
            json.dump({"log": []}, file)
    finally:
        faulthandler.cancel_dump_traceback_later()


def train(task: str, model: str, output: str, settings: dict) -> None:
    peft = settings.pop("lora", False)
    resume, fail_on_rank = settings.pop("resume", None), settings.pop("fail_on_rank", None)
    evaluate = settings.pop("evaluate", 0)
    with_images = settings.pop("images", False)
    tokens_in_memory = settings.pop("tokens_in_memory", None)
    decisions = watch_decisions(tokens_in_memory) if tokens_in_memory else []
    on_disk, unscored = settings.pop("on_disk", False), settings.pop("unscored", False)
    streams, differs = settings.pop("streams", False), settings.pop("differs", False)
    trainer_class, config_class, data = {
        "dpo": (PaddingFreeDPOTrainer, PaddingFreeDPOConfig, preference_data),
        "sft": (PaddingFreeSFTTrainer, PaddingFreeSFTConfig, conversations),
    }[task]
    if with_images:
        data = {"dpo": vision_pairs, "sft": vision_messages}[task]
        settings = {"max_length": None, **settings}
    args = config_class(
        **{
            "output_dir": os.path.dirname(output),
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-5,  # as in tests.helpers.equivalence
            "report_to": "none",
            "save_strategy": "no",
            "max_length": 48,
            "disable_tqdm": True,
            **({"dataset_kwargs": {"skip_prepare_dataset": True}} if unscored else {}),
            **settings,
        }
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate looks at its FSDP settings on accelerators only; PyTorch's FSDP2 itself runs on the CPU
        args.distributed_state.__dict__["distributed_type"] = DistributedType.MULTI_GPU
    kwargs, train_dataset = {}, data(24 if with_images else 48, seed=1)
    if differs:
        train_dataset = data(48, seed=args.process_index)
    if unscored:
        train_dataset = tokens_to_score_in_every_second_pair()
    if peft:
        from peft import LoraConfig

        kwargs["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    if evaluate:
        kwargs["eval_dataset"] = data(evaluate, seed=2)
    if on_disk:  # where TRL shares what one process has computed
        folder = os.path.dirname(output)
        with args.main_process_first():
            train_dataset = from_disk(train_dataset, os.path.join(folder, "train"))
            if evaluate:
                kwargs["eval_dataset"] = from_disk(kwargs["eval_dataset"], os.path.join(folder, "eval"))
    if streams:
        train_dataset = train_dataset.to_iterable_dataset(num_shards=4)
    trainer = trainer_class(model=model, args=args, train_dataset=train_dataset, **kwargs)
    if fail_on_rank is not None:
        step = trainer.training_step

        def failing(*a, **k):
            if trainer.state.global_step == 1 and trainer.accelerator.process_index == fail_on_rank:
                raise RuntimeError("this process fails on purpose")
            return step(*a, **k)

        trainer.training_step = failing
    without_sync = []
    no_sync = trainer.accelerator.no_sync
    trainer.accelerator.no_sync = lambda *a, **k: without_sync.append(trainer.state.global_step) or no_sync(*a, **k)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    with open(f"{output}.{trainer.accelerator.process_index}", "w") as file:
        json.dump(decisions, file)
    if trainer.accelerator.is_main_process:
        with open(output, "w") as file:
            engine = trainer.accelerator.distributed_type.value
            result = {"log": trainer.state.log_history, "world": args.world_size, "engine": engine}
            json.dump({**result, "without_sync": without_sync}, file)
    trainer.accelerator.wait_for_everyone()


def main(runs: str) -> None:
    for arguments in json.loads(runs):
        run(*arguments)
        AcceleratorState._reset_state()  # the next run may want another engine's settings; the processes stay
    if torch.distributed.is_initialized():
        # The destructor of DDP's reducer joins a thread of gloo that may wait for the interpreter: end without it
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
