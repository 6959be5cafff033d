"""Draft length on a real engine whose acceptance of drafts changes, set twice a second; one policy is learned.

    python -m benchmarks.live.drafts                    measures, learns, plays; writes results/live_drafts.json and .md
    python -m benchmarks.live.drafts --place clients    the same with a constant number of clients
    python -m benchmarks.live.drafts --prepare FOLDER   measures and learns only; --prepared FOLDER plays what it wrote
    python -m benchmarks.live.drafts --stand-in         plays the discrete-event reference of the table, printed only

vLLM for CPU serves a small random model (`scripts/install_engine.sh` installs the engine, --venv says where) and
accepts each draft with the probability that its request names (live/engines/vllm_plugin/synthetic_acceptance.py). Its
table is measured with `inferencegym measure`. In the simulator on that table vLLM's own table by batch size is chosen,
and PPO learns on drawn traffic (extra `rl`). Then every policy plays the same requests, in an order drawn for each
repeat. Before each episode the engine answers the same four requests without drafts: the yardstick of the machine's
pace. With the defaults it takes about an hour; playing alone takes 40 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from scipy.optimize import nnls

from agents.evaluate import interval
from agents.policies.capacity import CapacityPlanner, Setting
from agents.policies.rollouts import Network
from agents.rollouts_ppo import EpisodeRows, keep_best, make_ppo
from agents.seeds import VALIDATION_SEEDS, held_out_seeds
from benchmarks.live.rollouts_policies import less
from benchmarks.report import RESULTS, as_json, store, table
from inferencegym.errors import RemoteError
from inferencegym.files import write_text
from inferencegym.models import SPEC_LENGTHS
from inferencegym.seeds import SeedSeries
from inferencegym.tasks import get_task
from inferencegym.vector_env import BoolArray, Float32Array, FloatArray
from live.driver import EngineRequest, RequestTiming
from live.engines.choose import engine_at
from live.engines.engine import Engine, Orders, Reading
from live.engines.random_model import ModelShape, serve_random_model
from live.engines.simulated import SimulatedEngine
from live.engines.vllm import VllmEngine
from live.measure import MeasureSettings, measure_engine
from live.scaling import drafts_as_measured, measure_throughput, scaled_lengths
from simulator.hardware.engine_times import EngineTimes
from simulator.hardware.sources import engine_of, source_of
from simulator.hardware.tables import ServingTables, load_tables
from simulator.offline.table import build_table

OWN_TABLE: Final = max(SPEC_LENGTHS) + 1
"""The engine's largest draft length, at which the scheduler class leaves the choice to vLLM's own table."""
TOKEN_BUDGET: Final = 2048
RETRY_DECISIONS: Final = 8
"""Decisions without drafts after which TurboSpec's rule drafts once, to see the acceptance."""
N_ENVS: Final = 32
N_VALIDATION: Final = 96
REWARD_SCALE, YOUNG_S, SLOW_S = 0.3, 0.1, 0.1
TABLE_FILE, POLICY_FILE, CHOSEN_FILE = "engine.parquet", "policy.npz", "chosen.json"


# ---------------------------------------------------------------- traffic


class Stage(NamedTuple):
    """A stretch of traffic: Poisson arrivals whose drafts are accepted with this probability; its objectives.

    With ``clients`` the workload is a closed loop of so many clients, in every stage: each sends its next request when
    its last is answered, and ``seconds`` times ``rate_rps`` is the number of requests of the stage.
    """

    seconds: float
    rate_rps: float
    acceptance: float
    ttft_s: float = 1.0
    tpot_s: float = 0.08
    clients: int | None = None


Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Place:
    """An engine, the traffic that suits it, and how often its draft length is set.

    Acceptance is .95 (copied text) and .3 (stories). ``calm_rps``, ``flood_rps`` (requests per second), ``calm_s`` and
    ``other_s`` are ranges of the traffic to learn from; with ``clients``, a range, it is closed loops of so many
    clients, and rates are per client. Its engines take ``fixed`` times as long for an iteration as the table says, and
    ``rows`` times as long for sequences and tokens. ``drain_s`` is the longest time after the last arrival; what is
    still unanswered then counts with the time so far. ``bursts`` are batch sizes at which iterations are measured with
    drafts too. After the first draw the best ``finalists`` constants play on. ``max_num_seqs`` is ``slots``, and
    ``kv_blocks`` None leaves the KV pool to vLLM.
    """

    results: str
    shape: ModelShape
    slots: int
    kv_blocks: int | None
    hold_s: float
    drain_s: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    workloads: Mapping[str, tuple[Stage, ...]]
    calm_rps: Range
    flood_rps: Range
    calm_s: Range
    other_s: Range
    fixed: Range
    rows: Range
    bursts: tuple[int, ...] = ()
    clients: tuple[int, int] | None = None
    finalists: int = len(SPEC_LENGTHS)
    eager: bool = True
    options: tuple[str, ...] = ()


CPU: Final = Place(
    "live_drafts", ModelShape(), slots=64, kv_blocks=201, hold_s=0.5, drain_s=10.0, prompt=(16, 48), output=(32, 96),
    workloads={
        "flood": (Stage(9.0, 2.0, 0.95, tpot_s=0.016), Stage(4.0, 9.0, 0.3), Stage(9.0, 2.0, 0.95, tpot_s=0.016)),
        "content": tuple(Stage(5.5, 3.5, acceptance, tpot_s=0.03) for acceptance in (0.95, 0.3, 0.95)),
    },
    calm_rps=(0.6, 6.0), flood_rps=(5.0, 12.0), calm_s=(3.0, 12.0), other_s=(3.0, 8.0),
    fixed=(0.8, 1.5), rows=(0.4, 1.6),
)  # fmt: skip
"""vLLM for CPU with a model of 107 million parameters."""
CLIENTS: Final = replace(
    CPU, results="live_drafts_clients", drain_s=60.0, clients=(2, 8), finalists=2, bursts=(1, 2, 4, 8, 16),
    workloads={
        "clients": tuple(
            Stage(seconds, 32.0 / seconds, acceptance, tpot_s=tpot_s, clients=3)
            for seconds, acceptance, tpot_s in 2 * ((5.0, 0.95, 0.009), (13.0, 0.3, 0.0235))
        ),
    },
    calm_rps=(0.5, 1.5), flood_rps=(0.5, 1.5), calm_s=(4.0, 14.0), other_s=(4.0, 14.0),
)  # fmt: skip
"""The same engine; a constant number of clients keeps the batch as large while the content changes."""
GRAPH_ROWS: Final = [1, 4, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640]
GPU: Final = Place(
    "live_drafts_gpu", ModelShape(32, 4096, 14336, 32, 8, 128_256, 4096), slots=128, kv_blocks=None, hold_s=0.15,
    drain_s=4.0, prompt=(32, 96), output=(64, 192),
    workloads={"content": (Stage(1.7, 68.0, 0.95, tpot_s=0.0019), Stage(1.7, 68.0, 0.3, tpot_s=0.0095))},
    calm_rps=(8.0, 80.0), flood_rps=(50.0, 130.0), calm_s=(0.6, 2.4), other_s=(0.6, 2.0), fixed=(0.85, 1.3),
    rows=(0.5, 1.5), bursts=(1, 4, 16, 32, 64), finalists=2, eager=False,
    options=(
        "--kv-cache-memory-bytes", "20000000000", "--disable-uvicorn-access-log",
        "--compilation-config", json.dumps({"cudagraph_capture_sizes": GRAPH_ROWS}),
    ),
)  # fmt: skip
"""vLLM on one GPU with the shape of Llama-3.1-8B, compiled and with CUDA graphs."""
PLACES: Final = {"cpu": CPU, "clients": CLIENTS, "gpu": GPU}
HERE = CPU
"""The place that is played; :func:`main` sets it."""
HEADINGS: Final = {
    "flood": "Calm, surge, calm",
    "content": "The content changes, the load does not",
    "clients": "The content changes, the batch does not",
}


def drawn_requests(stages: Sequence[Stage], rng: random.Random) -> list[tuple[EngineRequest, Stage]]:
    """Requests in order of arrival, each with its stage."""
    found, begin_s = [], 0.0
    for stage in stages:
        if stage.clients is not None:
            n = round(stage.seconds * stage.rate_rps)
            found += [(drawn_request(0.0, stage, rng), stage) for _ in range(n)]
            continue
        at_s = begin_s + rng.expovariate(stage.rate_rps)
        begin_s += stage.seconds
        while at_s < begin_s:
            found.append((drawn_request(at_s, stage, rng), stage))
            at_s += rng.expovariate(stage.rate_rps)
    return found


def drawn_request(at_s: float, stage: Stage, rng: random.Random) -> EngineRequest:
    """A request of a stage."""
    return EngineRequest(at_s, rng.randint(*HERE.prompt), rng.randint(*HERE.output), acceptance=stage.acceptance)


def arrivals_end_s(stages: Sequence[Stage]) -> float:
    """Until when requests may still arrive, whatever has been answered (s)."""
    return 0.0 if stages[0].clients else sum(stage.seconds for stage in stages)


def latest_end_s(stages: Sequence[Stage]) -> float:
    """When an episode ends at the latest (s)."""
    return sum(stage.seconds for stage in stages) + HERE.drain_s


def training_stages(rng: random.Random) -> list[Stage]:
    """Traffic to learn from: floods and changes of content, together or not, at any time."""
    calm = Stage(rng.uniform(*HERE.calm_s), rng.uniform(*HERE.calm_rps), drawn_acceptance(rng))
    if HERE.clients is not None:
        clients = rng.randint(*HERE.clients)
        calm = calm._replace(clients=clients, rate_rps=clients * calm.rate_rps)
        other = calm._replace(seconds=rng.uniform(*HERE.other_s), acceptance=drawn_acceptance(rng))
        return [calm, other, calm._replace(seconds=rng.uniform(*HERE.calm_s))]
    other = calm._replace(seconds=rng.uniform(*HERE.other_s))
    if rng.random() < 0.5:
        other = other._replace(rate_rps=rng.uniform(*HERE.flood_rps))
    if rng.random() < 0.7:
        other = other._replace(acceptance=drawn_acceptance(rng))
    return [calm, other, calm._replace(seconds=rng.uniform(*HERE.calm_s))]


def drawn_acceptance(rng: random.Random) -> float:
    """A third each: copied text, stories, anything."""
    return rng.uniform(*rng.choice(((0.85, 0.98), (0.2, 0.45), (0.15, 0.98))))


def seconds_per_token(timing: RequestTiming, now_s: float) -> float:
    """Time from when the request was due to its last token, for each token; until ``now_s`` if it has not ended."""
    end_s = timing.ended_s if timing.completed and timing.ended_s is not None else now_s
    return (end_s - timing.request.arrival_s) / timing.request.output_tokens


def in_time(timing: RequestTiming, stage: Stage) -> bool:
    """Whether a request met both objectives of its stage."""
    ttft_ms, tpot_ms = timing.ttft_ms(), timing.tpot_ms()
    return timing.completed and (ttft_ms or 0.0) <= 1e3 * stage.ttft_s and (tpot_ms or 0.0) <= 1e3 * stage.tpot_s


# ---------------------------------------------------------------- policies


class Seen(NamedTuple):
    """What a policy sees of the engine: requests now, and counts since the last decision."""

    running: float
    waiting: float
    drafted: float
    accepted: float
    written: float
    drafts: int
    """Draft length in force since then."""

    @classmethod
    def between(cls, before: Reading, now: Reading, drafts: int) -> Seen:
        drafted, accepted, written = (
            (getattr(now, name) or 0.0) - (getattr(before, name) or 0.0)
            for name in ("drafted_tokens", "accepted_tokens", "output_tokens")
        )
        return cls(now.running_requests, now.queue_requests, drafted, accepted, written, drafts)


Policy = Callable[[Seen], int]
Make = Callable[[], Policy]


class Acceptance:
    """Estimate of the probability that a draft is accepted, from counts of drafted and accepted tokens."""

    def __init__(self) -> None:
        self.estimate, self.last, self.unseen = 0.6, 0.6, 0

    def see(self, seen: Seen) -> float:
        self.unseen += 1
        if seen.drafted >= 8.0 and seen.drafts > 0:
            self.last = chance_of(seen.accepted / seen.drafted, seen.drafts)
            weight = seen.drafted / (seen.drafted + 24.0)
            self.estimate += weight * (self.last - self.estimate)
            self.unseen = 0
        return self.estimate


def chance_of(rate: float, drafts: int) -> float:
    """Probability ``a`` that a draft is accepted if all before it are, from accepted / drafted tokens.

    Of k drafts a + a^2 + ... + a^k are accepted on average.
    """
    low, high = 0.0, 0.99
    for _ in range(20):
        a = 0.5 * (low + high)
        low, high = (a, high) if tokens_of(a, drafts) - 1.0 < rate * drafts else (low, a)
    return low


def tokens_of(a: float, drafts: int) -> float:
    """Mean tokens of a verification step."""
    return sum(a**j for j in range(drafts + 1))


class Goodput:
    """TurboSpec's rule: the draft length with the most expected tokens per ms, at the requests and acceptance seen.

    Without drafts the acceptance is not seen, so one draft is tried again after some decisions.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times, self._acceptance = times, Acceptance()

    def __call__(self, seen: Seen) -> int:
        acceptance = self._acceptance.see(seen)
        if self._acceptance.unseen >= RETRY_DECISIONS:
            return 1
        return best_length(self._times, seen.running + seen.waiting, acceptance)


class StepTimes:
    """Iteration times of a table, ms, by sequences and drafts."""

    def __init__(self, tables: ServingTables) -> None:
        source = source_of(tables.meta)
        self._model = source.operators(source.tiers[0], engine_of(tables.meta))

    @cache  # noqa: B019 - a few hundred numbers of one table
    def __call__(self, sequences: int, drafts: int) -> float:
        return self._model.decode_ms(sequences, 64.0, drafts)


def promised_tokens(times: StepTimes, requests: float, acceptance: float, drafts: int) -> float:
    """Tokens of a sequence per ms, by the table."""
    return tokens_of(acceptance, drafts) / times(int(min(max(requests, 1.0), HERE.slots)), drafts)


def best_length(times: StepTimes, requests: float, acceptance: float) -> int:
    """Draft length with the most tokens per ms."""
    return max(SPEC_LENGTHS, key=lambda k: promised_tokens(times, requests, acceptance, k))


def own_table(times: StepTimes, acceptance: float) -> list[int]:
    """Draft length by batch size, best at one acceptance: what vLLM's ``num_speculative_tokens_per_batch_size`` has."""
    return [best_length(times, n, acceptance) for n in range(1, HERE.slots + 1)]


class Learned:
    """The network that PPO trained, evaluated with numpy alone."""

    def __init__(self, path: Path, times: StepTimes) -> None:
        self._network, self._features = Network(path), Features(times)

    def __call__(self, seen: Seen) -> int:
        return SPEC_LENGTHS[self._network.choice(self._features(seen))]


class Features:
    """What the network sees: the load and its change, the acceptance seen, the draft length in force, how many tokens
    per ms each draft length promises by the table, and how much slower than the table the engine is, without and with
    drafts."""

    N = 10 + 2 * len(SPEC_LENGTHS)

    def __init__(self, times: StepTimes) -> None:
        self._times, self._acceptance, self._before = times, Acceptance(), 0.0
        self._slower = [0.0, 0.0]

    def __call__(self, seen: Seen) -> Float32Array:
        estimate = self._acceptance.see(seen)
        requests = seen.running + seen.waiting
        self._compare(seen, 0.5 * (requests + self._before))
        rise, self._before = requests - self._before, requests
        promised = np.log([promised_tokens(self._times, requests, estimate, k) for k in SPEC_LENGTHS])
        return np.array(
            [
                math.log1p(seen.running) / 2.0 - 1.0,
                math.log1p(seen.waiting) / 2.0,
                min(max(rise / 5.0, -2.0), 2.0),
                4.0 * (estimate - 0.55),
                4.0 * (self._acceptance.last - 0.55),
                min(self._acceptance.unseen, 20) / 10.0,
                math.log1p(seen.drafted) / 3.0 - 1.0,
                math.log1p(seen.written / HERE.hold_s) / 3.0 - 1.5,
                *(float(seen.drafts == length) for length in SPEC_LENGTHS),
                *np.maximum(3.0 * (promised - promised.max()), -3.0),
                *(2.0 * slower for slower in self._slower),
            ],
            dtype=np.float32,
        )

    def _compare(self, seen: Seen, requests: float) -> None:
        """Follow the logarithm of the iterations' time over the table's; each gives a sequence one token undrafted."""
        undrafted = seen.written - seen.accepted
        if requests >= 1.0 and undrafted >= 1.0:
            iteration_ms = 1e3 * HERE.hold_s * requests / undrafted
            ratio = math.log(iteration_ms / self._times(int(min(requests, HERE.slots)), seen.drafts))
            self._slower[seen.drafts > 0] += 0.25 * (min(max(ratio, -1.0), 1.0) - self._slower[seen.drafts > 0])


def constant(drafts: int) -> Policy:
    return lambda seen: drafts


def heuristic_length(tables: ServingTables) -> int:
    """Draft length of :mod:`agents.policies.heuristic`, in floods and out of them.

    It plans each length for a full batch and the table's acceptance, and takes the one of the highest capacity.
    """
    task = scaled_lengths(drafts_as_measured(get_task(3)), HERE.prompt[1] + HERE.output[1])
    planner = CapacityPlanner(task, tables, np.array([each.share for each in task.classes]))
    return max(SPEC_LENGTHS, key=lambda k: planner.plan(Setting(0, k, False)).capacity_rps)


# ---------------------------------------------------------------- learning in the simulator


class Episode:
    """Drawn traffic on the discrete-event reference, decision by decision."""

    def __init__(self, tables: ServingTables, stages: Sequence[Stage], seed: int) -> None:
        self.engine = SimulatedEngine(tables, HERE.slots, max(SPEC_LENGTHS), seed)
        drawn = drawn_requests(stages, random.Random(seed))
        self.stages = [stage for _, stage in drawn]
        self.load = self.engine.load([request for request, _ in drawn], stages[0].clients)
        self.arrivals_end_s, self.end_s = arrivals_end_s(stages), latest_end_s(stages)
        self.time_s = 0.0
        self._before = self.engine.read()
        self.seen = Seen.between(self._before, self._before, 0)

    def play(self, drafts: int) -> None:
        """Play until the next decision."""
        self.engine.set(Orders({"spec_length": float(drafts)}))
        self.time_s += HERE.hold_s
        self.load.advance(self.time_s)
        now = self.engine.read()
        self.seen, self._before = Seen.between(self._before, now, drafts), now

    @property
    def done(self) -> bool:
        """Whether the traffic has ended and all requests are answered, or the time is over."""
        if self.time_s < self.arrivals_end_s:
            return False
        return self.time_s >= self.end_s or all(timing.ended_s is not None for timing in self.load.timings)


def training_episode(tables: ServingTables, seed: int) -> Episode:
    """Drawn traffic on an engine that is slower or faster than its table."""
    rng = random.Random(seed)
    return Episode(drawn_times(tables, rng), training_stages(rng), seed)


def drawn_times(tables: ServingTables, rng: random.Random) -> ServingTables:
    """The measured table with another fixed time of an iteration, and another time of its sequences and tokens.

    Measuring is without drafts, so above all the time that drafts take is uncertain.
    """
    engine = tables.meta["measured_engine"]
    fixed, rows = rng.uniform(*HERE.fixed), math.exp(rng.uniform(*np.log(HERE.rows)))
    times = engine["times"]
    times = {
        **times,
        "step_ms": fixed * times["step_ms"],
        "sequence_ms": rows * times["sequence_ms"],
        "ramp_ms": [rows * ms for ms in times["ramp_ms"]],
    }
    return replace(tables, meta={**tables.meta, "measured_engine": {**engine, "times": times}})


class LearningEnv(EpisodeRows):
    """``num_envs`` episodes as PPO sees them.

    A step costs by how much the logarithm of each request's age has grown in it, until the request is answered: the sum
    over an episode is that of the latencies' logarithms. What the same step costs under TurboSpec's rule is added,
    which changes no policy's order and takes away most of the traffic's variance.

    In a closed loop a faster engine has more requests in a second, so there a step earns by how far the logarithm of
    the time per token is below that of :data:`SLOW_S`, for each answer's worth of tokens.
    """

    def __init__(self, num_envs: int, tables: ServingTables) -> None:
        self._tables, self._times, self._series = tables, StepTimes(tables), SeedSeries(num_envs)
        self._rows: list[Episode] = [None] * num_envs  # type: ignore[list-item]  # until the first reset
        self._usual: list[Life] = [(np.zeros(0), np.zeros(0))] * num_envs
        self._features = [Features(self._times) for _ in range(num_envs)]
        self._seen = np.zeros((num_envs, Features.N), np.float32)
        space = spaces.Box(-np.inf, np.inf, (Features.N,), np.float32)
        super().__init__(num_envs, space, spaces.Discrete(len(SPEC_LENGTHS)), AutoresetMode.SAME_STEP)

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        for row, seed in zip(*self._series.next(seeds, rows), strict=True):
            self._rows[row] = training_episode(self._tables, seed)
            if HERE.clients is None:
                usual, rule = training_episode(self._tables, seed), Goodput(self._times)
                while not usual.done:
                    usual.play(rule(usual.seen))
                self._usual[row] = life_s(usual.load.timings)
            self._features[row] = Features(self._times)
            self._seen[row] = self._features[row](self._rows[row].seen)

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        reward = np.zeros(self.num_envs)
        for row, choice in enumerate(actions):
            episode = self._rows[row]
            began_s = episode.time_s
            episode.play(SPEC_LENGTHS[choice])
            self._seen[row] = self._features[row](episode.seen)
            if (clients := episode.stages[0].clients) is not None:
                tokens = episode.seen.written
                slow = SLOW_S * max(tokens, 1.0) / (HERE.hold_s * clients)
                reward[row] = REWARD_SCALE * tokens / float(np.mean(HERE.output)) * math.log(slow)
                continue
            # The rule may end later than the episode; then the last step counts all that is left.
            usual_to_s = episode.end_s if episode.done else episode.time_s
            for life, to_s, sign in (
                (self._usual[row], usual_to_s, 1.0),
                (life_s(episode.load.timings), episode.time_s, -1.0),
            ):
                grown = log_ages(life, to_s) - log_ages(life, began_s)
                reward[row] += sign * REWARD_SCALE * float(grown.sum())
        return reward


Life = tuple[FloatArray, FloatArray]
"""When each request was due and when it was answered (s); infinite if it was not."""


def life_s(timings: Sequence[RequestTiming]) -> Life:
    """Life of each request so far. In a closed loop it begins when its client sends it."""
    due = [math.inf if each.sent_s is None else each.request.arrival_s for each in timings]
    return np.array(due), np.array([math.inf if each.ended_s is None else each.ended_s for each in timings])


def log_ages(life: Life, now_s: float) -> FloatArray:
    """Logarithm of the age of each request, which grows from :data:`YOUNG_S` until it is answered."""
    due_s, end_s = life
    ages: FloatArray = np.log(np.maximum(np.minimum(end_s, now_s) - due_s, YOUNG_S))
    return ages


def simulated(tables: ServingTables, stages: Sequence[Stage], seed: int, policy: Policy) -> dict[str, float]:
    """One episode in the simulator."""
    return played(Episode(tables, stages, seed), policy)


def played(episode: Episode, policy: Policy) -> dict[str, float]:
    """Outcome of an episode."""
    while not episode.done:
        episode.play(policy(episode.seen))
    return outcome(episode.load.timings, episode.stages, episode.time_s)


def outcome(timings: Sequence[RequestTiming], stages: Sequence[Stage], now_s: float) -> dict[str, float]:
    """Geometric mean of the latency per token (ms), and requests in time (share)."""
    taken = [seconds_per_token(timing, now_s) for timing in timings]
    late = [not in_time(timing, stage) for timing, stage in zip(timings, stages, strict=True)]
    return {
        "ms_per_token": 1e3 * math.exp(float(np.mean(np.log(taken)))),
        "in_time": 1.0 - float(np.mean(late)),
    }


def train(tables: ServingTables, steps: int, path: Path, checks: int = 8) -> list[float]:
    """Train PPO and keep the network that is best on the validation draws; returns their means on the way."""
    model = make_ppo(
        LearningEnv(N_ENVS, tables),
        0,
        learning_rate=lambda left: 5e-5 + 1e-3 * left,
        batch_size=512,
        n_epochs=8,
        gamma=0.95,
        gae_lambda=0.9,
        ent_coef=0.003,
    )
    times = StepTimes(tables)
    curve = keep_best(model, steps, checks, path, lambda file: -validated(tables, partial(Learned, file, times)))
    return [-value for value in curve]


def validated(tables: ServingTables, make: Make) -> float:
    """Geometric mean of the latency per token (ms) over draws of the training episodes that no policy learned from."""
    seeds = range(VALIDATION_SEEDS.start, VALIDATION_SEEDS.start + N_VALIDATION)
    found = [played(training_episode(tables, seed), make())["ms_per_token"] for seed in seeds]
    return math.exp(float(np.mean(np.log(found))))


# ---------------------------------------------------------------- the engine


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv-engine"), help="where the engine is installed")
    parser.add_argument(
        "--place",
        choices=sorted(PLACES),
        default="cpu",
        help="vLLM for CPU with arrivals or with a constant number of clients, or on a GPU",
    )
    parser.add_argument("--repeats", type=int, default=6, help="draws of each workload (default 6)")
    parser.add_argument("--steps", type=int, default=240_000, help="steps that PPO learns from (default 240,000)")
    parser.add_argument("--measure-seconds", type=float, default=70.0, help="load of the measurement (default 70)")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="measure and learn only, and write them here")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="play what --prepare wrote")
    parser.add_argument("--stand-in", action="store_true", help="no engine: play the simulator, printed only")
    options = parser.parse_args(arguments)
    global HERE
    HERE = PLACES[options.place]
    with tempfile.TemporaryDirectory() as name:
        folder = options.prepare or options.prepared or Path(name)
        if options.prepared is None:
            prepare(options, folder)
        if options.prepare is None:
            compare(options, folder, Path(name))


@contextmanager
def drafting_engine(venv: Path, folder: Path, lengths: Sequence[int]) -> Iterator[VllmEngine]:
    """vLLM with synthetic acceptance; ``lengths`` is its own table, a draft length for each batch size from 1."""
    ranges = [[n, n, length] for n, length in enumerate(lengths, start=1)]
    with serve_random_model(
        venv,
        folder,
        shape=HERE.shape,
        eager=HERE.eager,
        max_num_seqs=HERE.slots,
        kv_blocks=HERE.kv_blocks,
        drafts=OWN_TABLE,
        speculation={"num_speculative_tokens_per_batch_size": ranges},
        options=(
            *("--max-num-batched-tokens", str(TOKEN_BUDGET)),
            *("--worker-extension-cls", "synthetic_acceptance.SyntheticAcceptance"),
            *HERE.options,
        ),
    ) as server:
        engine = engine_at("vllm", server.url, server.control_file)
        assert isinstance(engine, VllmEngine)
        yield engine


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Measure the engine, and learn on its table."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, drafting_engine(options.venv, Path(name), [0]) as engine:
        engine.set(Orders({"spec_length": 0.0}))  # what iterations take is measured without drafts
        settings = MeasureSettings(
            options.measure_seconds,
            most_clients=HERE.slots,
            max_num_seqs=HERE.slots,
            max_batched_tokens=TOKEN_BUDGET,
            kv_bytes_per_token=HERE.shape.kv_bytes_per_token(),
        )
        bursts = burst_times(engine)
        measured = measure_engine(engine.api, settings)
    if bursts:
        measured = replace(measured, fit=replace(measured.fit, times=with_drafts(measured.fit.times, bursts)))
    print(f"measured: {measured.fit.times}, held-out error {measured.fit.median_error:.0%} at the median", flush=True)
    source, profile = measured.source("measured"), measured.profile("measured")
    tables = load_tables(build_table(folder / TABLE_FILE, source, profile, saturated=False))
    train(tables, options.steps, folder / POLICY_FILE)
    write_text(folder / CHOSEN_FILE, as_json(chosen(tables, folder / POLICY_FILE)))


def chosen(tables: ServingTables, policy: Path) -> dict[str, Any]:
    """What the simulator says: the acceptance for vLLM's own table, and every policy on the validation draws."""
    acceptance = best_table(tables)
    validation = {
        name: {workload: mean_of(tables, stages, player.in_simulator) for workload, stages in HERE.workloads.items()}
        for name, player in contestants(tables, policy, acceptance).items()
    }
    return {
        "table_acceptance": acceptance,
        "validation": validation,
        "heuristic_drafts": heuristic_length(tables),
    }


class Burst(NamedTuple):
    """Mean time of an iteration of equal sequences whose drafts are all rejected."""

    sequences: int
    drafts: int
    ms: float


def burst_times(engine: VllmEngine) -> list[Burst]:
    """Iteration times with drafts, at the place's batch sizes; drafting is off afterwards."""
    found = []
    for n in HERE.bursts:
        for drafts in SPEC_LENGTHS:
            engine.set(Orders({"spec_length": float(drafts)}))
            with engine.load([EngineRequest(0.0, 64, 48, acceptance=0.0)] * n) as load:
                timings = load.wait()
            found.append(Burst(n, drafts, float(np.mean([timing.tpot_ms() or math.nan for timing in timings]))))
    engine.set(Orders({"spec_length": 0.0}))
    return found


def with_drafts(times: EngineTimes, bursts: Sequence[Burst]) -> EngineTimes:
    """The times with the fixed part and the time per row that fit the bursts; what a sequence adds is in its row.

    Beyond the largest burst a row takes as long as before.
    """
    knots = np.array([0.0, 64.0, 256.0])
    rows = np.array([burst.sequences * (burst.drafts + 1) for burst in bursts], dtype=np.float64)
    widths = np.clip(rows[:, None] - knots, 0.0, np.append(np.diff(knots), np.inf))
    ms = np.array([burst.ms for burst in bursts])
    # Relative errors: each equation is divided by what was measured.
    fixed, *ramps = nnls(np.column_stack([np.ones_like(rows), widths]) / ms[:, None], np.ones_like(ms))[0].tolist()
    ramps = [
        ramp if seen else (times.rows_ms(2.0 * at) - times.rows_ms(at)) / at
        for ramp, at, seen in zip(ramps, knots.tolist(), widths.any(axis=0), strict=True)
    ]
    return replace(
        times, step_ms=fixed, knots=tuple(knots.tolist()), ramp_ms=tuple(ramps), sequence_ms=0.0, context_ms=0.0
    )


class Contestant(NamedTuple):
    """A policy for the engine, and the same for the simulator."""

    on_engine: Make
    in_simulator: Make


def contestants(tables: ServingTables, policy: Path, acceptance: float) -> dict[str, Contestant]:
    """All policies by name."""
    times = StepTimes(tables)
    lengths = own_table(times, acceptance)

    def by_batch_size(seen: Seen) -> int:
        return lengths[int(min(max(seen.running + seen.waiting, 1), HERE.slots)) - 1]

    found = {f"constant {k}": Contestant(partial(constant, k), partial(constant, k)) for k in SPEC_LENGTHS}
    found["vLLM's own table"] = Contestant(partial(constant, OWN_TABLE), lambda: by_batch_size)
    found["TurboSpec's rule"] = Contestant(partial(Goodput, times), partial(Goodput, times))
    found["PPO"] = Contestant(partial(Learned, policy, times), partial(Learned, policy, times))
    return found


def compare(options: argparse.Namespace, folder: Path, scratch: Path) -> None:
    """Play everything that was prepared on the engine."""
    tables = load_tables(folder / TABLE_FILE)
    prepared = json.loads((folder / CHOSEN_FILE).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"place": options.place, **prepared, "runs": []}
    acceptance = result["table_acceptance"]
    players = contestants(tables, folder / POLICY_FILE, acceptance)
    cells = [(workload, name) for workload in HERE.workloads for name in players]
    with playing(options, scratch, own_table(StepTimes(tables), acceptance), tables) as engine:
        result["engine"] = engine.api.get_json("/version")["version"] if isinstance(engine, VllmEngine) else engine.name
        for seed in held_out_seeds(options.repeats):
            for workload, name in random.Random(seed).sample(cells, len(cells)):
                yard_ms = yardstick(engine)
                run = play(engine, HERE.workloads[workload], seed, players[name], options.stand_in)
                result["runs"].append({"seed": seed, "workload": workload, "policy": name, "yard_ms": yard_ms, **run})
                print(json.dumps(result["runs"][-1]), flush=True)
                if not options.stand_in:  # so that an interrupted play leaves what it has
                    write_text(RESULTS / f"{HERE.results}.json", as_json(result))
            cells = [cell for cell in cells if cell in playing_on(result["runs"])]
    print(text := markdown(result))
    if not options.stand_in:
        store(HERE.results, result, text)


def playing_on(runs: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Workload and policy of all that play on: every policy that adapts, and the best constants of the runs so far."""
    found: set[tuple[str, str]] = set()
    for workload in HERE.workloads:
        of_policy = by_policy(runs, workload)
        constants = playing_constants(of_policy)
        best = sorted(constants, key=lambda name: mean_ms(of_policy[name]))[: HERE.finalists]
        found |= {(workload, name) for name in of_policy if name in best or not name.startswith("constant")}
    return found


def playing_constants(found: Mapping[str, Columns]) -> list[str]:
    """The constants that have played the most draws."""
    constants = [name for name in found if name.startswith("constant")]
    most = max(len(found[name]["seed"]) for name in constants)
    return [name for name in constants if len(found[name]["seed"]) == most]


def mean_ms(columns: Columns) -> float:
    """Geometric mean of the latency per token (ms) over the draws."""
    return math.exp(float(np.log(columns["ms_per_token"]).mean()))


@contextmanager
def playing(
    options: argparse.Namespace, folder: Path, lengths: Sequence[int], tables: ServingTables
) -> Iterator[Engine]:
    """The engine that plays."""
    if options.stand_in:
        yield SimulatedEngine(tables, HERE.slots, max(SPEC_LENGTHS))
    else:
        with drafting_engine(options.venv, folder, lengths) as engine:
            yield engine


def best_table(tables: ServingTables) -> float:
    """The acceptance for which vLLM's own table is best in both workloads, on the validation draws."""

    def product(acceptance: float) -> float:
        make = contestants(tables, Path(), acceptance)["vLLM's own table"].in_simulator
        return math.prod(mean_of(tables, stages, make) for stages in HERE.workloads.values())

    return min((0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8), key=product)


def mean_of(tables: ServingTables, stages: Sequence[Stage], make: Make) -> float:
    """Geometric mean of the latency per token (ms) in the simulator."""
    found = [simulated(tables, stages, seed, make())["ms_per_token"] for seed in VALIDATION_SEEDS]
    return round(math.exp(float(np.mean(np.log(found)))), 2)


def yardstick(engine: Engine) -> float:
    """Time of a token (ms) of four requests that are answered together without drafts."""
    engine.set(Orders({"spec_length": 0.0}))
    return round(4e3 / measure_throughput(engine, 32, 32, 4), 2)


def play(engine: Engine, stages: Sequence[Stage], seed: int, player: Contestant, stand_in: bool) -> dict[str, Any]:
    """One episode on the engine."""
    drawn = drawn_requests(stages, random.Random(seed))
    end_s = latest_end_s(stages)
    policy = (player.in_simulator if stand_in else player.on_engine)()
    lengths, time_s = [0], 0.0
    with engine.load([request for request, _ in drawn], stages[0].clients) as load:
        before = engine.read()
        seen = Seen.between(before, before, 0)
        while time_s < arrivals_end_s(stages) or (
            time_s < end_s and any(each.ended_s is None for each in load.timings)
        ):
            lengths.append(policy(seen))
            if lengths[-1] != lengths[-2] or time_s == 0.0:
                engine.set(Orders({"spec_length": float(lengths[-1])}))
            time_s += HERE.hold_s
            load.advance(time_s)
            now = engine.read()
            seen, before = Seen.between(before, now, lengths[-1]), now
        timings = list(load.timings)
    failed = [timing.error for timing in timings if timing.error not in ("", "cancelled")]
    if failed:
        raise RemoteError(f"{len(failed)} of {len(timings)} requests failed, for example: {failed[0]}")
    return {
        **{key: round(value, 4) for key, value in outcome(timings, [stage for _, stage in drawn], time_s).items()},
        "drafts": lengths[1:],
    }


# ---------------------------------------------------------------- what comes out


def markdown(result: Mapping[str, Any]) -> str:
    """The document's part: each policy compared with the fastest constant, paired by the traffic."""
    place = PLACES[result["place"]]
    repeats = len({run["seed"] for run in result["runs"]})
    yards = [run["yard_ms"] for run in result["runs"]]
    digits = 1 if min(yards) >= 20.0 else 2
    lines = [
        "<!-- written by benchmarks/live/drafts.py; do not edit -->",
        "",
        f"vLLM {result['engine']}, {repeats} draws of each workload. Latency per token is a geometric mean over all "
        "requests; differences are from the fastest constant, chosen on these runs, which favours it, with 95% "
        "intervals over the draws. The yardstick, "
        f"four requests without drafts, took {min(yards):.{digits - 1}f} to {max(yards):.{digits - 1}f} ms a token, "
        f"{float(np.median(yards)):.{digits - 1}f} at the median. InferenceGym's `heuristic` is constant "
        f"{result['heuristic_drafts']} here: it plans for full batches and does not see the acceptance.",
    ]
    for workload, heading in HEADINGS.items():
        found = by_policy(result["runs"], workload)
        if not found:
            continue
        best = min(playing_constants(found), key=lambda name: mean_ms(found[name]))
        rates = ", ".join(f"{stage.acceptance:g}" for stage in place.workloads[workload])
        lines += ["", f"*{heading}: acceptance {rates}*:", ""]
        rows = []
        for name in sorted(found, key=lambda name: mean_ms(found[name])):
            ours, theirs = paired(found[name], found[best])
            cells = [f"{mean_ms(ours):.{digits}f}"]
            cells += ["" if name == best else less(ours["ms_per_token"], theirs["ms_per_token"])]
            cells += [f"{float(ours['in_time'].mean()):.1%}"]
            cells += ["" if name == best else points(ours["in_time"] - theirs["in_time"])]
            cells += [f"{result['validation'][name][workload]:.{digits}f}"]
            draws = len(found[name]["seed"])
            label = name if draws == repeats else f"{name} ({draws} draw{'s' if draws > 1 else ''})"
            rows.append((label, *cells))
        heads = ("policy", "ms per token", f"vs {best}", "in time", f"vs {best}", "in the simulator, ms")
        lines += table(heads, rows)
        compared = []
        for name in ("vLLM's own table", "TurboSpec's rule"):
            ours, theirs = paired(found["PPO"], found[name])
            rise = points(ours["in_time"] - theirs["in_time"])
            compared.append(f"{less(ours['ms_per_token'], theirs['ms_per_token'])} vs {name} (in time {rise})")
        paces = [columns["ms_per_token"] / columns["yard_ms"] for columns in paired(found["PPO"], found[best])]
        lines += ["", f"PPO's latency per token: {', '.join(compared)}."]
        lines += [f"Both divided by the yardstick before the episode: {less(*paces)} vs {best}."]
        constants = {name: float(each["in_time"].mean()) for name, each in found.items() if name.startswith("constant")}
        punctual = max(constants, key=lambda name: constants[name])
        if punctual != best:
            draws = len(found[punctual]["seed"])
            share = f"{constants[punctual]:.1%}"
            lines += [f"Most in time of the constants: {punctual}, {share} in {draws} of {repeats} draws."]
    return "\n".join(lines) + "\n"


Columns = Mapping[str, FloatArray]
"""Seeds, latencies per token, requests in time and yardsticks of one policy's runs."""


def by_policy(runs: Sequence[Mapping[str, Any]], workload: str) -> dict[str, Columns]:
    """Columns of each policy's runs of a workload, in the order of the draws."""
    some = sorted((run for run in runs if run["workload"] == workload), key=lambda run: run["seed"])
    names = dict.fromkeys(run["policy"] for run in some)
    keys = ("seed", "ms_per_token", "in_time", "yard_ms")
    return {
        name: {key: np.array([run[key] for run in some if run["policy"] == name]) for key in keys} for name in names
    }


def paired(ours: Columns, theirs: Columns) -> tuple[Columns, Columns]:
    """The draws that both have played."""
    seeds = np.intersect1d(ours["seed"], theirs["seed"])
    first, second = (
        {key: column[np.isin(columns["seed"], seeds)] for key, column in columns.items()} for columns in (ours, theirs)
    )
    return first, second


def points(difference: FloatArray) -> str:
    """Mean difference of shares, in percentage points, with its 95% interval."""
    if len(difference) < 2:
        return f"{100.0 * difference[0]:+.1f}"
    found = interval(100.0 * difference)
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


if __name__ == "__main__":
    main()
