"""The quality report of a running OpenEnv server: known answers, other servers, our own, and plain errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

from agents.integrations.openenv_quality import Actions, quality, text
from agents.seeds import held_out_seeds
from cli.main import main
from env.inference_env import InferenceEnv
from inferencegym.errors import InvalidConfigError, ServerUnavailableError
from tests.checkout import ROOT
from tests.openenv_guessing import STEPS, answers
from tests.servers import RunningServer, free_port, wait_for_health

LEVELS = [{"level": name} for name in ("fixed", "clock", "observed", "noise")]
EPISODES = 6


@contextmanager
def serving(*command: str) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", *(part.format(port=port) for part in command)], cwd=ROOT)
    try:
        wait_for_health(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def game() -> Iterator[str]:
    with serving("tests.openenv_guessing", "{port}") as url:
        yield url


@pytest.fixture(scope="module")
def report(game: str) -> dict[str, Any]:
    # A server of its own, which the last malformed action stops.
    with serving("tests.openenv_guessing", "{port}") as url:
        return quality(url, LEVELS, episodes=EPISODES, candidates=40)


def level(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in report["levels"] if each["reset"] == {"level": name})


def earned(guesses: list[int], name: str) -> float:
    """Mean return of a fixed sequence of guesses on the scoring seeds, by the rules of the game."""
    return float(np.mean([sum(map(int.__eq__, guesses, answers(name, seed))) for seed in held_out_seeds(EPISODES)]))


def guesses(found: dict[str, Any]) -> list[int]:
    return [each["action"].get("choice", 2) for each in found["timetable"] for _ in range(each["steps"])][:STEPS]


def test_a_constant_earns_all_where_the_answer_is_fixed_and_a_timetable_where_it_goes_by_the_clock(
    report: dict[str, Any],
) -> None:
    fixed, clock = level(report, "fixed"), level(report, "clock")
    assert fixed["best_constant"] == {"mean": STEPS, "ci95_low": STEPS, "ci95_high": STEPS}
    assert fixed["constant"].get("choice", 2) == 2
    assert clock["best_constant"]["mean"] == STEPS / 2
    assert clock["best_timetable"]["mean"] == STEPS == earned(guesses(clock), "clock")
    assert clock["timetable_over_constant"]["mean"] == STEPS / 2


def test_blind_play_earns_less_than_looking_where_the_answer_is_drawn(report: dict[str, Any]) -> None:
    found = level(report, "observed")
    constant = found["constant"].get("choice", 2)
    assert found["best_constant"]["mean"] == pytest.approx(earned([constant] * STEPS, "observed"))
    assert found["best_timetable"]["mean"] == pytest.approx(earned(guesses(found), "observed"))
    # Whoever looks earns a reward in every step.
    assert max(found["best_constant"]["ci95_high"], found["best_timetable"]["ci95_high"]) < STEPS
    assert "headroom" in report["not_measured"]


def test_levels_are_compared_on_the_same_seeds(report: dict[str, Any]) -> None:
    clock_over_observed = report["level_over_next"][1]
    expected = STEPS - level(report, "observed")["best_timetable"]["mean"]
    assert clock_over_observed["best_timetable"]["mean"] == pytest.approx(expected)
    assert len(report["level_over_next"]) == len(LEVELS) - 1


def test_episodes_that_the_seed_determines_are_told_from_those_it_does_not(report: dict[str, Any]) -> None:
    found = {name: level(report, name)["determinism"] for name in ("fixed", "observed", "noise")}
    assert found["fixed"] == {
        "replays": 3,
        "same_rewards": 3,
        "same_observations": 3,
        "same_rewards_of_another_seed": 3,
    }
    assert (found["observed"]["same_rewards"], found["observed"]["same_observations"]) == (3, 3)
    assert found["observed"]["same_rewards_of_another_seed"] < 3
    # Two drawn episodes are equal once in 4,096 times.
    assert found["noise"]["same_observations"] < 3


def test_malformed_actions_are_refused_or_earn_or_stop_the_server(report: dict[str, Any]) -> None:
    floor = report["adversarial_floor"]
    # An empty action guesses the default, which is right at the first level.
    assert floor["empty"]["outcome"] == f"accepted in {STEPS * EPISODES} of {STEPS * EPISODES} steps"
    assert floor["empty"]["return"]["mean"] == STEPS
    assert floor["empty"]["over_random"]["mean"] == STEPS - level(report, "fixed")["random"]["mean"]
    assert floor["mood huge"]["outcome"].startswith("breaks the session: the server refuses reset")
    assert floor["mood huge"]["return"] is None
    refused = ("unknown field", "choice null", "choice a list", "choice huge", "loudness null", "loudness a list")
    assert [floor[name]["outcome"] for name in refused] == ["refused"] * len(refused)
    assert floor["loudness huge"]["outcome"].startswith("STOPS THE SERVER")


def test_the_report_is_printed_with_what_limits_it(report: dict[str, Any]) -> None:
    printed = text(report)
    assert "  best timetable  6.000 [6.000, 6.000], over the constant 3.000 [3.000, 3.000]" in printed
    assert [note for note in report["notes"] if "bounds of loudness, mood" in note]
    assert all(note in printed for note in report["notes"])


def test_named_actions_alone_are_played_where_nothing_is_sampled(game: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = [f'--action={{"choice": {choice}}}' for choice in (0, 2)]
    command = ["quality", "--url", game, "--candidates=0", "--episodes=2", '--reset={"level": "fixed"}', "--json"]
    assert main([*command, *named]) == 0
    (found,) = json.loads(capsys.readouterr().out)["levels"]
    assert found["constant"] == {"choice": 2}
    assert {json.dumps(each["action"]) for each in found["timetable"]} <= {'{"choice": 0}', '{"choice": 2}'}


def test_the_stock_echo_server_rewards_nothing_and_refuses_what_its_schema_forbids() -> None:
    with serving("benchmarks.speed.openenv_server", "--serve-echo", "{port}", "plain") as url:
        found = quality(url, named=[{"message": "hi"}], episodes=2, candidates=3, most_steps=4)
        with pytest.raises(InvalidConfigError, match=r'refuses the action .*"text"'):
            quality(url, named=[{"text": "hi"}], episodes=2)
    (only,) = found["levels"]
    assert only["range"] == [0.0, 0.0]
    assert only["determinism"]["same_observations"] == 3 - 1  # two episodes are all that there are
    assert {each["outcome"] for each in found["adversarial_floor"].values()} == {"refused"}
    assert len(found["notes"]) == 3


def test_our_own_server_earns_what_is_earned_in_process(server: RunningServer) -> None:
    reset = {"task_id": 3, "config": {"episode_length": 5}}
    found = quality(server.url, [reset], episodes=2, candidates=2)
    (only,) = found["levels"]
    returns = []
    for seed in held_out_seeds(2):
        env = InferenceEnv()
        env.reset(seed=seed, **reset)
        returns.append(sum(env.step(only["constant"])[1] for _ in range(5)))
    assert only["best_constant"]["mean"] == pytest.approx(np.mean(returns), rel=1e-6)
    assert only["determinism"]["same_rewards"] == only["determinism"]["replays"] == 2
    assert only["ended_by_server"] == only["episodes"]
    assert found["adversarial_floor"]["unknown field"]["outcome"] == "refused"


def test_errors_say_what_is_wrong(game: str, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    for url in (dead, "nonsense", f"{server.url}/nothing", f"{game}/docs"):
        with pytest.raises(ServerUnavailableError, match="is an OpenEnv server there"):
            quality(url)
    with pytest.raises(InvalidConfigError, match=r'refuses reset {"level": "none"} with seed 2000'):
        quality(game, [{"level": "none"}])
    for wrong in (["quality"], ["quality", "1", "--url", dead], ["quality", "--url", dead, '--reset={"seed": 1}']):
        assert main(wrong) == 2
    with pytest.raises(SystemExit):
        main(["quality", "--url", dead, "--action=[]"])
    assert "is not a JSON object" in capsys.readouterr().err


Colour = Enum("Colour", {"RED": "red", "BLUE": "blue"})


class Part(BaseModel, extra="forbid"):
    share: float = Field(ge=-0.5, le=0.5)
    count: int = Field(gt=3, lt=6)


class Rich(BaseModel, extra="forbid"):
    kind: Literal["rich"]
    colour: Colour
    parts: list[Part] = Field(min_length=1, max_length=2)
    pair: tuple[int, bool]
    either: Part | str | None = None
    name: str = Field(min_length=8)
    open: int = 0
    high: int = Field(0, ge=10**25, le=10**25 + 1)
    table: dict[str, int] = {}


def test_samples_fit_the_schema_that_they_are_drawn_from() -> None:
    actions = Actions(Rich.model_json_schema(), [], 300)
    drawn = [Rich.model_validate(each) for each in actions.candidates(np.random.default_rng(1))]
    assert len({each.colour for each in drawn}) == len({len(each.parts) for each in drawn}) == 2
    assert {each.parts[0].count for each in drawn} == {4, 5}
    assert {type(each.either) for each in drawn} == {Part, str, type(None)}
    assert actions.free == {"pair", "either", "name", "open"}


class Tree(BaseModel):
    children: list[Tree] = Field(min_length=1)


def test_a_schema_that_contains_itself_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="name actions"):
        Actions(Tree.model_json_schema(), [], 1).candidates(np.random.default_rng(0))
