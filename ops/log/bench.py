"""Read result files of load generators: the load of each run and the latencies that clients measured.

It reads the JSON of ``vllm bench serve --save-result`` (one object, or one per line from ``--append-result``),
GuideLLM's report as JSON or CSV, and AIPerf's summary (``profile_export_aiperf.json`` or ``.csv``) or its records
(``profile_export.jsonl``). A CSV file is read as the corresponding JSON document; :data:`STATED` lists each tool's
names of the metrics.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final

import numpy as np

from ops.log.formats import format_of
from ops.log.names import UNITS, parse_columns
from ops.log.source import MAX_TOKENS, Source, Value
from simulator.hardware.tables import FloatArray
from simulator.load.requests import RequestLog
from simulator.offline.engine_fit import TimedRequests
from simulator.whatif import steady_requests

METRICS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "output_tokens_per_s")
"""Metrics that a run may state and a fit compares; without a median, TTFT p50 and TPOT fall back to the mean."""
MAX_REQUESTS: Final = 2_000
"""Most requests of a run that are replayed. A longer run is cut; its measured latencies still describe all of it."""

_OF_TOKENS: Final = "Token Metrics.Successful {} Tokens.Mean"
STATED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "vllm": {
        "ttft_p50_ms": ("median_ttft_ms", "mean_ttft_ms"),
        "ttft_p99_ms": ("p99_ttft_ms",),
        "tpot_ms": ("median_tpot_ms", "mean_tpot_ms"),
        "output_tokens_per_s": ("output_throughput",),
    },
    "guidellm": {
        "ttft_p50_ms": ("metrics.time_to_first_token_ms.successful.median",),
        "ttft_p99_ms": ("metrics.time_to_first_token_ms.successful.percentiles.p99",),
        "tpot_ms": ("metrics.inter_token_latency_ms.successful.median",),
        "output_tokens_per_s": ("metrics.output_tokens_per_second.successful.mean",),
    },
    "guidellm's table": {
        "ttft_p50_ms": ("Time to First Token.Successful ms.Median",),
        "ttft_p99_ms": ("Time to First Token.Successful ms.p99",),
        "tpot_ms": ("Inter Token Latency.Successful ms.Median",),
        "output_tokens_per_s": ("Token Throughput.Successful Output Tokens/Sec.Mean",),
        "prompt tokens": (_OF_TOKENS.format("Input"),),
        "output tokens": (_OF_TOKENS.format("Output"),),
        "number of requests": ("Request Counts.Successful.",),
        "clients": ("Server Throughput.Successful Concurrency.Mean",),
    },
    "aiperf's summary": {
        "ttft_p50_ms": ("time_to_first_token.p50", "time_to_first_token.avg"),
        "ttft_p99_ms": ("time_to_first_token.p99",),
        "tpot_ms": ("inter_token_latency.p50", "inter_token_latency.avg"),
        "output_tokens_per_s": ("output_token_throughput.avg",),
        "prompt tokens": ("input_sequence_length.avg",),
        "output tokens": ("output_sequence_length.avg",),
        "number of requests": ("request_count.avg",),
        "clients": ("input_config.loadgen.concurrency",),
    },
}
"""Paths of each metric in a tool's document and, for documents without requests, of its load."""


@dataclass(frozen=True, slots=True, eq=False)
class BenchRun:
    """One run of a load generator.

    ``clients`` > 0: a closed loop that keeps that many requests in flight and ignores the arrivals of ``requests``.
    ``measured`` holds some of :data:`METRICS`; ``timed`` holds every request's times if the file has them.
    """

    name: str
    requests: RequestLog = field(repr=False)
    clients: int
    measured: Mapping[str, float]
    timed: TimedRequests | None = field(default=None, repr=False)

    def load(self) -> float:
        """Sort key from light to heavy runs: clients, or requests per second."""
        span = max(float(self.requests.arrival_s[-1]), 1e-9)
        return float(self.clients) if self.clients else len(self.requests.arrival_s) / span


def read_runs(path: str | Path) -> list[BenchRun]:
    """All runs of a result file. Raises :class:`DataFormatError` naming file and field."""
    source = Source(Path(path))
    with source.reading():
        text = source.text()
        is_json = text.lstrip().startswith("{")
        documents = list(source.objects(text)) if is_json else _documents_of_csv(source, text)
        read = next((read for told_by, read in _TOOLS if documents and told_by <= documents[0].value.keys()), None)
        if read is None:
            raise source.wrong(
                f"{'JSON' if is_json else 'CSV'} of no known benchmark; known are `vllm bench serve --save-result`, "
                "GuideLLM's reports and AIPerf's profile_export files"
            )
        runs = read(source, documents)
    if not runs:
        raise source.wrong("holds no finished run")
    return runs


def _vllm_runs(source: Source, documents: Sequence[Value]) -> list[BenchRun]:
    return [_vllm(document, i) for i, document in enumerate(documents)]


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
        clients = 0 if clients >= completed else clients  # everything is sent at once: an open loop
    elif starts is not None and len(starts.elements()) == len(prompt):
        arrival = starts.numbers()
    else:
        arrival = steady_requests(open_rate, len(prompt), 1.0, 1.0).arrival_s
    load = f"{open_rate:g}/s" if open_rate is not None else f"{clients or completed} clients"
    name = f"{result.source.path.name}{f'[{index}]' if index else ''} {load}"
    requests = _log(result.source, arrival, prompt, output)
    return BenchRun(name, requests, clients, _measured(result, "vllm"), _timed(result, name, clients))


def _timed(result: Value, name: str, clients: int) -> TimedRequests | None:
    """Times of every request's tokens (``--save-detailed``); None if the file lacks them or a request failed."""
    found = [result.find(key) for key in ("start_times", "input_lens", "output_lens", "ttfts", "itls")]
    columns = [each for each in found if each is not None]
    if len(columns) < len(found):
        return None
    start, prompt, output, ttft = (each.numbers() for each in columns[:4])
    gaps = [each.numbers() for each in columns[4].items()]
    if not len(start) == len(prompt) == len(output) == len(ttft) == len(gaps):
        raise result.source.wrong("start_times, input_lens, output_lens, ttfts and itls must be of equal length")
    if len(start) == 0 or prompt.min() < 1 or output.min() < 1 or ttft.min() <= 0:
        return None
    token_s = []
    for begin, first, n, gap in zip(start, ttft, output, gaps, strict=True):
        at = begin + first + np.concatenate([[0.0], np.cumsum(gap)])
        # An engine may send several tokens in one message; tokens are spread over the messages.
        token_s.append(np.interp(np.linspace(0.0, len(at) - 1.0, int(n)), np.arange(len(at)), at))
    ends = np.array([each[-1] for each in token_s])
    return TimedRequests(name, start, start + ttft, ends, prompt, output, clients, token_s)


def _lengths_of(result: Value, completed: int) -> tuple[FloatArray, FloatArray]:
    """Prompt and output tokens of each request; equal for all if the file has only totals (no --save-detailed)."""
    prompt, output = result.find("input_lens"), result.find("output_lens")
    if prompt is not None and output is not None:
        if len(prompt.elements()) != len(output.elements()):
            raise result.source.wrong("input_lens and output_lens must be of equal length")
        return prompt.numbers(), output.numbers()
    each = np.ones(min(completed, MAX_REQUESTS)) / completed
    return each * result.at("total_input_tokens").number(1), each * result.at("total_output_tokens").number(1)


def _guidellm_runs(source: Source, documents: Sequence[Value]) -> list[BenchRun]:
    runs = []
    for i, benchmark in enumerate(documents[0].at("benchmarks").items()):
        requests = _requests(list(benchmark.at("requests").at("successful").items()), benchmark, "guidellm")
        strategy = benchmark.find("config.strategy", "args.strategy")
        kind = None if strategy is None else strategy.find("type_")
        # Strategies with a rate have arrival times, which are replayed.
        streams = None if strategy is None else strategy.find("streams")
        closed = kind is not None and kind.text() in ("synchronous", "concurrent")
        several = closed and kind is not None and kind.text() == "concurrent" and streams is not None
        clients = (int(streams.number(1)) if several and streams is not None else 1) if closed else 0
        name = f"{source.path.name}[{i}] {'run' if kind is None else kind.text()}"
        runs.append(BenchRun(name, requests, clients, _measured(benchmark, "guidellm")))
    return runs


def _aiperf_records(source: Source, documents: Sequence[Value]) -> list[BenchRun]:
    done = [r for r in documents if not _has(r, "error") and _has(r, "metrics")]
    requests = _requests(done, Value(source, "it", None), "aiperf")

    def column(path: str, low: float = 0.0, high: float = 1e20) -> FloatArray:
        return np.array([_at(each, path).number(low, high) for each in done])

    span_s = (column("metadata.request_end_ns").max() - column("metadata.request_start_ns").min()) / 1e9
    ttft, output = column("metrics.time_to_first_token.value"), column("metrics.output_sequence_length.value")
    several = [each for each, n in zip(done, output, strict=True) if n > 1]
    tpot = [_at(each, "metrics.inter_token_latency.value").number() for each in several]
    measured = {
        "ttft_p50_ms": float(np.median(ttft)),
        "ttft_p99_ms": float(np.quantile(ttft, 0.99)),
        "tpot_ms": float(np.median(tpot)) if tpot else 0.0,
        "output_tokens_per_s": float(output.sum() / max(span_s, 1e-9)),
    }
    return [BenchRun(source.path.name, requests, 0, _above_zero(source, measured))]


def _summary_runs(tool: str) -> Callable[[Source, Sequence[Value]], list[BenchRun]]:
    """Reader for summaries: each run becomes a closed loop of clients whose requests have equal lengths."""

    def read(source: Source, documents: Sequence[Value]) -> list[BenchRun]:
        runs = []
        for i, document in enumerate(documents):
            stated: list[float] = []
            for name in ("prompt tokens", "output tokens", "number of requests"):
                number = _number(document, *STATED[tool][name])
                if number is None or number < 1:
                    raise source.wrong(f"states no {name}")
                stated.append(number)
            prompt, output, n = stated
            in_flight = _in_flight(document, tool)
            if in_flight is None:
                raise source.wrong("states neither concurrency nor throughput and latency, so its load is unknown")
            clients, zeros = max(1, round(in_flight)), np.zeros(min(int(n), MAX_REQUESTS))
            name = f"{source.path.name}{f'[{i}]' if tool.startswith('guidellm') else ''} {clients} clients"
            requests = _log(source, zeros, zeros + prompt, zeros + output)
            runs.append(BenchRun(name, requests, min(clients, int(n)), _measured(document, tool)))
        return runs

    return read


def _in_flight(document: Value, tool: str) -> float | None:
    """Requests in flight: the stated concurrency, else throughput times latency (Little's law)."""
    open_loop = document.find("input_config.loadgen.request_rate") if tool.startswith("aiperf") else None
    stated = None if open_loop is not None and open_loop.value else _number(document, *STATED[tool]["clients"])
    if stated is not None or not tool.startswith("aiperf"):
        return stated
    rate, latency_ms = _number(document, "request_throughput.avg"), _number(document, "request_latency.avg")
    return None if rate is None or latency_ms is None else rate * latency_ms / 1000.0


_TOOLS: Final[tuple[tuple[set[str], Callable[[Source, Sequence[Value]], list[BenchRun]]], ...]] = (
    ({"benchmarks"}, _guidellm_runs),
    ({"metadata", "metrics"}, _aiperf_records),
    ({"time_to_first_token"}, _summary_runs("aiperf's summary")),
    ({"Request Latency", "Time to First Token"}, _summary_runs("guidellm's table")),
    ({"completed"}, _vllm_runs),
)
"""Fields that identify a tool's document, and its reader; the first match counts."""


# ---------------------------------------------------------------- CSV as the corresponding JSON document


def _documents_of_csv(source: Source, text: str) -> list[Value]:
    rows = list(csv.reader(text.splitlines()))
    if rows and rows[0][:1] == ["Metric"]:
        return [Value(source, "", _aiperf_document(rows), cell=True)]
    if len(rows) > 3:
        headers = list(zip_longest(*rows[:3], fillvalue=""))
        return [Value(source, "", _guidellm_document(source, headers, cells), cell=True) for cells in rows[3:]]
    return []


def _aiperf_document(rows: list[list[str]]) -> dict[str, dict[str, str]]:
    """Statistics by metric, named as in AIPerf's JSON: ``Time to First Token (ms)`` is ``time_to_first_token``."""
    found: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for row in rows:
        if row and row[0] in ("Metric", "Endpoint"):
            header = row
        elif len(row) >= 2 and header[:1] == ["Metric"]:
            cells = found.setdefault(row[0].split(" (")[0].strip().lower().replace(" ", "_"), {})
            names = ["avg" if name == "Value" else name for name in header[1:]]
            cells.update((name, text) for name, text in zip(names, row[1:], strict=False) if text)
    return found


def _guidellm_document(
    source: Source, headers: list[tuple[str, ...]], cells: list[str]
) -> dict[str, dict[str, dict[str, str]]]:
    """Cells of a row by its three heading lines; in a list of percentiles the last but one is the 99th."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for (group, of, which), text in zip(headers, cells, strict=False):
        if text:
            found.setdefault(group, {}).setdefault(of, {})[which] = text
    ttft = found.get("Time to First Token", {}).get("Successful ms", {})
    if "Percentiles" in ttft:
        listed = Value(source, "Time to First Token", source.json(ttft["Percentiles"]))
        if len(listed.elements()) < 2:
            raise listed.wrong("is not a list of percentiles")
        ttft["p99"] = listed.elements()[-2]
    return found


# ---------------------------------------------------------------- shared


def _requests(requests: Sequence[Value], whole: Value, format: str) -> RequestLog:
    """Log of these requests, with the field names of one of :data:`ops.log.formats.FORMATS`."""
    source, known = whole.source, parse_columns(format_of(format).columns)
    if len(requests) < 2:
        raise source.wrong(f"{whole.name} has fewer than two successful requests")
    arrival, prompt, output = (
        np.array([_at(each, *known.names[q].split("|")).number(0.0, most) for each in requests])
        for q, most in (("arrival", 1e20), ("prompt", MAX_TOKENS), ("output", MAX_TOKENS))
    )
    return _log(source, arrival / UNITS[known.units.get("arrival", "s")], prompt, output)


def _at(value: Value, *paths: str) -> Value:
    found = value.find(*paths)
    if found is None:
        raise value.source.wrong(f"{value.name} has no field {paths[0]!r}".strip(), value.name or paths[0])
    return found


def _has(value: Value, key: str) -> bool:
    found = value.find(key)
    return found is not None and bool(found.value)


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


def _number(document: Value, *paths: str) -> float | None:
    found = document.find(*paths)
    return None if found is None else found.number()


def _measured(document: Value, tool: str) -> dict[str, float]:
    """Metrics that a document states, found by :data:`STATED`."""
    values = {metric: _number(document, *STATED[tool][metric]) for metric in METRICS}
    return _above_zero(document.source, {metric: value for metric, value in values.items() if value is not None})


def _above_zero(source: Source, values: Mapping[str, float]) -> dict[str, float]:
    found = {name: value for name, value in values.items() if value > 0}
    if not found:
        raise source.wrong(f"states no latency or throughput; known are {', '.join(METRICS)}")
    return found
