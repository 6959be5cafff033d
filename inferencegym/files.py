"""Files that appear whole or not at all: a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferencegym.errors import DataFormatError


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the place of ``path`` when the block ends without error.

    The suffix is that of ``path``. Raises :class:`DataFormatError` if the file cannot be written.
    """
    path = Path(path)
    temporary = _beside(path)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_writable(path: str | Path) -> None:
    """Raise :class:`DataFormatError` if no file can be written there: said before the work, not after it."""
    _beside(Path(path)).unlink()


def make_folder(path: str | Path) -> Path:
    """The folder, made if there is none. Raises :class:`DataFormatError` if it cannot be made or written to."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def make_place(path: str | Path) -> None:
    """:func:`require_writable` of a file whose folder is made if there is none."""
    make_folder(Path(path).parent)
    require_writable(path)


def _beside(path: Path) -> Path:
    """A new, empty file in the same folder."""
    try:
        if path.exists() and not path.is_file():
            raise DataFormatError(f"{path}: cannot be written (no regular file); name a file")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    except OSError as error:
        raise _unwritable(path, error) from error
    os.close(handle)
    return Path(name)


def _unwritable(path: Path, error: OSError) -> DataFormatError:
    return DataFormatError(f"{path}: cannot be written ({error.strerror or error})")


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text as a whole."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)
