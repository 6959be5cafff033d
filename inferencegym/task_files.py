"""Pydantic models of the serving family's files: a task's entry, its measured constants, settings of an episode.

``TASK_AUTHORING.md`` explains the keys; :mod:`inferencegym.tasks` makes the program's own records of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from inferencegym.errors import MISSING
from inferencegym.grade_keys import FourTerm, Grade, ObjectiveMs, Share, sum_to_one
from inferencegym.messages import WHOLE, Allowed, FieldError, Message
from inferencegym.models import MAX_REPLICAS, PRIORITY_CLASSES
from inferencegym.task_registry import MAX_EPISODE_LENGTH

_CLASSES: Final = len(PRIORITY_CLASSES)

Weight = Annotated[float, Field(ge=0, le=1)]
EpisodeLength = Annotated[int, Field(ge=1, le=MAX_EPISODE_LENGTH), WHOLE]

# ---------------------------------------------------------------- settings of an episode


class RewardOverrides(Message):
    """Weights of the reward R = alpha*T - beta*L - gamma*V - delta*C; a weight left out, or null, keeps its default."""

    alpha: Annotated[Weight | None, Field(description="weight of throughput")] = None
    beta: Annotated[Weight | None, Field(description="weight of latency")] = None
    gamma: Annotated[Weight | None, Field(description="weight of violated objectives")] = None
    delta: Annotated[Weight | None, Field(description="weight of cost; beta + gamma + delta is at most 1")] = None


RewardKind = Literal["plan", "grade", "score"]
MAX_HOLD_S: Final = 60
HoldSeconds = Annotated[int, Field(ge=1, le=MAX_HOLD_S), WHOLE]
HardwareName = Annotated[
    str,
    Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,79}$"),
    Allowed("the name of a table: small letters, digits, . and -, as `inferencegym hardware` lists them"),
]


class ConfigOverrides(RewardOverrides):
    """Settings of an episode that a reset may override; those left out, or null, are the task's own."""

    reward: Annotated[
        RewardKind | None,
        Field(
            description='"plan" (default): R = alpha*T - beta*L - gamma*V - delta*C; "grade": the contribution of '
            'the step to the score, unclipped, so that their mean is the score; "score": what the step adds to the '
            "score, so that the rewards of an episode sum to it; neither has weights to set"
        ),
    ] = None
    hold: Annotated[
        HoldSeconds | None,
        Field(description="seconds that a step plays with one action (default 1); the reward is their sum"),
    ] = None
    episode_length: Annotated[EpisodeLength | None, Field(description="seconds of the episode")] = None
    hardware: Annotated[
        HardwareName | None,
        Field(description="table of the catalogue (GET /info) on which the task is played, instead of its own"),
    ] = None


# ---------------------------------------------------------------- values of a task's entry


def _one_or_per_class(numbers: float | list[float]) -> float | list[float]:
    if isinstance(numbers, list) and len(numbers) not in (1, _CLASSES):
        raise ValueError(f"an array of 1 or {_CLASSES} numbers: one for all classes, or one for each")
    return numbers


def per_class(numbers: float | list[float]) -> list[float]:
    """The number of each class, where a file gives one for all classes or one for each."""
    given = numbers if isinstance(numbers, list) else [numbers]
    return given if len(given) == _CLASSES else given * _CLASSES


def _in_order(bounds: list[float]) -> list[float]:
    if bounds[0] > bounds[1]:
        raise ValueError("the lowest and the highest score, in this order")
    return bounds


def _lower_first(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError("the lowest and the highest value, in this order")
    return bounds


def _different(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError(_SOME_KNOBS)
    return names


Knob = Literal["kv_budget", "spec_length", "batch_size", "prefill_disagg", "quant_tier"]

_KNOBS: Final[list[Knob]] = list(get_args(Knob))
_SOME_KNOBS: Final = f"an array of 1 to {len(_KNOBS)} different ones of {', '.join(_KNOBS)}"
_Tokens = Annotated[float, Field(ge=1, le=1e5)]
_Steps = Annotated[int, Field(ge=1, le=1_000_000), WHOLE]
_Factor = Annotated[float, Field(ge=0.01, le=100)]
_Spread = Annotated[float, Field(ge=0, le=3)]
_Count = Annotated[float, Field(ge=0, le=100)]
_Seconds = Annotated[float, Field(ge=1, le=1e6)]
_Of = TypeVar("_Of", bound=float)
_Range = Annotated[
    tuple[_Of, _Of],
    Field(strict=False),  # a list of the file becomes a tuple
    AfterValidator(_lower_first),
    Allowed("[lowest, highest]: a number, and one that is no lower"),
]
_PER_CLASS: Final = Field(min_length=_CLASSES, max_length=_CLASSES)
_Mix = Annotated[
    list[Share], _PER_CLASS, AfterValidator(sum_to_one), Allowed(f"an array of {_CLASSES} shares that sum to 1")
]
_ScoreRange = Annotated[list[Share], Field(min_length=2, max_length=2), AfterValidator(_in_order)]


class Day(Message):
    """Load of a day, compressed into an episode: the forecast, the deviation of the actual load, and surges."""

    relative_rates: Annotated[list[Annotated[float, Field(ge=0.01, le=1000)]], Field(min_length=2, max_length=96)]
    forecast_error: Annotated[float, Field(ge=0, le=1)] = 0.0
    surges: Annotated[float, Field(ge=0, le=100)] = 0.0
    surge_multiplier: Annotated[float, Field(ge=1, le=100)] = 1.0
    surge_duration_steps: _Steps = 1


class AcceptanceStage(Message):
    """Acceptance of drafts from a step on, of all classes or of each."""

    from_step: Annotated[int, Field(ge=0, le=1_000_000), WHOLE] = 0
    rate: Annotated[
        Share | list[Share],
        AfterValidator(_one_or_per_class),
        Allowed(f"a number from 0 to 1, or an array of 1 or {_CLASSES} such numbers"),
    ]


class RandomLoad(Message):
    """Ranges from which every seed draws its load; see :class:`inferencegym.tasks.RandomLoad`."""

    level: _Range[_Factor]
    wave: _Range[_Spread] = (0.0, 0.0)
    wave_s: _Range[_Seconds] = (300.0, 300.0)
    deviation: _Range[_Spread] = (0.0, 0.0)
    surges: _Range[_Count] = (0.0, 0.0)
    surge_multiplier: _Range[_Factor] = (1.0, 1.0)
    surge_s: _Range[_Seconds] = (1.0, 1.0)
    class_factor: _Range[_Factor] = (1.0, 1.0)


class CalibrationEntry(Message):
    """Measured constants of a task. Other keys, which record how they were measured, are ignored."""

    model_config = ConfigDict(extra="ignore")

    floor_tps: Annotated[float, Field(ge=0, le=1e12)]
    optimal_tps: Annotated[float, Field(ge=1e-12, le=1e12)]
    max_throughput_tps: Annotated[float, Field(ge=1e-12, le=1e12)]
    price: Annotated[float, Field(ge=1e-12, le=1e12)]
    replica_knobs: (
        Annotated[
            tuple[float, float, float, float, float],
            Field(strict=False),  # a list of the file becomes a tuple
            Allowed("the five knobs of an action, in order, as numbers"),
        ]
        | None
    ) = None
    fingerprint: str | None = None


# ---------------------------------------------------------------- a task's entry


class TaskEntry(Message):
    """One task of the serving family, as its file has it."""

    name: str
    gym_id: str | None = None
    difficulty: str = "custom"
    description: str = ""
    # Arrivals
    arrival_rate_rps: Annotated[float, Field(ge=0.01, le=2000)]
    arrival_dist: Literal["poisson", "poisson_bursty", "trace"] = "poisson"
    arrival_rate_burst: Annotated[float, Field(ge=0, le=1e4)] | None = None
    burst_enabled: bool | None = None
    burst_period_steps: _Steps | None = None
    burst_multiplier: Annotated[float, Field(ge=0, le=1000)] | None = None
    burst_interval_steps: _Steps | None = None
    burst_duration_steps: _Steps | None = None
    burst_offset_steps: Annotated[int, Field(ge=0, le=1_000_000), WHOLE] | None = None
    day: Day | None = None
    random_load: RandomLoad | None = None
    # Prompts
    prompt_len_dist: Literal["uniform", "lognormal", "bimodal", "trace"]
    prompt_len_min: _Tokens = 1.0
    prompt_len_max: _Tokens = 8192.0
    prompt_len_mu: Annotated[float, Field(ge=0, le=12)] | None = None
    prompt_len_sigma: Annotated[float, Field(ge=0, le=4)] | None = None
    prompt_len_clamp_min: _Tokens = 1.0
    prompt_len_clamp_max: _Tokens = 8192.0
    short_request_frac: Share | None = None
    short_prompt_min: _Tokens = 32.0
    short_prompt_max: _Tokens = 128.0
    long_prompt_min: _Tokens = 4096.0
    long_prompt_max: _Tokens = 8192.0
    class_prompt: Annotated[list[Literal["short", "long"]], _PER_CLASS] = Field(["short", "short", "long"])
    # Outputs
    output_mean_tokens: Annotated[
        _Tokens | list[_Tokens],
        AfterValidator(_one_or_per_class),
        Allowed(f"a number from 1 to 100000, or an array of 1 or {_CLASSES} such numbers"),
    ]
    output_cv: Annotated[float, Field(ge=0.01, le=5)] = 0.6
    output_max_tokens: _Tokens = 2048.0
    # Classes and their objectives
    priority_mix: _Mix = Field([1.0, 0.0, 0.0])
    burst_priority_mix: _Mix | None = None
    priority_routing: bool | None = None
    complexity_penalty: Annotated[list[Share], _PER_CLASS] = Field([0.0, 0.0, 0.0])
    slo_target_ms: ObjectiveMs
    slo_interactive_ms: ObjectiveMs | None = None
    slo_batch_ms: ObjectiveMs | None = None
    slo_best_effort_ms: ObjectiveMs | None = None
    # Fleet
    base_accept_rate: Share = 0.65
    draft_acceptance: Annotated[list[AcceptanceStage], Field(min_length=1, max_length=1000)] | None = None
    n_replicas: Annotated[int, Field(ge=1, le=4096), WHOLE] = 1
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = 512
    restart_s: Annotated[float, Field(ge=0, le=3600)] = 2.0
    load_gb_per_s: Annotated[float, Field(ge=0.01, le=1000)] = 4.0
    start_s: Annotated[float, Field(ge=0, le=3600)] | None = None
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS), WHOLE] | None = None
    hardware: HardwareName | None = None
    memory_hard_limit_gb: Annotated[float, Field(ge=1, le=1000)] | None = None
    # Rules
    active_actions: Annotated[
        list[Knob],
        Field(min_length=1, max_length=len(_KNOBS)),
        AfterValidator(_different),
        Allowed(_SOME_KNOBS),
    ] = _KNOBS
    episode_length: EpisodeLength = 200
    cost_budget_episode: Annotated[float, Field(ge=1e-9, le=1e9)] = 5.0
    reward: RewardOverrides = RewardOverrides()
    grade: Grade = FourTerm(kind="four_term", weights=[0.4, 0.3, 0.2, 0.1])
    expected_baseline: _ScoreRange | None = None
    adaptive_gap: Annotated[float, Field(ge=-1, le=1)] | None = None
    measured_difficulty: Annotated[float, Field(ge=0, le=1)] | None = None
    # Recorded traffic, and constants measured with it
    trace: str | None = None
    trace_speed: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    recorded: bool = False
    hidden: bool = False
    calibration: CalibrationEntry | None = None

    @model_validator(mode="before")
    @classmethod
    def _recorded_trace_decides(cls, entry: Any) -> Any:
        """Values of keys that a task with a trace may leave out, because the trace replaces them."""
        if not isinstance(entry, dict) or entry.get("trace") is None:
            return entry
        return {
            "arrival_rate_rps": 1.0,
            "arrival_dist": "trace",
            "prompt_len_dist": "trace",
            "output_mean_tokens": 1.0,
            "difficulty": "recorded",
            "recorded": True,
            **entry,
        }

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for prompt in ("prompt_len", "prompt_len_clamp", "short_prompt", "long_prompt"):
            self._require_order(f"{prompt}_min", f"{prompt}_max")
        longest = max(self.mean_output_tokens())
        if longest > self.output_max_tokens:
            allowed = f"at most output_max_tokens, which is {self.output_max_tokens:g}"
            raise FieldError("output_mean_tokens", longest, allowed)
        if self.prompt_len_dist == "trace" and self.trace is None:
            raise FieldError("trace", MISSING, "the file of a trace, which prompt_len_dist='trace' takes prompts from")
        if self.prompt_len_dist == "lognormal":
            for key in ("prompt_len_mu", "prompt_len_sigma"):
                if getattr(self, key) is None:
                    raise FieldError(key, MISSING, "a number, which prompt_len_dist='lognormal' needs")
        self._require_whole_flood()
        self._require_stages()
        if self.max_replicas is not None:
            self._require_order("n_replicas", "max_replicas")
        self.grade.check_replicas(self.max_replicas)
        if self.day is not None and self.trace is not None:
            raise FieldError("day", "given", "left out with a trace, which determines the load")
        if self.random_load is not None and (self.day is not None or self.trace is not None or self.burst_enabled):
            raise FieldError("random_load", "given", "left out with a day, a trace or floods, which determine the load")
        return self

    def mean_output_tokens(self) -> list[float]:
        """Mean output of each class."""
        return per_class(self.output_mean_tokens)

    def baseline_range(self) -> tuple[float, float] | None:
        """The lowest and the highest score that fixed-32 (``naive``) is expected to reach."""
        return None if self.expected_baseline is None else (self.expected_baseline[0], self.expected_baseline[1])

    def _require_order(self, low: str, high: str) -> None:
        if getattr(self, low) > getattr(self, high):
            raise FieldError(low, getattr(self, low), f"at most {high}, which is {getattr(self, high):g}")

    def _require_stages(self) -> None:
        steps = [stage.from_step for stage in self.draft_acceptance or ()]
        if steps and (steps[0] != 0 or any(step >= after for step, after in pairwise(steps))):
            raise FieldError("draft_acceptance", steps, "stages whose from_step rises, from 0 in the first")

    def _require_whole_flood(self) -> None:
        """Check the keys of floods: two alternating rates, or a multiple of the rate at intervals, not a mixture."""
        in_turn = ("burst_period_steps", "arrival_rate_burst")
        occasional = ("burst_interval_steps", "burst_duration_steps", "burst_multiplier")
        given = [key for key in (*in_turn, *occasional) if getattr(self, key) is not None]
        if self.burst_enabled is False or set(given) == set(in_turn):
            return
        if set(given) == set(occasional):
            self._require_order("burst_duration_steps", "burst_interval_steps")
        elif given or self.burst_enabled or self.burst_offset_steps is not None:
            key = given[0] if given else "burst_enabled" if self.burst_enabled else "burst_offset_steps"
            raise FieldError(
                key,
                getattr(self, key),
                f"given with all keys of one kind of flood, either {' and '.join(in_turn)} or {', '.join(occasional)}: "
                f"this task has {', '.join(given) or 'none of them'}",
            )
