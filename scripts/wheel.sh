#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh virtual environment, and runs the tests from a copy of this repository that
# does not have the package:
#
#     scripts/wheel.sh [PYTEST ARGUMENTS]
#
# It leaves the wheel in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
unset PYTHONPATH
rm -rf dist
python -m pip wheel -q --no-deps -w dist .
python -m pip install -q "torch==2.13.0" || echo "no CPU build of torch 2.13.0 to be had: taking what the package asks for"
python -m pip install -q "$(echo dist/*.whl)[test,docs]"
mkdir "$folder/elsewhere"
cp -r .ci configs docs scripts tests *.md LICENSE CITATION.cff pyproject.toml "$folder/elsewhere"
cd "$folder/elsewhere"
installed=$(python -c "import trl_paddingfree; print(trl_paddingfree.__file__)")
echo "Testing $installed"
[[ $installed != "$repository"/* ]]
trl-paddingfree env
python -m pytest -n 2 -q "$@"
