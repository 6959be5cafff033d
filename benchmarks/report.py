"""Results of the benchmarks: the folders that they lie in, how they are written, and parts of their tables."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agents.evaluate import of_scores
from inferencegym.files import write_text

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
FIGURES: Final = ROOT / "benchmarks" / "figures"


def store(name: str, result: Any, text: str) -> None:
    """Write ``NAME.json`` and the part of a document that is made of it, ``NAME.md``."""
    write_text(RESULTS / f"{name}.json", as_json(result))
    write_text(RESULTS / f"{name}.md", text)


def stored(name: str) -> Any:
    """Content of ``NAME.json``."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def as_json(result: Any) -> str:
    """JSON with one line for each innermost object or list, such as a session or a run."""
    innermost = r"\{[^{}]*\}|\[[^\[\]{}]*\]"
    return re.sub(innermost, lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(result, indent=1)) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    head, *lines = (f"| {' | '.join(map(str, row))} |" for row in (heads, *rows))
    return [head.replace("|  |", "| |"), "|" + "---|" * len(heads), *lines]


def spread(value: Mapping[str, float], sign: str = "") -> str:
    """A mean and the ends of its 95% interval; that of a score, which has no sign, is cut at 0 and 1."""
    if not sign:
        value = of_scores(value)
    return f"{value['mean']:{sign}.3f} ({value['ci95_low']:{sign}.3f} to {value['ci95_high']:{sign}.3f})"


def machine() -> dict[str, Any]:
    """The machine of a speed measurement, and how much else it does."""
    return {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
