"""The OpenAPI document is correct: Schemathesis sends requests that it allows and forbids, and finds no deviation."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers import ROOT, RunningServer, running_server

# A request log is read by a process of its own: hundreds of them take minutes.
WITHOUT_LOGS = ("--exclude-path-regex", "/(plan|shadow)$")


@pytest.fixture(scope="module", params=["serving", "traffic"])
def one_of_both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp(request.param)
    with running_server(directory, env=request.param, access_log="errors") as server:
        yield server


def schemathesis_run(server: RunningServer, seed: int, examples: int, *more: str) -> int:
    """Requests sent; anything that Schemathesis finds fails the test.

    Its requests are limited in number and each in time, so the run ends on a machine of any pace.
    """
    program = str(Path(sys.executable).with_name("schemathesis"))
    command = [program, "run", f"{server.url}/openapi.json", "--seed", str(seed), "--max-examples", str(examples)]
    command += ["--suppress-health-check", "all", "--no-color", *more]
    # From the root, where schemathesis.toml lies.
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    generated = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
    assert generated is not None, run.stdout[-2000:]
    assert generated[1] == generated[2]
    return int(generated[1])


@pytest.mark.parametrize("one_of_both", ["serving"], indirect=True)
def test_schemathesis_finds_nothing(one_of_both: RunningServer) -> None:
    """Random requests alone: the slow test sends thousands at the bounds of every field too."""
    random_alone = ("--phases", "examples,fuzzing,stateful")
    assert schemathesis_run(one_of_both, 20, 8, *random_alone, *WITHOUT_LOGS) > 300


@pytest.mark.slow
def test_schemathesis_finds_nothing_in_many_more_tries(one_of_both: RunningServer) -> None:
    # Logs are read in the same way whichever environment is at the root.
    without = WITHOUT_LOGS if one_of_both.settings["INFERENCEGYM_ENV"] == "traffic" else ()
    assert schemathesis_run(one_of_both, 21, 30, *without) > 1_000


@pytest.mark.soak
def test_schemathesis_finds_nothing_in_thousands_of_tries_from_any_seed(
    one_of_both: RunningServer, soak_seed: int
) -> None:
    tried = schemathesis_run(one_of_both, soak_seed, examples=200)
    counted = one_of_both.client.get("/metrics").text
    assert re.search(r'_http_requests_total\{[^}]*status="500"', counted) is None
    assert "Traceback" not in one_of_both.log.read_text()
    print(f"{tried:,} generated requests, none surprised the server")  # noqa: T201


def bounds(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("minimum", "maximum", "exclusiveMaximum") and not isinstance(item, dict):
                yield item
            yield from bounds(item)
    elif isinstance(value, list):
        for item in value:
            yield from bounds(item)


def test_whole_bounds_are_written_as_integers(server: RunningServer) -> None:
    text = httpx.get(f"{server.url}/openapi.json").text
    assert '"exclusiveMaximum":9223372036854775808' in text.replace(" ", "")
    found = list(bounds(server.get("/openapi.json")))
    assert found
    assert not [bound for bound in found if isinstance(bound, float) and bound.is_integer()]


@pytest.mark.parametrize("path", ["/reset", "/traffic/reset"])
def test_the_largest_seed_is_taken_and_the_next_one_refused(server: RunningServer, path: str) -> None:
    assert server.post(path, {"seed": 2**63 - 1})["seed"] == 2**63 - 1
    for seed in (2**63, 9223372036854775998):
        assert server.client.post(path, json={"seed": seed}).status_code == 422
