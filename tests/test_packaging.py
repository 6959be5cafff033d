"""What is shipped: pins, wheel, manifest, image and compose file."""

from __future__ import annotations

import ast
import email.parser
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import inferencegym
from server.settings import Settings
from tests.servers import START_TIMEOUT_S, free_port

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agents", "env", "grader", "inferencegym", "server", "simulator")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PIN_FILES = {"build", "server", "dev", "rl"}


def pin_file(name: str) -> Path:
    return ROOT / ("requirements.txt" if name == "server" else f"requirements-{name}.txt")


def tracked_files() -> list[Path]:
    """Files of the checkout that git tracks or would offer to track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def copy_of_the_tree(destination: Path) -> Path:
    """What a fresh clone with the present changes would hold."""
    for source in tracked_files():
        target = destination / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    return destination


@dataclass(frozen=True)
class Pin:
    """One entry of a pin file."""

    version: str
    hashes: int


def pins(name: str) -> dict[str, Pin]:
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", pin_file(name).read_text(encoding="utf-8"))
    found: dict[str, Pin] = {}
    for entry in entries[1:]:
        match = re.match(r"([A-Za-z0-9._-]+)==([^ ;\\\n]+)", entry)
        assert match, (
            f"{pin_file(name).name}: every line pins one version, but this one does not: {entry.splitlines()[0]}"
        )
        found[canonicalize_name(match[1])] = Pin(match[2], entry.count("--hash=sha256:"))
    return found


# --- Pins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PIN_FILES))
def test_every_pin_carries_a_hash(name: str) -> None:
    assert [package for package, pin in pins(name).items() if pin.hashes == 0] == []


def test_the_server_installs_no_learning_framework_and_no_demo_page() -> None:
    unwanted = {"torch", "pandas", "gradio", "openai", "matplotlib", "ray", "stable-baselines3", "pytest"}
    assert unwanted & pins("server").keys() == set()


@pytest.mark.parametrize("name", sorted(PIN_FILES))
def test_no_pin_file_decides_which_build_of_torch_is_installed(name: str) -> None:
    assert [package for package in pins(name) if package == "torch" or package.startswith("nvidia")] == []


@pytest.mark.parametrize(("smaller", "larger"), [("server", "dev"), ("build", "dev"), ("dev", "rl")])
def test_a_package_has_one_version_in_all_pin_files(smaller: str, larger: str) -> None:
    beyond = pins(larger)
    differing = {
        package: (pin.version, beyond[package].version if package in beyond else None)
        for package, pin in pins(smaller).items()
        if package not in beyond or beyond[package].version != pin.version
    }
    # Development does not build wheels by hand: pip itself need not be pinned twice.
    differing.pop("pip", None)
    assert differing == {}


@pytest.mark.parametrize(
    ("name", "extras"), [("server", ["redis"]), ("dev", ["redis", "dev"]), ("rl", ["redis", "dev", "rl"])]
)
def test_pins_satisfy_the_ranges_of_the_package(name: str, extras: list[str]) -> None:
    ranges = [*PROJECT["project"]["dependencies"]]
    for extra in extras:
        ranges += PROJECT["project"]["optional-dependencies"][extra]
    pinned = pins(name)
    wrong = {}
    for requirement in map(Requirement, ranges):
        pin = pinned.get(canonicalize_name(requirement.name))
        if requirement.name != "torch" and (pin is None or not requirement.specifier.contains(pin.version)):
            wrong[str(requirement)] = pin
    assert wrong == {}, "run `make pins`"


def imported_distributions(package: str) -> dict[str, str]:
    """Third-party distributions that a package imports anywhere, functions included, and one file that does."""
    found: dict[str, str] = {}
    owners = importlib.metadata.packages_distributions()
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
    declared = [*PROJECT["project"]["dependencies"]]
    for extra in ("redis", "rl", "ray", "report") if package == "agents" else ("redis",):
        declared += PROJECT["project"]["optional-dependencies"][extra]
    names = {canonicalize_name(Requirement(entry).name) for entry in declared}
    undeclared = {name: path for name, path in imported_distributions(package).items() if name not in names}
    # Cython's own module comes with the build requirements, and compiled modules do without it; pydantic-core is a part
    # of pydantic, which fixes its version.
    for name in ("cython", "pydantic-core"):
        undeclared.pop(name, None)
    assert undeclared == {}


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


def test_the_manifest_states_the_version_of_the_package() -> None:
    manifest = yaml.safe_load((ROOT / "openenv.yaml").read_text(encoding="utf-8"))
    assert manifest["version"] == inferencegym.__version__


def test_openenv_finds_the_tree_valid(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    verdict = subprocess.run(
        [Path(sys.executable).with_name("openenv"), "validate", str(tree), "--level", "static"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (verdict.returncode, "Verdict: PASS" in verdict.stdout) == (0, True), verdict.stdout + verdict.stderr


@pytest.mark.slow
def test_openenv_passes_the_running_server_and_its_runtime_graders() -> None:
    report = subprocess.run(
        [sys.executable, ROOT / "scripts/openenv_check.py"], capture_output=True, text=True, check=False
    )
    assert report.returncode == 0, report.stdout + report.stderr
    played = {f"runtime.{name}" for name in ("startup", "observation_schema", "reward_well_formed", "state_contract")}
    assert set(re.findall(r"(?m)^  PASS  (runtime\.\w+)", report.stdout)) == played


def declared_modules() -> list[str]:
    """Modules with a type declaration file, which the build compiles."""
    declarations = [path for package in PACKAGES for path in (ROOT / package).rglob("*.pxd")]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in declarations)


@pytest.mark.parametrize("module", declared_modules())
def test_the_compiled_module_is_loaded_and_as_new_as_its_source(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    compiled = Path(spec.origin)
    assert compiled.suffix == ".so", f"{module} is not compiled: run `make build`"
    source = ROOT / Path(*module.split("."))
    newest = max(source.with_suffix(suffix).stat().st_mtime for suffix in (".py", ".pxd"))
    assert compiled.stat().st_mtime >= newest, f"{module} changed since it was compiled: run `make build`"


# --- A bare machine ---------------------------------------------------------------------------------------------------


def machine_check(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and words of the script that `make` asks before it installs anything."""
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


# --- Wheel ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as they are when the wheel is built."""
    return copy_of_the_tree(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel built from the source distribution, so that both are proved complete."""
    work = tmp_path_factory.mktemp("wheel")
    make_sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(work)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", make_sdist], cwd=tree, check=True, capture_output=True)
    (sdist,) = work.glob("*.tar.gz")
    pip_wheel = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(sdist)]
    subprocess.run([sys.executable, "-m", *pip_wheel], check=True, capture_output=True)
    (built,) = work.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.mark.slow
def test_the_wheel_holds_every_module_data_file_and_page(tree: Path, wheel: zipfile.ZipFile) -> None:
    sources = [path for package in PACKAGES for path in (tree / package).rglob("*") if path.is_file()]
    assert {path.relative_to(tree).as_posix() for path in sources} - set(wheel.namelist()) == set()


@pytest.mark.slow
def test_the_wheel_holds_a_compiled_file_for_every_declared_module(wheel: zipfile.ZipFile) -> None:
    compiled = {name.split(".")[0].replace("/", ".") for name in wheel.namelist() if name.endswith(".so")}
    assert compiled == set(declared_modules())


@pytest.mark.slow
def test_the_wheel_holds_nothing_but_the_packages_and_the_manifest(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()} - set(PACKAGES)
    assert top == {f"openenv_inferencegym-{inferencegym.__version__}.dist-info"}
    assert [name for name in wheel.namelist() if name.endswith(".c")] == []
    assert wheel.read("inferencegym/openenv.yaml") == (ROOT / "openenv.yaml").read_bytes()


@pytest.mark.slow
def test_the_wheel_states_name_version_licence_and_commands(wheel: zipfile.ZipFile) -> None:
    info = f"openenv_inferencegym-{inferencegym.__version__}.dist-info"
    metadata = email.parser.Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("openenv-inferencegym", inferencegym.__version__)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("MIT", ">=3.11")
    commands = wheel.read(f"{info}/entry_points.txt").decode()
    assert "inferencegym = inferencegym.cli.main:main" in commands
    assert "server = server.app:main" in commands


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
    """The Dockerfile's stages carried out in a folder instead of in containers."""

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
        *sources, target = next(
            step.rest for step in final if step.word == "COPY" and "--from" not in step.rest
        ).split()
        self.copy(sources, Path(self.path(target)))

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


def wait_for_health(url: str, process: subprocess.Popen[bytes], limit_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended before it answered"
        try:
            if httpx.get(f"{url}/health", timeout=1.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"no healthy answer from {url} within {limit_s} s")


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
    needed = "import pyarrow.parquet, scipy.interpolate, openenv.core, server.app"
    subprocess.run([installed / "bin/python", "-c", needed], cwd=image.root, check=True)
    names = {path.name for path in (installed / "lib/python3.11/site-packages").iterdir()}
    assert names & {"pip", "setuptools", "Cython", "torch", "pandas", "gradio", "openai"} == set()


@pytest.mark.parametrize("name", ["Dockerfile", "docker-compose.yml", "Makefile"])
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
    assert re.search(r"proxy_set_header Upgrade \$\$http_upgrade;", proxy), "WebSocket needs the upgrade header"
