"""Where two runs differ: how far, and in what only one of them has."""

import math

import pytest
import torch

from scripts.benchmark.differences import difference, differences


def test_differences_are_those_of_every_step_and_figure():
    padded = [{"loss": 0.5, "kl": None, "step_time": 3.0}, {"loss": -4.0, "reward": 1.0}]
    ours = [{"loss": 0.5, "kl": None}, {"loss": -4.2, "flat/computed_tokens": 3}]
    assert differences(padded, ours) == {"loss": pytest.approx(0.05), "kl": 0.0, "reward": math.inf}
    assert differences(padded, ours[:1])["loss"] == math.inf
    assert differences([{"loss": 0.01}], [{"loss": 0.02}], floor=1e-6) == {"loss": pytest.approx(1)}


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_a_mean_over_nothing_equals_only_another(nothing):
    assert difference(1.0, nothing) == difference(nothing, 1.0) == difference(math.inf, nothing) == math.inf
    assert difference(nothing, nothing) == difference(nothing, math.nan) == 0


def test_of_tensors_the_largest_difference_counts_relative_to_the_largest_value():
    expected = torch.tensor([1.0, -50.0, math.inf])
    assert difference(expected, torch.tensor([1.5, -50.0, math.inf])) == 0.01
    assert difference(expected, torch.tensor([1.0, -50.0, 3.0])) == math.inf
