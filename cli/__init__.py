"""Commands of the ``inferencegym`` command line, one module each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

MAX_SEEDS: Final = 100_000


def seed_count(low: int) -> Callable[[str], int]:
    """Argparse type for a number of held-out seeds, from ``low`` to :data:`MAX_SEEDS`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > len(str(MAX_SEEDS)) or not low <= int(text) <= MAX_SEEDS:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed: it must be a whole number from {low} to {MAX_SEEDS}"
            )
        return int(text)

    return parse
