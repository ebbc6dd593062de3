"""The versions that the tests run with stand in pyproject.toml. Other places say the same, and floors have reasons."""

import re
import tomllib
from importlib.metadata import requires, version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.helpers.pages import ROOT
from tests.helpers.tiny import make_model
from trl_paddingfree.core.versions import TESTED

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUNS = {
    run: dict(pin.split("==") for pin in pins) for run, pins in PYPROJECT["tool"]["trl-paddingfree"]["versions"].items()
}


def floors(requirements):
    """The lowest version that each requirement allows."""
    bounds = {r.name: [b.version for b in r.specifier if b.operator == ">="] for r in map(Requirement, requirements)}
    return {name: Version(*versions) for name, versions in bounds.items() if versions}


OURS = floors(PYPROJECT["project"]["dependencies"])


def test_the_wheel_names_the_lowest_and_the_newest():
    assert {name: (RUNS["lowest"][name], newest) for name, newest in RUNS["newest"].items()} == TESTED


@pytest.mark.parametrize("name", TESTED)
def test_runs_go_up_from_the_floor_that_an_installation_keeps_to(name):
    versions = [Version(RUNS[run][name]) for run in ("lowest", "between", "newest")]
    assert versions == sorted(versions)
    assert versions[0] == OURS[name]


def test_the_tests_of_each_run_are_there():
    assert [path for path in PYPROJECT["tool"]["trl-paddingfree"]["tests"] if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_has_the_table(page):
    tables = re.findall(r"(?m)(?:^\|.*\n)+", (ROOT / page).read_text(encoding="utf-8"))
    (found,) = [table for table in tables if "| transformers |" in table]
    names, _, *tested = [[cell.strip() for cell in row.strip("|\n").split("|")] for row in found.splitlines()]
    assert [name.lower() for name in names] == [*TESTED]
    assert tested == [[RUNS[run][name] for name in TESTED] for run in ("lowest", "between", "newest")]


# --- Why the floors are where they are -----------------------------------------------------------------------------


def test_accelerate_and_datasets_are_as_low_as_trl_allows():
    theirs = floors([each for each in requires("trl") or () if "extra ==" not in each])
    assert (OURS["accelerate"], OURS["datasets"]) == (theirs["accelerate"], theirs["datasets"])


def test_pefts_floor_finds_the_linear_layers_of_a_mixture():
    """With transformers 5, PEFT 0.19.1 takes the word "all-linear" for a set of letters, with padding or without."""
    assert OURS["peft"] >= Version(MIN_PEFT_VERSION) or version("transformers") != RUNS["lowest"]["transformers"]
    adapted = get_peft_model(make_model("mixtral", num_local_experts=4), LoraConfig(r=4, target_modules="all-linear"))
    assert any("lora_A" in name for name, _ in adapted.named_parameters())
