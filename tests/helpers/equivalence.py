"""Padded TRL beside ours: train both the same way and compare everything that TRL reports."""

import tempfile
from dataclasses import dataclass

import torch

# float32 on CPU. One step differs by a few units of rounding (eps = 1.2e-7) of sums over at most a few thousand terms;
# Adam then divides gradients by their own size, which lets such differences grow over the steps of a test. Trajectories
# of a wrong layout differ in the first or second digit.
TOLERANCE = 2e-4
# Differences of figures near zero (reward margins at the first step) are rounding of the log-probabilities they come
# from, which are sums of up to a few hundred nats.
ABSOLUTE = 2e-4
# Figures that only one side has, or that are times; and the share of pairs whose chosen reward is higher, which
# rounding decides where both are equal
INCOMPARABLE = ("flat/", "runtime", "per_second", "total_flos", "step_time", "rewards/accuracies")


@dataclass
class Trajectory:
    """What one training run reported, and what it ended with."""

    log_history: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    trainer: object

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.log_history if "loss" in entry]


def run(trainer_class, config_class, *, model, train_dataset, steps: int = 3, trainer_kwargs=None, **options):
    """Train with TRL's defaults except for what makes runs short, silent and comparable."""
    defaults = {
        "output_dir": tempfile.mkdtemp(prefix="trl_paddingfree_test_"),
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "max_steps": steps,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        # Adam divides a gradient by its own size: an entry that is nothing but rounding would move its weight by a
        # full step, in either direction
        "adam_epsilon": 1e-5,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    args = config_class(**{**defaults, **options})
    trainer = trainer_class(model=model, args=args, train_dataset=train_dataset, **(trainer_kwargs or {}))
    trainer.train()
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return Trajectory(trainer.state.log_history, weights, trainer)


def assert_same(padded: Trajectory, ours: Trajectory, tolerance: float = TOLERANCE) -> None:
    """Every logged figure at every step, and the final weights."""
    assert len(padded.log_history) == len(ours.log_history)
    for step, (expected, actual) in enumerate(zip(padded.log_history, ours.log_history, strict=True)):
        compared = [name for name in expected if not any(part in name for part in INCOMPARABLE)]
        assert [name for name in compared if name not in actual] == []
        for name in compared:
            if expected[name] is None:  # TRL's mean over nothing
                assert actual[name] is None
                continue
            difference = abs(expected[name] - actual[name])
            assert difference <= ABSOLUTE + tolerance * abs(expected[name]), (
                f"log {step}: {name} is {actual[name]}, padded TRL has {expected[name]}"
            )
    assert padded.weights.keys() == ours.weights.keys()
    for name, expected in padded.weights.items():
        difference = (ours.weights[name] - expected).abs().max()
        assert difference <= ABSOLUTE + tolerance * expected.abs().max(), f"{name} differs by {difference}"
