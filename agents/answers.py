"""Reader of what language models answer: the last complete JSON object outside of their thinking."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from inferencegym.errors import InvalidActionError
from inferencegym.models import ACTION_FIELDS, REPLICAS, QuantTier, ServeAction

_THOUGHTS: Final = re.compile(
    # Qwen, DeepSeek and others; Claude's <thinking>; Mistral's [THINK]. A block that never ends runs to the end: the
    # answer was cut off before it began.
    r"<(think|thinking|thought|reasoning)>.*?(?:</\1>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_LATE_END: Final = re.compile(r".*(?:</(?:think|thinking|thought|reasoning)>|\[/THINK\])", re.DOTALL | re.IGNORECASE)
"""A block whose beginning the chat template wrote: only its end is in the answer."""
_FINAL: Final = re.compile(r"<\|channel\|>\s*final.*?<\|message\|>(.*)|assistantfinal(.*)", re.DOTALL)
"""The last channel of gpt-oss, with its marks or with the marks removed by the tokenizer."""
_ANALYSIS: Final = re.compile(r"<\|channel\|>\s*analysis|\Aanalysis", re.IGNORECASE)
_WRAPPERS: Final = ("action", "arguments", "parameters")


def spoken(text: str) -> str:
    """The text without what the model thought before it answered."""
    final = _FINAL.search(text)
    if final is not None:
        return final[1] or final[2] or ""
    if _ANALYSIS.search(text):
        return ""  # gpt-oss was cut off while it thought
    return _LATE_END.sub("", _THOUGHTS.sub("", text))


def last_object(text: object) -> dict[str, Any] | None:
    """The last complete JSON object of an answer, in prose or in fences; None without one.

    Single quotes, trailing commas and Python's ``True`` are forgiven. An object wrapped as ``{"action": {...}}`` or as
    a tool call (``{"name": ..., "arguments": {...}}``) is unwrapped.
    """
    if isinstance(text, Mapping):
        return _unwrapped(dict(text))
    said, at, last = spoken(str(text)), 0, None
    while (at := said.find("{", at)) >= 0:
        found, end = _object_at(said, at)
        if found is not None:
            last = found
        at = end
    return None if last is None else _unwrapped(last)


def read_knobs(answer: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs after an answer: those that it names, and ``knobs`` for the others.

    Keys that are no knobs (``"reason"``) are left aside, values may be written as models write them (``"64"``,
    ``"int8"``). Raises :class:`InvalidActionError` for a value that is not allowed, and for an answer with keys of
    which none is a knob.
    """
    named = {name: _plain(name, value) for name, value in answer.items() if name in (*ACTION_FIELDS, REPLICAS.name)}
    if answer and not named:
        raise InvalidActionError("action", dict(answer), "an object with " + ", ".join(ACTION_FIELDS))
    return ServeAction.from_dict({**knobs, **named}).to_dict()


def _object_at(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """The object that begins here, and where to look for the next one."""
    try:
        found, end = json.JSONDecoder().raw_decode(text, start)
        return found, end
    except (ValueError, RecursionError):
        end = _closing(text, start)
    part = re.sub(r",\s*([}\]])", r"\1", text[start:end])
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(part)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict):
            return found, end
    return None, start + 1


def _closing(text: str, start: int) -> int:
    """Place after the brace that closes the one at ``start``; the end of the text if none does."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at + 1
    return len(text)


def _unwrapped(found: dict[str, Any]) -> dict[str, Any]:
    for key in _WRAPPERS:
        inner = found.get(key)
        if isinstance(inner, str) and inner.lstrip().startswith("{"):
            inner = last_object(inner)
        if isinstance(inner, Mapping):
            return _unwrapped(dict(inner))
    return found


def _plain(name: str, value: object) -> object:
    """A value as a model may write it: ``"64"``, ``"true"``, ``"int8"``."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if name == "quant_tier" and text.upper() in QuantTier.__members__:
        return text.upper()
    try:
        return json.loads(text.lower())
    except ValueError:
        return value
