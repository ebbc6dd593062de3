"""The study of a budget that splits: whether it has, and that it agrees with padded TRL."""

import pytest

from scripts.benchmark.studies import parts


@pytest.mark.slow
@pytest.mark.parametrize(("held", "splits"), [(1, True), (8, False)])
def test_a_budget_that_splits_agrees_with_padded_trl(monkeypatch, held, splits):
    for name, value in {"STEPS": 1, "BATCH_SIZE": 4, "HELD": held}.items():
        monkeypatch.setattr(parts, name, value)
    found = parts.measure("tiny")
    assert (found["agree"], found["split"]) == (True, splits)
    assert [method["parts"] > 1 for method in found["methods"].values()] == [False, splits]
    text = parts.report({**found, "environment": {"gpu": "machine"}})
    assert f"Micro-batches {'ran in parts' if splits else 'DID NOT SPLIT'}, and all figures agree;" in text
    assert "| TRL, padded | 1 | 0.6931 |  |  |" in text
