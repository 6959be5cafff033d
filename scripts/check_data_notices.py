"""Check that all data files name their source and licence: ``python scripts/check_data_notices.py``.

Every file of a data folder must be listed in a table row of the README.md beside it (or of the nearest one above it, by
its path from there), and that row must name a licence. Third-party files must have the checksum that ``SHA256SUMS``
states, and a licence that requires its text must have it in ``licenses/``. Prints what is missing and exits with 1 if
anything is.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("simulator/data", "server/web/data", "server/web/charts", "benchmarks/fidelity/data")
# Third-party files, kept as they were published or measured.
OF_OTHERS = ("simulator/data/measured", "server/web/charts", "benchmarks/fidelity/data")
# Name of each licence in a notice, and the beginning of the file name of its text if that must be distributed.
LICENCES = {"MIT": "MIT", "Apache-2.0": "Apache-2.0", "BSD-3-Clause": "BSD-3-Clause", "CC-BY-4.0": None}
NO_LICENCE = "the source states none: only aggregate statistics are here"
ABOUT_DATA = ("README.md", "SHA256SUMS")


def data_files() -> list[Path]:
    """Data files that git tracks, except the notices themselves."""
    command = ["git", "ls-files", "-z", "--", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    paths = [ROOT / name for name in listed if name and (ROOT / name).exists()]
    return [path for path in paths if path.name not in ABOUT_DATA and path.parent.name != "licenses"]


def notice_of(path: Path) -> str | None:
    """The table row that names a file, from the nearest README.md; None if there is none."""
    for folder in path.parents:
        readme = folder / "README.md"
        if folder == ROOT:
            return None
        if readme.exists():
            name = f"`{path.relative_to(folder).as_posix()}`"
            rows = [line for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
            return next((row for row in rows if name in row.split("|")[1]), None)
    return None


def licences_of(path: Path) -> list[str]:
    """Licences that a file's notice names."""
    row = notice_of(path) or ""
    return [name for name in LICENCES if re.search(rf"\b{re.escape(name)}\b", row)]


def unlicensed() -> list[str]:
    """Files without a notice, or with a notice that names no licence."""
    found = []
    for path in data_files():
        row = notice_of(path)
        if row is None:
            found.append(f"{path.relative_to(ROOT)}: no README.md beside or above it has a row for it")
        elif not licences_of(path) and NO_LICENCE not in row:
            found.append(f"{path.relative_to(ROOT)}: its row names no licence of {', '.join(LICENCES)}")
    return found


def changed(folder: str) -> list[str]:
    """Files whose content or name differs from the folder's ``SHA256SUMS``."""
    lines = (ROOT / folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    stated = dict(reversed(line.split()) for line in lines)
    present = {path.name: path for path in data_files() if path.parent == ROOT / folder}
    found = [f"{folder}/{name}: listed in SHA256SUMS, but missing" for name in sorted(stated.keys() - present.keys())]
    for name, path in sorted(present.items()):
        if hashlib.sha256(path.read_bytes()).hexdigest() != stated.get(name):
            found.append(f"{folder}/{name}: not the file that SHA256SUMS states")
    return found


def missing_texts(folder: str) -> list[str]:
    """Licences of a folder's files whose text is missing from its ``licenses/``."""
    texts = [path.name for path in (ROOT / folder / "licenses").iterdir()]
    needed = {LICENCES[name] for path in data_files() if path.parent == ROOT / folder for name in licences_of(path)}
    return [
        f"{folder}/licenses: no text of {name}"
        for name in sorted(filter(None, needed))
        if not any(text.startswith(name) for text in texts)
    ]


def problems() -> list[str]:
    """All problems found."""
    return [*unlicensed(), *(text for folder in OF_OTHERS for text in (*changed(folder), *missing_texts(folder)))]


if __name__ == "__main__":
    found = problems()
    print("\n".join(found) or f"{len(data_files())} data files have a licence")
    sys.exit(1 if found else 0)
