"""One step of a serving fleet, row by row: the only implementation of the serving dynamics.

This is plain Python that the build compiles to C, together with the modules of this folder that it imports (types:
``step.pxd``). A row is one fleet; rows are independent, so a row of a batch equals the same episode alone, whatever the
batch size or the number of threads.

The model is a fluid queue structured by age, with stationary queueing formulas for waits shorter than a step:

- *Waiting.* Requests queue by class and step of arrival: highest class first, first come first served within a class.
  Waits are distances between the cumulative curves of arrivals and admissions.
- *In flight.* All running requests gain the same number of tokens in a step, the ``gain``; ``progress`` is its sum
  since the episode began. Requests admitted in step ``k`` are a cohort: ``density[c, k]`` per token of progress. If S
  is the survival function of the class's output length and F its integral,
  ``density * (F(y - progress[k]) - F(y - progress[k + 1]))`` requests still run at progress ``y``. This is exact for
  any distribution of lengths, without numerical diffusion, and admitted == completed + in flight holds up to rounding.
- *Pace.* The gain depends on the decode iteration of the mean batch, which depends on the gain: the secant method finds
  this fixed point (``pace.py``).
- *Preemption.* Requests that the KV pool cannot hold leave their cohort, lowest class and youngest first, wait, and
  resume in the cohort that has written as many tokens (``memory.py``).
- *TTFT.* It is the wait in the queue, a fixed part, and a log-normal part whose mean and variance sum up prefill, the
  iteration under way, prompts ahead (M/G/1 with priorities) and random waits for a slot (``first_token.py``).

All functions share their arguments: ``p`` constants, ``load`` offered load, ``knobs`` action, ``s`` state, ``x``
scratch of the step (one record per topic, written only by its module), ``m`` metrics, ``b`` the row, ``t`` the step,
``c`` a class (0 is served first). Shapes and units: :mod:`simulator.kernel.arrays`. "Chosen" after a constant means
that no measurement stands behind it.
"""

from __future__ import annotations

from typing import Any

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from simulator.kernel.accounting import report, report_flows
    from simulator.kernel.cohorts import advance_cohorts, retire_cohorts
    from simulator.kernel.fleet import keep_draining, roll_out, scale
    from simulator.kernel.memory import (
        allocate_memory,
        cache_prefixes,
        churned_requests,
        kv_occupancy,
        preempt,
        put_back,
    )
    from simulator.kernel.numerics import EPS_REQUESTS
    from simulator.kernel.pace import keep_pace, solve
    from simulator.kernel.prefill import limit_prefill
    from simulator.kernel.queues import leave_queues, measure_heads, receive_arrivals, reject_overflow
    from simulator.kernel.records import Knobs, Load, Metrics, State
    from simulator.kernel.records import Params as Params
    from simulator.kernel.records import Scratch as Scratch
    from simulator.kernel.ttft import measure_ttft


class ServingKernel:
    """Steps rows of a fleet batch in place; the arrays are those of :class:`simulator.kernel.serving.ServingFleet`.

    Arrays are C-contiguous, float64 or int64 unless :mod:`simulator.kernel.arrays` says otherwise. ``sizes`` are the
    lengths of their axes. Several threads may step rows of one kernel at once, each with its own scratch; ``idle``
    holds the scratch records that no thread is using; kernels with equal ``sizes`` may share it.
    """

    params: Params
    load: Load
    knobs: Knobs
    state: State
    metrics: Metrics
    sizes: Any
    idle: list[Scratch]

    def __init__(
        self, params: Params, load: Any, knobs: Any, state: Any, metrics: Any, sizes: Any, idle: list[Scratch]
    ) -> None:
        self.params = params
        self.load = Load(load)
        self.knobs = Knobs(knobs)
        self.state = State(state)
        self.metrics = Metrics(metrics)
        self.sizes = sizes
        self.idle = idle

    def step(self, lo: int, hi: int) -> None:
        """Advance rows ``lo`` (included) to ``hi`` (excluded) by one step."""
        x = self._take_scratch()
        with cython.nogil:
            for b in range(lo, hi):
                step_row(self.params, self.load, self.knobs, self.state, x, self.metrics, b)
        self.idle.append(x)

    def _take_scratch(self) -> Scratch:
        try:
            return self.idle.pop()
        except IndexError:
            return Scratch(self.sizes)


def step_row(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int) -> None:
    """Advance one row by one step."""
    t = s.time[b]
    scale(p, knobs, s, x, b, t)
    roll_out(p, knobs, s, x, b, t)
    receive_arrivals(p, load, s, b, t)
    allocate_memory(p, knobs, s, x, m, b)
    preempted = preempt(p, s, x, b, t)
    measure_heads(p, load, knobs, s, x, b, t)
    limit_prefill(p, load, knobs, s, x, b, t)
    gain = solve(p, knobs, s, x, m, b, t)

    # The solution becomes the state.
    report_flows(p, s, x, m, b)
    keep_pace(p, s, x, b, gain)
    leave_queues(p, s, x, b)
    written = advance_cohorts(p, s, x, b, t, gain)
    put_back(p, s, x, b, t)
    retire_cohorts(p, s, b, t)
    keep_draining(p, s, x, b)
    cache_prefixes(p, s, x, b, written)

    m.tokens_per_sec[b] = written / p.dt_s if written > EPS_REQUESTS else 0.0
    m.kv_occupancy[b] = kv_occupancy(p, x)
    m.eviction_events[b] = preempted + churned_requests(p, x)
    missed, judged = measure_ttft(p, load, knobs, s, x, m, b, t)
    reject_overflow(p, s, m, b, t)
    report(p, load, knobs, s, x, m, b, t, missed, judged)
    s.time[b] = t + 1
