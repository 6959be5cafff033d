"""Run OpenEnv's own validator on the directory, on the runtime graders and on a running server.

    .venv/bin/python -m scripts.openenv_check

The runtime graders normally build an image and start it with Docker. Here the server is a plain process, so they also
run without Docker; the two checks that need isolation are reported as skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv.validation import Level, run_validation
from openenv.validation.types import ProviderCapability

from benchmarks.report import ROOT
from benchmarks.speed.load import own_server

BIN = Path(sys.executable).parent

# What the runtime graders play. The manifest of the repository has no `execution` block: with one, a plain
# `openenv validate` fails on every machine without Docker.
EXECUTION = """
  execution:
    kind: openenv_ws
    probe_path: validation/runtime.json
    dockerfile: Dockerfile
    context: "."
    agent_boundary: api
"""
PLAN = ROOT / "scripts/openenv_plan.json"


def main() -> int:
    """Run all checks and print their verdicts; returns 0 if none failed."""
    with tempfile.TemporaryDirectory(prefix="openenv-check-") as folder:
        tree = copy_of_the_tree(Path(folder) / "tree")
        directory = openenv("validate", str(tree), "--level", "static")
        with own_server() as (address, _):
            url = openenv("validate", "--url", address)
        runtime = runtime_graders(tree, Path(folder) / "artifacts")
    return max(directory, url, runtime)


def openenv(*arguments: str) -> int:
    """Run OpenEnv's command line, which prints its report."""
    return subprocess.run([BIN / "openenv", *arguments], check=False).returncode


def runtime_graders(tree: Path, artifacts: Path) -> int:
    """Play the probe with OpenEnv's graders; returns 1 if a grader fails or cannot run."""
    manifest = tree / "openenv.yaml"
    manifest.write_text(manifest.read_text(encoding="utf-8").rstrip() + EXECUTION, encoding="utf-8")
    (tree / "validation").mkdir()
    shutil.copy2(PLAN, tree / "validation/runtime.json")
    report = run_validation(tree, max_level=Level.RUNTIME, provider=ProcessProvider(), artifacts_dir=artifacts)
    print("Runtime graders, on a plain process")
    for check in report.results:
        print(f"  {check.status.value.upper():5} {check.check_id} {'; '.join(check.evidence)}")
    print(f"Verdict: {report.verdict.value.upper()}")
    return int(report.verdict.value == "fail")


def copy_of_the_tree(destination: Path) -> Path:
    """Copy the files that git tracks: the validator refuses the symbolic links of a virtual environment."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name)
    return destination


@dataclass(frozen=True)
class RunningServer:
    """A server process with the interface of a container of the validator's providers."""

    opened: ExitStack
    base_url: str
    pid: int

    def inspect(self) -> dict[str, Any]:
        """Description of the container for the report."""
        return {"pid": self.pid}

    def logs(self, max_bytes: int = 65536) -> str:
        """No logs: the server's own file is not read."""
        return ""

    def stop(self) -> None:
        """Stop the server, once it has finished running requests."""
        self.opened.close()


class ProcessProvider:
    """Starts the server as a process where OpenEnv's own provider would start a container."""

    name = "local process, no isolation"
    capabilities = frozenset({ProviderCapability.IMAGE_BUILD})
    supported_network_modes = frozenset({"public", "no-network"})

    def build(self, root: Path, execution: object) -> str:
        """Placeholder for an image digest in the form that the validator expects; nothing is built."""
        return "sha256:" + "0" * 64

    def start(self, spec: object) -> RunningServer:
        """Start a server on a free port and wait until it is healthy."""
        opened = ExitStack()
        return RunningServer(opened, *opened.enter_context(own_server()))


if __name__ == "__main__":
    sys.exit(main())
