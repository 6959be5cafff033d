"""Configuration of a fleet of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inferencegym.errors import InvalidConfigError
from inferencegym.models import Router
from simulator.hardware.operators import OperatorModel

RollingRestart = Literal["recompute", "drain"]
"""What a replica does with its requests before it restarts: hand them to others, which recompute them, or finish
them."""

BLOCK_TOKENS = 16
LINK_GB_S = 25.0  # one 200 Gbit/s port between prefill and decode GPU


@dataclass(frozen=True, slots=True)
class Fleet:
    """Configuration of identical replicas behind one queue or, with another ``router``, with a queue each.

    ``batch_size`` bounds the sequences of one replica, ``kv_pool_tokens`` its KV cache. ``acceptance[j]`` is the
    probability that draft position j + 1 is accepted (a marginal, as measured), for ``draft_tokens`` positions. With
    ``disaggregated`` each replica has a prefill GPU, unless ``prefill_replicas`` says how many all of them share; such
    a fleet keeps its size and precision. ``acceptance_scale`` multiplies the first position's probability for each
    class; without it, all classes are as measured. ``queue_limit`` bounds the requests that have not started, and
    ``context_tokens`` prompt and answer of a request: what exceeds it is refused. ``None`` means no bound.
    ``restart_ms`` is how long a restarting replica is down, ``start_ms`` how long a new one loads, and ``slowdown``
    multiplies every iteration. A block of the cache holds ``block_tokens``. Each sequence keeps ``spare_tokens`` of
    cache beyond what its next iteration writes; vLLM keeps none, which matters if blocks are large or the pool is
    small. With ``vllm_refill`` requests start as in vLLM: none start in an iteration that preempted one; otherwise new
    ones may start as soon as all preempted ones have resumed. Without it, whatever fits starts, and new requests wait
    for the iteration after. With ``occupancy_in_blocks`` the used part of the cache counts whole blocks, as engines
    report it, instead of tokens. With ``server`` the reference plays what the fluid model leaves out: the engine
    profile's asynchronous scheduling, and its API server's time, which requests that arrive together share.
    """

    model: OperatorModel
    batch_size: int
    kv_pool_tokens: int
    replicas: int = 1
    draft_tokens: int = 0
    acceptance: Sequence[float] = ()
    disaggregated: bool = False
    link_gb_s: float = LINK_GB_S
    queue_limit: int | None = None
    context_tokens: int | None = None
    acceptance_scale: Sequence[float] = ()
    restart_ms: float = 0.0
    start_ms: float = 0.0
    slowdown: float = 1.0
    rolling_restart: RollingRestart = "recompute"
    block_tokens: int = BLOCK_TOKENS
    spare_tokens: int = 1
    vllm_refill: bool = False
    occupancy_in_blocks: bool = False
    router: Router = "shared"
    prefill_replicas: int | None = None
    server: bool = False

    def __post_init__(self) -> None:
        if min(self.batch_size, self.replicas) < 1:
            raise InvalidConfigError(f"batch_size={self.batch_size}, replicas={self.replicas}: both must be at least 1")
        if self.prefill_replicas is not None and (self.prefill_replicas < 1 or not self.disaggregated):
            raise InvalidConfigError(
                f"prefill_replicas={self.prefill_replicas}: at least 1, and only with disaggregated", "prefill_replicas"
            )
        if self.block_tokens < 1 or self.spare_tokens < 0:
            raise InvalidConfigError(
                f"block_tokens={self.block_tokens}, spare_tokens={self.spare_tokens}: at least 1 and 0", "block_tokens"
            )
        if self.kv_pool_tokens < self.block_tokens:
            raise InvalidConfigError(
                f"kv_pool_tokens={self.kv_pool_tokens} holds no block: give at least {self.block_tokens}",
                "kv_pool_tokens",
            )
        if len(self.acceptance) < self.draft_tokens:
            raise InvalidConfigError(
                f"draft_tokens={self.draft_tokens} needs as many acceptance probabilities, got {len(self.acceptance)}",
                "draft_tokens",
            )

    def pool_blocks(self, kv_pool_tokens: int) -> int:
        """Number of whole blocks in a pool."""
        return kv_pool_tokens // self.block_tokens
