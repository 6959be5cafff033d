"""Catalogue of the lookup tables that ship, by name, and of the systems and models that more can be built for.

``data/tables/index.json`` describes each table (``python -m scripts.build_catalogue`` writes it), so that nothing of a
table need be read before it is played. ``data/hardware.json`` lists what aiconfigurator-core's data can be asked for.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import InvalidConfigError, short_repr
from inferencegym.tasks import DATA_DIR

INDEX_FILE: Final = DATA_DIR / "tables" / "index.json"
HARDWARE_FILE: Final = DATA_DIR / "hardware.json"


@cache
def hardware_data() -> dict[str, Any]:
    """Systems, models, precisions and shipped deployments as the data file states them."""
    loaded: dict[str, Any] = json.loads(HARDWARE_FILE.read_text(encoding="utf-8"))
    return loaded


@cache
def table_index() -> dict[str, dict[str, Any]]:
    """Description of each table that ships, by name; the first is the default."""
    loaded: dict[str, dict[str, Any]] = json.loads(INDEX_FILE.read_text(encoding="utf-8"))
    return loaded


def table_name(sha256: str) -> str | None:
    """Name of the table with this checksum where it is not the default one; None for any other."""
    names = list(table_index())
    return next((name for name in names[1:] if table_index()[name]["sha256"] == sha256), None)


def table_path(name: str) -> Path:
    """File of the table of this name; raises :class:`InvalidConfigError` with the names that there are."""
    if name not in table_index():
        raise InvalidConfigError(
            f"hardware={short_repr(name)} is not in the catalogue: choose one of {', '.join(table_index())}; others "
            "are built with `inferencegym build-table`",
            "hardware",
        )
    return DATA_DIR / str(table_index()[name]["file"])


SHIPPED_CARDS: Final = tuple(name for name, entry in table_index().items() if entry["saturated"])
"""Tables of one card per replica from the measured files, with the columns of a saturated engine."""
