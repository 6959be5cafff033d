"""GPU prices from the user's file or request; there are no default prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from inferencegym.errors import DataFormatError, InvalidConfigError, not_allowed
from inferencegym.messages import Message, parse_json, read
from simulator.hardware.catalogue import short_name


class PriceList(Message):
    """Prices as a file or a request states them."""

    currency: Annotated[str, Field(min_length=1, max_length=20)]
    per_gpu_hour: dict[str, Annotated[float, Field(gt=0, le=1e6)]]
    source: str | None = None
    date: str | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """Price per hour of one GPU of each card, in one currency; a card may have its short name (``h100``)."""

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
        """Price per hour of a card; None if the list lacks it."""
        return self.per_gpu_hour.get(card, self.per_gpu_hour.get(short_name(card)))


def read_prices(value: object) -> Prices:
    """Prices from a JSON value. Raises :class:`InvalidConfigError` naming the field."""

    def refuse(field: str, value: object, allowed: str) -> InvalidConfigError:
        return InvalidConfigError(not_allowed(field, value, allowed), field)

    stated = read(PriceList, value, refuse, "prices")
    told = ", ".join(filter(None, (stated.source, stated.date)))
    return Prices(stated.currency, stated.per_gpu_hour, told)


def load_prices(path: Path) -> Prices:
    """Prices from a JSON file: ``{"currency": "USD", "per_gpu_hour": {"a100-40gb": 1.5}}``, and source and date."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFormatError(f"{path}: cannot be read ({error})") from error
    return read_prices(parse_json(text, InvalidConfigError))
