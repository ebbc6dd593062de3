"""The notebook runs from top to bottom, and is committed without what it printed."""

import re

import pytest

from tests.helpers.pages import ROOT

NOTEBOOK = ROOT / "docs" / "quick_start.ipynb"
nbformat = pytest.importorskip("nbformat", reason='needs `pip install -e ".[docs]"`')
nbclient = pytest.importorskip("nbclient", reason='needs `pip install -e ".[docs]"`')
pytest.importorskip("ipykernel", reason='needs `pip install -e ".[docs]"`')
pytestmark = pytest.mark.usefixtures("checkout_stays")


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Where editors run it: in its own folder, in which it leaves nothing
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": NOTEBOOK.parent}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output.get("data", {}) for output in outputs]
    tables = [data["text/html"] for data in shown if "text/html" in data]
    assert ["computed tokens" in table for table in tables] == [True] * 2
    assert sum("image/png" in data for data in shown) == 3
    assert {path.name for path in tmp_path.rglob("*.png")} == {"waste.png", "SFT.png", "DPO.png"}
    printed = "".join(output.get("text", "") for output in outputs)
    for layout in ("no shared prefixes", "shared prefixes"):
        assert f"padding-free (segment, {layout}): losses differ by" in printed
    saved = re.search(r"5 pairs of each prompt, .*\n([\d,]+) tokens computed, where TRL computes ([\d,]+)", printed)
    computed, padded = (int(number.replace(",", "")) for number in saved.groups())
    assert computed < padded / 3
