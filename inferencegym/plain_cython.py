"""Stand-in for the module ``cython`` where a compiled module runs as plain Python and Cython is not installed.

It offers what the modules with a ``.pxd`` use: types are conversions, and there is no lock to release. A wheel's build
writes the import of it beside theirs of ``cython`` (setup.py); a clone has Cython.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

Number = TypeVar("Number")

compiled: Final = False
int: Final = builtins.int
longlong: Final = builtins.int
Py_ssize_t: Final = builtins.int
nogil: Final[AbstractContextManager[None]] = nullcontext()


def cast(kind: Callable[[float], Number], value: float) -> Number:
    """The value as C's conversion gives it: towards zero."""
    return kind(value)
