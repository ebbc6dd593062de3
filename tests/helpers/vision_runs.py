"""Training on images by padded TRL, and by us with and without shared prefixes."""

import os
from typing import Any

from datasets import Dataset
from peft import LoraConfig

from tests.helpers.equivalence import Trajectory, run_layout
from tests.helpers.vision import make_vision

SEED = int(os.environ.get("TRL_PADDINGFREE_SEED", 0))


def train(
    kind: str,
    task: str,
    layout: str,
    dataset: Dataset,
    *,
    lora: bool = False,
    trainer_kwargs: dict[str, Any] | None = None,
    seed: int = SEED,
    **options: Any,
) -> Trajectory:
    """
    Train a tiny model on images.

    Args:
        kind (`str`):
            One of [`~tests.helpers.vision.ARCHITECTURES`].
        task (`str`):
            `"dpo"` or `"sft"`.
        layout (`str`):
            `"padded"` for TRL's trainer, `"flat"` or `"shared"` for ours.
        dataset ([`~datasets.Dataset`]):
            Data with images.
        lora (`bool`, *optional*, defaults to `False`):
            Whether to train adapters, on every linear layer, the tower's included.
        trainer_kwargs (`dict[str, Any]`, *optional*):
            Further arguments of the trainer.
        seed (`int`, *optional*):
            Seed of the weights.
        **options:
            Fields of the config, and `steps`.
    """
    model, processor = make_vision(kind, seed=seed)
    kwargs = {"processing_class": processor, **(trainer_kwargs or {})}
    if lora:
        kwargs["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    elif task == "dpo":
        kwargs["ref_model"] = make_vision(kind, seed=seed + 1)[0]
    # Adam's epsilon: as in tests/helpers/dpo_runs.py
    options = {"max_length": None, "learning_rate": 5e-3, "adam_epsilon": 1e-2, "steps": 2, **options}
    return run_layout(task, layout, model=model, train_dataset=dataset, trainer_kwargs=kwargs, **options)
