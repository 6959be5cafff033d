"""Briefing of a language model that plays a serving task, made of what GET /tasks and GET /info of a server say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from inferencegym.client.http import InferenceGymHTTP
from inferencegym.models import ACTION_FIELDS, OBSERVATION_FIELDS


@lru_cache(maxsize=8)
def tasks_and_rules(base_url: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[str]]:
    """Tasks and rules of a server, read once per process."""
    with InferenceGymHTTP(base_url) as client:
        return client.get("/tasks?all=true")["tasks"], client.get("/info")["rules"]


def serving_briefing(task: Mapping[str, Any], rules: Sequence[str], config: Mapping[str, Any] | None = None) -> str:
    """Goal, task, objectives, length, reward, costs, rules, knobs and observations of an episode, in words.

    ``task`` is an entry of GET /tasks, ``rules`` those of GET /info, ``config`` the settings of the episode as POST
    /reset returns them (None: the task's own).
    """
    config = config or {}
    length, weights = config.get("episode_length", task["episode_length"]), config.get("reward", "plan")
    if weights == "plan":
        own = {name: config.get(name, weight) for name, weight in task["reward_weights"].items()}
        rewarded = (
            "Rewarded each second: alpha * throughput - beta * latency - gamma * violated objectives - delta * cost, "
            f"every term in [0, 1], with the weights {own}."
        )
    else:
        rewarded = "Rewarded each second: what the second adds to the grade; the mean over the episode is the score."
    return "\n".join(
        (
            f"You control a fleet that serves a language model. The goal is a high score: {task['score']}.",
            f"Task {task['id']}, {task['name']}: {task['description']}",
            f"The fleet has {task['n_replicas']} replicas on {task['hardware']}. The episode lasts {length} seconds; a "
            f"step is {config.get('hold', 1)} of them.",
            "Objectives for the time to first token: " + "; ".join(map(_objective, task["objectives"])) + ".",
            _floods(task),
            rewarded,
            f"A card of a replica is out of memory above {task['oom_above_gb']:g} GB.",
            f"Restarts: restart_s is {task['restart_s']:g} s, load_gb_per_s {task['load_gb_per_s']:g} GB/s.",
            *rules,
            "Knobs you set:",
            *(
                f"- {f.name}: {f.description}; {f.allowed()} ({f.unit})"
                for f in (ACTION_FIELDS[name] for name in task["active_actions"])
            ),
            *_replicas(task),
            "What you see:",
            *(f"- {f.name}: {f.description} ({f.unit})" for f in OBSERVATION_FIELDS.values()),
        )
    )


def _replicas(task: Mapping[str, Any]) -> list[str]:
    """The sixth knob of a task that scales, and what a new replica costs."""
    if "max_replicas" not in task:
        return []
    return [
        f"- replicas: requested number of replicas; an integer from 1 to {task['max_replicas']}; a new one starts for "
        f"{task['start_s']:g} seconds and loads its weights"
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
