"""Two small user tasks whose definitions and constants a test may change."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest

from env.episode_files import saved
from env.inference_env import InferenceEnv
from inferencegym.tasks import TASKS_ENV

TASK: Final[dict[str, Any]] = {
    "name": "Lunch Desk",
    "arrival_rate_rps": 6,
    "prompt_len_dist": "uniform",
    "output_mean_tokens": [180],
    "slo_target_ms": 300,
    "episode_length": 20,
}
CONSTANTS: Final = {"floor_tps": 50.0, "optimal_tps": 1000.0, "max_throughput_tps": 2000.0, "price": 0.04}


class Desk:
    """User tasks ``desk`` and ``other`` in a file named by INFERENCEGYM_TASKS, with constants as calibration writes."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        self._constants = {name: dict[str, Any](CONSTANTS) for name in ("desk", "other")}
        self._files = 0
        self.define()

    def define(self, **changes: Any) -> None:
        """Redefine the tasks, with changes to ``desk``."""
        # A file is read only once per process, so another definition needs another file.
        self._files += 1
        self.path.write_text(json.dumps({"tasks": {"desk": {**TASK, **changes}, "other": TASK}}), encoding="utf-8")
        self._patch.setenv(TASKS_ENV, str(self.path))
        self.calibrate("desk")

    @property
    def path(self) -> Path:
        """The task file."""
        return self._folder / f"tasks-{self._files}.json"

    def calibrate(self, name: str, **changes: Any) -> None:
        """Write a task's default constants, with changes."""
        self._constants[name] = {**CONSTANTS, **changes}
        text = json.dumps({"tasks": self._constants})
        self.path.with_suffix(".calibration.json").write_text(text, encoding="utf-8")

    @cached_property
    def log(self) -> dict[str, Any]:
        """The log of a whole episode of ``desk``, as in a file."""
        env = InferenceEnv(task_id="desk", seed=5)
        env.reset()
        while not env.done:
            env.step({"batch_size": 64})
        return dict(json.loads(json.dumps(saved(env))))
