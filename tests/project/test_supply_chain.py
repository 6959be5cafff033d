"""The server's dependencies, and their known vulnerabilities."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import inferencegym

ROOT = Path(__file__).resolve().parents[2]


def verdict_function() -> Callable[[Mapping[str, Any] | None], tuple[int, str]]:
    spec = importlib.util.spec_from_file_location("audit_dependencies", ROOT / "scripts" / "audit_dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[Mapping[str, Any] | None], tuple[int, str]] = module.verdict
    return function


@pytest.mark.slow
def test_the_bill_of_materials_lists_every_pin_with_version_and_hash() -> None:
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", "--assume-old=.venv/.stamps/dev", "sbom"]
    made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    bill = json.loads((ROOT / made.stdout.strip()).read_text(encoding="utf-8"))
    listed = {component["name"].lower(): component for component in bill["components"]}
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pinned = {name.lower(): version for name, version in re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^ ;\\\n]+)", text)}
    assert {name: component["version"] for name, component in listed.items()} == pinned
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("openenv-inferencegym", inferencegym.__version__)
    for component in listed.values():
        assert component["externalReferences"][0]["hashes"], component["name"]


@pytest.mark.parametrize(
    ("report", "status", "said"),
    [
        (None, 0, "NOT AUDITED: the advisory source cannot be reached"),
        ({"dependencies": [{"name": "a", "skip_reason": "not found"}]}, 0, "NOT AUDITED.*none of the 1 packages"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, 0, "1 packages audited, 0 known"),
        (
            {
                "dependencies": [
                    {"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]},
                    {"name": "b", "skip_reason": "not found"},
                ]
            },
            1,
            r"(?s)a 1: X-1, fixed in \['2'\].*1 known vulnerabilities.*unknown to the advisory source: b",
        ),
    ],
)
def test_an_audit_says_what_it_could_not_ask(report: Mapping[str, Any] | None, status: int, said: str) -> None:
    got, text = verdict_function()(report)
    assert got == status
    assert re.search(said, text)
