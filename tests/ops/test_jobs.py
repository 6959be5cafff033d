"""Jobs on visitors' logs: bounded in memory and time, scheduled fairly by client, ended with their client or server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inferencegym.errors import DataFormatError
from ops.jobs import respond
from ops.log.names import HEADER_CHARS, QUANTITIES, check_table
from ops.log.reader import import_log
from server.api.request_log import LogRequest
from tests.servers import PATIENCE_S, ROOT, RunningServer, running_server, until

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
FEW = HEADER + "".join(f"{0.5 * i},{200 + i},{50}\n" for i in range(40))
JOB = {"log": FEW, "policies": ["naive"]}
PLAN = {"log": FEW, "objectives": ["ttft_p99=500"], "model": "llama-3.1-8b"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


def test_an_uploaded_log_is_read_by_the_rules_of_the_command_line() -> None:
    rows = ["0,200,50,llama,200", "1,many,50,llama,200", "2,300,50,qwen,200", "3,300,0,llama,500", "4,200,50,llama,200"]
    log = "time,input,output,model,status\n" + "\n".join(rows)
    job = {"log": log, "policies": ["naive"], "gpus": 1}
    status, error = respond("shadow", job)
    assert (status, error["field"], error["line"]) == (2, "input", 3)
    status, error = respond("shadow", {**job, "skip_bad": 1})
    assert status == 2
    assert "requests of 2 models (llama: 3, qwen: 1) are not one load: choose a model with filter" in error["message"]
    status, answer = respond("shadow", {**job, "skip_bad": 1, "filter": "model=llama"})
    assert (status, answer["log"]["requests"]) == (0, 3)
    assert answer["read"]["skipped"] == {"cannot be read": 1}
    status, answer = respond("shadow", {**job, "skip_bad": 1, "filter": "model=llama", "failed": "skip"})
    assert (answer["log"]["requests"], answer["read"]["skipped"]) == (2, {"failed": 1, "cannot be read": 1})


def test_a_plan_takes_the_model_that_the_log_names() -> None:
    job = {"log": HEADER.replace("\n", ",model\n") + "0,200,50,meta-llama/Llama-3.1-8B-Instruct\n" * 30}
    status, answer = respond("plan", {**job, "objectives": ["ttft_p99=5000"], "hardware": ["h100"]})
    assert (status, answer["model"]) == (0, "llama-3.1-8b")
    status, error = respond("plan", {"log": FEW, "objectives": ["ttft_p99=5000"], "hardware": ["h100"]})
    assert (status, error["field"]) == (2, "model")


def test_notes_of_an_answer_name_fields_of_the_request_and_not_options() -> None:
    rows = "".join(f"{i},200,50,{i // 2},{200 if i else 500}\n" for i in range(40))
    job = {"log": "arrival_s,prompt_tokens,output_tokens,request_id,status\n" + rows}
    plan = {**job, "objectives": ["ttft_p99=5000"], "hardware": ["a100-40gb"], "drafts": True}
    for name, request in (("shadow", {**job, "policies": ["naive"], "gpus": 1}), ("plan", plan)):
        status, answer = respond(name, request)
        assert status == 0
        told = " ".join([*answer["read"]["notes"], *answer["notes"]])
        assert "all of them count (drop_duplicates keeps the first of each)" in told
        assert "(failed skip leaves them out)" in told
        assert "--" not in told
    assert "plan with two (replicas_min 2)" in told
    assert (
        respond("shadow", {**job, "policies": ["naive"], "gpus": 1, "drop_duplicates": True})[1]["log"]["requests"]
        == 20
    )


def test_every_quantity_of_a_log_may_be_named_in_a_request() -> None:
    named = ",".join(f"{quantity}=column" for quantity in QUANTITIES)
    assert LogRequest.model_validate({"log": FEW, "columns": named}).columns == named


def test_a_whole_number_may_have_a_decimal_point() -> None:
    read = LogRequest.model_validate({"log": FEW, "skip_bad": 960.0, "limit": 3.0})
    assert (read.skip_bad, read.limit) == (960, 3)


@pytest.mark.parametrize(
    "log",
    [
        "time,input\n1,2\n",
        "\ufeff\n\na;b;c\r\n" + "1;2;3\r\n" * HEADER_CHARS,
        "Hello, world",
        "TIMESTAMP,ContextTokens\n1,2\n",
        "time,input,input,output\n0,100,7,10\n",
        "Metric,avg,p50\nlatency,1,2\n",
        "\x89PNG\r\n\x1a\n\0\0\0",
    ],
)
def test_a_wrong_header_is_refused_as_the_reader_refuses_it(log: str) -> None:
    with pytest.raises(DataFormatError) as read:
        import_log("log.csv", content=log)
    with pytest.raises(DataFormatError) as checked:
        check_table("log.csv", log)
    assert str(checked.value) == str(read.value)
    assert (checked.value.line, checked.value.field) == (read.value.line, read.value.field)


@pytest.mark.parametrize(
    ("log", "columns"),
    [
        (FEW, None),
        ("a,b,c\n1,2,3\n", "arrival=a,prompt=b,output=c"),
        ('{"a": 1}\n', None),
        ('[{"a": 1}]', None),
        ('"a\nb",c\n', None),
        ("a" * (HEADER_CHARS + 1), None),
        ("time,,input\n", None),
        ("", None),
        (HEADER + "0, 1e2 ,+10\n\n,,\n,a,b\n1,1,1,a,b\n", None),
        (HEADER + "0,100,a\n", None),
    ],
)
def test_a_header_that_may_be_right_is_left_to_the_reader(log: str, columns: str | None) -> None:
    check_table("log.csv", log, columns)


def test_a_wrong_table_or_model_is_refused_while_no_job_can_run(server: RunningServer) -> None:
    with waiting(server, "/plan", PLAN):
        stopped_job(server)
        wrong = {"log": "time,input\n1,2\n", "name": "mine.csv"}
        for path, more in (("/shadow", {"policies": ["naive"]}), ("/plan", {"objectives": ["ttft_p99=500"]})):
            answer = server.client.post(path, json={**wrong, **more}, headers={"x-forwarded-for": "10.0.0.3"})
            said = answer.json()["detail"]
            assert (answer.status_code, said["code"]) == (422, "data_format")
            assert said["message"].startswith("mine.csv: no column with a usual name for output; there are time, input")
            assert said["message"].endswith("name it with columns output=COLUMN")
            assert "--columns" not in said["message"]
        answer = server.client.post("/plan", json={**PLAN, "model": "x"}, headers={"x-forwarded-for": "10.0.0.3"})
        said = answer.json()["detail"]
        assert (answer.status_code, said.get("line"), said["field"]) == (422, None, "model")


def jobs_of(server: RunningServer) -> list[int]:
    """Processes of jobs that the server has started."""
    assert server.process is not None
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"\0ops.jobs\0" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                found += [int(entry.name)] * (int(parent) == server.process.pid)
    return found


def has_ended(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def stopped_job(server: RunningServer) -> int:
    """The server's job, stopped by a signal so that it never ends by itself."""
    until(lambda: any(map(is_confined, jobs_of(server))))
    (pid,) = jobs_of(server)
    os.kill(pid, signal.SIGSTOP)
    return pid


def is_confined(pid: int) -> bool:
    try:
        return re.search(r"Max cpu time +300 ", (Path("/proc") / str(pid) / "limits").read_text()) is not None
    except OSError:
        return False


@contextlib.contextmanager
def waiting(server: RunningServer, path: str, body: object, client: str = "10.0.0.1") -> Iterator[socket.socket]:
    """A connection that has sent a request and has no answer; at the end of the context it hangs up."""
    request = httpx.Request("POST", server.url + path, json=body)
    named = [f"x-forwarded-for: {client}", f"x-request-id: {client}"]
    head = [f"POST {path} HTTP/1.1", "host: localhost", *named, "content-type: application/json"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        length = f"content-length: {len(request.content)}"
        connection.sendall("\r\n".join([*head, length, "", ""]).encode() + request.content)
        yield connection


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("jobs"), trusted_proxies="*") as server:
        server.client.timeout = httpx.Timeout(PATIENCE_S)
        yield server


@pytest.fixture(autouse=True)
def _no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        running: RunningServer = request.getfixturevalue("server")
        until(lambda: not jobs_of(running))


def test_a_log_that_is_parquet_and_text_at_once_is_not_read_as_parquet(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    columns = {name: pa.array([1] * 1000) for name in ("arrival_s", "prompt_tokens", "output_tokens")}
    pq.write_table(pa.table(columns), path, compression="none", store_schema=False)
    text = path.read_bytes().decode("latin-1")
    assert text.startswith("PAR1")
    status, answer = respond("shadow", {"log": text, "policies": ["naive"]})
    assert (status, answer["code"]) == (2, "data_format")


@pytest.mark.parametrize(
    ("name", "log", "said"),
    [
        ("log.csv", "," * 30_000 + "\n1,2,3\n", "more than 10,000 columns or fields"),
        ("log.csv", '"\n"' + "," * 30_000 + "\n1,2,3\n", "more than 10,000 columns or fields"),
        ("log.csv", "x" * 2_000 + ",arrival_s\n1,2\n", "longer than 1,000 characters"),
        ("log.jsonl", json.dumps(dict.fromkeys(range(30_000), 1)), "more than 10,000 columns or fields"),
        ("log.jsonl", json.dumps({"x" * 2_000: {"a": {"b": 1}}}), "longer than 1,000 characters"),
        ("log.jsonl", json.dumps({"a": {"b": 1, "x" * 1_000: 2}}), "longer than 1,000 characters"),
    ],
)
def test_columns_and_their_names_are_bounded(name: str, log: str, said: str) -> None:
    status, answer = respond("shadow", {"log": log, "name": name, "policies": ["naive"]})
    assert (status, answer["code"]) == (2, "data_format")
    assert said in answer["message"]


def test_a_job_cannot_take_more_memory_or_time_than_it_may() -> None:
    program = (
        "import os, resource, signal\n"
        "from ops.jobs import LIMIT_S, limit_time\n"
        "from ops.worker import LIMIT_BYTES, confine\n"
        "confine(os.getppid())\n"
        "limit_time()\n"
        "assert resource.getrlimit(resource.RLIMIT_CPU) == (LIMIT_S, LIMIT_S)\n"
        "assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= LIMIT_S\n"
        "try:\n"
        "    bytearray(LIMIT_BYTES)\n"
        "except MemoryError:\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_a_job_ends_when_its_client_hangs_up_and_the_next_one_begins(server: RunningServer) -> None:
    with contextlib.ExitStack() as connections:
        for _ in range(4):
            connections.enter_context(waiting(server, "/plan", PLAN))
        pid = stopped_job(server)
    answer = server.client.post("/shadow", json=JOB, headers={"x-forwarded-for": "10.0.0.2"})
    assert answer.status_code == 200
    assert has_ended(pid)


def test_clients_take_turns(server: RunningServer) -> None:
    with contextlib.ExitStack() as connections:
        sent = [connections.enter_context(waiting(server, "/shadow", JOB, "10.0.0.1")) for _ in range(4)]
        pid = stopped_job(server)
        sent.append(connections.enter_context(waiting(server, "/shadow", JOB, "10.0.0.2")))
        os.kill(pid, signal.SIGCONT)
        # Each is awaited: a connection that closes early ends its job, and the server may take the four in any order.
        assert [connection.recv(15) for connection in sent] == [b"HTTP/1.1 200 OK"] * 5

    def ended() -> list[str]:
        """Clients whose jobs ended, in this order."""
        entries = [json.loads(line) for line in server.log.read_text().splitlines() if '"request_id":"10.' in line]
        return [entry["request_id"] for entry in entries if entry["status"] == 200][-5:]

    until(lambda: sorted(ended()) == ["10.0.0.1"] * 4 + ["10.0.0.2"])
    assert ended().index("10.0.0.2") <= 2, "at most two jobs of the first client ran before"


def test_jobs_that_wait_are_bounded_per_client_and_in_all_with_the_expected_wait(server: RunningServer) -> None:
    with contextlib.ExitStack() as connections:
        for client in range(4):
            sent = []
            for number in range(5):
                if (client, number) == (0, 4):
                    stopped_job(server)
                sent.append(connections.enter_context(waiting(server, "/shadow", JOB, f"10.0.1.{client}")))
            # The server may take the five in any order; one is refused when the other four have their places.
            (refused,), _, _ = select.select(sent, [], [], PATIENCE_S)
            assert refused.recv(12) == b"HTTP/1.1 429"
        answer = server.client.post("/shadow", json=JOB, headers={"x-forwarded-for": "10.0.1.9"})
        assert (answer.status_code, answer.json()["detail"]["code"]) == (429, "rate_limited")
        assert int(answer.headers["retry-after"]) >= 1
        states = re.findall(r'inferencegym_jobs{state="(\w+)"} (\S+)', server.client.get("/metrics").text)
        assert states == [("running", "1.0"), ("waiting", "15.0")]


@pytest.mark.parametrize("end", [RunningServer.kill, RunningServer.stop])
def test_a_job_ends_with_its_server(tmp_path: Path, end: Callable[[RunningServer], None]) -> None:
    with running_server(tmp_path, shutdown_grace_s="0") as server, waiting(server, "/plan", PLAN):
        pid = stopped_job(server)
        end(server)
        until(lambda: has_ended(pid))
