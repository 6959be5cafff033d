"""GET /metrics: every number can be recomputed from the requests to the server."""

from __future__ import annotations

import os
import resource
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from server.app import create_app
from server.metrics import BUCKETS_S, COUNTERS, METRICS, Metrics, resident_bytes
from server.net.jobs import Jobs
from server.settings import Settings
from tests.servers import running_server

Labels = tuple[tuple[str, str], ...]


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(store_url="memory://", access_log="off", live_sessions=2))) as running:
        yield running


def samples(text: str) -> dict[tuple[str, Labels], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[f"inferencegym_{name}", tuple(sorted(labels.items()))]


def test_what_was_played_is_counted(client: TestClient) -> None:
    ids = [client.post("/reset", json={"seed": seed}).json()["session_id"] for seed in range(3)]
    for session_id in ids:
        client.post("/step", json={"session_id": session_id, "step": 1})
    client.post("/step", json={"session_id": ids[2], "step": 1})
    client.post("/step", json={"session_id": ids[2], "step": 1, "action": {"batch_size": 7}})
    text = client.get("/metrics").text
    counted = {name: value(text, f"{name}_total") for name in COUNTERS}
    # Two fit into memory: the third reset evicted the first, whose step evicted the second, and so on.
    assert counted == {
        "resets": 3,
        "steps": 3,
        "repeated_answers": 1,
        "conflicts": 1,
        "replays": 3,
        "replayed_steps": 0,
        "evictions": 4,
        "store_errors": 0,
    }
    gauges = {"active_sessions": 2, "held_steps": 2, "websockets": 0, "stored_sessions": 3, "max_sessions": 20_000}
    gauges |= {"store_bytes": 0}
    assert {name: value(text, name) for name in gauges} == gauges


def test_requests_are_counted_by_path_and_status_with_their_durations(client: TestClient) -> None:
    for _ in range(3):
        client.get("/tasks")
    client.post("/step", json={"session_id": "nobody"})
    client.get("/../etc/passwd")
    client.get("/made/up/path")
    text = client.get("/metrics").text
    assert value(text, "http_requests_total", path="/tasks", status="200") == 3
    assert value(text, "http_requests_total", path="/step", status="404") == 1
    assert value(text, "http_requests_total", path="other", status="404") == 2, "nobody can make labels up"
    found = samples(text)
    name = "inferencegym_http_request_duration_seconds"
    buckets = [found[f"{name}_bucket", (("le", str(le)), ("path", "/tasks"))] for le in BUCKETS_S]
    assert buckets == sorted(buckets)
    assert found[f"{name}_bucket", (("le", "+Inf"), ("path", "/tasks"))] == 3
    assert found[f"{name}_count", (("path", "/tasks"),)] == 3
    assert 0 < found[f"{name}_sum", (("path", "/tasks"),)] < 60


def test_a_duration_falls_into_the_bucket_whose_bound_it_reaches() -> None:
    counters = SimpleNamespace(**dict.fromkeys(COUNTERS, 0))
    sessions: Any = type("Sessions", (), {"counters": counters, "steps_held": 0, "__len__": lambda self: 0})()
    metrics = Metrics(sessions, Jobs(), 10)
    metrics.paths.add("/step")
    for took_s in (0.0005, 0.0006, 0.3, 99.0):
        metrics.count("/step", 200, took_s)
    counted = metrics.snapshot()["samples"]["http_request_duration_seconds"]
    below = [counted[f'_bucket{{le="{bound}",path="/step"}}'] for bound in (*BUCKETS_S, "+Inf")]
    assert below == [1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4]
    assert counted['_count{path="/step"}'] == 4
    assert counted['_sum{path="/step"}'] == pytest.approx(99.3011)


def test_the_answer_is_in_prometheus_text_format(client: TestClient) -> None:
    client.post("/reset")
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert set(families) == {name.removesuffix("_total") for name in (f"inferencegym_{name}" for name in METRICS)}
    assert all(family.samples and family.documentation for family in families.values())
    types = {name.removeprefix("inferencegym_"): family.type for name, family in families.items()}
    assert (types["steps"], types["websockets"]) == ("counter", "gauge")
    assert types["http_request_duration_seconds"] == "histogram"
    [build] = families["inferencegym_build_info"].samples
    assert build.labels["table_sha256"] == client.get("/health").json()["table_sha256"]


def test_open_websockets_are_counted(client: TestClient) -> None:
    with client.websocket_connect("/ws"):
        assert value(client.get("/metrics").text, "websockets") == 1
    assert value(client.get("/metrics").text, "websockets") == 0


def test_the_size_of_the_store_is_that_of_the_file_its_log_and_damaged_ones(tmp_path: Path) -> None:
    (tmp_path / "sessions.db.damaged-20260101-1234").write_bytes(bytes(1_000))
    with TestClient(create_app(Settings(data_dir=tmp_path, access_log="off"))) as client:
        client.post("/reset")
        size_bytes = value(client.get("/metrics").text, "store_bytes")
        file, log = tmp_path / "sessions.db", tmp_path / "sessions.db-wal"
        beside_bytes = (tmp_path / "sessions.db-shm").stat().st_size
        assert size_bytes == file.stat().st_size + log.stat().st_size + beside_bytes + 1_000


def test_a_store_that_fails_is_counted_and_health_says_so(tmp_path: Path) -> None:
    with running_server(tmp_path, store_timeout_s="0.2") as server:
        session_id = server.post("/reset")["session_id"]
        lock = sqlite3.connect(tmp_path / "sessions.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        step = server.client.post("/step", json={"session_id": session_id})
        health = server.client.get("/health")
        lock.execute("ROLLBACK")
        lock.close()
        assert (step.status_code, health.status_code) == (503, 503)
        assert health.json()["status"] == "degraded"
        assert value(server.client.get("/metrics").text, "store_errors_total") == 1
        assert server.get("/health")["status"] == "healthy"


def test_workers_add_up_their_metrics_and_a_killed_ones_counts_stay(tmp_path: Path) -> None:
    with running_server(tmp_path, workers="2") as server:
        for _ in range(20):
            # A connection each, so that the kernel spreads them over both workers.
            assert httpx.post(f"{server.url}/reset").status_code == 200
        text = until(server.url, n_resets=20)
        pids = {dict(labels)["pid"] for name, labels in samples(text) if name == "inferencegym_resident_memory_bytes"}
        assert len(pids) == 2
        killed = int(pids.pop())
        os.kill(killed, 9)
        assert str(killed) not in until(server.url, n_resets=20, n_exits=1)
        [said] = (line for line in server.log.read_text().splitlines() if f"worker {killed} died" in line)
        assert '"level":"error"' in said
        assert "exit code -9" in said
        server.kill()


def test_what_a_worker_reported_stays_reported_when_it_is_killed(tmp_path: Path) -> None:
    counters = SimpleNamespace(**dict.fromkeys(COUNTERS, 0))
    sessions: Any = type("Sessions", (), {"counters": counters, "steps_held": 0, "__len__": lambda self: 0})()
    metrics = Metrics(sessions, Jobs(), 10, tmp_path)
    # Counted since the numbers were last shared, which happens once a second.
    sessions.counters.resets = 3
    metrics.count("/reset", 200, 0.001)
    [reported] = metrics.snapshots()
    left = orjson.loads((tmp_path / f"{os.getpid()}.json").read_bytes())
    assert left == orjson.loads(orjson.dumps(reported))
    assert left["samples"]["resets_total"] == {"": 3}
    assert list(tmp_path.iterdir()) == [tmp_path / f"{os.getpid()}.json"]


def until(url: str, *, n_resets: int, n_exits: int = 0) -> str:
    """The metrics once two workers run and all resets and exits have been counted: each reports once a second."""
    deadline = time.monotonic() + 60  # a worker that is started again takes that long on a busy machine
    while True:
        text = httpx.get(f"{url}/metrics", timeout=30).text
        found = samples(text)
        n_workers = sum(name == "inferencegym_resident_memory_bytes" for name, _ in found)
        # A reset is counted when it is stored, its request when it has been answered.
        n_answers = found.get(("inferencegym_http_requests_total", (("path", "/reset"), ("status", "200"))), 0)
        exits = found["inferencegym_worker_exits_total", ()]
        if found["inferencegym_resets_total", ()] == n_answers == n_resets and (n_workers, exits) == (2, n_exits):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.2)


def test_memory_is_what_is_resident_and_without_proc_the_most_there_ever_was(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS"))
    assert resident_bytes() == pytest.approx(int(line.split()[1]) * 1024, rel=0.05)

    def absent(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    peak_bytes = resident_bytes()
    assert peak_bytes == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
