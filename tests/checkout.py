"""Files of this checkout, for tests of packages and images that are built from them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("agents", "cli", "env", "grader", "live", "ops", "server", "simulator")
PACKAGES = (*ROOMS, "inferencegym")


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
    """Copy the files that a fresh clone with the current changes would have."""
    for source in tracked_files():
        target = destination / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    return destination


def declared_modules() -> list[str]:
    """Modules with a type declaration file, which the build compiles."""
    declarations = [path for package in PACKAGES for path in (ROOT / package).rglob("*.pxd")]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in declarations)


@dataclass(frozen=True)
class Pin:
    """One entry of a pin file."""

    version: str
    marker: str
    hashes: int


def pin_file(name: str) -> Path:
    return ROOT / ("requirements.txt" if name == "server" else f"requirements-{name}.txt")


def pins(name: str) -> dict[str, Pin]:
    """Entries of a requirement file by normalised name."""
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", pin_file(name).read_text(encoding="utf-8"))
    found: dict[str, Pin] = {}
    for entry in entries[1:]:
        match = re.match(r"([A-Za-z0-9._-]+)==([^ ;\\\n]+)(?: ; ([^\\\n]+))?", entry)
        assert match, (
            f"{pin_file(name).name}: every line pins one version, but this one does not: {entry.splitlines()[0]}"
        )
        found[canonicalize_name(match[1])] = Pin(match[2], (match[3] or "").strip(), entry.count("--hash=sha256:"))
    return found
