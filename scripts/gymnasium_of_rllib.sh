#!/usr/bin/env bash
# Run the tests of the Gymnasium environments on the one version of Gymnasium that RLlib asks for.
#
# The pins hold a newer one, which Stable-Baselines3 takes (scripts/pins/gymnasium-for-rllib.txt). Only the package
# `gymnasium` itself is exchanged, in a temporary directory that stands before the environment's own.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
wanted=$("$PYTHON" - <<'PROGRAM'
import re
from importlib.metadata import requires
print(next(found[1] for text in requires("ray") or [] if (found := re.match(r"gymnasium==([0-9.]+)", text))))
PROGRAM
)
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "gymnasium==$wanted"
export PYTHONPATH="$folder"
"$PYTHON" -c 'import gymnasium; print("Gymnasium", gymnasium.__version__)'
"$PYTHON" -m pytest -q tests/test_gym.py -m 'not slow'
