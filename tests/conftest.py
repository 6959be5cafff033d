"""Shared pytest fixtures."""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

import tests.alone  # noqa: F401 - before anything imports the families
from tests.desk import Desk
from tests.programs import REFUSE_SKIPS, refuses_skips
from tests.servers import RunningServer, running_server

pytest_plugins = ["tests.trainers"]

# httpx reads all certificates for every client, which takes tens of ms, for http:// too.
ssl.create_default_context = cache(ssl.create_default_context)

# How long an example takes says how busy the machine is, whether Hypothesis takes its own profile or that for CI.
for _profile in ("default", "ci"):
    settings.register_profile(_profile, settings.get_profile(_profile), deadline=None)


class SkippedTests:
    """Plugin that lists at the end, by name, the tests that were skipped, and in CI fails the run for them."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Tests of engines run only on machines where an engine is installed.
        if report.skipped and "engine" not in report.keywords and not hasattr(report, "wasxfail"):
            self.reasons[report.nodeid] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.reasons[report.nodeid] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.reasons and refuses_skips() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.reasons:
            return
        said = f", and {REFUSE_SKIPS}=1 refuses that" if refuses_skips() else ""
        terminalreporter.section(f"{len(self.reasons)} not run{said}")
        for nodeid, reason in self.reasons.items():
            terminalreporter.line(f"{nodeid}: {reason.removeprefix('Skipped: ')}")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist send their reports to the process that prints.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkippedTests())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A real server with default settings on a free port, for each module: open batch sessions count for 10 minutes."""
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Windows for ``render_mode="human"`` on a machine without a display."""
    import matplotlib.pyplot as plt

    monkeypatch.setenv("DISPLAY", "a stand-in")

    plt.switch_backend("module://tests.window")
    yield
    plt.close("all")
    plt.switch_backend("agg")


@pytest.fixture
def soak_seed() -> int:
    """Seed of a soak test: the environment variable SOAK_SEED if set, else a new seed, which is printed."""
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**32))
    print(f"\nSOAK_SEED={seed}", flush=True)  # noqa: T201
    return seed


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Two small tasks of a user's own."""
    return Desk(tmp_path, monkeypatch)
