"""`make test` on a machine without the programs that tests start skips their tests and names them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT
from tests.programs import REFUSE_SKIPS

TESTS = """
import pytest
from tests.programs import program

@pytest.mark.parametrize("name", ["python", "redis-server"])
def test_that_starts(name):
    assert program(name)
"""


def run_tests(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two tests on a machine that has Python and no Redis."""
    test = directory / "test_small.py"
    test.write_text(TESTS, encoding="utf-8")
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    told = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={directory}", *arguments, str(test)]
    return subprocess.run(command, cwd=directory, env=told, capture_output=True, text=True, check=False)


def test_tests_without_their_program_are_skipped_and_named_at_the_end(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "-n", "1")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert "[redis-server]: redis-server is not installed" in done.stdout.split("1 not run")[1]


def test_continuous_integration_refuses_a_skipped_test(tmp_path: Path) -> None:
    done = run_tests(tmp_path, **{REFUSE_SKIPS: "1"})
    assert done.returncode == 1
    assert f"{REFUSE_SKIPS}=1 refuses that" in done.stdout
    assert run_tests(tmp_path, "-k", "python", **{REFUSE_SKIPS: "1"}).returncode == 0
