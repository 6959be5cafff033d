"""The table of `benchmarks.live.real_text`, from counts that can be checked by hand."""

from __future__ import annotations

import os

import pytest

from benchmarks.live.real_text import AT_ONCE, PROMPTS, SPEC_LENGTHS, accepted, markdown, processor_s


def row(length: int, at_once: int = 16, pace: float = 10.0) -> dict[str, object]:
    """80 tokens and 20 drafts, of which every second one was accepted to its end."""
    return {
        "draft_length": length,
        "at_once": at_once,
        "tokens_per_processor_s": pace,
        "output_tokens": 80,
        "drafts": 20,
        "drafted_tokens": 20 * length,
        "accepted_tokens": 10 * length,
        "accepted_by_position": [10] * length,
    }


def test_acceptance_is_told_by_position_and_as_the_constant_that_accepts_as_many() -> None:
    # a + a^2 = 1 has the solution 0.618.
    assert accepted([row(2)], 2) == ["25", "0.50", "0.50", "", "", "0.62"]
    assert accepted([row(2), row(2)], 2) == accepted([row(2)], 2)


def test_the_pace_of_a_draft_length_stands_beside_that_without_drafts() -> None:
    runs = [
        {**row(length, at_once, 10.0 + length), "prompts": kind}
        for kind in PROMPTS for at_once in AT_ONCE for length in SPEC_LENGTHS
    ]  # fmt: skip
    table = [line for line in markdown({"engine": "0", "runs": runs}).splitlines() if line.startswith("| 8 |")]
    assert len(table) == len(PROMPTS)
    assert all(line.endswith("| x 1.80 | x 1.80 |") for line in table)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads Linux's /proc")  # noqa: PTH110
def test_the_processor_time_of_a_group_includes_this_process() -> None:
    used = os.times()
    assert processor_s(os.getpgrp()) >= used.user + used.system - 0.05
