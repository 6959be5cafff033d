"""Scores of your own policies, data sets of episodes (:mod:`agents.evaluate`, :mod:`agents.integrations.minari`)."""

from agents.evaluate import evaluate, gym_scores, interval, paired
from agents.integrations.minari import record

__all__ = ["evaluate", "gym_scores", "interval", "paired", "record"]
