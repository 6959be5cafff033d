"""Atomic file writes: a reader sees the old content or the new one, never a part of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.installation import install_extra


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Context with a temporary path beside ``path``, which replaces ``path`` when the block ends without error.

    It has the suffix of ``path``. Raises :class:`DataFormatError` if the file cannot be written.
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
    """Raise :class:`DataFormatError` if no file can be written there; called before long work."""
    _beside(Path(path)).unlink()


def is_running(pid: int) -> bool:
    """Whether a process with this id exists, such as the one that wrote a file."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def make_folder(path: str | Path) -> Path:
    """Make a folder unless it exists, and return it; :class:`DataFormatError` if files cannot be written to it."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def prepare_output(path: str | Path) -> None:
    """Make the folder of a file unless it exists, and raise :class:`DataFormatError` if it cannot be written."""
    make_folder(Path(path).parent)
    require_writable(path)


def _beside(path: Path) -> Path:
    """A new, empty file in the same folder."""
    try:
        if path.exists() and not path.is_file():
            raise DataFormatError(f"{path}: cannot be written, because it is not a regular file; name a file")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    except OSError as error:
        raise _unwritable(path, error) from error
    os.close(handle)
    return Path(name)


def _unwritable(path: Path, error: OSError) -> DataFormatError:
    return DataFormatError(f"{path}: cannot be written ({error.strerror or error})")


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text atomically and return the path."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def require_matplotlib() -> None:
    """Raise :class:`InvalidConfigError` where matplotlib is missing, before work is done for a figure."""
    if find_spec("matplotlib") is None:
        raise InvalidConfigError(f"figures need matplotlib: {install_extra('report')}")
