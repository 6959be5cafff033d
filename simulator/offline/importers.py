"""Importers of request logs: tables with columns of usual names, and the files of serving traces and load generators.

=============== ===============================================================================================
format          what is read
=============== ===============================================================================================
table           CSV (``,``, ``;``, tab or ``|``), JSON lines, a JSON list of records, or parquet, with a time, prompt
                and output tokens under any of their usual names (``simulator.offline.columns``): logs of gateways
                (LiteLLM, OpenAI-compatible proxies, OpenTelemetry spans), databases and home-made ones
azure           CSV ``TIMESTAMP,ContextTokens,GeneratedTokens`` (Azure LLM inference traces, 2023 and 2024)
burstgpt        CSV ``Timestamp`` (s), ``Request tokens``, ``Response tokens``; no response tokens: the request failed
mooncake        JSON lines ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (512-token blocks)
kv-cache-tester JSON of recorded conversations, in one file or a folder of them: ``requests[]`` with ``t`` (s), ``in``,
                ``out``, ``hash_ids`` (blocks of ``block_size`` tokens); sub-agents' requests are within
aiperf          the per-request ``profile_export.jsonl`` of AIPerf
guidellm        the JSON report of GuideLLM, ``benchmarks[].requests.successful[]``
vllm            the JSON of ``vllm bench serve --save-result --save-detailed`` with ``start_times``
=============== ===============================================================================================

Any of them may be compressed (``.gz``). Tables and JSON lines are read in pieces, so a log of gigabytes costs no more
memory than its numbers. Whatever does not fit is refused with file, line and field; nothing is guessed.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import pandas as pd

from inferencegym.errors import DataFormatError, InvalidConfigError
from simulator.offline.columns import Clock, Columns, classes, failed, find_columns, parse_columns, plain, tokens
from simulator.offline.source import Source, Value
from simulator.prefix import BLOCK_TOKENS, PrefixReuse
from simulator.requests import MAX_REQUESTS, RequestLog
from simulator.tables import FloatArray

FORMATS: Final = ("table", "azure", "burstgpt", "mooncake", "kv-cache-tester", "aiperf", "guidellm", "vllm")
MAX_LINE: Final = 16_000_000
"""Characters of a line of JSON, far beyond any request's block ids."""
MAX_SPAN_S: Final = 366 * 86_400
"""Longer logs would be mostly silence: every second is kept, whether or not a request came."""
COARSE_TICK_S: Final = 0.5
"""Arrivals recorded in steps of this or more are spread within their step."""
ROWS_AT_ONCE: Final = 50_000
_RECORDS_SEEN: Final = 100
"""Records whose fields count when columns are looked for: not every record has them all."""
_LISTS: Final = ("data", "logs", "results", "records", "rows", "items", "requests")
"""Fields in which an answer of a gateway's API keeps its list of records."""

_KNOWN: Final[dict[str, Columns]] = {
    "azure": Columns({"arrival": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"}),
    "burstgpt": Columns({"arrival": "Timestamp", "prompt": "Request tokens", "output": "Response tokens"}, "s"),
    "mooncake": Columns({"arrival": "timestamp", "prompt": "input_length", "output": "output_length"}, "ms"),
    "aiperf": Columns(
        {
            "arrival": "metadata.request_start_ns",
            "prompt": "metrics.input_sequence_length.value",
            "output": "metrics.output_sequence_length.value",
        },
        "ns",
    ),
}
"""Formats that are tables of their own names and unit."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A request log with how it was read.

    ``columns`` says where each quantity came from, ``skipped`` which rows were left out by reason, ``tick_s`` the step
    (s) that arrivals were spread over.
    """

    log: RequestLog
    format: str
    columns: Mapping[str, str]
    skipped: Mapping[str, int]
    tick_s: float

    def describe(self) -> dict[str, Any]:
        """Origin of the log, for the description of a packed trace."""
        columns, skipped = dict(self.columns), dict(self.skipped)
        return {"format": self.format, "columns": columns, "skipped": skipped, "tick_s": self.tick_s}


def import_log(
    path: str | Path,
    format: str = "auto",
    *,
    columns: str | None = None,
    limit: int | None = None,
    start_s: float = 0.0,
    end_s: float = math.inf,
    run: int | None = None,
) -> Imported:
    """Read a request log, sorted by arrival, starting at 0.

    ``columns`` names columns of a table (:func:`simulator.offline.columns.parse_columns`); what it leaves out is found
    by usual names. ``limit`` keeps the first rows of the file, ``start_s`` and ``end_s`` a window after the first
    arrival; ``run`` chooses one benchmark of a report that holds several. Arrivals recorded in coarse steps are spread
    over their step, in the order of the file. Raises :class:`DataFormatError` naming file, line and field.
    """
    source = Source(Path(path), run)
    if format not in ("auto", *FORMATS):
        raise InvalidConfigError(f"format={format!r} is not known: one of auto, {', '.join(FORMATS)}")
    given = parse_columns(columns) if columns is not None else None
    with source.reading(), _decoding(source):
        if source.path.is_file() and source.path.stat().st_size == 0:
            raise source.wrong("is empty")
        read = _open_log(source, format, given)
        kept = _collect(source, read, limit)
    log, tick_s = _ordered(kept, read.block_tokens)
    log = cut_log(log, start_s, end_s, str(path))
    if log.arrival_s[-1] > MAX_SPAN_S:
        raise DataFormatError(
            f"{path}: lasts {log.arrival_s[-1]:g} s; a log may last {MAX_SPAN_S:,} s: if its times are no seconds, say "
            "so (--columns arrival=COLUMN:ms), else choose a part of it (--from-s, --to-s)"
        )
    return Imported(log, read.format, read.columns.describe(read.clock), source.skipped, tick_s)


# ---------------------------------------------------------------- readers: frames of raw cells


@dataclass(slots=True)
class _Reading:
    """A file as frames of raw cells under its own column names, indexed by line."""

    format: str
    columns: Columns
    frames: Iterator[pd.DataFrame]
    block_tokens: int = BLOCK_TOKENS
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.columns.unit, self.columns.names["arrival"])


def _open_log(source: Source, format: str, given: Columns | None) -> _Reading:
    if source.path.is_dir():
        if format not in ("auto", "kv-cache-tester"):
            raise source.wrong(f"is a folder; {format} is read from a file")
        return _conversations(source)
    with source.path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return _parquet(source, given)
    with _text(source.path) as text:
        first = next((line for line in _lines(source, text) if line.strip()), "").strip()
    source.line = 0
    if first[:1] in ("{", "["):
        return _json(source, first, format, given)
    return _csv(source, format, given)


@contextmanager
def _decoding(source: Source) -> Iterator[None]:
    """Turn errors of CSV and of compressed data into :class:`DataFormatError`."""
    try:
        yield
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        line = re.search(r"(?:line|row) (\d+)", str(error))
        source.line = int(line[1]) if line else 0
        raise source.wrong(f"is not CSV ({str(error).strip()})") from error
    except (EOFError, zlib.error) as error:
        raise source.wrong("is compressed, and damaged or cut short") from error


def _text(path: Path) -> TextIO:
    """The text of a file, decompressed where it is compressed."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _columns_of(source: Source, format: str, there: list[str], given: Columns | None) -> tuple[str, Columns]:
    """Format and columns of a table: one of the known ones where its names are there, else by usual names."""
    if given is None:
        for name, known in _KNOWN.items():
            if format == name or (format == "auto" and set(known.names.values()) <= set(there)):
                blocks = {"blocks": "hash_ids"} if name == "mooncake" and "hash_ids" in there else {}
                return name, find_columns(source, there, Columns({**known.names, **blocks}, known.unit))
    if format not in ("auto", "table"):
        raise source.wrong(f"is a table, which {format} is not; leave --format out")
    return "table", find_columns(source, there, given)


def _csv(source: Source, format: str, given: Columns | None) -> _Reading:
    with _text(source.path) as text:
        lines = enumerate(_lines(source, text))
        before, header = next(((i, line) for i, line in lines if line.strip()), (0, ""))
    source.line = 0
    delimiter = max(",;\t|", key=header.count)
    options: dict[str, Any] = {
        "sep": delimiter,
        "skiprows": before,
        "dtype": str,
        "keep_default_na": False,
        "na_values": [""],
        "skip_blank_lines": False,
        "index_col": False,
        "skipinitialspace": True,
    }
    with _text(source.path) as text:
        there = [str(c).strip() for c in pd.read_csv(text, nrows=0, **options).columns]
    if set(there) & {"Metric", "Benchmark", "Run Info"} and not {plain(c) for c in there} & {"timestamp"}:
        raise source.wrong("holds summaries, not requests; give the tool's per-request file")
    found, columns = _columns_of(source, format, there, given)
    wanted = set(columns.names.values())

    def frames() -> Iterator[pd.DataFrame]:
        options["usecols"] = lambda name: str(name).strip() in wanted
        with _text(source.path) as text, pd.read_csv(text, chunksize=ROWS_AT_ONCE, **options) as pieces:
            for frame in pieces:
                frame.columns = [str(c).strip() for c in frame.columns]
                # Lines of the file where no quoted cell spans several: the header, and blank lines before it.
                frame.index = frame.index + before + 2
                yield frame.dropna(how="all")

    return _Reading(found, columns, frames())


def _parquet(source: Source, given: Columns | None) -> _Reading:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        there = pq.read_schema(source.path).names
        columns = find_columns(source, there, given)
        frame = pd.read_parquet(source.path, columns=sorted(set(columns.names.values())))
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, DataFormatError):
            raise
        raise source.wrong(f"is not parquet ({error})") from error
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    return _Reading("table", columns, iter([frame]))


def _json(source: Source, first: str, format: str, given: Columns | None) -> _Reading:
    """JSON: records one a line, a list of them, or the report of a tool."""
    record = _first_object(source, first)
    if record is None:
        whole = source.json(_whole(source).strip())
        if isinstance(whole, list):
            return _records(source, format, given, lambda: _elements(whole))
        record = whole if isinstance(whole, dict) else {}
        if not {*_LISTS, *_REPORTS.values()} & set(record):
            raise source.wrong(_NO_KNOWN_JSON)
    kind = next((f for f, key in _REPORTS.items() if format == f or (format == "auto" and key in record)), None)
    if kind == "kv-cache-tester" and (format == kind or {"block_size", "hash_id_scope"} & set(record)):
        return _conversations(source)
    if kind in ("guidellm", "vllm"):
        return {"guidellm": _guidellm, "vllm": _vllm}[kind](source)
    inner = next((key for key in _LISTS if isinstance(record.get(key), list)), None)
    if inner is not None:
        listed = source.object(_whole(source)).at(inner).elements()
        return _records(source, format, given, lambda: _elements(listed))
    return _records(source, format, given, lambda: _json_lines(source))


_REPORTS: Final = {"kv-cache-tester": "requests", "guidellm": "benchmarks", "vllm": "start_times"}
"""Documents of tools, and the field that tells each."""


_NO_KNOWN_JSON: Final = (
    "JSON of no known log; known are records one a line or in a list (data, logs, results, ...), AIPerf's records, "
    "Mooncake's traces, GuideLLM's report (benchmarks), vLLM's detailed result (start_times, from --save-detailed) and "
    "kv-cache-tester's conversations (requests, block_size)"
)


def _elements(records: list[Any]) -> Iterator[tuple[int, Any]]:
    """Records of a list with negative numbers: they have places in it (-1 is the first), and no lines."""
    return ((-1 - i, record) for i, record in enumerate(records))


def _first_object(source: Source, first: str) -> dict[str, Any] | None:
    """The object on the first line; None for a list, and for a document over several lines."""
    try:
        found = source.json(first)
    except DataFormatError:
        return None
    return found if isinstance(found, dict) else None


def _whole(source: Source) -> str:
    with _text(source.path) as text:
        return source.text_of(text)


def _json_lines(source: Source) -> Iterator[tuple[int, Any]]:
    with _text(source.path) as text:
        for line in _lines(source, text):
            if line.strip():
                yield source.line, source.object(line).value


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


def _records(
    source: Source, format: str, given: Columns | None, records: Callable[[], Iterable[tuple[int, Any]]]
) -> _Reading:
    """Records with their lines, or places in a list (:func:`_elements`), as frames of the fields that count."""
    there: dict[str, None] = {}
    for number, record in islice(records(), _RECORDS_SEEN):
        source.line = max(0, number)
        if not isinstance(record, dict):
            raise source.wrong("is not a JSON object")
        there.update(dict.fromkeys(_paths(record)))
    source.line = 0
    found, columns = _columns_of(source, format, list(there), given)
    wanted = {name: tuple(name.split(".")) for name in columns.names.values()}

    def frames() -> Iterator[pd.DataFrame]:
        source.line = 0
        taken = iter(records())
        while piece := list(islice(taken, ROWS_AT_ONCE)):
            rows = []
            for number, record in piece:
                source.line = max(0, number)
                if not isinstance(record, dict):
                    raise source.wrong("is not a JSON object")
                if found == "aiperf" and aiperf_metrics(Value(source, "", record)) is None:
                    source.skipped["failed"] += 1
                    continue
                rows.append((number, *(_at(record, name, way) for name, way in wanted.items())))
            lines, *cells = zip(*rows, strict=True) if rows else ((), *[()] * len(wanted))
            data = {name: pd.Series(list(c), dtype="object") for name, c in zip(wanted, cells, strict=True)}
            yield pd.DataFrame(data).set_axis(list(lines))

    return _Reading(found, columns, frames())


def _paths(record: Mapping[str, Any], before: str = "", depth: int = 5) -> Iterator[str]:
    """Paths of the fields of a record, those of objects within it too."""
    for key, value in record.items():
        yield before + key
        if isinstance(value, dict) and depth:
            yield from _paths(value, f"{before}{key}.", depth - 1)


def _at(record: Mapping[str, Any], name: str, way: tuple[str, ...]) -> Any:
    if name in record:  # the dots may be part of a name, as in OpenTelemetry's
        return record[name]
    found: Any = record
    for i, key in enumerate(way):
        if not isinstance(found, dict):
            return None
        rest = ".".join(way[i:])
        if rest in found:
            return found[rest]
        found = found.get(key)
    return found


def aiperf_metrics(record: Value) -> Value | None:
    """A request as AIPerf measured it; None if the request failed."""
    error, metrics = record.find("error"), record.find("metrics")
    if metrics is None or metrics.value == {} or (error is not None and error.value):
        return None
    return metrics


def _of_values(format: str, names: Mapping[str, str], columns: Mapping[str, list[Any]], unit: str = "s") -> _Reading:
    frame = pd.DataFrame({names[q]: pd.Series(cells, dtype="object") for q, cells in columns.items()})
    frame.index = pd.RangeIndex(0, len(frame))  # within a document, no lines
    return _Reading(format, Columns(dict(names), unit), iter([frame]))


def _guidellm(source: Source) -> _Reading:
    benchmarks = list(source.object(_whole(source)).at("benchmarks").items())
    if not benchmarks:
        raise source.wrong("holds no benchmarks")
    if source.run is None and len(benchmarks) > 1:
        raise source.wrong(f"holds {len(benchmarks)} benchmarks; choose one with --run 0 to {len(benchmarks) - 1}")
    chosen = source.run or 0
    if not 0 <= chosen < len(benchmarks):
        raise source.wrong(f"there is no benchmark {chosen}; choose 0 to {len(benchmarks) - 1}")
    requests = list(benchmarks[chosen].at("requests").at("successful").items())
    names = {"arrival": "request_start_time", "prompt": "prompt_tokens", "output": "output_tokens"}
    cells: dict[str, list[Any]] = {
        "arrival": [guidellm_start(r) for r in requests],
        "prompt": [r.at("prompt_tokens").tokens() for r in requests],
        "output": [r.at("output_tokens").tokens() for r in requests],
    }
    return _of_values("guidellm", names, cells)


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


def _vllm(source: Source) -> _Reading:
    report = source.object(_whole(source))
    names = {"arrival": "start_times", "prompt": "input_lens", "output": "output_lens"}
    columns = {quantity: report.at(name) for quantity, name in names.items()}
    errors = report.find("errors")
    # Without a list of errors, or with an empty one, no request failed.
    listed = errors.elements() if errors is not None else []
    went_wrong = listed or [""] * len(columns["arrival"].elements())
    if len({len(went_wrong), *(len(column.elements()) for column in columns.values())}) != 1:
        raise source.wrong("start_times, input_lens, output_lens and errors must be lists of one length")
    source.skipped.update({"failed": n} if (n := sum(map(bool, went_wrong))) else {})
    cells: dict[str, list[Any]] = {
        quantity: [value.number() for value, error in zip(column.items(), went_wrong, strict=True) if not error]
        for quantity, column in columns.items()
    }
    return _of_values("vllm", names, cells)


def _conversations(source: Source) -> _Reading:
    """Conversations of kv-cache-tester: of one document, of several in one file, or of the files of a folder."""
    names = {"arrival": "t", "prompt": "in", "output": "out", "blocks": "hash_ids"}
    cells: dict[str, list[Any]] = {quantity: [] for quantity in names}
    files = sorted(source.path.glob("*.json*")) if source.path.is_dir() else [source.path]
    sizes: Counter[int] = Counter()
    if not files:
        raise source.wrong("is a folder without .json files")
    number = 0
    for path in files:
        here = replace(source, path=path)
        for conversation in here.objects(_whole(here)):
            number += 1
            sizes[int((conversation.find("block_size") or Value(here, "block_size", 64)).number(1, 1e6))] += 1
            scope = conversation.find("hash_id_scope")
            # Ids of one conversation mean nothing in another, unless they are said to.
            mark = 0 if scope is not None and scope.value == "global" else number
            _add_turns(source, conversation, 0.0, mark, cells)
    if len(sizes) > 1:
        raise source.wrong(
            f"has blocks of {' and '.join(map(str, sizes))} tokens; there must be one size", "block_size"
        )
    reading = _of_values("kv-cache-tester", names, cells)
    reading.block_tokens = next(iter(sizes), BLOCK_TOKENS)
    return reading


def _add_turns(source: Source, conversation: Value, since_s: float, mark: int, cells: dict[str, list[Any]]) -> None:
    """Requests of a conversation and of the agents that it starts, whose times count from their own start."""
    before: tuple[Any, ...] | None = None
    for request in conversation.at("requests").items():
        began = since_s + request.at("t").number()
        if request.find("requests") is not None:
            _add_turns(source, request, began, mark, cells)
            continue
        blocks = request.at("hash_ids").integers()
        turn = (request.at("in").tokens(), blocks)
        if turn == before:  # one call recorded twice, streamed and not
            source.skipped["recorded twice"] += 1
            continue
        before = turn
        cells["arrival"].append(began)
        cells["prompt"].append(turn[0])
        cells["output"].append(request.at("out").tokens())
        cells["blocks"].append([(mark, block) for block in blocks])


# ---------------------------------------------------------------- from frames to a log


@dataclass(slots=True)
class _Kept:
    """Columns of the requests that count, piece by piece, and the block ids of each prompt."""

    pieces: list[pd.DataFrame] = field(default_factory=list)
    blocks: list[tuple[Any, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.pieces))


def _collect(source: Source, read: _Reading, limit: int | None) -> _Kept:
    kept = _Kept()
    for raw in read.frames:
        frame = _numbers_of(source, read, raw)
        room = (MAX_REQUESTS + 1 if limit is None else limit) - len(kept)
        frame = frame.iloc[:room]
        if len(kept) + len(frame) > MAX_REQUESTS:
            source.line = max(0, int(frame.index[-1]))
            raise source.wrong(f"is request {MAX_REQUESTS + 1:,}, one more than a log may hold; cut it with --limit")
        kept.pieces.append(frame)
        if "blocks" in read.columns.names:
            kept.blocks += _blocks_of(source, read.columns.names["blocks"], raw.loc[frame.index])
        if limit is not None and len(kept) >= limit:
            break
    source.line = 0
    if not len(kept):
        raise source.wrong("holds no requests")
    return kept


def _numbers_of(source: Source, read: _Reading, raw: pd.DataFrame) -> pd.DataFrame:
    """The requests of a frame that count, as numbers; those left out are counted by reason."""
    names = read.columns.names
    raw = _succeeded(source, read, raw)
    prompt, output = (tokens(raw[names[q]], source, names[q]) for q in ("prompt", "output"))
    reused = np.zeros(len(raw))
    if "reused" in names:
        reused = tokens(raw[names["reused"]].fillna(0), source, names["reused"])
    frame = pd.DataFrame(
        {
            "arrival": read.clock.seconds(raw[names["arrival"]], source, names["arrival"]),
            "prompt": prompt,
            "output": np.maximum(1.0, output),
            "class": classes(raw[names["class"]], source, names["class"]) if "class" in names else 0.0,
            "reused": np.minimum(reused, prompt),
        },
        index=raw.index,
    )
    burst_failures = (output < 1) & (read.format == "burstgpt")  # this is how the trace marks a failure
    _count(source, "failed", burst_failures)
    _count(source, "no prompt", (prompt < 1) & ~burst_failures)
    return frame[(prompt >= 1) & ~burst_failures]


def _succeeded(source: Source, read: _Reading, raw: pd.DataFrame) -> pd.DataFrame:
    name = read.columns.names.get("status")
    if name is None:
        return raw
    lost = failed(raw[name], name)
    _count(source, "failed", lost)
    return raw[~lost]


def _count(source: Source, why: str, which: Any) -> None:
    if n := int(which.sum()):
        source.skipped[why] += n


def _blocks_of(source: Source, name: str, raw: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Ids of the blocks of each prompt."""
    found = []
    for line, ids in zip(raw.index, raw[name], strict=True):
        source.line = max(0, int(line))
        if ids is None:
            raise source.wrong(f"has no {name}, which other lines have: give them for every prompt, or for none", name)
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        paired = isinstance(ids, list) and ids and isinstance(ids[0], tuple)
        found.append(tuple(ids) if paired else Value(source, name, ids).integers())
    return found


def _ordered(kept: _Kept, block_tokens: int) -> tuple[RequestLog, float]:
    """Sorted by arrival from 0 on, coarse arrivals spread, repeated prefixes found."""
    rows = pd.concat(kept.pieces)
    order = np.argsort(rows["arrival"].to_numpy(), kind="stable")
    rows = rows.iloc[order]
    arrival = rows["arrival"].to_numpy() - rows["arrival"].iloc[0]
    tick_s = coarse_tick_s(arrival)
    if tick_s > 0.0:
        arrival = spread_ticks(arrival, tick_s)
    log = RequestLog(
        arrival_s=arrival,
        prompt_tokens=rows["prompt"].to_numpy(),
        output_tokens=rows["output"].to_numpy(),
        class_index=rows["class"].to_numpy().astype(np.int64),
        reused_tokens=rows["reused"].to_numpy(),
    )
    if kept.blocks:
        log = with_blocks(log, [kept.blocks[i] for i in order], block_tokens)
    return log, tick_s


def with_blocks(log: RequestLog, blocks: list[tuple[Any, ...]], block_tokens: int = BLOCK_TOKENS) -> RequestLog:
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
