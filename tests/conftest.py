"""Fixtures that several rooms' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import RunningServer, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A real server with default settings on a free port; tests must not depend on each other's sessions."""
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running
