"""What may be found in place of a control file: nothing of it is an order."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

_KNOB: Final = '{{"set": {{"batch_size": {}}}}}'
_UNTIL: Final = '{{"set": {{"batch_size": 8}}, "until": {}}}'
_THEN: Final = '{{"set": {{"batch_size": 8}}, "then": {}, "until": 9e9}}'

CONTENTS: Final[dict[str, str | bytes]] = {
    "empty": "",
    "an open brace": "{",
    "truncated": '{"set": {"batch_size": 8',
    "single quotes": "{'set': {'batch_size': 8}}",
    "a trailing comma": '{"set": {"batch_size": 8},}',
    "two documents": '{"set": {"batch_size": 8}} {}',
    "a list": "[]",
    "null": "null",
    "a number": "8",
    "a string": '"set"',
    "no set": "{}",
    "set is null": '{"set": null}',
    "set is a list": '{"set": ["batch_size"]}',
    "set is a number": '{"set": 8}',
    "an unknown knob": '{"set": {"batch_sice": 8}}',
    "a knob that is a string": _KNOB.format('"8"'),
    "a knob that is null": _KNOB.format("null"),
    "a knob that is a list": _KNOB.format("[8]"),
    "a knob that is an object": _KNOB.format("{}"),
    "a knob that is true": _KNOB.format("true"),
    "a knob that is NaN": _KNOB.format("NaN"),
    "a knob that is infinite": _KNOB.format("Infinity"),
    "a knob that is minus infinite": _KNOB.format("-Infinity"),
    "a knob beyond floats": _KNOB.format("1e999"),
    "a knob of 400 digits": _KNOB.format("9" * 400),
    "a knob of 5,000 digits": _KNOB.format("9" * 5_000),
    "an end that is a string": _UNTIL.format('"soon"'),
    "an end that is true": _UNTIL.format("true"),
    "an end that is a list": _UNTIL.format("[]"),
    "an end that is NaN": _UNTIL.format("NaN"),
    "an end that is infinite": _UNTIL.format("Infinity"),
    "an end of 400 digits": _UNTIL.format("9" * 400),
    "then is null": _THEN.format("null"),
    "then is a list": _THEN.format("[]"),
    "then has NaN": _THEN.format('{"batch_size": NaN}'),
    "then has an unknown knob": _THEN.format('{"batch": 8}'),
    "nested lists": "[" * 50_000,
    "nested objects": '{"set":' * 9_000,
    "UTF-16": '{"set": {"batch_size": 8}}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + b'{"set": {"batch_size": 8}}',
    "Latin-1": b'{"set": {"batch_size": 8}, "by": "Andr\xe9"}',
    "zero bytes": b"\0" * 64,
    "too large": '{"set": {"batch_size": 8}}' + " " * 100_000,
}


def _linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        # A socket's path has at most 107 bytes.
        name = f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}"
        made.bind(f"{name}/{path.name}")
        os.close(int(Path(name).name))


def _link_to_orders(path: Path) -> None:
    orders = path.with_name("orders.json")
    orders.write_text(_KNOB.format("8"))
    path.symlink_to(orders)


OBJECTS: Final[dict[str, Callable[[Path], object]]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": _socket,
    "a link to orders": _link_to_orders,
    "a link to a device": _linked("/dev/zero"),
    "a link to nothing": _linked("nothing.json"),
    "a link to itself": _linked("control.json"),
    "vanished": lambda path: None,
}

NAMES: Final = (*CONTENTS, *OBJECTS)


def remove(path: Path) -> None:
    """Remove whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damage(path: Path, name: str) -> None:
    """Put the named damage in place of a control file."""
    if name in CONTENTS:
        content = CONTENTS[name]
        fresh = path.with_name("damaged")
        fresh.write_bytes(content if isinstance(content, bytes) else content.encode())
        fresh.replace(path)
        return
    remove(path)
    OBJECTS[name](path)
