"""Trained PPO policies as plain arrays: a small network that numpy evaluates, without torch.

A file is an ``.npz`` with weights ``w0, b0, w1, b1, ...`` (the last pair is the output layer) and ``header``, a JSON
text: the observation and action formats of :mod:`inferencegym.spaces.formats`, and how the policy was trained. Nothing
is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agents.policies.stored import POLICY_DIR
from agents.protocol import FloatArray
from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.models import ACTION_FIELDS, OBSERVATION_FIELDS
from inferencegym.spaces.actions import action_size
from inferencegym.spaces.formats import ChoicesCodec, DiscreteCodec, ObservationCodec, action_codec_of
from inferencegym.tasks import TaskSpec, get_calibration

FILE_VERSION: Final = 2
TIMESTEP: Final = list(OBSERVATION_FIELDS).index("timestep")


@dataclass(frozen=True, slots=True, eq=False)
class PolicyFile:
    """Policy file: layers ``(weights (n_in, n_out), bias (n_out,))`` and the header."""

    layers: Sequence[tuple[FloatArray, FloatArray]]
    observation: str
    action: str
    hold: int = 1
    """Seconds between two decisions."""
    trained: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the file; weights are kept as float32."""
        header = {
            "version": FILE_VERSION,
            "observation": self.observation,
            "action": self.action,
            "hold": self.hold,
            "trained": dict(self.trained),
        }
        arrays: dict[str, NDArray[Any]] = {"header": np.array(json.dumps(header, sort_keys=True))}
        for i, (weights, bias) in enumerate(self.layers):
            arrays[f"w{i}"], arrays[f"b{i}"] = weights.astype(np.float32), bias.astype(np.float32)
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> PolicyFile:
        """Read a file; raises :class:`DataFormatError` naming what is wrong with it."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                header = json.loads(str(stored["header"]))
                layers = [(stored[f"w{i}"], stored[f"b{i}"]) for i in range((len(stored.files) - 1) // 2)]
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise DataFormatError(
                f"{path}: not a policy file ({error}); `inferencegym train` writes them, and models of "
                "Stable-Baselines3 are scored with gym_scores of inferencegym.learning"
            ) from error
        if header.get("version") != FILE_VERSION:
            raise DataFormatError(f"{path}: version {header.get('version')!r} of policy files is not {FILE_VERSION}")
        wide = [(w.astype(np.float64), b.astype(np.float64)) for w, b in layers]
        return cls(wide, header["observation"], header["action"], header["hold"], header["trained"])


class PpoAgent:
    """Agent that takes the central action of a trained policy, and keeps it for as long as the policy was taught to."""

    def __init__(self, policy: PolicyFile, task: TaskSpec) -> None:
        self.policy = policy
        constants = get_calibration(task.task_id)
        self._observations = ObservationCodec(task, task.config(), constants, policy.observation)
        reads, gives = len(policy.layers[0][0]), len(self._observations.low)
        if reads != gives:
            raise InvalidConfigError(
                f"the policy reads {reads} numbers and task {task.task_id} gives {gives} (observation="
                f"{policy.observation!r}): it was trained on another task"
            )
        self._actions = action_codec_of(policy.action, task, constants)
        self._n_knobs = action_size(task.fleet)

    def reset(self, n_rows: int) -> None:
        """Start ``n_rows`` new episodes, whose first second asks for a decision."""
        self._decided_s = np.full(n_rows, -np.inf)
        self._knobs = np.zeros((n_rows, self._n_knobs))

    def act(self, observation: FloatArray) -> FloatArray:
        """The knobs (B, 5) of the last decision, taken anew every ``hold`` seconds; (B, 6) on tasks that scale."""
        now = observation[:, TIMESTEP]
        due = now >= self._decided_s + self.policy.hold
        if due.any():
            self._knobs = np.where(due[:, None], self._decide(observation), self._knobs)
            self._decided_s = np.where(due, now, self._decided_s)
        return self._knobs.copy()

    def _decide(self, observation: FloatArray) -> FloatArray:
        out = forward(self.policy.layers, self._observations.encode(observation).astype(np.float64))
        if isinstance(self._actions, DiscreteCodec):
            ends = np.cumsum(self._actions.sizes)[:-1]
            knobs = (*ACTION_FIELDS, "replicas")[: self._n_knobs]
            parts = zip(knobs, np.split(out, ends, axis=1), strict=True)
            return self._actions.decode(np.stack([central(logits, name) for name, logits in parts], axis=1))
        if isinstance(self._actions, ChoicesCodec):
            return self._actions.decode(central(out, self.policy.action))
        return self._actions.decode(np.clip(out, -1.0, 1.0) if policy_is_unit(self.policy) else out)


def central(logits: FloatArray, knob: str) -> NDArray[np.int64]:
    """Central level (B,) of a distribution over a knob's levels, given its logits (B, n).

    The median where levels are amounts: the likeliest of many neighbours may lie at the edge of what is played. The
    likeliest where levels are different things.
    """
    if knob not in ("kv_budget", "batch_size", "replicas"):
        return np.asarray(logits.argmax(axis=1), dtype=np.int64)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    below = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    return np.asarray((below < 0.5).sum(axis=1), dtype=np.int64)


def policy_is_unit(policy: PolicyFile) -> bool:
    """Whether the network's outputs are actions in [-1, 1]."""
    return policy.action == "box"


def forward(layers: Sequence[tuple[FloatArray, FloatArray]], x: FloatArray) -> FloatArray:
    """Outputs (B, n) of a network with tanh between its layers.

    Sums run input by input and not as one matrix product, whose rounding changes with B: a row gives the same knobs
    alone and in any batch.
    """
    for i, (weights, bias) in enumerate(layers):
        total = np.repeat(bias[None, :], len(x), axis=0)
        for column, weight in zip(x.T, weights, strict=True):
            total += column[:, None] * weight
        x = np.tanh(total) if i < len(layers) - 1 else total
    return x


def has_shipped_policy(task: TaskSpec) -> bool:
    """Whether the package has a policy for a task."""
    return _shipped(task).exists()


def _shipped(task: TaskSpec) -> Path:
    return POLICY_DIR / f"ppo_task{task.task_id}.npz"


def shipped_policy(task: TaskSpec) -> Path:
    """The policy file that comes with the package for a task; raises :class:`InvalidConfigError` if there is none."""
    path = _shipped(task)
    if not path.exists():
        raise InvalidConfigError(
            f"no PPO policy is shipped for task {task.task_id!r}: train one with "
            f"`inferencegym train --task {task.task_id} --out DIR` and name it, ppo:DIR/policy.npz"
        )
    return path


def make_ppo(task: TaskSpec, path: str = "") -> PpoAgent:
    """The agent ``ppo`` (the shipped policy of the task), ``ppo:FILE`` or ``ppo:FOLDER`` of a training run."""
    file = Path(path) if path else shipped_policy(task)
    return PpoAgent(PolicyFile.load(file / "policy.npz" if file.is_dir() else file), task)
