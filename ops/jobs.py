"""Offline work that a server runs in a separate process: read a request log, plan and compare on it.

``python -m ops.jobs NAME PARENT`` reads a request as JSON from standard input and writes gzipped JSON to standard
output: the answer (exit status 0), or the error's parts (exit status 2). A log never takes time or memory of the
process that answers steps, and modules imported for it (pandas) are gone when the job ends. The job limits its own
memory and time, and ends with the process PARENT that started it.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import InferenceGymError, short_text
from inferencegym.models import NAIVE_ACTION, ServeAction
from inferencegym.tasks import get_task
from ops.export import EXPORTS, engine_files, settings_of
from ops.log.reader import Imported, import_log
from ops.objectives import parse_objective
from ops.plan import make_plan, registered_tables
from ops.prices import read_prices
from ops.report import growth_lines, notes, refused_lines
from ops.scaling import WITHIN_MISSES, scaling_note
from ops.shadow import shadow
from ops.worker import confine, error_parts
from simulator.hardware.tables import tables_of

Request = Mapping[str, Any]
LIMIT_S: Final = 300
"""Wall time and processor time of a job (s); a plan over many cards takes a minute on two cores."""
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
    told = [*filter(None, [report.refused]), scaling_note(report.autoscaling, report.log["span_s"], WITHIN_MISSES)]
    return {
        **report.to_dict(),
        "read": imported.describe(),
        "notes": told,
        "export": export,
    }


def plan_job(request: Request) -> dict[str, Any]:
    """Plans for the log's text, notes on them, and the first plan's settings for engines."""
    imported = log_of(request)
    tables = registered_tables(request.get("hardware"), request.get("model"))
    report = make_plan(
        imported.log,
        [parse_objective(text) for text in request["objectives"]],
        tables,
        prices=None if request.get("prices") is None else read_prices(request["prices"]),
        share_met=request.get("share_met"),
        precisions=request.get("precisions"),
        drafts=request.get("drafts", False),
        replicas_min=request.get("replicas_min", 1),
    )
    first = report.plans[0] if report.plans else None
    return {
        **report.to_dict(),
        "read": imported.describe(),
        "notes": [*refused_lines(report), *growth_lines(report), *notes(report)],
        "export": {} if first is None else engine_files(first, tables[first.hardware], report),
    }


JOBS: Final[dict[str, Callable[[Request], dict[str, Any]]]] = {"shadow": shadow_job, "plan": plan_job}


def log_of(request: Request) -> Imported:
    """The request log whose text is ``log``."""
    end_s = request.get("to_s")
    return import_log(
        short_text(Path(request.get("name") or "log.csv").name),
        columns=request.get("columns"),
        start_s=request.get("from_s") or 0.0,
        end_s=math.inf if end_s is None else end_s,
        content=request["log"],
        limit=request.get("limit"),
        skip_failed=request.get("failed") == "skip",
        only=request.get("filter"),
        skip_bad=request.get("skip_bad") or 0,
    )


def respond(name: str, request: Request) -> tuple[int, dict[str, Any]]:
    """Do a job: returns 0 and its answer, or 2 and the parts of an error, worded for the sender of the request.

    Error messages name fields of the request instead of command options.
    """
    try:
        return 0, JOBS[name](request)
    except (InferenceGymError, MemoryError) as error:
        parts = error_parts(error)
        return 2, {**parts, "message": _OPTION.sub(lambda found: found[1].replace("-", "_"), parts["message"])}


def limit_time() -> None:
    """Limit this process's processor time and wall time."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)


def main() -> int:
    """Read a request, do the job, write the answer."""
    confine(int(sys.argv[2]))
    limit_time()
    status, answer = respond(sys.argv[1], json.load(sys.stdin))
    sys.stdout.buffer.write(gzip.compress(json.dumps(answer, allow_nan=False).encode(), 5, mtime=0))
    return status


if __name__ == "__main__":
    sys.exit(main())
