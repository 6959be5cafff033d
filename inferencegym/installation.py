"""State of this installation: folders of the rooms, missing extras, compiled modules."""

from __future__ import annotations

import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "openenv-inferencegym"
INTERPRETED: Final = (
    "inferencegym: running as plain Python: same results as compiled, tens of times slower. "
    "Install a C compiler and Python's header files, then this package again (in a clone: make build)."
)
"""Warning where :func:`interpreted_modules` has any."""
ROOMS: Final = ("simulator", "env", "grader", "agents", "ops", "live", "server", "cli")


def room_folder(room: str) -> Path:
    """Folder of a room: inside this package in an installed wheel, beside it in a clone."""
    package = Path(__file__).resolve().parent
    inside = package / room
    return inside if inside.is_dir() else package.parent / room


def install_extra(extra: str) -> str:
    """How to install an extra, as part of an error message: the package is not in a registry yet."""
    return f"install the extra '{extra}', in a clone: pip install -e '.[{extra}]'"


def install_hint(error: ModuleNotFoundError) -> str | None:
    """One line that names a missing package and its extra; None if no extra has the module.

    Reads the metadata of the installed distribution, so it returns None if the sources are only on the path.
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
    """Modules that run as plain Python because the build did not compile them: all of them, or none."""
    folders = [Path(__file__).resolve().parent, *map(room_folder, ROOMS)]
    declarations = {declaration for folder in folders for declaration in folder.rglob("*.pxd")}
    return sorted(
        declaration.stem
        for declaration in declarations
        if not any(declaration.with_name(declaration.stem + suffix).is_file() for suffix in EXTENSION_SUFFIXES)
    )
