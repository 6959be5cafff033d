"""Briefing of a language model that plays a serving task: the same text for every interface.

It is made of what GET /tasks and GET /info of a server say, and of the :class:`Interface` through which the model
plays. It names, in backticks, only knobs, tools and keys that this interface has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_type_hints

from inferencegym.models import (
    ACTION_FIELDS,
    NAIVE_ACTION,
    OBSERVATION_FIELDS,
    PRIORITY_CLASSES,
    MetricsSnapshot,
)


@dataclass(frozen=True, slots=True)
class Interface:
    """How a model plays: what it can call, and what it gets back."""

    how: str
    """Sentences with ``{steps}``, the number of steps that are left, and the tools in backticks."""
    keys: tuple[str, ...]
    """Keys of what a step gives back, of :data:`KEYS`."""


KEYS: Final[Mapping[str, str]] = {
    "seconds": "seconds that were played (s)",
    "reward": "reward, summed over these seconds",
    "done": "whether the episode is over",
    "action_applied": "the knobs that were played",
    "fleet": "the knobs in force, and restarts: `restarting_replicas` have still to restart",
    "by_class": "by class of requests: `queue_requests` waiting now, `slo_violations` in these seconds",
    "grade_so_far": "`score` and `breakdown` of all seconds so far",
}
"""What a step may return in addition to the metrics and the observation."""
GIVEN: Final = ("seconds", "by_class", "grade_so_far")
"""Keys of :func:`env.log.over_steps` in addition to ``metrics``."""


def serving_briefing(
    task: Mapping[str, Any], rules: Sequence[str], interface: Interface, config: Mapping[str, Any] | None = None
) -> str:
    """Goal, task, objectives, length, reward, costs, rules, knobs, how to play and what a step gives back, in words.

    ``task`` is an entry of GET /tasks, ``rules`` those of GET /info, ``config`` the settings of the episode as POST
    /reset returns them (None: the task's own).
    """
    config = config or {}
    length, hold = config.get("episode_length", task["episode_length"]), config.get("hold", 1)
    steps = -(-length // hold)
    fleet = "1 replica" if task["n_replicas"] == 1 else f"{task['n_replicas']} replicas"
    return "\n".join(
        (
            "You control a fleet that serves a language model. The goal is a high score, from 0 to 1, of the whole "
            f"episode: {task['score']}.",
            f"Task {task['id']}, {task['name']}: {task['description']}",
            f"The fleet has {fleet} on {task['hardware']}. The episode lasts {length} seconds; a "
            f"step is {hold} of them.",
            "Objectives for the time to first token: " + "; ".join(map(_objective, task["objectives"])) + ".",
            _floods(task),
            _rewarded(task, config),
            f"A card of a replica is out of memory above {task['oom_above_gb']:g} GB.",
            f"Restarts: restart_s is {task['restart_s']:g} s, load_gb_per_s {task['load_gb_per_s']:g} GB/s.",
            *(rule for rule in rules if "max_replicas" in task or "max_replicas" not in rule),
            "Knobs you set:",
            *(_knob(name) for name in task["active_actions"]),
            *_replicas(task),
            interface.how.format(steps=steps),
            "What a step gives back:",
            *(f"- `{key}`: {KEYS[key]}" for key in interface.keys),
            "- `metrics`: over the seconds of the step (means; sums of costs and counts; the worst p99 and memory)",
            *(f"  - `{name}`: {meaning}" for name, meaning in METRIC_MEANINGS.items()),
            "The observation, after its last second:",
            *_observed(),
        )
    )


METRIC_MEANINGS: Final[Mapping[str, str]] = {
    name: kind.__metadata__[0].description
    for name, kind in get_type_hints(MetricsSnapshot, include_extras=True).items()
}


def _rewarded(task: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    paid = config.get("reward", "plan")
    if paid == "score":
        return "Rewarded each second: what the second adds to the score; the rewards of the episode sum to it."
    if paid == "grade":
        return "Rewarded each second: what the second adds to the grade; the mean over the episode is the score."
    own = {name: config.get(name, weight) for name, weight in task["reward_weights"].items()}
    return (
        "Rewarded each second: alpha * throughput - beta * latency - gamma * violated objectives - delta * cost, "
        f"every term in [0, 1], with the weights {own}."
    )


def _knob(name: str) -> str:
    f = ACTION_FIELDS[name]
    first = json.dumps(NAIVE_ACTION.to_dict()[name])
    return f"- `{name}`: {f.description}; {f.allowed()} ({f.unit}); it starts at {first}"


def _observed() -> list[str]:
    """The observation's twelve fields."""
    shares = f"- `priority_distribution`: shares of the last 50 seconds' arrivals: {', '.join(PRIORITY_CLASSES)}"
    plain = [f for name, f in OBSERVATION_FIELDS.items() if not name.startswith("priority_")]
    return [*(f"- `{f.name}`: {f.description} ({f.unit})" for f in plain), shares]


def _replicas(task: Mapping[str, Any]) -> list[str]:
    """The sixth knob of a task that scales, and what a new replica costs."""
    if "max_replicas" not in task:
        return []
    return [
        f"- `replicas`: requested number of replicas; an integer from 1 to {task['max_replicas']}; a new one starts "
        f"for {task['start_s']:g} seconds and loads its weights; it starts at {task['n_replicas']}"
    ]


def _objective(one: Mapping[str, Any]) -> str:
    wanted = "none" if one["ttft_ms"] is None else f"{one['ttft_ms']:g} ms"
    return f"{one['class']} ({one['share']:.0%} of the requests): {wanted}"


def _floods(task: Mapping[str, Any]) -> str:
    floods = task["floods"]
    if floods is None:
        return f"About {task['arrival_rate_rps']:g} requests arrive each second."
    return (
        f"About {task['arrival_rate_rps']:g} requests arrive each second, in floods {floods['arrival_rate_rps']:g}. "
        f"The first flood comes after {floods['first_at_s']} seconds and lasts {floods['lasts_s']}; there is one every "
        f"{floods['every_s']}."
    )
