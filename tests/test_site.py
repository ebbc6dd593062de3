"""The pages as a site, and as a list for language models."""

import re
import sys

import pytest

from tests.helpers.launching import finished
from tests.helpers.pages import ROOT

PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_site_builds_without_a_link_that_leads_nowhere(tmp_path):
    pytest.importorskip("material", reason='needs `pip install -e ".[docs]"`')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / ".ci" / "mkdocs.yml", "-d", tmp_path]
    finished(command, 120)
    # A README is the page of its folder
    folders = [path.removesuffix("README.md").removesuffix(".md") for path in PAGES]
    assert [folder for folder in folders if not (tmp_path / folder / "index.html").is_file()] == []
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assets = re.findall(r'(?:href|src)="(assets/[^"]+)"', front)
    assert assets, "the theme has stylesheets and scripts"
    assert [path for path in assets if not (tmp_path / path).is_file()] == []
    assert 'href="docs/write_a_trainer/"' in front
    assert 'href="README.zh/"' in front


@pytest.mark.parametrize("script", ["llms.py", "option_table.py", "pictures.py"])
def test_what_a_script_writes_is_fresh(script):
    finished([sys.executable, ROOT / "scripts" / script, "--check"], 120, PYTHONPATH=str(ROOT))


def test_the_list_for_language_models_has_every_page():
    listed = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    pages = [page for page in PAGES if page != "docs/README.md" and not page.startswith("docs/benchmarks/")]
    links = [f"(../{page})" if "/" not in page else f"({page.removeprefix('docs/')})" for page in pages]
    assert [link for link in links if link not in listed] == []
    assert listed.startswith("# trl-paddingfree\n\n> ")
    assert "\n\nTRL pads every batch" in listed
