"""Kinds of grades of the serving family, a module each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from grader.kinds import autoscaling, four_term, latency_memory, objectives_memory, throughput
from grader.rule import GradeRule

RULES: Final[Mapping[str, GradeRule]] = {
    "throughput": throughput.RULE,
    "latency_memory": latency_memory.RULE,
    "objectives_memory": objectives_memory.RULE,
    "four_term": four_term.RULE,
    "autoscaling": autoscaling.RULE,
}
"""The rule of each ``grade.kind`` that a task may name."""
