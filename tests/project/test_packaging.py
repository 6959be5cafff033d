"""Shipped files: pins, manifest, image and compose file; tests/project/test_wheel.py tests the wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import inferencegym
from inferencegym.installation import INTERPRETED
from server.settings import Settings
from setup import whole_source
from tests.checkout import PACKAGES, ROOT, copy_of_the_tree, declared_modules, pins, tracked_files
from tests.servers import START_TIMEOUT_S, free_port, wait_for_health

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIN_FILES = {
    "build": [],
    "server": ["serve", "redis", "tools"],
    "dev": ["serve", "redis", "tools", "report", "openenv", "ray", "dev"],
    "rl": [],
}
"""Requirement files, and the extras of the package that they cover."""


def requirements(extras: Sequence[str]) -> list[Requirement]:
    """Requirements of the package with these extras, without itself."""
    found = [*map(Requirement, PROJECT["dependencies"])]
    for entry in (Requirement(text) for extra in extras for text in PROJECT["optional-dependencies"][extra]):
        found += requirements(sorted(entry.extras)) if entry.name == PROJECT["name"] else [entry]
    return found


# --- Pins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["build", "server"])
def test_every_pin_of_what_is_deployed_carries_a_hash(name: str) -> None:
    assert [package for package, pin in pins(name).items() if pin.hashes == 0] == []


def test_the_server_installs_no_learning_framework_and_no_demo_page() -> None:
    unwanted = {"torch", "openenv", "gradio", "openai", "matplotlib", "ray", "stable-baselines3", "pytest"}
    assert unwanted & pins("server").keys() == set()


@pytest.mark.parametrize("name", sorted(PIN_FILES))
def test_no_pin_file_decides_which_build_of_torch_is_installed(name: str) -> None:
    assert [package for package in pins(name) if package == "torch" or package.startswith("nvidia")] == []


@pytest.mark.parametrize("smaller", ["server", "build"])
def test_a_package_has_one_version_in_all_pin_files(smaller: str) -> None:
    beyond = pins("dev")
    differing = {
        package: (pin.version, beyond[package].version if package in beyond else None)
        for package, pin in pins(smaller).items()
        if package not in beyond or beyond[package].version != pin.version
    }
    assert differing == {}


@pytest.mark.parametrize(("name", "extras"), PIN_FILES.items())
def test_pins_satisfy_the_ranges_of_the_package(name: str, extras: list[str]) -> None:
    if name == "rl":
        asked = [entry for entry in requirements(["rl"]) if entry.name == "stable-baselines3"]
    else:
        asked = requirements(extras) if extras else [Requirement("Cython>=3.1"), Requirement("setuptools>=80")]
    pinned = pins(name)
    wrong = {
        str(entry): pinned.get(canonicalize_name(entry.name))
        for entry in asked
        if canonicalize_name(entry.name) not in pinned
        or not entry.specifier.contains(pinned[canonicalize_name(entry.name)].version)
    }
    assert wrong == {}, "run `make pins`"


@pytest.mark.parametrize("name", ["server", "dev"])
def test_pip_needs_nothing_that_a_pin_file_lacks(name: str) -> None:
    pinned = pins(name)
    lacking = {}
    queue = requirements(PIN_FILES[name])
    seen: set[tuple[str, str]] = set()
    while queue:
        entry = queue.pop()
        package = canonicalize_name(entry.name)
        pin = pinned.get(package)
        if pin is None or not entry.specifier.contains(pin.version):
            lacking[str(entry)] = pin
            continue
        for extra in {"", *entry.extras} - {extra for known, extra in seen if known == package}:
            seen.add((package, extra))
            try:
                asked = importlib.metadata.requires(package) or []
            except importlib.metadata.PackageNotFoundError:
                asked = []  # pinned for another platform
            queue += [r for r in map(Requirement, asked) if r.marker is None or r.marker.evaluate({"extra": extra})]
    assert lacking == {}, "`pip install -r` would refuse the file"


@cache
def distributions_by_module() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def imported_distributions(package: str) -> dict[str, str]:
    """Third-party distributions that a package imports anywhere, functions included, and one file that does."""
    found: dict[str, str] = {}
    owners = distributions_by_module()
    for path in (ROOT / package).rglob("*.py"):
        if path.parent.name == "snippets":
            continue  # shown by the page, run by whoever copies it
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            for top in {module.split(".")[0] for module in modules} - sys.stdlib_module_names - set(PACKAGES):
                for distribution in owners.get(top, [top]):
                    found[canonicalize_name(distribution)] = str(path.relative_to(ROOT))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_imported_library_is_a_declared_dependency(package: str) -> None:
    training = ["rl", "ray", "skyrl", "trl", "verifiers", "nemo-gym"] if package == "agents" else []
    extras = ["serve", "live", "redis", "openenv", "tools", "report", "hardware", *training]
    names = {canonicalize_name(entry.name) for entry in requirements(extras)}
    undeclared = {name: path for name, path in imported_distributions(package).items() if name not in names}
    # It is a part of pydantic, which fixes its version.
    undeclared.pop("pydantic-core", None)
    if package == "live":
        assert undeclared.pop("vllm").startswith("live/engines/vllm_plugin/"), "loaded by the engine's own process"
    assert undeclared == {}


def test_a_client_of_a_server_imports_what_is_installed_without_extras() -> None:
    base = {canonicalize_name(entry.name) for entry in requirements([])}
    beyond = {name: path for name, path in imported_distributions("inferencegym/client").items() if name not in base}
    # OpenEnv's own client and types are asked for by name only.
    assert {path for path in beyond.values() if "openenv" not in path} == set()


def test_no_file_names_a_registry_host() -> None:
    hosts = [
        ".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("debian", "org"))
    ]
    naming = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in tracked_files()
        for host in hosts
        if host.encode() in path.read_bytes()
    ]
    assert naming == []


# --- The tree -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder", [*PACKAGES, "simulator/offline", "simulator/hardware", "simulator/data", "tests", "scripts", ".ci"]
)
def test_git_tracks_sources_wherever_they_lie(folder: str) -> None:
    ignored = subprocess.run(["git", "check-ignore", "--quiet", f"{folder}/new_module.py"], cwd=ROOT, check=False)
    assert ignored.returncode == 1


@pytest.mark.parametrize("name", ["env/reward.cpython-311-x86_64-linux-gnu.so", "env/reward.c", ".venv/pyvenv.cfg"])
def test_git_ignores_what_a_build_leaves_behind(name: str) -> None:
    ignored = subprocess.run(["git", "check-ignore", "--quiet", name], cwd=ROOT, check=False)
    assert ignored.returncode == 0


def test_the_tree_holds_no_symbolic_link() -> None:
    assert [str(path.relative_to(ROOT)) for path in tracked_files() if stat.S_ISLNK(path.lstat().st_mode)] == []


@pytest.mark.parametrize("folder", ["", "env/traffic/", "env/rollouts/"])
def test_each_manifest_states_the_version_of_the_package(folder: str) -> None:
    manifest = yaml.safe_load((ROOT / f"{folder}openenv.yaml").read_text(encoding="utf-8"))
    assert manifest["version"] == inferencegym.__version__


def test_citation_and_notebook_lead_to_the_address_of_the_package() -> None:
    address = PROJECT["urls"]["Repository"]
    assert f"repository-code: {address}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    place = address.removeprefix("https://github.com/")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    badge = re.search(rf"https://colab\.research\.google\.com/github/{place}/blob/main/(\S+?\.ipynb)", readme)
    assert badge is not None
    assert (ROOT / badge[1]).exists()


@pytest.mark.slow
def test_openenv_passes_the_running_server_and_its_runtime_graders() -> None:
    report = subprocess.run(
        [sys.executable, "-m", "scripts.openenv_check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert report.returncode == 0, report.stdout + report.stderr
    played = {f"runtime.{name}" for name in ("startup", "observation_schema", "reward_well_formed", "state_contract")}
    assert set(re.findall(r"(?m)^  PASS  (runtime\.\w+)", report.stdout)) == played


@pytest.mark.parametrize("module", declared_modules())
def test_the_compiled_module_is_loaded_and_as_new_as_its_source(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    compiled = Path(spec.origin)
    assert compiled.suffix == ".so", f"{module} is not compiled: run `make build`"
    source = ROOT / Path(*module.split(".")).with_suffix(".py")
    translated = ROOT / "build/cython" / source.relative_to(ROOT)
    of_build = [path.read_text(encoding="utf-8") for path in (translated, translated.with_suffix(".pxd"))]
    now = [whole_source(source), source.with_suffix(".pxd").read_text(encoding="utf-8")]
    assert of_build == now, f"{module} changed since it was compiled: run `make build`"
    assert compiled.stat().st_mtime >= translated.stat().st_mtime


# --- A bare machine ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_clone_that_was_not_built_serves_without_compiler_and_cython(tmp_path: Path) -> None:
    tree, port, log = copy_of_the_tree(tmp_path / "tree"), free_port(), tmp_path / "log"
    uvicorn = "import sys; sys.modules['cython'] = sys.modules['Cython'] = None; import uvicorn; uvicorn.main()"
    command = [sys.executable, "-c", uvicorn, "server.app:app", "--port", str(port)]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=tree, stdout=stderr, stderr=stderr)
    try:
        wait_for_health(f"http://127.0.0.1:{port}", process)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_TIMEOUT_S) as client:
            session_id = client.post("/reset", json={}).json()["session_id"]
            step = {"session_id": session_id, "action": {"batch_size": 64}}
            assert client.post("/step", json=step).json()["info"]["timestep"] == 1
    finally:
        process.terminate()
        process.wait(timeout=30)
    assert INTERPRETED in log.read_text()


def machine_check(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of the script that `make` runs before it installs anything."""
    command = ["/bin/sh", str(ROOT / "scripts/check_machine.sh"), *arguments]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_a_machine_that_can_build_is_told_nothing() -> None:
    assert machine_check(sys.executable) == (0, "")


def test_a_machine_without_python_is_told_how_to_get_one() -> None:
    status, said = machine_check()
    assert status == 1
    assert "Python 3.11 or newer" in said
    assert "sudo apt install python3-dev python3-venv gcc make" in said


def test_a_machine_without_a_compiler_is_told_before_anything_is_installed() -> None:
    status, said = machine_check(sys.executable, CC="no-such-compiler")
    assert status == 1
    assert "a C compiler (no-such-compiler" in said


def test_a_machine_without_the_header_files_of_python_is_told_so(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(
        f"""#!/bin/sh\ncase "$2" in *include*) echo {tmp_path} ;; *) exec {sys.executable} "$@" ;; esac\n"""
    )
    bare.chmod(0o755)
    status, said = machine_check(str(bare))
    assert status == 1
    assert "Python.h was not found" in said


# --- Image ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One line of a Dockerfile, continuations joined."""

    word: str
    rest: str


def dockerfile_stages() -> list[list[Instruction]]:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.strip().startswith("#"))
    stages: list[list[Instruction]] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stages.append([])
        if word:
            stages[-1].append(Instruction(word, rest.strip()))
    return stages


def only(stage: list[Instruction], word: str) -> str:
    (found,) = (instruction.rest for instruction in stage if instruction.word == word)
    return found


def test_the_image_runs_unprivileged_without_a_compiler_and_checks_its_health() -> None:
    final = dockerfile_stages()[-1]
    assert only(final, "USER") == "1000"
    assert only(final, "EXPOSE").split() == ["7860", "8000"]
    assert "/health" in only(final, "HEALTHCHECK")
    assert "ENABLE_WEB_INTERFACE" in only(final, "ENV")
    assert not any("apt-get" in step.rest or "pip" in step.rest for step in final if step.word == "RUN")


def test_everything_the_image_copies_is_in_the_tree() -> None:
    tracked = {path.relative_to(ROOT).as_posix() for path in tracked_files()}
    sources = [
        source
        for stage in dockerfile_stages()
        for step in stage
        if step.word == "COPY" and not step.rest.startswith("--from")
        for source in step.rest.split()[:-1]
    ]
    missing = [name for name in sources if not any(path == name or path.startswith(name) for path in tracked)]
    assert missing == []
    assert {f"{package}/" for package in PACKAGES} <= set(sources)


@dataclass(frozen=True)
class Image:
    """The Dockerfile's stages, executed in a folder instead of in containers."""

    root: Path

    def path(self, text: str) -> str:
        """`text` with the image's absolute folders replaced by those under the root."""
        return re.sub(r"(?<![\w.])/(opt|src|app)\b", rf"{self.root}/\1", text)

    def build(self) -> None:
        builder, _, final = dockerfile_stages()
        workdir = self.root
        for step in builder:
            if step.word == "WORKDIR":
                workdir = Path(self.path(step.rest))
                workdir.mkdir(parents=True)
            elif step.word == "COPY":
                *sources, target = step.rest.split()
                self.copy(sources, workdir / target)
            elif step.word == "RUN" and not step.rest.startswith("apt-get"):
                subprocess.run(["sh", "-ec", self.path(step.rest)], cwd=workdir, check=True, capture_output=True)
        for step in final:
            *sources, target = step.rest.removeprefix("--from=builder ").split()
            built = [self.path(source) for source in sources]
            if step.word == "COPY" and built != [self.path(target)]:
                self.copy(built, Path(self.path(target)))

    @staticmethod
    def copy(sources: list[str], target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if source.endswith("/"):
                shutil.copytree(ROOT / source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "*.c"))
            else:
                shutil.copy2(ROOT / source, target)

    def environment(self) -> dict[str, str]:
        declared = dict(pair.split("=", 1) for pair in shlex.split(only(dockerfile_stages()[-1], "ENV")))
        declared["PATH"] = self.path(declared["PATH"]).replace("$PATH", "/usr/bin:/bin")
        return declared

    def workdir(self) -> str:
        return self.path(only(dockerfile_stages()[-1], "WORKDIR"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    built = Image(tmp_path_factory.mktemp("image"))
    built.build()
    return built


@pytest.fixture
def container(image: Image, tmp_path: Path) -> Iterator[tuple[dict[str, str], str, str]]:
    """The image's command, started with its own environment on two free ports: (environment, url, other url)."""
    port, also = free_port(), free_port()
    environment = image.environment() | {
        "INFERENCEGYM_PORT": str(port),
        "INFERENCEGYM_ALSO_PORT": str(also),
        "INFERENCEGYM_HOST": "127.0.0.1",
        "HOME": str(tmp_path),
    }
    command = yaml.safe_load(only(dockerfile_stages()[-1], "CMD"))
    command[0] = shutil.which(command[0], path=environment["PATH"])
    process = subprocess.Popen(command, env=environment, cwd=image.workdir())
    try:
        wait_for_health(f"http://127.0.0.1:{port}", process)
        yield environment, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{also}"
    finally:
        process.terminate()
        assert process.wait(timeout=30) is not None


@pytest.mark.slow
def test_the_image_plays_an_episode_on_both_ports_and_writes_nothing_beside_it(
    image: Image, container: tuple[dict[str, str], str, str]
) -> None:
    environment, *urls = container
    before = {path: path.lstat().st_mtime_ns for path in image.root.rglob("*")}
    for url in urls:
        with httpx.Client(base_url=url, timeout=10.0) as client:
            session = client.post("/reset", json={"task_id": 1, "seed": 7, "config": {"episode_length": 3}}).json()
            steps = [
                client.post("/step", json={"session_id": session["session_id"], "action": {"batch_size": 64}}).json()
                for _ in range(3)
            ]
            assert [step["done"] for step in steps] == [False, False, True]
            graded = client.post("/grader", json={"session_id": session["session_id"]}).json()
            assert 0.0 <= graded["score"] <= 1.0
    check = only(dockerfile_stages()[-1], "HEALTHCHECK")
    command = yaml.safe_load(check[check.index("CMD") + 3 :])
    command[0] = shutil.which(command[0], path=environment["PATH"])
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert {path: path.lstat().st_mtime_ns for path in image.root.rglob("*")} == before


@pytest.mark.slow
def test_the_image_is_small_and_holds_no_installer(image: Image) -> None:
    installed = image.root / "opt/venv"
    size = sum(path.lstat().st_size for path in installed.rglob("*") if path.is_file())
    assert size < 500e6, f"{size / 1e6:.0f} MB"
    needed = "import pyarrow.parquet, scipy.interpolate, inferencegym.server.app"
    subprocess.run([installed / "bin/python", "-c", needed], cwd=image.root, check=True)
    names = {path.name for path in (installed / "lib/python3.11/site-packages").iterdir()}
    assert names & {"pip", "setuptools", "Cython", "torch", "openenv", "gradio", "openai"} == set()


@pytest.mark.parametrize("name", ["Dockerfile", "docker-compose.yml", "Makefile", "docs/deploy/kubernetes/server.yaml"])
def test_deployment_files_set_only_settings_that_the_server_has(name: str) -> None:
    used = set(re.findall(r"INFERENCEGYM_([A-Z_]+)", (ROOT / name).read_text(encoding="utf-8")))
    assert used - {field.upper() for field in Settings.model_fields} == set()


def test_compose_serves_development_and_two_replicas_behind_a_proxy() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert [name for name, service in services.items() if "profiles" not in service] == ["dev"]
    assert {name for name, service in services.items() if service.get("profiles") == ["scale"]} == {
        "replica",
        "redis",
        "scale-proxy",
    }
    assert services["replica"]["deploy"]["replicas"] == 2
    assert services["replica"]["environment"]["INFERENCEGYM_STORE_URL"].startswith("redis://redis:")
    proxy = compose["configs"]["proxy"]["content"]
    assert "proxy_pass http://replicas;" in proxy
    # With "consistent", nginx gives each client all addresses of a name in turn, and batch sessions are not found.
    assert "hash $$remote_addr$$http_x_client_id;" in proxy
    assert re.search(r"proxy_set_header Upgrade \$\$http_upgrade;", proxy), "WebSocket needs the upgrade header"
