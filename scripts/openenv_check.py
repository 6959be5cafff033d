"""Run OpenEnv's own validator on the directory, on the runtime graders and on a running server.

    .venv/bin/python scripts/openenv_check.py

The runtime graders normally build an image and start it with Docker. Here the server is a plain process, so they also
run without Docker; the two checks that need isolation are reported as skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv.validation import Level, run_validation
from openenv.validation.types import ProviderCapability

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
HEALTHY_WITHIN_S = 20.0

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
        with served() as running:
            url = openenv("validate", "--url", running.base_url)
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

    process: subprocess.Popen[bytes]
    base_url: str

    def inspect(self) -> dict[str, Any]:
        """Description of the container for the report."""
        return {"pid": self.process.pid}

    def logs(self, max_bytes: int = 65536) -> str:
        """No logs: the server writes to this process's own output."""
        return ""

    def stop(self) -> None:
        """Stop the server; it has ten seconds to finish running requests."""
        self.process.terminate()
        self.process.wait(10)


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
        return start_server()


@contextmanager
def served() -> Iterator[RunningServer]:
    """Context manager with a running server, which is stopped at the end."""
    running = start_server()
    try:
        yield running
    finally:
        running.stop()


def start_server() -> RunningServer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "INFERENCEGYM_PORT": str(port),
        "INFERENCEGYM_HOST": "127.0.0.1",
        "INFERENCEGYM_STORE_URL": "memory://",
    }
    process = subprocess.Popen([sys.executable, "-m", "server.app"], cwd=ROOT, env=environment)
    running = RunningServer(process, f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + HEALTHY_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{running.base_url}/health", timeout=1) as answer:
                if answer.status == 200:
                    return running
        except OSError:
            time.sleep(0.1)
    ended = process.poll()
    process.kill()
    why = f"it ended with status {ended}" if ended is not None else f"no answer within {HEALTHY_WITHIN_S} s"
    raise RuntimeError(f"the server did not become healthy: {why}; its own messages are above")


if __name__ == "__main__":
    sys.exit(main())
