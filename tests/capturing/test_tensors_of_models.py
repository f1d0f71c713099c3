"""Tensors that a model keeps: members of its modules, and what their classes, files and cached functions hold."""

from __future__ import annotations

import functools
from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visattn.core.capturing.trace import caches
from visattn.core.capturing.trace.caches import kept_tensors, tensors_within
from visattn.core.capturing.trace.exposed import ExposedMemory
from visattn.core.capturing.trace.members import Members, _tensors_of_module
from visattn.core.capturing.trace.tape import Outside


def test_tensors_are_found_three_containers_deep() -> None:
    a = torch.zeros(2)
    assert [tensor is a for tensor in tensors_within([[[a]]])] == [True]
    assert tensors_within([[[[a]]]]) == []
    assert tensors_within([a], 0) == []
    assert [tensor is a for tensor in tensors_within(a, 0)] == [True]
    assert [tensor is a for tensor in tensors_within({"x": (a, "text", None)}, 2)] == [True]
    assert tensors_within({"x": (a,)}, 1) == []
    assert tensors_within("text") == []


@pytest.mark.parametrize(("count", "found"), [(1000, 1), (1001, 0)])
def test_containers_of_more_than_a_thousand_entries_are_not_searched(count: int, found: int) -> None:
    a = torch.zeros(2)
    assert len(tensors_within([a] + [1] * (count - 1))) == found
    assert len(tensors_within(dict(enumerate([a] + [1] * (count - 1))))) == found


def test_results_of_cached_functions_are_found() -> None:
    @functools.lru_cache
    def made(size: int) -> Tensor:
        return torch.zeros(size)

    result = made(3)
    assert [tensor is result for tensor in tensors_within(made)] == [True]


@pytest.mark.parametrize(("size", "nested"), [(128, 2), (None, 1)])
def test_results_of_cached_functions_are_searched_as_deep_as_others(size: int | None, nested: int) -> None:
    """Python keeps the results of a cache without a bound in one more dictionary."""
    a = torch.zeros(2)

    @functools.lru_cache(size)
    def made(depth: int) -> Any:
        return [made.__wrapped__(depth - 1)] if depth else a

    assert tensors_within(made) == []
    made(nested + 1)
    assert tensors_within(made) == []
    made(nested)
    assert [tensor is a for tensor in tensors_within(made)] == [True]


def test_mapping_that_is_no_dictionary_is_searched() -> None:
    a = torch.zeros(2)
    assert [tensor is a for tensor in tensors_within(UserDict({"x": 5, "y": [a]}))] == [True]
    assert [tensor is a for tensor in tensors_within(MappingProxyType({"x": a}))] == [True]
    assert tensors_within({a}) == []


def test_caches_in_closures_are_found_three_functions_deep() -> None:
    cache: dict[str, int] = {}

    def wrapped(value: Any) -> Any:
        return lambda: value

    function = wrapped(cache)
    for _ in range(3):
        assert [keeper is cache for keeper in caches._keepers_in(function)] == [True]
        assert [keeper is cache for keeper in caches._keepers_in(staticmethod(function))] == [True]
        function = wrapped(function)
    assert caches._keepers_in(function) == []
    assert caches._keepers_in(5) == []
    assert caches._keepers_in((cache,)) == []
    assert caches._keepers_in(wrapped(None)) == []


def test_variable_of_a_closure_without_a_value_is_skipped() -> None:
    def outer() -> Any:
        def inner() -> Any:
            return later

        filled = caches._is_filled(inner.__closure__[0])  # type: ignore[index]
        keepers = caches._keepers_in(inner)
        later = {}  # type: dict[str, int]
        return filled, keepers, caches._is_filled(inner.__closure__[0])  # type: ignore[index]

    assert outer() == (False, [], True)


class Keeping(nn.Module):
    """Module whose class and file keep tensors."""

    table = torch.zeros(3)
    tables = {"a": [torch.zeros(4)]}  # noqa: RUF012


IN_FILE = torch.zeros(5)


def test_tensors_of_classes_and_their_files_are_kept() -> None:
    found = set(map(id, kept_tensors([Keeping()])))
    assert {id(Keeping.table), id(Keeping.tables["a"][0]), id(IN_FILE)} <= found
    assert kept_tensors([nn.Identity()]) == []


class Holding(nn.Linear):
    """Module with tensors in all places."""

    def __init__(self) -> None:
        super().__init__(4, 5)
        self.single, self.several = torch.zeros(2), [torch.zeros(3)]
        self.scale = nn.Buffer(torch.zeros(6))
        self.register_parameter("none", None)


def test_member_is_known_by_kind_and_name() -> None:
    module, memory = Holding(), ExposedMemory()
    members = Members({module: "encoder.block.proj"}, memory)
    named = {id(tensor): members.stored(tensor) for tensor in members.tensors()}
    expected = [
        (module.weight, ("parameter", "proj")),
        (module.bias, ("parameter", "bias")),
        (module.scale, ("buffer", "scale")),
        (module.single, ("attribute", "single")),
        (module.several[0], ("attribute", "several")),
    ]
    for tensor, (kind, name) in expected:
        stored = named[id(tensor)]
        assert stored is not None
        assert (stored.kind, stored.name) == (kind, name)
        home = members.home(tensor)
        assert (home is None) == (name == "several")
        assert home is None or home.holds(tensor)
    assert members.stored(torch.zeros(1)) is None
    assert members.home(torch.zeros(1)) is None


def test_each_tensor_of_a_module_is_yielded_once() -> None:
    module: Any = Holding()
    module.count, module.alias = 3, module.bias
    found = [(id(tensor), *stored[:2]) for tensor, stored in _tensors_of_module(module, "block.proj")]
    assert found == [
        (id(module.single), "attribute", "single"),
        (id(module.several[0]), "attribute", "several"),
        (id(module.scale), "buffer", "scale"),
        (id(module.weight), "parameter", "proj"),
        (id(module.bias), "parameter", "bias"),
        (id(module.bias), "parameter", "alias"),
    ]


def test_member_that_was_exchanged_or_written_is_none_of_the_model() -> None:
    module, memory = Holding(), ExposedMemory()
    members = Members({module: ""}, memory)
    assert not members.swapped
    members.exchange(module.bias)
    assert members.swapped
    assert members.is_exchanged(module.bias)
    assert not members.is_exchanged(module.weight)
    assert members.stored(module.bias) is None
    assert members.home(module.bias) is not None
    memory.add(module.single)
    assert members.stored(module.single) is not None
    module.single.numpy()[1] = 3
    assert members.stored(module.single) is None
    assert members.stored(module.scale) is not None
    members.clear()
    assert not members.swapped
    assert members.stored(module.bias) is not None


def test_member_is_kept_in_the_same_place_and_form() -> None:
    module = Holding()
    members = Members({module: ""}, ExposedMemory())
    known = Outside("parameter", "bias", torch.Size((5,)), True, members.home(module.bias))
    assert members.is_kept(module.bias, known)
    assert not members.is_kept(module.bias, known._replace(home=None))
    assert not members.is_kept(module.bias, known._replace(shape=torch.Size((4,))))
    assert not members.is_kept(module.bias, known._replace(floating=False))
    assert not members.is_kept(torch.zeros(5), known)
    assert not members.is_kept(None, known)
    members.exchange(module.bias)
    assert not members.is_kept(module.bias, known)
