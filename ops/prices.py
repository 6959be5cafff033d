"""GPU prices from the user's file or request; there are no default prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from inferencegym.errors import DataFormatError, InvalidConfigError, did_you_mean, not_allowed, short_repr
from inferencegym.messages import Message, parse_json, read
from simulator.hardware.catalogue import cards, cards_named, short_name


class PriceList(Message):
    """Prices as a file or a request states them."""

    currency: Annotated[str, Field(min_length=1, max_length=20)]
    per_gpu_hour: dict[str, Annotated[float, Field(gt=0, le=1e6)]]
    source: str | None = None
    date: str | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """Price per hour of one GPU of each card, in one currency; a card may have any spelling (``H100-SXM``)."""

    currency: str
    per_gpu_hour: Mapping[str, float]
    source: str = ""

    def gpu_hour(self, card: str) -> float:
        """Price per hour of a card. Raises :class:`InvalidConfigError` if the list lacks it."""
        if (price := self.find(card)) is None:
            raise InvalidConfigError(
                f"prices: no price for {card!r}; the list has {', '.join(self.per_gpu_hour) or 'none'}", "prices"
            )
        return price

    def find(self, card: str) -> float | None:
        """Price per hour of a card, by the spelling that means the fewest cards; None if the list lacks it."""
        listed = {_cards_of(name): price for name, price in self.per_gpu_hour.items()}
        return min(
            ((len(names), price) for names, price in listed.items() if card.lower() in names), default=(0, None)
        )[1]


def _cards_of(name: str) -> tuple[str, ...]:
    """Cards of the catalogue that a name means, or the user's own."""
    return cards_named(name) or (name.lower(),)


def read_prices(value: object, own: Iterable[str] = ()) -> Prices:
    """Prices from a JSON value, of cards of the catalogue and of the user's ``own`` engines.

    Raises :class:`InvalidConfigError` naming the field.
    """

    def refuse(field: str, value: object, allowed: str) -> InvalidConfigError:
        return InvalidConfigError(not_allowed(field, value, allowed), field)

    stated = read(PriceList, value, refuse, "prices")
    names = [_cards_of(name) for name in stated.per_gpu_hour]
    known = list(dict.fromkeys((*map(short_name, cards()), *cards(), *own)))
    for name in stated.per_gpu_hour:
        if names.count(_cards_of(name)) > 1:
            raise InvalidConfigError(f"prices: the price of {name} is given twice", "prices")
        if not cards_named(name) and name.lower() not in map(str.lower, known):
            told = did_you_mean(name, known, f"cards are {', '.join(known)}")
            raise InvalidConfigError(f"prices: there is no card {short_repr(name)}: {told}", "prices")
    told = ", ".join(filter(None, (stated.source, stated.date)))
    return Prices(stated.currency, stated.per_gpu_hour, told)


def load_prices(path: Path, own: Iterable[str] = ()) -> Prices:
    """Prices from a JSON file: ``{"currency": "USD", "per_gpu_hour": {"a100-40gb": 1.5}}``, and source and date."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFormatError(f"{path}: cannot be read ({error})") from error
    try:
        return read_prices(parse_json(text, InvalidConfigError), own)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{path}: {error}", error.field) from None
