"""Strict messages: each error states the path, the value found there and what is allowed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import Field, model_validator

from inferencegym.errors import MISSING, short_repr
from inferencegym.messages import CHOICE, WHOLE, Allowed, FieldError, Message, parse_json, read, words


class Circle(Message):
    kind: Literal["circle"]
    radius: Annotated[float, Field(gt=0, le=10)]


class Box(Message):
    kind: Literal["box"]
    sides: Annotated[list[Annotated[float, Field(ge=1)]], Field(min_length=2, max_length=2)]


class Range(Message):
    low: int = 0
    high: int = 9

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise FieldError("low", float(self.low), f"at most high, which is {self.high}")
        return self


class Drawing(Message):
    name: str = ""
    copies: Annotated[int | None, Field(ge=1, le=9), WHOLE] = None
    tier: Annotated[Literal[0, 1, 2], CHOICE] = 0
    sizes: float | list[Annotated[float, Allowed("a size")]] = 1.0
    weights: dict[str, float] = Field({})
    shape: Annotated[Circle | Box, Field(discriminator="kind")] | None = None
    ranges: list[Range] = Field([])
    scale: Annotated[float, Allowed("a scale")] | None = None


class Refused(Exception):
    """The errors with which a test's messages and texts are refused."""


def refusal(field: str, value: object, allowed: str) -> Refused:
    return Refused(f"{field}={'missing' if value is MISSING else repr(value)}: {allowed}")


def refused(value: object, **options: Any) -> str:
    with pytest.raises(Refused) as caught:
        read(Drawing, value, refusal, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "body=[]: an object with the fields name, copies, tier, sizes, weights, shape, ranges"),
        ({"nam": 1}, "nam=1: did you mean name? The fields are name, copies"),
        ({3: 1}, "3=3: the fields are name, copies"),
        ({"copies": 0}, "copies=0: an integer from 1 to 9"),
        ({"copies": 2.5}, "copies=2.5: an integer from 1 to 9"),
        ({"tier": True}, "tier=True: one of 0, 1, 2"),
        ({"scale": "x"}, "scale='x': a scale"),
        # of a union, the branch that matched furthest
        ({"sizes": "x"}, "sizes='x': a number or an array"),
        ({"sizes": [1, "x"]}, "sizes[1]='x': a size"),
        ({"sizes": math.nan}, "sizes=nan: a number or an array"),
        ({"weights": {"ink": "x"}}, "weights.ink='x': a number"),
        # a union with a discriminating field
        ({"shape": 3}, "shape=3: an object whose kind is one of box, circle"),
        ({"shape": {"radius": 1}}, "shape={'radius': 1}: an object whose kind is one of box, circle"),
        ({"shape": {"kind": "blob"}}, "shape.kind='blob': one of circle, box"),
        ({"shape": {"kind": "circle"}}, "shape.radius=missing: a number above 0, at most 10"),
        ({"shape": {"kind": "box", "side": 1}}, "shape.side=1: did you mean sides? The fields are kind"),
        ({"shape": {"kind": "box", "sides": [1]}}, "shape.sides=[1]: an array of 2, each a number of at least 1"),
        ({"shape": {"kind": "box", "sides": [1, 0]}}, "shape.sides[1]=0: a number of at least 1"),
        # Fields that do not fit together
        ({"ranges": [{}, {"low": 12}]}, "ranges[1].low=12: at most high, which is 9"),
        ({"ranges": [{}, 5]}, "ranges[1]=5: an object with the fields low, high"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_by_path_value_and_what_is_allowed(value: object, said: str) -> None:
    assert refused(value).startswith(said)


def test_the_path_follows_the_name_of_the_whole() -> None:
    assert refused({"copies": 0}, at="body.drawing").startswith("body.drawing.copies=0")
    assert refused(7, at="drawing").startswith("drawing=7: an object with the fields")


def test_a_message_that_was_read_already_is_taken_as_it_is() -> None:
    drawing = Drawing(copies=2)
    assert read(Drawing, drawing, refusal) is drawing


def test_numbers_without_a_fraction_are_integers() -> None:
    assert repr(read(Drawing, {"copies": 2.0}, refusal).copies) == "2"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "number"}, "a number"),
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 10}, "an integer from 1 to 9"),
        ({"type": "integer", "minimum": 1, "maximum": 10}, "an integer from 1 to 10"),
        ({"type": "integer", "minimum": 1, "maximum": 1_000_000}, "an integer from 1 to 1000000"),
        ({"type": "number", "minimum": 0.25, "maximum": 8.0}, "a number from 0.25 to 8"),
        ({"type": "number", "minimum": 1, "maximum": 10}, "a number from 1 to 10"),
        ({"type": "number", "minimum": 1}, "a number of at least 1"),
        ({"type": "number", "maximum": 10}, "a number of at most 10"),
        ({"type": "number", "exclusiveMinimum": 0}, "a number above 0"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 10}, "a number above 0, at most 10"),
    ],
)
def test_a_number_is_told_by_its_range(schema: dict[str, Any], said: str) -> None:
    assert words(schema, {}) == said


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array"}, "an array"),
        ({"type": "array", "minItems": 1, "items": {"type": "string"}}, "an array of at least 1, each a text"),
        ({"type": "array", "maxItems": 4}, "an array of at most 4"),
        ({"type": "array", "minItems": 1, "maxItems": 4}, "an array of 1 to 4"),
        ({"type": "array", "minItems": 3, "maxItems": 3, "items": {"enum": [1, 2]}}, "an array of 3, each one of 1, 2"),
    ],
)  # fmt: skip
def test_an_array_is_told_by_its_length_and_its_entries(schema: dict[str, Any], said: str) -> None:
    assert words(schema, {}) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON: "),
        ('{"a": 1, "a": 2}', "the key 'a' is repeated in one object"),
        ("NaN", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("[" * 100_000, "nested too deep"),
        ("1" * 5000, "an integer has more than 4,300 digits"),
        (b"\xff", "not JSON: "),
    ],
)
def test_json_that_is_not_strict_is_refused(text: str | bytes, said: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_json(text, Refused)
    assert str(caught.value).startswith(said)


def test_infinity_may_be_left_to_the_message_which_names_the_field() -> None:
    value = parse_json('{"sizes": -Infinity}', Refused, finite=False)
    assert refused(value).startswith("sizes=-inf")


def test_a_constant_is_told_as_json_writes_it() -> None:
    assert [words({"const": value}, {}) for value in ("a", 1, None)] == ['"a"', "1", "null"]


def test_a_value_is_told_to_a_depth_of_three_levels_within_it() -> None:
    assert short_repr([[["shown"]]]) == "[[['shown']]]"
    assert short_repr([[[["deeper"]]]]) == "[[[[...]]]]"


def test_a_long_value_is_told_by_its_first_forty_parts_or_two_hundred_characters() -> None:
    forty = list(range(40))
    assert short_repr(forty, 1000) == repr(forty)
    assert short_repr([*forty, 40], 1000) == f"{repr(forty)[:-1]}, ...]"
    assert short_repr((*forty, 40), 1000) == f"{repr(tuple(forty))[:-1]}, ...)"
    assert short_repr(dict.fromkeys(range(41)), 1000).endswith("39: None, ...}")
    assert [len(short_repr("x" * n, 1000)) for n in (198, 199, 10**6)] == [200, 200, 200]
    assert [len(short_repr(10**n, 1000)) for n in (199, 200)] == [200, 200]
