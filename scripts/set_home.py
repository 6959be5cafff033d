"""Set the repository's public address everywhere: ``python -m scripts.set_home https://github.com/OWNER/NAME``.

The address is defined in ``pyproject.toml`` (``project.urls``). The citation file, the README's badge and the notebook
repeat it, because they are read without running code.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
ADDRESS: Final = re.compile(r"https://github\.com/([A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9][A-Za-z0-9._-]*?)(?:\.git)?/?")


def home(root: Path = ROOT) -> str:
    """The repository's public address, from ``pyproject.toml``."""
    with (root / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["urls"]["Repository"])


def set_home(address: str, root: Path = ROOT) -> list[str]:
    """Replace the address in all tracked files; returns the changed ones. Raises ValueError for a bad address."""
    wanted = ADDRESS.fullmatch(address)
    if wanted is None:
        raise ValueError(
            f"{address!r} is not allowed: https://github.com/OWNER/NAME (Colab opens notebooks from there)"
        )
    before = home(root).removeprefix("https://github.com/")
    # Matches after github.com and after colab.research.google.com/github, but not a longer repository name.
    repeated = re.compile(rf"(github(?:\.com)?/){re.escape(before)}(?![A-Za-z0-9_-]|\.[A-Za-z0-9])")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    changed = []
    for name in filter(None, listed.split("\0")):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        new = repeated.sub(lambda found: found[1] + wanted[1], text)
        if new != text:
            (root / name).write_text(new, encoding="utf-8")
            changed.append(name)
    return changed


def main() -> int:
    """Set the given address, and print the files that changed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.set_home", description="Set the public address.")
    parser.add_argument("address", help=f"https://github.com/OWNER/NAME (now {home()})")
    try:
        print("\n".join(set_home(parser.parse_args().address)) or "nothing to change")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
