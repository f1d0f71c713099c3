"""What is read from the Python stack, callbacks of modules in odd cases, and the switch that turns compilation off."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.capturing.watched import Layer
from visattn._support.parts import parts_of
from visattn.core.capturing.hooks import ModuleCalls, keywords, running
from visattn.core.capturing.intercept import no_compile, running_module
from visattn.core.capturing.intercept.running_module import Owners

# --- arguments and calls of modules


def test_keyword_arguments_are_those_of_the_module_that_is_about_to_run() -> None:
    inside, seen = Layer(lambda *args, **kwargs: (args, kwargs)), []
    outside = Layer(lambda x, y: inside(x, a=y, b=3))
    calls = ModuleCalls()
    for module in (inside, outside):
        calls.before[module] = [lambda _module, args: seen.append((args, keywords()))]
    with calls.watched():
        assert outside(1, y=2) == ((1,), {"a": 2, "b": 3})
        assert inside(4) == ((4,), {})
    assert seen == [((1,), {"y": 2}), ((1,), {"a": 2, "b": 3}), ((4,), {})]


def test_functions_of_the_same_name_are_passed_over() -> None:
    def inner() -> dict[str, Any]:
        return keywords()

    module, calls, seen = Layer(lambda **kwargs: kwargs), ModuleCalls(), []
    calls.before[module] = [lambda *_: seen.append(inner())]
    with calls.watched():
        given = module(x=1)
    seen[0]["y"] = 2
    assert (given, seen) == ({"x": 1}, [{"x": 1, "y": 2}])
    assert inner() == {}


def test_nested_calls_of_a_module_are_counted() -> None:
    def call(depth: int) -> Any:
        counts = [running(module), running(other)]
        return counts + (module(depth - 1) if depth else other(None))

    module, other = Layer(call), Layer(lambda _: [running(module), running(other)])
    assert (running(module), running(other)) == (0, 0)
    assert module(2) == [1, 0, 2, 0, 3, 0, 3, 1]
    assert running(module) == 0


def test_module_that_fails_has_no_output() -> None:
    def fail() -> None:
        raise ValueError("no")

    module, calls, seen = Layer(fail), ModuleCalls(), []
    calls.after[module] = [lambda _module, _args, output: seen.append(output)]
    for _ in range(2):
        with calls.watched():
            calls.follow()
            with pytest.raises(ValueError, match="no"):
                module()
    assert seen == [None, None]
    with pytest.raises(ValueError, match="no"):
        module()
    assert len(seen) == 2


def test_callbacks_do_not_run_in_other_threads() -> None:
    module, calls, seen = Layer(lambda x: x + 1), ModuleCalls(), []
    calls.before[module] = [lambda *_: seen.append("before")]
    calls.after[module] = [lambda *_: seen.append("after"), lambda *_: 7]
    outputs: list[int] = []
    with calls.watched():
        calls.follow()
        thread = threading.Thread(target=lambda: outputs.append(module(1)))
        thread.start()
        thread.join()
        outputs.append(module(1))
    assert (outputs, seen) == ([2, 7], ["before", "after"])


# --- names of modules


def test_modules_have_the_names_that_pytorch_gives_them() -> None:
    shared = nn.Linear(1, 1)
    model = nn.Sequential(nn.Sequential(nn.ReLU(), shared), shared, nn.ModuleList([nn.ReLU(), nn.Sequential(nn.GELU())]))
    model.register_module("nothing", None)
    model.append(nn.Identity())
    expected = [(name, module) for name, module in model.named_modules()]
    parts = parts_of(model)
    assert [*zip(parts.names, parts.modules, strict=True)] == expected
    assert Owners(parts_of(model)).modules == [module for _, module in expected]
    assert (parts_of(shared).names, parts_of(shared).modules) == (("",), [shared])


def below(owners: Owners, frames: int) -> Any:
    """Ask for the running module from a function that is called this many frames below the caller."""
    return owners.current() if frames == 1 else below(owners, frames - 1)


@pytest.mark.parametrize(("frames", "is_found"), [(1, False), (2, True), (3, True)])
def test_running_module_is_sought_above_the_frames_of_the_capture(frames: int, is_found: bool) -> None:
    class Asking(nn.Module):
        def forward(self) -> Any:
            return below(owners, frames)

    model = nn.Sequential(Asking())
    owners = Owners(parts_of(model))
    assert model[0].forward() == (("0", model[0]) if is_found else None)


def test_innermost_module_of_the_model_is_running() -> None:
    def function(_module: Any = None) -> Any:
        return below(owners, 4)

    stranger = Layer(lambda: function(5))
    model: Any = nn.Sequential(nn.Sequential(Layer(stranger), Layer(lambda: function())))
    owners = Owners(parts_of(model))
    assert owners.names[stranger] == "0.0.run"
    assert model[0][1]() == ("0.1", model[0][1])
    assert model[0][0]() == ("0.0.run", stranger)
    del owners.names[stranger]
    assert model[0][0]() == ("0.0", model[0][0])
    assert function(model) == ("", model)
    assert function() is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.encoder.attn", "encoder.attn"),
        ("_orig_mod.attn", "attn"),
        ("blocks._orig_mod.module.attn", "blocks.module.attn"),
        ("submodule.attn", "submodule.attn"),
    ],
)
def test_names_have_no_prefixes_of_wrappers(name: str, expected: str) -> None:
    module = Layer(lambda: below(owners, 2))
    owners = Owners(parts_of(module))
    owners.names[module] = name
    assert module() == (expected, module)


def node(name: str, *stack: str) -> Any:
    meta = {"nn_module_stack": {f"key{part}": (part, nn.ReLU) for part in stack}} if stack else {}
    return SimpleNamespace(name=name, meta=meta)


TRACED: Any = SimpleNamespace(
    code="def forward(self, x):\n    first = x + 1\n    second = first * 2;  first = None\n    third = second\n    return third\n",
    graph=SimpleNamespace(
        nodes=[node("x"), node("first", "a"), node("second", "", "b", "b.c"), node("third"), node("output", "z")]
    ),
)


@pytest.mark.parametrize(("line", "name"), [(1, ""), (2, "a"), (3, "b.c"), (4, ""), (5, ""), (9, "")])
def test_line_of_traced_code_belongs_to_the_module_that_was_traced(line: int, name: str) -> None:
    assert running_module._path_in_trace(TRACED, line) == name


def test_traced_model_names_the_original_module() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(lambda _: below(owners, 2), (x,))
    made.meta["nn_module_stack"] = {"key": ("blocks.0", nn.ReLU)}
    graph.output(made)
    model = nn.Sequential(torch.fx.GraphModule({}, graph))
    owners = Owners(parts_of(model))
    assert model[0](1) == ("0.blocks.0", model[0])
    made.meta.clear()
    assert model[0](1) == ("0", model[0])


# --- compilation


class Stances:
    """Stand-in for the setting of the compiler."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, stance: str) -> Stances:
        self.events.append(stance)
        return self

    def __exit__(self, *error: object) -> None:
        self.events.append(error)


ENDED = (None, None, None)


@pytest.fixture
def stances(monkeypatch: pytest.MonkeyPatch) -> Stances:
    made = Stances()
    monkeypatch.setitem(sys.modules, "torch._dynamo", SimpleNamespace())
    monkeypatch.setattr(torch.compiler, "set_stance", made)
    return made


def test_compilation_is_off_until_the_last_capture_ends(stances: Stances) -> None:
    first, second = no_compile.uncompiled(), no_compile.uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert stances.events == ["force_eager"]
    second.__exit__(None, None, None)
    assert stances.events == ["force_eager", ENDED]
    assert no_compile._open == []
    with no_compile.uncompiled():
        pass
    assert stances.events == ["force_eager", ENDED] * 2


def test_compilation_is_back_after_an_error(stances: Stances) -> None:
    with pytest.raises(ValueError, match="stop"), no_compile.uncompiled():
        raise ValueError("stop")
    assert stances.events == ["force_eager", ENDED]


def test_compiler_that_was_not_imported_is_left_alone(stances: Stances, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    ran: list[Mapping[str, Any]] = []
    with no_compile.uncompiled():
        ran.append({})
    assert (len(ran), stances.events, no_compile._open) == (1, [], [])
