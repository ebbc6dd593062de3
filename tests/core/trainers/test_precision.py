"""Dtypes of weights and of autocast, drawn against each other: what TRL trains, trains here."""

import pytest
import torch

from tests.helpers.tiny import arguments, make_model
from tests.runs import run

# Both runs round each intermediate result to three digits at most, in bfloat16, and so do their losses
ROUNDING = 0.05


@pytest.mark.drawn(8)
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("autocast", [False, True], ids=["none", "bf16"])
@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("task", ["dpo", "sft", "reward"])
def test_every_dtype_of_weights_trains_under_every_autocast_as_with_padding(task, weights, autocast, adapters):
    losses = {}
    for layout in ("padded", "ours"):
        given = arguments(task, adapters, make=lambda seed: make_model(seed=seed, dtype=weights))
        given["model"] = given["model"].to(weights)
        options = {"optim": "sgd", "learning_rate": 1e-3}  # Adam's epsilon is zero in float16
        losses[layout] = run(task, layout, **given, bf16=autocast, **options).losses
    assert losses["ours"] == pytest.approx(losses["padded"], rel=ROUNDING, abs=ROUNDING)
