"""Any task trained by padded TRL, and by us with and without shared prefixes."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import GRPOTrainer

from tests.helpers.dpo_runs import ADAM_EPSILON, LAYOUTS
from tests.helpers.equivalence import TOLERANCE, Trajectory, assert_same, run_layout
from tests.helpers.tiny import make_model, text


def reward_model(model_type: str = "llama", **overrides: Any):
    """A random model with a head of one value, whose weights are as large as the others."""
    config = make_model(model_type, **overrides).config
    config.num_labels = 1
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_config(config)


def unpaired(n: int, seed: int) -> Dataset:
    """Completions that are desirable or not, in no order, some of one prompt."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        prompt = rows[-1]["prompt"] if i % 3 else text(rng, 1, 20)
        rows.append({"prompt": prompt, "completion": " " + text(rng, 1, 15), "label": rng.random() < 0.5})
    return Dataset.from_list(rows)


def prompts(n: int, seed: int) -> Dataset:
    """Prompts of very different lengths."""
    rng = random.Random(seed)
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text(rng, 1, 25)}]} for _ in range(n)])


def score(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """A reward that says nothing, and says it of each completion anew."""
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]


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

    GRPOTrainer.get_high_entropy_mask = untied
    try:
        yield
    finally:
        GRPOTrainer.get_high_entropy_mask = of_quantile


# What makes the runs of a task short; steps as large as elsewhere
GENERATING = {"learning_rate": 5e-3, "adam_epsilon": ADAM_EPSILON, "max_completion_length": 8, "steps": 2}
COMMON: dict[str, dict[str, Any]] = {
    # A common shift of all rewards has no gradient: Adam would make steps of its rounding
    "reward": {"optim": "sgd", "learning_rate": 0.1, "steps": 2},
    **dict.fromkeys(("dpo", "sft", "kto"), {"learning_rate": 5e-3, "adam_epsilon": ADAM_EPSILON, "steps": 2}),
    **dict.fromkeys(("grpo", "rloo"), {**GENERATING, "num_generations": 4}),
    "distillation": GENERATING,
}


def train(task: str, layout: str, make: Callable[[], dict[str, Any]], data: Any, **options: Any) -> Trajectory:
    """
    Train with one layout.

    Args:
        task (`str`):
            Name of the task.
        layout (`str`):
            `"padded"` for TRL's trainer, `"flat"` or `"shared"` for ours.
        make (`Callable`):
            Gives fresh arguments for the trainer: the model, at least. Called under the same random state each time.
        data (`Dataset` or `IterableDataset`):
            Training data.
        **options:
            Fields of the config, and `steps`.
    """
    arguments, options = make(), {**COMMON[task], **options}
    torch.manual_seed(0)  # completions are drawn alike
    if layout == "padded":
        options.pop("arrange_micro_batches", None)
    model = arguments.pop("model")
    result = run_layout(task, layout, model=model, train_dataset=data, trainer_kwargs=arguments, **options)
    assert layout == "padded" or result.trainer.total_counts().computed
    return result


def assert_layouts_agree(
    task: str,
    make: Callable[[], dict[str, Any]],
    data: Any,
    layouts: tuple[str, ...] = LAYOUTS,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> Trajectory:
    """Train padded and with `layouts`, compare every logged figure and all weights, and give the last run."""
    padded = train(task, "padded", make, data, **options)
    for layout in layouts:
        result = train(task, layout, make, data, **options)
        assert_same(padded, result, tolerance)
    return result


def assert_padding_on_the_left_changes_nothing(trainer) -> None:
    """A prompt after padding and the same prompt alone have the same log-probabilities."""
    trainer.model.eval()
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [4, 3, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        padded, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2)
        alone, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids[:1, 2:], mask[:1, 2:], 2)
    torch.testing.assert_close(padded[:1], alone)
