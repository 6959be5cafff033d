"""Stand-in for the module ``cython`` where a compiled module runs as plain Python.

It has the names that modules with a ``.pxd`` use: types are conversions, and there is no lock to release. They import
it under the name ``cython``; the build makes that ``import cython`` for the compiler (setup.py).
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
gil: Final = nogil


def cast(kind: Callable[[float], Number], value: float) -> Number:
    """The value converted as in C: rounded towards zero."""
    return kind(value)
