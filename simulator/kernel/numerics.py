"""Thresholds below which amounts count as zero, and tails of distributions."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from math import erfc, log

EPS_REQUESTS = 1e-9
"""Requests below which an amount counts as zero: rounding errors of a step's arrivals or of free room."""
EPS_FLOW = 1e-12
"""Requests below which a walk along the queue stops; far below :data:`EPS_REQUESTS`."""
EPS = 1e-9
"""Smallest divisor in a rate, mean or share, in any unit."""
SQRT_HALF = 0.7071067811865476
SQRT_2 = 1.4142135623730951
LN_2 = 0.6931471805599453


def normal_tail(z: float) -> float:
    """P(Z > z) of a standard normal Z."""
    return 0.5 * erfc(z * SQRT_HALF)


def lognormal_tail(median_ms: float, sigma: float, limit_ms: float) -> float:
    """P(Y > limit) of a log-normal Y with this median and standard deviation ``sigma`` of its logarithm."""
    if limit_ms <= 0.0:
        return 1.0
    return 0.5 * erfc(log(limit_ms / median_ms) / (sigma * SQRT_2))
