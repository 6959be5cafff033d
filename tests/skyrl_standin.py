"""SkyRL's interface of environments, as skyrl-gym 0.4.0 has it (github.com/NovaSky-AI/SkyRL, skyrl-gym).

It requires what this package's tests do not install. Its own ``make`` demands that an environment inherits from its
``Env`` and passes ``env_config`` and ``extras``; a trainer calls ``init``, ``step``, ``get_metrics`` and ``close``.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class Env:
    """skyrl_gym.Env."""


class BaseTextEnv(Env):
    """skyrl_gym.envs.base_text_env.BaseTextEnv, with what subclasses may leave out."""

    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        raise NotImplementedError

    def close(self) -> None:
        return None

    def get_metrics(self) -> dict[str, Any]:
        return {}


OUTPUT = {"observations": list, "reward": float, "done": bool, "metadata": dict}
"""Fields of BaseTextEnvStepOutput and their types."""


def installed() -> dict[str, types.ModuleType]:
    """Modules for ``sys.modules``."""
    found = {name: types.ModuleType(name) for name in ("skyrl_gym", "skyrl_gym.envs", "skyrl_gym.envs.base_text_env")}
    last = found["skyrl_gym.envs.base_text_env"]
    last.BaseTextEnv, last.BaseTextEnvStepOutput = BaseTextEnv, dict  # type: ignore[attr-defined]
    return {name: module for name, module in found.items() if name not in sys.modules}
