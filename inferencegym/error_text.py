"""Text form of errors for OpenEnv's WebSocket, whose error frame has a message but no error code."""

from __future__ import annotations

from typing import Final

_CODE_MARK: Final = " [inferencegym:"


def write_error(message: str, code: str, next_step: str) -> str:
    """Encode an error as one text: message, what to do next, and the code at the end."""
    return f"{message}; {next_step}{_CODE_MARK}{code}]"


def read_error(text: str) -> tuple[str, str] | None:
    """Decode a text of :func:`write_error` into message and code; None for any other text."""
    head, mark, tail = text.rpartition(_CODE_MARK)
    code, bracket, _ = tail.partition("]")
    return (head, code) if mark and bracket else None
