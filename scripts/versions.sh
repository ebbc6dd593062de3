#!/usr/bin/env bash
# Runs tests with versions that pyproject.toml lists:
#
#     scripts/versions.sh lowest|between|newest [PYTEST ARGUMENTS]
#
# Without arguments for pytest, it runs the tests of what differs between versions, which pyproject.toml lists, too. It
# makes a fresh virtual environment with the Python that $PYTHON names (default: python3), and removes it afterwards. It
# downloads several gigabytes. UV_TORCH_BACKEND=cpu takes PyTorch's smaller builds for CPUs, where they can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:?lowest, between or newest}
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
. "$folder/venv/bin/activate"
read_table='import sys, tomllib
table = tomllib.load(open("pyproject.toml", "rb"))["tool"]["trl-paddingfree"]
print(*(table["versions"][sys.argv[1]] if len(sys.argv) > 1 else table["tests"]))'
wanted=(-e ".[test-all]" $(python -c "$read_table" "$run"))
(($#)) || set -- $(python -c "$read_table")
# With uv, the lowest of all else that pyproject.toml names, too
resolution=highest
[[ $run != lowest ]] || resolution=lowest-direct
python -m pip install -q uv && uv pip install -q --resolution "$resolution" "${wanted[@]}" ||
    python -m pip install -q "${wanted[@]}"
python -m pip list | grep -E "^(torch|torchvision|transformers|trl|peft|accelerate|datasets|numpy|rich|psutil) "
python -m pytest -n 2 -q "$@"
