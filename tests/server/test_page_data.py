"""Content of the page: its data are up to date, and every code example that it shows runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import page_data
from server.api.web import PAGE_DIR
from tests.programs import program
from tests.servers import ROOT, RunningServer

pytestmark = pytest.mark.slow

SNIPPETS = PAGE_DIR / "snippets"
SHOWN = {
    "curl.sh": r'"score":0\.\d+',
    "http_client.py": r"score 0\.\d+: throughput",
    "openenv_client.py": r"return -?\d+\.\d, cost \d+\.\d\d",
    "gymnasium_vector.py": r"random play: mean return -?\d+\.\d over 64 episodes",
    "sb3_ppo.py": r"trained for 3200 steps",
    "colab.py": r"",
}
"""Output of each example."""


def test_the_data_of_the_page_are_what_the_code_gives_now() -> None:
    assert page_data.stale() == [], "run `python -m scripts.page_data` and commit what it writes"


def test_a_stale_number_is_found() -> None:
    differences = page_data.differences
    assert differences({"a": [1.0, "x"]}, {"a": [1.0005, "x"]}) == []
    assert differences({"a": [1.0, "x"]}, {"a": [1.01, "y"]}) == [
        "a[0]: 1.0 in the file, 1.01 now",
        "a[1]: 'x' in the file, 'y' now",
    ]
    assert differences({"a": 1}, {"b": 1}) != []


def test_every_piece_of_code_that_the_page_lists_is_run_here() -> None:
    listed = [piece["file"] for piece in json.loads((SNIPPETS / "index.json").read_text(encoding="utf-8"))]
    assert set(listed) == set(SHOWN) == {file.name for file in SNIPPETS.iterdir()} - {"index.json", "__pycache__"}


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_a_piece_of_code_runs_as_it_is_shown(server: RunningServer, tmp_path: Path, name: str) -> None:
    text = (SNIPPETS / name).read_text(encoding="utf-8").replace("http://localhost:7860", server.url)
    assert (server.url in text) == (name not in ("gymnasium_vector.py", "sb3_ppo.py"))
    (tmp_path / name).write_text(text, encoding="utf-8")
    if name.endswith(".sh"):
        program("curl")
    runner = ["bash", "-eu"] if name.endswith(".sh") else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*runner, name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(SHOWN[name], done.stdout)
