"""The demonstration notebook, cell by cell against a real server, with fewer training steps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib
import pytest

from tests.checkout import copy_of_the_tree
from tests.servers import RunningServer, free_port

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "InferenceGym_Demo.ipynb"


def cells() -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_the_notebook_has_ten_cells_and_carries_no_outputs() -> None:
    kinds = [cell["cell_type"] for cell in cells()]
    assert kinds == ["markdown", *["code"] * 9]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells()[1:])
    assert len({cell["id"] for cell in cells()}) == 10


def test_what_the_notebook_installs_covers_what_it_imports() -> None:
    installed = set(re.search(r"%pip install -q (.*)", source(cells()[1])).group(1).split())  # type: ignore[union-attr]
    code = "\n".join(source(cell) for cell in cells()[2:])
    imported = {name.split(".")[0] for name in re.findall(r"^(?:import|from) ([\w.]+)", code, re.MULTILINE)}
    comes_with = {"numpy": "gymnasium", "torch": "stable-baselines3", "stable_baselines3": "stable-baselines3"}
    assert {comes_with.get(name, name) for name in imported - sys.stdlib_module_names} <= installed


def test_without_github_and_without_a_server_the_notebook_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFERENCEGYM_URL", raising=False)
    monkeypatch.setenv("INFERENCEGYM_DEMO_REPOSITORY", (tmp_path / "nowhere").as_uri())
    monkeypatch.setenv("INFERENCEGYM_PORT", str(free_port()))
    with pytest.raises(RuntimeError, match="Set INFERENCEGYM_URL to the address of a server"):
        exec(compile(source(cells()[2]), "cell 3", "exec"), {"__name__": "__main__"})


def test_the_server_that_the_notebook_started_ends_with_its_kernel(tmp_path: Path) -> None:
    """With a stand-in for the clone: `make serve` serves a file named health."""
    (tmp_path / "inferencegym").mkdir()
    (tmp_path / "inferencegym/health").write_text("ok")
    serve = f"serve:\n\t@exec {sys.executable} -m http.server $(PORT)\n"
    (tmp_path / "inferencegym/Makefile").write_text(serve)
    port = str(free_port())
    cell = source(cells()[2]).replace('call("GET", "/health")', 'assert server.get("/health").text == "ok"')
    environment = {k: v for k, v in os.environ.items() if k != "INFERENCEGYM_URL"} | {"INFERENCEGYM_PORT": port}
    kernel = [sys.executable, "-c", cell]
    done = subprocess.run(kernel, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for _ in range(600):
        try:
            httpx.get(f"http://localhost:{port}/health")
        except httpx.TransportError:
            return
        time.sleep(0.1)
    pytest.fail("the server outlives the kernel")


@pytest.mark.slow
def test_without_the_address_of_a_server_the_notebook_clones_and_starts_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Colab: an empty folder, and a repository to clone."""
    repository = copy_of_the_tree(tmp_path / "repository")
    # Unoptimised, the package compiles in a third of the time.
    build = repository / "setup.py"
    build.write_text(build.read_text(encoding="utf-8").replace('"-O3"', '"-O0"'), encoding="utf-8")
    for command in ("init --quiet", "add --all", "-c user.name=a -c user.email=a@b.c commit --quiet -m all"):
        subprocess.run(["git", *command.split()], cwd=repository, check=True)
    (tmp_path / "content").mkdir()
    monkeypatch.chdir(tmp_path / "content")
    monkeypatch.delenv("INFERENCEGYM_URL", raising=False)
    monkeypatch.setenv("INFERENCEGYM_DEMO_REPOSITORY", repository.as_uri())
    monkeypatch.setenv("INFERENCEGYM_PORT", str(free_port()))
    monkeypatch.setenv("INFERENCEGYM_DATA_DIR", str(tmp_path / "data"))
    processes: list[subprocess.Popen[bytes]] = []

    class Remembered(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Remembered)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number in (2, 3):
            exec(compile(source(cells()[number]), f"cell {number + 1}", "exec"), namespace)
        assert namespace["URL"] == f"http://localhost:{os.environ['INFERENCEGYM_PORT']}"
        assert {1, 2, 3} <= set(namespace["tasks"])
        assert namespace["started_server"]() == namespace["URL"]  # again: the one that runs
        namespace["server"].close()
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


@pytest.mark.slow
def test_the_notebook_runs_from_the_first_cell_to_the_last(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matplotlib.use("Agg")
    monkeypatch.setenv("INFERENCEGYM_URL", server.url)
    monkeypatch.setenv("INFERENCEGYM_DEMO_STEPS", "8000")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        # Skip the cell that installs packages.
        if cell["cell_type"] == "code" and "%pip" not in source(cell):
            exec(compile(source(cell), f"cell {number + 1}", "exec"), namespace)
    namespace["server"].close()
    namespace["fleets"].close()
    told = capsys.readouterr().out
    for played in ("PPO", "fixed-32", "vLLM's defaults", "the heuristic"):
        assert re.search(rf"score on traffic .*{played} [01]\.\d+", told)
    assert namespace["fleets"].taken >= 8000
    assert len(namespace["fleets"].finished) >= 8000 // 200 - 8
    assert namespace["late"].mean() > namespace["early"].mean()
