#!/usr/bin/env bash
# Run the tests of the Gymnasium environments on a newer version than the pins hold, which are as old as RLlib demands.
#
# Only the package `gymnasium` itself is exchanged, in a temporary directory that stands before the environment's own.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
GYMNASIUM=${GYMNASIUM:-gymnasium==1.4.0}
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "$GYMNASIUM"
export PYTHONPATH="$folder"
"$PYTHON" -c 'import gymnasium; print("Gymnasium", gymnasium.__version__)'
"$PYTHON" -m pytest -q tests/env/test_gym.py -m 'not slow'
