"""Offline work that a server runs in a separate process: read a request log, plan and compare on it.

``python -m ops.jobs PARENT`` answers requests with gzipped JSON (:func:`ops.worker.serve`); a server starts it for each
job. A log never takes time or memory of the process that answers steps, and modules imported for it (pandas) are gone
when the job ends. The job limits its own memory and time, and ends with the process PARENT that started it.
"""

from __future__ import annotations

import gzip
import json
import math
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from inferencegym.errors import InferenceGymError
from inferencegym.tasks import get_task
from ops.export import engine_files, settings_of, written
from ops.log.names import file_name
from ops.log.reader import Imported, import_log
from ops.objectives import Objective, parse_objective
from ops.plan import Plan, make_plan, tables_for
from ops.prices import read_prices
from ops.report import answer, notes, precision_note, table_notes, verdict
from ops.scaling import WITHIN_MISSES, scaling_note
from ops.shadow import shadow
from ops.worker import confine, in_fields, request_parts, serve
from simulator.hardware.catalogue import precisions_named
from simulator.hardware.sources import with_fp8_kv
from simulator.hardware.tables import tables_of

Request = Mapping[str, Any]
LIMIT_S: Final = 300
"""Wall time and processor time of a job (s); a plan over many cards takes a minute on two cores."""


def shadow_job(request: Request) -> dict[str, Any]:
    """Report of policies on the log's text, with configuration files of engines per policy."""
    imported = log_of(request)
    task = None if request.get("task_id") is None else get_task(request["task_id"])
    tables = tables_of(request.get("hardware") or (None if task is None else task.hardware))
    if request.get("kv_cache_dtype") == "fp8":
        tables = with_fp8_kv(tables)
    report = shadow(
        imported.log,
        request["policies"],
        fixed=request.get("fixed"),
        n_gpus=request.get("gpus"),
        objectives=[Objective("ttft", "p99", request["slo_ms"])] if request.get("slo_ms") else (),
        task=task,
        tables=tables,
        prices=None if request.get("prices") is None else read_prices(request["prices"]),
        drafts=request.get("drafts", False),
    )
    names = [outcome.policy for outcome in report.outcomes]
    export = {name: written(settings_of(report, tables, name, imported.model)) for name in names}
    told = [
        *filter(None, [report.refused, report.short, precision_note(report, tables)]),
        scaling_note(report.autoscaling, report.log["span_s"], WITHIN_MISSES),
        *table_notes(tables),
    ]
    return {
        **report.to_dict(),
        **_told(imported, told),
        "answer": verdict(report, tables),
        "export": export,
    }


def plan_job(request: Request) -> dict[str, Any]:
    """Plans for the log's text, notes on them, and settings for engines of the recommended plan and the first."""
    imported = log_of(request)
    tables, model = tables_for(request.get("hardware"), request.get("model"), lambda: imported.model)
    report = make_plan(
        imported.log,
        [parse_objective(text) for text in request["objectives"]],
        tables,
        prices=None if request.get("prices") is None else read_prices(request["prices"]),
        share_met=request.get("share_met"),
        windows_met=request.get("windows_met"),
        precisions=request.get("precisions") or precisions_named(model),
        drafts=request.get("drafts", False),
        disagg=request.get("disagg", True),
        kv_cache_fp8=request.get("kv_cache_dtype") == "fp8",
        replicas_min=request.get("replicas_min", 1),
        router=request.get("router", "shared"),
    )

    def export(plan: Plan | None) -> dict[str, str]:
        return {} if plan is None else engine_files(plan, tables[plan.hardware], report, model or imported.model)

    return {
        **report.to_dict(),
        **_told(imported, notes(report)),
        "answer": answer(report),
        "export": export(report.recommended),
        "export_likely": export(next(iter(report.plans), None)),
    }


def _told(imported: Imported, notes: Sequence[str]) -> dict[str, Any]:
    """How the log was read, and notes on the result, for the sender of a request."""
    read = imported.describe()
    return {
        "read": {**read, "notes": [*map(in_fields, read["notes"])]},
        "notes": [*map(in_fields, notes)],
    }


JOBS: Final[dict[str, Callable[[Request], dict[str, Any]]]] = {"shadow": shadow_job, "plan": plan_job}


def log_of(request: Request) -> Imported:
    """The request log whose text is ``log``."""
    end_s = request.get("to_s")
    return import_log(
        file_name(request.get("name")),
        columns=request.get("columns"),
        start_s=request.get("from_s") or 0.0,
        end_s=math.inf if end_s is None else end_s,
        content=request["log"],
        limit=request.get("limit"),
        skip_failed=request.get("failed") == "skip",
        only=[text] if (text := request.get("filter")) else [],
        skip_bad=request.get("skip_bad") or 0,
        drop_duplicates=request.get("drop_duplicates", False),
    )


def respond(name: str, request: Request) -> tuple[int, dict[str, Any]]:
    """Do a job: returns 0 and its answer, or 2 and the parts of an error, worded for the sender of the request."""
    try:
        return 0, JOBS[name](request)
    except (InferenceGymError, MemoryError) as error:
        return 2, request_parts(error)


def limit_time() -> None:
    """Limit this process's processor time and wall time."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)


def main() -> None:
    """Do jobs from standard input until it ends."""
    confine(int(sys.argv[1]))
    limit_time()

    def answered(name: str, body: bytes) -> tuple[int, bytes]:
        status, answer = respond(name, json.loads(body))
        text = json.dumps(answer, allow_nan=False).encode()
        return status, text if status else gzip.compress(text, 5, mtime=0)

    serve(answered)


if __name__ == "__main__":
    main()
