"""The study of pictures: all layouts learn the same, and are timed on the same batches."""

import pytest

from scripts.benchmark.studies import vision

pytest.importorskip("sklearn")


@pytest.mark.slow
def test_a_model_learns_digits_the_same_in_every_layout(monkeypatch, capsys):
    make_rows = vision.make_rows
    monkeypatch.setattr(vision, "make_rows", lambda images, targets, n, seed: make_rows(images, targets, 64, seed))
    short = {"STEPS": {"sft": 2, "dpo": 2, "grpo": 2}, "WARM_UP_STEPS": 0, "TIMED_STEPS": 2, "COUNTED_STEPS": 1}
    for name, steps in short.items():
        monkeypatch.setattr(vision, name, steps)
    results = vision.measure()["measured"]

    assert [(one["task"], one["layout"]) for one in results] == [
        (task, layout) for task, layouts in vision.LAYOUTS.items() for layout in layouts
    ]
    assert len(capsys.readouterr().out.splitlines()) == len(results)
    for one in results:
        padded = next(other for other in results if other["task"] == one["task"])
        # float32, after one optimizer step; GRPO's are differences of advantages, next to nothing
        assert one["losses"] == pytest.approx(padded["losses"], rel=1e-4, abs=1e-6)
        assert one["text_gflop"] <= padded["text_gflop"]
        if one["task"] == "grpo" and one is not padded:  # one of eight: those of the group
            assert one["tower_gflop"] == pytest.approx(padded["tower_gflop"] / vision.GROUP_SIZE, rel=1e-3)
        assert (one["speed_up"]["median"] == 1) == (one is padded)
    text = vision.report({"measured": results, "environment": {"gpu": "machine"}})
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(results)
    assert table[1].startswith("| SFT | TRL, padded | 1.00x (1.00 to 1.00) |")
