"""Readers of load generators' result files: the load of each run and the latencies that clients measured.

Read are the JSON of ``vllm bench serve --save-result`` (one object, or one per line from ``--append-result``),
GuideLLM's report as JSON or CSV, and AIPerf's summary (``profile_export_aiperf.json`` or ``.csv``) or its records
(``profile_export.jsonl``).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Final

import numpy as np

from simulator.offline.engine_fit import TimedRequests
from simulator.offline.importers import aiperf_metrics, guidellm_start
from simulator.offline.source import MAX_TOKENS, Source, Value
from simulator.requests import RequestLog
from simulator.tables import FloatArray
from simulator.whatif import steady_requests

METRICS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "output_tokens_per_s")
"""Metrics that a run may state and a fit compares; TTFT p50 and TPOT fall back to means without a median."""
MAX_REQUESTS: Final = 2_000
"""Requests of a run that are replayed; a longer one is cut, its latencies are those of the whole."""


@dataclass(frozen=True, slots=True, eq=False)
class BenchRun:
    """One run of a load generator.

    ``clients`` > 0: that many requests always in flight (closed loop), arrivals of ``requests`` are then ignored.
    ``measured`` holds some of :data:`METRICS`; ``timed`` every request's times where the file has them.
    """

    name: str
    requests: RequestLog = field(repr=False)
    clients: int
    measured: Mapping[str, float]
    timed: TimedRequests | None = field(default=None, repr=False)

    def load(self) -> float:
        """Orders runs from light to heavy: clients, or requests per second."""
        span = max(float(self.requests.arrival_s[-1]), 1e-9)
        return float(self.clients) if self.clients else len(self.requests.arrival_s) / span


def read_runs(path: str | Path) -> list[BenchRun]:
    """All runs of a result file. Raises :class:`DataFormatError` naming file and field."""
    source = Source(Path(path))
    with source.reading():
        text = source.text()
        runs = _from_json(source, text) if text.lstrip().startswith("{") else _from_csv(source, text)
    if not runs:
        raise source.wrong("holds no finished run")
    return runs


def _from_json(source: Source, text: str) -> list[BenchRun]:
    documents = list(source.objects(text))
    first = documents[0]
    known = first.value
    if "benchmarks" in known:
        return [_guidellm_json(benchmark, i) for i, benchmark in enumerate(first.at("benchmarks").items())]
    if "metadata" in known and "metrics" in known:
        return [_aiperf_records(documents)]
    if "time_to_first_token" in known:
        return [_aiperf_summary(source, first.find, _aiperf_clients(first))]
    if "request_throughput" in known or "mean_ttft_ms" in known:
        return [_vllm(document, i) for i, document in enumerate(documents)]
    raise source.wrong(
        "JSON of no known benchmark; known are `vllm bench serve --save-result`, GuideLLM's report and "
        "AIPerf's profile_export files"
    )


# ---------------------------------------------------------------- vLLM


def _vllm(result: Value, index: int) -> BenchRun:
    completed = int(result.at("completed").number(1))
    rate, limit = result.find("request_rate"), result.find("max_concurrency")
    open_rate = None if rate is None or rate.value == "inf" else rate.number(1e-9)
    prompt, output = _lengths_of(result, completed)
    starts = result.find("start_times")
    clients = 0
    if open_rate is None:
        arrival = np.zeros(len(prompt))
        clients = completed if limit is None else int(limit.number(1))
        clients = 0 if clients >= completed else clients  # everything is sent at once: an open burst
    elif starts is not None and len(starts.elements()) == len(prompt):
        arrival = starts.numbers()
    else:
        arrival = _poisson(open_rate, len(prompt))
    load = f"{open_rate:g}/s" if open_rate is not None else f"{clients or completed} clients"
    path = result.source.path

    def first(*names: str) -> Value | None:
        return next((found for name in names if (found := result.find(name)) is not None), None)

    name = f"{path.name}{f'[{index}]' if index else ''} {load}"
    return BenchRun(
        name=name,
        requests=_log(result.source, arrival, prompt, output),
        clients=clients,
        measured=_known(
            result.source,
            {
                "ttft_p50_ms": first("median_ttft_ms", "mean_ttft_ms"),
                "ttft_p99_ms": first("p99_ttft_ms"),
                "tpot_ms": first("median_tpot_ms", "mean_tpot_ms"),
                "output_tokens_per_s": first("output_throughput"),
            },
        ),
        timed=_timed(result, name, clients),
    )


def _timed(result: Value, name: str, clients: int) -> TimedRequests | None:
    """Times of every request's tokens (``--save-detailed``); None where the file has them not, or a request failed."""
    found = [result.find(key) for key in ("start_times", "input_lens", "output_lens", "ttfts", "itls")]
    columns = [each for each in found if each is not None]
    if len(columns) < len(found):
        return None
    start, prompt, output, ttft = (each.numbers() for each in columns[:4])
    gaps = [each.numbers() for each in columns[4].items()]
    if not len(start) == len(prompt) == len(output) == len(ttft) == len(gaps):
        raise result.source.wrong("start_times, input_lens, output_lens, ttfts and itls must have one length")
    if len(start) == 0 or prompt.min() < 1 or output.min() < 1 or ttft.min() <= 0:
        return None
    token_s = []
    for begin, first, n, gap in zip(start, ttft, output, gaps, strict=True):
        at = begin + first + np.concatenate([[0.0], np.cumsum(gap)])
        # An engine may send several tokens at once: they are spread over the messages.
        token_s.append(np.interp(np.linspace(0.0, len(at) - 1.0, int(n)), np.arange(len(at)), at))
    ends = np.array([each[-1] for each in token_s])
    return TimedRequests(name, start, start + ttft, ends, prompt, output, clients, token_s)


def _lengths_of(result: Value, completed: int) -> tuple[FloatArray, FloatArray]:
    """Prompt and output tokens of each request; all alike where the file gives only totals (no --save-detailed)."""
    prompt, output = result.find("input_lens"), result.find("output_lens")
    if prompt is not None and output is not None:
        if len(prompt.elements()) != len(output.elements()):
            raise result.source.wrong("input_lens and output_lens must have one length")
        return prompt.numbers(), output.numbers()
    each = np.ones(min(completed, MAX_REQUESTS)) / completed
    return each * result.at("total_input_tokens").number(1), each * result.at("total_output_tokens").number(1)


# ---------------------------------------------------------------- GuideLLM


def _guidellm_json(benchmark: Value, index: int) -> BenchRun:
    source = benchmark.source
    requests = list(benchmark.at("requests").at("successful").items())
    if len(requests) < 2:
        raise source.wrong(f"{benchmark.name} has fewer than two successful requests")
    columns = [
        np.array(column)
        for column in zip(
            *((guidellm_start(r), r.at("prompt_tokens").tokens(), r.at("output_tokens").tokens()) for r in requests),
            strict=True,
        )
    ]
    strategy = benchmark.find("config", "strategy") or benchmark.find("args", "strategy")
    kind = strategy.find("type_") if strategy is not None else None
    metrics = benchmark.at("metrics")
    return BenchRun(
        name=f"{source.path.name}[{index}] {'run' if kind is None else kind.text()}",
        requests=_log(source, *columns),
        clients=0 if strategy is None or kind is None else _guidellm_clients(strategy, kind.text()),
        measured=_known(
            source,
            {
                "ttft_p50_ms": metrics.find("time_to_first_token_ms", "successful", "median"),
                "ttft_p99_ms": metrics.find("time_to_first_token_ms", "successful", "percentiles", "p99"),
                "tpot_ms": metrics.find("inter_token_latency_ms", "successful", "median"),
                "output_tokens_per_s": metrics.find("output_tokens_per_second", "successful", "mean"),
            },
        ),
    )


def _guidellm_clients(strategy: Value, kind: str) -> int:
    """Clients of a closed loop; 0 for strategies with a rate, whose arrivals are replayed."""
    streams = strategy.find("streams")
    if kind == "concurrent" and streams is not None:
        return int(streams.number(1))
    return 1 if kind in ("synchronous", "concurrent") else 0


def _guidellm_csv(source: Source, rows: list[list[str]]) -> list[BenchRun]:
    headers = list(zip_longest(*rows[:3], fillvalue=""))
    runs = []
    for number, cells in enumerate(rows[3:]):
        row = dict(zip(headers, cells, strict=False))

        def cell(group: str, of: str, which: str, row: Mapping[tuple[str, ...], str] = row) -> Value | None:
            text = row.get((group, of, which))
            return Value(source, f"{group} {of} {which}".strip(), text, cell=True) if text else None

        percentiles = cell("Time to First Token", "Successful ms", "Percentiles")
        runs.append(
            _summary_run(
                source,
                f"{source.path.name}[{number}]",
                prompt=cell("Token Metrics", "Successful Input Tokens", "Mean"),
                output=cell("Token Metrics", "Successful Output Tokens", "Mean"),
                count=cell("Request Counts", "Successful", ""),
                clients=_number(cell("Server Throughput", "Successful Concurrency", "Mean")),
                measured={
                    "ttft_p50_ms": cell("Time to First Token", "Successful ms", "Median"),
                    "ttft_p99_ms": None if percentiles is None else _p99(percentiles),
                    "tpot_ms": cell("Inter Token Latency", "Successful ms", "Median"),
                    "output_tokens_per_s": cell("Token Throughput", "Successful Output Tokens/Sec", "Mean"),
                },
            )
        )
    return runs


def _p99(percentiles: Value) -> Value:
    """The last but one of a list of percentiles, which GuideLLM writes into one cell."""
    listed = replace(percentiles, value=percentiles.source.json(percentiles.text()))
    if len(listed.elements()) < 2:
        raise listed.wrong("is not a list of percentiles")
    return list(listed.items())[-2]


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


def _aiperf_clients(summary: Value) -> Value | None:
    rate = summary.find("input_config", "loadgen", "request_rate")
    return None if rate is not None and rate.value else summary.find("input_config", "loadgen", "concurrency")


def _aiperf_summary(source: Source, of: Callable[[str, str], Value | None], clients: Value | None) -> BenchRun:
    """A run whose statistics of each metric ``of`` gives."""
    in_flight = _number(clients)
    rate, latency_ms = _number(of("request_throughput", "avg")), _number(of("request_latency", "avg"))
    if in_flight is None and rate is not None and latency_ms is not None:
        # Little's law: requests in flight = throughput x time in the system.
        in_flight = rate * latency_ms / 1000.0
    return _summary_run(
        source,
        source.path.name,
        prompt=of("input_sequence_length", "avg"),
        output=of("output_sequence_length", "avg"),
        count=of("request_count", "avg"),
        clients=in_flight,
        measured={
            "ttft_p50_ms": of("time_to_first_token", "p50") or of("time_to_first_token", "avg"),
            "ttft_p99_ms": of("time_to_first_token", "p99"),
            "tpot_ms": of("inter_token_latency", "p50") or of("inter_token_latency", "avg"),
            "output_tokens_per_s": of("output_token_throughput", "avg"),
        },
    )


def _aiperf_csv(source: Source, rows: list[list[str]]) -> BenchRun:
    cells: dict[tuple[str, str], Value] = {}
    header: list[str] = []
    for row in rows:
        if row and row[0] in ("Metric", "Endpoint"):
            header = row
        elif len(row) >= 2 and header[:1] == ["Metric"]:
            name = _AIPERF_NAMES.get(row[0].split(" (")[0].strip())
            for which, text in zip(header[1:], row[1:], strict=False):
                if name is not None and text:
                    cells[name, "avg" if which == "Value" else which] = Value(source, f"{row[0]} {which}", text, True)
    return _aiperf_summary(source, lambda name, which: cells.get((name, which)), None)


def _aiperf_records(records: list[Value]) -> BenchRun:
    source = records[0].source
    done = [(r.at("metadata"), metrics) for r in records if (metrics := aiperf_metrics(r)) is not None]
    if len(done) < 2:
        raise source.wrong("fewer than two successful requests")

    def column(name: str) -> FloatArray:
        return np.array([metrics.at(name).at("value").number() for _, metrics in done])

    def moments_s(name: str) -> FloatArray:
        return np.array([metadata.at(name).number(0, 1e20) for metadata, _ in done]) / 1e9

    starts, ends = moments_s("request_start_ns"), moments_s("request_end_ns")
    ttft, output = column("time_to_first_token"), column("output_sequence_length")
    tpot = column("inter_token_latency")[output > 1]
    return BenchRun(
        name=source.path.name,
        requests=_log(source, starts, column("input_sequence_length"), output),
        clients=0,
        measured=_above_zero(
            source,
            {
                "ttft_p50_ms": float(np.median(ttft)),
                "ttft_p99_ms": float(np.quantile(ttft, 0.99)),
                "tpot_ms": float(np.median(tpot)) if len(tpot) else 0.0,
                "output_tokens_per_s": float(output.sum() / max(ends.max() - starts.min(), 1e-9)),
            },
        ),
    )


# ---------------------------------------------------------------- shared


def _from_csv(source: Source, text: str) -> list[BenchRun]:
    rows = list(csv.reader(text.splitlines()))
    if rows and rows[0][:1] == ["Metric"]:
        return [_aiperf_csv(source, rows)]
    if len(rows) > 3 and {"Request Latency", "Time to First Token"} <= set(rows[0]):
        return _guidellm_csv(source, rows)
    raise source.wrong("CSV of no known benchmark; known are AIPerf's (Metric,avg,...) and GuideLLM's reports")


def _summary_run(
    source: Source,
    name: str,
    prompt: Value | None,
    output: Value | None,
    count: Value | None,
    clients: float | None,
    measured: Mapping[str, Value | None],
) -> BenchRun:
    """A run known by summaries only: requests of equal length in a closed loop of so many clients."""
    stated = []
    for value, said in ((prompt, "prompt tokens"), (output, "output tokens"), (count, "number of requests")):
        number = _number(value)
        if number is None or number < 1:
            raise source.wrong(f"states no {said}")
        stated.append(number)
    if clients is None:
        raise source.wrong("states neither concurrency nor throughput and latency, so its load is unknown")
    prompt_tokens, output_tokens, n = stated
    in_flight = max(1, round(clients))
    zeros = np.zeros(min(int(n), MAX_REQUESTS))
    return BenchRun(
        name=f"{name} {in_flight} clients",
        requests=_log(source, zeros, zeros + prompt_tokens, zeros + output_tokens),
        clients=min(in_flight, int(n)),
        measured=_known(source, measured),
    )


def _log(source: Source, arrival: FloatArray, prompt: FloatArray, output: FloatArray) -> RequestLog:
    if max(prompt.max(), output.max()) > MAX_TOKENS:
        raise source.wrong(f"has a request of more than {MAX_TOKENS:,} tokens")
    order = np.argsort(arrival, kind="stable")[:MAX_REQUESTS]
    return RequestLog(
        arrival_s=arrival[order] - arrival[order[0]],
        prompt_tokens=np.maximum(1.0, prompt[order]),
        output_tokens=np.maximum(1.0, output[order]),
        class_index=np.zeros(len(order), dtype=np.int64),
    )


def _poisson(rate: float, n: int) -> FloatArray:
    return steady_requests(rate, n, 1.0, 1.0).arrival_s


def _number(value: Value | None) -> float | None:
    return None if value is None else value.number()


def _known(source: Source, values: Mapping[str, Value | None]) -> dict[str, float]:
    return _above_zero(source, {name: value.number() for name, value in values.items() if value is not None})


def _above_zero(source: Source, values: Mapping[str, float]) -> dict[str, float]:
    found = {name: value for name, value in values.items() if value > 0}
    if not found:
        raise source.wrong(f"states no latency or throughput; known are {', '.join(METRICS)}")
    return found
