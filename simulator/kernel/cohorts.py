"""Requests in flight by step of admission: how many still run, and the tokens that they write.

``length_integrals`` holds four numbers for each edge of the grid of output lengths: the integral of the survival
function S, the integral of y*S, and their slopes. Neighbouring cohorts meet at edges; ``edge_at`` and ``edge_part``
locate each edge on the grid.
"""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from simulator.kernel.records import Params, Scratch, State


def requests_in_flight(p: Params, s: State, b: int) -> float:
    """Requests in flight of all classes."""
    total = 0.0
    for c in range(p.n_classes):
        total += s.in_flight[b, c]
    return total


def locate_edges(p: Params, s: State, x: Scratch, b: int, t: int, gain: float) -> None:
    """Locate the edges of all cohorts on the grid after ``gain`` more tokens.

    Progress never falls, so edges beyond the grid come first. Handling them separately leaves a loop without branches,
    which compiles to vector instructions.
    """
    first = s.first_running[b, 0]
    for c in range(1, p.n_classes):
        first = min(first, s.first_running[b, c])
    end = s.progress[b, t] + gain
    cells_per_token = p.cells_per_token
    while first <= t and (end - s.progress[b, first]) * cells_per_token >= p.grid_cells:
        x.cohorts.edge_at[first] = 4 * p.grid_cells
        x.cohorts.edge_part[first] = 0.0
        first += 1
    for k in range(first, t + 1):
        cells = (end - s.progress[b, k]) * cells_per_token
        i = cython.cast(cython.int, cells)
        x.cohorts.edge_at[k] = 4 * i
        x.cohorts.edge_part[k] = cells - i


def find_survivors(p: Params, s: State, x: Scratch, b: int, t: int, gain: float) -> None:
    """Count the requests that still run after ``gain`` more tokens, and sum their positions."""
    locate_edges(p, s, x, b, t, gain)
    for c in range(p.n_classes):
        find_class_survivors(p, s, x, b, t, c)


def find_class_survivors(p: Params, s: State, x: Scratch, b: int, t: int, c: int) -> None:
    """Survivors of one class.

    Neighbouring cohorts share an edge, which is looked up once. Requests and positions lie side by side in
    ``length_integrals`` and ``survivors``, so that a compiler computes both at once: a step spends most of its time
    here.
    """
    requests = 0.0
    positions = 0.0
    k = s.first_running[b, c]
    at = x.cohorts.edge_at[k]
    u = x.cohorts.edge_part[k]
    older = p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]
    older_pos = p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]
    while k < t:
        at = x.cohorts.edge_at[k + 1]
        u = x.cohorts.edge_part[k + 1]
        younger = p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]
        younger_pos = p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]
        density = s.density[b, c, k]
        requests += density * (older - younger)
        positions += density * (older_pos - younger_pos)
        older = younger
        older_pos = younger_pos
        k += 1
    x.cohorts.survivors[c, 0] = requests
    x.cohorts.survivors[c, 1] = positions


def staying_of_admissions(p: Params, c: int, gain: float) -> tuple[float, float]:
    """Of requests admitted evenly over a step of ``gain`` tokens: share that runs at its end, and mean position.

    Positions at the end are uniform in 0..``gain``, so the share is the mean of S over them. In the mean position,
    finished requests count as 0.
    """
    cells = gain * p.cells_per_token
    i = cython.cast(cython.Py_ssize_t, cells) if cells < p.grid_cells else p.grid_cells
    u = cells - i
    stay = (p.length_integrals[c, 4 * i] + u * p.length_integrals[c, 4 * i + 2]) / gain
    return stay, (p.length_integrals[c, 4 * i + 1] + u * p.length_integrals[c, 4 * i + 3]) / gain


def measure_cohort(
    p: Params, s: State, x: Scratch, b: int, c: int, k: int, end: int, progress: float
) -> tuple[float, float, float]:
    """Running part of the cohort admitted in step ``k``, per unit of its density, at the edge ``end`` of a step.

    Edges must be located for that time. Returns running requests, their outputs so far, and the tokens written by all
    of the cohort, finished requests included.
    """
    at = x.cohorts.edge_at[k]
    u = x.cohorts.edge_part[k]
    requests = p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]
    positions = p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]
    written = written_up_to(p, x, c, k, progress - s.progress[b, k])
    if k + 1 < end:
        at = x.cohorts.edge_at[k + 1]
        u = x.cohorts.edge_part[k + 1]
        requests -= p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]
        positions -= p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]
        written -= written_up_to(p, x, c, k + 1, progress - s.progress[b, k + 1])
    return requests, positions, written - positions


def written_up_to(p: Params, x: Scratch, c: int, k: int, y: float) -> float:
    """``y`` times the integral of S up to ``y``, where edge ``k`` lies, and the bend of the integral of y*S."""
    at = x.cohorts.edge_at[k]
    u = x.cohorts.edge_part[k]
    part = p.length_integrals[c, at + 2]
    # S is constant within a cell, so the integral of y*S is a parabola there; the table has a straight line.
    bend = 0.5 / p.cells_per_token * u * (1.0 - u) * part
    return y * (p.length_integrals[c, at] + u * part) + bend


def advance_cohorts(p: Params, s: State, x: Scratch, b: int, t: int, gain: float) -> float:
    """Advance all cohorts by the step; the admitted requests become a new cohort. Returns the tokens written."""
    progress = s.progress[b, t] + gain
    s.progress[b, t + 1] = progress
    written = 0.0
    for c in range(p.n_classes):
        s.density[b, c, t] = x.batch.admitted[c] / gain
        s.in_flight[b, c] = x.batch.end_requests[c]
        s.prompts_in_flight[b, c] = x.batch.end_prompts[c]
        s.positions_in_flight[b, c] = x.batch.end_positions[c]
        before = s.written_tokens[b, c]
        s.written_tokens[b, c] = tokens_so_far(p, s, x, b, t, c)
        written += max(s.written_tokens[b, c] - before, 0.0)
    return written


def tokens_so_far(p: Params, s: State, x: Scratch, b: int, t: int, c: int) -> float:
    """Tokens that a class's cohorts have written by the end of the step, never more than their outputs.

    A request that could have gained y tokens has written, on average, the integral of S up to y, because it may have
    ended earlier. Over the positions of a cohort that sums to y times this integral minus the integral of y*S.
    (Counting the requests in flight at both ends of a step is not enough: many may come and go within it.)
    """
    progress = s.progress[b, t + 1]
    total = 0.0
    before = 0.0
    for k in range(s.first_running[b, c], t + 1):
        density = s.density[b, c, k]
        # one cohort begins at this edge, the one before it ends here
        total += (density - before) * written_up_to(p, x, c, k, progress - s.progress[b, k])
        before = density
    return total - x.batch.end_positions[c]  # the integrals of y*S, summed the same way


def retire_cohorts(p: Params, s: State, b: int, t: int) -> None:
    """Drop cohorts whose requests have all finished; each of these requests wrote a mean output."""
    progress = s.progress[b, t + 1]
    for c in range(p.n_classes):
        mean_output = p.length_integrals[c, 4 * p.grid_cells]
        k = s.first_running[b, c]
        while k < t and progress - s.progress[b, k + 1] > p.longest_output[c]:
            ended = s.density[b, c, k] * (s.progress[b, k + 1] - s.progress[b, k])
            s.written_tokens[b, c] -= ended * mean_output
            k += 1
        s.first_running[b, c] = k
