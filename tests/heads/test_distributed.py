"""Reward, KTO, GRPO and distillation in two processes, padded TRL beside ours, which run this file as a program."""

import os
import sys
from functools import partial

import pytest
import torch

from tests.helpers.launching import TIMEOUT, finished, torchrun
from tests.helpers.memory import in_tokens
from tests.helpers.tiny import arguments, make_model, preference_data, prompts, unpaired
from tests.runs import assert_same, run
from trl_paddingfree.budgets import planner as memory_planner
from trl_paddingfree.budgets import planning

# Shorter and longer examples take turns, so that the processes have different numbers of parts
PAIRS = preference_data(24, 3).map(lambda row: {"length": len(str(row))}).sort("length")
PAIRS = PAIRS.select([i for pair in zip(range(12), range(23, 11, -1), strict=True) for i in pair])
PAIRS = PAIRS.remove_columns("length")
# A micro-batch with no desirable completion on one process
ORDERED = unpaired(24, 4).sort("label")


# A teacher of another architecture
made = partial(arguments, make=lambda seed: make_model("qwen3", seed=seed))
RUNS = [
    ("reward", PAIRS, {}, {"max_tokens_per_micro_batch": 60}),
    ("kto", unpaired(24, 4), {}, {}),
    (
        "kto",
        ORDERED,
        {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2},
        {"max_tokens_per_micro_batch": 40},
    ),
    ("grpo", prompts(16, 5), {"beta": 0.1, "num_iterations": 2}, {"memory_budget": 8}),
    ("grpo", prompts(16, 5), {}, {"max_tokens_per_micro_batch": 15}),
    ("distillation", prompts(16, 6), {"beta": 0.5, "gradient_accumulation_steps": 2}, {"memory_budget": 8}),
    ("distillation", prompts(16, 6), {"beta": 0.0}, {}),
]


@pytest.mark.slow
def test_two_processes_follow_padded_trl_in_two_processes():
    finished(torchrun(2, "-m", __name__), TIMEOUT)


def main():
    # On the second process fewer tokens fit, so that it alone computes a micro-batch in slices
    plan, number = planning.make_planner, 20 if int(os.environ["RANK"]) else 400
    memory_planner.LEAST_SLICE = 8  # rows of tiny models are short

    def planned(trainer):
        made = plan(trainer)
        return made if made.needs is None else in_tokens(made, number)

    planning.make_planner = planned
    for task, data, options, ours in RUNS:
        options = {**options, "per_device_train_batch_size": 4}
        padded = run(task, "padded", **made(task, task != "reward"), train_dataset=data, **options)
        flat = run(task, "shared", **made(task, task != "reward"), train_dataset=data, **options, **ours)
        assert flat.trainer.accelerator.num_processes == 2
        assert_same(padded, flat)
    torch.distributed.barrier()
    sys.stderr.flush()
    os._exit(0)  # the destructor of DDP's reducer joins a thread of gloo that may wait for the interpreter


if __name__ == "__main__":
    main()
