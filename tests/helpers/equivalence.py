"""Padded TRL beside ours: train both the same way and compare everything that TRL reports."""

import math
from typing import Any

import torch

from trl_paddingfree.quickstart.side_by_side import ON_CPU, Trajectory, classes_of, difference, differences, train

# float32 on CPU. One step differs by a few units of rounding (eps = 1.2e-7) of sums over at most a few thousand terms;
# Adam then divides gradients by their own size, which lets such differences grow over the steps of a test. Trajectories
# of a wrong layout differ in the first or second digit.
TOLERANCE = 4e-4
# The share of pairs whose chosen reward is higher, which rounding decides where both are equal
ROUNDED = "rewards/accuracies"
# In bfloat16, ours and padded TRL are two draws of one noise: ours may be as far from float32 as this many of TRL's. Of
# 64 runs, the distance of the weights was 1.07 of TRL's on average, and 1.45 at most
NOISE = 2
# What bfloat16 rounds in a figure that it sums up; others (rewards, margins) are differences of these, and all noise
SUMMED = ("loss", "grad_norm", "entropy", "logps/chosen", "logps/rejected")


def run(
    trainer_class, config_class, *, model, train_dataset, steps: int = 3, trainer_kwargs=None, **options
) -> Trajectory:
    """Train with TRL's defaults except for what makes runs short and comparable."""
    defaults: dict[str, Any] = {
        **ON_CPU,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "max_steps": steps,
        "learning_rate": 1e-3,
        # Adam divides a gradient by its own size: an entry that is nothing but rounding would move its weight by a
        # full step, in either direction
        "adam_epsilon": 1e-5,
    }
    options = {**defaults, **options}
    return train(trainer_class, config_class, options, model=model, train_dataset=train_dataset, **trainer_kwargs or {})


def run_layout(task: str, layout: str, **arguments: Any) -> Trajectory:
    """Train as [`run`] does with one layout: `"padded"` by TRL's trainer, `"flat"` or `"shared"` by ours."""
    if layout == "padded":
        return run(*classes_of(task, ours=False), **arguments)
    result = run(*classes_of(task, ours=True), prefix_sharing=layout == "shared", **arguments)
    assert result.trainer.flat.route.prefix_sharing == (layout == "shared")
    return result


def assert_same(padded: Trajectory, ours: Trajectory, tolerance: float = TOLERANCE) -> None:
    """Every logged figure at every step, and the final weights."""
    assert len(padded.log_history) == len(ours.log_history)
    for step, (expected, actual) in enumerate(zip(padded.log_history, ours.log_history, strict=True)):
        for name, off in differences([expected], [actual]).items():
            assert off <= tolerance or ROUNDED in name, (
                f"log {step}: {name} is {actual.get(name)}, padded TRL has {expected[name]}"
            )
    assert padded.weights.keys() == ours.weights.keys()
    for name, expected in padded.weights.items():
        off = difference(expected, ours.weights[name])
        assert off <= tolerance, f"{name} differs by {off}"


def assert_as_close(reference: Trajectory, padded: Trajectory, ours: Trajectory) -> None:
    """Ours in bfloat16 is as close to padded TRL in float32 as padded TRL in bfloat16, in figures and in updates."""
    histories = [trajectory.log_history for trajectory in (reference, padded, ours)]
    for name in SUMMED:
        runs = [[log[name] for log in history if log.get(name) is not None] for history in histories]
        if not runs[0]:
            continue
        exact, theirs, actual = map(torch.tensor, runs)
        budget = (theirs - exact).abs().max() + torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert (actual - exact).abs().max() <= NOISE * budget, f"{name} is {runs[2]}, padded TRL has {runs[:2]}"
    distances = [
        math.sqrt(sum(float((one.weights[name] - weight).pow(2).sum()) for name, weight in reference.weights.items()))
        for one in (padded, ours)
    ]
    assert distances[1] <= NOISE * distances[0], f"weights are {distances} from those of float32"
