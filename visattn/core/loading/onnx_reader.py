"""Minimal reader for the weights in an ONNX file: just enough of the protobuf wire format to do without the `onnx` package.

It takes the bytes of a model and returns its initializers as arrays, and its nodes with the names of inputs and outputs. Nothing is
executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_FLOAT32 = 1  # TensorProto.DataType


@dataclass(frozen=True)
class Node:
    """One operation of the graph."""

    operation: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def read(model: memoryview) -> tuple[dict[str, np.ndarray], list[Node]]:
    """Return the float32 initializers of an ONNX `ModelProto` by name, and its nodes in order."""
    tensors: dict[str, np.ndarray] = {}
    nodes = []
    graph = next(value for field, value in _fields(model) if field == 7)
    for field, value in _fields(graph):
        if field == 5:
            name, array = _tensor(value)
            if array is not None:
                tensors[name] = array
        elif field == 1:
            nodes.append(_node(value))
    return tensors, nodes


def _tensor(message: memoryview) -> tuple[str, np.ndarray | None]:
    shape: list[int] = []
    kind, name, raw = 0, "", memoryview(b"")
    for field, value in _fields(message):
        if field == 1:  # dims: one varint per field, or packed
            shape += [value] if isinstance(value, int) else list(_varints(value))
        elif field == 2:
            kind = value
        elif field == 8:
            name = bytes(value).decode()
        elif field == 9:
            raw = value
    if kind != _FLOAT32 or not len(raw):
        return name, None
    return name, np.frombuffer(raw, dtype="<f4").reshape(shape)


def _node(message: memoryview) -> Node:
    inputs: list[str] = []
    outputs: list[str] = []
    operation = ""
    for field, value in _fields(message):
        if field == 1:
            inputs.append(bytes(value).decode())
        elif field == 2:
            outputs.append(bytes(value).decode())
        elif field == 4:
            operation = bytes(value).decode()
    return Node(operation, tuple(inputs), tuple(outputs))


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield field numbers and values; a value is an int, or the bytes of a string, an array or a message."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(message, position)
            yield field, value
        elif wire == 2:
            length, position = _varint(message, position)
            yield field, message[position : position + length]
            position += length
        else:  # wire types 1 (eight bytes) and 5 (four bytes): no field read here uses them
            position += 8 if wire == 1 else 4


def _varints(message: memoryview) -> Iterator[int]:
    position = 0
    while position < len(message):
        value, position = _varint(message, position)
        yield value


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
