"""Random draws over options, models and data train as padded TRL does.

`TRL_PADDINGFREE_DRAWS=500 python -m pytest tests/trainers/test_random.py` runs that many; scripts/random_comparison.py
does the same, writes each draw down, and goes on where it stopped.
"""

import os

import pytest
import torch

from tests.helpers.equivalence import Trajectory
from tests.helpers.random_draws import HYBRIDS, MODEL_TYPES, TASKS, draw
from tests.helpers.random_runs import off_by, outcome

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
DRAWS = int(os.environ.get("TRL_PADDINGFREE_DRAWS", "10"))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(SEED * 1000, SEED * 1000 + DRAWS))
def test_a_random_draw_trains_as_padded_trl_does(seed):
    result = outcome(seed)
    assert result["verdict"] in ("same", "same in float64", "refused", "TRL refuses"), result


@pytest.mark.parametrize("seed", [49, 51, 60, 99, 122, 228])
def test_draws_are_compared_and_not_all_refused(seed):
    assert outcome(seed)["verdict"] == "same"


def test_draws_reach_every_model_and_repeat_by_their_seed():
    draws = [draw(seed) for seed in range(400)]
    assert draws == [draw(seed) for seed in range(400)]
    assert {drawn["model"]["type"] for drawn in draws} == {*MODEL_TYPES, *HYBRIDS}
    assert {drawn["task"] for drawn in draws} == set(TASKS)


@pytest.mark.parametrize("value", [1.001, float("nan"), float("inf")])
def test_a_difference_is_seen(value):
    weights = {"w": torch.ones(3)}
    one, other = (Trajectory([{"loss": x}], weights, None) for x in (1.0, value))
    assert off_by(one, one, 2e-4) == {}
    assert off_by(one, other, 2e-4)
    assert off_by(other, other, 2e-4) == {}
    assert off_by(one, Trajectory([{"loss": 1.0}], {"w": torch.ones(3) * value}, None), 2e-4)
    assert off_by(one, Trajectory([], weights, None), 2e-4)
