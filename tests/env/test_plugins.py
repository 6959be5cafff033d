"""Packages that add tasks, agents and families by entry points, installed as anybody would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import ROOT, running_server

PLUGIN = ROOT / "tests" / "plugin"


def installed(project: Path, site: Path) -> dict[str, str]:
    """Install a project into a folder without a network; returns the environment variables that use it."""
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", site, project], check=True)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def example(folder: Path) -> dict[str, str]:
    """A copy of the example package, installed."""
    shutil.copytree(PLUGIN, folder / "project")
    return installed(folder / "project", folder / "site")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return example(tmp_path_factory.mktemp("plugin"))


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=everything, capture_output=True, text=True, check=False
    )


def test_evaluate_plays_the_task_and_the_agent_of_a_plugin(plugin: dict[str, str]) -> None:
    names = ["--task", "night-shift", "--agent", "sleeper", "--agent", "naive", "--seeds", "2", "--json"]
    done = python(plugin, "-m", "inferencegym", "evaluate", *names)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    scores = {each["agent"]: each["score"]["mean"] for each in result["agents"]}
    assert result["task"] == "night-shift"
    assert scores["sleeper"] > scores["naive"] > 0


def test_gymnasium_makes_the_tasks_of_a_plugin(plugin: dict[str, str]) -> None:
    code = (
        "import gymnasium, inferencegym.gym\n"
        "for name in ('NightShift', 'FrostyNight'):\n"
        "    env = gymnasium.make(f'InferenceGym/{name}-v1')\n"
        "    env.reset(seed=1); print(name, env.step(env.action_space.sample())[1] <= 1)\n"
    )
    done = python(plugin, "-W", "ignore", "-c", code)
    assert done.stdout.split("\n") == ["NightShift True", "FrostyNight True", ""], done.stderr


def test_a_server_serves_a_plugins_task_agent_and_family(
    plugin: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", plugin["PYTHONPATH"])
    with running_server(tmp_path) as server:
        assert "night-shift" in [task["id"] for task in server.get("/tasks", all="true")["tasks"]]
        listed = server.get("/policies", task_id="night-shift")["policies"]
        (sleeper,) = [policy for policy in listed if policy["name"] == "sleeper"]
        assert sleeper["description"] == "Sets large batches once and never looks again."
        played = server.post("/play", {"task_id": "night-shift", "seed": 3, "agent": "sleeper"})
        assert set(played["action"]["batch_size"]) == {256}
        warm = server.post("/thermostat/play", {"task_id": "frosty-night", "agent": "two_point"})
        cold = server.post("/thermostat/play", {"task_id": "frosty-night", "agent": "off"})
        assert warm["score"] > cold["score"]


@pytest.mark.parametrize(
    ("kind", "name", "value", "reason"),
    [
        ("tasks", "mine", "broken_plugin:missing", "cannot be loaded: AttributeError"),
        ("tasks", "mine", "broken_plugin:TEXT", "has a task file that is not valid: "),
        (
            "agents",
            "mine",
            "broken_plugin:Nothing",
            "is a class without the methods reset(n_rows) and act(observation)",
        ),
        ("agents", "naive", "broken_plugin:Agent", "has the name of another agent"),
        ("agents", "mine", "broken_plugin", "is of the type module, not type: write package.module:Name"),
        ("agent", "mine", "broken_plugin:Agent", "is in an unknown group: did you mean agents? The groups are tasks, "),
        ("families", "mine", "broken_plugin:NUMBER", "is of the type int, not Family"),
        ("players", "serving", "broken_plugin:NUMBER", "has the name of a family that has players"),
        ("families", "twin", "twin_plugin:TWIN", "has tasks whose ids are taken: rollout-"),
    ],
)
def test_a_broken_plugin_is_named_with_its_package(
    tmp_path: Path, kind: str, name: str, value: str, reason: str
) -> None:
    """The metadata of an installed package are enough here: what pip writes of it is tested above."""
    code = "NUMBER = 1\nTEXT = 'none.json'\nclass Nothing: ...\nclass Agent:\n    reset = act = print\n"
    (tmp_path / "broken_plugin.py").write_text(code, encoding="utf-8")
    code = (
        "import dataclasses, env.rollouts.family\nTWIN = dataclasses.replace(env.rollouts.family.FAMILY, name='twin')"
    )
    (tmp_path / "twin_plugin.py").write_text(code, encoding="utf-8")
    metadata = tmp_path / "broken_plugin-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 0.1\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[inferencegym.{kind}]\n{name} = {value}\n", encoding="utf-8")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = python(path, "-m", "inferencegym", "evaluate", "--task", "1", "--agent", "naive", "--seeds", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"inferencegym.{kind}: the entry point '{name}' ({value}) of the package 'broken-plugin' {reason}"
        in done.stderr
    )
    assert "pip uninstall broken-plugin" in done.stderr
