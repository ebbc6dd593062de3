"""Planted mistakes are caught before the step that shows them."""

import pytest

from scripts.planted import PAGE, at, table
from tests.proof.planted import MISTAKES, caught


@pytest.mark.drawn(8)
@pytest.mark.parametrize("shows_at", [0, 2])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planted_mistake_is_caught_before_it_is_learnt(mistake, shows_at):
    later = shows_at or mistake.before or "call" in mistake.name  # one counts calls, whatever a micro-batch shows
    expected = "later step" if later else "first step"
    assert at(caught(mistake, shows_at)) in ("start-up check", expected)


@pytest.mark.models
def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8")
