"""Scale a task's traffic to an engine: measure its capacity, then adjust rates and lengths to fit.

Floods, classes, objectives and grades stay those of the task; one engine replaces the whole fleet.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from inferencegym.errors import InvalidConfigError, RemoteError
from inferencegym.files import write_text
from inferencegym.models import SPEC_LENGTHS
from inferencegym.tasks import Calibration, LengthDist, TaskSpec
from live.driver import EngineRequest
from live.engines.engine import Engine, Orders
from simulator.hardware.tables import tables_of
from simulator.kernel.serving import MEASURED_ACCEPT_RATE
from simulator.load.source import EpisodeRequests
from simulator.workload import load_source

DEFAULT_LOAD: Final = 0.7
"""Offered output tokens as a share of the engine's capacity, mean of an episode: saturated in floods, idle between."""
POLL_S: Final = 0.25
RATE_SEEDS: Final = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Output tokens per second of an engine on requests of one kind: one at a time, and with full batches."""

    floor_tps: float
    peak_tps: float


def measure_throughput(engine: Engine, prompt_tokens: int, output_tokens: int, n_requests: int) -> float:
    """Output tokens per second of ``n_requests`` equal requests sent at once."""
    with engine.load([EngineRequest(0.0, prompt_tokens, output_tokens)] * n_requests) as load:
        to_s = 0.0
        while any(timing.ended_s is None for timing in load.timings):
            to_s += POLL_S
            load.advance(to_s)
        failed = [timing.error for timing in load.timings if timing.error]
        if failed:
            raise RemoteError(f"{len(failed)} of {n_requests} requests failed, for example: {failed[0]}")
        return n_requests * output_tokens / max(t.ended_s for t in load.timings if t.ended_s is not None)


def measure_capacity(engine: Engine, prompt_tokens: int, output_tokens: int, batches: int = 3) -> Capacity:
    """Measure an otherwise idle engine in bursts of ``batches`` full batches; its knobs are left at their maximum.

    Speculative decoding is off during and after the measurement.
    """
    limits = engine.limits()
    if "batch_size" not in limits:
        raise InvalidConfigError(f"the capacity of {engine.name} cannot be measured: its batch size cannot be set")
    low, high = limits["batch_size"]
    wide = {name: largest for name, (_, largest) in limits.items() if name in ("batch_size", "kv_budget")}
    wide |= {"spec_length": 0.0} if "spec_length" in limits else {}
    engine.set(Orders({**wide, "batch_size": low}))
    floor = measure_throughput(engine, prompt_tokens, output_tokens, 3)
    engine.set(Orders(wide))
    peak = measure_throughput(engine, prompt_tokens, output_tokens, batches * int(high))
    return Capacity(floor, peak)


def measure_draft_tokens(engine: Engine, prompt_tokens: int, output_tokens: int, n_requests: int) -> dict[int, float]:
    """Tokens per sequence and iteration by draft length, measured in bursts of equal requests.

    Drafting is off afterwards. Draft lengths beyond the engine's limit get the best measured value.
    """
    longest = int(engine.limits()["spec_length"][1])
    found = dict.fromkeys(SPEC_LENGTHS, 1.0)
    for drafts in SPEC_LENGTHS[1:]:
        if drafts > longest:
            found[drafts] = max(found.values())
            continue
        engine.set(Orders({"spec_length": float(drafts)}))
        before = engine.read()
        measure_throughput(engine, prompt_tokens, output_tokens, n_requests)
        accepted = (engine.read().accepted_tokens or 0.0) - (before.accepted_tokens or 0.0)
        written = n_requests * output_tokens
        found[drafts] = written / (written - accepted)
    engine.set(Orders({"spec_length": 0.0}))
    return found


def drafts_as_measured(task: TaskSpec) -> TaskSpec:
    """The task with the table's acceptance of drafts in all classes."""
    classes = tuple(replace(each, complexity_penalty=0.0) for each in task.classes)
    return replace(
        task, classes=classes, draft_acceptance=(), fleet=replace(task.fleet, base_accept_rate=MEASURED_ACCEPT_RATE)
    )


def scaled_lengths(task: TaskSpec, longest_tokens: int) -> TaskSpec:
    """The task with lengths scaled down, if necessary, so that prompt and output fit into an engine's context."""
    longest = max(each.prompt.high + each.output.high for each in task.classes if each.share or each.burst_share)
    factor = min(1.0, longest_tokens / longest)
    classes = [
        replace(each, prompt=_shorter(each.prompt, factor), output=_shorter(each.output, factor))
        for each in task.classes
    ]
    return replace(task, classes=tuple(classes))


def scaled_rates(task: TaskSpec, peak_tps: float, load: float = DEFAULT_LOAD) -> TaskSpec:
    """The task with arrival rates scaled so that it offers the share ``load`` of the engine's capacity."""
    if task.trace is not None:
        raise InvalidConfigError(
            f"task {task.task_id!r} plays a recorded trace, which cannot be scaled: choose another"
        )
    factor = load * peak_tps / offered_tps(task)
    burst = None if task.burst is None else replace(task.burst, rate_rps=factor * task.burst.rate_rps)
    return replace(
        task,
        arrival_rate_rps=factor * task.arrival_rate_rps,
        burst=burst,
        fleet=replace(task.fleet, n_replicas=1),
    )


def live_task(task: TaskSpec, engine: Engine) -> TaskSpec:
    """The task with only those knobs that the engine can change while it runs."""
    limits = engine.limits()
    return replace(task, active_actions=tuple(name for name in task.active_actions if name in limits))


def engine_calibration(task: TaskSpec, capacity: Capacity, load: float = DEFAULT_LOAD) -> Calibration:
    """Constants of the task's scores on a measured engine; writing all offered tokens spends the cost budget."""
    offered_ktps = load * capacity.peak_tps / 1e3
    price = task.cost_budget / task.episode_length * offered_ktps
    return Calibration(capacity.floor_tps, load * capacity.peak_tps, capacity.peak_tps, price)


def write_task(path: Path, task_id: str, task: TaskSpec, calibration: Calibration) -> Path:
    """Write a task of synthetic traffic with its constants as a task file, so that policies can be trained on it.

    ``INFERENCEGYM_TASKS=FILE`` registers it, and with ``INFERENCEGYM_TABLE`` it is played on the engine's table.
    """
    entry = {**task_entry(task), "calibration": asdict(calibration)}
    return write_text(path, json.dumps({"tasks": {task_id: entry}}, indent=1) + "\n")


def task_entry(task: TaskSpec) -> dict[str, Any]:
    """Entry of a task file for a task of synthetic traffic, without its id, Gymnasium name and constants."""
    if task.trace is not None:
        raise InvalidConfigError(
            f"task {task.task_id!r} plays a recorded trace, which cannot be written to a task file: choose another"
        )
    entry: dict[str, Any] = {
        **{name: getattr(task, name) for name in ("name", "difficulty", "description", "hardware", "slo_target_ms")},
        **{name: getattr(task, name) for name in ("arrival_rate_rps", "memory_hard_limit_gb", "episode_length")},
        **asdict(task.fleet),
        **_lengths_entry(task),
        "cost_budget_episode": task.cost_budget,
        "priority_mix": [each.share for each in task.classes],
        "burst_priority_mix": [each.burst_share for each in task.classes],
        "complexity_penalty": [each.complexity_penalty for each in task.classes],
        "active_actions": list(task.active_actions),
        "reward": asdict(task.reward),
        "grade": dict(task.grade),
        "adaptive_gap": task.adaptive_gap,
        "measured_difficulty": task.measured_difficulty,
        "hidden": task.hidden,
        "expected_baseline": None if task.expected_baseline is None else list(task.expected_baseline),
        "draft_acceptance": [
            {"from_step": stage.from_step, "rate": list(stage.rates)} for stage in task.draft_acceptance
        ]
        or None,
        "day": None if task.day is None else {**asdict(task.day), "relative_rates": list(task.day.relative_rates)},
        "random_load": None if task.random_load is None else asdict(task.random_load),
    }
    for name, each in zip(("interactive", "batch", "best_effort"), task.classes, strict=True):
        entry[f"slo_{name}_ms"] = each.slo_ms if math.isfinite(each.slo_ms) else None
    if task.burst is not None:
        entry |= {
            "burst_multiplier": task.burst.rate_rps / task.arrival_rate_rps,
            "burst_interval_steps": task.burst.interval_steps,
            "burst_duration_steps": task.burst.duration_steps,
            "burst_offset_steps": task.burst.offset_steps,
        }
    return entry


def _lengths_entry(task: TaskSpec) -> dict[str, Any]:
    outputs = [each.output for each in task.classes]
    entry: dict[str, Any] = {
        "output_mean_tokens": [math.exp(each.mu + 0.5 * each.sigma**2) for each in outputs],
        "output_cv": math.sqrt(math.expm1(outputs[0].sigma ** 2)),
        "output_max_tokens": outputs[0].high,
    }
    short, *others = sorted({each.prompt for each in task.classes}, key=lambda prompt: prompt.high)
    if others:  # two kinds of prompts; each class has one of them
        (long,) = others
        kinds = ["short" if each.prompt == short else "long" for each in task.classes]
        ends = {"short_prompt_min": short.low, "short_prompt_max": short.high}
        ends |= {"long_prompt_min": long.low, "long_prompt_max": long.high}
        return {**entry, "prompt_len_dist": "bimodal", "class_prompt": kinds, **ends}
    if short.kind == "uniform":
        ends = {"prompt_len_min": short.low, "prompt_len_max": short.high}
        return {**entry, "prompt_len_dist": "uniform", **ends}
    spread = {"prompt_len_mu": short.mu, "prompt_len_sigma": short.sigma}
    ends = {"prompt_len_clamp_min": short.low, "prompt_len_clamp_max": short.high}
    return {**entry, "prompt_len_dist": "lognormal", **spread, **ends}


def mean_lengths(task: TaskSpec) -> tuple[int, int]:
    """Mean prompt and output (tokens) of the task's requests."""
    prompts, outputs = zip(*((r.prompt_tokens, r.output_tokens) for r in _episodes(task)), strict=True)
    return round(float(np.concatenate(prompts).mean())), round(float(np.concatenate(outputs).mean()))


def offered_tps(task: TaskSpec) -> float:
    """Output tokens that the task's requests demand, per second of an episode."""
    asked = sum(float(each.output_tokens.sum()) for each in _episodes(task))
    return asked / (len(RATE_SEEDS) * task.episode_length)


def _episodes(task: TaskSpec) -> list[EpisodeRequests]:
    source = load_source(task, tables_of(task.hardware))
    return [source.requests(seed, task.episode_length) for seed in RATE_SEEDS]


def _shorter(lengths: LengthDist, factor: float) -> LengthDist:
    return replace(
        lengths, low=max(1.0, factor * lengths.low), high=factor * lengths.high, mu=lengths.mu + float(np.log(factor))
    )
