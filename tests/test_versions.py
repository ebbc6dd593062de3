"""The versions that the tests run with stand in pyproject.toml; all other places say the same."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from trl_paddingfree.upstream import TESTED

PYPROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
VERSIONS = PYPROJECT["tool"]["trl-paddingfree"]["versions"]
REQUIRED = {r.name: r.specifier for r in map(Requirement, PYPROJECT["project"]["dependencies"])}


def test_the_wheel_names_the_lowest_and_the_newest():
    assert {name: (lowest, newest) for name, (lowest, _, newest) in VERSIONS.items()} == TESTED


@pytest.mark.parametrize(("name", "versions"), VERSIONS.items(), ids=VERSIONS)
def test_the_lowest_is_the_floor_that_an_installation_keeps_to(name, versions):
    assert sorted(versions, key=Version) == versions
    assert all(version in REQUIRED[name] for version in versions)
    (floor,) = [Version(bound.version) for bound in REQUIRED[name] if bound.operator == ">="]
    assert floor == Version(versions[0])
