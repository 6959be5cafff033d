"""Task from a request log: pack the log, size the fleet, calibrate, and write all files or none."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.policies.capacity import CapacityPlanner, Setting
from agents.search.calibration import Solved, calibrate
from agents.search.solver import QUICK, Budget, Progress, silent
from inferencegym.errors import InvalidConfigError
from inferencegym.files import make_folder
from inferencegym.models import PRIORITY_CLASSES
from inferencegym.tasks import TaskSpec, list_tasks, parse_task
from simulator.offline.importers import Imported
from simulator.prefix import reuse_curve
from simulator.recorded import save_trace
from simulator.requests import RequestLog
from simulator.tables import ServingTables, tables_of
from simulator.workload import load_source

HEADROOM: Final = 1.2
"""Planned capacity of the default fleet, at the default precision (FP16), over the log's mean load."""
DEFAULT_SLO_MS: Final = 500.0
_ID: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True, eq=False)
class TraceTask:
    """A task made of a log: its files, its JSON entry, and what calibrating it found (None if that was left out)."""

    task_file: Path
    trace_file: Path
    entry: Mapping[str, Any]
    solved: Solved | None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"task_file": str(self.task_file), "trace_file": str(self.trace_file), "entry": dict(self.entry)}


def write_trace_task(
    imported: Imported,
    task_id: str,
    out: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    origin: str = "",
    budget: Budget | None = QUICK,
    force: bool = False,
    progress: Progress = silent,
) -> TraceTask:
    """Write ``OUT/ID.npz`` (the packed log) and ``OUT/ID.json`` (a task file with its measured constants).

    ``settings`` are further keys of the task's entry (``n_replicas``, ``slo_target_ms``, ...); without ``n_replicas``
    the fleet is sized to the log. ``budget`` is how hard to search when calibrating, None leaves calibration to
    ``inferencegym calibrate``. Both files appear only when everything is done. Raises :class:`InvalidConfigError`.
    """
    check_id(task_id)
    targets = [out / f"{task_id}.npz", out / f"{task_id}.json"]
    taken = [t for t in targets if t.exists()]
    if taken and not force:
        raise InvalidConfigError(
            f"{taken[0]} exists already; choose another --id or --out, or overwrite it with --force"
        )
    entry = _entry(imported.log, task_id, origin, settings or {})
    make_folder(out)
    staging = Path(tempfile.mkdtemp(dir=out, prefix=f".{task_id}-"))
    try:
        save_trace(staging / targets[0].name, imported.log, {"source": origin, **imported.describe()})
        if "n_replicas" not in entry:
            entry["n_replicas"] = fleet_for(parse_task(task_id, entry, base=staging))
        task = parse_task(task_id, entry, base=staging)
        solved = None if budget is None else calibrate(task, budget, progress)
        if solved is not None:
            entry["calibration"] = solved.entry()
        text = json.dumps({"tasks": {task_id: entry}}, indent=2) + "\n"
        (staging / targets[1].name).write_text(text, encoding="utf-8")
        # The task file last: whoever finds it finds its trace.
        for target in targets:
            (staging / target.name).replace(target)
    finally:
        shutil.rmtree(staging)
    return TraceTask(targets[1], targets[0], entry, solved)


def check_id(task_id: str) -> None:
    """Raise :class:`InvalidConfigError` unless a new task may have this id."""
    if not _ID.fullmatch(task_id):
        raise InvalidConfigError(
            f"id {task_id!r} is not allowed: lower-case words joined by '-', as in 'my-trace'", "id"
        )
    if task_id in {str(t.task_id) for t in list_tasks(include_recorded=True)}:
        raise InvalidConfigError(f"id {task_id!r} is taken by another task; choose another", "id")


def fleet_for(task: TaskSpec, tables: ServingTables | None = None) -> int:
    """Replicas that serve a task's mean load at the default precision (FP16) with some headroom."""
    tables = tables or tables_of(task.hardware)
    source = load_source(task, tables)
    plan = CapacityPlanner(task, tables, source.stats.shares).plan(Setting(tier=0, spec_length=0, disagg=False))
    each = plan.capacity_rps / task.fleet.n_replicas
    return max(1, math.ceil(HEADROOM * source.nominal_rate_rps / each))


def _entry(log: RequestLog, task_id: str, origin: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Entry of the task file; rate and class shares, which the log decides, are stated for readers and planners."""
    shares = [float((log.class_index == i).mean()) for i in range(len(PRIORITY_CLASSES))]
    span_s = max(1.0, float(log.arrival_s[-1]))
    return {
        "name": " ".join(word.capitalize() for word in task_id.split("-")),
        "description": f"Requests recorded in {origin}, replayed second by second." if origin else "Recorded requests.",
        "trace": f"{task_id}.npz",
        "slo_target_ms": DEFAULT_SLO_MS,
        "arrival_rate_rps": min(2000.0, max(0.01, round(len(log.arrival_s) / span_s, 4))),
        "priority_mix": _rounded_shares(shares),
        **settings,
    }


def _rounded_shares(shares: list[float]) -> list[float]:
    rounded = [round(s, 6) for s in shares]
    rounded[int(np.argmax(shares))] += 1.0 - sum(rounded)
    return [round(s, 6) for s in rounded]


def log_summary(log: RequestLog) -> dict[str, Any]:
    """Summary of a log: size, rate, lengths, burstiness, and the share of repeated prompt tokens."""
    prompts, outputs = np.quantile(log.prompt_tokens, (0.5, 0.99)), np.quantile(log.output_tokens, (0.5, 0.99))
    span_s = max(1.0, float(log.arrival_s[-1]))
    per_second = np.bincount(log.arrival_s.astype(np.int64))
    return {
        "requests": len(log.arrival_s),
        "span_s": span_s,
        "rate_rps": len(log.arrival_s) / span_s,
        "peak_rps": int(per_second.max()),
        "index_of_dispersion": float(per_second.var() / per_second.mean()),
        "prompt_tokens_p50": float(prompts[0]),
        "prompt_tokens_p99": float(prompts[1]),
        "output_tokens_p50": float(outputs[0]),
        "output_tokens_p99": float(outputs[1]),
        "reused_share": float(log.reused_tokens.sum() / log.prompt_tokens.sum()),
        "reuse_measured": reuse_curve(log) is not None and len(log.reuse_hit) > 0,
    }
