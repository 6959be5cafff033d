"""Offline work that a server has done in a process of its own: reading a request log, planning and comparing on it.

``python -m agents.jobs NAME`` reads a request as JSON from standard input and writes gzipped JSON to standard output:
the answer (exit status 0), or the error's parts (exit status 2). A log never takes time or memory of the process that
answers steps, and what is imported for it (pandas) ends with the job.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from agents.plan.report import engine_files, growth_lines, notes
from agents.plan.search import make_plan, registered_tables
from agents.shadow.compare import shadow
from agents.shadow.export import EXPORTS, settings_of
from agents.shadow.prices import read_prices
from agents.shadow.scaling import WITHIN_MISSES, scaling_note
from inferencegym.errors import DataFormatError, InferenceGymError, short_text
from inferencegym.models import NAIVE_ACTION, ServeAction
from inferencegym.tasks import get_task
from simulator.objectives import parse_objective
from simulator.offline.importers import Imported, import_log
from simulator.tables import tables_of

Request = Mapping[str, Any]
ERROR_PARTS: Final = ("code", "http_status", "field", "line", "allowed")
_OPTION: Final = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


def shadow_job(request: Request) -> dict[str, Any]:
    """Report of policies on the log's text, with configuration files of engines per policy."""
    imported = log_of(request)
    task = None if request.get("task_id") is None else get_task(request["task_id"])
    tables = tables_of(request.get("hardware") or (None if task is None else task.hardware))
    fixed = request.get("fixed")
    report = shadow(
        imported.log,
        request["policies"],
        fixed=NAIVE_ACTION if fixed is None else ServeAction.from_dict(fixed),
        n_gpus=request.get("gpus"),
        slo_ms=request.get("slo_ms"),
        task=task,
        tables=tables,
        prices=None if request.get("prices") is None else read_prices(request["prices"]),
    )
    settings = {outcome.policy: settings_of(report, tables, outcome.policy) for outcome in report.outcomes}
    export = {policy: {name: write(s) for name, write in EXPORTS.items()} for policy, s in settings.items()}
    note = scaling_note(report.autoscaling, report.log["span_s"], WITHIN_MISSES)
    return {**report.to_dict(), "read": imported.describe(), "notes": [note], "export": export}


def plan_job(request: Request) -> dict[str, Any]:
    """Plans for the log's text, what a reader must know of them, and the first plan's settings for engines."""
    imported = log_of(request)
    tables = registered_tables(request.get("hardware"), request.get("model"))
    report = make_plan(
        imported.log,
        [parse_objective(text) for text in request["objectives"]],
        tables,
        prices=None if request.get("prices") is None else read_prices(request["prices"]),
        share_met=request.get("share_met"),
        precisions=request.get("precisions"),
        drafts=request.get("drafts", True),
    )
    first = report.plans[0] if report.plans else None
    return {
        **report.to_dict(),
        "read": imported.describe(),
        "notes": [*growth_lines(report), *notes(report)],
        "export": {} if first is None else engine_files(first, tables[first.hardware], report),
    }


JOBS: Final[dict[str, Callable[[Request], dict[str, Any]]]] = {"shadow": shadow_job, "plan": plan_job}


def log_of(request: Request) -> Imported:
    """The request log whose text is ``log``; the ending of its ``name`` counts."""
    name = Path(request.get("name") or "log.csv").name
    end_s = request.get("to_s")
    with tempfile.TemporaryDirectory(prefix="inferencegym-log-") as folder:
        path = Path(folder) / f"log{Path(name).suffix.lower()}"
        path.write_text(request["log"], encoding="utf-8")
        try:
            return import_log(
                path,
                columns=request.get("columns"),
                start_s=request.get("from_s") or 0.0,
                end_s=math.inf if end_s is None else end_s,
            )
        except DataFormatError as error:
            raise DataFormatError(str(error).replace(str(path), short_text(name)), error.line, error.field) from error


def respond(name: str, request: Request) -> tuple[int, dict[str, Any]]:
    """Do a job: 0 and its answer, or 2 and the parts of an error, in a visitor's words.

    Messages name the fields of the request instead of the command's options.
    """
    try:
        return 0, JOBS[name](request)
    except InferenceGymError as error:
        parts = {part: found for part in ERROR_PARTS if (found := getattr(error, part, None)) is not None}
        return 2, {"message": _OPTION.sub(lambda found: found[1].replace("-", "_"), str(error)), **parts}


def main() -> int:
    """Read a request, do the job, write the answer."""
    status, answer = respond(sys.argv[1], json.load(sys.stdin))
    sys.stdout.buffer.write(gzip.compress(json.dumps(answer, allow_nan=False).encode(), 5, mtime=0))
    return status


if __name__ == "__main__":
    sys.exit(main())
