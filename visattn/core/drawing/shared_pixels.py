"""Pixels of a picture as an array over Pillow's own memory, by the Arrow C data interface, so that nothing is copied."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

__all__ = ["shared_pixels"]

_CHANNELS = 4  # Pillow keeps RGB in four bytes; the last one is padding


class _Array(ctypes.Structure):
    """`struct ArrowArray` of the Arrow C data interface."""


_Array._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
]

_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Owner:
    """What NumPy asks for memory; the array keeps it, and with it the memory."""

    def __init__(self, capsule: object, address: int, shape: tuple[int, ...]) -> None:
        self._capsule = capsule
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": shape, "typestr": "|u1"}


def shared_pixels(picture: Image.Image) -> NDArray[np.uint8] | None:
    """Return the memory of an RGB picture as `(height, width, 4)`, the last channel undefined.

    None is returned for an empty picture, and where Pillow keeps the pixels in several blocks, as above 16 MB.
    """
    shape = picture.height, picture.width, _CHANNELS
    if 0 in shape:  # Pillow 11.3 crashes
        return None
    try:
        _, capsule = picture.__arrow_c_array__()
    except (ValueError, MemoryError):
        return None
    pixels = _Array.from_address(_address(capsule, b"arrow_array"))
    if not pixels.n_children:
        return None
    channels = pixels.children[0].contents
    if channels.length != math.prod(shape) or channels.offset or channels.n_buffers != 2:
        return None
    return np.asarray(_Owner(capsule, channels.buffers[1], shape))
