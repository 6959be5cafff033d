"""Inspect solver: a model sets the knobs of the serving fleet every few seconds until the episode is over.

    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageUser
    from inspect_ai.solver import solver

    @solver
    def fleet(base_url="http://localhost:7860"):
        return model_solver(base_url, lambda text: ChatMessageUser(content=text))

    eval(Task(dataset=[Sample(input=BRIEFING, metadata={"task_id": 3, "seed": 7})], solver=fleet(), scorer=...))

Inspect is not imported: a solver is a function of a state and of ``generate``, and that is all this module knows of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from agents.integrations.text_episode import parse_answer, state_text
from inferencegym.client import AsyncInferenceGymHTTP
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION

SECONDS_PER_ANSWER: Final = 10
BRIEFING: Final = (
    "You run a fleet that serves a language model. Whenever you are shown its state, answer with one JSON object that "
    "sets any of these knobs; what you leave out stays as it is. "
    + " ".join(f"{field.name}: {field.description}, {field.allowed()}." for field in ACTION_FIELDS.values())
)


class SampleState(Protocol):
    """The part of Inspect's ``TaskState`` that the solver uses."""

    messages: list[Any]
    metadata: dict[str, Any]
    output: Any


Generate = Callable[[Any], Awaitable[Any]]
Message = Callable[[str], Any]
Solve = Callable[[Any, Generate], Awaitable[Any]]


def model_solver(base_url: str, message: Message, seconds_per_answer: int = SECONDS_PER_ANSWER) -> Solve:
    """A solver that runs the episode named by the sample's metadata: ``task_id``, ``seed`` and ``config``.

    The model sees the fleet every ``seconds_per_answer`` seconds, in a message that ``message`` makes of a text. An
    answer that is no valid action is put to it with the error, and the fleet runs on with the knobs it has, as fleets
    do. At the end ``state.metadata`` holds ``score`` and ``breakdown`` from the server's grader, ``mean_reward``,
    ``invalid_answers`` and the ``session_id``.
    """

    async def solve(state: SampleState, generate: Generate) -> SampleState:
        wanted = {name: state.metadata[name] for name in ("task_id", "seed", "config") if name in state.metadata}
        async with AsyncInferenceGymHTTP(base_url) as env:
            observation = await env.reset(**wanted)
            knobs, problem = NAIVE_ACTION.to_dict(), ""
            rewards: list[float] = []
            invalid, done = 0, False
            while not done:
                state.messages.append(message(problem + state_text(observation, knobs)))
                state = await generate(state)
                knobs, problem = parse_answer(state.output.completion, knobs)
                invalid += bool(problem)
                for _ in range(seconds_per_answer):
                    observation, reward, done, _info = await env.step(knobs)
                    rewards.append(reward)
                    if done:
                        break
            grade = await env.grade()
            state.metadata |= {
                "score": grade["score"],
                "breakdown": grade["breakdown"],
                "mean_reward": sum(rewards) / len(rewards),
                "invalid_answers": invalid,
                "session_id": env.session_id,
            }
        return state

    return solve
