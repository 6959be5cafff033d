"""The policy that :mod:`agents.rollouts_ppo` trains, evaluated with numpy alone.

A decision is a share of the KV pool, one of :data:`SHARES`, and holds for :data:`HOLD_S`: the conversations in flight
are kept below it by :class:`inferencegym.rollouts.Fit`. What the network sees are shares and ratios, so that one
network serves cards and pools of all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.rollouts import OBSERVATION_FIELDS, Fit

FloatArray = NDArray[np.float64]
Float32Array = NDArray[np.float32]

POLICY_FILE: Final = Path(__file__).resolve().parents[1] / "data" / "policies" / "ppo-rollout-mix.npz"
HOLD_S: Final = 6
SHARES: Final = (0.6, 0.7, 0.78, 0.84, 0.9, 0.95, 1.0, 1.06, 1.15, 1.4)
N_FEATURES: Final = 16
_AT: Final = {name: i for i, name in enumerate(OBSERVATION_FIELDS)}


class Features:
    """What the network sees of the observations of one episode: shares, ratios and two moving averages."""

    def __init__(self) -> None:
        self._hit, self._new_share, self._pace = 1.0, 0.0, 0.0

    def __call__(self, seen: FloatArray, share: float) -> Float32Array:
        """Features (N_FEATURES,) of an observation (20,) and the share in force."""
        at = {name: float(seen[i]) for name, i in _AT.items()}
        flying, pool = max(1.0, at["sessions_in_flight"]), at["kv_pool_tokens"]
        queried = at["prefix_queried_tokens"]
        hit = at["prefix_hit_tokens"] / queried if queried else self._hit
        new_share = (queried - at["prefix_hit_tokens"]) / pool
        self._hit += 0.15 * (hit - self._hit)
        self._new_share += 0.15 * (new_share - self._new_share)
        self._pace += 0.15 * (at["generated_tokens"] - self._pace)
        waiting = at["sessions_waiting"] + at["sessions_paused"]
        return np.array(
            [
                share,
                np.log(flying) - 2.0,
                min(1.0, waiting / 20.0),
                min(1.0, at["sessions_paused"] / flying),
                at["running_requests"] / flying,
                at["waiting_requests"] / flying,
                at["kv_usage"],
                min(3.0, at["context_share"]),
                np.log1p(10.0 * at["context_mean_tokens"] / pool),
                np.log1p(10.0 * at["context_max_tokens"] / pool),
                hit,
                self._hit,
                min(3.0, 5.0 * self._new_share),
                min(1.0, at["preemptions"]),
                np.log1p(self._pace / flying / 10.0),
                np.log1p(at["computed_tokens"] / (1.0 + at["generated_tokens"])) / 3.0,
            ],
            dtype=np.float32,
        )


class Network:
    """A network that :func:`agents.rollouts_ppo.save_network` wrote, evaluated with numpy."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as stored:
            self._layers = [(stored[f"w{i}"], stored[f"b{i}"]) for i in range(len(stored.files) // 2)]

    def choice(self, x: NDArray[Any]) -> int:
        """Index of the likeliest choice for one row of features (n,)."""
        for i, (weights, bias) in enumerate(self._layers):
            x = x @ weights + bias
            x = np.tanh(x) if i + 1 < len(self._layers) else x
        return int(x.argmax())


class RolloutPolicy:
    """The trained network as a controller: a function from an observation by name to a cap."""

    def __init__(self, path: Path = POLICY_FILE) -> None:
        self._network = Network(path)
        self._fit, self._features, self._seconds = Fit(), Features(), 0

    def __call__(self, seen: Mapping[str, float]) -> int:
        """The cap for the next second."""
        if self._seconds % HOLD_S == 0:
            row = np.fromiter((seen[name] for name in OBSERVATION_FIELDS), np.float64, len(OBSERVATION_FIELDS))
            self._fit.share = SHARES[self._network.choice(self._features(row, self._fit.share))]
        self._seconds += 1
        return self._fit(seen)
