"""KTO, padded TRL beside ours: matched and mismatched rows, each with its own flat batch."""

from functools import partial

import pytest

from tests.helpers.tiny import SEED, arguments, preference_data, unpaired
from tests.runs import compare, make_trainer, run


@pytest.fixture(scope="module")
def data():
    return unpaired(24, SEED)


def with_a_column_that_kto_does_not_read(rows):
    return rows.add_column("chosen", ["w1 w2"] * len(rows))


@pytest.mark.parametrize(
    ("rows", "per_row"),
    [(unpaired(24, 0), 1), (preference_data(24, 0), 2), (with_a_column_that_kto_does_not_read(unpaired(24, 0)), 1)],
    ids=["unpaired", "pairs", "stray column"],
)
def test_examples_without_a_completion_left_are_counted_and_no_others(rows, per_row, caplog):
    total = len(rows) * per_row
    trained = run("kto", "shared", train_dataset=rows, steps=1, max_length=16)
    kept = len(trained.trainer.train_dataset)
    assert 0 < kept < total
    assert f"The train data: dropped {total - kept} of {total} examples, which `max_length=16`" in caplog.text
    caplog.clear()
    run("kto", "shared", train_dataset=rows, steps=1)
    assert "dropped" not in caplog.text
    longer = rows.filter(lambda row: len(str(row["prompt"]).split()) > 1)
    total = len(longer) * per_row
    with pytest.raises(ValueError, match=f"dropped {total} of {total} examples, .* Raise `max_length`"):
        make_trainer("kto", "shared", train_dataset=longer, max_length=2, memory_budget=8)


def test_matched_and_mismatched_rows_of_one_width_are_kept_apart(data):
    """With rows of one shape, the flat batch of the others would go unnoticed."""
    words = ["w1 w2", "w3 w4", "w5 w6", "w7 w8"]
    rows = [{"prompt": "w9 w10", "completion": f" {words[i % 4]}", "label": i % 2 == 0} for i in range(12)]
    compare("kto", partial(arguments, "kto", False), data.from_list(rows))


def test_precomputed_references_are_computed_flat(data, flat_passes):
    trained = run(
        "kto", "shared", **arguments("kto", False), train_dataset=data, steps=1, precompute_ref_log_probs=True
    )
    batches = len(trained.trainer.train_dataset) // 4
    # Matched and mismatched rows: of each batch by the reference, and of the step by the policy
    assert flat_passes.call_count == 2 * batches + 2
