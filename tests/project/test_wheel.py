"""Published packages: the source distribution, the wheel, and both installed in fresh environments.

The environments are filled from the package index that pip is set up for, so these tests are among the slow ones.
"""

from __future__ import annotations

import ast
import email.parser
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cython
import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import inferencegym
from inferencegym import plain_cython
from tests.checkout import PACKAGES, ROOMS, ROOT, copy_of_the_tree, declared_modules, pins
from tests.env.test_plugins import example
from tests.servers import START_TIMEOUT_S, RunningServer, free_port, wait_for_health

INFO = f"openenv_inferencegym-{inferencegym.__version__}.dist-info"
# the package that a top-level `agents` would break
OPENAI_AGENTS = "openai-agents==0.24.0"
INTERPRETED = "inferencegym: running as plain Python"


def published(name: str) -> str:
    """Path in the wheel of a file of the clone."""
    return f"inferencegym/{name}" if name.split("/")[0] in ROOMS else name


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """The functions of setup.py."""
    spec = importlib.util.spec_from_file_location("build_steps", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clone", "wheel"),
    [
        ("from env.batch import ServingBatch", "from inferencegym.env.batch import ServingBatch"),
        ("    from agents import registry", "    from inferencegym.agents import registry"),
        (
            ">>> from env.inference_env import InferenceEnv",
            ">>> from inferencegym.env.inference_env import InferenceEnv",
        ),
        ("from simulator.tables cimport Table", "from inferencegym.simulator.tables cimport Table"),
        ('run("server.app:app")', 'run("inferencegym.server.app:app")'),
        ("see :mod:`env.action` and", "see :mod:`inferencegym.env.action` and"),
        ("python -m server.app", "python -m inferencegym.server.app"),
        ("app: server.app:app", "app: inferencegym.server.app:app"),
    ],
)
def test_the_build_writes_the_published_name_of_a_rooms_module(build: ModuleType, clone: str, wheel: str) -> None:
    assert build.published_source(clone) == wheel
    assert build.published_source(wheel) == wheel


@pytest.mark.parametrize("value", [2.0, 2.7, -2.7])
@pytest.mark.parametrize("kind", ["int", "longlong", "Py_ssize_t"])
def test_the_stand_in_for_cython_converts_as_cython_does(kind: str, value: float) -> None:
    assert (
        plain_cython.cast(getattr(plain_cython, kind), value) == cython.cast(getattr(cython, kind), value) == int(value)
    )
    assert plain_cython.compiled is cython.compiled is False
    with plain_cython.nogil, cython.nogil:
        pass


def test_the_stand_in_for_cython_offers_what_compiled_modules_use(build: ModuleType) -> None:
    sources = [ROOT / Path(*module.split(".")).with_suffix(".py") for module in declared_modules()]
    used = {name for path in sources for name in re.findall(r"\bcython\.(\w+)", build.whole_source(path))}
    assert {name for name in used if not hasattr(plain_cython, name)} == set()


@pytest.mark.parametrize(
    "text",
    [
        "env.step(action)",
        'Path(folder) / "server.log"',
        'result["agents"]',
        "from inferencegym.env.batch import x",
        "from env to agents, nothing is imported",
        "from .env import x",
        "self.server.app",
        "from environment import x",
    ],
)
def test_the_build_leaves_what_is_no_module_of_a_room(build: ModuleType, text: str) -> None:
    assert build.published_source(text) == text


@pytest.mark.parametrize(("name", "line"), [("a.py", "import env.batch"), ("a.pxd", "cimport simulator.kernel")])
def test_an_import_that_the_build_cannot_rewrite_ends_it(
    build: ModuleType, tmp_path: Path, name: str, line: str
) -> None:
    (tmp_path / name).write_text(build.published_source(f"{line}\n"))
    with pytest.raises(SyntaxError, match=f"{re.escape(line)}.*from ROOM import"):
        build.check_published(tmp_path / name)


# --- Files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A source distribution of the checkout and the wheel built from it, so that both are proved complete."""

    tree: Path
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    tree, work = copy_of_the_tree(tmp_path_factory.mktemp("sources")), tmp_path_factory.mktemp("built")
    make_sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(work)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", make_sdist], cwd=tree, check=True, capture_output=True)
    (sdist,) = work.glob("*.tar.gz")
    pip_wheel = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(sdist)]
    subprocess.run([sys.executable, "-m", *pip_wheel], check=True, capture_output=True)
    (wheel,) = work.glob("*.whl")
    return Built(tree, sdist, wheel)


def documented_modules() -> list[str]:
    """Modules that documents and docstrings of agents start by ``python -m``."""
    patterns = ("README.md", "docs/*.md", "agents/**/*.md", "agents/**/*.py")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    started = rf"python -m ((?:{'|'.join(ROOMS)})\.[\w.]+)"
    return sorted({name for path in paths for name in re.findall(started, path.read_text(encoding="utf-8"))})


@pytest.fixture(scope="module")
def beside_the_clone(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the wheel: on the path it stands before the clone, in this environment, which has all extras."""
    folder = tmp_path_factory.mktemp("installed")
    install = ["pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(built.wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    return folder


@pytest.fixture
def archive(built: Built) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(built.wheel) as opened:
        yield opened


@pytest.mark.slow
def test_the_source_distribution_holds_every_file_of_a_clone_but_hidden_ones(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    files = {path.relative_to(built.tree).as_posix() for path in built.tree.rglob("*") if path.is_file()}
    missing = {name for name in files - held if not name.startswith((".", "openenv_inferencegym.egg-info/"))}
    assert missing == set()


@pytest.mark.slow
def test_the_wheel_holds_one_package_and_no_source_of_the_compiler(archive: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in archive.namelist()} == {"inferencegym", INFO}
    assert archive.read(f"{INFO}/top_level.txt").split() == [b"inferencegym"]
    assert [name for name in archive.namelist() if name.endswith(".c")] == []


@pytest.mark.slow
def test_the_wheel_holds_every_module_data_file_and_page(built: Built, archive: zipfile.ZipFile) -> None:
    sources = [path for package in PACKAGES for path in (built.tree / package).rglob("*") if path.is_file()]
    names = {published(path.relative_to(built.tree).as_posix()) for path in sources}
    assert names - set(archive.namelist()) == set()


@pytest.mark.slow
def test_the_wheel_holds_a_compiled_file_for_every_declared_module(build: ModuleType, archive: zipfile.ZipFile) -> None:
    compiled = {name.split(".")[0] for name in archive.namelist() if name.endswith(".so")}
    declared = {published(module.replace(".", "/")) for module in declared_modules()}
    assert compiled == declared | {build.UTILITIES.replace(".", "/")}


@pytest.mark.slow
def test_no_source_in_the_wheel_names_a_room_as_the_clone_does(archive: zipfile.ZipFile) -> None:
    clones_name = re.compile(rf"({'|'.join(ROOMS)})\.[a-z_]+(\.[a-z_]+)*:\w+")
    found = []
    for name in archive.namelist():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(archive.read(name))):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and clones_name.fullmatch(node.value):
                    modules = [node.value]
                found += [f"{name}: {module}" for module in modules if module.split(".")[0] in ROOMS]
    assert found == []


@pytest.mark.slow
def test_the_packaged_manifest_differs_by_the_name_of_the_application_only(archive: zipfile.ZipFile) -> None:
    clones = (ROOT / "openenv.yaml").read_text(encoding="utf-8")
    assert archive.read("inferencegym/openenv.yaml").decode() == clones.replace(
        "app: server.app:app", "app: inferencegym.server.app:app"
    )


@pytest.mark.slow
def test_the_wheel_states_name_version_licence_command_and_what_a_client_needs(archive: zipfile.ZipFile) -> None:
    metadata = email.parser.Parser().parsestr(archive.read(f"{INFO}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("openenv-inferencegym", inferencegym.__version__)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("MIT", ">=3.11")
    commands = archive.read(f"{INFO}/entry_points.txt").decode().split("\n")
    assert [line for line in commands if "=" in line] == ["inferencegym = inferencegym.__main__:main"]
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    assert {r.name for r in needed if r.marker is None} == {"gymnasium", "httpx", "numpy", "pydantic"}


# --- Fresh environments ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fresh:
    """A new virtual environment; what runs in it sees neither the checkout nor settings of this process."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "INFERENCEGYM_", "VIRTUAL_ENV"))}
        return kept | {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder)}

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def python(self, program: str) -> str:
        return self.run("python", "-W", "error", "-c", program).stdout.strip()

    def install(self, *what: str, **environment: str) -> None:
        """Install packages in this repository's pinned versions, unless the environment already has another version."""
        present = {canonicalize_name(p["name"]) for p in json.loads(self.run("pip", "list", "--format=json").stdout)}
        pinned = [f"{name}=={pin.version}" for name, pin in pins("dev").items() if name not in present]
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(pinned))
        self.run("pip", "install", "--quiet", "--constraint", str(constraints), *what, **environment)


def fresh(folder: Path) -> Fresh:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return Fresh(folder)


@pytest.fixture(scope="module")
def client_only(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """`pip install openenv-inferencegym`."""
    environment = fresh(tmp_path_factory.mktemp("client") / "venv")
    environment.install(str(built.wheel))
    return environment


@pytest.fixture(scope="module")
def complete(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """`pip install openenv-inferencegym[live,serve]` where openai-agents is installed."""
    environment = fresh(tmp_path_factory.mktemp("complete") / "venv")
    environment.run("pip", "install", "--quiet", OPENAI_AGENTS)
    environment.install(f"{built.wheel}[live,serve]")
    return environment


@pytest.fixture(scope="module")
def interpreted(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """`pip install openenv-inferencegym[sim]` from source on a machine without a C compiler."""
    environment = fresh(tmp_path_factory.mktemp("interpreted") / "venv")
    environment.install(f"{built.sdist}[sim]", CC="/no/such/compiler")
    return environment


@pytest.mark.slow
def test_a_client_is_small_and_imports_nothing_of_the_server(client_only: Fresh) -> None:
    packages = client_only.folder / "lib/python3.11/site-packages"
    installers = ("pip", "setuptools")
    size = sum(
        path.lstat().st_size
        for path in packages.rglob("*")
        if path.is_file() and path.relative_to(packages).parts[0] not in installers
    )
    assert size < 130e6, f"{size / 1e6:.0f} MB"
    assert client_only.python(
        "import sys, inferencegym.client as c; c.InferenceGymHTTP; c.InferenceGymBatch; "
        "print([name for name in ('server', 'simulator') if f'inferencegym.{name}' in sys.modules])"
    ) == str([])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("simulate --qps 5", "sim"),
        ("evaluate --task 1 --agent naive", "sim"),
        ("serve", "serve"),
        ("train --out policies", "rl"),
        ("sweep --task 1 --agent naive --seeds 2", "sim"),
    ],
)
def test_a_command_whose_packages_are_missing_names_the_extra_in_one_line(
    client_only: Fresh, command: str, extra: str
) -> None:
    done = client_only.run("inferencegym", *command.split(), check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"in a clone: pip install -e '.[{extra}]'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("import gymnasium; gymnasium.make('inferencegym.gym:InferenceGym/StaticUniform-v2')", "sim"),
        ("from inferencegym.client import InferenceGymEnv", "openenv"),
    ],
)
def test_an_error_of_the_library_names_the_missing_extra(client_only: Fresh, program: str, extra: str) -> None:
    done = client_only.run("python", "-c", program, check=False)
    assert f"in a clone: pip install -e '.[{extra}]'" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_package_harms_no_other(complete: Fresh) -> None:
    assert complete.python("from agents import Agent; print(Agent.__module__)") == "agents.agent"
    assert [p.name for p in (complete.folder / "bin").iterdir() if p.name in {"server", *PACKAGES}] == ["inferencegym"]
    complete.run("pip", "check")


@pytest.mark.slow
def test_the_installed_command_simulates_and_evaluates_as_the_clone_does(complete: Fresh) -> None:
    for command in ("simulate --qps 5 --json", "evaluate --task 3 --agent heuristic --seeds 2 --json"):
        done = complete.run("inferencegym", *command.split())
        clones = subprocess.run(
            [sys.executable, "-m", "inferencegym", *command.split()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == json.loads(clones.stdout)
        assert done.stderr == ""


@pytest.mark.slow
def test_the_installed_command_plays_the_tasks_agents_and_family_of_a_package(complete: Fresh, tmp_path: Path) -> None:
    site = example(tmp_path)["PYTHONPATH"].split(os.pathsep)[0]
    for task, agent in (("night-shift", "sleeper"), ("frosty-night", "two_point")):
        names = ["--task", task, "--agent", agent, "--seeds", "2", "--json"]
        (result,) = json.loads(complete.run("inferencegym", "evaluate", *names, PYTHONPATH=site).stdout)["results"]
        assert result["agents"][0]["score"]["mean"] > 0


@pytest.mark.slow
def test_an_installed_environment_is_made_by_its_id_and_steps(complete: Fresh) -> None:
    said = complete.python(
        "import gymnasium; e = gymnasium.make('inferencegym.gym:InferenceGym/StaticUniform-v2'); e.reset(seed=0); "
        "print(e.unwrapped.__class__.__module__, e.step(e.action_space.sample())[1] <= 1.0)"
    )
    assert said == "inferencegym.env.gym True"


@pytest.mark.slow
def test_an_installed_server_plays_an_episode_and_shows_its_page(complete: Fresh) -> None:
    port = free_port()
    settings = {"INFERENCEGYM_PORT": str(port), "INFERENCEGYM_HOST": "127.0.0.1", "INFERENCEGYM_WORKERS": "2"}
    process = subprocess.Popen(
        [complete.folder / "bin/inferencegym", "serve"], cwd=complete.folder, env=complete.environment | settings
    )
    try:
        wait_for_health(f"http://127.0.0.1:{port}", process)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_TIMEOUT_S) as client:
            session = client.post("/reset", json={"task_id": 1, "seed": 7, "config": {"episode_length": 1}}).json()
            step: dict[str, Any] = {"session_id": session["session_id"], "action": {"batch_size": 64}}
            assert client.post("/step", json=step).json()["done"] is True
            assert client.get("/web/").status_code == 200
            assert "app: inferencegym.server.app:app" in client.get("/openenv.yaml").text
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.slow
def test_what_the_chapter_on_engines_shows_without_an_engine_runs_where_the_wheel_is_installed(complete: Fresh) -> None:
    blocks = re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "docs/live.md").read_text(encoding="utf-8"), re.DOTALL)
    shell = "".join(block for language, block in blocks if language == "bash").replace("\\\n", " ").splitlines()
    (asked,) = re.findall(r"\$\(python -c '(.*?)'\)", "\n".join(shell))
    assert (Path(complete.python(asked)) / "inferencegym_scheduler.py").is_file()

    (episode,) = (block for language, block in blocks if language == "python")
    score = float(complete.python(episode).split()[0])
    assert 0 < score <= 1

    # The log and the table that the chapter's commands have from a user and from `inferencegym measure`.
    rows = [f"{t / 2},{500 + 10 * (t % 7)},{100 + t % 5}" for t in range(240)]
    (complete.folder / "requests.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    shipped = (
        complete.folder / "lib/python3.11/site-packages/inferencegym/simulator/data/tables/h100-llama-3.1-8b.parquet"
    )
    (complete.folder / "my-engine.parquet").write_bytes(shipped.read_bytes())
    commands = [line.split() for line in shell if line.startswith("inferencegym ") and "--engine" not in line]
    assert [command[1] for command in commands] == ["simulate", "plan", "shadow"]
    for command in commands:
        assert complete.run(*command).stdout


@pytest.mark.slow
def test_without_a_compiler_the_results_are_the_same_and_one_line_says_so(interpreted: Fresh, complete: Fresh) -> None:
    site = interpreted.folder / "lib/python3.11/site-packages"
    assert list((site / "inferencegym").rglob("*.so")) == []
    assert not (site / "Cython").exists()
    for command in ("simulate --qps 5 --json", "evaluate --task 3 --agent random --seeds 2 --json"):
        plain = interpreted.run("inferencegym", *command.split())
        assert plain.stdout == complete.run("inferencegym", *command.split()).stdout
        assert (plain.stderr.count("\n"), plain.stderr.startswith(INTERPRETED)) == (1, True), plain.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", documented_modules())
def test_a_module_that_documents_start_starts_from_the_wheel(beside_the_clone: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"inferencegym.{module}", "--help"],
        cwd=beside_the_clone,
        env=os.environ | {"PYTHONPATH": str(beside_the_clone)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("usage:"), done.stderr


@pytest.mark.slow
def test_a_readme_in_the_wheel_names_modules_as_the_wheel_does(archive: zipfile.ZipFile) -> None:
    said = archive.read("inferencegym/agents/integrations/skyrl/README.md").decode()
    assert 'entry_point="inferencegym.agents.integrations.skyrl:FleetEnv"' in said


@pytest.mark.slow
def test_openenvs_discovery_finds_the_package_that_is_not_a_clone(
    beside_the_clone: Path, tmp_path: Path, server: RunningServer
) -> None:
    program = """
import sys
from openenv import AutoAction, AutoEnv
with AutoEnv.from_env("inference_gym", base_url=sys.argv[1]).sync() as env:
    env.reset(seed=1)
    result = env.step(AutoAction.from_env("inference_gym")(batch_size=64))
import inferencegym
print(inferencegym.__file__, type(result.observation).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, server.url],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(beside_the_clone), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [
        str(beside_the_clone / "inferencegym/__init__.py"),
        "InferenceGymObservation",
    ]
