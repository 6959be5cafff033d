"""What this installation consists of: where the rooms lie, which extras are there, which modules are compiled."""

from __future__ import annotations

import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "openenv-inferencegym"
ROOMS: Final = ("simulator", "env", "grader", "agents", "live", "server")


def room_folder(room: str) -> Path:
    """Folder of a room: inside this package in an installed wheel, beside it in a clone."""
    package = Path(__file__).resolve().parent
    inside = package / room
    return inside if inside.is_dir() else package.parent / room


def install_extra(extra: str) -> str:
    """How to install an extra, as a half sentence for error messages: the package lies in no registry yet."""
    return f"install the extra '{extra}', in a clone: pip install -e '.[{extra}]'"


def install_hint(error: ModuleNotFoundError) -> str | None:
    """What is missing and which extra brings it, in one line; None for a module of no extra.

    Reads the metadata of the installed distribution, so it knows nothing where the sources merely lie on the path.
    """
    from importlib.metadata import PackageNotFoundError, requires

    missing = (error.name or "").partition(".")[0]
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    for requirement in requirements:
        found = re.match(r"""([\w.-]+).*\bextra == ["']([\w-]+)["']""", requirement)
        if found and re.sub(r"[-.]", "_", found[1]).lower() == missing.lower():
            return f"{missing} is not installed; {install_extra(found[2])}"
    return None


def interpreted_modules() -> list[str]:
    """Modules that the build would have compiled and that run as plain Python: all of them, or none."""
    folders = [Path(__file__).resolve().parent, *map(room_folder, ROOMS)]
    declarations = {declaration for folder in folders for declaration in folder.rglob("*.pxd")}
    return sorted(
        declaration.stem
        for declaration in declarations
        if not any(declaration.with_name(declaration.stem + suffix).is_file() for suffix in EXTENSION_SUFFIXES)
    )
