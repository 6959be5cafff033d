"""Read request logs: a file of any known format, or a packed trace, becomes a :class:`RequestLog` in memory.

Formats are listed in :mod:`ops.log.formats`. Any file may be compressed (``.gz``). Tables and JSON lines are read in
pieces, so a log of gigabytes needs only the memory of its numbers. A value that does not fit is refused with file, line
and field; nothing is guessed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from inferencegym.errors import DataFormatError, InvalidConfigError, short_text
from ops.log.columns import (
    CLASSES,
    FIRST_DATE_S,
    Clock,
    classes,
    classes_or_nan,
    failed,
    is_date,
    numbers_or_nan,
    tokens,
)
from ops.log.formats import FORMATS, NAMES, TABLE, Format, format_of
from ops.log.names import (
    UNITS,
    Columns,
    check_names,
    csv_header,
    find_columns,
    is_end,
    parse_columns,
    parse_filter,
    plain,
    table_format,
)
from ops.log.source import MAX_SKIP_BAD, Source, Value
from simulator.hardware.tables import FloatArray
from simulator.load.prefix import BLOCK_TOKENS, PrefixReuse
from simulator.load.recorded import load_trace
from simulator.load.requests import MAX_REQUESTS, RequestLog

MAX_SPAN_S: Final = 366 * 86_400
"""Longest log (s). Every second is kept, with or without requests, so a longer log would be mostly silence."""
LONG_PREFIX: Final = 0.3
"""Share of a prompt from which its repeated prefix decides where it is served, as in SGLang's router; shorter ones are
system prompts, which every replica holds."""
COARSE_TICK_S: Final = 0.5
"""Arrivals recorded in steps at least this long are spread within their step."""
ROWS_AT_ONCE: Final = 50_000
TELLING_GAP_S: Final = {True: 2.0, False: 60.0}
"""Mean time between requests (s) above which numbers without a unit may be ms, by whether all are whole."""
LEAST_TELLING: Final = 10
"""Fewest requests whose times may ask for a unit."""
LEAST_ORDER: Final = 0.5
"""Smallest rank correlation with the order of the file, rising or falling, of numbers that may be arrivals."""
MAX_USUAL_S: Final = 100.0
"""Longest median duration (s) that is believed without a unit."""
LEAST_TOKEN_S: Final = 2e-4
"""Shortest median duration per output token that is believed: a tenth of what the fastest shipped table takes."""
_RECORDS_SEEN: Final = 100
"""Records searched for columns: not every record has all fields."""
_LISTS: Final = ("data", "logs", "results", "records", "rows", "items", "requests")
"""Fields in which gateway APIs keep their list of records."""
_NO_KNOWN_JSON: Final = (
    "JSON of no known log; known are records one a line or in a list (data, logs, results, ...), AIPerf's records, "
    "Mooncake's traces, GuideLLM's report (benchmarks), vLLM's detailed result (start_times, from --save-detailed), "
    "OpenTelemetry's exports (resourceSpans) and kv-cache-tester's conversations (requests, block_size)"
)


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A request log and how it was read.

    ``columns`` says where each quantity came from, ``skipped`` how many rows were left out for each reason, ``tick_s``
    over which step (s) arrivals were spread, ``notes`` what else a reader must know, one sentence each, ``model`` the
    only model that the log names.
    """

    log: RequestLog
    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    tick_s: float = 0.0
    notes: Sequence[str] = ()
    model: str | None = None

    def describe(self) -> dict[str, Any]:
        """Origin of the log, for the description in a packed trace."""
        found = {"format": self.format, "columns": dict(self.columns), "skipped": dict(self.skipped)}
        return {**found, "tick_s": self.tick_s, "notes": list(self.notes)}


def import_log(
    path: str | Path,
    format: str = "auto",
    *,
    columns: str | None = None,
    limit: int | None = None,
    start_s: float = 0.0,
    end_s: float = math.inf,
    run: int | None = None,
    content: str | None = None,
    skip_failed: bool = False,
    only: Sequence[str] = (),
    skip_bad: int = 0,
    drop_duplicates: bool = False,
) -> Imported:
    """Read a request log, sorted by arrival, starting at 0.

    ``columns`` names columns of a table (:func:`ops.log.names.parse_columns`); others are found by their usual names.
    ``limit`` keeps the first rows of the file, ``start_s`` and ``end_s`` a window after the first arrival; ``run``
    chooses one benchmark of a report that holds several, and ``only`` selects requests by columns (``model=llama``,
    ``model=llama,qwen``), all of which must hold. Requests of several models are refused unless ``only`` chooses some
    of them. ``skip_bad`` is how many rows that cannot be read are left out; with ``drop_duplicates`` only the first
    request of an id counts. ``content`` is the text of a file that was uploaded under the name ``path``. A failed
    request was still load: if it has a prompt it counts, with the median output of the others, unless ``skip_failed``.
    Arrivals recorded in coarse steps are spread over their step, in the order of the file.
    Times without a unit that may be ms are refused. Raises :class:`DataFormatError` naming file, line and field.
    """
    if not 0 <= skip_bad <= MAX_SKIP_BAD:
        raise InvalidConfigError(
            f"--skip-bad={skip_bad} is not allowed: it must be from 0 to {MAX_SKIP_BAD:,}", "skip_bad"
        )
    chosen = [parse_filter(text) for text in only]
    source = Source(Path(path), run, content, skip_failed, chosen, skip_bad, drop_duplicates)
    if content is None and source.path.suffix == ".npz":
        return Imported(cut_log(load_trace(str(path))[0], start_s, end_s, str(path), limit), "packed trace")
    if format not in ("auto", *NAMES):
        raise InvalidConfigError(f"format={format!r} is not known: one of auto, {', '.join(NAMES)}")
    given = parse_columns(columns) if columns is not None else None
    with source.reading():
        try:
            table = _with_arrival(source, _open_log(source, format, given))
            rows, blocks = _collect(source, table, limit)
        except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            line = re.search(r"(?:line|row) (\d+)", str(error))
            source.line = int(line[1]) if line else 0
            raise source.wrong(f"is not CSV ({str(error).strip()})") from error
    log, tick_s = _ordered(rows, blocks, source.block_tokens)
    log = cut_log(log, start_s, end_s, str(path))
    if log.arrival_s[-1] > MAX_SPAN_S:
        raise DataFormatError(
            f"{path}: lasts {log.arrival_s[-1]:g} s; a log may last {MAX_SPAN_S:,} s: if its times are not in "
            "seconds, name the unit: --columns arrival=COLUMN:ms; else choose a part of it (--from-s, --to-s)"
        )
    columns_used = table.columns.describe(table.clock.form)
    return Imported(log, table.format.name, columns_used, source.skipped, tick_s, source.notes, source.model)


# ---------------------------------------------------------------- files: frames of raw cells


@dataclass(slots=True)
class _Table:
    """A file as frames of raw cells under its own column names, indexed by line (negative: by position in a list)."""

    format: Format
    columns: Columns
    frames: Iterator[pd.DataFrame]
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.columns.units.get("arrival"), self.columns.names["arrival"])


def _open_log(source: Source, format: str, given: Columns | None) -> _Table:
    conversations = format_of("kv-cache-tester")
    if source.is_folder():
        if format not in ("auto", conversations.name):
            raise source.wrong(f"is a folder; {format} is read from a file")
        return _document(source, conversations, given)
    if source.begins_with(b"PAR1"):
        return _parquet(source, given)
    first = next((line for line in source.lines() if line.strip()), "").strip()
    source.line = 0
    if not first:
        raise source.wrong("is empty")
    return _json(source, first, format, given) if first[0] in "{[" else _csv(source, format, given)


def _wanted(source: Source, columns: Columns) -> list[str]:
    """Names of the columns to read."""
    filtered = (column for column, _ in source.only)
    return list(dict.fromkeys([*columns.names.values(), *columns.times, *filtered]))


def _csv(source: Source, format: str, given: Columns | None) -> _Table:
    before, separator, there = csv_header(source)
    options: dict[str, Any] = {
        "sep": separator,
        "skiprows": before,
        "dtype": str,
        "keep_default_na": False,
        "na_values": [""],
        "skip_blank_lines": False,
        "index_col": False,
        "skipinitialspace": True,
    }
    found, columns = table_format(source, format, there, given)
    wanted = _wanted(source, columns)

    def frames() -> Iterator[pd.DataFrame]:
        options["usecols"] = lambda name: str(name).strip() in wanted
        with source.open() as text, pd.read_csv(text, chunksize=ROWS_AT_ONCE, **options) as pieces:
            for frame in pieces:
                frame.columns = [str(c).strip() for c in frame.columns]
                # Line numbers count the header and the blank lines before it; they hold if no quoted cell spans lines.
                frame.index = frame.index + before + 2
                yield frame.dropna(how="all")

    return _Table(found, columns, frames())


def _parquet(source: Source, given: Columns | None) -> _Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        there = pq.read_schema(source.path).names
        columns = find_columns(source, there, given)
        frame = pd.read_parquet(source.path, columns=_wanted(source, columns))
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, DataFormatError):
            raise
        raise source.wrong(f"is not parquet ({error})") from error
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    return _Table(TABLE, columns, iter([frame]))


def _json(source: Source, first: str, format: str, given: Columns | None) -> _Table:
    """Read JSON: one record per line, a list of records, or a document of a tool."""
    record = _first_object(source, first)
    if record is None:  # a list, or a document that spans lines
        whole = source.json(source.text().strip())
        if isinstance(whole, list):
            return _records(source, format, given, lambda: _elements(whole))
        record = whole if isinstance(whole, dict) else {}
        if not {*_LISTS, *(key for known in FORMATS for key in known.told_by)} & set(record):
            raise source.wrong(_NO_KNOWN_JSON)
    for known in FORMATS:
        if known.records and (known.name == format or (format == "auto" and set(known.told_by) & set(record))):
            return _document(source, known, given)
    inner = next((key for key in _LISTS if isinstance(record.get(key), list)), None)
    if inner is None:
        return _records(source, format, given, lambda: ((source.line, each.value) for each in source.json_lines()))
    listed = source.document().at(inner).elements()
    source.within = inner
    return _records(source, format, given, lambda: _elements(listed))


def _document(source: Source, known: Format, given: Columns | None) -> _Table:
    assert known.records is not None
    listed = known.records(source)
    return _records(source, known.name, given, lambda: _elements(listed))


def _elements(records: list[Any]) -> Iterator[tuple[int, Any]]:
    """Records of a list, numbered by negative positions (-1 is the first) because they have no lines."""
    return ((-1 - i, record) for i, record in enumerate(records))


def _first_object(source: Source, first: str) -> dict[str, Any] | None:
    """The object on the first line; None for a list or a document that spans lines."""
    try:
        found = source.json(first)
    except DataFormatError:
        return None
    return found if isinstance(found, dict) else None


def _records(
    source: Source, format: str, given: Columns | None, records: Callable[[], Iterable[tuple[int, Any]]]
) -> _Table:
    """Records with their lines, or positions in a list (:func:`_elements`), as frames of the fields to read."""
    there: dict[str, None] = {}
    for number, record in islice(records(), _RECORDS_SEEN):
        there.update(dict.fromkeys(_flat(source, _object(source, number, record))))
        check_names(source, there)
    if not there:
        source.check_bad(0)
    source.line = 0
    if not there:
        raise source.wrong("holds no requests")
    found, columns = table_format(source, format, list(there), given)
    wanted = _wanted(source, columns)

    def frames() -> Iterator[pd.DataFrame]:
        taken = iter(records())
        while piece := list(islice(taken, ROWS_AT_ONCE)):
            rows = []
            for number, record in piece:
                fields = _object(source, number, record)
                if found.needs and not fields.get(found.needs):
                    source.skipped["failed"] += 1
                    continue
                flat = _flat(source, fields)
                rows.append((number, *(flat.get(name) for name in wanted)))
            lines, *cells = zip(*rows, strict=True) if rows else ((), *[()] * len(wanted))
            data = {name: pd.Series(list(c), dtype="object") for name, c in zip(wanted, cells, strict=True)}
            yield pd.DataFrame(data).set_axis(list(lines))

    return _Table(found, columns, frames())


def _object(source: Source, number: int, record: Any) -> dict[str, Any]:
    source.line = max(0, number)
    if not isinstance(record, dict):
        raise source.wrong("is not a JSON object")
    return record


def _flat(source: Source, record: Mapping[str, Any], before: str = "", depth: int = 5) -> dict[str, Any]:
    """Fields of a record by path, nested objects included; a name may itself contain dots."""
    found: dict[str, Any] = {}
    # Check before names are joined to paths: each path repeats all names that lead to it.
    check_names(source, record, before)
    for key, value in record.items():
        found[before + key] = value
        if isinstance(value, dict) and depth:
            found.update(_flat(source, value, f"{before}{key}.", depth - 1))
    check_names(source, found)
    return found


# ---------------------------------------------------------------- from frames to a log


def _with_arrival(source: Source, table: _Table) -> _Table:
    """The table with the arrival chosen by its cells: a date before a small number, which may be a duration.

    A duration is subtracted from the time of the end, and counts for nothing beside another time.
    """
    names, times = dict(table.columns.names), table.columns.times
    if not times:
        return table
    first = next(table.frames, pd.DataFrame(columns=list(times)))
    names["arrival"] = next((name for name in times if is_date(first[name], name)), times[0])
    arrival = names["arrival"]
    ended = is_end(arrival)
    if not ended or names.get("duration") == arrival:
        names.pop("duration", None)
    if ended:
        taken = f"arrivals are {arrival} minus {names.get('duration')}"
        late = "no column tells how long it took, so arrivals are late by that"
        why = taken if "duration" in names else late
        source.notes.append(f"{arrival} is logged when a request ends: {why}")
    return _Table(table.format, replace(table.columns, names=names), chain([first], table.frames))


def _collect(source: Source, table: _Table, limit: int | None) -> tuple[pd.DataFrame, list[tuple[Any, ...]]]:
    """Requests that count, in the order of the file, and the block ids of each prompt if the log has them."""
    pieces: list[pd.DataFrame] = []
    blocks: list[tuple[Any, ...]] = []
    room = MAX_REQUESTS + 1 if limit is None else limit
    models: Counter[str] = Counter()
    others = [(column, Counter[str]()) for column, _ in source.only]  # values of filtered columns, until one matches
    for raw in table.frames:
        for (column, values), (_, seen) in zip(source.only, others, strict=True):
            if not any(map(len, pieces)):
                seen.update(map(str, raw[column].dropna()))
            raw = raw[np.array([str(cell) in values for cell in raw[column]], dtype=bool)]
        pieces.append(_numbers_of(source, table, raw).iloc[:room])
        room -= len(pieces[-1])
        if "model" in table.columns.names:
            models.update(map(str, raw[table.columns.names["model"]].loc[pieces[-1].index].dropna()))
        if "blocks" in table.columns.names:
            blocks += _blocks_of(source, table.columns.names["blocks"], raw.loc[pieces[-1].index])
        if sum(map(len, pieces)) > MAX_REQUESTS:
            source.line = max(0, int(pieces[-1].index[-1]))
            raise source.wrong(f"is request {MAX_REQUESTS + 1:,}, one more than a log may hold; cut it with --limit")
        if room <= 0:
            break
    source.check_bad(sum(map(len, pieces)))
    source.line = 0
    rows = pd.concat(pieces) if pieces else pd.DataFrame()
    if not len(rows):
        if not source.only:
            raise source.wrong("holds no requests")
        name, seen = next((each for each in reversed(others) if each[1]), others[0])
        there = short_text(", ".join(f"{value}: {n:,}" for value, n in seen.most_common(5)), 200) or "none"
        where = f"of {name} there" if len(others) > 1 else "there"
        asked = " and ".join(f"{column}={','.join(sorted(values))}" for column, values in source.only)
        raise source.wrong(f"holds no requests with {asked}; values {where}: {there}")
    _refuse_durations(source, table, rows)
    _refuse_unknown_unit(source, table, rows)
    if len(models) > 1 and table.columns.names["model"] not in [column for column, _ in source.only]:
        listed = ", ".join(f"{name}: {n:,}" for name, n in models.most_common(5))
        name = table.columns.names["model"]
        raise source.wrong(
            f"requests of {len(models)} models ({short_text(listed, 200)}) are not one load: choose a model with "
            f"--filter {name}=NAME, or several that one fleet serves with --filter {name}=NAME,NAME",
            name,
        )
    source.model = next(iter(models)) if len(models) == 1 else None
    _refuse_without_outputs(source, table, rows)
    rows, blocks = _without_duplicates(source, table, rows, blocks)
    _note_oddities(source, table, rows)
    return _with_outputs(source, _with_classes(source, table, rows)), blocks


def _note_oddities(source: Source, table: _Table, rows: pd.DataFrame) -> None:
    """Say that all requests share a time, or that some have no output although nothing says that they failed."""
    names = table.columns.names
    if len(rows) >= LEAST_TELLING and rows["arrival"].nunique() == 1:
        source.notes.append(
            f"all {len(rows):,} requests have the same {names['arrival']}: they arrive at once, and the log tells no "
            "rate; take a log with the time of each request"
        )
    if n := int((rows["unanswered"] & rows["output"].notna()).sum()):
        source.notes.append(
            f"{n:,} of the requests have 0 {names['output']}, and no column such as status, success or error says that "
            "they failed: each counts with 1 token"
        )


def _refuse_durations(source: Source, table: _Table, rows: pd.DataFrame) -> None:
    """Refuse small numbers in no order as arrivals, unless the user named them, and durations of unlikely length."""
    name, times = table.columns.names["arrival"], rows["arrival"]
    if table.columns.times and len(rows) >= LEAST_TELLING and times.max() < FIRST_DATE_S and times.nunique() > 1:
        order = np.corrcoef(times.rank().to_numpy(), np.arange(len(times)))[0, 1]
        if abs(order) < LEAST_ORDER and not plain(name).startswith("arriv"):
            raise source.wrong(
                f"{name} holds numbers from {times.min():g} to {times.max():g} in no order, which may be how long "
                "requests took. If another column has the arrivals, name it with --columns arrival=COLUMN, else this "
                f"one, arrival={name}",
                name,
            )
    took, median = table.columns.names.get("duration"), rows["duration"].median()
    if took is None or "duration" in table.columns.units:
        return
    unit = Clock(name=took).unit
    if unit is None and median > MAX_USUAL_S:
        raise source.wrong(
            f"{took} has no unit, and its median is {median:g}. Name the unit: "
            f"--columns arrival={name},duration={took}:ms",
            took,
        )
    if unit not in (None, "s") and 0.0 < (rows["duration"] / rows["output"]).median() < LEAST_TOKEN_S:
        larger = [*UNITS][[*UNITS].index(unit) - 1]
        raise source.wrong(
            f"the median of {took} is {median * UNITS[unit]:g} {unit}, less than any card takes for "
            f"{rows['output'].median():,.0f} output tokens: it is probably in {larger}. Name the unit: "
            f"--columns arrival={name},duration={took}:{larger}",
            took,
        )


def _refuse_without_outputs(source: Source, table: _Table, rows: pd.DataFrame) -> None:
    """Refuse a log in which no request has an output, unless all have failed: nothing says how long answers are."""
    counted = rows["output"].notna()
    if counted.any() and rows["unanswered"][counted].all():
        name = table.columns.names["output"]
        raise source.wrong(
            f"no request has an output token: {name} is 0 in all rows. If another column has the output tokens, name "
            "it: --columns output=COLUMN",
            name,
        )


def _refuse_unknown_unit(source: Source, table: _Table, rows: pd.DataFrame) -> None:
    """Refuse times that may be seconds or ms, because nothing names their unit and requests are far apart."""
    if not table.clock.assumed or len(rows) < LEAST_TELLING:
        return
    times = rows["arrival"].to_numpy()
    gap = float(np.ptp(times)) / (len(times) - 1)
    if gap > TELLING_GAP_S[bool((times % 1.0 == 0.0).all())]:
        name = table.columns.names["arrival"]
        raise source.wrong(
            f"{name} holds numbers from {times.min():g} to {times.max():g} without a unit: requests are {gap:.3g} s "
            f"or {gap:.3g} ms apart. Name the unit: --columns arrival={name}:ms or --columns arrival={name}:s",
            name,
        )


def _with_classes(source: Source, table: _Table, rows: pd.DataFrame) -> pd.DataFrame:
    """Classes from a priority column, if all of its cells are classes; a note says whether it was used."""
    if "priority" not in table.columns.names:
        return rows
    name = table.columns.names["priority"]
    if "class" in table.columns.names:
        source.notes.append(f"{name} is ignored, because {table.columns.names['class']} gives the classes")
    elif rows["class"].isna().any():
        source.notes.append(
            f"{name} is ignored, and all requests are of one class: its cells are not all one of {', '.join(CLASSES)}"
        )
    else:
        source.notes.append(f"{name} gives the class of each request; 0 ({next(iter(CLASSES))}) is served first")
    return rows.assign(**{"class": 0.0}) if rows["class"].isna().any() else rows


def _without_duplicates(
    source: Source, table: _Table, rows: pd.DataFrame, blocks: list[tuple[Any, ...]]
) -> tuple[pd.DataFrame, list[tuple[Any, ...]]]:
    """Requests and their blocks without later ones of the same id, if the user drops them; else a note names them."""
    if "id" not in table.columns.names:
        return rows, blocks
    if source.drop_duplicates:
        again = rows["id"].duplicated().to_numpy()
        _count(source, f"repeated {table.columns.names['id']}", again)
        return rows[~again], [ids for ids, dropped in zip(blocks, again, strict=False) if not dropped]
    twice = rows["id"].duplicated(keep=False).to_numpy()
    if twice.any():
        first, second = rows.index[rows["id"] == rows["id"].to_numpy()[twice.argmax()]][:2]
        where = f"lines {first} and {second}" if first > 0 else f"places {-1 - first} and {-1 - second} of the list"
        source.notes.append(
            f"{int(twice.sum()):,} requests share their {table.columns.names['id']} with another one, the first on "
            f"{where}; all of them count (--drop-duplicates keeps the first of each)"
        )
    return rows, blocks


def _with_outputs(source: Source, rows: pd.DataFrame) -> pd.DataFrame:
    """Give failed requests (output NaN) the median output of the others."""
    n = int(rows["output"].isna().sum())
    if n == 0:
        return rows
    median = 1.0 if n == len(rows) else float(rows["output"].median())
    source.notes.append(
        f"{n:,} of the requests failed; they count as demand with the median output, {median:g} tokens "
        "(--failed skip leaves them out)"
    )
    return rows.fillna({"output": median})


def _numbers_of(source: Source, table: _Table, raw: pd.DataFrame) -> pd.DataFrame:
    """Requests of a frame that count and can be read, as numbers; those left out are counted by reason."""
    names = table.columns.names
    lost = failed(raw[names["status"]], names["status"]) if "status" in names else np.zeros(len(raw), dtype=bool)
    if lost.any():
        out = lost & (source.skip_failed | ~(numbers_or_nan(raw[names["prompt"]]) >= 1))
        _count(source, "failed", out)
        raw, lost = raw[~out], lost[~out]
    arrival = table.clock.seconds(raw[names["arrival"]], source, names["arrival"])
    prompt = tokens(raw[names["prompt"]], source, names["prompt"])
    # The output of a failed request, if recorded at all, is not the output that it asked for.
    answered = raw[names["output"]].astype("object").where(~lost, 0) if lost.any() else raw[names["output"]]
    output = tokens(answered, source, names["output"])
    lost |= (output < 1) & table.format.needs_output
    reused = np.zeros(len(raw))
    if "reused" in names:
        reused = tokens(raw[names["reused"]].fillna(0), source, names["reused"])
    took: FloatArray | float = 0.0
    if "duration" in names:
        name = names["duration"]
        took = Clock(table.columns.units.get("duration"), name).seconds(raw[name], source, name)
    frame = pd.DataFrame(
        {
            "arrival": arrival - took,
            "duration": took,
            "prompt": prompt,
            "unanswered": output < 1,
            "output": np.where(lost, np.nan, np.maximum(1.0, output)),
            "class": _classes_of(source, names, raw),
            "reused": np.minimum(reused, prompt),
            "id": _hashes(raw[names["id"]]) if "id" in names else 0,
            "session": _hashes(raw[names["session"]]) if "session" in names else 0,
        },
        index=raw.index,
    )
    read = ~raw.index.isin(list(source.bad))
    out = lost & source.skip_failed & read
    _count(source, "failed", out)
    _count(source, "no prompt", (prompt < 1) & ~out & read)
    return frame[(prompt >= 1) & ~out & read]


def _classes_of(source: Source, names: Mapping[str, str], raw: pd.DataFrame) -> FloatArray | float:
    """Classes of requests; NaN where a priority column has other values (:func:`_with_classes`)."""
    if "class" in names:
        return classes(raw[names["class"]], source, names["class"])
    return classes_or_nan(raw[names["priority"]]) if "priority" in names else 0.0


def _hashes(ids: pd.Series) -> list[int]:
    """A number for each id; a row without an id gets a number of its own."""
    cells = zip(ids.index, ids.astype("object").tolist(), ids.isna().tolist(), strict=True)
    return [hash((line,)) if missing else hash(str(cell)) for line, cell, missing in cells]


def _count(source: Source, why: str, which: Any) -> None:
    if n := int(which.sum()):
        source.skipped[why] += n


def _blocks_of(source: Source, name: str, raw: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Block ids of each prompt."""
    found = []
    for line, ids in zip(raw.index, raw[name], strict=True):
        source.line = max(0, int(line))
        if ids is None:
            raise source.wrong(f"has no {name}, which other lines have: give them for every prompt, or for none", name)
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        found.append(ids if isinstance(ids, tuple) else Value(source, name, ids).integers())
    return found


def _ordered(rows: pd.DataFrame, blocks: list[tuple[Any, ...]], block_tokens: int) -> tuple[RequestLog, float]:
    """Sort by arrival (from 0 on), spread coarse arrivals, and find repeated prefixes."""
    order = np.argsort(rows["arrival"].to_numpy(), kind="stable")
    rows = rows.iloc[order]
    arrival = rows["arrival"].to_numpy() - rows["arrival"].iloc[0]
    tick_s = coarse_tick_s(arrival)
    if tick_s > 0.0:
        arrival = spread_ticks(arrival, tick_s)
    sessions = rows["session"].to_numpy()
    log = RequestLog(
        arrival_s=arrival,
        prompt_tokens=rows["prompt"].to_numpy(),
        output_tokens=rows["output"].to_numpy(),
        class_index=rows["class"].to_numpy().astype(np.int64),
        reused_tokens=rows["reused"].to_numpy(),
        follows=_earlier_turns(sessions) if sessions.any() else np.zeros(0, dtype=np.int64),
    )
    if blocks:
        log = with_blocks(log, [blocks[i] for i in order], block_tokens)
    return log, tick_s


def with_blocks(log: RequestLog, blocks: list[tuple[Any, ...]], block_tokens: int = BLOCK_TOKENS) -> RequestLog:
    """The log with its repeated prefixes, from the block ids of each prompt in order of arrival.

    A request follows an earlier one if they share at least :data:`LONG_PREFIX` of its prompt.
    """
    reuse = PrefixReuse(block_tokens)
    lengths = zip(blocks, log.prompt_tokens.astype(int).tolist(), log.output_tokens.astype(int).tolist(), strict=True)
    reused = np.array([reuse.add(ids, prompt, output) for ids, prompt, output in lengths], dtype=np.float64)
    follows = np.where(reused >= LONG_PREFIX * log.prompt_tokens, reuse.matched, -1)
    return replace(log, reused_tokens=reused, reuse_hit=reuse.hit_curve(), follows=follows)


def _earlier_turns(sessions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the previous request of the same session, (N,); -1 for the first."""
    last: dict[int, int] = {}
    found = np.full(len(sessions), -1)
    for i, session in enumerate(sessions.tolist()):
        found[i] = last.get(session, -1)
        last[session] = i
    return found


def coarse_tick_s(arrival_s: FloatArray) -> float:
    """Step (s) of arrivals that were recorded in steps of half a second or more; 0 if they are finer."""
    distinct = np.unique(arrival_s)
    if len(distinct) < 3 or 2 * len(distinct) > len(arrival_s):
        return 0.0
    tick = float(np.median(np.diff(distinct)))
    return tick if tick >= COARSE_TICK_S else 0.0


def spread_ticks(arrival_s: FloatArray, tick_s: float) -> FloatArray:
    """Spread arrivals uniformly at random over the step in which each was recorded; their order stays.

    The random numbers come from a fixed seed: the same file always gives the same log.
    """
    within = np.random.default_rng([0, 0]).random(len(arrival_s))
    # Sort by tick, then by draw: this keeps the ticks in place and orders the draws within each.
    _, tick = np.unique(arrival_s, return_inverse=True)
    moved: FloatArray = arrival_s + tick_s * within[np.lexsort((within, tick))]
    return np.maximum.accumulate(moved)


def cut_log(
    log: RequestLog, start_s: float, end_s: float, name: str = "the log", limit: int | None = None
) -> RequestLog:
    """Requests of a window (s after the first arrival), at most ``limit``; times count from the window's start."""
    inside = (log.arrival_s >= start_s) & (log.arrival_s < end_s)
    if limit is not None:
        inside &= np.cumsum(inside) <= limit
    if inside.all() and start_s == 0.0:
        return log
    if not inside.any():
        window = f"between {start_s:g} and {end_s:g} s" if end_s < np.inf else f"from second {start_s:g} on"
        raise DataFormatError(f"{name}: no request {window}; the last is at {log.arrival_s[-1]:g} s")
    return log.part(inside, start_s)
