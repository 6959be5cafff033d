"""Inspect solver: a model sets the knobs of the serving fleet every few seconds until the episode is over.

    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageUser
    from inspect_ai.solver import solver

    @solver
    def fleet(base_url="http://localhost:7860"):
        return model_solver(base_url, lambda text: ChatMessageUser(content=text))

    eval(Task(dataset=[Sample(input="Run the fleet.", metadata={"task_id": 3, "seed": 7})], solver=fleet(), scorer=...))

Inspect is not imported: a solver is a function of a state and of ``generate``, and that is all this module knows of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from agents.integrations.text_episode import TextEpisode

SECONDS_PER_ANSWER: Final = 10


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

    The model is briefed, then sees the fleet every ``seconds_per_answer`` seconds, in messages that ``message`` makes
    of a text. An answer that is no valid action is put to it with the error, and the fleet runs on with the knobs it
    has, as fleets do. At the end ``state.metadata`` holds ``score`` and ``breakdown``, ``invalid_answers`` and the
    ``session_id``.
    """

    async def solve(state: SampleState, generate: Generate) -> SampleState:
        row = state.metadata
        config = {"hold": seconds_per_answer, **row.get("config", {})}
        episode = await asyncio.to_thread(TextEpisode, base_url, row.get("task_id", 1), row.get("seed"), config)
        try:
            shown = episode.briefing
            while not episode.done:
                state.messages.append(message(shown))
                state = await generate(state)
                shown = await asyncio.to_thread(episode.answer, state.output.completion)
        finally:
            episode.close()
        state.metadata |= {
            "score": episode.score,
            "breakdown": episode.outcome["breakdown"],
            "invalid_answers": episode.invalid_answers,
            "session_id": episode.session_id,
        }
        return state

    return solve
