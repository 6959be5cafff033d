"""Random histories against a real server over HTTP, WebSockets and batches, with kills, and the library as the oracle.

Every answer has to be the one that environments and graders give in this process, to the last bit. After each rule the
store must hold every acknowledged step (it is read past the server, whose environments in memory are not disturbed by
that: the server holds two, so sessions are evicted and rebuilt all the time), the server must be ready, and its log
must hold no traceback. At the end of a history, and whenever a rule says so, every session is asked for its state, for
earlier answers and for its grade, and the counters of /metrics are compared with what was asked.

    pytest tests/server/test_server_machine.py                            the fixed histories that every run tries
    pytest -s -m soak tests/server/test_server_machine.py                        others: seed and totals are printed
    SOAK_SEED=7 SOAK_HISTORIES=20 pytest -s -m soak tests/server/test_server_machine.py      those of a seed again
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inferencegym.batch_format import MEDIA_TYPE, BatchSteps, decode_answer, encode_request
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW
from inferencegym.traffic import ACTION_NAMES
from tests.bad_requests import bad_binary_requests, bad_frames, bad_requests
from tests.redis_server import RedisServer
from tests.reference import SERVING, TRAFFIC, BatchEpisodes, Episode, Kind, Refused, exactly
from tests.server_under_test import (
    BATCHES,
    CONNECTIONS,
    DROPPED,
    Socket,
    Subject,
    counted_by,
    refused_with,
    subject,
)
from tests.servers import until

JSON: Final = {"content-type": "application/json"}
BINARY: Final = {"content-type": MEDIA_TYPE}
STEPS_OF_A_HISTORY: Final = 40
MOST_UPLOADS: Final = 3
"""In one history; each starts a process."""
AUDIT_EVERY: Final = 10
"""Rules between two audits at least: one of all sessions loads them all."""


# ---------------------------------------------------------------- what is drawn

KINDS = st.sampled_from([SERVING, TRAFFIC])
SEEDS = st.sampled_from([0, 1, 42, 2**32, 2**63 - 1])
PLACES = st.integers(0, 2**16)
"""Chooses from a list whose length is known later, by its remainder."""
SERVING_ACTIONS = st.fixed_dictionaries(
    {"kv_budget": st.floats(0.1, 1.0), "batch_size": st.integers(1, 512)},
    optional={
        "spec_length": st.sampled_from([0, 1, 2, 4, 8]),
        "prefill_disagg": st.sampled_from([True, False, 0, 1]),
        "quant_tier": st.sampled_from([0, 1, 2, "INT8"]),
    },
)
TRAFFIC_ACTIONS = st.sampled_from(ACTION_NAMES)
ACTIONS = st.tuples(SERVING_ACTIONS, TRAFFIC_ACTIONS)
"""One action of either kind; the episode takes its own."""
SERVING_CONFIGS = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"episode_length": st.integers(1, 12)},
        optional={"alpha": st.sampled_from([0.25, 1]), "hardware": st.just("a100-80gb")},
    ),
)
TRAFFIC_CONFIGS = st.sampled_from([None, {}, {"server_capacity": 80.0}, {"traffic_scale": 2, "max_queue": 50}])


@dataclass(frozen=True)
class Start:
    """What a reset asks for, of either kind; None: left out."""

    serving_task: Any
    traffic_task: Any
    seed: int | None
    serving_config: dict[str, Any] | None
    traffic_config: dict[str, Any] | None

    def of(self, kind: Kind) -> dict[str, Any]:
        task = self.serving_task if kind is SERVING else self.traffic_task
        config = self.serving_config if kind is SERVING else self.traffic_config
        if config and task == "azure-code":  # which is calibrated on its own hardware alone
            config = {name: value for name, value in config.items() if name != "hardware"}
        wanted = {"task_id": task, "seed": self.seed, "config": config}
        return {name: value for name, value in wanted.items() if value is not None}


STARTS = st.builds(
    Start,
    st.sampled_from([None, 1, 2, 3, "3", "azure-code"]),
    st.sampled_from([None, "task_easy", "task_medium", "task_hard"]),
    st.none() | SEEDS,
    SERVING_CONFIGS,
    TRAFFIC_CONFIGS,
)


UPLOADS: Final[dict[str, str]] = {
    "played": "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i / 4},{100 + i},{20 + i}\n" for i in range(40)),
    "empty": "",
    "binary": "PAR1\x00\x01" * 100 + "PAR1",
    "not numbers": "arrival_s,prompt_tokens,output_tokens\nnow,1,1\n",
    "wide": "arrival_s," * 20_000 + "\n" + "1," * 20_000 + "\n",
}
"""Logs that clients hand in, by what is wrong with them; the first is played."""


# ---------------------------------------------------------------- the machine


class Histories(RuleBasedStateMachine):
    """Clients act in any order, and the server's process may end at any moment."""

    episodes = Bundle("episodes")
    sockets = Bundle("sockets")
    batches = Bundle("batches")

    subject: ClassVar[Subject]
    most_restarts: ClassVar[int]
    """Most restarts in one history; a start takes a second."""

    def __init__(self) -> None:
        super().__init__()
        if not self.subject.clean:
            self.subject.restart(self.subject.server.kill)
        self.subject.clean = False
        self.subject.new_log()
        self.known: list[Episode] = []
        self.opened: list[Socket] = []
        self.open_batches: list[BatchEpisodes] = []
        self.may_be_sent_again: dict[BatchEpisodes, tuple[dict[str, Any], bytes]] = {}
        self.latest: dict[Kind, Episode] = {}
        self.requests = self.rules = self.restarts = self.uploads = 0
        self.audit_from = AUDIT_EVERY

    # ------------------------------------------------------------ asking

    def send(
        self, method: str, path: str, body: Any = None, client: httpx.Client | None = None, **more: Any
    ) -> httpx.Response:
        """Send a request over the next connection, and count it."""
        self.requests += 1
        client = client or self.subject.clients[self.requests % CONNECTIONS]
        answer = client.request(method, path, json=body, **more)
        # Clients are told apart by address alone here.
        client.cookies.clear()
        self.count(path, answer.status_code)
        return answer

    def count(self, path: str, status: int) -> None:
        self.subject.tally.answers[path.partition("?")[0], status] += 1
        self.subject.totals["requests"] += 1
        self.subject.totals["refused"] += status >= 400

    def must_give(self, answer: httpx.Response, expected: dict[str, Any] | Refused) -> None:
        """The answer is the expected one, bit by bit."""
        if isinstance(expected, Refused):
            assert answer.status_code == expected.status, answer.text
            assert answer.json()["detail"]["code"] == expected.code
        else:
            assert answer.status_code == 200, answer.text
            assert exactly(answer.json()) == exactly(expected)

    def counted(self, expected: dict[str, Any] | Refused) -> dict[str, Any] | Refused:
        """Note in the tally what this answer to a step means for the server's counters."""
        if isinstance(expected, dict):
            self.subject.tally.counters["answered_steps"] += 1
            self.subject.totals["steps"] += 1
        elif expected.code == "step_conflict":
            self.subject.tally.counters["conflicts"] += 1
        return expected

    @staticmethod
    def action_of(episode: Episode, action: tuple[Any, Any], spelled: bool = False) -> Any:
        chosen = action[episode.kind is TRAFFIC]
        return {"action": chosen} if spelled and episode.kind is TRAFFIC else chosen

    def step_body(self, episode: Episode, action: Any, number: int | None) -> dict[str, Any]:
        body = {"session_id": episode.session_id, "action": action}
        return body if number is None else {**body, "step": number}

    def post_step(self, episode: Episode, action: Any, number: int | None) -> None:
        answer = self.send("POST", f"{episode.kind.prefix}/step", self.step_body(episode, action, number))
        self.must_give(answer, self.counted(episode.step(action, number)))

    def begun(self, episode: Episode) -> None:
        self.subject.tally.counters["resets"] += 1
        self.subject.totals["episodes"] += 1
        self.latest[episode.kind] = episode
        if episode not in self.known:
            self.known.append(episode)

    # ------------------------------------------------------------ sessions over HTTP

    @initialize(target=episodes, serving=STARTS, traffic=STARTS)
    def begin(self, serving: Start, traffic: Start) -> MultipleResults[Episode]:
        return multiple(self.reset(SERVING, serving), self.reset(TRAFFIC, traffic))

    @rule(target=episodes, kind=KINDS, start=STARTS)
    def reset(self, kind: Kind, start: Start) -> Episode:
        wanted = start.of(kind)
        answer = self.send("POST", f"{kind.prefix}/reset", wanted)
        episode = Episode(kind)
        episode.reset(wanted.get("task_id"), wanted.get("seed"), wanted.get("config"))
        assert answer.status_code == 200, answer.text
        episode.named(answer.json()["session_id"])
        self.must_give(answer, episode.first())
        self.begun(episode)
        return episode

    @rule(episode=episodes, start=STARTS)
    def restart(self, episode: Episode, start: Start) -> None:
        wanted = start.of(episode.kind)
        answer = self.send("POST", f"{episode.kind.prefix}/reset", {**wanted, "session_id": episode.session_id})
        episode.reset(wanted.get("task_id"), wanted.get("seed"), wanted.get("config"))
        self.must_give(answer, episode.first())
        self.begun(episode)

    @rule(episode=episodes, action=ACTIONS, numbered=st.booleans(), spelled=st.booleans())
    def step(self, episode: Episode, action: tuple[Any, Any], numbered: bool, spelled: bool) -> None:
        number = episode.taken + 1 if numbered else None
        self.post_step(episode, self.action_of(episode, action, spelled), number)

    @rule(episode=episodes, actions=st.lists(ACTIONS, min_size=1, max_size=4), steps=st.sampled_from([3, 12, 50]))
    def play_on(self, episode: Episode, actions: list[tuple[Any, Any]], steps: int) -> None:
        """Several steps; past the end they are refused."""
        for index in range(steps):
            done = episode.env.done
            self.post_step(episode, self.action_of(episode, actions[index % len(actions)]), episode.taken + 1)
            if done:
                return

    @rule(episode=episodes, place=PLACES, action=ACTIONS, same=st.booleans())
    def step_again(self, episode: Episode, place: int, action: tuple[Any, Any], same: bool) -> None:
        """An answer may be asked for again at any time; another action for the step is a conflict."""
        if episode.asked:
            number = 1 + place % episode.taken
            self.post_step(episode, episode.asked[number - 1] if same else self.action_of(episode, action), number)

    @rule(episode=episodes, action=ACTIONS, ahead=st.sampled_from([2, 3, 5_001, 2**31 - 1]))
    def step_ahead(self, episode: Episode, action: tuple[Any, Any], ahead: int) -> None:
        self.post_step(episode, self.action_of(episode, action), min(episode.taken + ahead, 2**31 - 1))

    @rule(action=TRAFFIC_ACTIONS)
    def step_the_latest(self, action: str) -> None:
        """The traffic controller's document lets a step name no session."""
        answer = self.send("POST", "/traffic/step", {"action": action})
        self.must_give(answer, self.counted(self.latest[TRAFFIC].step(action)))

    @rule(episode=episodes, action=ACTIONS)
    def step_whose_answer_is_not_read(self, episode: Episode, action: tuple[Any, Any]) -> None:
        """The client disconnects when the answer arrives, reconnects and sends the step again."""
        wanted, number = self.action_of(episode, action), episode.taken + 1
        path, body = f"{episode.kind.prefix}/step", json.dumps(self.step_body(episode, wanted, number)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", self.subject.server.port), timeout=60) as connection:
            connection.sendall(head.encode() + b"\r\n" + body)
            assert connection.recv(1) == b"H"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DROPPED)
        expected = self.counted(episode.step(wanted, number))
        self.count(path, expected.status if isinstance(expected, Refused) else 200)
        self.post_step(episode, wanted, number)

    @rule(episode=episodes, action=ACTIONS, count=st.integers(2, 8), how=st.sampled_from(["same", "next", "race"]))
    def burst(self, episode: Episode, action: tuple[Any, Any], count: int, how: str) -> None:
        """Several concurrent requests for one session, while another client reads its state.

        The same step is played once; steps without numbers are all played; of different actions for one step, one wins.
        """
        wanted = self.action_of(episode, action)
        bodies = [self.step_body(episode, wanted, None if how == "next" else episode.taken + 1) for _ in range(count)]
        if how == "race":
            for index, body in enumerate(bodies):
                body["action"] = self.rival(episode, index)
        prefix, first = episode.kind.prefix, episode.taken
        with (
            ThreadPoolExecutor(count + 1) as pool,
            httpx.Client(base_url=self.subject.server.url, timeout=60) as client,
        ):
            sent = [pool.submit(client.post, f"{prefix}/step", json=body) for body in bodies]
            looking = pool.submit(client.get, f"{prefix}/state", params={"session_id": episode.session_id})
            answers = [one.result() for one in sent]
            seen = looking.result()
        for answer in answers:
            self.count(f"{prefix}/step", answer.status_code)
        self.count(f"{prefix}/state", seen.status_code)
        if how == "race" and not episode.env.done:
            winner = next(index for index, answer in enumerate(answers) if answer.status_code == 200)
            self.must_give(answers[winner], self.counted(episode.step(bodies[winner]["action"])))
            del answers[winner], bodies[winner]
        expected = [self.counted(episode.step(body["action"], body.get("step"))) for body in bodies]
        for answer, one in zip(self.in_order(answers, how), expected, strict=True):
            self.must_give(answer, one)
        assert exactly(seen.json()) in [exactly(state) for state in episode.states[first:]]

    @staticmethod
    def rival(episode: Episode, index: int) -> Any:
        return {"batch_size": 1 + index % 4} if episode.kind is SERVING else ACTION_NAMES[index % len(ACTION_NAMES)]

    @staticmethod
    def in_order(answers: list[httpx.Response], how: str) -> list[httpx.Response]:
        """Steps without numbers may be played in any order: theirs is the one of their time steps."""
        if how != "next":
            return answers

        def time_step(answer: httpx.Response) -> float:
            if answer.status_code != 200:
                return np.inf
            info = answer.json()["info"]
            return float(info["timestep"] if "timestep" in info else info["episode_step"])

        return sorted(answers, key=time_step)

    # ------------------------------------------------------------ looking and grading

    @rule(episode=episodes)
    def state(self, episode: Episode) -> None:
        answer = self.send("GET", f"{episode.kind.prefix}/state?session_id={episode.session_id}")
        self.must_give(answer, episode.state())

    @rule(kind=KINDS)
    def state_of_the_latest(self, kind: Kind) -> None:
        state = dict(self.latest[kind].state())
        del state["session_id"]
        self.must_give(self.send("GET", f"{kind.prefix}/state"), state)

    @rule(episode=episodes, task=st.sampled_from(["none", "own", "other"]))
    def grade(self, episode: Episode, task: str) -> None:
        other = 2 if episode.env.task_id == 1 else 1
        task_id = {"none": None, "own": episode.env.task_id, "other": other}[task]
        body = {"session_id": episode.session_id, "task_id": task_id}
        answer = self.send("POST", f"{episode.kind.prefix}/grader", body)
        self.must_give(answer, Refused(409, "session_conflict") if task == "other" else episode.grade())

    @rule(episode=episodes, verify=st.booleans(), forgery=st.sampled_from([None, "reward", "metric", "cut", "twice"]))
    def grade_log(self, episode: Episode, verify: bool, forgery: str | None) -> None:
        """A log is graded as it is; verified, only the true log of a whole episode passes."""
        log, env = episode.log(), episode.env
        about = {"task_id": env.task_id, "seed": env.seed, "config": env.config_dict(), "verify": verify}
        if forgery is not None and (not log or not verify):
            return
        if forgery is not None:
            forge(log, forgery)
        answer = self.send("POST", f"{episode.kind.prefix}/grader", {**about, "episode_log": log})
        if verify and log and (forgery is not None or not env.done):
            assert answer.status_code == 422, answer.text
            assert answer.json()["detail"]["code"] in ("forged_log", "malformed_log")
        else:
            self.must_give(answer, episode.grade_of_log(verified=verify and bool(log)))

    # ------------------------------------------------------------ WebSockets

    def ask(self, player: Socket, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        self.subject.totals["frames"] += 1
        return player.ask(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))

    @rule(target=sockets, episode=episodes, info=st.booleans())
    def connect(self, episode: Episode, info: bool) -> Socket:
        """A socket that goes on with an episode, be it played over HTTP or by other sockets."""
        player = Socket(episode.kind, self.subject.server.url)
        self.opened.append(player)
        assert self.ask(player, "state") == {"type": "state", "data": {"episode_id": None, "step_count": 0}}
        self.resume(player, episode, info)
        return player

    @rule(target=episodes, player=sockets, start=STARTS, info=st.booleans())
    def reset_over_websocket(self, player: Socket, start: Start, info: bool) -> Episode:
        wanted = start.of(player.kind)
        episode = Episode(player.kind, session_id=f"soak.{uuid.uuid4()}")
        answer = self.ask(player, "reset", {**wanted, "episode_id": episode.session_id, "info": info})
        episode.reset(wanted.get("task_id"), wanted.get("seed"), wanted.get("config"))
        assert exactly(answer) == exactly(episode.frame(None, info))
        self.begun(episode)
        player.plays(episode, 0, info)
        return episode

    @rule(player=sockets, episode=episodes, start=STARTS)
    def restart_over_websocket(self, player: Socket, episode: Episode, start: Start) -> None:
        wanted = start.of(player.kind)
        answer = self.ask(player, "reset", {**wanted, "episode_id": episode.session_id})
        if player.kind is not episode.kind:
            assert refused_with(answer) == "unknown_session"
            return
        episode.reset(wanted.get("task_id"), wanted.get("seed"), wanted.get("config"))
        assert exactly(answer) == exactly(episode.frame(None, False))
        self.begun(episode)
        player.plays(episode, 0, False)

    @rule(player=sockets, episode=episodes, info=st.booleans())
    def resume(self, player: Socket, episode: Episode, info: bool) -> None:
        answer = self.ask(player, "reset", {"episode_id": episode.session_id, "resume": True, "info": info})
        if player.kind is not episode.kind:
            assert refused_with(answer) == "unknown_session"
            return
        last = episode.answers[-1] if episode.answers else None
        assert exactly(answer) == exactly(episode.frame(last, info))
        player.plays(episode, episode.taken, info)

    @rule(player=sockets, actions=st.lists(ACTIONS, min_size=1, max_size=5), numbered=st.booleans())
    def step_over_websocket(self, player: Socket, actions: list[tuple[Any, Any]], numbered: bool) -> None:
        """Steps of the socket's own count, or with their number in the episode."""
        for action in actions:
            episode = player.episode
            data = {"action": action[1]} if player.kind is TRAFFIC else dict(action[0])
            wanted, number = dict(data), player.taken + 1
            if numbered and episode is not None:
                number = episode.taken + 1
                data["metadata"] = {"step": number}
            answer = self.ask(player, "step", data)
            if player.connection is None or player.episode is None:
                assert refused_with(answer) == "not_reset"
                return
            assert episode is not None
            if player.reset != episode.resets:
                self.subject.tally.counters["conflicts"] += 1
                assert refused_with(answer) == "step_conflict"
                return
            expected = self.counted(episode.step(wanted, number))
            if isinstance(expected, Refused):
                assert refused_with(answer) == expected.code
                return
            assert exactly(answer) == exactly(episode.frame(expected, player.with_info))
            player.taken = max(player.taken, number)

    @rule(player=sockets)
    def state_over_websocket(self, player: Socket) -> None:
        answer = self.ask(player, "state")
        if player.episode is None:
            assert answer == {"type": "state", "data": {"episode_id": None, "step_count": 0}}
        elif player.reset != player.episode.resets:
            assert refused_with(answer) == "step_conflict"
        else:
            assert exactly(answer) == exactly(player.episode.state_frame())

    @rule(player=sockets, how=st.sampled_from(["close", "frame", "drop"]))
    def leave(self, player: Socket, how: str) -> None:
        """The socket goes, with or without a word; it connects again when it is used again."""
        player.close(how)

    @rule(player=sockets, places=st.lists(PLACES, min_size=1, max_size=8))
    def bad_frame(self, player: Socket, places: list[int]) -> None:
        bad = bad_frames(player.kind)
        for place in places:
            frame = bad[place % len(bad)]
            self.subject.totals["frames"] += 1
            self.subject.totals["bad frames"] += 1
            assert refused_with(player.ask(frame)) != "internal", frame

    # ------------------------------------------------------------ batches

    def send_batch(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.send("POST", path, body, self.subject.batch_client, **more)

    @rule(
        target=batches,
        task=st.sampled_from([1, 3, "mooncake"]),
        seeds=st.lists(SEEDS, min_size=1, max_size=4),
        length=st.integers(1, 9),
        autoreset=st.booleans(),
    )
    def reset_batch(self, task: Any, seeds: list[int], length: int, autoreset: bool) -> BatchEpisodes:
        body = {"task_id": task, "seeds": seeds, "config": {"episode_length": length}, "autoreset": autoreset}
        answer = self.send_batch("/reset/batch", body)
        batch = BatchEpisodes(task, seeds, length, autoreset)
        if len(self.open_batches) == BATCHES:
            # its steps are those of a session that does not exist
            self.must_give(answer, Refused(429, "rate_limited"))
            batch.session_id = uuid.uuid4().hex
            return batch
        assert answer.status_code == 200, answer.text
        batch.session_id = answer.json()["session_id"]
        self.must_give(answer, batch.first())
        self.open_batches.append(batch)
        return batch

    @rule(batch=batches, first=st.integers(0, 2**62 - 1), autoreset=st.booleans(), as_it_was=st.booleans())
    def restart_batch(self, batch: BatchEpisodes, first: int, autoreset: bool, as_it_was: bool) -> None:
        n, length = len(batch.rows), batch.length if as_it_was else batch.length + 1
        body = {"task_id": batch.task_id, "n": n, "seed": first, "config": {"episode_length": length}}
        answer = self.send_batch("/reset/batch", {**body, "autoreset": autoreset, "session_id": batch.session_id})
        if batch not in self.open_batches:
            self.must_give(answer, Refused(404, "unknown_session"))
        elif not as_it_was:
            self.must_give(answer, Refused(409, "session_conflict"))
        else:
            batch.restart([first + row for row in range(n)], autoreset)
            self.may_be_sent_again.pop(batch, None)
            self.must_give(answer, batch.first())

    @rule(
        batch=batches,
        draw=PLACES,
        steps=st.integers(1, 12),
        form=st.sampled_from(["json", "<f4", "<f8"]),
        numbered=st.booleans(),
        last=st.booleans(),
        hold=st.booleans(),
    )
    def step_batch(
        self, batch: BatchEpisodes, draw: int, steps: int, form: str, numbered: bool, last: bool, hold: bool
    ) -> None:
        """K steps of all episodes, out of range as well, in any form; with a number, sent twice."""
        shape = (1 if hold else steps, len(batch.rows), 5)
        margin = 0.1 * (ACTION_HIGH - ACTION_LOW)
        actions = np.random.default_rng(draw).uniform(ACTION_LOW - margin, ACTION_HIGH + margin, shape)
        number = batch.taken + 1 if numbered else None
        if form == "json":
            body = {"session_id": batch.session_id, "actions": actions.tolist(), "last": last, "step": number}
            request: dict[str, Any] = {"content": json.dumps({**body, "repeat": steps if hold else None})}
            request["headers"] = JSON
        else:
            actions = actions.astype(form)
            wanted = BatchSteps(batch.session_id, actions, steps, number, last)
            request = {"content": encode_request(wanted), "headers": BINARY}
        answer = self.send_batch("/step/batch", **request)
        if batch not in self.open_batches:
            self.must_give(answer, Refused(404, "unknown_session"))
            return
        expected = batch.step(np.broadcast_to(actions, (steps, *shape[1:])), last)
        self.must_give_batch(answer, expected, form)
        if isinstance(expected, dict):
            self.subject.totals["batch steps"] += steps * len(batch.rows)
            self.may_be_sent_again.pop(batch, None)
            if numbered:
                self.may_be_sent_again[batch] = (request, answer.content)
                self.step_batch_again(batch, "again")

    def must_give_batch(self, answer: httpx.Response, expected: dict[str, Any] | Refused, form: str) -> None:
        if form == "json" or isinstance(expected, Refused):
            self.must_give(answer, expected)
            return
        assert answer.status_code == 200, answer.text
        played = decode_answer(answer.content)
        for name in ("observations", "rewards"):
            got, wanted = getattr(played, name), np.array(expected[name]).astype(form)
            assert got.dtype == wanted.dtype
            assert got.tobytes() == wanted.tobytes()
        told = (played.number, played.done.tolist(), played.episodes, played.steps_left)
        assert told == tuple(expected[name] for name in ("step", "done", "episodes", "steps_left"))

    @rule(batch=batches, how=st.sampled_from(["again", "other", "ahead", "before"]))
    def step_batch_again(self, batch: BatchEpisodes, how: str) -> None:
        """The latest numbered request is answered again, byte by byte; nothing else out of turn is taken."""
        if batch in self.open_batches and batch in self.may_be_sent_again and how == "again":
            request, before = self.may_be_sent_again[batch]
            answer = self.send_batch("/step/batch", **request)
            assert (answer.status_code, answer.content) == (200, before)
            return
        # One more step than ever was sent, so that it cannot be the latest request.
        number = {"ahead": batch.taken + 2}.get(how, max(1, batch.taken))
        actions = [[[0.5, 0, 7, 0, 0]] * len(batch.rows)] * 13
        answer = self.send_batch("/step/batch", {"session_id": batch.session_id, "actions": actions, "step": number})
        if batch not in self.open_batches:
            self.must_give(answer, Refused(404, "unknown_session"))
        elif number == batch.taken + 1:  # nothing was played yet: it is in turn
            self.must_give(answer, batch.step(np.array(actions), last=False))
            self.may_be_sent_again.pop(batch, None)
        else:
            self.must_give(answer, Refused(409, "step_conflict"))

    @rule(batch=batches)
    def close_batch(self, batch: BatchEpisodes) -> None:
        answer = self.send_batch("/close/batch", {"session_id": batch.session_id})
        if batch in self.open_batches:
            self.open_batches.remove(batch)
            self.must_give(answer, {"closed": True})
        else:
            self.must_give(answer, Refused(404, "unknown_session"))

    @rule(batch=batches, places=st.lists(PLACES, min_size=1, max_size=8))
    def bad_binary_request(self, batch: BatchEpisodes, places: list[int]) -> None:
        actions = np.full((1, len(batch.rows), 5), 0.5)
        bad = bad_binary_requests(batch, encode_request(BatchSteps(batch.session_id, actions, 1)))
        for place in places:
            one = bad[place % len(bad)]
            answer = self.send_batch(one.path, content=one.content, headers={"content-type": one.media_type})
            self.subject.totals["bad requests"] += 1
            assert 400 <= answer.status_code < 500, (one, answer.text)

    # ------------------------------------------------------------ what must be refused

    @rule(episode=episodes, batch=st.none() | batches, places=st.lists(PLACES, min_size=1, max_size=12))
    def bad_request(self, episode: Episode, batch: BatchEpisodes | None, places: list[int]) -> None:
        bad = bad_requests(episode, batch)
        for place in places:
            one = bad[place % len(bad)]
            more = {"content": one.content, "headers": {"content-type": one.media_type}}
            answer = self.send(one.method, one.path, **more)
            self.subject.totals["bad requests"] += 1
            assert 400 <= answer.status_code < 500, (one, answer.text)
            assert answer.json()["detail"]["next"]

    # ------------------------------------------------------------ logs that clients hand in

    @precondition(lambda self: self.uploads < MOST_UPLOADS)
    @rule(log=st.sampled_from(list(UPLOADS)), gone=st.booleans())
    def upload(self, log: str, gone: bool) -> None:
        """Played or refused; a client that hangs up takes its job along, and nobody waits for it."""
        self.uploads += 1
        self.subject.totals["uploads"] += 1
        body = {"log": UPLOADS[log], "policies": ["heuristic"]}
        if not gone:
            status = self.send("POST", "/shadow", body).status_code
            assert status == 200 if log == "played" else 400 <= status < 500, status
            return
        content = json.dumps(body).encode()
        head = (
            f"POST /shadow HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.subject.server.port), timeout=60) as connection:
            connection.sendall(head.encode() + b"\r\n" + content)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DROPPED)

    # ------------------------------------------------------------ ends of the server

    def process_ends(self, end: Callable[[], None]) -> None:
        self.subject.restart(end)
        self.restarts += 1
        self.open_batches.clear()
        for player in self.opened:
            player.close("drop")

    @precondition(lambda self: self.restarts < self.most_restarts)
    @rule(kill=st.sampled_from([True, True, False]))
    def end_of_the_server(self, kill: bool) -> None:
        """kill -9 or SIGTERM, of all its processes, between two requests."""
        self.metrics_agree()
        self.process_ends(self.subject.server.kill if kill else self.subject.server.stop)
        self.subject.totals["kills"] += kill

    @precondition(lambda self: self.subject.workers > 1 and self.restarts < self.most_restarts)
    @rule(which=PLACES)
    def end_of_one_worker(self, which: int) -> None:
        """kill -9 of one worker, whose supervisor lives: another one takes its place, and every session goes on."""
        for batch in list(self.open_batches):
            self.close_batch(batch)
        for player in self.opened:
            player.close("drop")
        self.subject.lose_a_worker(which)
        self.restarts += 1

    @precondition(lambda self: self.restarts < self.most_restarts)
    @rule(episode=episodes, action=ACTIONS, wait_ms=st.sampled_from([0, 0.2, 0.5, 1, 2, 4]))
    def kill_in_the_middle_of_a_step(self, episode: Episode, action: tuple[Any, Any], wait_ms: float) -> None:
        """The step was played or it was not; sent again with its number, it was played once."""
        wanted, number = self.action_of(episode, action), episode.taken + 1
        body = self.step_body(episode, wanted, number)
        url = f"{self.subject.server.url}{episode.kind.prefix}/step"
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(httpx.post, url, json=body, timeout=60)
            time.sleep(wait_ms / 1000)
            self.process_ends(self.subject.server.kill)
            self.subject.totals["kills"] += 1
            try:
                answer = sent.result()
            except httpx.TransportError:
                answer = None
        expected = episode.step(wanted, number)
        if answer is not None:
            self.must_give(answer, expected)
        self.post_step(episode, wanted, number)

    @precondition(lambda self: self.subject.redis is not None and self.restarts < self.most_restarts)
    @rule(episode=episodes, action=ACTIONS)
    def end_of_redis(self, episode: Episode, action: tuple[Any, Any]) -> None:
        """While the store is down nothing is acknowledged; once it is back, every acknowledged step is there."""
        redis = self.subject.redis
        assert redis is not None
        redis.kill()
        self.restarts += 1
        wanted, number = self.action_of(episode, action), episode.taken + 1
        path, body = f"{episode.kind.prefix}/step", self.step_body(episode, wanted, number)
        answer = self.send("POST", path, body)
        assert (answer.status_code, answer.json()["detail"]["code"]) == (503, "store"), answer.text
        redis.start()
        self.subject.totals["kills of Redis"] += 1
        until(lambda: self.send("GET", "/health").status_code == 200)
        self.post_step(episode, wanted, number)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def all_is_well(self) -> None:
        self.rules += 1
        assert self.send("GET", "/health").status_code == 200
        assert self.subject.stored(self.known) == [episode.taken for episode in self.known]
        log = self.subject.new_log()
        assert "Traceback" not in log, log[-6_000:]

    @precondition(lambda self: self.rules >= self.audit_from)
    @rule()
    def audit(self) -> None:
        """Every session has its state, every answer of it that is asked for, and its grade."""
        self.audit_from = self.rules + AUDIT_EVERY
        for episode in self.known:
            self.state(episode)
            for number in sorted({min(1, episode.taken), (episode.taken + 1) // 2, episode.taken} - {0}):
                self.post_step(episode, episode.asked[number - 1], number)
            self.grade(episode, "none")
        self.metrics_agree()

    def metrics_agree(self) -> None:
        if self.subject.workers > 1:
            return  # each worker hands its numbers in once a second
        found = dict(counted_by(self.send("GET", "/metrics").text))
        tally = self.subject.tally
        assert found["resets"] == tally.counters["resets"]
        assert found["steps"] + found["repeated_answers"] == tally.counters["answered_steps"]
        assert found["conflicts"] == tally.counters["conflicts"]
        assert found["store_errors"] == 0 or self.subject.redis is not None
        polled = ("/health", "/metrics", "/nowhere", "/shadow")  # an upload may be given up before it is counted
        sent = {place: n for place, n in tally.answers.items() if place[0] not in polled}
        assert {place: n for place, n in found["answers"].items() if place[0] not in (*polled, "other")} == sent
        self.subject.totals["comparisons with /metrics"] += 1
        self.subject.totals["environments evicted"] += int(found["evictions"] - tally.counters["evictions"])
        tally.counters["evictions"] = int(found["evictions"])

    def teardown(self) -> None:
        self.audit()
        for player in self.opened:
            player.close()
        for batch in list(self.open_batches):
            self.close_batch(batch)
        self.all_is_well()
        self.subject.totals += Counter(histories=1, rules=self.rules)
        self.subject.clean = True


def forge(log: list[dict[str, Any]], how: str) -> None:
    """Change the log to something that no replay can produce."""
    if how == "reward":
        log[-1]["reward"] += 1e-4  # verification allows for rounding: 1e-6 of a reward
    elif how == "metric":
        name = next(name for name, value in log[0]["metrics"].items() if isinstance(value, float))
        log[0]["metrics"][name] = log[0]["metrics"][name] * 1.001 + 0.001
    elif how == "cut":
        log[-1]["timestep"] += 1
    else:
        log.append(log[-1])


# ---------------------------------------------------------------- runs

FIXED_SEED: Final = 18
FIXED_HISTORIES: Final = 20
SOAK_HISTORIES: Final = 50
MUST_HAPPEN: Final = (
    *("histories", "rules", "requests", "refused", "episodes", "steps", "batch steps", "frames", "bad frames"),
    *("bad requests", "restarts", "kills", "comparisons with /metrics", "environments evicted", "uploads"),
)
"""Kinds of events that a useful run of histories must contain."""


def play_histories(under_test: Subject, count: int, first: int, steps: int, most_restarts: int) -> Counter[str]:
    """Play as many histories from the seed ``first``, and return what was done."""
    machine = seed(first)(type("Histories", (Histories,), {"subject": under_test, "most_restarts": most_restarts}))
    chosen = settings(
        max_examples=count,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        # Not shrunk: each attempt starts servers and takes minutes, and shows little more than the history itself.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]
    under_test.server.stop()
    return under_test.totals


@pytest.mark.slow
def test_fixed_histories_get_the_answers_of_the_library(tmp_path: Path) -> None:
    with subject(tmp_path) as under_test:
        totals = play_histories(under_test, FIXED_HISTORIES, FIXED_SEED, STEPS_OF_A_HISTORY, most_restarts=1)
    assert [name for name in MUST_HAPPEN if not totals[name]] == []


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_random_histories_get_the_answers_of_the_library(
    tmp_path: Path, store: str, workers: int, soak_seed: int
) -> None:
    count = int(os.environ.get("SOAK_HISTORIES") or SOAK_HISTORIES)
    redis = RedisServer(tmp_path) if store == "redis" else None
    if redis is not None:
        redis.start()
    try:
        with subject(tmp_path, workers, redis) as under_test:
            totals = play_histories(under_test, count, soak_seed, 2 * STEPS_OF_A_HISTORY, most_restarts=3)
    finally:
        if redis is not None:
            redis.kill()
    done = ", ".join(f"{totals[name]:,} {name}" for name in sorted(totals))
    assert totals["workers lost"] or workers == 1
    print(f"{store}, {workers} workers: {done}; nothing lost")  # noqa: T201
