"""Planted mistakes are caught before the step that shows them."""

import pytest
import torch

from scripts.planted import PAGE, at, table
from tests.proof.planted import LONG, MISTAKES, Mistake, caught, of_one


@pytest.mark.drawn(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shows_at", [0, 2])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planted_mistake_is_caught_before_it_is_learnt(mistake, shows_at, dtype):
    later = shows_at or mistake.before or "call" in mistake.name  # one counts calls, whatever a micro-batch shows
    expected = "later step" if later else "first step"
    assert at(caught(mistake, shows_at, dtype)) in ("start-up check", expected)


# In rows of 120 tokens: over the first boundary and over the last, and from within a row to within the one before
@pytest.mark.parametrize(("reader", "distance"), [(120, 1), (1800, 1), (300, 120), (420, 120)])
def test_a_leak_of_one_token_is_caught_whatever_the_rounding(reader, distance):
    leaks = Mistake("a leak", lambda call: call.length > 1600, LONG, of_one(reader, distance))
    assert caught(leaks, 0, torch.bfloat16) == "first step"


@pytest.mark.parametrize("name", ["multiples of 192", "rows after the 14th in other places"])
def test_a_factor_of_five_percent_is_caught_in_bfloat16(name):
    (mistake,) = (each for each in MISTAKES if each.name == name)
    assert caught(mistake, 0, torch.bfloat16) in ("start-up check", "first step")


@pytest.mark.models
def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8")
