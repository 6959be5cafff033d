"""Forecast of a task's arrival rate: the shape of its day, without forecast error and surges."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferencegym.tasks import TaskSpec


def forecast_rps(task: TaskSpec, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Arrival rate (requests/s) that the forecast gives for these seconds of the episode; a day repeats."""
    if task.day is None:
        return np.full(np.shape(seconds), task.arrival_rate_rps)
    points = np.array([*task.day.relative_rates])
    at = np.mod(seconds, task.episode_length) / task.episode_length * (len(points) - 1)
    mean = float(np.mean(0.5 * (points[1:] + points[:-1])))
    rates: NDArray[np.float64] = task.arrival_rate_rps / mean * np.interp(at, np.arange(len(points)), points)
    return rates
