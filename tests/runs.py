"""
The one way to build a run: padded TRL's trainer or ours, from the same task, model, data and options.

```python
padded = run("dpo", "padded", model=make_model(), train_dataset=pairs, peft_config=lora())
ours = run("dpo", "shared", model=make_model(), train_dataset=pairs, peft_config=lora())
assert_same(padded, ours)
```
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import Trainer
from trl import GRPOTrainer

from scripts.benchmark.differences import difference, differences
from tests.helpers import tiny
from tests.helpers.float64 import TOLERANCE as TOLERANCE_64
from tests.helpers.float64 import float64_throughout, in_float64
from tests.helpers.folders import skip_without
from trl_paddingfree.cli.quickstart import side_by_side
from trl_paddingfree.cli.quickstart.side_by_side import ON_CPU, classes_of

# float32 on CPU. One step differs by a few units of rounding (eps = 1.2e-7) of sums over at most a few thousand terms;
# Adam then divides gradients by their own size, which lets such differences grow over the steps of a test. Trajectories
# of a wrong layout differ in the first or second digit.
TOLERANCE = 4e-4
# The shares of pairs whose chosen reward is higher, which rounding decides where both are equal
ROUNDED = ("rewards/accuracies",)
# Averages over micro-batches, which weigh tokens anew where examples share theirs with others than before
PER_MICRO_BATCH = ("entropy", "logits/", "mean_token_accuracy")
# Gradients count relative to the largest of their tensor, or of all tensors where theirs is less than this share: that
# of keys' biases, to which attention is indifferent, is zero but for rounding
LEAST_GRADIENT = 1e-2
# Gradients of a run of which none is larger are rounding: of identical pairs, padded TRL has some, and ours none
_LEAST_LARGEST = 1e-3
# In bfloat16, ours and padded TRL are two draws of one noise: ours may be as far from float32 as this many of TRL's. Of
# 64 runs, the distance of the weights was 1.07 of TRL's on average, and 1.45 at most
NOISE = 2
# What bfloat16 rounds in a figure that it sums up; others (rewards, margins) are differences of these, and all noise
SUMMED = ("loss", "grad_norm", "entropy", "logps/chosen", "logps/rejected")

LAYOUTS = ("flat", "shared")
# How often runs look at the batches that they train on, unless they are told. `CHECK_STEPS=1 python -m pytest ...` has
# every run of a test look at every step, which makes it twice as long
CHECK_STEPS = int(os.environ.get("CHECK_STEPS", "0"))
# What makes runs short and comparable, unlike TRL's defaults. Adam divides a gradient by its own size: an entry that is
# nothing but rounding would move its weight by a full step, in either direction. Gradients of these models are about
# 1e-2 per entry
OPTIONS: dict[str, Any] = {
    **ON_CPU,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "adam_epsilon": 1e-2,
    "max_steps": 3,
}
_GENERATING = {"max_steps": 2, "max_completion_length": 8}
OF_TASK: dict[str, dict[str, Any]] = {
    "dpo": {},
    "sft": {},
    "kto": {"max_steps": 2},
    # A common shift of all rewards has no gradient: Adam would make steps of its rounding
    "reward": {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1},
    **dict.fromkeys(("grpo", "rloo"), {**_GENERATING, "num_generations": 4}),
    "distillation": _GENERATING,
}


@dataclass
class Run:
    """What one training run logged, ended with, and stepped along."""

    log_history: list[dict[str, float]]
    trainer: Any
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of each step, if kept

    @property
    def losses(self) -> list[float]:
        """The loss of each logged step."""
        return [entry["loss"] for entry in self.log_history if "loss" in entry]


class Compared(NamedTuple):
    """A run of padded TRL, and the last of ours that was found to be the same."""

    padded: Run
    ours: Run


def make_trainer(
    task: str,
    layout: str,
    steps: int | None = None,
    trainer_class: Callable[..., Trainer] | None = None,
    config_class: type | None = None,
    **given: Any,
) -> Any:
    """The trainer that [`run`] has train, of the same arguments."""
    skip_without(task, given)
    made = {} if "model" in given else tiny.arguments(task)
    if "train_dataset" not in given:
        made["train_dataset"] = tiny.DATA[task](8, tiny.SEED)
    given = {**made, **given}
    default_class, default_config = classes_of(task, ours=layout != "padded")
    config: Any = config_class or default_config
    of_config = {each.name for each in fields(config)}
    options = {**OPTIONS, **OF_TASK[task]}
    if steps is not None:
        options["max_steps"] = steps
    if layout in LAYOUTS:
        options["prefix_sharing"] = layout == "shared"
    if "check_steps" in of_config:
        options["check_steps"] = CHECK_STEPS
    options |= {name: value for name, value in given.items() if name in of_config}
    arguments = {name: value for name, value in given.items() if name not in of_config}
    torch.manual_seed(0)  # adapters start alike, and completions are drawn alike
    return side_by_side.make_trainer(trainer_class or default_class, config, options, **arguments)


def train(trainer: Any, **resumed: Any) -> Run:
    """Have a trainer train that [`make_trainer`] made."""
    with ties_broken():
        trainer.train(**resumed)
    weights = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return Run(trainer.state.log_history, trainer, weights=weights)


def run(task: str, layout: str, **given: Any) -> Run:
    """
    Train, with TRL's defaults except for [`OPTIONS`] and those of the task.

    Args:
        task (`str`):
            Name of the task, such as `"dpo"`.
        layout (`str`):
            `"padded"` for TRL's trainer; for ours `"flat"`, `"shared"` (with shared prefixes), or `"ours"` for its own
            default.
        steps (`int`, *optional*):
            Number of optimizer steps.
        trainer_class, config_class (`type`, *optional*):
            Others than those of the task.
        **given:
            Arguments of the trainer and fields of its configuration, which are told apart by their names. Without a
            model, it has the arguments of [`tests.helpers.tiny`], and without a `train_dataset` a few rows from there.
    """
    trained = train(make_trainer(task, layout, **given))
    if layout in LAYOUTS:
        assert trained.trainer.runtime.route.prefix_sharing == (layout == "shared")
        assert trained.trainer.total_counts().computed
    return trained


def compare(
    task: str,
    make: Callable[[], Mapping[str, Any]],
    train_dataset: Any,
    layouts: str | Sequence[str] = LAYOUTS,
    tolerance: float | None = None,
    ours: Mapping[str, Any] | None = None,
    ignored: tuple[str, ...] = ROUNDED,
    **given: Any,
) -> Compared:
    """
    Train padded and with `layouts`, one or several, and compare every logged figure and all weights.

    Args:
        make (`Callable`):
            Gives fresh arguments for the trainer: the model, at least.
        tolerance (`float`, *optional*):
            Of models in the dtype that they have. By default, all is in float64, in which a difference is no rounding,
            but for models of files.
        ours (`Mapping[str, Any]`, *optional*):
            What only our trainer is given.
        ignored (`tuple[str, ...]`, *optional*):
            Parts of the names of figures that are not compared.
        **given:
            What both are given, as [`run`] takes it.
    """

    def made() -> dict[str, Any]:
        return {k: in_float64(x) if is_double and isinstance(x, torch.nn.Module) else x for k, x in make().items()}

    # Only looked at: a model whose constants and initial values were computed outside the context has others
    is_double = tolerance is None and not isinstance(make()["model"], str)
    with float64_throughout() if is_double else nullcontext():
        padded = run(task, "padded", **made(), train_dataset=train_dataset, **given)
        for layout in [layouts] if isinstance(layouts, str) else layouts:
            result = run(task, layout, **made(), train_dataset=train_dataset, **given, **(ours or {}))
            assert_same(padded, result, tolerance or (TOLERANCE_64 if is_double else TOLERANCE), ignored)
    return Compared(padded, result)


def assert_same(padded: Run, ours: Run, tolerance: float = TOLERANCE, ignored: tuple[str, ...] = ROUNDED) -> None:
    """Every logged figure at every step but the `ignored` ones, and the final weights."""
    off = off_by(padded, ours, tolerance, ignored)
    assert not off, f"ours is off from padded TRL by so many tolerances: {off}"


def off_by(padded: Run, ours: Run, tolerance: float, ignored: tuple[str, ...] = ()) -> dict[str, float]:
    """
    By how many tolerances each logged figure, each weight and, of runs that kept them, each gradient is off.

    Those within the tolerance are left out, and figures whose names have an `ignored` part.
    """
    if len(padded.log_history) != len(ours.log_history) or padded.weights.keys() != ours.weights.keys():
        return {"number of logs or weights": math.inf}
    found: dict[str, float] = {}
    # Of all steps: one that draws identical pairs only has gradients that are nothing but rounding
    largest = largest_of(*padded.gradients)
    for step, (theirs, mine) in enumerate(zip(padded.gradients, ours.gradients, strict=True)):
        for name, off in gradient_differences(theirs, mine, largest).items():
            found[f"gradient {step} of {name}"] = off
    found |= {name: difference(weight, ours.weights[name]) for name, weight in padded.weights.items()}
    for step, (logged, log) in enumerate(zip(padded.log_history, ours.log_history, strict=True)):
        for name, off in differences([logged], [log]).items():
            if not any(part in name for part in ignored):
                found[f"{name} of log {step}"] = off
    return {name: off / tolerance if tolerance else math.inf for name, off in found.items() if off > tolerance}


def largest_of(*gradients: Mapping[str, torch.Tensor]) -> float:
    """The largest entry of all gradients: at least what a run has that draws none but identical pairs."""
    return max([_LEAST_LARGEST, *(float(x.abs().max()) for each in gradients for x in each.values())])


def gradient_differences(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], largest: float
) -> dict[str, float]:
    """How far each gradient is off, relative to its largest entry or, where that is next to nothing, to `largest`."""
    assert actual.keys() == expected.keys()
    return {name: difference(x, actual[name], LEAST_GRADIENT * largest) for name, x in expected.items()}


def assert_as_close(reference: Run, padded: Run, ours: Run) -> None:
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


@contextmanager
def ties_broken() -> Iterator[None]:
    """
    Within this context, GRPO's quantile of entropies takes no two tokens for equal.

    All completions of a prompt have the same entropy at their first token, and rounding would decide which of them
    train, in padded TRL as in ours.
    """
    of_quantile = GRPOTrainer.get_high_entropy_mask

    def untied(self, entropies, mask, threshold):
        places = torch.arange(entropies.numel(), device=entropies.device).view_as(entropies)
        return of_quantile(self, entropies + 1e-3 * places, mask, threshold)

    with mock.patch.object(GRPOTrainer, "get_high_entropy_mask", untied):
        yield
