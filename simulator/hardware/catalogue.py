"""Catalogue of the shipped lookup tables by name, and of the systems and models for further tables.

``data/tables/index.json`` describes each table (``python -m scripts.build_catalogue`` writes it), so that a table is
read only when it is used. ``data/hardware.json`` lists the systems, models and precisions of aiconfigurator-core's
data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import InvalidConfigError, did_you_mean, short_repr
from inferencegym.tasks import DATA_DIR, table_entry, table_index

_PRECISIONS: Final = {
    "FP8": ("fp8", "fp8-dynamic"),
    "NVFP4": ("fp4", "nvfp4"),
    "MXFP4": ("mxfp4",),
    "INT8": ("int8", "w8a8", "quantized.w8a8", "gptq-int8"),
    "INT4": ("int4", "awq", "w4a16", "quantized.w4a16", "gptq-int4", "awq-int4"),
}
"""How names of checkpoints end, by precision."""
_PRECISION: Final = re.compile(rf"-({'|'.join(re.escape(n) for names in _PRECISIONS.values() for n in names)})$", re.I)
_NOT_OF_CARDS: Final = re.compile(r"nvidia|tesla|blackwell|server|edition|gpu|hbm\d?e?|sxm\d?|[^a-z0-9]")
"""What spellings of a card add to its name and memory."""
HARDWARE_FILE: Final = DATA_DIR / "hardware.json"


@cache
def hardware_data() -> dict[str, Any]:
    """Systems, models, precisions and shipped deployments as the data file states them."""
    loaded: dict[str, Any] = json.loads(HARDWARE_FILE.read_text(encoding="utf-8"))
    return loaded


def table_name(sha256: str) -> str | None:
    """Name of the table with this checksum; None for the default table and unknown ones."""
    names = list(table_index())
    return next((name for name in names[1:] if table_index()[name]["sha256"] == sha256), None)


def table_path(name: str) -> Path:
    """File of the table of this name; raises :class:`InvalidConfigError` listing the names."""
    return DATA_DIR / str(table_entry(name)["file"])


def models() -> tuple[str, ...]:
    """Models with shipped tables; each appears once, in its most common spelling."""
    return tuple({_letters(str(entry["model"])): str(entry["model"]) for entry in table_index().values()}.values())


def usual_name(model: str) -> str:
    """Spelling of a model in :func:`models`; unknown models are returned unchanged."""
    return next((name for name in models() if _same_model(name, model)), model)


def precision_named(model: str) -> str | None:
    """Precision of the checkpoint that a name states at its end, as ``Qwen/Qwen3-32B-FP8``; None if it states none."""
    found = _PRECISION.search(model.lower())
    return None if found is None else next(tier for tier, names in _PRECISIONS.items() if found[1] in names)


def precisions_named(model: str | None) -> list[str] | None:
    """The precisions that a model's name leaves to a plan: its own, or any (None)."""
    tier = precision_named(model or "")
    return None if tier is None else [tier]


def without_precision(model: str) -> str:
    """A model's name without the precision at its end."""
    return _PRECISION.sub("", model)


def context_tokens(model: str) -> int | None:
    """Longest request (prompt and answer, tokens) that an engine takes for this model; None for unknown models."""
    known = hardware_data()["context_tokens"]
    return next((known[name] for name in hardware_data()["models"] if _same_model(name, model)), None)


def checkpoint(model: str) -> str:
    """Repository of a model's checkpoint in 16 bits (or its own format); the name itself for unknown models."""
    return next((found for name, found in hardware_data()["models"].items() if _same_model(name, model)), model)


def cards() -> tuple[str, ...]:
    """Cards with shipped tables; prices are given per card."""
    return tuple(dict.fromkeys(str(entry["card"]) for entry in table_index().values()))


def short_name(card: str) -> str:
    """A card as people say it: ``h100`` for ``h100_sxm``, ``a100`` for ``a100-40gb``."""
    return re.sub(r"-(sxm|server|\d+gb)$", "", card.replace("_", "-"))


def cards_named(spelling: str) -> tuple[str, ...]:
    """Cards of the catalogue that a spelling means: ``h100``, ``H100-SXM``, ``NVIDIA H100 80GB HBM3``, ``A100-80G``.

    ``a100`` means all with that name, of any memory. None for other cards, and for other forms (``H100 PCIe``).
    """
    if spelling in cards():
        return (spelling,)
    asked = re.sub(r"(\d)g$", r"\1gb", _NOT_OF_CARDS.sub("", spelling.lower()))
    return tuple(card for card in cards() if asked in _card_keys(card))


def _card_keys(card: str) -> tuple[str, str]:
    """A card's name without and with its memory, as :func:`cards_named` compares them."""
    family = _NOT_OF_CARDS.sub("", short_name(card))
    memory = re.search(r"(\d+) ?gb", str(hardware_data()["systems"].get(card, card)).lower())
    assert memory is not None
    return family, f"{family}{memory[1]}gb"


def hardware_names() -> tuple[str, ...]:
    """Names that :func:`tables_named` accepts: tables, then cards and their short names, which stand for all tables.

    It accepts other spellings of cards (:func:`cards_named`), too.
    """
    return tuple(dict.fromkeys((*table_index(), *cards(), *map(short_name, cards()))))


def tables_named(hardware: Sequence[str] | None = None, model: str | None = None) -> tuple[str, ...]:
    """Names of the tables of one model, selected by the name of a table or a card in any spelling (None: all).

    ``model`` may be a checkpoint name (``meta-llama/Llama-3.1-8B-Instruct``); without it the hardware must have tables
    of exactly one model. Raises :class:`InvalidConfigError` listing the choices.
    """
    index = table_index()
    if unknown := [name for name in hardware or () if not tables_meant(name)]:
        known = ", ".join(dict.fromkeys(map(short_name, cards())))
        choose = f"choose a card ({known}) or a table of `inferencegym hardware`"
        raise InvalidConfigError(
            f"hardware={', '.join(map(short_repr, unknown))} is not in the catalogue: "
            f"{did_you_mean(_NOT_OF_CARDS.sub('', unknown[0].lower()), hardware_names(), choose)}",
            "hardware",
        )
    wanted = [name for name in index if hardware is None or any(name in tables_meant(each) for each in hardware)]
    there = dict.fromkeys(m for m in models() if any(_same_model(m, index[n]["model"]) for n in wanted))
    if model is None:
        if len(there) > 1:
            raise InvalidConfigError(f"model is missing: choose --model from {', '.join(there)}", "model")
        return tuple(wanted)
    found = tuple(name for name in wanted if _same_model(model, index[name]["model"]))
    if not found:
        raise InvalidConfigError(
            f"model={short_repr(model)} has no table on this hardware: there are {', '.join(there)}; others are built "
            "with `inferencegym build-table`",
            "model",
        )
    return found


def tables_of_log(
    hardware: Sequence[str] | None, model: str | None, log_model: Callable[[], str | None]
) -> tuple[tuple[str, ...], str | None]:
    """Names as :func:`tables_named` gives them, and the model.

    Where none is given and the hardware has several, it is the model that the log names; ``log_model`` is called only
    then. Raises :class:`InvalidConfigError` if that has no table either.
    """
    try:
        return tables_named(hardware, model), model
    except InvalidConfigError as error:
        named = log_model() if error.field == "model" and model is None else None
        if named is None:
            raise
        if usual_name(named) not in models():
            raise InvalidConfigError(
                f"{error}; the log names {short_repr(named)}, which has no table", "model"
            ) from None
        return tables_named(hardware, named), named


def tables_meant(hardware: str) -> tuple[str, ...]:
    """Names of the tables that a name means: of this one, or of all of these cards."""
    names = tuple(table_index())
    found = tuple(name for name in names if name == hardware.lower())
    return found or tuple(name for name in names if table_index()[name]["card"] in cards_named(hardware))


def _same_model(asked: str, known: str) -> bool:
    return _letters(asked) == _letters(known)


def _letters(model: str) -> str:
    """Common key of all spellings of a model; Llama 3, 3.1 and 3.3 have the same shape."""
    name = without_precision(model).lower().rpartition("/")[2].removeprefix("meta-").removesuffix("-instruct")
    return "".join(c for c in re.sub(r"^llama-?3\.[13]", "llama3", name) if c.isalnum())
