"""Text form of errors for OpenEnv's WebSocket, whose error frame has a message and no field for a code of ours."""

from __future__ import annotations

from typing import Final

_CODE_MARK: Final = " [inferencegym:"


def write_error(message: str, code: str, next_step: str) -> str:
    """An error as one text: message, what to do next, and the code at the end."""
    return f"{message}; {next_step}{_CODE_MARK}{code}]"


def read_error(text: str) -> tuple[str, str] | None:
    """Message and code of a text that :func:`write_error` made; None for any other text."""
    head, mark, tail = text.rpartition(_CODE_MARK)
    code, bracket, _ = tail.partition("]")
    return (head, code) if mark and bracket else None
