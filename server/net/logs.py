"""Structured logs: one JSON object a line on standard error."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import Any

import orjson

from inferencegym.errors import MAX_MESSAGE_CHARS, short_text


def traceback_text(error: BaseException) -> str:
    """Traceback for the log, with lines no longer than our own errors: other errors quote values of any length."""
    return "".join(short_text(line, MAX_MESSAGE_CHARS) for line in traceback.format_exception(error))


class JsonFormatter(logging.Formatter):
    """Formats the records of the standard logging module."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": short_text(record.getMessage(), MAX_MESSAGE_CHARS),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = traceback_text(record.exc_info[1])
        return orjson.dumps(line).decode()


def write_line(entry: dict[str, Any]) -> None:
    """Write one line; if it cannot be written (a full disk, a closed pipe), it is lost, and requests continue."""
    with contextlib.suppress(OSError):
        sys.stderr.write(orjson.dumps(entry).decode() + "\n")
        sys.stderr.flush()


def logging_config() -> dict[str, Any]:
    """Configuration for :func:`logging.config.dictConfig`: everything as JSON on standard error."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}},
        "root": {"level": "INFO", "handlers": ["stderr"]},
        # Requests are logged by the server's own middleware, with their session and duration.
        "loggers": {name: {"level": "WARNING"} for name in ("uvicorn.access", "uvicorn.websocket")},
    }
