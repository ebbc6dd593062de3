"""The notebook runs from top to bottom, and is committed without what it printed."""

import pytest

from tests.helpers.pages import ROOT

NOTEBOOK = ROOT / "docs" / "quick_start.ipynb"
nbformat = pytest.importorskip("nbformat", reason='needs `pip install -e ".[docs]"`')
nbclient = pytest.importorskip("nbclient", reason='needs `pip install -e ".[docs]"`')
pytest.importorskip("ipykernel", reason='needs `pip install -e ".[docs]"`')


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook, kind: str) -> list:
    """What the cells gave of one type."""
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [each[kind] for each in data if kind in each]


def test_the_notebook_is_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    sft, dpo = outputs(notebook, "text/html")
    assert "computed tokens" in sft
    assert "computed tokens" in dpo
    assert len(outputs(notebook, "image/png")) == 3
    assert {path.name for path in tmp_path.glob("*.png")} == {"waste.png", "SFT.png", "DPO.png"}
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "padding-free (segment, no shared prefixes): losses differ by" in printed
    assert "padding-free (segment, shared prefixes): losses differ by" in printed
