"""The traffic controller's server, reward and score: numbers to check by hand, laws for every task."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.traffic.model import TrafficParams, TrafficServer, allowed_rates, incoming_rates, initial, step
from env.traffic.score import EpisodeTotals, final_score, step_reward
from env.traffic.tasks import GradeSpec, TrafficConfig, get_traffic_task, list_traffic_tasks
from inferencegym.traffic import ACCEPT_SHARES

PARAMS = TrafficParams.from_config(TrafficConfig())
EASY, MEDIUM, HARD = (get_traffic_task(f"task_{level}").grade for level in ("easy", "medium", "hard"))


def serve(queue: int, allowed_rps: float, params: TrafficParams = PARAMS) -> TrafficServer:
    return step(params, np.array([queue]), np.array([allowed_rps]))


def totals(
    steps: int, latency_ms: float = 100.0, crashed: bool = False, served: float = 1.0, short: int = 0
) -> EpisodeTotals:
    """Totals of one episode with this mean latency and share of requests served."""
    return EpisodeTotals(
        steps=np.array([steps]),
        crashed=np.array([crashed]),
        latency_ms=np.array([steps * latency_ms]),
        allowed=np.array([served * 1000.0]),
        incoming=np.array([1000.0]),
        short_queue_steps=np.array([short]),
    )


def score(grade: GradeSpec, episode: EpisodeTotals, max_steps: int) -> float:
    return float(final_score(grade, episode, max_steps)[0])


# ---------------------------------------------------------------- one step


def test_the_first_state_has_all_of_the_first_rate_on_an_empty_queue() -> None:
    server = initial(PARAMS, np.array([40.0]))
    assert (server.cpu_share[0], server.memory_share[0], server.latency_ms[0]) == (0.54, 0.36, 58.0)
    assert (server.queue_requests[0], server.crashed[0]) == (0, False)


def test_above_capacity_the_queue_grows_by_the_excess_and_latency_by_the_cube_of_the_load() -> None:
    server = serve(queue=10, allowed_rps=120.0)
    assert server.queue_requests[0] == 30
    assert server.latency_ms[0] == round(50 * (1 + 1.2**3) + 0.5 * 30, 2) == 151.4
    assert server.memory_share[0] == 0.68
    assert not server.crashed[0]


def test_below_capacity_three_tenths_of_the_spare_drain_the_queue() -> None:
    server = serve(queue=100, allowed_rps=50.0)
    assert server.queue_requests[0] == 85
    assert server.latency_ms[0] == 50 * 1.25 + 42.5


def test_a_fraction_of_a_request_is_not_counted_in_the_queue() -> None:
    assert serve(queue=100, allowed_rps=49.0).queue_requests[0] == 84  # 100 - 15.3


def test_the_queue_stays_between_empty_and_its_limit() -> None:
    assert serve(queue=3, allowed_rps=10.0).queue_requests[0] == 0
    assert serve(queue=495, allowed_rps=120.0).queue_requests[0] == 500


def test_the_server_crashes_beyond_its_load_ratio_and_not_at_it() -> None:
    assert not serve(queue=0, allowed_rps=130.0).crashed[0]
    assert serve(queue=0, allowed_rps=130.1).crashed[0]


def test_usage_never_exceeds_one() -> None:
    server = serve(queue=0, allowed_rps=900.0)
    assert (server.cpu_share[0], server.memory_share[0]) == (1.0, 1.0)


def test_a_throttled_rate_is_free_of_binary_rounding() -> None:
    assert allowed_rates(np.array([67.0]), np.array([0.7]))[0] == 46.9


@given(queue=st.integers(0, 499), extra=st.integers(1, 500), allowed=st.floats(0, 400), capacity=st.floats(1, 1000))
def test_a_longer_queue_never_gives_a_shorter_one_nor_a_lower_latency(
    queue: int, extra: int, allowed: float, capacity: float
) -> None:
    params = TrafficParams.from_config(TrafficConfig(server_capacity=capacity, max_queue=1000))
    short, long = serve(queue, allowed, params), serve(queue + extra, allowed, params)
    assert long.queue_requests[0] >= short.queue_requests[0]
    assert long.latency_ms[0] >= short.latency_ms[0]
    assert long.crashed[0] == short.crashed[0]


# ---------------------------------------------------------------- traffic


@pytest.mark.parametrize(
    ("task_id", "expected"),
    [
        ("task_easy", [40.0] * 10 + [160.0] * 5 + [40.0] * 16),
        ("task_medium", ([50.0] * 5 + [150.0] * 3 + [50.0] * 2) * 3 + [50.0] * 11),
        ("task_hard", [60.0 + 7.0 * i for i in range(20)] + [200.0] * 20 + [80.0] * 11),
    ],
)
def test_the_three_published_patterns_come_as_described(task_id: str, expected: list[float]) -> None:
    task = get_traffic_task(task_id)
    rates = incoming_rates(task.pattern, task.episode_length, 1.0)
    assert task.episode_length == len(expected) - 1  # one more rate, for the second after the end
    assert rates.tolist() == expected


def test_traffic_scale_multiplies_every_rate() -> None:
    task = get_traffic_task("task_hard")
    once, twice = (incoming_rates(task.pattern, task.episode_length, scale) for scale in (1.0, 2.0))
    assert (twice == 2 * once).all()


# ---------------------------------------------------------------- reward


def reward(accept_share: float, queue: int, latency_ms: float, crashed: bool = False) -> float:
    server = TrafficServer(
        queue_requests=np.array([queue]),
        latency_ms=np.array([latency_ms]),
        cpu_share=np.array([0.5]),
        memory_share=np.array([0.5]),
        crashed=np.array([crashed]),
    )
    return float(step_reward(PARAMS, np.array([accept_share]), server)[0])


def test_reward_is_the_accepted_share_while_latency_is_low_and_the_queue_empty() -> None:
    assert reward(0.7, queue=0, latency_ms=200.0) == 0.7


def test_reward_loses_half_per_800_ms_beyond_200_and_three_tenths_for_a_full_queue() -> None:
    assert reward(1.0, queue=250, latency_ms=600.0) == pytest.approx(1.0 - 0.25 - 0.15)


def test_a_crash_is_minus_ten_whatever_else_happened() -> None:
    assert reward(1.0, queue=0, latency_ms=0.0, crashed=True) == -10.0


# ---------------------------------------------------------------- scores


def test_easy_scores_one_below_300_ms_and_a_half_from_there_on() -> None:
    assert score(EASY, totals(30, latency_ms=299.9), 30) == 1.0
    assert score(EASY, totals(30, latency_ms=300.0), 30) == 0.5


def test_easy_scores_nothing_after_a_crash() -> None:
    assert score(EASY, totals(30, crashed=True), 30) == 0.0


@pytest.mark.parametrize(("latency_ms", "expected"), [(200.0, 1.0), (400.0, 0.75), (600.0, 0.5), (5000.0, 0.5)])
def test_medium_falls_in_a_straight_line_with_the_mean_latency(latency_ms: float, expected: float) -> None:
    assert score(MEDIUM, totals(40, latency_ms), 40) == expected


def test_medium_gives_an_early_crash_only_the_steps_survived() -> None:
    assert score(MEDIUM, totals(6, crashed=True), 40) == 5 / 40


def test_hard_weighs_throughput_seven_to_three_against_short_queues() -> None:
    assert score(HARD, totals(50, served=0.5, short=25), 50) == pytest.approx(0.7 * 0.5 + 0.3 * 0.5)


def test_hard_after_a_crash_is_cut_to_three_tenths_of_the_product() -> None:
    episode = totals(20, crashed=True, served=0.8, short=10)
    assert score(HARD, episode, 50) == pytest.approx(0.3 * 0.8 * 0.5 * 19 / 50)


@given(
    steps=st.integers(1, 50),
    latency=st.floats(0, 2000),
    served=st.floats(0, 1),
    short=st.floats(0, 1),
    crashed=st.booleans(),
    better_latency=st.floats(0, 1),
)
def test_scores_stay_within_bounds_and_never_fall_when_latency_or_throughput_gets_better(
    steps: int, latency: float, served: float, short: float, crashed: bool, better_latency: float
) -> None:
    for task in list_traffic_tasks():
        worse = totals(steps, latency, crashed, served, int(short * steps))
        better = totals(steps, latency * better_latency, crashed, min(1.0, served + 0.1), int(short * steps))
        low, high = score(task.grade, worse, 50), score(task.grade, better, 50)
        assert 0.0 <= low <= high <= 1.0


def test_the_four_actions_let_through_what_the_document_says() -> None:
    assert ACCEPT_SHARES == {"allow_all": 1.0, "throttle_70": 0.7, "throttle_40": 0.4, "drop_aggressive": 0.2}
