"""DPO trained by padded TRL, and by us with and without shared prefixes."""

from collections.abc import Callable
from typing import Any

from peft import LoraConfig

from tests.helpers.equivalence import TOLERANCE, Trajectory, assert_same, run_layout

LAYOUTS = ("flat", "shared")
# More than in `run`, whose reason this has, and with larger steps: gradients of these models are about 1e-2 per entry
ADAM_EPSILON = 1e-2


def lora(**options: Any) -> LoraConfig:
    """
    LoRA on every linear layer, with random weights in both factors.

    PEFT's own start leaves policy and reference equal: rewards would be zero, and a wrong sign or a wrong reference
    would not show before the weights have moved.
    """
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options})


def train(layout: str, make: Callable[[], dict[str, Any]], train_dataset: Any, **options: Any) -> Trajectory:
    """
    Train with one layout.

    Args:
        layout (`str`):
            `"padded"` for TRL's trainer, `"flat"` or `"shared"` for ours.
        make (`Callable`):
            Gives fresh arguments for the trainer: the model, at least. Called under the same random state each time.
        train_dataset (`Dataset` or `IterableDataset`):
            Preference data.
        **options:
            Fields of the config, and `steps`.
    """
    arguments = make()
    options = {"learning_rate": 5e-3, "adam_epsilon": ADAM_EPSILON, **options}
    model = arguments.pop("model")
    return run_layout("dpo", layout, model=model, train_dataset=train_dataset, trainer_kwargs=arguments, **options)


def assert_layouts_agree(
    make: Callable[[], dict[str, Any]],
    train_dataset: Any,
    layouts: tuple[str, ...] = LAYOUTS,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> Trajectory:
    """Train padded and with `layouts`, compare every logged figure and all weights, and give the padded run."""
    padded = train("padded", make, train_dataset, **options)
    for layout in layouts:
        assert_same(padded, train(layout, make, train_dataset, **options), tolerance)
    return padded
