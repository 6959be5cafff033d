"""Golden interface, the recorded OpenAPI documents for regression tests: ``python -m scripts.golden_interface``.

``tests/golden/interface.json`` keeps what HTTP clients rely on: paths, fields, types, bounds and defaults, without
descriptions and examples. ``tests/server/test_interface.py`` compares them with the server. Without ``--write`` the
command prints the differences; with it the file is rewritten, for an intended change that CHANGELOG.md mentions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from starlette.testclient import TestClient

from server.api.openapi import inlined_paths
from server.app import create_app
from server.settings import Settings

INTERFACE_FILE: Final = Path(__file__).resolve().parent.parent / "tests" / "golden" / "interface.json"
DOCUMENTS: Final = ("/openapi.json", "/traffic/openapi.json")
WORDS: Final = frozenset({"description", "summary", "title", "example", "examples"})
"""Keys of an OpenAPI document that have no meaning for a program."""


def current() -> dict[str, Any]:
    """Paths of the OpenAPI documents of a server with its default settings, by document."""
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        return {
            document: _without_words(inlined_paths(client.get(document).json()), names=True) for document in DOCUMENTS
        }


def _without_words(schema: Any, names: bool = False) -> Any:
    """A part of an OpenAPI document without :data:`WORDS`; keys of ``properties`` are field names and are kept."""
    if isinstance(schema, list):
        return [_without_words(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_words(value, names=key == "properties" and not names)
        for key, value in schema.items()
        if names or key not in WORDS
    }


def recorded() -> dict[str, Any]:
    """The recorded interface."""
    interface: dict[str, Any] = json.loads(INTERFACE_FILE.read_text(encoding="utf-8"))
    return interface


def differences(expected: Any, got: Any, where: str = "") -> Iterator[str]:
    """Differences of two JSON values, as text: path, recorded value and current value."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted(expected.keys() | got.keys()):
            at = f"{where} > {key}" if where else str(key)
            if key not in got:
                yield f"{at}: is gone"
            elif key not in expected:
                yield f"{at}: is new"
            else:
                yield from differences(expected[key], got[key], at)
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for index, (one, other) in enumerate(zip(expected, got, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif expected != got or type(expected) is not type(got):
        yield f"{where}: recorded {json.dumps(expected)}, now {json.dumps(got)}"


def _text(interface: dict[str, Any]) -> str:
    """The file's text, one line per path."""
    documents = []
    for document, paths in interface.items():
        lines = [f"{json.dumps(path)}: {json.dumps(item, sort_keys=True)}" for path, item in sorted(paths.items())]
        documents.append(f"{json.dumps(document)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(documents) + "\n}\n"


def main() -> int:
    """Compare with the recorded file, or write it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file anew")
    if parser.parse_args().write:
        INTERFACE_FILE.write_text(_text(current()), encoding="utf-8")
        return 0
    found = list(differences(recorded(), current()))
    print("\n".join(found) or "the interface is the recorded one")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
