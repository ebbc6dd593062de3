"""Random draws over options, models and data train as padded TRL does.

`TRL_PADDINGFREE_DRAWS=500 python -m pytest tests/core/trainers/test_random.py` runs that many;
scripts/random_comparison.py does the same, writes each draw down, and goes on where it stopped.
"""

import os
from dataclasses import replace

import pytest
import torch

from tests.helpers.folders import needs
from tests.helpers.random_draws import ARCHITECTURES, HYBRIDS, MODEL_TYPES, TASKS, draw
from tests.helpers.random_runs import off_by, outcome
from tests.helpers.tiny import SEED
from tests.runs import Run

OF_ALL = needs("arranging", "budgets", "heads", "online", "recurrent", "slices")  # draws combine what these add
DRAWS = int(os.environ.get("TRL_PADDINGFREE_DRAWS", "10"))


@pytest.mark.trl_1
@OF_ALL
@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(SEED * 1000, SEED * 1000 + DRAWS))
def test_a_random_draw_trains_as_padded_trl_does(seed):
    result = outcome(seed)
    assert result["verdict"] in ("same", "refused", "TRL refuses"), result


@pytest.mark.trl_1
@OF_ALL
@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", [37, 97, 51, 60, 99, 122, 152])
def test_draws_are_compared_and_not_all_refused(seed):
    assert outcome(seed)["verdict"] == "same"


def test_draws_reach_every_model_and_repeat_by_their_seed():
    draws = [draw(seed) for seed in range(400)]
    assert draws == [draw(seed) for seed in range(400)]
    assert {drawn["model"]["type"] for drawn in draws} == {*MODEL_TYPES, *HYBRIDS, *ARCHITECTURES}
    assert {drawn["task"] for drawn in draws} == set(TASKS)


@pytest.mark.parametrize("value", [1.001, float("nan"), float("inf")])
def test_a_difference_is_seen(value):
    weights = {"w": torch.ones(3)}
    one, other = (Run([{"loss": x}], None, weights=weights) for x in (1.0, value))
    assert off_by(one, one, 2e-4) == {}
    assert off_by(one, other, 2e-4)
    assert off_by(other, other, 2e-4) == {}
    assert off_by(one, Run([{"loss": 1.0}], None, weights={"w": torch.ones(3) * value}), 2e-4)
    assert off_by(one, Run([], None, weights=weights), 2e-4)
    gradients = [{"w": torch.tensor([1.0, value])}]
    found = off_by(replace(one, gradients=[{"w": torch.ones(2)}]), replace(one, gradients=gradients), 4e-4)
    assert found.keys() == {"gradient 0 of w"}
