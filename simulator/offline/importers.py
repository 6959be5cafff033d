"""Importers of request logs in the formats of serving traces and load generators.

========== ====================================================================================================
format     what is read
========== ====================================================================================================
azure      CSV ``TIMESTAMP,ContextTokens,GeneratedTokens`` (Azure LLM inference traces, 2023 and 2024)
mooncake   JSON lines ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (512-token blocks)
burstgpt   CSV ``Timestamp`` (s), ``Request tokens``, ``Response tokens``; failed requests (no response) are left out
guidellm   the JSON report of GuideLLM, ``benchmarks[].requests.successful[]``
aiperf     the per-request ``profile_export.jsonl`` of AIPerf
vllm       the JSON of ``vllm bench serve --save-result --save-detailed`` with ``start_times``
csv        CSV or parquet ``arrival_s``, ``prompt_tokens``, ``output_tokens``, and where known ``class``
           (interactive, batch, best_effort or 0-2) and ``reused_tokens``
========== ====================================================================================================

Files are read line by line, so a log of gigabytes costs no more memory than its numbers. Whatever does not fit the
format is refused with file, line and field; nothing is guessed.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.models import PRIORITY_CLASSES
from simulator.offline.source import Source, Value, value_text
from simulator.prefix import PrefixReuse
from simulator.requests import MAX_REQUESTS, RequestLog
from simulator.tables import FloatArray

FORMATS: Final = ("azure", "mooncake", "burstgpt", "guidellm", "aiperf", "vllm", "csv")
MAX_LINE: Final = 16_000_000
"""Characters of a line, far beyond any request's block ids."""
MAX_SPAN_S: Final = 366 * 86_400
"""Longer logs would be mostly silence: every second is kept, whether or not a request came."""
COARSE_TICK_S: Final = 0.5
"""Arrivals recorded in steps of this or more are spread within their step."""

_COLUMNS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "azure": {
        "arrival": ("TIMESTAMP",),
        "prompt": ("ContextTokens",),
        "output": ("GeneratedTokens",),
    },
    "burstgpt": {
        "arrival": ("Timestamp",),
        "prompt": ("Request tokens",),
        "output": ("Response tokens",),
    },
    "csv": {
        "arrival": ("arrival_s", "timestamp_s"),
        "prompt": ("prompt_tokens", "prompt", "input_tokens"),
        "output": ("output_tokens", "output", "completion_tokens"),
        "class": ("class", "class_index"),
        "reused": ("reused_tokens", "reusable_prefix_tokens"),
    },
}
_OPTIONAL: Final = ("class", "reused")


@dataclass(frozen=True, slots=True)
class Imported:
    """A request log with how it was read: rows left out by reason, and the step (s) that arrivals were spread over."""

    log: RequestLog
    format: str
    skipped: Mapping[str, int]
    tick_s: float

    def describe(self) -> dict[str, Any]:
        """Origin of the log, for the description of a packed trace."""
        return {"format": self.format, "skipped": dict(self.skipped), "tick_s": self.tick_s}


@dataclass(frozen=True, slots=True)
class _Row:
    """One request as a file states it; ``blocks`` are the ids of its prompt's blocks, None where they are not given."""

    arrival_s: float
    prompt: float
    output: float
    class_index: int = 0
    reused: float = 0.0
    blocks: tuple[int, ...] | None = None


def import_log(
    path: str | Path,
    format: str = "auto",
    *,
    limit: int | None = None,
    start_s: float = 0.0,
    end_s: float = math.inf,
    run: int | None = None,
) -> Imported:
    """Read a request log, sorted by arrival, starting at 0.

    ``limit`` keeps the first rows of the file, ``start_s`` and ``end_s`` a window after the first arrival; ``run``
    chooses one benchmark of a report that holds several. Arrivals recorded in coarse steps are spread over their step,
    in the order of the file. Raises :class:`DataFormatError` naming file, line and field.
    """
    source = Source(Path(path), run)
    with source.reading():
        if source.path.stat().st_size == 0:
            raise source.wrong("is empty")
        found = detect_format(source.path) if format == "auto" else format
        if found not in FORMATS:
            raise InvalidConfigError(f"format={format!r} is not known: one of auto, {', '.join(FORMATS)}")
        columns = _collect(source, _READERS[found](source), limit)
    log, tick_s = _ordered(columns)
    log = cut_log(log, start_s, end_s, str(path))
    if log.arrival_s[-1] > MAX_SPAN_S:
        raise DataFormatError(
            f"{path}: lasts {log.arrival_s[-1]:g} s; a log may last {MAX_SPAN_S:,} s: if its times are in seconds, "
            "choose a part of it (--from-s, --to-s)"
        )
    return Imported(log, found, source.skipped, tick_s)


def detect_format(path: Path) -> str:
    """The format of a file, from its first line. Raises :class:`DataFormatError` saying what was found."""
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "csv"
    with path.open(encoding="utf-8-sig") as text:
        first = text.readline(MAX_LINE).strip()
        while not first and (line := text.readline(MAX_LINE)):
            first = line.strip()
    if first.startswith("{"):
        return _detect_json(path, first)
    names = {name.strip() for name in next(csv.reader([first]), [])}
    for name, columns in _COLUMNS.items():
        if all(names & set(spellings) for key, spellings in columns.items() if key not in _OPTIONAL):
            return name
    if names & {"Metric", "Benchmark", "Run Info"}:
        raise DataFormatError(f"{path}: holds summaries, not requests; give the tool's per-request file")
    raise DataFormatError(
        f"{path}: the columns {value_text(first)} are those of no known log; known are "
        "TIMESTAMP,ContextTokens,GeneratedTokens (azure), Timestamp,Request tokens,Response tokens (burstgpt) and "
        "arrival_s,prompt_tokens,output_tokens (csv)"
    )


def _detect_json(path: Path, first: str) -> str:
    source = Source(path)
    try:
        record = source.object(first).value
    except DataFormatError:
        record = {}  # a report over several lines
    if "input_length" in record:
        return "mooncake"
    if "metadata" in record and "metrics" in record and "benchmarks" not in record:
        return "aiperf"
    whole = source.object(source.text()).value
    if "benchmarks" in whole:
        return "guidellm"
    if "start_times" in whole:
        return "vllm"
    raise source.wrong(
        "JSON of no known log; known are Mooncake's lines (input_length), AIPerf's lines (metadata, metrics), "
        "GuideLLM's report (benchmarks) and vLLM's detailed result (start_times, from --save-detailed)"
    )


# ---------------------------------------------------------------- readers: one per format, each yields rows


def _read_csv(format: str) -> Callable[[Source], Iterator[_Row]]:
    def read(source: Source) -> Iterator[_Row]:
        if source.path.suffix == ".parquet":
            yield from _read_parquet(source)
            return
        with source.path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(_lines(source, file))
            index = _column_indices(source, next(reader, []), _COLUMNS[format])
            for cells in reader:
                if not any(cells):
                    continue
                if len(cells) <= max(i for i, _ in index.values()):
                    raise source.wrong(f"has {len(cells)} cells, too few for the column {max(index.values())[1]!r}")
                row = _csv_row(format, {key: Value(source, name, cells[i], True) for key, (i, name) in index.items()})
                if format == "burstgpt" and row.output < 1:  # this is how the trace marks a failure
                    source.skipped["failed"] += 1
                    continue
                yield row

    return read


def _column_indices(
    source: Source, header: list[str], columns: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[int, str]]:
    names = [name.strip() for name in header]
    index = {}
    for key, spellings in columns.items():
        name = next((s for s in spellings if s in names), None)
        if name is not None:
            index[key] = (names.index(name), name)
        elif key not in _OPTIONAL:
            also = f" (also read: {', '.join(spellings[1:])})" if spellings[1:] else ""
            raise source.wrong(f"no column {spellings[0]!r}{also}; there are {', '.join(names) or 'none'}")
    return index


def _csv_row(format: str, cells: Mapping[str, Value]) -> _Row:
    return _Row(
        arrival_s=_instant(cells["arrival"]) if format == "azure" else cells["arrival"].number(),
        prompt=cells["prompt"].tokens(),
        output=cells["output"].tokens(),
        class_index=_class_index(cells["class"]) if "class" in cells else 0,
        reused=cells["reused"].tokens() if "reused" in cells else 0.0,
    )


def _instant(cell: Value) -> float:
    try:
        moment = datetime.fromisoformat(cell.text())
    except ValueError:
        raise cell.wrong("is not a time like 2023-11-16 18:15:46.6805900") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _class_index(cell: Value) -> int:
    text = cell.text()
    if text in PRIORITY_CLASSES:
        return PRIORITY_CLASSES.index(text)
    if text in {"0", "1", "2"}:
        return int(text)
    raise cell.wrong(f"is not allowed: it must be one of {', '.join(PRIORITY_CLASSES)}, 0, 1, 2")


def _read_parquet(source: Source) -> Iterator[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(source.path)
    except (OSError, pa.ArrowException) as error:
        raise source.wrong(f"is not parquet ({error})") from error
    index = _column_indices(source, table.column_names, _COLUMNS["csv"])
    kept = {}
    for key, (i, name) in index.items():
        try:
            kept[key] = (name, table.column(i).cast(pa.string()).to_pylist())
        except pa.ArrowException as error:
            raise source.wrong(f"the column {name!r} holds neither numbers nor text ({error})", name) from error
    for i in range(table.num_rows):
        source.line = i + 1
        yield _csv_row("csv", {key: Value(source, name, texts[i], True) for key, (name, texts) in kept.items()})


def _read_mooncake(source: Source) -> Iterator[_Row]:
    for record in _records(source):
        blocks = record.find("hash_ids")
        yield _Row(
            arrival_s=record.at("timestamp").number(0, 1e15) / 1000.0,
            prompt=record.at("input_length").tokens(),
            output=record.at("output_length").tokens(),
            blocks=None if blocks is None else blocks.integers(),
        )


def _read_aiperf(source: Source) -> Iterator[_Row]:
    for record in _records(source):
        metrics = aiperf_metrics(record)
        if metrics is None:
            source.skipped["failed"] += 1
            continue
        yield _Row(
            arrival_s=record.at("metadata").at("request_start_ns").number(0, 1e20) / 1e9,
            prompt=metrics.at("input_sequence_length").at("value").tokens(),
            output=metrics.at("output_sequence_length").at("value").tokens(),
        )


def aiperf_metrics(record: Value) -> Value | None:
    """A request as AIPerf measured it; None if the request failed."""
    error, metrics = record.find("error"), record.find("metrics")
    if metrics is None or metrics.value == {} or (error is not None and error.value):
        return None
    return metrics


def _read_guidellm(source: Source) -> Iterator[_Row]:
    benchmarks = list(source.object(source.text()).at("benchmarks").items())
    if not benchmarks:
        raise source.wrong("holds no benchmarks")
    if source.run is None and len(benchmarks) > 1:
        raise source.wrong(f"holds {len(benchmarks)} benchmarks; choose one with --run 0 to {len(benchmarks) - 1}")
    chosen = source.run or 0
    if not 0 <= chosen < len(benchmarks):
        raise source.wrong(f"there is no benchmark {chosen}; choose 0 to {len(benchmarks) - 1}")
    for request in benchmarks[chosen].at("requests").at("successful").items():
        yield _Row(
            arrival_s=guidellm_start(request),
            prompt=request.at("prompt_tokens").tokens(),
            output=request.at("output_tokens").tokens(),
        )


_GUIDELLM_STARTS: Final = (
    ("request_start_time",),
    ("start_time",),
    ("info", "timings", "request_start"),
    ("scheduler_info", "timings", "request_start"),
    ("scheduler_info", "request_timings", "request_start"),
)


def guidellm_start(request: Value) -> float:
    """Time at which GuideLLM sent a request (s); the field has moved between its versions."""
    for keys in _GUIDELLM_STARTS:
        found = request.find(*keys)
        if found is not None:
            return found.number()
    raise request.source.wrong(f"{request.name} says nowhere when it began (request_start_time)", request.name)


def _read_vllm(source: Source) -> Iterator[_Row]:
    report = source.object(source.text())
    columns = [report.at(name) for name in ("start_times", "input_lens", "output_lens")]
    errors = report.find("errors")
    # Without a list of errors, or with an empty one, no request failed.
    listed = errors.elements() if errors is not None else []
    failed = listed or [""] * len(columns[0].elements())
    if len({len(failed), *(len(column.elements()) for column in columns)}) != 1:
        raise source.wrong("start_times, input_lens, output_lens and errors must be lists of one length")
    for error, start, prompt, output in zip(failed, *(column.items() for column in columns), strict=True):
        if error:
            source.skipped["failed"] += 1
            continue
        yield _Row(arrival_s=start.number(), prompt=prompt.tokens(), output=output.tokens())


_READERS: Final[dict[str, Callable[[Source], Iterator[_Row]]]] = {
    "azure": _read_csv("azure"),
    "burstgpt": _read_csv("burstgpt"),
    "csv": _read_csv("csv"),
    "mooncake": _read_mooncake,
    "aiperf": _read_aiperf,
    "guidellm": _read_guidellm,
    "vllm": _read_vllm,
}


# ---------------------------------------------------------------- from rows to a log


@dataclass(slots=True)
class _Columns:
    """Growing columns of numbers."""

    arrival: array[float] = field(default_factory=lambda: array("d"))
    prompt: array[float] = field(default_factory=lambda: array("d"))
    output: array[float] = field(default_factory=lambda: array("d"))
    reused: array[float] = field(default_factory=lambda: array("d"))
    class_index: array[int] = field(default_factory=lambda: array("b"))
    blocks: list[tuple[int, ...]] = field(default_factory=list)


def _collect(source: Source, rows: Iterator[_Row], limit: int | None) -> _Columns:
    kept = _Columns()
    for row in rows:
        if row.prompt < 1:
            source.skipped["no prompt"] += 1
            continue
        if limit is not None and len(kept.arrival) >= limit:
            break
        if len(kept.arrival) >= MAX_REQUESTS:
            raise source.wrong(f"is request {MAX_REQUESTS + 1:,}, one more than a log may hold; cut it with --limit")
        kept.arrival.append(row.arrival_s)
        kept.prompt.append(row.prompt)
        kept.output.append(max(1.0, row.output))
        kept.reused.append(min(row.reused, row.prompt))
        kept.class_index.append(row.class_index)
        if (row.blocks is None) != (not kept.blocks) and len(kept.arrival) > 1:
            raise source.wrong("hash_ids are in some lines only: all requests must have them, or none", "hash_ids")
        if row.blocks is not None:
            kept.blocks.append(row.blocks)
    if not kept.arrival:
        source.line = 0
        left_out = "".join(f", {n} left out ({reason})" for reason, n in source.skipped.items())
        raise source.wrong(f"holds no requests{left_out}")
    return kept


def _ordered(columns: _Columns) -> tuple[RequestLog, float]:
    """Sorted by arrival from 0 on, coarse arrivals spread, repeated prefixes found."""
    arrival = np.frombuffer(columns.arrival)
    order = np.argsort(arrival, kind="stable")
    arrival = arrival[order] - arrival[order[0]]
    tick_s = coarse_tick_s(arrival)
    if tick_s > 0.0:
        arrival = spread_ticks(arrival, tick_s)
    prompt = np.frombuffer(columns.prompt)[order]
    output = np.frombuffer(columns.output)[order]
    log = RequestLog(
        arrival_s=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        class_index=np.frombuffer(columns.class_index, dtype=np.int8)[order].astype(np.int64),
        reused_tokens=np.frombuffer(columns.reused)[order],
    )
    if columns.blocks:
        log = with_blocks(log, [columns.blocks[i] for i in order])
    return log, tick_s


def with_blocks(log: RequestLog, blocks: list[tuple[int, ...]]) -> RequestLog:
    """The log with what its prompts repeat, from the block ids of each prompt in order of arrival."""
    reuse = PrefixReuse()
    lengths = zip(blocks, log.prompt_tokens.astype(int).tolist(), log.output_tokens.astype(int).tolist(), strict=True)
    reused = np.array([reuse.add(ids, prompt, output) for ids, prompt, output in lengths], dtype=np.float64)
    return replace(log, reused_tokens=reused, reuse_hit=reuse.hit_curve())


def coarse_tick_s(arrival_s: FloatArray) -> float:
    """The step (s) of arrivals that were recorded in steps of half a second or more; 0 if they are finer."""
    distinct = np.unique(arrival_s)
    if len(distinct) < 3 or 2 * len(distinct) > len(arrival_s):
        return 0.0
    tick = float(np.median(np.diff(distinct)))
    return tick if tick >= COARSE_TICK_S else 0.0


def spread_ticks(arrival_s: FloatArray, tick_s: float) -> FloatArray:
    """Arrivals spread evenly at random over the step in which each was recorded; their order stays.

    The random numbers come from a fixed seed: the same file always gives the same log.
    """
    within = np.random.default_rng([0, 0]).random(len(arrival_s))
    # Sorting by tick and then by draw keeps the ticks in place and orders the draws within each.
    _, tick = np.unique(arrival_s, return_inverse=True)
    moved: FloatArray = arrival_s + tick_s * within[np.lexsort((within, tick))]
    return np.maximum.accumulate(moved)


def cut_log(
    log: RequestLog, start_s: float, end_s: float, name: str = "the log", limit: int | None = None
) -> RequestLog:
    """The requests of a window (s after the first arrival), at most ``limit`` of them; times start with the window."""
    inside = (log.arrival_s >= start_s) & (log.arrival_s < end_s)
    if limit is not None:
        inside &= np.cumsum(inside) <= limit
    if inside.all() and start_s == 0.0:
        return log
    if not inside.any():
        raise DataFormatError(
            f"{name}: no request between {start_s:g} and {end_s:g} s; the last is at {log.arrival_s[-1]:g} s"
        )
    return RequestLog(
        arrival_s=log.arrival_s[inside] - start_s,
        prompt_tokens=log.prompt_tokens[inside],
        output_tokens=log.output_tokens[inside],
        class_index=log.class_index[inside],
        reused_tokens=log.reused_tokens[inside],
        reuse_hit=log.reuse_hit,
    )


# ---------------------------------------------------------------- text


def _lines(source: Source, file: TextIO) -> Iterator[str]:
    while line := file.readline(MAX_LINE):
        source.line += 1
        if len(line) >= MAX_LINE:
            raise source.wrong(f"is longer than {MAX_LINE:,} characters: this is not a request log")
        if "\0" in line:
            raise source.wrong(
                "holds a zero byte: this is not UTF-8 text; convert it, for example with `iconv -t UTF-8`"
            )
        yield line


def _records(source: Source) -> Iterator[Value]:
    with source.path.open(encoding="utf-8-sig") as file:
        for line in _lines(source, file):
            if line.strip():
                yield source.object(line)
