"""Picture of the episode so far: arrivals, queue, time to first token with its objective, and knobs.

``render()`` of the scalar serving environments shows it, local and remote: only observations and actions are needed.
Needs matplotlib (extra ``report``), which is imported when an environment is made with a ``render_mode``.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.installation import install_extra
from inferencegym.models import ACTION_FIELDS, OBSERVATION_FIELDS
from inferencegym.tasks import TaskSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METADATA: Final[dict[str, Any]] = {"render_modes": ["human", "rgb_array"], "render_fps": 10}
"""Gymnasium's ``metadata`` of an environment that :class:`EpisodePicture` draws."""


def metadata() -> dict[str, Any]:
    """:data:`METADATA` as it holds on this machine: without a display there is no ``"human"``."""
    if sys.platform in ("win32", "darwin") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return METADATA
    return {**METADATA, "render_modes": ["rgb_array"]}


SIZE_INCHES: Final = (8.0, 7.0)
DPI: Final = 80

_COLUMN: Final = {name: i for i, name in enumerate(OBSERVATION_FIELDS)}
_PANELS: Final = {"arrival_rate": "arrivals/s", "queue_depth": "queue", "ttft_p50": "TTFT p50, ms"}


def episode_picture(render_mode: str | None, task: TaskSpec, episode_length: int) -> EpisodePicture | None:
    """The picture for a ``render_mode``; None without one.

    Raises :class:`InvalidConfigError` for an unknown mode, and where matplotlib or, for ``"human"``, a display is
    missing.
    """
    if render_mode is None:
        return None
    if render_mode not in METADATA["render_modes"]:
        raise refusal("render_mode", render_mode, f"one of {', '.join(METADATA['render_modes'])}, or None")
    return EpisodePicture(task, episode_length, window=render_mode == "human")


class EpisodePicture:
    """Draws an episode of a task into ``figure``: an array of pixels, or a window that follows the episode."""

    def __init__(self, task: TaskSpec, episode_length: int, window: bool) -> None:
        self._task, self._length, self._window = task, episode_length, window
        self._seen: list[NDArray[np.float64]] = []
        self._knobs: list[NDArray[np.float64]] = []
        try:
            self.figure = _window(f"Task {task.task_id}") if window else _canvas()
        except ModuleNotFoundError as error:
            raise InvalidConfigError(
                f"render_mode needs {error.name}: {install_extra('report')}, or leave render_mode out",
                "render_mode",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "figure": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.figure = _canvas()  # a copy opens no window

    def start(self, observation: NDArray[np.float64]) -> None:
        """Start an episode with its first observation (14 numbers or more)."""
        self._seen, self._knobs = [observation.copy()], []
        self._show()

    def add(self, observation: NDArray[np.float64], knobs: NDArray[np.float64]) -> None:
        """Add a step: the observation after it, and the knobs (5,) that it was played with."""
        self._seen.append(observation.copy())
        self._knobs.append(knobs[: len(ACTION_FIELDS)].copy())
        self._show()

    def render(self) -> NDArray[np.uint8] | None:
        """Pixels (height, width, 3); None if a window shows the picture."""
        if self._window:
            return None
        self._draw()
        self.figure.canvas.draw()
        pixels: NDArray[np.uint8] = np.asarray(self.figure.canvas.buffer_rgba())[..., :3].copy()
        return pixels

    def close(self) -> None:
        """Close the window."""
        if self._window:
            import matplotlib.pyplot as plt

            plt.close(self.figure)

    def _show(self) -> None:
        if self._window:
            self._draw()
            self.figure.canvas.draw_idle()
            self.figure.canvas.flush_events()

    def _draw(self) -> None:
        self.figure.clear()
        axes = self.figure.subplots(4, 1, sharex=True)
        seen = np.array(self._seen)
        seconds = seen[:, _COLUMN["timestep"]]
        for axis, (name, label) in zip(axes, _PANELS.items(), strict=False):
            axis.plot(seconds, seen[:, _COLUMN[name]], color="#1f4e79", linewidth=1.2)
            axis.set_ylabel(label)
        slo_ms = self._task.slo_target_ms
        axes[2].axhline(slo_ms, color="#b22222", linestyle="--", linewidth=1, label=f"objective, {slo_ms:g} ms")
        axes[2].set_yscale("log")
        axes[2].legend(fontsize=7, loc="upper left")
        self._draw_knobs(axes[3], seconds)
        axes[3].set_xlim(0, self._length)
        axes[3].set_xlabel("second of the episode")
        self.figure.suptitle(f"Task {self._task.task_id}: {self._task.name}", fontsize=10)

    def _draw_knobs(self, axis: Axes, seconds: NDArray[np.float64]) -> None:
        """Each knob as a share of its highest value, for each second."""
        knobs = np.array(self._knobs).reshape(-1, len(ACTION_FIELDS))
        for i, (name, field) in enumerate(ACTION_FIELDS.items()):
            label = name if field.high == 1 else f"{name} / {field.high:g}"
            axis.stairs(knobs[:, i] / field.high, seconds, baseline=None, label=label, linewidth=1.4)
        axis.set_ylim(-0.05, 1.05)
        axis.set_ylabel("knobs")
        axis.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _canvas() -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _window(title: str) -> Any:
    import matplotlib.pyplot as plt

    figure = plt.figure(title, figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    if figure.canvas.required_interactive_framework is None:
        plt.close(figure)
        raise InvalidConfigError(
            f"render_mode='human' needs a display, and matplotlib's backend here, {plt.get_backend()}, has no windows: "
            "use render_mode='rgb_array' and show what render() returns",
            "render_mode",
        )
    figure.show()
    return figure
