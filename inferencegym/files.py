"""Files that appear whole or not at all: a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferencegym.errors import DataFormatError


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the place of ``path`` when the block ends without error.

    The suffix is that of ``path``. Raises :class:`DataFormatError` if the folder cannot be written to.
    """
    path = Path(path)
    temporary = _beside(path)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_place(path: str | Path) -> None:
    """See that a file can be written, before the long work that fills it; its folder is made.

    Raises :class:`DataFormatError` if not.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataFormatError(
            f"{path}: its folder cannot be made ({error.strerror}); name one that can be written to"
        ) from error
    if path.is_dir():
        raise DataFormatError(f"{path}: cannot be written (it is a folder)")
    _beside(path).unlink()


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text as a whole."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def _beside(path: Path) -> Path:
    """A new empty file in the folder of ``path``, with its suffix."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    except OSError as error:
        raise DataFormatError(f"{path}: cannot be written ({error.strerror})") from error
    os.close(handle)
    return Path(name)
