"""Strict pydantic models for JSON that comes from outside: request bodies, actions, task files.

:class:`Message` refuses unknown fields, wrong types, NaN and infinity. :func:`read` turns pydantic's errors into one
sentence of this package: which field, what was found, what is allowed, and for an unknown field the one that was
probably meant. JSON texts are read by :func:`parse_json`, which also refuses keys that are repeated in one object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, Final, Protocol, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

M = TypeVar("M", bound=BaseModel)

MAX_DEPTH: Final = 64
"""Deepest nesting of objects and arrays in a JSON text."""


class Message(BaseModel):
    """Base of all messages: strict types, no unknown fields, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Refusal(Protocol):
    """Makes the exception for a field whose value is not allowed."""

    def __call__(self, field: str, value: object, allowed: str) -> Exception: ...


class Allowed(str):
    """Annotation that says in words what a field must be, where its JSON schema cannot say it."""

    __slots__ = ()


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


WHOLE: Final = BeforeValidator(_whole)
"""Annotation of integers, behind their bounds. JSON has one kind of number: 42.0 is 42."""


def _no_flag(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("literal_error", "a boolean is no number")
    return _whole(value)


CHOICE: Final = BeforeValidator(_no_flag)
"""Annotation of literal numbers: to Python, true is 1."""


def read(model: type[M], value: object, refusal: Refusal, at: str = "") -> M:
    """``value`` as a message. Raises what ``refusal`` makes of the first field at fault; ``at`` precedes its path."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise explain(model, error, refusal, at) from None


def explain(model: type[BaseModel], error: ValidationError, refusal: Refusal, at: str = "") -> Exception:
    """The exception for a pydantic error: unknown fields first, since a misspelt field is also a missing one."""
    problems = error.errors(include_url=False)
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    loc, found = problem["loc"], problem["input"]
    if problem["type"] == "extra_forbidden":
        known = list(_model_at(model, loc[:-1]).model_fields)
        return refusal(_path(at, loc), found, left_out(str(loc[-1]), known))
    if problem["type"] == "value_error":
        # Raised by a validator of ours, which says itself what is allowed.
        return refusal(_path(at, _known_part(model, loc)), found, str(problem["ctx"]["error"]))
    if problem["type"] == "missing":
        found = None
    path = _known_part(model, loc)
    if not path and not at:
        return refusal("body", found, allowed_object(model))
    return refusal(_path(at, path), found, _allowed(model, path))


def left_out(name: str, known: Sequence[str]) -> str:
    """What an unknown field must be: left out, with the known fields and the one that was probably meant."""
    near = get_close_matches(name[:80], known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"left out{meant}: the fields are {', '.join(known)}"


def allowed_object(model: type[BaseModel]) -> str:
    """What a message must be, in words."""
    return f"an object with the fields {', '.join(model.model_fields)}"


def plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of a model in one piece: definitions in their places, no generated titles, whole bounds as integers.

    pydantic and FastAPI write bounds as doubles, and 2^63 as 9.223372036854776e+18, which is another number.
    """
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if not isinstance(value, dict):
            return int(value) if isinstance(value, float) and value.is_integer() else value
        if "$ref" in value:
            return {**plain(definitions[value["$ref"].rsplit("/", 1)[1]]), **plain(_without(value, "$ref"))}
        return {key: plain(item) for key, item in value.items() if key != "title" or not isinstance(item, str)}

    made: dict[str, Any] = plain(schema)
    return made


def _without(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != key}


# ---------------------------------------------------------------- paths and words


def _path(at: str, loc: Sequence[int | str]) -> str:
    text = at
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _inner_models(annotation: Any) -> list[type[BaseModel]]:
    """The message classes that an annotation such as ``list[Row] | None`` may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _inner_models(part)]


def _fields_along(model: type[BaseModel], loc: Sequence[int | str]) -> list[tuple[int, FieldInfo | None]]:
    """Position in ``loc`` and field of each part that names one; pydantic adds names of unions' branches, left out."""
    models, found = [model], list[tuple[int, FieldInfo | None]]()
    for at, part in enumerate(loc):
        if isinstance(part, int):
            found.append((at, None))
            continue
        for one in models:
            field = one.model_fields.get(part)
            if field is not None:
                found.append((at, field))
                models = _inner_models(field.annotation)
                break
    return found


def _known_part(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[int | str, ...]:
    return tuple(loc[at] for at, _ in _fields_along(model, loc))


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The message class of the object at ``loc``."""
    for _, field in _fields_along(model, loc):
        inner = [] if field is None else _inner_models(field.annotation)
        if inner:
            names = [part for part in loc if isinstance(part, str)]
            model = next((one for one in inner if one.__name__ in names), inner[0])
    return model


@lru_cache(maxsize=1024)
def _allowed(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    """What the value at ``path`` must be, in words."""
    if not path:
        return allowed_object(model)
    fields = [field for _, field in _fields_along(model, path) if field is not None]
    field = fields[-1]
    annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    note = None if isinstance(path[-1], int) else _note(annotation)
    if note is not None:
        return note
    schema = TypeAdapter(annotation).json_schema()
    if isinstance(path[-1], int):
        schema = next((s for s in _branches(schema) if "items" in s), schema).get("items", schema)
    return words(schema, schema.get("$defs", {}))


def _note(annotation: Any) -> str | None:
    """The words of :class:`Allowed` that an annotation carries, itself or in a branch of a union."""
    for note in getattr(annotation, "__metadata__", ()):
        if isinstance(note, Allowed):
            return str(note)
    return next((found for part in get_args(annotation) if (found := _note(part)) is not None), None)


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(schema.get("anyOf") or schema.get("oneOf") or [schema])


def words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema in words that follow "it must be"."""
    if "$ref" in schema:
        return words(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(str(one) for one in schema["enum"])
    branches = _branches(schema)
    if len(branches) > 1:
        return " or ".join(words(one, definitions) for one in branches if one.get("type") != "null")
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _number_words("an integer" if kind == "integer" else "a number", schema)
    if kind == "array":
        low, high = schema.get("minItems"), schema.get("maxItems")
        if low is not None and high is not None:
            return f"an array of {low}" if low == high else f"an array of {low} to {high} entries"
        return "an array" if high is None else f"an array of at most {high} entries"
    if kind == "object":
        fields = ", ".join(schema.get("properties", ()))
        return f"an object with the fields {fields}" if fields else "an object"
    if kind == "string":
        return "a text of at least one character" if schema.get("minLength") else "a text"
    return {"boolean": "true or false", "null": "null"}.get(str(kind), "a JSON value")


def _number_words(kind: str, schema: Mapping[str, Any]) -> str:
    low, high, below = (schema.get(key) for key in ("minimum", "maximum", "exclusiveMaximum"))
    if high is None and below is not None and kind == "an integer":
        high = below - 1
    if schema.get("exclusiveMinimum") is not None:
        return f"{kind} above {schema['exclusiveMinimum']:g}" + (f", at most {high:g}" if high is not None else "")
    if low is not None and high is not None:
        return f"{kind} from {_number(low)} to {_number(high)}"
    if low is not None:
        return f"{kind} of at least {_number(low)}"
    return kind if high is None else f"{kind} of at most {_number(high)}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


# ---------------------------------------------------------------- JSON texts


def parse_json(text: str | bytes, refusal: type[Exception]) -> Any:
    """Strict JSON: no NaN or infinity, no key repeated in one object, no integer too long to read.

    Raises ``refusal`` with a sentence that follows the name of the text.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise refusal(f"the key {again[:80]!r} is repeated in one object")
        return found

    def constant(name: str) -> float:
        raise refusal(f"{name} is no JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise refusal("nested too deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise refusal(f"not JSON: {error}") from error
    except refusal:
        raise
    except ValueError as error:
        limit = sys.get_int_max_str_digits()
        raise refusal(f"an integer has more than {limit:,} digits, which no field may have") from error
