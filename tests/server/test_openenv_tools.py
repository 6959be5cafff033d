"""What stands around the environment for OpenEnv: the staged package, the oracle, and the validator's plan."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from inferencegym.client.openenv_types import without_gradio
from inferencegym.models import ServeAction
from inferencegym.tasks import EpisodeConfig, get_task
from tests.servers import ROOT, RunningServer

IDENTITY = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("staged") / "package"
    script("stage_openenv").stage(directory)
    return directory


def test_openenv_push_accepts_the_staged_package_and_uploads_all_of_it(staged: Path, tmp_path: Path) -> None:
    with without_gradio():
        from openenv.cli.commands import push

    # No public function does these three without uploading to a hub.
    name, manifest = push._validate_openenv_directory(staged)  # noqa: SLF001
    assert (name, manifest["port"]) == ("inference_gym", 7860)
    uploaded = tmp_path / "uploaded"
    ignored = push._load_ignore_patterns(staged, None)  # noqa: SLF001
    push._prepare_staging_directory(staged, name, uploaded, ignored)  # noqa: SLF001
    before = {path.relative_to(staged) for path in staged.rglob("*") if path.is_file()}
    assert {path.relative_to(uploaded) for path in uploaded.rglob("*") if path.is_file()} == before
    for kept, source in (("README.md", staged), ("Dockerfile", ROOT)):
        assert (uploaded / kept).read_text(encoding="utf-8") == (source / kept).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_staged_package_passes_openenvs_validation(staged: Path) -> None:
    command = [Path(sys.executable).with_name("openenv"), "validate", str(staged), "--level", "static"]
    verdict = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (verdict.returncode, "Verdict: PASS" in verdict.stdout) == (0, True), verdict.stdout + verdict.stderr


def test_the_staged_package_holds_what_its_image_is_built_from_and_nothing_heavy(staged: Path) -> None:
    for line in (staged / "Dockerfile").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not words[1].startswith("--"):
            assert [source for source in words[1:-1] if not (staged / source).exists()] == []
    top = {path.name for path in staged.iterdir()}
    assert top & {"tests", "notebooks", ".git", ".venv", "build"} == set()
    # Of the benchmarks only the pictures that the documents show.
    pictures = {path.suffix for path in (staged / "benchmarks").rglob("*") if path.is_file()}
    assert pictures == {".png", ".gif"}
    assert (staged / "simulator/offline").is_dir()
    size_mb = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file()) / 1e6
    assert size_mb < 50
    manifest = yaml.safe_load((staged / "openenv.yaml").read_text(encoding="utf-8"))
    assert (staged / manifest["validation"]["capabilities"]["oracle"]["location"]).is_file()


def test_the_spaces_readme_has_the_settings_of_a_space_and_every_link_of_it_leads_to_a_file(staged: Path) -> None:
    text = (staged / "README.md").read_text(encoding="utf-8")
    _, settings, body = text.split("---\n", 2)
    assert yaml.safe_load(settings)["app_port"] == 7860
    assert "make " not in body  # a Space has no clone
    pages = sorted(set(re.findall(r"\]\(([^)]+)\)", body)))
    assert "benchmarks/figures/page-desktop.png" in pages
    assert [page for page in pages if not (staged / page).is_file()] == []


@pytest.mark.slow
def test_openenvs_catalogue_lists_the_staged_package_and_finds_it_by_what_it_is_for(
    staged: Path, tmp_path: Path
) -> None:
    repository, catalogue = tmp_path / "repository", tmp_path / "catalogue.json"
    shutil.copytree(staged, repository / "envs/inference_gym")
    for arguments in (["init", "--quiet"], ["add", "--all"], [*IDENTITY, "commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", *arguments], cwd=repository, check=True)
    openenv = Path(sys.executable).with_name("openenv")
    where = ["--repository", repository, "--repository-uri", "https://github.com/someone/environments.git"]
    build = [openenv, "catalog", "build", *where, "--publisher", "example.org", "--output", catalogue]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert "1 records" in built.stderr, built.stderr
    assert "complete=true" in built.stderr
    assert "warning" not in built.stderr
    query = ["key value cache of an LLM serving fleet", "--catalog", catalogue, "--json"]
    said = subprocess.run([openenv, "discover", *query], capture_output=True, text=True, check=True).stdout
    [found] = json.loads(said)["results"]
    assert (found["displayName"], found["data"]["license"]) == ("inference_gym", "MIT")
    assert found["capabilities"] == ["begin", "observe", "set_knobs", "run", "grade"]


def test_the_catalogues_tools_are_those_of_the_server(staged: Path, server: RunningServer) -> None:
    declared = json.loads((staged / "discovery.json").read_text(encoding="utf-8"))["agent_tools"]["names"]
    listed = server.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})["result"]["tools"]
    assert [tool["name"] for tool in listed] == declared


def test_the_staged_clients_are_importable_from_the_packages_root(staged: Path) -> None:
    program = "import client; print(client.InferenceGymEnv.__module__, client.InferenceGymAction.__name__)"
    said = subprocess.run([sys.executable, "-c", program], cwd=staged, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["inferencegym.client.openenv", "InferenceGymAction"]


def test_staging_into_a_directory_in_use_is_refused(staged: Path) -> None:
    command = [sys.executable, "-m", "scripts.stage_openenv", staged]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (refused.returncode, "not empty" in refused.stderr) == (2, True)


def test_the_validators_plan_is_a_whole_episode_of_valid_actions() -> None:
    plan = json.loads((ROOT / "scripts/openenv_plan.json").read_text(encoding="utf-8"))
    options = plan["reset"]["options"]
    config: EpisodeConfig = get_task(options["task_id"]).config(options["config"])
    assert config.episode_length == len(plan["actions"])
    assert all(ServeAction.from_dict(action).validate() for action in plan["actions"])


def test_the_oracle_is_better_than_the_naive_baseline_on_every_declared_task() -> None:
    oracle = script("openenv_oracle")
    for task_id in (1, 2, 3):
        task = get_task(task_id)
        best = oracle.play_here(task, oracle.ORACLE, 10_000)
        assert best["score"] > oracle.play_here(task, oracle.DEFAULTS, 10_000)["score"] + 0.1


def test_the_oracle_plays_over_http_what_it_plays_in_process(server: RunningServer) -> None:
    oracle = script("openenv_oracle")
    task = get_task(3)
    assert oracle.play_on(server.url)(task, oracle.ORACLE, 10_001) == oracle.play_here(task, oracle.ORACLE, 10_001)
