"""How many agent sessions an engine carries: play a log of sessions under one cap after another.

A log (CSV, JSON lines) has a row per turn: ``session``, ``turn`` (a number that rises within a session),
``prompt_tokens`` (the whole conversation so far, the new prompt included) and ``output_tokens``. ``tool_s`` is the time
between an answer and the next turn; ``time_s`` and ``duration_s`` of each turn may be given instead. All sessions are
ready at the start, and a cap is judged by how long it takes to finish them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from env.rollouts.agents import CAPS, make_controller
from env.rollouts.env import RolloutRow
from env.rollouts.tasks import ENGINE_RULES, MAX_RUNNING, Workload
from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.rollouts import MAX_SESSIONS
from simulator.events.fleet import Fleet
from simulator.events.requests import FloatArray, Requests, Sessions
from simulator.hardware.table_model import table_model
from simulator.hardware.tables import ServingTables

NEEDED: Final = ("session", "turn", "prompt_tokens", "output_tokens")
LONGEST_S: Final = 7 * 86_400
"""Simulated time (s) after which a run is abandoned."""
NEAR_BEST: Final = 0.97
"""Share of the best pace at which a cap counts as good as the best; the smallest such cap is recommended."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Result of a cap, or of the controller ``fit``, on the sessions of a log."""

    cap: str
    seconds: float
    sessions_per_hour: float
    prefix_hit_share: float
    computed_tokens: int
    preemptions: int
    refused_sessions: int


def read_sessions(path: Path) -> tuple[Sessions, list[str]]:
    """Sessions of a log, and notes for its reader. Raises DataFormatError naming column and row."""
    try:
        lines = path.suffix in {".jsonl", ".ndjson", ".json"}
        rows = pd.read_json(path, lines=True) if lines else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise DataFormatError(f"{path} cannot be read as a log of sessions: {error}") from error
    missing = [name for name in NEEDED if name not in rows]
    if missing:
        raise DataFormatError(
            f"{path} has no column {missing[0]!r}: it must have {', '.join(NEEDED)}", None, missing[0]
        )
    if rows.empty:
        raise DataFormatError(f"{path} has no turns")
    for name in NEEDED[1:]:
        _check_numbers(path, rows, name, 0 if name == "turn" else 1)
    order = rows["session"].map({name: i for i, name in enumerate(dict.fromkeys(rows["session"]))})
    rows = rows.assign(order=order).sort_values("order", kind="stable")
    turn, session = rows["turn"].to_numpy(float), rows["order"].to_numpy(int)
    starts = np.flatnonzero(np.diff(session, prepend=-1))
    late = np.flatnonzero((np.diff(turn, prepend=-1.0) <= 0) & (np.diff(session, prepend=-1) == 0))
    if len(late):
        at = rows.iloc[late[0]]
        raise DataFormatError(
            f"{path}: session {at['session']!r} has turn {at['turn']:g} after a turn of that number or a higher one; "
            "write the turns of a session in order",
            int(rows.index[late[0]]) + 2,
            "turn",
        )
    if len(starts) > MAX_SESSIONS:
        raise DataFormatError(f"{path} has {len(starts)} sessions: give at most {MAX_SESSIONS}")
    tool_s, notes = _tool_times(path, rows)
    prompts, outputs = (rows[name].to_numpy(np.int64) for name in ("prompt_tokens", "output_tokens"))
    requests = Requests(np.zeros(len(rows)), prompts, outputs)
    first = np.append(starts, len(rows))
    return Sessions(requests, first, tool_s, np.ones(len(starts), dtype=bool)), notes


def _check_numbers(path: Path, rows: pd.DataFrame, name: str, least: float) -> None:
    values = pd.to_numeric(rows[name], errors="coerce")
    wrong = np.flatnonzero(~(values >= least) | (values > 1e9))
    if len(wrong):
        value = rows[name].iloc[wrong[0]]
        raise DataFormatError(
            f"{path}: {name}={value!r} is not allowed: it must be a number from {least:g} to 1e9",
            int(wrong[0]) + 2,
            name,
        )
    rows[name] = values


def _tool_times(path: Path, rows: pd.DataFrame) -> tuple[FloatArray, list[str]]:
    if "tool_s" in rows:
        _check_numbers(path, rows, "tool_s", 0)
        return rows["tool_s"].to_numpy(float), []
    if "time_s" in rows and "duration_s" in rows:
        _check_numbers(path, rows, "time_s", 0)
        _check_numbers(path, rows, "duration_s", 0)
        end_s = rows["time_s"] + rows["duration_s"]
        gap_s = rows.groupby("order")["time_s"].shift(-1) - end_s
        return gap_s.fillna(0.0).clip(lower=0.0).to_numpy(float), ["tool times are the gaps between the log's turns"]
    return np.zeros(len(rows)), [
        "the log has neither tool_s nor time_s and duration_s: tools are assumed to take no time"
    ]


def plan_sessions(sessions: Sessions, tables: ServingTables, kv_pool_tokens: int | None = None) -> list[SessionPlan]:
    """Play the sessions under each cap, and under ``fit``. Raises InvalidConfigError if the pool holds no block."""
    model = table_model(tables, tables.tiers[0])
    pool = kv_pool_tokens or int(tables.columns["kv_capacity_tokens"][0, 0, -1, 0, 0])
    if pool < 16:
        raise InvalidConfigError(f"kv_pool_tokens={pool} is less than one block: give at least 16", "kv_pool_tokens")
    fleet = Fleet(model, MAX_RUNNING, pool, **ENGINE_RULES)
    workload = Workload(str(tables.meta["hardware"]), fleet, sessions, int(sessions.turns.output_tokens.sum()))
    caps = sorted({*(cap for cap in CAPS if cap < len(sessions)), len(sessions)})
    controllers = {str(cap): make_controller(f"constant:{cap}") for cap in caps}
    controllers["fit"] = make_controller("fit")
    return [_played(name, RolloutRow(workload, LONGEST_S), each) for name, each in controllers.items()]


def _played(name: str, row: RolloutRow, controller: Callable[[Mapping[str, float]], int]) -> SessionPlan:
    while not row.done:
        row.advance(controller(row.observation()))
    state, seconds = row.run.state, row.totals()["elapsed_s"]
    return SessionPlan(
        cap=name,
        seconds=seconds,
        sessions_per_hour=3600.0 * state.n_over / seconds if seconds else 0.0,
        prefix_hit_share=state.hit_tokens / max(1, state.queried_tokens),
        computed_tokens=int(state.prefilled_tokens),
        preemptions=int(state.n_preempted),
        refused_sessions=int(state.n_refused_sessions),
    )


def recommended(plans: list[SessionPlan]) -> SessionPlan:
    """The smallest constant cap that is as good as the best one."""
    constant = [plan for plan in plans if plan.cap.isdigit()]
    best = max(plan.sessions_per_hour for plan in constant)
    return next(plan for plan in constant if plan.sessions_per_hour >= NEAR_BEST * best)


def sessions_table(plans: list[SessionPlan]) -> str:
    """The plans as text with a bar for the pace, then the conclusion."""
    chosen, most = recommended(plans), max(plan.sessions_per_hour for plan in plans)
    lines = [
        f"{'cap':>5}{'seconds':>10}{'sessions/h':>12}{'found in cache':>16}{'tokens computed':>17}{'preempted':>11}"
    ]
    for plan in plans:
        bar = "#" * round(20 * plan.sessions_per_hour / most) if most else ""
        lines.append(
            f"{plan.cap:>5}{plan.seconds:>10,.0f}{plan.sessions_per_hour:>12,.0f}{plan.prefix_hit_share:>16.1%}"
            f"{plan.computed_tokens:>17,}{plan.preemptions:>11}  {bar}{'  <- this' if plan is chosen else ''}"
        )
    lines.append(
        f"This engine carries {chosen.cap} of these sessions at a time: {chosen.sessions_per_hour:,.0f} an hour."
    )
    beyond = [p for p in plans if p.cap.isdigit() and int(p.cap) > int(chosen.cap)]
    worst = min(beyond, key=lambda plan: plan.sessions_per_hour, default=chosen)
    if worst.sessions_per_hour < 0.8 * chosen.sessions_per_hour:
        lines.append(
            f"Above this cap sessions evict each other's contexts: with {worst.cap} the pace falls to "
            f"{worst.sessions_per_hour / chosen.sessions_per_hour:.0%}, and {worst.computed_tokens:,} tokens are "
            f"computed instead of {chosen.computed_tokens:,}."
        )
    if chosen.refused_sessions:
        lines.append(
            f"{chosen.refused_sessions} sessions have a turn that is longer than the KV pool and were refused."
        )
    return "\n".join(lines)


def plans_json(plans: list[SessionPlan]) -> dict[str, Any]:
    """The plans as JSON, and the recommended cap."""
    names = SessionPlan.__dataclass_fields__
    return {
        "max_sessions": int(recommended(plans).cap),
        "tried": [{name: getattr(plan, name) for name in names} for plan in plans],
    }
