#!/usr/bin/env bash
# Runs the tests with the lowest versions of the direct dependencies that pyproject.toml allows:
#
#     scripts/lowest_versions.sh [PYTEST ARGUMENTS]
#
# Makes a fresh virtual environment with the Python that $PYTHON names (python3 if unset) and removes it afterwards.
# Downloads several gigabytes; UV_TORCH_BACKEND=cpu takes PyTorch's smaller builds for CPUs, where they can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
. "$folder/venv/bin/activate"
python -m pip install -q uv
# Lowest for what pyproject.toml names, newest for everything that those packages need in turn
uv pip install -q --resolution lowest-direct -e ".[test]"
uv pip list | grep -E "^(torch|transformers|trl|peft|accelerate|datasets|numpy|rich|psutil) "
python -m pytest -n 2 -q "$@"
