"""Fixtures of the integrations with trainers that are not installed here: each on a stand-in of its interface."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests import nemo_gym_standin, skyrl_standin, verifiers_standin
from tests.servers import ROOT, RunningServer

NEMO_GYM_APP = "agents.integrations.nemo_gym.app"
VERIFIERS_FOLDER = ROOT / "agents" / "integrations" / "verifiers"


@pytest.fixture
def skyrl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The integration with SkyRL; where skyrl-gym is not installed, on its interface."""
    for name, module in skyrl_standin.installed().items():
        monkeypatch.setitem(sys.modules, name, module)
    import agents.integrations.skyrl

    yield agents.integrations.skyrl
    monkeypatch.delitem(sys.modules, "agents.integrations.skyrl")


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that verifiers loads, on the stand-in."""
    for name, module in verifiers_standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("agents.integrations.verifiers", "inferencegym_fleet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(VERIFIERS_FOLDER))
    loaded = importlib.import_module("inferencegym_fleet")
    package = importlib.import_module("agents.integrations.verifiers")
    # Modules imported on the stand-in must not leak into other tests.
    monkeypatch.delitem(sys.modules, "agents.integrations.verifiers")
    monkeypatch.delitem(sys.modules, "inferencegym_fleet")
    assert [getattr(loaded, name) for name in loaded.__all__] == [package.FleetEnv, package.FleetTaskset]
    return package


@pytest.fixture
def gym(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The application that Gym would serve, on the stand-in."""
    for name, module in nemo_gym_standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NEMO_GYM_APP, raising=False)
    module = importlib.import_module(NEMO_GYM_APP)
    # Modules imported on the stand-in must not leak into other tests.
    monkeypatch.delitem(sys.modules, NEMO_GYM_APP)
    config = module.FleetConfig(host="", port=1, entrypoint="app.py", name="fleet", base_url=server.url)
    return module.FleetResourcesServer(config=config, server_client=None).setup_webserver()
