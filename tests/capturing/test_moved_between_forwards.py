"""Tokens that move between forward passes are located correctly in each pass, whatever moved them."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import dataclasses
import decimal
import enum
import fractions
import functools
import itertools
import os
import random
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.capturing.moving import GRID, WIDTH, Moving, image, right
from tests.samples import sampled

FORWARDS = 10
SHIFTS = [1, 1, 3, 3, 5, 1, 0, 7, 1, 3][:FORWARDS]


def roll(tokens: Tensor, rows: int) -> Tensor:
    return tokens.view(-1, *GRID, WIDTH).roll(int(rows), 1).flatten(1, 2)


# objects that hold a number, and how a model reads it from them


class Whole(int):
    pass


class Slots:
    __slots__ = ("shift",)

    def __init__(self, shift: int) -> None:
        self.shift = shift


class Callable_:
    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self) -> int:
        return self.shift


@dataclasses.dataclass
class Data:
    shift: int


Shift = enum.IntEnum("Shift", {f"by{i}": i for i in range(8)})  # type: ignore[misc]
Named = collections.namedtuple("Named", "shift")
Kind = tuple[Callable[[int], Any], Callable[[Any], int]]

KINDS: dict[str, Kind] = {
    "int": (int, int),
    "bool": (lambda n: n > 2, lambda x: 3 if x else 1),
    "float": (float, int),
    "complex": (complex, lambda x: int(x.real)),
    "str": (str, int),
    "bytes": (lambda n: bytes([n]), lambda x: x[0]),
    "bytearray": (lambda n: bytearray([n]), lambda x: x[0]),
    "int subclass": (Whole, int),
    "enum": (Shift, lambda x: x.value),
    "fraction": (fractions.Fraction, int),
    "decimal": (decimal.Decimal, int),
    "range": (range, len),
    "slice": (lambda n: slice(n, 9), lambda x: x.start),
    "tuple": (lambda n: (n,), lambda x: x[0]),
    "list": (lambda n: [0, [n]], lambda x: x[1][0]),
    "dict": (lambda n: {"shift": n}, lambda x: x["shift"]),
    "dict key": (lambda n: {n: None}, lambda x: next(iter(x))),
    "set": (lambda n: {n}, lambda x: next(iter(x))),
    "frozenset": (lambda n: frozenset({n}), lambda x: next(iter(x))),
    "deque": (lambda n: collections.deque([n]), lambda x: x[0]),
    "ordered dict": (lambda n: collections.OrderedDict(a=n), lambda x: x["a"]),
    "named tuple": (Named, lambda x: x.shift),
    "namespace": (lambda n: types.SimpleNamespace(shift=n), lambda x: x.shift),
    "nested namespace": (lambda n: types.SimpleNamespace(win=types.SimpleNamespace(shift=(n,))), lambda x: x.win.shift[0]),
    "dataclass": (Data, lambda x: x.shift),
    "slots": (Slots, lambda x: x.shift),
    "callable object": (Callable_, lambda x: x()),
    "partial": (lambda n: functools.partial(int, n), lambda x: x()),
    "closure": (lambda n: lambda: n, lambda x: x()),
    "numpy int": (np.int64, int),
    "numpy array": (lambda n: np.array([n]), lambda x: int(x[0])),
    "array": (lambda n: array.array("i", [n]), lambda x: x[0]),
    "mapping proxy": (lambda n: types.MappingProxyType({"a": n}), lambda x: x["a"]),
    "tensor read by numpy": (torch.tensor, lambda x: int(x.numpy())),
    "tensor shape": (lambda n: torch.zeros(n + 1), lambda x: x.shape[0] - 1),
    "iterator": (lambda n: iter([n]), next),
}


class Cell:
    """Storage outside the model."""

    value: Any = None


_variable: contextvars.ContextVar[Any] = contextvars.ContextVar("_variable")
_local = threading.local()


def _in_module(model: Moving, value: Any) -> None:
    model.setting = value


def _in_config(model: Moving, value: Any) -> None:
    model.config = types.SimpleNamespace(stages=[{"window": types.SimpleNamespace(value=value)}])


PLACES: dict[str, tuple[Callable[[Moving, Any], None], Callable[[Moving], Any]]] = {
    "attribute of the model": (_in_module, lambda m: m.setting),
    "attribute of a linear layer": (lambda m, v: setattr(m.part, "setting", v), lambda m: m.part.setting),
    "attribute of an identity": (lambda m, v: setattr(m.same, "setting", v), lambda m: m.same.setting),
    "configuration": (_in_config, lambda m: m.config.stages[0]["window"].value),
    "class attribute": (lambda _, v: setattr(Cell, "value", v), lambda _: Cell.value),
}
FEW: dict[str, tuple[Callable[[Moving, Any], None], Callable[[Moving], Any]]] = {
    "context variable": (lambda _, v: _variable.set(v) and None, lambda _: _variable.get()),
    "thread": (lambda _, v: setattr(_local, "value", v), lambda _: _local.value),
    "environment": (lambda _, v: os.environ.__setitem__("SHIFT", str(v)), lambda _: int(os.environ["SHIFT"])),
    "buffer": (
        lambda m, v: m.register_buffer("moved", torch.tensor(v)),
        lambda m: m.moved.item(),
    ),
    "buffer written in place": (
        lambda m, v: m.moved.fill_(v) if hasattr(m, "moved") else m.register_buffer("moved", torch.tensor(v)),
        lambda m: int(m.moved),
    ),
    "parameter shape": (
        lambda m, v: setattr(m, "sized", nn.Parameter(torch.zeros(v + 1))),
        lambda m: len(m.sized) - 1,
    ),
    "training flag of a submodule": (lambda m, v: m.same.train(v > 2) and None, lambda m: 3 if m.same.training else 1),
    "number of modules": (
        lambda m, v: setattr(m, "list", nn.ModuleList(nn.Identity() for _ in range(v))),
        lambda m: len(m.list),
    ),
    "dropout rate": (lambda m, v: setattr(m, "drop", nn.Dropout(v / 10)), lambda m: round(m.drop.p * 10)),
    "epsilon of a norm": (lambda m, v: setattr(m.norm, "eps", v * 1e-6), lambda m: round(m.norm.eps * 1e6)),
}


def _settings() -> dict[str, Callable[[], list[bool]]]:
    ways: dict[str, Callable[[], list[bool]]] = {}

    def way(put: Callable[[Moving, Any], None], get: Callable[[Moving], Any], kind: Kind) -> Callable[[], list[bool]]:
        def run() -> list[bool]:
            model = Moving(lambda m, t: roll(t, kind[1](get(m))))
            found = []
            for i, shift in enumerate(SHIFTS):
                put(model, kind[0](shift))
                found.append(right(model, image(i)))
            return found

        return run

    for name, (put, get) in PLACES.items():
        ways |= {f"{name}: {kind}": way(put, get, KINDS[kind]) for kind in KINDS}
    return ways | {name: way(put, get, (int, int)) for name, (put, get) in FEW.items()}


def _arguments() -> dict[str, Callable[[], list[bool]]]:
    def way(kind: Kind, keyword: bool) -> Callable[[], list[bool]]:
        def run() -> list[bool]:
            model = Moving(lambda _, t, shift: roll(t, kind[1](shift)))
            given = [kind[0](shift) for shift in SHIFTS]
            return [
                right(model, image(i), *([] if keyword else [value]), **({"shift": value} if keyword else {}))
                for i, value in enumerate(given)
            ]

        return run

    return {
        f"{'keyword' if keyword else 'argument'}: {kind}": way(KINDS[kind], keyword)
        for kind in KINDS
        for keyword in (False, True)
    }


def _energy(t: Tensor) -> Tensor:
    return (t.abs().sum() * 100).floor() % 8


DATA: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: int(_energy(t).item()),
    "tolist": lambda t: int(_energy(t).tolist()),
    "int": lambda t: int(_energy(t)),
    "float": lambda t: float(_energy(t)),
    "index": lambda t: range(8)[_energy(t).long()],
    "bool": lambda t: 3 if _energy(t) > 3 else 1,
    "numpy": lambda t: int(_energy(t).numpy()),
    "asarray": lambda t: int(np.asarray(_energy(t))),
    "array of a list": lambda t: int(np.array([x.item() for x in _energy(t)[None]])[0]),
    "cpu numpy": lambda t: int(_energy(t).detach().cpu().numpy()),
    "dlpack": lambda t: int(np.from_dlpack(_energy(t))),
    "topk indices": lambda t: int(t[0, :8].sum(-1).topk(1).indices.numpy()[0]),
    "argmax": lambda t: t[0, :8].sum(-1).argmax().item(),
    "nonzero shape": lambda t: (t[0, :7].sum(-1) > 0).nonzero().shape[0],
    "masked select": lambda t: t[0, :7, 0].masked_select(t[0, :7, 0] > 0).numel(),
    "boolean index": lambda t: len(t[0, :7, 0][t[0, :7, 0] > 0]),
    "unique": lambda t: t[0, :7, 0].round().unique().numel(),
    "equal": lambda t: 3 if torch.equal(t[0, 0] > 0, t[0, 1] > 0) else int(torch.equal(t[0, :1, 0] > 0, t[0, :1, 1] > 0)),
    "allclose": lambda t: 3 if torch.allclose(t[0, 0, :1], t[0, 1, :1], atol=0.5) else 1,
    "is_nonzero": lambda t: 3 if torch.is_nonzero((t[0, 0, 0] > 0).float()) else 1,
    "contains": lambda t: 3 if 1.0 in (t[0, :2, 0] > 0.4).float() else 1,
    "format": lambda t: int(float(f"{_energy(t)}")),
    "repr": lambda t: int(repr(_energy(t)).split("(")[1][0]),
    "len of a split": lambda t: len((t[0, :7, 0] > 0).nonzero().split(1)),
    "python random": lambda _: random.randrange(8),
    "numpy random": lambda _: int(np.random.default_rng().integers(8)),
    "torch random": lambda _: int(torch.randint(8, ())),
    "clock": lambda _: time.perf_counter_ns() // 1000 % 8,
    "urandom": lambda _: os.urandom(1)[0] % 8,
    "counter": functools.partial(lambda count, _: next(count) % 8, itertools.count()),
}
INDEXED: dict[str, Callable[[Tensor], Tensor]] = {
    "gather by argsort": lambda t: t.gather(1, t.sum(-1, keepdim=True).argsort(1).expand_as(t)),
    "index by argsort": lambda t: t[:, t[0].sum(-1).argsort()],
    "index_select": lambda t: t.index_select(1, t[0].sum(-1).argsort()),
    "take_along_dim": lambda t: t.take_along_dim(t.sum(-1, keepdim=True).argsort(1), 1),
    "random permutation": lambda t: t[:, torch.randperm(t.shape[1])],
    "permutation of numpy": lambda t: t[:, torch.from_numpy(np.random.default_rng().permutation(t.shape[1]))],
    "permutation of a list": lambda t: t[:, random.sample(range(t.shape[1]), t.shape[1])],
    "numpy index": lambda t: t[:, np.random.default_rng().permutation(t.shape[1])],
    "flip or not": lambda t: t.flip(1) if t.sum() > 0 else t,
    "one of two": lambda t: (t, t.flip(1))[int(t.sum() > 0)],
    "another order of the same operations": lambda t: _crossed(t, t.sum() > 0),
}


def _crossed(t: Tensor, which: Any) -> Tensor:
    """Call the same functions with the same arguments, but return another result."""
    a, b = t.clone(), t.flip(1)
    return (a if which else b) + 0


def _data() -> dict[str, Callable[[], list[bool]]]:
    def way(between: Callable[[Any, Tensor], Tensor]) -> Callable[[], list[bool]]:
        def run() -> list[bool]:
            model = Moving(between)
            return [right(model, image(i)) for i in range(FORWARDS)]

        return run

    ways = {f"data: {name}": way(lambda _, t, read=read: roll(t, int(read(t)) % 8)) for name, read in DATA.items()}
    return ways | {f"index: {name}": way(lambda _, t, move=move: move(t)) for name, move in INDEXED.items()}


def _hook(m: Moving, shift: int) -> None:
    m.same._forward_hooks.clear()
    m.same.register_forward_hook(lambda _, __, out: roll(out, shift))


def _pre_hook(m: Moving, shift: int) -> None:
    m.same._forward_pre_hooks.clear()
    m.same.register_forward_pre_hook(lambda _, args: (roll(args[0], shift),))


def _patched(m: Moving, shift: int) -> None:
    m.same.forward = lambda t: roll(t, shift)  # type: ignore[method-assign]


def _replaced(m: Moving, shift: int) -> None:
    class Rolls(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return roll(t, shift)

    m.same = Rolls()  # type: ignore[assignment]


def _between(m: Moving, shift: int) -> None:
    m.between[0] = lambda model, t: roll(model.same(t), shift)


HOOKS = {"hook": _hook, "pre-hook": _pre_hook, "patched forward": _patched, "replaced module": _replaced, "function": _between}


def _hooks() -> dict[str, Callable[[], list[bool]]]:
    def way(change: Callable[[Moving, int], None]) -> Callable[[], list[bool]]:
        def run() -> list[bool]:
            model, found = Moving(lambda m, t: m.same(t)), []
            for i, shift in enumerate(SHIFTS):
                change(model, shift)
                found.append(right(model, image(i)))
            return found

        return run

    return {f"hooks: {name}": way(change) for name, change in HOOKS.items()}


WAYS = _settings() | _arguments() | _data() | _hooks()


def test_at_least_150_programs_are_tested() -> None:
    assert len(WAYS) >= 150


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(WAYS, 3))
def test_positions_of_tokens_are_correct_in_each_of_ten_forward_passes(name: str) -> None:
    assert WAYS[name]() == [True] * FORWARDS


def test_a_copied_model_is_traced_independently() -> None:
    model = Moving(lambda m, t: roll(t, m.shift))
    model.shift = 1
    assert right(model, image())
    other = copy.deepcopy(model)
    other.shift = 4
    assert all(right(other, image(i)) and right(model, image(i)) for i in range(4))
