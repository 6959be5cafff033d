"""Each integration for language models, installed into a bare environment, plays the same episode.

    python -m benchmarks.learning.integrations --url http://localhost:7860     writes results/integrations.json and .md
    ... --only by_trl                                                          replaces one row

The wheel is built once. For each integration, uv makes an environment, installs what its document names, with the wheel
in place of a clone, and plays `integration_plays.py` against the server. The command fails unless all rewards are the
same number. Packages are downloaded, and torch with them: of CUDA, or of the build that --torch names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from agents.integrations.llm import HISTORY
from benchmarks.learning import integration_plays
from benchmarks.learning.integration_plays import (
    TURNS,
    Played,
    by_harness,
    by_inspect,
    by_llm,
    by_mcp,
    by_nemo_gym,
    by_skyrl,
    by_trl,
    by_verifiers,
)  # fmt: skip
from benchmarks.report import ROOT, store, stored
from inferencegym.client.http import DEFAULT_URL
from scripts.episode_tokens import prompt_tokens

FOLDER: Final = ROOT / "agents" / "integrations"


class Integration(NamedTuple):
    """What is installed for an integration; ``{wheel}`` and ``{torch}`` are filled in."""

    play: Callable[[str], Played]
    packages: Sequence[str]
    framework: str
    python: str = "3.11"
    history: int = TURNS
    clone: bool = False
    """True if its document has the clone on the path, and no wheel."""


INTEGRATIONS: Final = {
    "`inferencegym llm`": Integration(by_llm, ["{wheel}"], "openenv-inferencegym", history=HISTORY),
    "MCP, FastMCP's client": Integration(by_mcp, ["fastmcp"], "fastmcp"),
    "OpenEnv's harness": Integration(by_harness, ["{wheel}[openenv]"], "openenv"),
    "TRL, GRPOTrainer": Integration(by_trl, ["{torch}", "{wheel}[trl]"], "trl"),
    "verifiers, vf-eval": Integration(by_verifiers, ["{wheel}[verifiers]", str(FOLDER / "verifiers")], "verifiers"),
    "Inspect, eval": Integration(by_inspect, ["{wheel}", "inspect-ai", "openai"], "inspect-ai"),
    "SkyRL, skyrl_gym.make": Integration(by_skyrl, ["{wheel}[skyrl]"], "skyrl-gym"),
    "NeMo Gym, its server class": Integration(
        by_nemo_gym, ["-r", str(FOLDER / "nemo_gym" / "requirements.txt")], "nemo-gym", "3.12", clone=True
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default %(default)s)")
    parser.add_argument("--wheel", type=Path, help="a wheel of this clone (default: build one)")
    parser.add_argument("--torch", default="torch>=2.6", help="its build, as for `make rl` (default %(default)s)")
    plays = [one.play.__name__ for one in INTEGRATIONS.values()]
    parser.add_argument("--only", nargs="+", choices=plays, help="measure these again, and keep the others' results")
    options = parser.parse_args(arguments)
    rows = stored("integrations") if options.only else {}
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel or built(Path(folder))
        for name, integration in INTEGRATIONS.items():
            if integration.play.__name__ not in (options.only or plays):
                continue
            packages = [part.format(wheel=wheel.resolve(), torch=options.torch) for part in integration.packages]
            rows[name] = measured(integration, packages, options.url, Path(folder) / integration.play.__name__)
            rewards = {row["reward"] for row in rows.values() if row["works"]}
            if len(rewards) > 1:
                raise SystemExit(f"{name} was paid {rows[name]['reward']}, others {rewards}: each pays the score")
            store("integrations", rows, markdown(rows))
    print(markdown(rows))


def built(folder: Path) -> Path:
    """A wheel of this clone."""
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


def measured(integration: Integration, packages: Sequence[str], url: str, folder: Path) -> dict[str, Any]:
    """Install and play; one that cannot be installed has the reason instead of numbers."""
    python = folder / "bin" / "python"
    started = time.monotonic()
    install = ["pip", "install", "--python", str(python), *packages]
    for command in (["venv", "--python", integration.python, str(folder)], install):
        done = subprocess.run(["uv", "--quiet", *command], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return {"works": False, "reason": " ".join(done.stderr.split())[:300]}
    install_s = time.monotonic() - started
    (packages_folder,) = folder.glob("lib/*/site-packages")
    size_b = sum(path.stat().st_size for path in packages_folder.rglob("*") if path.is_file())
    version = f"from importlib.metadata import version; print(version({integration.framework!r}))"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if integration.clone:
        environment["PYTHONPATH"] = str(ROOT)
    started = time.monotonic()
    told = output([python, integration_plays.__file__, integration.play.__name__, url], folder, environment)
    play_s = time.monotonic() - started
    played = json.loads(told.splitlines()[-1])
    return {
        "works": True,
        "version": output([python, "-c", version], folder, environment).strip(),
        "python": integration.python,
        "install_s": round(install_s, 1),
        "site_packages_mb": round(size_b / 1e6),
        "play_s": round(play_s, 1),
        "answers": len(played["texts"]),
        "prompt_tokens": prompt_tokens(played["texts"], integration.history),
        "reward": played["reward"],
    }


def output(command: Iterable[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    """What a command prints; its errors go to ours."""
    return subprocess.run([*command], cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The document's part."""
    lines = [
        "<!-- written by benchmarks/learning/integrations.py; do not edit -->",
        "",
        "| integration | works | install (s) | site-packages (MB) | play (s) | answers | prompt tokens | reward |",
        "|" + "---|" * 8,
    ]
    for name in filter(rows.__contains__, INTEGRATIONS):
        row = rows[name]
        if not row["works"]:
            lines.append(f"| {name} | not installable: {row['reason']} |" + " |" * 6)
            continue
        lines.append(
            f"| {name} {row['version']} | yes | {row['install_s']:.0f} | {row['site_packages_mb']:,} "
            f"| {row['play_s']:.0f} | {row['answers']} | {row['prompt_tokens']:,} | {row['reward']:.6f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
