"""Arguments of a wrong type raise an error of one line that states the expected type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import timm
import torch

import visattn
from visattn._support.typed import _hints, check_types
from visattn.core.methods import METHODS
from visattn.errors import OptionError

PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def vit() -> Any:
    return timm.create_model("vit_tiny_patch16_224").eval()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"query": 5}, r"query must be a pixel (x, y), patch:ROW,COL, cls, mean, or a tensor with one weight per token, got 5."),
        (
            {"query": None},
            r"query must be a pixel (x, y), patch:ROW,COL, cls, mean, or a tensor with one weight per token, got None.",
        ),
        ({"layer": 1.5}, "layer must be a whole number or a string or 'all', got 1.5."),
        ({"head": "x"}, "head must be a whole number or 'all', got 'x'."),
        ({"head": True}, "head must be a whole number or 'all', got True."),
        ({"img_size": "big"}, "img_size must be a whole number or 2 values, each a whole number or None, got 'big'."),
        ({"labels": 5}, "labels must be a list or 'imagenet' or None, got 5."),
        ({"target": 1.5}, "target must be a whole number or a string or a list or a function or None, got 1.5."),
        ({"max_pixels": "x"}, "max_pixels must be a whole number, got 'x'."),
        ({"versus": 1.5}, "versus must be a whole number or a string or None, got 1.5."),
        ({"seed": "x"}, "seed must be a whole number, got 'x'."),
        ({"resize": 3}, "resize must be 'auto' or 'fit' or 'model', got 3."),
        ({"rgb": 3}, "rgb must be a list or None, got 3."),
    ],
    ids=str,
)
def test_wrong_argument_of_explain_raises_a_one_line_error(vit: Any, arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError) as caught:
        visattn.explain(vit, PHOTO, method="attention", **arguments)
    assert str(caught.value) == line


STRANGE: tuple[Any, ...] = (3, -1.5, "x", None, (1, 2), [], {}, b"x", object(), 1j, float("nan"), "é" * 5000)


@pytest.mark.parametrize("method", METHODS)
def test_wrong_method_arguments_raise_option_errors(vit: Any, method: str) -> None:
    """Pass values of other types to every parameter of every method: each is accepted or raises an error of one line."""
    needed: dict[str, dict[str, Any]] = {"similarity": {"query": "pixel:20,20"}, "patching": {"donor": "photo:coffee"}}
    given = needed.get(method, {})
    few: dict[str, Any] = {"evaluations": 2} if method.startswith("captum") and "evaluations" in _names(method) else {}
    for name in _names(method):
        for value in STRANGE:
            if name == "query" and value == (1, 2):
                continue  # a pixel
            if isinstance(value, int) and name in ("evaluations", "count", "batch"):
                continue  # a number is valid here, only slow
            try:
                check_types(METHODS[method].function, {name: value})
            except OptionError:
                with pytest.raises(OptionError, match=f"{name} must be"):
                    visattn.explain(vit, PHOTO, method=method, **given | few | {name: value})


def _names(method: str) -> list[str]:
    return [
        name
        for name in METHODS[method].function.__annotations__
        if name not in ("recording", "scored", "replay", "patches", "image", "return")
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda _: visattn.load_model(3),  # type: ignore[arg-type]
        lambda _: visattn.load_model("vit_tiny_patch16_224", weights=3),  # type: ignore[arg-type]
        lambda _: visattn.load_model("vit_tiny_patch16_224", weights="none", seed="x"),  # type: ignore[arg-type]
        lambda _: visattn.load_image(3),  # type: ignore[arg-type]
        lambda model: visattn.explain(model, PHOTO, method="rollout").save(3),  # type: ignore[arg-type]
        lambda model: visattn.capture(model, grid=3),  # type: ignore[arg-type]
        lambda model: visattn.capture(model, grid=(14.0, 14)),  # type: ignore[arg-type]
        lambda model: visattn.capture(model, layers=3),  # type: ignore[arg-type]
        lambda model: visattn.capture(model, features=3),  # type: ignore[arg-type]
        lambda model: visattn.intervene(model, head="x"),  # type: ignore[arg-type]
        lambda model: visattn.intervene(model, mask=3),  # type: ignore[arg-type]
        lambda model: visattn.intervene(model, edit=3),  # type: ignore[arg-type]
        lambda _: visattn.explain(None, PHOTO),  # type: ignore[arg-type]
        lambda _: visattn.explain(torch.nn.Linear, PHOTO),  # type: ignore[arg-type]
    ],
)
def test_wrong_argument_of_a_public_function_raises_a_one_line_error(vit: Any, call: Callable[[Any], object]) -> None:
    with pytest.raises(OptionError, match=r"^\w+ must be .*, got .*\.$"):
        call(vit)


def test_values_compatible_with_the_type_are_accepted(vit: Any, tmp_path: Path) -> None:
    like: dict[str, Any] = {"layer": np.int64(-1), "head": np.int32(1), "seed": np.uint8(3)}
    found = visattn.explain(vit, PHOTO, method="attention", **like)
    assert found.map.axes == ()
    found.save(str(tmp_path / "a.png"))
    assert visattn.load_model("vit_tiny_patch16_224", weights="none", device=torch.device("cpu")) is not None


def test_compiled_model_is_explained_like_the_original_model(vit: Any) -> None:
    compiled: Any = torch.compile(vit, backend="eager")
    plain = visattn.explain(vit, PHOTO, method="attention")
    found = visattn.explain(compiled, PHOTO, method="attention")
    assert torch.equal(found.map.values, plain.map.values)
    assert found.provenance.preprocessing == plain.provenance.preprocessing


def _decorated() -> list[tuple[str, Callable[..., Any]]]:
    """Return the public functions and methods that some decorator wraps."""
    found: list[tuple[str, Callable[..., Any]]] = []
    parts = [visattn, *(getattr(visattn, name) for name in dir(visattn) if isinstance(getattr(visattn, name), ModuleType))]
    for part in parts:
        for name in part.__all__:
            value = getattr(part, name)
            members = (
                {f"{name}.{key}": getattr(value, key, None) for key in dir(value)} if inspect.isclass(value) else {name: value}
            )
            found += [
                (f"{part.__name__}.{key}", member)
                for key, member in members.items()
                if inspect.isfunction(member) and inspect.unwrap(member) is not member and member.__module__.startswith("visattn")
            ]
    return found


def test_annotations_of_every_decorated_function_can_be_read() -> None:
    """One name that only type checkers import would switch the checks of a function off."""
    every = _decorated()
    assert len(every) > 40
    unread = [
        name
        for name, function in every
        if (plain := inspect.unwrap(function)).__annotations__.keys() - {"return"} and not _hints(plain)
    ]
    assert not unread


def test_a_return_type_for_type_checkers_alone_does_not_switch_checks_off() -> None:
    def drawn(legend: bool) -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
        return legend

    with pytest.raises(OptionError, match="legend must be True or False, got 'x'"):
        check_types(drawn, {"legend": "x"})
