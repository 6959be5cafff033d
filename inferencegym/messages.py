"""Strict pydantic models for JSON that comes from outside: request bodies, actions, task files.

:class:`Message` refuses unknown fields, wrong types, NaN and infinity. :func:`read` turns pydantic's errors into one
sentence: which field, what was found, what is allowed, and for an unknown field the known one that was probably meant.
JSON texts are read by :func:`parse_json`, which also refuses keys that are repeated in one object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Final, Protocol, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from inferencegym.errors import MISSING, UnknownField, did_you_mean, not_allowed, short_repr, short_text

M = TypeVar("M", bound=BaseModel)

MAX_DEPTH: Final = 64
"""Deepest nesting of objects and arrays in a JSON text."""

MANY_KEYS: Final = 64
"""Objects with more keys are searched for an unknown field before pydantic reads them."""


class Message(BaseModel):
    """Base of all messages: strict types, no unknown fields, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Refusal(Protocol):
    """Function that makes the exception for a field whose value is not allowed."""

    def __call__(self, field: str, value: object, allowed: str) -> Exception: ...


class Allowed(str):
    """Annotation with the words for what a field must be, where its JSON schema cannot express it."""

    __slots__ = ()


class FieldError(ValueError):
    """Error in a validator of a whole message: names the invalid field, its value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = short_text(field)
        self.value = _whole(value)
        self.allowed = allowed
        super().__init__(not_allowed(self.field, self.value, allowed))


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


WHOLE: Final = BeforeValidator(_whole)
"""Annotation of integers, written after their bounds: 42.0 is accepted as 42, since JSON has one kind of number."""


def _no_flag(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("literal_error", "a boolean is not a number")
    return _whole(value)


CHOICE: Final = BeforeValidator(_no_flag)
"""Annotation of literal numbers, which refuses booleans: Python counts True as 1."""


def read(model: type[M], value: object, refusal: Refusal, at: str = "", whole: str = "body") -> M:
    """Validate ``value`` as a message of class ``model``.

    Raises the exception that ``refusal`` makes for the first invalid field; ``at`` is put before the field's path.
    ``whole`` is the field's name if the value itself is not an object.
    """
    refuse_many_unknown(model, value, refusal, at)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise explain(model, error.errors(include_url=False), refusal, at, whole) from None


def refuse_many_unknown(model: type[BaseModel], value: object, refusal: Refusal, at: str = "") -> None:
    """Refuse an object of very many keys at the first unknown one.

    Pydantic would describe them all, which takes seconds.
    """
    if isinstance(value, dict) and len(value) > MANY_KEYS and model.model_config.get("extra") == "forbid":
        fields = model.model_fields
        unknown = next((name for name in value if name not in fields), None)
        if unknown is not None:
            name = short_text(str(unknown))
            raise refusal(_path(at, (name,)), value[unknown], unknown_field(name, list(fields)))


def explain(
    model: type[BaseModel],
    problems: Sequence[ErrorDetails],
    refusal: Refusal,
    at: str = "",
    whole: str = "body",
) -> Exception:
    """The exception for pydantic's errors; arguments as for :func:`read`.

    Unknown fields come first, since a misspelt field is also a missing one.
    """
    problem = next((one for one in problems if one["type"] in _UNKNOWN), None) or _sharpest(model, problems)
    loc = tuple(short_text(part) if isinstance(part, str) else part for part in problem["loc"])
    found, context = problem["input"], problem.get("ctx", {})
    if problem["type"] in _UNKNOWN:
        known = list(_model_at(model, loc[:-1]).model_fields)
        name = str(loc[-1])
        return refusal(_path(at, (*_known_part(model, loc[:-1]), name)), found, unknown_field(name, known))
    path = _known_part(model, loc)
    cause = context.get("error")
    if isinstance(cause, FieldError):
        return refusal(_path(_path(at, path), (cause.field,)), cause.value, cause.allowed)
    if isinstance(cause, Exception):
        # Raised by a validator of one field, whose message says what is allowed.
        return refusal(_path(at, path), found, str(cause))
    if problem["type"] == "union_tag_invalid":
        key = str(context["discriminator"]).strip("'")
        return refusal(_path(at, (*path, key)), found[key], _allowed_tags(context["expected_tags"]))
    if problem["type"] == "missing":
        found = MISSING
    if not path and not at:
        return refusal(whole, found, allowed_object(model))
    return refusal(_path(at, path), found, allowed_words(model, loc))


_UNKNOWN: Final = ("extra_forbidden", "invalid_key")


def _sharpest(model: type[BaseModel], problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first error; if no branch of a union fits, the error of the branch that fits deepest."""
    path = _known_part(model, problems[0]["loc"])
    same = [one for one in problems if _known_part(model, one["loc"])[: len(path)] == path]
    return max(same, key=lambda one: len(_known_part(model, one["loc"])))


def _allowed_tags(tags: str) -> str:
    """Allowed tags of a union in words, from pydantic's list of them in quotes."""
    return "one of " + tags.replace("'", "")


def unknown_field(name: str, known: Sequence[str]) -> UnknownField:
    """Words for an unknown field: the known fields, and the one that was probably meant."""
    return UnknownField(did_you_mean(name, known, f"the fields are {', '.join(known)}"))


def allowed_object(model: type[BaseModel]) -> str:
    """Words for a message that must be an object: its fields."""
    return f"an object with the fields {', '.join(model.model_fields)}"


def plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of a model in one piece: definitions inlined, no generated titles, whole bounds as integers.

    pydantic and FastAPI write bounds as doubles, and 2^63 as 9.223372036854776e+18, which is another number.
    """
    schema = model.model_json_schema()
    made: dict[str, Any] = inlined(schema, schema.pop("$defs", {}))
    return made


def inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A JSON schema with its definitions in place of references, without generated titles, whole bounds as integers."""
    if isinstance(schema, list):
        return [inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return int(schema) if isinstance(schema, float) and schema.is_integer() else schema
    if "$ref" in schema:
        named = inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
        return {**named, **inlined(_without(schema, "$ref"), definitions)}
    return {
        key: inlined(item, definitions) for key, item in schema.items() if key != "title" or not isinstance(item, str)
    }


def _without(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != key}


# ---------------------------------------------------------------- paths and words


def _path(at: str, loc: Sequence[int | str]) -> str:
    text = at
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def inner_models(annotation: Any) -> list[type[BaseModel]]:
    """The message classes that an annotation such as ``list[Row] | None`` may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in inner_models(part)]


def _fields_along(model: type[BaseModel], loc: Sequence[int | str]) -> list[tuple[int, FieldInfo | None]]:
    """Split pydantic's ``loc``: position of each part that leads to a value, with its field.

    The field is None for indices of arrays and keys of dictionaries. Names of union branches, which pydantic adds to
    ``loc``, are skipped; the fields after one are those of its branch.
    """
    models, found = [model], list[tuple[int, FieldInfo | None]]()
    for at, part in enumerate(loc):
        field = found[-1][1] if found else None
        if isinstance(part, int) or (field is not None and get_origin(field.annotation) is dict):
            found.append((at, None))
            continue
        for one in models:
            field = one.model_fields.get(part)
            if field is not None:
                found.append((at, field))
                models = inner_models(field.annotation)
                break
        else:
            models = [one for one in models if part in _tags(one)] or models
    return found


def _known_part(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[int | str, ...]:
    return tuple(loc[at] for at, _ in _fields_along(model, loc))


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The message class of the object at ``loc``."""
    for _, field in _fields_along(model, loc):
        inner = [] if field is None else inner_models(field.annotation)
        if inner:
            model = next((one for one in inner if _tags(one) & set(loc)), inner[0])
    return model


def _tags(model: type[BaseModel]) -> set[int | str]:
    """Names of this branch of a union in pydantic's paths: its class name, or a literal text of its tag field."""
    texts = (get_args(field.annotation) for field in model.model_fields.values())
    return {model.__name__, *(text for found in texts for text in found if isinstance(text, str))}


@lru_cache(maxsize=1024)
def allowed_words(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Words for what the value at pydantic's ``loc`` must be."""
    along = _fields_along(model, loc)
    fields = [(at, field) for at, (_, field) in enumerate(along) if field is not None]
    if not fields:
        return allowed_object(model)
    last, field = fields[-1]
    annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    if field.discriminator is not None:
        annotation = Annotated[annotation, Field(discriminator=field.discriminator)]
    for _ in along[last + 1 :]:
        annotation = _entries(annotation)
    note = _note(annotation)
    if note is not None:
        return note
    schema = TypeAdapter(annotation).json_schema()
    return words(schema, schema.get("$defs", {}))


def _entries(annotation: Any) -> Any:
    """Annotation of the entries of an array or a dictionary, also within ``list[Row] | None``; None if it has none."""
    if get_origin(annotation) in (list, tuple, dict, Sequence):
        return next(part for part in reversed(get_args(annotation)) if part is not ...)
    return next((one for part in get_args(annotation) if (one := _entries(part)) is not None), None)


def _note(annotation: Any) -> str | None:
    """The words of :class:`Allowed` that an annotation carries, itself or in a branch of a union."""
    for note in getattr(annotation, "__metadata__", ()):
        if isinstance(note, Allowed):
            return str(note)
    branches = get_args(annotation) if get_origin(annotation) in (Annotated, Union, UnionType) else ()
    return next((found for part in branches if (found := _note(part)) is not None), None)


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
    if "discriminator" in schema:
        choice = schema["discriminator"]
        return f"an object whose {choice['propertyName']} is one of {', '.join(choice['mapping'])}"
    branches = _branches(schema)
    if len(branches) > 1:
        return " or ".join(words(one, definitions) for one in branches if one.get("type") != "null")
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _number_words("an integer" if kind == "integer" else "a number", schema)
    if kind == "array":
        return _array_words(schema, definitions)
    if kind == "object":
        fields = ", ".join(schema.get("properties", ()))
        return f"an object with the fields {fields}" if fields else "an object"
    if kind == "string":
        return "a text of at least one character" if schema.get("minLength") else "a text"
    return {"boolean": "true or false", "null": "null"}.get(str(kind), "a JSON value")


def _array_words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if high is None:
        count = f" of at least {low}" if low else ""
    else:
        count = f" of {high}" if low == high else f" of {low} to {high}" if low else f" of at most {high}"
    each = f", each {words(schema['items'], definitions)}" if schema.get("items") else ""
    return f"an array{count}{each}"


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


def parse_json(text: str | bytes, refusal: type[Exception], finite: bool = True) -> Any:
    """Parse strict JSON: no NaN or infinity, no key repeated in one object, no integer too long for Python.

    With ``finite=False`` NaN and infinity are read, so that message models can refuse them and name the field. Raises
    ``refusal`` with a text that callers put after the name of what they read.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise refusal(f"the key {short_repr(again)} is repeated in one object")
        return found

    def constant(name: str) -> float:
        if not finite:
            return float(name)
        raise refusal(f"{name} is not a JSON number")

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
