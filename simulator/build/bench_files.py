"""Reads what load generators say of a served model: the load of each run and the latencies that clients saw.

Read are the JSON of ``vllm bench serve --save-result`` (one object, or one per line from ``--append-result``),
GuideLLM's report as JSON or CSV, and AIPerf's summary (``profile_export_aiperf.json`` or ``.csv``) or its records
(``profile_export.jsonl``).
"""

from __future__ import annotations

import ast
import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from inferencegym.errors import DataFormatError
from simulator.build.importers import MAX_DOCUMENT_BYTES, guidellm_start
from simulator.requests import RequestLog
from simulator.tables import FloatArray
from simulator.whatif import steady_requests

METRICS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "output_tokens_per_s")
"""What a run may state and a fit compares. TTFT p50 and TPOT fall back to means where no median is given."""
MAX_REQUESTS: Final = 2_000
"""Requests of a run that are replayed; a longer one is cut, its latencies are those of the whole."""


@dataclass(frozen=True, slots=True, eq=False)
class BenchRun:
    """One run of a load generator.

    ``clients`` > 0: that many requests always in flight (closed loop), arrivals of ``requests`` are then ignored.
    ``measured`` holds some of :data:`METRICS`.
    """

    name: str
    requests: RequestLog = field(repr=False)
    clients: int
    measured: Mapping[str, float]

    def load(self) -> float:
        """Orders runs from light to heavy: clients, or requests per second."""
        span = max(float(self.requests.arrival_s[-1]), 1e-9)
        return float(self.clients) if self.clients else len(self.requests.arrival_s) / span


def read_runs(path: str | Path) -> list[BenchRun]:
    """All runs of a result file. Raises :class:`DataFormatError` naming file and field."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if not 0 < size <= MAX_DOCUMENT_BYTES:
            raise DataFormatError(f"{path}: has {size:,} bytes; a result file has 1 to {MAX_DOCUMENT_BYTES:,}")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataFormatError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{path}: is not UTF-8 text (byte {error.start}); convert it with `iconv -t UTF-8`"
        ) from error
    runs = _from_json(path, text) if text.lstrip().startswith("{") else _from_csv(path, text)
    if not runs:
        raise DataFormatError(f"{path}: holds no finished run")
    return runs


def _from_json(path: Path, text: str) -> list[BenchRun]:
    documents = list(_json_objects(path, text))
    first = documents[0]
    if "benchmarks" in first:
        return [_guidellm_json(path, i, b) for i, b in enumerate(_of(path, first, "benchmarks"))]
    if "metadata" in first and "metrics" in first:
        return [_aiperf_records(path, documents)]
    if "time_to_first_token" in first:
        return [_aiperf_summary(path, _aiperf_metrics(first), _aiperf_clients(first))]
    if "request_throughput" in first or "mean_ttft_ms" in first:
        return [_vllm(path, i, d) for i, d in enumerate(documents)]
    raise DataFormatError(
        f"{path}: JSON of no known benchmark; known are `vllm bench serve --save-result`, GuideLLM's report and "
        "AIPerf's profile_export files"
    )


def _json_objects(path: Path, text: str) -> Iterator[dict[str, Any]]:
    decoder, at, n = json.JSONDecoder(), 0, len(text)
    while at < n:
        while at < n and text[at].isspace():
            at += 1
        if at == n:
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, at) + 1
            raise DataFormatError(f"{path}, line {line}: is not JSON ({error})") from None
        if not isinstance(value, dict):
            raise DataFormatError(f"{path}: must hold JSON objects")
        yield value


# ---------------------------------------------------------------- vLLM


def _vllm(path: Path, index: int, d: dict[str, Any]) -> BenchRun:
    completed = int(_number(path, d, "completed", 1))
    rate = d.get("request_rate", "inf")
    open_rate = None if rate in ("inf", None) else _number(path, d, "request_rate", 1e-9)
    limit = d.get("max_concurrency")
    lengths = _lengths_of(path, d, completed)
    if open_rate is None:
        arrival = np.zeros(len(lengths[0]))
    elif isinstance(d.get("start_times"), list) and len(d["start_times"]) == len(lengths[0]):
        arrival = _array(path, d, "start_times")
    else:
        arrival = _poisson(open_rate, len(lengths[0]))
    clients = 0
    if open_rate is None:
        clients = completed if limit is None else int(_number(path, d, "max_concurrency", 1))
        clients = 0 if clients >= completed else clients  # everything is sent at once: an open burst
    load = f"{open_rate:g}/s" if open_rate is not None else f"{clients or completed} clients"
    return BenchRun(
        name=f"{path.name}{f'[{index}]' if index else ''} {load}",
        requests=_log(path, arrival, *lengths),
        clients=clients,
        measured=_known(
            path,
            {
                "ttft_p50_ms": d.get("median_ttft_ms", d.get("mean_ttft_ms")),
                "ttft_p99_ms": d.get("p99_ttft_ms"),
                "tpot_ms": d.get("median_tpot_ms", d.get("mean_tpot_ms")),
                "output_tokens_per_s": d.get("output_throughput"),
            },
        ),
    )


def _lengths_of(path: Path, d: dict[str, Any], completed: int) -> tuple[FloatArray, FloatArray]:
    """Prompt and output tokens of each request; all alike where the file gives only totals (no --save-detailed)."""
    if isinstance(d.get("input_lens"), list) and isinstance(d.get("output_lens"), list):
        prompt, output = _array(path, d, "input_lens"), _array(path, d, "output_lens")
        if len(prompt) != len(output):
            raise DataFormatError(f"{path}: input_lens and output_lens must have one length")
        return prompt, output
    prompt_mean = _number(path, d, "total_input_tokens", 1) / completed
    output_mean = _number(path, d, "total_output_tokens", 1) / completed
    return np.full(completed, prompt_mean), np.full(completed, output_mean)


# ---------------------------------------------------------------- GuideLLM


def _guidellm_json(path: Path, index: int, benchmark: dict[str, Any]) -> BenchRun:
    metrics = _of(path, benchmark, "metrics")
    requests = _of(path, benchmark, "requests").get("successful") or []
    if len(requests) < 2:
        raise DataFormatError(f"{path}: benchmarks[{index}] has fewer than two successful requests")
    columns = {
        name: np.array([_number(path, r, name, 0) for r in requests]) for name in ("prompt_tokens", "output_tokens")
    }
    starts = [guidellm_start(r) for r in requests]
    if any(not isinstance(s, (int, float)) for s in starts):
        raise DataFormatError(f"{path}: benchmarks[{index}]: requests have no start time")
    strategy = (benchmark.get("config") or benchmark.get("args") or {}).get("strategy") or {}
    clients = _guidellm_clients(strategy)
    return BenchRun(
        name=f"{path.name}[{index}] {strategy.get('type_', 'run')}",
        requests=_log(path, np.array(starts, dtype=np.float64), columns["prompt_tokens"], columns["output_tokens"]),
        clients=clients,
        measured=_known(
            path,
            {
                "ttft_p50_ms": _statistic(metrics, "time_to_first_token_ms", "median"),
                "ttft_p99_ms": _statistic(metrics, "time_to_first_token_ms", "p99"),
                "tpot_ms": _statistic(metrics, "inter_token_latency_ms", "median"),
                "output_tokens_per_s": _statistic(metrics, "output_tokens_per_second", "mean"),
            },
        ),
    )


def _guidellm_clients(strategy: Mapping[str, Any]) -> int:
    """Clients of a closed loop; 0 for strategies with a rate, whose arrivals are replayed."""
    kind = str(strategy.get("type_", ""))
    if kind == "synchronous":
        return 1
    if kind == "concurrent":
        return int(strategy.get("streams") or 1)
    return 0


def _statistic(metrics: Mapping[str, Any], name: str, which: str) -> object:
    found = (metrics.get(name) or {}).get("successful") or {}
    return (found.get("percentiles") or {}).get(which) if which.startswith("p") else found.get(which)


def _guidellm_csv(path: Path, rows: list[list[str]]) -> list[BenchRun]:
    headers = list(zip(*(row + [""] * (len(rows[0]) - len(row)) for row in rows[:3]), strict=True))
    runs = []
    for number, cells in enumerate(rows[3:]):
        row = dict(zip(headers, cells, strict=False))

        def cell(group: str, unit: str, which: str, row: Mapping[Any, str] = row) -> object:
            return row.get((group, f"Successful {unit}", which)) or None

        percentiles = cell("Time to First Token", "ms", "Percentiles")
        p99 = ast.literal_eval(str(percentiles))[-2] if percentiles else None
        runs.append(
            _summary_run(
                path,
                f"{path.name}[{number}]",
                prompt=cell("Token Metrics", "Input Tokens", "Mean"),
                output=cell("Token Metrics", "Output Tokens", "Mean"),
                count=row.get(("Request Counts", "Successful", "")),
                rate=cell("Server Throughput", "Requests/Sec", "Mean"),
                clients=cell("Server Throughput", "Concurrency", "Mean"),
                measured={
                    "ttft_p50_ms": cell("Time to First Token", "ms", "Median"),
                    "ttft_p99_ms": p99,
                    "tpot_ms": cell("Inter Token Latency", "ms", "Median"),
                    "output_tokens_per_s": cell("Token Throughput", "Output Tokens/Sec", "Mean"),
                },
            )
        )
    return runs


# ---------------------------------------------------------------- AIPerf

_AIPERF_NAMES: Final = {
    "Time to First Token": "time_to_first_token",
    "Inter Token Latency": "inter_token_latency",
    "Request Latency": "request_latency",
    "Input Sequence Length": "input_sequence_length",
    "Output Sequence Length": "output_sequence_length",
    "Output Token Throughput": "output_token_throughput",
    "Request Throughput": "request_throughput",
    "Request Count": "request_count",
}


def _aiperf_metrics(d: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: d[name] for name in _AIPERF_NAMES.values() if isinstance(d.get(name), dict)}


def _aiperf_clients(d: Mapping[str, Any]) -> object:
    loadgen = (d.get("input_config") or {}).get("loadgen") or {}
    return None if loadgen.get("request_rate") else loadgen.get("concurrency")


def _aiperf_summary(path: Path, metrics: Mapping[str, Mapping[str, Any]], clients: object) -> BenchRun:
    def of(name: str, which: str) -> object:
        return (metrics.get(name) or {}).get(which)

    rate, latency_ms = of("request_throughput", "avg"), of("request_latency", "avg")
    if clients is None and rate is not None and latency_ms is not None:
        # Little's law: requests in flight = throughput x time in the system.
        clients = float(str(rate)) * float(str(latency_ms)) / 1000.0
    return _summary_run(
        path,
        path.name,
        prompt=of("input_sequence_length", "avg"),
        output=of("output_sequence_length", "avg"),
        count=of("request_count", "avg"),
        rate=rate,
        clients=clients,
        measured={
            "ttft_p50_ms": of("time_to_first_token", "p50") or of("time_to_first_token", "avg"),
            "ttft_p99_ms": of("time_to_first_token", "p99"),
            "tpot_ms": of("inter_token_latency", "p50") or of("inter_token_latency", "avg"),
            "output_tokens_per_s": of("output_token_throughput", "avg"),
        },
    )


def _aiperf_csv(path: Path, rows: list[list[str]]) -> BenchRun:
    metrics: dict[str, dict[str, Any]] = {}
    header: list[str] = []
    for row in rows:
        if row and row[0] in ("Metric", "Endpoint"):
            header = row
        elif len(row) >= 2 and header[:1] == ["Metric"]:
            name = _AIPERF_NAMES.get(row[0].split(" (")[0].strip())
            if name is not None:
                keys = ["avg" if h == "Value" else h for h in header[1:]]
                metrics[name] = {k: v for k, v in zip(keys, row[1:], strict=False) if v != ""}
    return _aiperf_summary(path, metrics, None)


def _aiperf_records(path: Path, records: list[dict[str, Any]]) -> BenchRun:
    done = [r for r in records if not r.get("error") and r.get("metrics")]
    if len(done) < 2:
        raise DataFormatError(f"{path}: fewer than two successful requests")

    def column(name: str) -> FloatArray:
        return np.array([_number(path, _of(path, _of(path, r, "metrics"), name), "value", 0) for r in done])

    starts = np.array([_number(path, _of(path, r, "metadata"), "request_start_ns", 0) for r in done]) / 1e9
    ends = np.array([_number(path, _of(path, r, "metadata"), "request_end_ns", 0) for r in done]) / 1e9
    ttft, output = column("time_to_first_token"), column("output_sequence_length")
    tpot = column("inter_token_latency")[output > 1]
    return BenchRun(
        name=path.name,
        requests=_log(path, starts, column("input_sequence_length"), output),
        clients=0,
        measured=_known(
            path,
            {
                "ttft_p50_ms": float(np.median(ttft)),
                "ttft_p99_ms": float(np.quantile(ttft, 0.99)),
                "tpot_ms": float(np.median(tpot)) if len(tpot) else None,
                "output_tokens_per_s": float(output.sum() / max(ends.max() - starts.min(), 1e-9)),
            },
        ),
    )


# ---------------------------------------------------------------- shared


def _from_csv(path: Path, text: str) -> list[BenchRun]:
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise DataFormatError(f"{path}: is not CSV ({error})") from error
    if rows and rows[0][:1] == ["Metric"]:
        return [_aiperf_csv(path, rows)]
    if len(rows) > 3 and {"Request Latency", "Time to First Token"} <= set(rows[0]):
        return _guidellm_csv(path, rows)
    raise DataFormatError(
        f"{path}: CSV of no known benchmark; known are AIPerf's (Metric,avg,...) and GuideLLM's reports"
    )


def _summary_run(
    path: Path,
    name: str,
    prompt: object,
    output: object,
    count: object,
    rate: object,
    clients: object,
    measured: Mapping[str, object],
) -> BenchRun:
    """A run of which only summaries are known: requests all alike, in a closed loop of so many clients."""
    stated = {"prompt": prompt, "output": output, "count": count, "rate": rate, "clients": clients}
    numbers = {key: _number(path, stated, key, 0) for key in stated if stated[key] is not None}
    for key, said in (("prompt", "prompt tokens"), ("output", "output tokens"), ("count", "number of requests")):
        if numbers.get(key, 0.0) < 1:
            raise DataFormatError(f"{path}: states no {said}")
    if "clients" not in numbers:
        raise DataFormatError(f"{path}: states neither concurrency nor throughput and latency, so its load is unknown")
    n, in_flight = int(numbers["count"]), max(1, round(numbers["clients"]))
    zeros = np.zeros(n)
    return BenchRun(
        name=f"{name} {in_flight} clients",
        requests=_log(path, zeros, zeros + numbers["prompt"], zeros + numbers["output"]),
        clients=min(in_flight, n),
        measured=_known(path, measured),
    )


def _log(path: Path, arrival: FloatArray, prompt: FloatArray, output: FloatArray) -> RequestLog:
    order = np.argsort(arrival, kind="stable")[:MAX_REQUESTS]
    try:
        return RequestLog(
            arrival_s=arrival[order] - arrival[order[0]],
            prompt_tokens=np.maximum(1.0, prompt[order]),
            output_tokens=np.maximum(1.0, output[order]),
            class_index=np.zeros(len(order), dtype=np.int64),
        )
    except DataFormatError as error:
        raise DataFormatError(f"{path}: {error}") from error


def _poisson(rate: float, n: int) -> FloatArray:
    return steady_requests(rate, n, 1.0, 1.0).arrival_s


def _known(path: Path, values: Mapping[str, object]) -> dict[str, float]:
    found = {name: _number(path, values, name, 0) for name in values if values[name] is not None}
    found = {name: value for name, value in found.items() if value > 0}
    if not found:
        raise DataFormatError(f"{path}: states no latency or throughput; known are {', '.join(METRICS)}")
    return found


def _number(path: Path, record: Mapping[str, Any], name: str, low: float) -> float:
    value = record.get(name)
    try:
        if value is None or isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise DataFormatError(f"{path}: {name}={value!r} is not a number") from None
    if not low <= number < math.inf:
        raise DataFormatError(f"{path}: {name}={value!r} is not allowed: it must be a finite number from {low:g} on")
    return number


def _array(path: Path, record: Mapping[str, Any], name: str) -> FloatArray:
    try:
        values = np.array(record[name], dtype=np.float64)
    except (TypeError, ValueError):
        raise DataFormatError(f"{path}: {name} must be a list of numbers") from None
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all() or values.min() < 0:
        raise DataFormatError(f"{path}: {name} must be a list of finite numbers >= 0")
    return values


def _of(path: Path, record: Any, key: str) -> Any:
    if not isinstance(record, Mapping) or key not in record:
        raise DataFormatError(f"{path}: no field {key!r}")
    return record[key]
