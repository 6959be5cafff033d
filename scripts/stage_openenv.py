"""Copy the files for `openenv push` into a folder of their own, in the layout that OpenEnv expects.

    python -m scripts.stage_openenv DIRECTORY && openenv push DIRECTORY --repo-id NAME/inference_gym

`openenv push` expects a package at the root (`__init__.py`, `client.py`) beside the manifest, and uploads everything in
the folder. So the folder gets only the files that the image is built from, these two files, the oracle that the
manifest names, the validator's plan and `discovery.json`; no tests, benchmarks, virtual environments or build products.
It has a README of its own for the Space, because this repository's README describes a clone. `openenv catalog build`
finds the folder if it is at CATALOGUE_PATH of a repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.build_site import repository

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("agents", "cli", "docs", "env", "grader", "inferencegym", "live", "ops", "server", "simulator")
FIGURES = ("coverage", "fidelity", "learning", "page-desktop", "policy_fidelity", "task3_episode", "tasks_scores")
"""Pictures shown in the documents."""
FILES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "Dockerfile",
    "ENVIRONMENT.md",
    "LICENSE",
    "TASK_AUTHORING.md",
    *(f"benchmarks/figures/{name}.png" for name in FIGURES),
    "benchmarks/figures/race.gif",
    "openenv.yaml",
    "pyproject.toml",
    "requirements-build.txt",
    "requirements.txt",
    "scripts/openenv_oracle.py",
    "setup.py",
)
PLAN = ROOT / "scripts/openenv_plan.json"
CATALOGUE_PATH = "envs/inference_gym"
"""Path at which OpenEnv's catalogue expects an environment in a repository with several."""
TOOLS = "server/api/mcp.py"
"""Module that declares the tools for language models."""
DISCOVERY = {
    "tags": ["llm-inference", "reinforcement-learning", "systems-control"],
    "representative_queries": [
        "control the batch size, KV cache and precision of an LLM serving fleet under live traffic",
        "train an agent to autoscale LLM inference and keep time-to-first-token objectives",
    ],
    "license": "MIT",
    "license_source": f"{CATALOGUE_PATH}/LICENSE",
    "agent_tools": {
        "protocol": "mcp",
        "names": ["begin", "observe", "set_knobs", "run", "grade"],
        "source": f"{CATALOGUE_PATH}/{TOOLS}",
    },
}
"""Metadata that OpenEnv's catalogue reads beside the manifest."""
ABOUT = ROOT / "env/serving/about.md"
PICTURE = (
    "[![You race the built-in policies in the browser](benchmarks/figures/page-desktop.png)]"
    "(benchmarks/figures/race.gif)"
)
WRITTEN = {
    "discovery.json": json.dumps(DISCOVERY, indent=2) + "\n",
    "__init__.py": '"""InferenceGym as an OpenEnv package; the code is in the packages beside this file."""\n',
    "client.py": '"""OpenEnv\'s client of this environment; see inferencegym/client/__init__.py."""\n\n'
    "from inferencegym.client import (\n"
    "    InferenceGymAction,\n    InferenceGymEnv,\n    InferenceGymObservation,\n    InferenceGymState,\n"
    ")\n\n"
    '__all__ = ["InferenceGymAction", "InferenceGymEnv", "InferenceGymObservation", "InferenceGymState"]\n',
}


def stage(destination: Path) -> list[Path]:
    """Fill an empty or new directory; returns its files, relative to it. Raises FileExistsError if it is not empty."""
    if destination.exists() and any(destination.iterdir()):
        raise FileExistsError(f"{destination} is not empty: name a new directory")
    staged = [name for name in _tracked() if name in FILES or name.split("/")[0] in FOLDERS]
    for name in staged:
        _copy(ROOT / name, destination / name)
    written = {**WRITTEN, "README.md": space_readme()}
    for name, text in written.items():
        (destination / name).write_text(text, encoding="utf-8")
    _copy(PLAN, destination / "validation/runtime.json")
    return sorted(Path(name) for name in [*staged, *written, "validation/runtime.json"])


def space_readme() -> str:
    """README of the Space: the header of this repository's README, what the server offers, and a picture."""
    settings = (ROOT / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    # The documents are copied beside it, so their links become relative.
    text = ABOUT.read_text(encoding="utf-8").replace(f"({repository()}/blob/main/", "(")
    title, rest = text.split("\n\n", 1)
    return f"---\n{settings}---\n\n{title}\n\n{PICTURE}\n\n{rest}"


def _tracked() -> list[str]:
    """Files that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def main() -> int:
    """Copy the files and print their number and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="a new or empty directory")
    args = parser.parse_args()
    try:
        files = stage(args.directory)
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 2
    size_mb = sum((args.directory / name).stat().st_size for name in files) / 1e6
    print(f"{len(files)} files, {size_mb:.1f} MB in {args.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
