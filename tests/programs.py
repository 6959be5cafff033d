"""Installed programs that tests start, and whether tests are skipped or fail if one is missing."""

from __future__ import annotations

import os
import shutil
from typing import Final

import pytest

REFUSE_SKIPS: Final = "TESTS_REFUSE_SKIPS"
"""Environment variable: if 1, as in CI, only tests of engines that are not installed may be skipped."""


def program(name: str) -> str:
    """Path of an installed program such as ``redis-server``; without it the test is skipped, and the end says so."""
    # Debian leaves /usr/sbin, where nginx is, out of a user's path.
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def refuses_skips() -> bool:
    """Whether a test that was skipped fails the run."""
    return os.environ.get(REFUSE_SKIPS) == "1"
