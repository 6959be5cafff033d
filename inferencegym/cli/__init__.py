"""Commands of the command line, one module each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

MAX_SEEDS: Final = 100_000


def seed_count(low: int) -> Callable[[str], int]:
    """Type of an option: how many held-out seeds, ``low`` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > len(str(MAX_SEEDS)) or not low <= int(text) <= MAX_SEEDS:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a whole number from {low} to {MAX_SEEDS}")
        return int(text)

    return parse
