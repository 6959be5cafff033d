"""The systemd unit docs/deploy/inferencegym.service, as systemd reads it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from server.settings import Settings
from tests.programs import program
from tests.servers import ROOT

UNIT = (ROOT / "docs/deploy/inferencegym.service").read_text(encoding="utf-8")
BINARY = "/opt/inferencegym/bin/inferencegym"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    assert UNIT.count(f"ExecStart={BINARY} serve\n") == 1
    path = tmp_path / "inferencegym.service"
    path.write_text(UNIT.replace(BINARY, sys.executable), encoding="utf-8")  # it checks that the program exists
    done = subprocess.run(
        [program("systemd-analyze"), "verify", "--man=no", path], capture_output=True, text=True, check=False
    )
    about_it = [line for line in done.stderr.splitlines() if "inferencegym" in line]
    assert (done.returncode, about_it) == (0, []), done.stderr


def test_the_unit_waits_longer_than_the_server_takes_to_end_and_names_its_settings() -> None:
    stop_s = float(re.findall(r"TimeoutStopSec=(\d+)", UNIT)[0])
    assert stop_s > Settings.model_fields["shutdown_grace_s"].default
    named = re.findall(r"INFERENCEGYM_([A-Z_]+)=", UNIT)
    assert sorted(named) == ["DATA_DIR", "HOST"]
    assert all(name.lower() in Settings.model_fields for name in named)
