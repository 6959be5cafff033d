"""Shared pytest fixtures."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.desk import Desk
from tests.servers import RunningServer, running_server

# How long an example takes says how busy the machine is, whether Hypothesis takes its own profile or that for CI.
for _profile in ("default", "ci"):
    settings.register_profile(_profile, settings.get_profile(_profile), deadline=None)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A real server with default settings on a free port; tests must not depend on each other's sessions."""
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def windows() -> Iterator[None]:
    """Windows for ``render_mode="human"`` on a machine without a display."""
    import matplotlib.pyplot as plt

    plt.switch_backend("module://tests.window")
    yield
    plt.close("all")
    plt.switch_backend("agg")


@pytest.fixture
def soak_seed() -> int:
    """Seed of a soak test: that of the environment variable SOAK_SEED, else a new one, which is printed."""
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**32))
    print(f"\nSOAK_SEED={seed}", flush=True)  # noqa: T201
    return seed


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Two small tasks of a user's own."""
    return Desk(tmp_path, monkeypatch)
