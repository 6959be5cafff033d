"""From nothing to a first result: what each kind of user types in a fresh clone, and how long it takes.

    python benchmarks/first_results.py                    everyone, some minutes each; writes results/first_results.md
    python benchmarks/first_results.py --only operator    one of them, repeatable; the others keep their rows

Every user gets a clone of the last commit in a folder of its own, with no environment and no cache of packages. What is
measured is this machine with its way to a package index; which step takes the time is much the same elsewhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "first_results.md"
HEAD: Final = "| user | types | seconds | then sees |\n|---|---|---|---|"
HEALTHY_WITHIN_S: Final = 900.0
ADDRESS: Final = "http://localhost:7860"
"""What users type; here the server listens on a free port."""


@dataclass(frozen=True)
class User:
    """A kind of user: commands that install, whether a server runs beside them, and those that give a result."""

    name: str
    install: tuple[str, ...]
    result: tuple[str, ...]
    serves: bool = False


EPISODE: Final = """\
.venv/bin/python - <<'END'
import gymnasium, inferencegym.gym
envs = gymnasium.make_vec("InferenceGym/AdversarialMultiTenant-v1", num_envs=64, action="discrete")
envs.reset(seed=0)
for _ in range(200):
    info = envs.step(envs.action_space.sample())[-1]
print("mean score of 64 random episodes:", info["score"].mean().round(3))
END"""
OPENENV: Final = """\
.venv/bin/python - <<'END'
from inferencegym.client import InferenceGymAction, InferenceGymEnv
with InferenceGymEnv(base_url="http://localhost:7860").sync() as env:
    result = env.reset(task_id=1, seed=7)
    while not result.done:
        result = env.step(InferenceGymAction(batch_size=256, kv_budget=0.8))
    print("score:", round(result.observation.metadata["score"], 3))
END"""
USERS: Final = (
    User(
        "RL researcher",
        ("python3.11 -m venv .venv && .venv/bin/pip install -q -e '.[sim]'",),
        (EPISODE, ".venv/bin/inferencegym evaluate --task 3 --agent heuristic --seeds 30"),
    ),
    User(
        "OpenEnv user",
        (".venv/bin/pip install -q -e '.[openenv]'",),
        (OPENENV, ".venv/bin/openenv validate --url http://localhost:7860 | tail -1"),
        serves=True,
    ),
    User(
        "reader of the notebook",
        # What Colab has already.
        ("make rl", ".venv/bin/pip install -q nbconvert ipykernel"),
        (
            "INFERENCEGYM_DEMO_REPOSITORY=$PWD .venv/bin/jupyter nbconvert --to markdown --execute --stdout "
            "notebooks/InferenceGym_Demo.ipynb | grep 'steps in'",
        ),
    ),
    User(
        "trainer of language models",
        (".venv/bin/pip install -q -e '.[trl]'",),
        (".venv/bin/python -m agents.integrations.trl_grpo --url http://localhost:7860 | grep reward | tail -1",),
        serves=True,
    ),
    User(
        "operator",
        ("python3.11 -m venv .venv && .venv/bin/pip install -q -e '.[sim,tools]'",),
        (
            ".venv/bin/inferencegym plan --trace server/web/data/azure-conversation.csv "
            "--model llama-3.1-8b --objective ttft_p99=500 | grep a100-40gb | head -1",
        ),
    ),
    User("contributor", ("make dev",), (".venv/bin/python -m pytest -q tests/test_env.py | tail -1", "make lint")),
)


def main() -> int:
    """Measure the users asked for. Raises RuntimeError if a command of theirs fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [user.name for user in USERS]
    parser.add_argument("--only", action="append", choices=names, help="this user, repeatable (default: all)")
    wanted = parser.parse_args().only or names
    known = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = {name: line for name in names for line in known if line.startswith(f"| {name} |")}
    for user in USERS:
        if user.name in wanted:
            rows[user.name] = row(user)
            print(rows[user.name], flush=True)
    lines = [HEAD, *(rows[name] for name in names if name in rows)]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def row(user: User) -> str:
    """One row of the table: the commands with their seconds, and the last line that the last one prints."""
    with tempfile.TemporaryDirectory(prefix="first-result-") as folder:
        clone = Path(folder) / "inferencegym"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        timed: dict[str, float] = {}
        said = ""
        with ExitStack() as running:
            if user.serves:
                started = time.monotonic()
                server = running.enter_context(typed(f"make serve PORT={port} > server.log", clone, port))
                wait_until_healthy(server, port)
                timed["make serve"] = time.monotonic() - started
            for command in (*user.install, *user.result):
                started = time.monotonic()
                with typed(command, clone, port) as shell:
                    printed, _ = shell.communicate()
                if shell.returncode:
                    raise RuntimeError(f"{user.name}: {command} ended with {shell.returncode}; see above")
                timed[command] = time.monotonic() - started
                said = next((line for line in reversed(printed.splitlines()) if line.strip()), said)
    commands = "<br>".join(f"`{first_line(command)}` {seconds:.0f} s" for command, seconds in timed.items())
    shown = " ".join(said.split()).replace("|", "\\|")
    return f"| {user.name} | {commands} | {sum(timed.values()):.0f} | {shown} |"


@contextmanager
def typed(command: str, clone: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Context with a shell that runs a command in a clone; at its end all that the command started is stopped."""
    own = Path(sys.executable).parent
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {
        **{name: value for name, value in kept.items() if not name.startswith("INFERENCEGYM_")},
        "PATH": ":".join(each for each in kept["PATH"].split(":") if Path(each) != own),
        "HOME": str(clone.parent),  # no settings and no caches of whoever measures
        "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CACHE": "1",
        "INFERENCEGYM_PORT": str(port),
    }
    here = command.replace(ADDRESS, f"http://localhost:{port}")
    shell = subprocess.Popen(
        ["bash", "-c", here], cwd=clone, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    try:
        yield shell
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
        shell.wait()


def first_line(command: str) -> str:
    """A command as the table shows it: a program that it is given is named, and stands in the documents."""
    line = command.replace(".venv/bin/", "").partition("\n")[0]
    return line.replace("python - <<'END'", "python episode.py").partition(" | ")[0]


def wait_until_healthy(server: subprocess.Popen[str], port: int) -> None:
    """Return when the server answers. Raises RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + HEALTHY_WITHIN_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"make serve: not healthy (status {server.poll()})")


if __name__ == "__main__":
    sys.exit(main())
