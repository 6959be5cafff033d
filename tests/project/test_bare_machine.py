"""`make test` on a machine without the programs that tests start: it installs them if allowed, else skips tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.programs import REFUSE_SKIPS

TESTS = """
import pytest
from tests.programs import program

@pytest.mark.parametrize("name", ["python", "redis-server"])
def test_that_starts(name):
    assert program(name)
"""


class Machine:
    """A machine with a nearly empty PATH, to which a test adds programs."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.log = directory / "apt.log"
        for name in ("bash", "env", "sh", "true"):
            (self.bin / name).symlink_to(str(shutil.which(name)))

    def has(self, name: str, script: str = "") -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def has_apt(self, *, installs: bool = True) -> None:
        made = "".join(f"printf '#!/bin/sh\\n' > {self.bin / n}; /bin/chmod +x {self.bin / n}; " for n in PROGRAMS)
        result = made if installs else "exit 100"
        self.has("apt-get", f'echo "$@" >> {self.log}\ncase "$1" in install) {result} ;; esac')

    def install(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / "bash"), str(ROOT / "scripts/install_test_servers.sh"), *arguments]
        told = {"PATH": str(self.bin), **environment}
        return subprocess.run(command, env=told, capture_output=True, text=True, check=False)

    def asked_of_apt(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""


PROGRAMS = ("redis-server", "chromium", "systemd-analyze")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("uid", [0, 1000])
def test_what_tests_start_is_installed_as_root_or_with_a_sudo_that_asks_nothing(machine: Machine, uid: int) -> None:
    machine.has_apt()
    machine.has("id", f"echo {uid}")
    machine.has("sudo", '[ "$1" = -n ] || exit 9\nshift\nexec "$@"')
    done = machine.install()
    assert (done.returncode, done.stderr) == (0, "")
    assert "redis-server chromium" in done.stdout
    assert "install -y" in machine.asked_of_apt()
    assert machine.install().stdout == ""


def test_without_the_right_to_install_the_missing_programs_are_named_and_make_goes_on(machine: Machine) -> None:
    machine.has_apt()
    machine.has("id", "echo 1000")
    machine.has("sudo", "exit 1")
    machine.has("redis-server")
    done = machine.install()
    assert done.returncode == 0
    assert "skipped: chromium" in done.stderr
    assert "redis-server" not in done.stderr
    assert machine.asked_of_apt() == ""


@pytest.mark.parametrize("installs", [None, False])
def test_continuous_integration_ends_where_a_program_cannot_be_had(machine: Machine, installs: bool | None) -> None:
    machine.has("id", "echo 0")
    if installs is not None:
        machine.has_apt(installs=installs)
    assert machine.install().returncode == 0
    assert machine.install(**{REFUSE_SKIPS: "1"}).returncode == 1


def test_a_check_installs_nothing(machine: Machine) -> None:
    machine.has_apt()
    machine.has("id", "echo 0")
    done = machine.install("--check")
    assert done.returncode == 0
    assert "redis-server chromium" in done.stderr
    assert machine.asked_of_apt() == ""


def run_tests(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two tests on a machine that has Python and no Redis."""
    test = directory / "test_small.py"
    test.write_text(TESTS, encoding="utf-8")
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    told = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={directory}", *arguments, str(test)]
    return subprocess.run(command, cwd=directory, env=told, capture_output=True, text=True, check=False)


def test_tests_without_their_program_are_skipped_and_named_at_the_end(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "-n", "1")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert "[redis-server]: redis-server is not installed" in done.stdout.split("1 not run")[1]


def test_continuous_integration_refuses_a_skipped_test(tmp_path: Path) -> None:
    done = run_tests(tmp_path, **{REFUSE_SKIPS: "1"})
    assert done.returncode == 1
    assert f"{REFUSE_SKIPS}=1 refuses that" in done.stdout
    assert run_tests(tmp_path, "-k", "python", **{REFUSE_SKIPS: "1"}).returncode == 0
