"""Which column of a table holds which quantity, told by the columns' names alone, so that pandas is not imported.

A log's columns are found by their usual names (:data:`USUAL_NAMES`) or named by the user (:func:`parse_columns`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from inferencegym.errors import InvalidConfigError, short_text
from ops.log.formats import FORMATS, TABLE, Format
from ops.log.source import Source

QUANTITIES: Final = (
    *("arrival", "prompt", "output", "class", "priority", "reused", "status", "blocks", "session", "id", "model"),
    "duration",
)
"""What a column may hold: a time, token counts, a priority class, a priority that need not be a class, how the request
ended, block ids, the conversation's id, the request's id, the model, how long the request took if the time is that of
its end."""
REQUIRED: Final = ("arrival", "prompt", "output")
UNITS: Final = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of a time, per second."""

USUAL_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "arrival": (
        *("arrival_s", "arrival_ms", "arrival_us", "arrival_ns", "arrival_time", "arrival_time_s", "arrival_time_ms"),
        *("arrived_at", "arrival", "request_start_time", "request_start_ns", "start_time_s", "start_time_ms"),
        *("start_time", "started_at", "start", "received_at", "received", "msec", "time_iso8601", "time_local"),
        *("request_time", "request_time_ms", "request_timestamp", "timestamp_s", "timestamp_ms"),
        *("time_s", "time_ms"),
        *("timestamp_us", "timestamp_ns", "timestamp", "time", "ts", "datetime", "date", "created_at", "created", "t"),
        *("start_time_unix_nano", "request_created_at"),
    ),
    "end": ("end_time", "end_time_s", "end_time_ms", "ended_at", "completed_at", "finished_at", "end"),
    "duration": (
        *("request_time", "request_time_ms", "latency_ms", "latency_s", "latency", "duration_ms", "duration_s"),
        *("duration", "response_time_ms", "response_time", "e2e_latency_ms", "e2e_latency", "elapsed_ms", "elapsed"),
    ),
    "prompt": (
        *("prompt_tokens", "input_tokens", "context_tokens", "request_tokens", "num_prompt_tokens", "tokens_prompt"),
        *("num_input_tokens", "num_prefill_tokens", "prompt_token_count", "input_token_count", "tokens_in"),
        *("prompt_length", "prompt_len", "input_length", "input_len", "isl", "n_prompt_tokens", "prompt", "input"),
        "prompt_eval_count",
    ),
    "output": (
        *("completion_tokens", "output_tokens", "generated_tokens", "response_tokens", "num_output_tokens"),
        *("num_generated_tokens", "num_completion_tokens", "num_decode_tokens", "tokens_completion", "tokens_out"),
        *("completion_token_count", "output_token_count", "candidates_token_count", "output_length", "output_len"),
        *("generation_tokens", "completion_length", "osl", "n_generated_tokens", "output", "completion"),
        *("num_generation_tokens", "eval_count", "n_predicted", "gen_len", "gen_tokens", "generated_len"),
    ),
    "class": ("class", "class_index"),
    "priority": ("priority",),
    "reused": ("reused_tokens", "reusable_prefix_tokens"),
    "status": (
        *("status_code", "http_status", "response_status", "response_code", "status", "success", "error_code"),
        "error",
    ),
    "blocks": ("hash_ids",),
    "session": ("session_id", "conversation_id"),
    "id": ("request_id", "req_id", "id"),
    "model": (
        *("model", "model_name", "x_model", "x_model_name", "requested_model", "served_model", "gen_ai_request_model"),
        *("gen_ai_response_model", "model_id"),
    ),
}
"""Usual names of each quantity, the most reliable first; case, spaces and punctuation do not count. ``end`` are times
that tell the arrival together with a duration."""
ENDS: Final = frozenset(name.replace("_", "") for name in (*USUAL_NAMES["end"], "msec", "time_iso8601", "time_local"))
"""Names of times that are logged when a request ends; nginx writes the last three."""
MAX_COLUMNS: Final = 10_000
"""Most columns of a table, or fields of a JSON record, those of nested objects included."""
MAX_NAME_CHARS: Final = 1_000
"""Longest name of a column, or path of a field (characters)."""
_NUMBER: Final = re.compile(r"-?[0-9]+([.][0-9]+)?")
_VLLM_LINE: Final = re.compile(r"(\(\w+ pid=\d+\) )?(INFO|WARNING|DEBUG|ERROR) \d\d-\d\d \d\d:")
"""How vLLM's own log lines begin."""
_ACCESS_LINE: Final = re.compile(r"\[\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d")
"""The time in a line of a web server's access log."""
HEADER_CHARS: Final = 4_096
"""Characters of the header that :func:`check_table` reads."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Column name of each quantity in a file, and the units of its times (none: told by their magnitude).

    ``times`` are the columns that may be the arrival by their names, the most reliable first; none if one was given.
    """

    names: Mapping[str, str]
    units: Mapping[str, str] = field(default_factory=dict)
    times: tuple[str, ...] = ()

    def present(self, there: Sequence[str]) -> Columns:
        """Columns that are present; of names separated by ``|``, the first that is present."""
        found = {q: next((name for name in names.split("|") if name in there), "") for q, names in self.names.items()}
        return Columns({quantity: name for quantity, name in found.items() if name}, self.units)

    def describe(self, times: str) -> dict[str, str]:
        """Names of the columns, and how ``times`` were read."""
        named = {quantity: short_text(name) for quantity, name in self.names.items()}
        return {q: f"{n} ({times})" if q == "arrival" else n for q, n in named.items()}


def is_end(column: str) -> bool:
    """Whether a column, by its name, has times that are logged when a request ends."""
    return plain(column.rpartition(".")[2]) in ENDS


def parse_columns(text: str) -> Columns:
    """Columns in the user's words: ``arrival=ts:ms,prompt=in_tok,output=out_tok``, with a time's unit after a colon."""
    names: dict[str, str] = {}
    units: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        quantity, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not name or quantity not in QUANTITIES:
            raise InvalidConfigError(
                f"columns: {short_text(part)!r} is not allowed: it must be QUANTITY=COLUMN, where QUANTITY is one of "
                f"{', '.join(QUANTITIES)}, as in arrival=timestamp,prompt=prompt_tokens,output=completion_tokens",
                "columns",
            )
        column, colon, end = name.rpartition(":")
        if quantity in ("arrival", "duration") and colon and end in UNITS:
            name, units[quantity] = column, end
        names[quantity] = name
    return Columns(names, units)


def parse_filter(text: str) -> tuple[str, frozenset[str]]:
    """Column and allowed values of ``COLUMN=VALUE`` or ``COLUMN=VALUE,VALUE``."""
    column, equals, value = (part.strip() for part in text.partition("="))
    if not column or not equals:
        raise InvalidConfigError(
            f"filter: {short_text(text)!r} is not allowed: it must be COLUMN=VALUE, as in model=llama", "filter"
        )
    # A value may itself contain a comma.
    return column, frozenset({value, *(part.strip() for part in value.split(","))})


def find_columns(source: Source, available: Iterable[str], given: Columns | None = None) -> Columns:
    """Column of each quantity: as given, else by its usual names. Raises :class:`DataFormatError` if one is missing.

    ``available`` are the columns of a table, or the paths (``usage.prompt_tokens``) of the fields of JSON records.
    """
    there = list(available)
    given_names = {} if given is None else given.names
    names = dict(given_names)
    asked = [("filter", column) for column, _ in source.only]
    for quantity, name in [*names.items(), *asked]:
        if name not in there:
            raise source.wrong(f"no column {name!r} for {quantity}; there are {_listed(there)}", name)
    times: list[str] = []
    for quantity in QUANTITIES:
        if quantity not in names and (found := _usual(quantity, there)):
            names[quantity] = found[0]
            times = found if quantity == "arrival" else times
    if "duration" in names and ("arrival" not in names or times):
        times += _usual("end", there)
        if "duration" in given_names:
            times = list(filter(is_end, times)) or times  # whoever names the duration means the time of the end
        names.update(arrival=times[0]) if times else None
    elif "duration" not in given_names:
        names.pop("duration", None)
    if "duration" in given_names and "arrival" not in given_names and not any(map(is_end, times)):
        at = short_text(names.get("arrival", "COLUMN"))
        raise source.wrong(
            f"duration={short_text(names['duration'])} counts only beside the time of the end of requests: name its "
            f"column too, such as arrival={at}, or leave duration out",
            names["duration"],
        )
    missing = [q for q in REQUIRED if q not in names]
    if missing and any(_VLLM_LINE.match(name) for name in there):
        raise source.wrong(
            "is the text that vLLM prints, which does not tell each request's output tokens; take vLLM's OpenTelemetry "
            "traces, or the log of a gateway such as LiteLLM"
        )
    if missing and any(_ACCESS_LINE.search(name) for name in there):
        raise source.wrong(
            "is a web server's access log, a line of text for each request, without token counts; let it write JSON "
            "(nginx: log_format with escape=json) with msec, request_time, prompt_tokens and completion_tokens, or "
            "take the log of a gateway such as LiteLLM"
        )
    if missing and there and all(_NUMBER.fullmatch(name) for name in there):
        raise source.wrong(
            "begins with numbers, not with the columns' names; put them in a line before, such as "
            "arrival_s,prompt_tokens,output_tokens"
        )
    if missing:
        raise source.wrong(
            f"no column with a usual name for {' and '.join(missing)}; there are {_listed(there)}; name "
            f"{'it' if len(missing) == 1 else 'them'} with --columns {','.join(f'{q}=COLUMN' for q in missing)}"
        )
    if twice := [name for name in (*names.values(), *times, *(name for _, name in asked)) if there.count(name) > 1]:
        raise source.wrong(f"has the column {short_text(twice[0])!r} twice: rename or remove one", twice[0])
    return Columns(names, given.units if given is not None else {}, tuple(times))


def plain(name: str) -> str:
    """A name without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _usual(quantity: str, there: list[str]) -> list[str]:
    """Columns with a usual name, the most reliable first; of several, the least nested one."""
    usual = {plain(name): rank for rank, name in enumerate(USUAL_NAMES[quantity])}
    # Fields may lie inside nested objects, but there a status, id, model or priority is that of something else.
    nested = quantity not in ("status", "id", "model", "priority")
    found = []
    for place, name in enumerate(there):
        whole, last = plain(name), plain(name.rpartition(".")[2])
        if (rank := usual.get(whole, usual.get(last) if nested else None)) is not None:
            found.append((name.count("."), rank, place, name))
    # Rank comes first: `usage.prompt_tokens` is more reliable than a top-level `prompt`, which may be text.
    return [f[3] for f in sorted(found, key=lambda f: (f[1], f[0], f[2]))]


def _listed(names: list[str]) -> str:
    return short_text(", ".join(names), 300) if names else "none"


def table_format(source: Source, format: str, there: list[str], given: Columns | None) -> tuple[Format, Columns]:
    """Format and columns of a table: a known format if its columns are present, else columns by their usual names."""
    if set(there) & {"Metric", "Benchmark", "Run Info"} and not {plain(c) for c in there} & {"timestamp"}:
        raise source.wrong("holds summaries, not requests; give the tool's per-request file")
    for known in FORMATS:
        columns = parse_columns(known.columns).present(there)
        told = given is None and not known.told_by and set(REQUIRED) <= set(columns.names)
        if known.name == format or (format == "auto" and told):
            return known, find_columns(source, there, given or columns)
    if format not in ("auto", TABLE.name):
        raise source.wrong(f"is a table, which {format} is not; leave --format out")
    return TABLE, find_columns(source, there, given)


def csv_header(source: Source) -> tuple[int, str, list[str]]:
    """Lines before the header of a table, its separator, and the names in it."""
    header = next(line for line in source.lines() if line.strip())
    separator = max(",;\t|", key=header.count)
    before = 0
    names: list[str] = []
    for names in csv.reader(source.lines(), delimiter=separator, skipinitialspace=True):
        check_names(source, names)
        if any(names):
            break
        before = source.line
    source.line = 0
    return before, separator, [name.strip() for name in names]


def file_name(name: str | None) -> str:
    """Name of an uploaded file for error messages."""
    return short_text(Path(name or "log.csv").name)


def check_table(name: str, content: str, columns: str | None = None, only: str | None = None) -> None:
    """Refuse a table whose header lacks a column, without pandas.

    The error is that of :func:`ops.log.reader.import_log`. Only what is plain is judged: JSON, quoted names, names that
    are missing and longer headers are left to the reader.
    """
    chosen = [] if only is None else [parse_filter(only)]
    source = Source(Path(name), content=content[:HEADER_CHARS], only=chosen)
    with source.reading():
        line = next((line for line in source.lines() if line.strip()), "")
        whole = len(content) <= HEADER_CHARS or line.endswith(("\n", "\r"))
        if not whole or not line.strip() or line.strip()[0] in "{[" or '"' in line:
            return
        there = csv_header(source)[2]
        if all(there):
            table_format(source, "auto", there, None if columns is None else parse_columns(columns))


def check_names(source: Source, names: Collection[str], before: str = "") -> None:
    """Refuse too many columns or fields, and names that are too long."""
    if len(names) > MAX_COLUMNS:
        raise source.wrong(f"has more than {MAX_COLUMNS:,} columns or fields: this is not a request log")
    if names and len(before) + max(map(len, names)) > MAX_NAME_CHARS:
        raise source.wrong(f"has a column or field whose name is longer than {MAX_NAME_CHARS:,} characters")
