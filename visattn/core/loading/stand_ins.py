"""Harmless stand-ins for the objects that training scripts save beside tensors: paths, dates, options, scalars and arrays of NumPy.

A checkpoint is a pickle, which names functions to call. PyTorch's restricted unpickler calls only those on a list. The names of this module
are added to that list, but each stands for a class or function defined here. So nothing of NumPy, `pathlib` or `datetime` is called with
arguments of the file. Values that are not needed are dropped; only arrays of plain numbers are kept.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBERS = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"}  # types whose bytes are numbers
_ORDERS = {"<", ">", "|", "="}


class Unread:
    """A value beside the tensors that nobody needs: it takes any arguments and any state, and keeps none."""

    def __new__(cls, *_: object) -> Unread:
        """Return an empty object."""
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        """Keep nothing."""

    def __setstate__(self, _: object) -> None:
        """Keep nothing."""


class NumberType(Unread):
    """Stands for `numpy.dtype`: keeps the code of a type of plain numbers and its byte order."""

    code = ""

    def __init__(self, *given: object) -> None:
        """Keep the code, if it is a type of plain numbers."""
        if given and isinstance(given[0], str) and given[0] in _NUMBERS:
            self.code = "<" + given[0]

    def __setstate__(self, state: object) -> None:
        """Keep the byte order."""
        if self.code and isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str) and state[1] in _ORDERS:
            self.code = (">" if state[1] == ">" else "<") + self.code[1:]


class Array(Unread):
    """Stands for the function with which NumPy restores an array; keeps its bytes, which are read only if they are plain numbers."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        """Keep the version, shape, type, order and bytes of an array."""
        self.state = state

    def tensor(self) -> Tensor | None:
        """Return the array as a tensor, or None if it does not hold exactly the numbers of its shape."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            return None
        _, shape, kind, columns_first, content = self.state
        if not (isinstance(kind, NumberType) and kind.code and isinstance(content, bytes) and isinstance(shape, tuple)):
            return None
        if len(shape) > 32 or not all(type(side) is int and 0 <= side < 2**40 for side in shape):
            return None
        if math.prod(shape) * int(kind.code[2:]) != len(content):
            return None
        values = np.frombuffer(content, kind.code).reshape(shape, order="F" if columns_first is True else "C")
        return torch.from_numpy(values.astype(kind.code[1:], order="C"))


def tensor_of(value: object) -> Tensor | None:
    """Return a tensor as it is, an array of plain numbers as a tensor, and None for any other value."""
    return value if isinstance(value, Tensor) else value.tensor() if isinstance(value, Array) else None


def _dictionary(*_: object) -> dict[Any, Any]:
    """Stand for `defaultdict`; its entries follow."""
    return {}


def _no_bytes(*_: object) -> bytes:
    """Stand for `bytes`, which is called for empty bytes only."""
    return b""


def _list(*_: object) -> list[Any]:
    """Stand for `deque`; its entries may follow."""
    return []


_PATHS = ("PurePath", "PurePosixPath", "PureWindowsPath", "Path", "PosixPath", "WindowsPath")
_UNREAD = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),  # Python 3.13 has the second
    *(f"datetime.{name}" for name in ("datetime", "date", "time", "timedelta", "timezone")),
    *(f"builtins.{name}" for name in ("list", "dict", "tuple", "int", "float", "str", "bool", "frozenset")),
    *(f"builtins.{name}" for name in ("range", "slice", "object")),
    *("decimal.Decimal", "fractions.Fraction", "uuid.UUID"),
    *(f"{module}.multiarray.scalar" for module in ("numpy.core", "numpy._core")),  # NumPy 1 and 2
    *(
        "numpy.ndarray",
        "numpy.bool_",
        "numpy.bool",
        "numpy.str_",
        "numpy.bytes_",
        "numpy.float16",
        "numpy.float32",
        "numpy.float64",
    ),
    *(f"numpy.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
_STAND_INS: list[Any] = [
    *((Unread, name) for name in _UNREAD),
    (NumberType, "numpy.dtype"),
    *((Array, f"{module}.multiarray._reconstruct") for module in ("numpy.core", "numpy._core")),
    (_dictionary, "collections.defaultdict"),
    (_list, "collections.deque"),
    (_no_bytes, "builtins.bytes"),
]
_loading = threading.Lock()


@contextmanager
def standing_in() -> Iterator[None]:
    """Let `torch.load(weights_only=True)` use the stand-ins inside the block; one block runs at a time, as PyTorch's list is global.

    Yields:
        Nothing.
    """
    with _loading, torch.serialization.safe_globals(_STAND_INS):
        yield
