"""Quality of any running OpenEnv environment, measured from outside: its server is played over OpenEnv's own protocol.

The policies observe nothing: random actions, the best of some constant actions, the best timetable (a fixed sequence of
actions) that a short search finds, and malformed actions. Constants and timetables are chosen on training seeds and
scored on held-out ones, so the choice does not flatter them. The return of an episode is the sum of its rewards. What a
policy that observes could earn (headroom) cannot be known without one; it is reported as not measured.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from agents.evaluate import bracketed, interval, paired
from agents.protocol import FloatArray
from agents.seeds import TRAINING_SEEDS, held_out_seeds
from inferencegym.client.openenv_types import without_gradio
from inferencegym.errors import InferenceGymError, InvalidConfigError, ServerUnavailableError, short_text

# Imported after the types, whose module says what to install if OpenEnv, and with it websockets, is missing.
with without_gradio():
    from openenv.core import GenericEnvClient
    from websockets.exceptions import WebSocketException

Action = dict[str, Any]
CHOOSING_SEEDS: Final = TRAINING_SEEDS[:3]
"""Seeds of the episodes on which constants and timetables are chosen."""
REPLAYED: Final = 3
"""Episodes that are played twice."""
TIMETABLES: Final = 20
"""Timetables that a search tries."""
MOST_REFUSALS: Final = 5
"""An episode ends after this many refused actions in a row."""
UNBOUNDED: Final = 10
"""Range of sampled numbers and lengths for which the schema names no bound."""
WORDS: Final = ("", "a", "yes", "no", "0", "1", "hello")
"""Texts that are sampled where the schema names no values."""
NOT_MEASURED: Final = {"headroom": "what better control could gain: needs a reference policy that observes"}


@dataclass(frozen=True, slots=True)
class Episode:
    """A played episode: rewards by step, a digest of all observations, and the number of refused actions."""

    rewards: tuple[float, ...]
    seen: str
    refused: int
    ended: bool
    """Whether the server ended it."""
    rewarded: bool
    """Whether any step had a reward, be it 0."""


class RunningEnvironment:
    """A running OpenEnv server, played over one WebSocket; ``schema`` is that of its actions.

    Raises ServerUnavailableError if no OpenEnv server answers, or it is lost, and InvalidConfigError if it refuses a
    reset.
    """

    def __init__(self, url: str, most_steps: int) -> None:
        self.url, self.most_steps = url.rstrip("/"), most_steps
        self.schema: Mapping[str, Any] = self._get("/schema").get("action", {})
        self.name = str(self._get("/metadata").get("name"))
        self.played: list[Episode] = []
        self.refusal = ""
        """What the server said when it last refused an action."""
        self._client = GenericEnvClient(base_url=self.url).sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.close()

    def play(self, reset: Mapping[str, Any], seed: int, actions: Iterable[Action]) -> Episode:
        """Play one episode, of ``most_steps`` at most; an action that the server refuses is counted and left out."""
        try:
            result = self._client.reset(**reset, seed=seed)
            seen = hashlib.sha256(_json(result.observation).encode())
            rewards: list[float] = []
            refused, in_a_row, rewarded = 0, 0, False
            for action in itertools.islice(actions, self.most_steps):
                if result.done or in_a_row == MOST_REFUSALS:
                    break
                try:
                    result = self._client.step(action)
                except RuntimeError as error:
                    self.refusal, refused, in_a_row = str(error), refused + 1, in_a_row + 1
                    continue
                in_a_row, rewarded = 0, rewarded or result.reward is not None
                rewards.append(float(result.reward or 0.0))
                seen.update(_json(result.observation).encode())
        except RuntimeError as error:
            self._client.disconnect()
            raise InvalidConfigError(f"the server refuses reset {_json(reset)} with seed {seed}: {error}") from error
        except (WebSocketException, OSError, ValueError) as error:
            self._client.disconnect()
            raise ServerUnavailableError(f"{self.url}/ws was lost: {error!r}") from error
        self.played.append(Episode(tuple(rewards), seen.hexdigest(), refused, bool(result.done), rewarded))
        return self.played[-1]

    def returns(self, reset: Mapping[str, Any], seeds: Sequence[int], plan: Iterable[Action]) -> FloatArray:
        """Returns (n,) of the same sequence of actions, as long as the longest episode, on every seed."""
        return np.array([sum(self.play(reset, seed, plan).rewards) for seed in seeds])

    def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = httpx.get(self.url + path, timeout=30.0, follow_redirects=True)
            found = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServerUnavailableError(f"{self.url}{path}: {error}; is an OpenEnv server there?") from error
        if not isinstance(found, dict):
            raise ServerUnavailableError(f"{self.url}{path} answers {answer.status_code}: is an OpenEnv server there?")
        return found


class Actions:
    """Source of actions: samples of a JSON schema, and ``named`` ones, as ``n_samples`` to their number."""

    def __init__(self, schema: Mapping[str, Any], named: Sequence[Action], n_samples: int) -> None:
        self._schema, self._named, self._n_samples = schema, named, n_samples
        self.free: set[str] = set()
        """Sampled fields for which the schema names neither values nor bounds: a sample of them says little."""

    def candidates(self, rng: np.random.Generator) -> list[Action]:
        """The named actions and the samples, without repetitions; InvalidConfigError if the schema has no end."""
        try:
            drawn = [*self._named, *(self._sample(self._schema, rng) for _ in range(self._n_samples))]
        except (LookupError, RecursionError) as error:
            raise InvalidConfigError(
                f"the server's schema of actions cannot be sampled ({error!r}): name actions, and sample 0"
            ) from error
        return [action for i, action in enumerate(drawn) if action not in drawn[:i]]

    def random(self, seed: int) -> Iterator[Action]:
        """Random actions without end, the same for the same seed."""
        rng = np.random.default_rng(seed)
        while True:
            at = int(rng.integers(len(self._named) + self._n_samples))
            yield self._named[at] if at < len(self._named) else self._sample(self._schema, rng)

    def _sample(self, schema: Mapping[str, Any], rng: np.random.Generator, name: str = "action") -> Any:
        """A random value: half of the objects have all fields but OpenEnv's ``metadata``, others lack optional ones."""
        if "$ref" in schema:
            return self._sample(self._schema["$defs"][str(schema["$ref"]).rpartition("/")[2]], rng, name)
        if "const" in schema:
            return schema["const"]
        for several in ("enum", "anyOf", "oneOf", "allOf"):
            if several in schema:
                found = schema[several][int(rng.integers(len(schema[several])))]
                return found if several == "enum" else self._sample(found, rng, name)
        match schema.get("type"):
            case "object":
                fields = {each: part for each, part in schema.get("properties", {}).items() if each != "metadata"}
                needed = fields if rng.random() < 0.5 else schema.get("required", ())
                kept = [each for each in fields if each in needed or rng.random() < 0.5]
                return {each: self._sample(fields[each], rng, each) for each in kept}
            case "array":
                least = int(schema.get("minItems", 0))
                length = int(rng.integers(least, int(schema.get("maxItems", least + UNBOUNDED)) + 1))
                parts = [*schema.get("prefixItems", ())][:length]
                parts += [schema.get("items", {})] * (length - len(parts))
                return [self._sample(part, rng, name) for part in parts]
            case "integer" | "number" as kind:
                return self._number(schema, rng, name, kind == "integer")
            case "boolean":
                return bool(rng.integers(2))
            case "null":
                return None
        self.free.add(name)
        return WORDS[int(rng.integers(len(WORDS)))].ljust(int(schema.get("minLength", 0)), "a")

    def _number(self, schema: Mapping[str, Any], rng: np.random.Generator, name: str, whole: bool) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None or high is None:
            self.free.add(name)
            low = low if low is not None else 0 if high is None else high - UNBOUNDED
            high = low + UNBOUNDED if high is None else high
        if not whole:
            return float(low + rng.random() * (high - low))
        least, most = int(low) + ("exclusiveMinimum" in schema), int(high) - ("exclusiveMaximum" in schema)
        return least + int(rng.random() * (most - least + 1))


def quality(
    url: str,
    resets: Sequence[Mapping[str, Any]] = ({},),
    named: Sequence[Action] = (),
    episodes: int = 10,
    candidates: int = 20,
    most_steps: int = 200,
) -> dict[str, Any]:
    """The report of the OpenEnv server at ``url`` as JSON data.

    ``resets`` are the arguments of its levels, ``named`` actions are played beside ``candidates`` sampled ones, and
    ``episodes`` held-out episodes score a policy. Raises as :class:`RunningEnvironment`, and InvalidConfigError if the
    server refuses a named action or all sampled ones.
    """
    with RunningEnvironment(url, most_steps) as environment:
        actions, rng = Actions(environment.schema, named, candidates), np.random.default_rng(0)
        pool = []
        for action in actions.candidates(rng):
            if not environment.play(resets[0], CHOOSING_SEEDS[0], [action]).refused:
                pool.append(action)
            elif action in named:
                raise InvalidConfigError(f"the server refuses the action {_json(action)}: {environment.refusal}")
        if not pool:
            raise InvalidConfigError(
                f"the server refuses all actions sampled from its own /schema, the last with: {environment.refusal}; "
                "name actions that it takes"
            )
        environment.played.clear()
        seeds = held_out_seeds(episodes)
        played = [_level(environment, reset, seeds, actions, pool, rng) for reset in resets]
        returns = [returns for _, returns in played]
        report = {
            "url": environment.url,
            "name": environment.name,
            "seeds": [*seeds],
            "candidates": len(pool),
            "most_steps": most_steps,
            "interval": "95% Student t over seeds; differences are paired by seed",
            "levels": [level for level, _ in played],
            "level_over_next": [
                {name: paired(one[name], other[name]).to_dict() for name in one}
                for one, other in itertools.pairwise(returns)
            ],
            "not_measured": NOT_MEASURED,
            "notes": _notes(environment.played, most_steps, actions.free),
        }
        # Last, because one of them may stop the server.
        floor = _malformed(environment, resets[0], seeds, max(pool, key=len), returns[0]["random"])
        return report | {"adversarial_floor": floor}


def text(report: dict[str, Any]) -> str:
    """A report as lines for a terminal."""
    lines = [
        f"{report['name']} at {report['url']}: {len(report['seeds'])} held-out episodes of each policy, of at most "
        f"{report['most_steps']} steps; {report['candidates']} constants"
    ]
    for level in report["levels"]:
        same = level["determinism"]
        lines += [
            f"reset {_json(level['reset'])}",
            f"  random          {bracketed(level['random'])}",
            f"  best constant   {bracketed(level['best_constant'])}, over random "
            f"{bracketed(level['constant_over_random'])}: {short_text(_json(level['constant']), 200)}",
            f"  best timetable  {bracketed(level['best_timetable'])}, over the constant "
            f"{bracketed(level['timetable_over_constant'])}",
            f"  determinism     same seed and actions, {same['replays']} episodes: same rewards in "
            f"{same['same_rewards']}, same observations in {same['same_observations']}; same actions, another seed: "
            f"same rewards in {same['same_rewards_of_another_seed']}",
            f"  returns         from {level['range'][0]:.6g} to {level['range'][1]:.6g} in {level['episodes']} "
            f"episodes, of which the server ended {level['ended_by_server']}; "
            f"{level['refused_actions']} actions refused",
        ]
    for (one, other), gap in zip(itertools.pairwise(report["levels"]), report["level_over_next"], strict=True):
        gaps = ", ".join(f"{name.replace('_', ' ')} {bracketed(value)}" for name, value in gap.items())
        lines.append(f"{_json(one['reset'])} over {_json(other['reset'])}: {gaps}")
    floor = report["adversarial_floor"]
    lines.append(f"malformed actions at {_json(report['levels'][0]['reset'])}")
    for name, each in floor.items():
        if each["return"] is not None:
            earned = f"earns {bracketed(each['return'])}, over random {bracketed(each['over_random'])}"
            lines.append(f"  {name}: {each['outcome']}, {earned}")
        elif each["outcome"] != "refused":
            lines.append(f"  {name}: {each['outcome']}")
    refused = [name for name, each in floor.items() if each["outcome"] == "refused"]
    lines.append(f"  refused: {', '.join(refused) or 'none'}")
    lines += [f"not measured: {name}, {why}" for name, why in report["not_measured"].items()]
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])


def _level(
    environment: RunningEnvironment,
    reset: Mapping[str, Any],
    seeds: Sequence[int],
    actions: Actions,
    pool: Sequence[Action],
    rng: np.random.Generator,
) -> tuple[dict[str, Any], dict[str, FloatArray]]:
    """The report of one level, and the returns (n,) of each policy by seed."""
    before = len(environment.played)
    drawn = [environment.play(reset, seed, actions.random(seed)) for seed in seeds]
    rewards = np.zeros((len(pool), environment.most_steps))
    for row, action in zip(rewards, pool, strict=True):
        for seed in CHOOSING_SEEDS:
            got = environment.play(reset, seed, repeat(action)).rewards
            row[: len(got)] += got
    constant = int(rewards.sum(axis=1).argmax())

    def earned(timetable: NDArray[np.int_], on: Sequence[int]) -> FloatArray:
        return environment.returns(reset, on, [pool[i] for i in timetable])

    # The constant, but in each step the action that earned most in that step; then changes of random stretches.
    timetable = np.full(environment.most_steps, constant)
    value = rewards[constant].sum() / len(CHOOSING_SEEDS)
    tried = np.where(rewards.max(axis=0) > rewards[constant], rewards.argmax(axis=0), constant)
    for _ in range(TIMETABLES):
        if (found := earned(tried, CHOOSING_SEEDS).mean()) > value:
            timetable, value = tried, found
        tried = timetable.copy()
        start, stop = sorted(rng.integers(max(len(each.rewards) for each in drawn) + 1, size=2))
        tried[start:stop] = rng.integers(len(pool))
    random = np.array([sum(each.rewards) for each in drawn])
    best, blind = environment.returns(reset, seeds, repeat(pool[constant])), earned(timetable, seeds)
    # The same episodes again, and the same actions in the episode of another seed.
    again, moved = ([environment.play(reset, s + by, actions.random(s)) for s in seeds[:REPLAYED]] for by in (0, 1))
    played = environment.played[before:]
    totals = [sum(each.rewards) for each in played]
    returns = {"random": random, "best_constant": best, "best_timetable": blind}
    report = {
        "reset": dict(reset),
        **{name: interval(each).to_dict() for name, each in returns.items()},
        "constant": pool[constant],
        "timetable": [{"action": pool[i], "steps": len([*same])} for i, same in itertools.groupby(timetable)],
        "constant_over_random": paired(best, random).to_dict(),
        "timetable_over_constant": paired(blind, best).to_dict(),
        "determinism": {
            "replays": len(again),
            "same_rewards": sum(a.rewards == b.rewards for a, b in zip(drawn, again, strict=False)),
            "same_observations": sum(a.seen == b.seen for a, b in zip(drawn, again, strict=False)),
            "same_rewards_of_another_seed": sum(a.rewards == b.rewards for a, b in zip(drawn, moved, strict=False)),
        },
        "range": [min(totals), max(totals)],
        "episodes": len(played),
        "ended_by_server": sum(each.ended for each in played),
        "refused_actions": sum(each.refused for each in played),
    }
    return report, returns


def _malformed(
    environment: RunningEnvironment, reset: Mapping[str, Any], seeds: Sequence[int], valid: Action, random: FloatArray
) -> dict[str, dict[str, Any]]:
    """What each malformed action, sent in every step, leads to and earns."""
    kinds: dict[str, Action] = {"empty": {}, "unknown field": valid | {"no_such_field": 1}}
    for name, value in valid.items():
        wrong: dict[str, Any] = {"null": None, "a list": [[]]} | (
            {"huge": 10**30} if type(value) in (int, float) else {}
        )
        kinds |= {f"{name} {how}": valid | {name: instead} for how, instead in wrong.items()}
    found: dict[str, dict[str, Any]] = {}
    for kind, action in kinds.items():
        before = len(environment.played)
        found[kind] = entry = {"action": action, "outcome": "refused", "return": None, "over_random": None}
        try:
            earned = environment.returns(reset, seeds, repeat(action))
        except InferenceGymError as error:
            entry["outcome"] = f"breaks the session: {error}"
            try:
                environment.play(reset, seeds[0], [valid])
            except InferenceGymError:
                entry["outcome"] = f"STOPS THE SERVER: {error}"
                break
            continue
        played = environment.played[before:]
        if taken := sum(len(each.rewards) for each in played):
            entry["outcome"] = f"accepted in {taken} of {taken + sum(each.refused for each in played)} steps"
            entry["return"] = interval(earned).to_dict()
            entry["over_random"] = paired(earned, random).to_dict()
    return found


def _notes(played: Sequence[Episode], most_steps: int, free: set[str]) -> list[str]:
    """What limits the figures of a report."""
    notes = {
        "no step had a reward": not any(each.rewarded for each in played),
        "all episodes have the same return: nothing that was tried matters": len({sum(e.rewards) for e in played}) == 1,
        f"the server ended no episode; returns are of the first {most_steps} steps": not any(e.ended for e in played),
        f"/schema names neither values nor bounds of {', '.join(sorted(free))}: samples of these say little; name "
        "actions that make sense": bool(free),
    }
    return [note for note, holds in notes.items() if holds]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
