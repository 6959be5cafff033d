"""Whatever a log or benchmark result contains, it is read or refused with an error message: no file causes a crash."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferencegym.errors import DataFormatError
from ops.jobs import respond
from ops.log.bench import read_runs
from ops.log.reader import import_log
from simulator.load.recorded import load_trace
from tests.ops.test_import_bench import AIPERF_CSV, AIPERF_JSON, aiperf_jsonl, guidellm_csv, guidellm_json
from tests.ops.test_import_trace import AIPERF, AZURE, BURSTGPT, GUIDELLM, MOONCAKE, PLAIN, VLLM

LOGS: Final = {
    "azure.csv": AZURE,
    "burstgpt.csv": BURSTGPT,
    "plain.csv": PLAIN,
    "mooncake.jsonl": MOONCAKE,
    "aiperf.jsonl": AIPERF,
    "guidellm.json": GUIDELLM,
    "newer_guidellm.json": GUIDELLM.replace(
        '"request_start_time": 100.0', '"info": {"timings": {"request_start": 100.0}}'
    ),
    "vllm.json": VLLM,
}
VLLM_RESULT: Final = {
    "completed": 2,
    "request_rate": 2.0,
    "max_concurrency": None,
    "total_input_tokens": 23,
    "total_output_tokens": 11,
    "request_throughput": 1.0,
    "output_throughput": 8.0,
    "median_ttft_ms": 20.0,
    "p99_ttft_ms": 30.0,
    "median_tpot_ms": 10.0,
    "input_lens": [11, 12],
    "output_lens": [5, 6],
    "start_times": [10.0, 10.25],
}
CLOSED_LOOP: Final = {k: v for k, v in VLLM_RESULT.items() if k[-5:] not in ("_lens", "times")}
RESULTS: Final = {
    "guidellm.json": guidellm_json(),
    "guidellm.csv": guidellm_csv(),
    "aiperf.json": AIPERF_JSON,
    "aiperf.csv": AIPERF_CSV,
    "aiperf.jsonl": aiperf_jsonl(),
    "vllm.json": json.dumps(VLLM_RESULT),
    "closed.json": json.dumps({**CLOSED_LOOP, "request_rate": "inf", "max_concurrency": 2}),
}
HUGE: Final = 10**400
DEEP: Final = '{"a":' + "[" * 100_000
LITTER: Final = ["", "\0", "[" * 5000, '{"a":' * 5000, '"', "\n", ",", "{}", "1" * 5000, "\ufeff"]
JUNK: Final[list[Any]] = [
    *(None, True, False, 0, 1, -1, 0.5, 5, 1e6, 10**9, 1e13, 1e300, HUGE, -HUGE),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "5", "inf", "nan", "\0", "\ud800", "1" * 5000),
    *([], [1], [None], [HUGE], ["x", "y"], [[]], {}, {"a": 1}, {"value": []}, {"successful": 5}, {"timings": [1]}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places of a JSON value at which something can be replaced."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def spoiled(draw: Draw, texts: dict[str, str]) -> tuple[str, str]:
    """The name of a format's example, with its text after a few mistakes in its values, then perhaps in its letters."""
    name = draw(st.sampled_from(sorted(texts)))
    lines = texts[name].splitlines()
    as_json = lines[0].startswith("{")
    table: list[Any] = [json.loads(line) if as_json else line.split(",") for line in lines]
    for _ in range(draw(st.integers(1, 3))):
        spoil_a_value(draw, table)
    text = "".join((json.dumps(row) if as_json else as_cells(row)) + "\n" for row in table)
    text = text.encode("utf-8", "replace").decode()  # neither a file nor a request can contain half a surrogate pair
    if draw(st.booleans()):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(st.sampled_from(LITTER)) + text[start + draw(st.integers(0, 20)) :]
    return name, text


def as_cells(row: Any) -> str:
    return ",".join(map(str, row)) if isinstance(row, list) else str(row)


def spoil_a_value(draw: Draw, table: list[Any]) -> None:
    """Replace, remove or repeat one value, row or whole branch."""
    found = list(places(table))
    if not found:
        return
    *way, last = draw(st.sampled_from(found))
    holder: Any = table
    for key in way:
        holder = holder[key]
    match draw(st.sampled_from(["replace", "remove", "repeat"])):
        case "remove":
            del holder[last]
        case "repeat" if isinstance(holder, list):
            holder.insert(last, deepcopy(holder[last]))
        case _:
            holder[last] = deepcopy(draw(st.sampled_from(JUNK)))


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


once_per_session = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(spoiled(LOGS))
@settings(once_per_session, max_examples=200)
def test_a_spoiled_log_is_read_or_refused_with_its_name(tmp_path: Path, case: tuple[str, str]) -> None:
    path = written(tmp_path, *case)
    try:
        imported = import_log(path)
    except DataFormatError as error:
        assert path.name in str(error)  # noqa: PT017
        assert len(str(error)) < 1000  # noqa: PT017
    else:
        assert len(imported.log.arrival_s) >= 1


@given(
    spoiled(LOGS),
    st.sampled_from(["azure", "mooncake", "burstgpt", "guidellm", "aiperf", "vllm", "kv-cache-tester", "table"]),
)
@settings(once_per_session, max_examples=200)
def test_a_log_read_as_what_it_is_not_is_refused_too(tmp_path: Path, case: tuple[str, str], format: str) -> None:
    path = written(tmp_path, *case)
    try:
        import_log(path, format, run=0)
    except DataFormatError as error:
        assert path.name in str(error)  # noqa: PT017


@given(spoiled(RESULTS))
@settings(once_per_session, max_examples=200)
def test_a_spoiled_result_is_read_or_refused_with_its_name(tmp_path: Path, case: tuple[str, str]) -> None:
    path = written(tmp_path, *case)
    try:
        runs = read_runs(path)
    except DataFormatError as error:
        assert path.name in str(error)  # noqa: PT017
        assert len(str(error)) < 1000  # noqa: PT017
    else:
        assert all(value > 0 for run in runs for value in run.measured.values())


def answer(name: str, log: str) -> tuple[int, dict[str, Any]]:
    """Status and detail of an upload, as the server's process for logs gives them."""
    status, said = respond("shadow", {"name": name, "log": log, "policies": ["naive"]})
    return said.get("http_status", 200) if status else 200, said


@given(spoiled(LOGS))
@settings(once_per_session, max_examples=100)
def test_a_spoiled_log_that_is_uploaded_is_answered(case: tuple[str, str]) -> None:
    status, said = answer(*case)
    assert status in (200, 422), said
    assert "/tmp" not in str(said)


def vllm(**changes: Any) -> str:
    return json.dumps({**json.loads(VLLM), **changes})


def guidellm(**changes: Any) -> str:
    request = {"prompt_tokens": 5, "output_tokens": 5, **changes}
    return json.dumps({"benchmarks": [{"requests": {"successful": [request]}}]})


SUCCESSFUL: Final = "benchmarks[0].requests.successful[0]"
LINE: Final = '{"timestamp": %s, "input_length": 10, "output_length": 5}\n'
WRONG: Final = [
    ("a.jsonl", LINE % HUGE, 1, "timestamp", "=1000"),
    ("a.json", json.dumps([{"time": 0, "input_tokens": 5, "output_tokens": "x"}]), None, "[0].output_tokens", "='x'"),
    ("a.jsonl", LINE % ("1" * 5000), None, None, "digits"),
    ("a.jsonl", LINE % "NaN", 1, "timestamp", "=nan"),
    ("a.jsonl", LINE % '"five"', 1, "timestamp", "='five'"),
    ("a.jsonl", LINE % "0" + LINE % ("[" * 500 + "]" * 500), 2, "timestamp", "=[...]"),
    ("a.jsonl", LINE % "0" + LINE % ("[" * 5000), 2, None, "nested"),
    ("a.jsonl", LINE % "0" + (LINE % "1").replace("}", ', "hash_ids": [1]}'), 1, "hash_ids", "other lines"),
    ("a.jsonl", (LINE % "1").replace("}", ', "hash_ids": [1, true]}'), 1, "hash_ids[1]", "=True"),
    ("a.jsonl", AIPERF + '{"metadata": 5, "metrics": {"x": 1}}', 4, "metadata.request_start_ns", "missing"),
    ("a.json", vllm(errors=5), None, "errors", "=5"),
    ("a.json", vllm(errors={"a": 1}), None, "errors", "={...}"),
    ("a.json", vllm(errors=[""]), None, None, "equal length"),
    ("a.json", vllm(input_lens=[1, HUGE]), None, "[1].input_lens", "=1000"),
    ("a.json", json.dumps({"benchmarks": [5]}), None, "benchmarks[0]", "=5"),
    ("a.json", json.dumps({"benchmarks": 5}), None, "benchmarks", "=5"),
    ("a.json", guidellm(info={"timings": [1]}), None, None, "output_tokens, info, info.timings"),
    ("a.json", guidellm(), None, None, "no column with a usual name for arrival"),
    ("a.json", guidellm(request_start_time="x"), None, SUCCESSFUL + ".request_start_time", "='x'"),
    ("a.json", DEEP, None, None, "nested"),
    ("a.csv", PLAIN.replace("0,10", "9" * 400 + ",10"), 2, "arrival_s", "='9999"),
    ("a.csv", PLAIN + "1e11,1,1,0\n", None, None, "31,622,400 s"),
    ("a.csv", PLAIN + "5,1\0,1,0\n", 5, "prompt_tokens", "='1"),
]


@pytest.mark.parametrize(
    ("name", "log", "line", "field", "shown"), WRONG, ids=[f"{row[2]}-{row[3]}-{row[4]}" for row in WRONG]
)
def test_an_uploaded_mistake_is_named_with_its_line_and_field(
    name: str, log: str, line: int | None, field: str | None, shown: str
) -> None:
    status, detail = answer(name, log)
    assert (status, detail["code"]) == (422, "data_format")
    assert (detail.get("line"), detail.get("field")) == (line, field)
    assert shown in detail["message"]
    assert line is None or f"{name}, line {line}: " in detail["message"]


@pytest.mark.parametrize(
    ("column", "line", "shown"),
    [
        (pa.array([0, None]), 2, "missing"),
        (pa.array([0, 10**18]), 2, "=1000000000000000000"),
        (pa.array([[0], [1]]), 1, "not a number"),
        (pa.array([False, True]), 1, "=False"),
    ],
)
def test_a_parquet_column_of_another_type_is_refused(
    tmp_path: Path, column: pa.Array, line: int | None, shown: str
) -> None:
    lengths = pa.array(np.array([5, 6]))
    table = pa.table({"arrival_s": column, "prompt_tokens": lengths, "output_tokens": lengths})
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(DataFormatError) as refused:
        import_log(tmp_path / "log.parquet")
    assert (refused.value.line, refused.value.field) == (line, "arrival_s")
    assert shown in str(refused.value)


def test_a_parquet_log_is_read_exactly(tmp_path: Path) -> None:
    columns = {"arrival_s": [0.1, 1 / 3], "prompt_tokens": [5, 6], "output_tokens": [7.0, 8.0], "class": ["batch", "2"]}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    log = import_log(tmp_path / "log.parquet").log
    assert log.arrival_s.tolist() == [0.0, 1 / 3 - 0.1]
    assert (log.prompt_tokens.tolist(), log.output_tokens.tolist()) == ([5, 6], [7, 8])
    assert log.class_index.tolist() == [1, 2]


def packed(**changes: Any) -> dict[str, Any]:
    columns = dict.fromkeys(("arrival_s", "prompt_tokens", "output_tokens"), np.array([1.0, 2.0]))
    counts = dict.fromkeys(("class_index", "reused_tokens"), np.array([0, 0]))
    return {**columns, **counts, "meta": np.frombuffer(b'{"version": 1}', dtype=np.uint8), **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arrival_s": np.array(0.0)}, "arrival_s must be 1 finite numbers"),
        ({"prompt_tokens": np.ones((2, 2))}, "prompt_tokens must be 2 finite numbers"),
        ({"class_index": np.array([0])}, "class_index must be 2 finite numbers"),
        ({"class_index": np.array([0, 3])}, "class_index must be from 0 to 2"),
        ({"class_index": np.array([0, -1])}, "class_index must be from 0 to 2"),
        ({"meta": np.frombuffer(b"5", dtype=np.uint8)}, "its description is not a JSON object"),
        ({"meta": np.frombuffer(b"[" * 50_000, dtype=np.uint8)}, "maximum recursion depth"),
    ],
)
def test_a_file_that_is_not_a_packed_trace_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    np.savez(tmp_path / "log.npz", **packed(**changes))
    with pytest.raises(DataFormatError) as refused:
        load_trace(str(tmp_path / "log.npz"))
    assert "log.npz is not a packed trace" in str(refused.value)
    assert said in str(refused.value)


def test_a_single_array_is_not_a_packed_trace(tmp_path: Path) -> None:
    np.save(tmp_path / "log.npy", np.ones(3))
    with pytest.raises(DataFormatError, match=r"log.npy is not a packed trace"):
        load_trace(str(tmp_path / "log.npy"))


def test_a_trace_whose_arrays_promise_more_than_they_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("arrival_s.npy", head.getvalue())
    with pytest.raises(DataFormatError, match=r"arrival_s\.npy is cut short"):
        load_trace(str(path))


def test_what_is_no_file_is_no_packed_trace() -> None:
    with pytest.raises(DataFormatError, match="/dev/zero is not a file"):
        load_trace("/dev/zero")


def test_control_characters_of_names_are_escaped_in_messages(tmp_path: Path) -> None:
    path = written(tmp_path, "log.csv", "\x1b]0;mine\x07arrival,\x1b[31mprompt_tokens\n1,2\n")
    with pytest.raises(DataFormatError) as refused:
        import_log(path)
    assert r"\x1b[31mprompt_tokens" in str(refused.value)
    assert str(refused.value).isprintable()
    named = written(tmp_path, "good.csv", "\x1b[31mts,prompt,output\n1,2,3\n")
    columns = import_log(named, columns="arrival=\x1b[31mts").columns
    assert columns["arrival"].startswith(r"\x1b[31mts")
