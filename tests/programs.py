"""Installed programs that tests start."""

from __future__ import annotations

import shutil

import pytest


def program(name: str) -> str:
    """Path of an installed program such as ``redis-server``; without it the test fails and says what to do."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is not installed: run scripts/install_test_servers.sh as root, or install it by hand")
    return path
