"""Check the pinned dependencies for known vulnerabilities with pip-audit: `make audit`.

Exits with 1 if there are any. If the advisory source cannot be reached, the script says so and exits with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300


def audit(requirements: Path) -> Mapping[str, Any] | None:
    """Report of pip-audit on a complete, hashed requirements file; None if the advisory source cannot be reached."""
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--format", "json"]
    command += ["--progress-spinner", "off", "--timeout", "10", "--requirement", str(requirements)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    try:
        return dict(json.loads(run.stdout))
    except json.JSONDecodeError:
        print(run.stderr.strip()[-2000:], file=sys.stderr)
        return None


def verdict(report: Mapping[str, Any] | None) -> tuple[int, str]:
    """Exit status and text for a report.

    Packages that the source does not know are reported as not audited; pip-audit itself would report that they have no
    known vulnerabilities.
    """
    if report is None:
        return 0, "NOT AUDITED: the advisory source cannot be reached from here. Run `make audit` where it can."
    packages = report["dependencies"]
    audited = [package for package in packages if "vulns" in package]
    skipped = [package["name"] for package in packages if "vulns" not in package]
    if not audited:
        return 0, f"NOT AUDITED: the advisory source that answers here knows none of the {len(packages)} packages."
    lines = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {vulnerability['fix_versions']}"
        for package in audited
        for vulnerability in package["vulns"]
    ]
    status = 1 if lines else 0
    lines.append(f"{len(audited)} packages audited, {len(lines)} known vulnerabilities.")
    if skipped:
        lines.append(f"NOT AUDITED, unknown to the advisory source: {', '.join(skipped)}")
    return status, "\n".join(lines)


def main() -> int:
    """Audit the server's pinned dependencies."""
    status, text = verdict(audit(ROOT / "requirements.txt"))
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
