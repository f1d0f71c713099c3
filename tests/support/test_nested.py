"""Values inside of containers: their paths, and copies with other values."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from visattn._support.nested import described, leaves, mapped


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    part: Any
    derived: int = field(init=False, default=7)


class Tagged(list[Any]):
    tag = "kept"


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "leaf": (1, {"": 1}),
    "dictionary": ({"a": 1, 2: {"b": 3}}, {"a": 1, "2.b": 3}),
    "lists and tuples": ([1, (2, [3])], {"0": 1, "1.0": 2, "1.1.0": 3}),
    "named tuple": (Point(1, Point(2, 3)), {"x": 1, "y.x": 2, "y.y": 3}),
    "dataclass": (Frozen([4]), {"part.0": 4, "derived": 7}),
    "list of one's own": (Tagged([1, 2]), {"0": 1, "1": 2}),
    "ordered": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "mapping of one's own": (UserDict({"a": [5]}), {"a.0": 5}),
    "read-only mapping": (MappingProxyType({"a": 1}), {"a": 1}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_paths_and_copies(name: str) -> None:
    value, expected = CASES[name]
    assert dict(leaves(value)) == expected
    changed = mapped(value, lambda _, leaf: leaf * 10)
    assert dict(leaves(changed)) == {path: leaf * 10 for path, leaf in expected.items()}
    assert dict(leaves(value)) == expected  # the value itself is as before
    assert type(changed) is type(value) or name == "read-only mapping"
    assert mapped(value, lambda _, leaf: leaf) is value


def test_a_list_that_holds_itself_ends() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert len(list(leaves(endless))) < 50


def test_what_is_inside_is_described() -> None:
    assert described({"out": torch.zeros(1, 3), "more": [None]}) == "dict with out (1, 3), more.0 NoneType"
    assert described(3) == "int"
    assert described(list(range(20))).endswith("7 int, …")
