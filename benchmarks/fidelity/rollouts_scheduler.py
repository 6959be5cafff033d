"""Agent sessions on vLLM's own scheduler and block pool, without a model: counts do not depend on the machine's speed.

    .venv-engine/bin/python -m benchmarks.fidelity.rollouts_scheduler

Plays the sessions and caps of results/rollouts_engine.json, on the same pool and token budget, and writes
results/rollouts_scheduler.json. It runs in the engine's environment, because it calls vLLM's classes (private ones,
hence the version in the results). A clock replaces the model: an iteration takes STEP_MS plus TOKEN_MS for each token
that it computes, a turn reaches the engine CLIENT_MS after its tool has ended, and a newly admitted session sends its
first turn at once. The first sessions arrive APART_MS apart, so that the engine starts with the first one alone. A
simulator with vLLM's rules gives the same counts; odd numbers keep a tool from ending exactly when an iteration does.
"""

from __future__ import annotations

import heapq
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.report import RESULTS, as_json, stored
from inferencegym.files import write_text
from live.engines.random_model import ModelShape, write_model

STEP_MS, TOKEN_MS, CLIENT_MS, APART_MS = 8.0173, 0.2531, 4.0137, 1e-3
WORD: Final = 300
"""Token id that every answer consists of."""


def main() -> None:
    played = stored("rollouts_engine")
    engine = played["engine"]
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(write_model(Path(folder), ModelShape(**engine["model"])), engine)
    runs = []
    for work in played["workloads"]:
        for cap in work["caps"]:
            counts = Play(new_scheduler(config, engine), work, engine["block_tokens"], cap).to_the_end()
            runs.append({"workload": work["name"], "cap": cap, **counts})
            print(json.dumps(runs[-1]), flush=True)
    clock = {"step_ms": STEP_MS, "token_ms": TOKEN_MS, "client_ms": CLIENT_MS, "apart_ms": APART_MS}
    write_text(RESULTS / "rollouts_scheduler.json", as_json({"vllm": vllm_version, "clock": clock, "runs": runs}))


def engine_config(model: Path, engine: Mapping[str, Any]) -> Any:
    """The configuration that ``vllm serve`` makes from the engine's options."""
    arguments = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=engine["block_tokens"],
        max_num_batched_tokens=engine["token_budget"],
        max_num_seqs=engine["max_num_seqs"],
        max_model_len=engine["model"]["max_positions"],
        enforce_eager=True,
        enable_prefix_caching=True,
    )
    return arguments.create_engine_config()


def new_scheduler(config: Any, engine: Mapping[str, Any]) -> Scheduler:
    """Scheduler with an empty pool, which has one more block than is usable: vLLM's null block."""
    config.cache_config.num_gpu_blocks = engine["pool_blocks"] + 1
    spec = FullAttentionSpec(block_size=engine["block_tokens"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=engine["pool_blocks"] + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=engine["block_tokens"], log_stats=True)


class Play:
    """One run: ``cap`` sessions in flight, each from its first turn to its last answer."""

    def __init__(self, scheduler: Scheduler, work: Mapping[str, Any], block_tokens: int, cap: int) -> None:
        self.scheduler, self.sessions = scheduler, work["sessions"]
        self.hasher = get_request_block_hasher(block_tokens, sha256)
        self.shared = words(random.Random(work["seed"]), work["shared_tokens"])
        self.context: dict[int, list[int]] = {}
        self.requests: dict[str, tuple[int, int, Request]] = {}
        self.arrivals: list[tuple[float, int, int, int]] = []  # ms, order, session, turn
        self.sent = 0
        self.now_ms = 0.0
        self.counts = dict.fromkeys(
            ("prompt_tokens", "hit_tokens", "generated_tokens", "preemptions", "computed_tokens", "iterations"), 0
        )
        for number in range(min(cap, len(self.sessions))):
            self.begin_session(number * APART_MS)

    def to_the_end(self) -> dict[str, float]:
        """Play all sessions; counts under the names of results/rollouts_engine.json, and the clock's seconds."""
        while self.arrivals or self.scheduler.has_requests():
            if not self.scheduler.has_requests():
                self.now_ms = max(self.now_ms, self.arrivals[0][0])
            while self.arrivals and self.arrivals[0][0] <= self.now_ms:
                _, _, session, turn = heapq.heappop(self.arrivals)
                self.submit(session, turn)
            self.iterate()
        return {**self.counts, "seconds": self.now_ms / 1e3}

    def begin_session(self, at_ms: float) -> None:
        """Let the next session take the free place."""
        if len(self.context) < len(self.sessions):
            session = len(self.context)
            self.context[session] = list(self.shared)
            self.send(session, 0, at_ms)

    def send(self, session: int, turn: int, at_ms: float) -> None:
        """Schedule a turn that reaches the engine at this time."""
        heapq.heappush(self.arrivals, (at_ms, self.sent, session, turn))
        self.sent += 1

    def submit(self, session: int, turn: int) -> None:
        """Hand a turn to the scheduler."""
        context, columns = self.context[session], self.sessions[session]
        context += words(random.Random(1000 * session + turn), columns["new_tokens"][turn])
        sampling = SamplingParams(max_tokens=columns["output_tokens"][turn], ignore_eos=True, temperature=0)
        request = Request(
            f"{session}-{turn}", list(context), sampling, None, arrival_time=self.now_ms, block_hasher=self.hasher
        )
        self.requests[request.request_id] = session, turn, request
        self.counts["prompt_tokens"] += len(context)
        self.scheduler.add_request(request)

    def iterate(self) -> None:
        """One iteration: compute what vLLM schedules, and pass finished turns to their tools."""
        output = self.scheduler.schedule()
        tokens = output.total_num_scheduled_tokens
        if tokens:  # nothing is computed if it only drops finished requests, which takes no time
            self.now_ms += STEP_MS + TOKEN_MS * tokens
            self.counts["computed_tokens"] += tokens
            self.counts["iterations"] += 1
        ids = list(output.num_scheduled_tokens)
        begun = [self.requests[each][2] for each in ids]
        sampled = [[WORD] if each.num_computed_tokens == each.num_tokens else [] for each in begun]
        answer = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={each: i for i, each in enumerate(ids)}, sampled_token_ids=sampled
        )
        outputs = self.scheduler.update_from_output(output, answer)
        for stats in (each.scheduler_stats for each in outputs.values()):
            self.counts["hit_tokens"] += stats.prefix_cache_stats.hits
        for request in begun:
            if request.is_finished():
                self.finish(*self.requests.pop(request.request_id))

    def finish(self, session: int, turn: int, request: Request) -> None:
        """Complete an answer: its session continues after its tool, or frees its place."""
        self.counts["generated_tokens"] += request.num_output_tokens
        self.counts["preemptions"] += request.num_preemptions
        self.context[session] += request.output_token_ids
        tools = self.sessions[session]["tool_s"]
        if turn + 1 < len(tools):
            self.send(session, turn + 1, self.now_ms + (1e3 * tools[turn] + CLIENT_MS))
        else:
            self.begin_session(self.now_ms)


def words(rng: random.Random, n: int) -> list[int]:
    """Random token ids, different for every turn."""
    return rng.choices(range(WORD + 1, 4000), k=n)


if __name__ == "__main__":
    main()
