"""Reads request logs in the formats that serving traces and load generators use.

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
format is refused with file, line and column; nothing is guessed.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.models import PRIORITY_CLASSES
from simulator.prefix import PrefixReuse
from simulator.requests import MAX_REQUESTS, RequestLog
from simulator.tables import FloatArray

FORMATS: Final = ("azure", "mooncake", "burstgpt", "guidellm", "aiperf", "vllm", "csv")
MAX_LINE: Final = 16_000_000
"""Characters of a line, far beyond any request's block ids."""
MAX_DOCUMENT_BYTES: Final = 1_000_000_000
"""Size of a JSON report, which must be parsed whole."""
MAX_TOKENS: Final = 10_000_000
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
        """What a packed trace says of its origin."""
        return {"format": self.format, "skipped": dict(self.skipped), "tick_s": self.tick_s}


@dataclass(frozen=True, slots=True)
class _Row:
    """One request as a file states it; ``blocks`` are the ids of its prompt's blocks."""

    arrival_s: float
    prompt: float
    output: float
    class_index: int = 0
    reused: float = 0.0
    blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Source:
    """A file being read: where we are in it, and what was left out."""

    path: Path
    run: int | None = None
    line: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def wrong(self, what: str) -> DataFormatError:
        place = f"{self.path}, line {self.line}" if self.line else str(self.path)
        return DataFormatError(f"{place}: {what}")

    def number(self, name: str, value: object, low: float, high: float) -> float:
        """A number of the file, or an error that names line and column."""
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise self.wrong(f"{name}={_shown(value)} is not a number") from None
        if not low <= number <= high:
            raise self.wrong(f"{name}={_shown(value)} is not allowed: it must be from {low:g} to {high:g}")
        return number

    def tokens(self, name: str, value: object) -> float:
        return self.number(name, value, 0, MAX_TOKENS)


def import_log(
    path: str | Path,
    format: str = "auto",
    *,
    limit: int | None = None,
    start_s: float = 0.0,
    end_s: float = math.inf,
    run: int | None = None,
    seed: int = 0,
) -> Imported:
    """Read a request log, sorted by arrival, starting at 0.

    ``limit`` keeps the first rows of the file, ``start_s`` and ``end_s`` a window after the first arrival; ``run``
    chooses one benchmark of a report that holds several. Arrivals recorded in coarse steps are spread over their step,
    in the order of the file, by ``seed``. Raises :class:`DataFormatError` naming file, line and column.
    """
    source = _Source(Path(path), run)
    try:
        if source.path.stat().st_size == 0:
            raise source.wrong("is empty")
        found = detect_format(source.path) if format == "auto" else format
        if found not in FORMATS:
            raise InvalidConfigError(f"format={format!r} is not known: one of auto, {', '.join(FORMATS)}")
        columns = _collect(source, _READERS[found](source), limit)
    except OSError as error:
        raise DataFormatError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{path}: is not UTF-8 text (byte 0x{error.object[error.start]:02x} near line {source.line + 1}); "
            "convert it, for example with `iconv -t UTF-8`"
        ) from error
    except csv.Error as error:
        raise source.wrong(f"is not CSV ({error})") from error
    log, tick_s = _ordered(source, columns, seed)
    return Imported(cut_log(log, start_s, end_s, str(path)), found, source.skipped, tick_s)


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
        f"{path}: the columns {_shown(first)} are those of no known log; known are "
        "TIMESTAMP,ContextTokens,GeneratedTokens (azure), Timestamp,Request tokens,Response tokens (burstgpt) and "
        "arrival_s,prompt_tokens,output_tokens (csv)"
    )


def _detect_json(path: Path, first: str) -> str:
    try:
        record = json.loads(first)
    except ValueError:
        record = {}
    if "input_length" in record:
        return "mooncake"
    if "metadata" in record and "metrics" in record and "benchmarks" not in record:
        return "aiperf"
    whole = _document(_Source(path))
    if "benchmarks" in whole:
        return "guidellm"
    if "start_times" in whole:
        return "vllm"
    raise DataFormatError(
        f"{path}: JSON of no known log; known are Mooncake's lines (input_length), AIPerf's lines (metadata, metrics), "
        "GuideLLM's report (benchmarks) and vLLM's detailed result (start_times, from --save-detailed)"
    )


# ---------------------------------------------------------------- readers: one per format, each yields rows


def _read_csv(format: str) -> Callable[[_Source], Iterator[_Row]]:
    def read(source: _Source) -> Iterator[_Row]:
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
                row = _csv_row(source, format, {key: (name, cells[i]) for key, (i, name) in index.items()})
                if format == "burstgpt" and row.output < 1:  # this is how the trace marks a failure
                    source.skipped["failed"] += 1
                    continue
                yield row

    return read


def _column_indices(
    source: _Source, header: list[str], columns: Mapping[str, tuple[str, ...]]
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


def _csv_row(source: _Source, format: str, cells: Mapping[str, tuple[str, str]]) -> _Row:
    name, text = cells["arrival"]
    return _Row(
        arrival_s=_instant(source, name, text) if format == "azure" else source.number(name, text, 0, 1e12),
        prompt=source.tokens(*cells["prompt"]),
        output=source.tokens(*cells["output"]),
        class_index=_class_index(source, *cells["class"]) if "class" in cells else 0,
        reused=source.tokens(*cells["reused"]) if "reused" in cells else 0.0,
    )


def _instant(source: _Source, name: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise source.wrong(f"{name}={_shown(text)} is not a time like 2023-11-16 18:15:46.6805900") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _class_index(source: _Source, name: str, text: str) -> int:
    if text.strip() in PRIORITY_CLASSES:
        return PRIORITY_CLASSES.index(text.strip())
    if text.strip() in {"0", "1", "2"}:
        return int(text)
    raise source.wrong(f"{name}={_shown(text)} is not allowed: one of {', '.join(PRIORITY_CLASSES)}, 0, 1, 2")


def _read_parquet(source: _Source) -> Iterator[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(source.path)
    except (OSError, pa.ArrowException) as error:
        raise source.wrong(f"is not parquet ({error})") from error
    index = _column_indices(source, table.column_names, _COLUMNS["csv"])
    kept = {key: (name, table.column(name).to_pylist()) for key, (_, name) in index.items()}
    for i in range(table.num_rows):
        source.line = i + 1
        yield _csv_row(source, "csv", {key: (name, str(values[i])) for key, (name, values) in kept.items()})


def _read_mooncake(source: _Source) -> Iterator[_Row]:
    for record in _records(source):
        blocks = _of(source, record, "hash_ids") if "hash_ids" in record else []
        if not isinstance(blocks, list) or not all(isinstance(b, int) for b in blocks):
            raise source.wrong("hash_ids must be a list of integers")
        yield _Row(
            arrival_s=source.number("timestamp", _of(source, record, "timestamp"), 0, 1e15) / 1000.0,
            prompt=source.tokens("input_length", _of(source, record, "input_length")),
            output=source.tokens("output_length", _of(source, record, "output_length")),
            blocks=tuple(blocks),
        )


def _read_aiperf(source: _Source) -> Iterator[_Row]:
    for record in _records(source):
        metrics = record.get("metrics")
        if record.get("error") or not metrics:
            source.skipped["failed"] += 1
            continue
        start = _of(source, _of(source, record, "metadata"), "request_start_ns")
        yield _Row(
            arrival_s=source.number("metadata.request_start_ns", start, 0, 1e20) / 1e9,
            prompt=source.tokens("input_sequence_length", _metric(source, metrics, "input_sequence_length")),
            output=source.tokens("output_sequence_length", _metric(source, metrics, "output_sequence_length")),
        )


def _metric(source: _Source, metrics: Any, name: str) -> object:
    return _of(source, _of(source, metrics, name), "value")


def _read_guidellm(source: _Source) -> Iterator[_Row]:
    for i, request in enumerate(guidellm_requests(source.path, _document(source), source.run)):
        source.line = 0
        place = f"requests.successful[{i}]"
        yield _Row(
            arrival_s=source.number(f"{place}.start", guidellm_start(request), 0, 1e12),
            prompt=source.tokens(f"{place}.prompt_tokens", _of(source, request, "prompt_tokens")),
            output=source.tokens(f"{place}.output_tokens", _of(source, request, "output_tokens")),
        )


def guidellm_requests(path: Path, report: Any, run: int | None) -> list[Any]:
    """The successful requests of one benchmark of a GuideLLM report."""
    benchmarks = report.get("benchmarks") if isinstance(report, dict) else None
    if not isinstance(benchmarks, list) or not benchmarks:
        raise DataFormatError(f"{path}: no benchmarks; it must be GuideLLM's JSON report")
    if run is None and len(benchmarks) > 1:
        raise DataFormatError(
            f"{path}: holds {len(benchmarks)} benchmarks; choose one with --run 0 to {len(benchmarks) - 1}"
        )
    chosen = run or 0
    if not 0 <= chosen < len(benchmarks):
        raise DataFormatError(f"{path}: there is no benchmark {chosen}; choose 0 to {len(benchmarks) - 1}")
    requests = benchmarks[chosen].get("requests")
    successful = requests.get("successful") if isinstance(requests, dict) else None
    if not isinstance(successful, list):
        raise DataFormatError(f"{path}: benchmarks[{chosen}] holds no requests.successful")
    return successful


def guidellm_start(request: Any) -> object:
    """When GuideLLM sent a request (s); the field has moved between its versions."""
    if not isinstance(request, dict):
        return None
    timings = (request.get("info") or request.get("scheduler_info") or {}).get("timings") or {}
    older = (request.get("scheduler_info") or {}).get("request_timings") or {}
    candidates = (
        request.get("request_start_time"),
        request.get("start_time"),
        timings.get("request_start"),
        older.get("request_start"),
    )
    return next((c for c in candidates if c is not None), None)


def _read_vllm(source: _Source) -> Iterator[_Row]:
    report = _document(source)
    columns = [_of(source, report, name) for name in ("start_times", "input_lens", "output_lens")]
    if len({len(c) if isinstance(c, list) else -1 for c in columns}) != 1:
        raise source.wrong("start_times, input_lens and output_lens must be lists of one length")
    errors = report.get("errors") or [""] * len(columns[0])
    for i, (start, prompt, output) in enumerate(zip(*columns, strict=True)):
        if i < len(errors) and errors[i]:
            source.skipped["failed"] += 1
            continue
        yield _Row(
            arrival_s=source.number(f"start_times[{i}]", start, 0, 1e12),
            prompt=source.tokens(f"input_lens[{i}]", prompt),
            output=source.tokens(f"output_lens[{i}]", output),
        )


_READERS: Final[dict[str, Callable[[_Source], Iterator[_Row]]]] = {
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


def _collect(source: _Source, rows: Iterator[_Row], limit: int | None) -> _Columns:
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
        if row.blocks or kept.blocks:
            kept.blocks.append(row.blocks)
    if not kept.arrival:
        source.line = 0
        left_out = "".join(f", {n} left out ({reason})" for reason, n in source.skipped.items())
        raise source.wrong(f"holds no requests{left_out}")
    return kept


def _ordered(source: _Source, columns: _Columns, seed: int) -> tuple[RequestLog, float]:
    """Sorted by arrival from 0 on, coarse arrivals spread, repeated prefixes found."""
    arrival = np.frombuffer(columns.arrival)
    order = np.argsort(arrival, kind="stable")
    arrival = arrival[order] - arrival[order[0]]
    tick_s = coarse_tick_s(arrival)
    if tick_s > 0.0:
        arrival = spread_ticks(arrival, tick_s, seed)
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
        blocks = [columns.blocks[i] for i in order]
        if len(columns.blocks) != len(order):
            raise source.wrong("hash_ids are missing in some lines; all requests must have them, or none")
        log = with_blocks(log, blocks)
    return log, tick_s


def with_blocks(log: RequestLog, blocks: list[tuple[int, ...]], block_tokens: int = 512) -> RequestLog:
    """The log with what its prompts repeat, from the block ids of each prompt in order of arrival."""
    reuse = PrefixReuse(block_tokens)
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


def spread_ticks(arrival_s: FloatArray, tick_s: float, seed: int) -> FloatArray:
    """Arrivals spread evenly at random over the step in which each was recorded; their order stays."""
    within = np.random.default_rng([seed, 0]).random(len(arrival_s))
    # Sorting by tick and then by draw keeps the ticks in place and orders the draws within each.
    _, tick = np.unique(arrival_s, return_inverse=True)
    spread: FloatArray = arrival_s + tick_s * within[np.lexsort((within, tick))]
    return np.maximum.accumulate(spread)


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


def _lines(source: _Source, file: TextIO) -> Iterator[str]:
    while line := file.readline(MAX_LINE):
        source.line += 1
        if len(line) >= MAX_LINE:
            raise source.wrong(f"is longer than {MAX_LINE:,} characters: this is no request log")
        if "\0" in line:
            raise source.wrong(
                "holds a zero byte: this is no UTF-8 text; convert it, for example with `iconv -t UTF-8`"
            )
        yield line


def _records(source: _Source) -> Iterator[dict[str, Any]]:
    with source.path.open(encoding="utf-8-sig") as file:
        for line in _lines(source, file):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise source.wrong(f"is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise source.wrong("is not a JSON object")
            yield record


def _document(source: _Source) -> dict[str, Any]:
    size = source.path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        raise source.wrong(f"has {size:,} bytes; a report may have {MAX_DOCUMENT_BYTES:,}")
    try:
        document = json.loads(source.path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise source.wrong(f"is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise source.wrong("is not a JSON object")
    return document


def _of(source: _Source, record: Any, key: str) -> Any:
    if not isinstance(record, dict) or key not in record:
        raise source.wrong(f"no field {key!r}")
    return record[key]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
