#!/usr/bin/env bash
# Runs the tests of images with torchvision, in a fresh environment with the default build of PyTorch, which runs on CPUs
# too: all fourteen architectures by turns, instead of the four that Pillow alone serves.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(mktemp -d)/venv
trap 'rm -rf "$(dirname "$venv")"' EXIT
python3 -m venv "$venv"
. "$venv/bin/activate"
python -m pip install -q torch torchvision num2words
python -m pip install -q -e ".[dev]"
python -m pytest -q tests/check/test_images.py tests/trainers/test_vision.py tests/cli/test_vision.py "$@"
