#!/usr/bin/env bash
# Run OpenEnv's three verdicts and our own OpenEnv tests on the oldest OpenEnv that pyproject.toml allows.
#
# Only the package `openenv` itself is exchanged, in a temporary directory that stands before the environment's own.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
oldest=$("$PYTHON" - <<'PROGRAM'
import re, tomllib
from pathlib import Path
ranges = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]["openenv"]
print(next(found[1] for text in ranges if (found := re.match(r"openenv>=([0-9.]+)", text))))
PROGRAM
)
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "openenv==$oldest.*"
export PYTHONPATH="$folder"
"$PYTHON" -c 'import openenv; print("OpenEnv", openenv.__version__)'
"$PYTHON" -m scripts.openenv_check
"$PYTHON" -m pytest -q -n 2 --dist worksteal tests/server/test_openenv.py tests/agents/test_openenv_environment.py tests/env/test_conformance.py
