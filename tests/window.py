"""Backend of matplotlib with windows that need no display, for ``render_mode="human"``; they count their calls.

``plt.switch_backend("module://tests.window")`` chooses it.
"""

from __future__ import annotations

from typing import Any

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg


class FigureManager(FigureManagerBase):
    """A window; ``shown`` counts those that were opened."""

    shown = 0

    def show(self) -> None:
        FigureManager.shown += 1


class FigureCanvas(FigureCanvasAgg):
    """A window's canvas; ``drawn`` counts the times that one was drawn."""

    required_interactive_framework = "headless"
    manager_class = FigureManager
    drawn = 0

    def draw_idle(self, *_: Any, **__: Any) -> None:
        FigureCanvas.drawn += 1
        self.draw()
