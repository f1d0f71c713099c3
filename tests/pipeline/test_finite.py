"""Numbers that no range contains: NaN and infinity are refused for every option, before a model is loaded."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from tests.cli.test_commands import Run, photo, run
from visattn.core import methods
from visattn.core.command_line.late import _flat
from visattn.core.drawing.style import Style
from visattn.core.methods import METHODS
from visattn.core.pipeline.question import ask
from visattn.errors import OptionError

__all__ = ["photo", "run"]

FLOATS = [
    (name, parameter)
    for name, method in METHODS.items()
    for parameter in method.parameters
    if float in _flat(get_type_hints(method.function)[parameter])
]
OF_STYLE = [field.name for field in fields(Style) if float in _flat(get_type_hints(Style)[field.name])]
BEYOND = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf, "a number beyond all floats": 10**400}
NEEDED: dict[str, dict[str, Any]] = {"similarity": {"query": "patch:0,0"}}


def test_the_table_has_numbers() -> None:
    assert ("captum.smoothgrad", "noise") in FLOATS
    assert OF_STYLE == ["opacity", "contours"]


@pytest.mark.parametrize("beyond", BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize(("name", "parameter"), FLOATS)
def test_a_parameter_that_is_not_finite_is_refused(name: str, parameter: str, beyond: float) -> None:
    for value in (beyond, np.float64(beyond) if isinstance(beyond, float) else beyond):
        with pytest.raises(OptionError, match=rf"^{parameter} must be finite, got -?(nan|inf|1000).*\.$"):
            ask(name, {parameter: value, **NEEDED.get(name, {})})


@pytest.mark.parametrize("beyond", BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("name", OF_STYLE)
def test_an_option_of_drawing_that_is_not_finite_is_refused(name: str, beyond: float) -> None:
    with pytest.raises(OptionError, match="must be a number from 0 to 1, got"):
        Style(**{name: beyond})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("name", "parameter"), FLOATS)
def test_the_command_line_refuses_it_before_a_model_is_loaded(
    name: str,
    parameter: str,
    text: str,
    run: Run,
    photo: Path,
) -> None:
    code, out, err = run("overlay", photo, "--model", "no_such_model", "--method", name, f"--{parameter}={text}")
    assert (code, out) == (2, "")
    assert err == f"visattn: error: {parameter} must be finite, got {text}.\n"


@pytest.mark.parametrize(
    "given",
    [
        ("overlay", "--mass=nan"),
        ("overlay", "--opacity=nan"),
        ("overlay", "--contours=inf"),
        ("overlay", "--std=nan,1,1"),
        ("heads", "--mass=nan"),
        ("video", "--walk=2", "--method=attention", "--rate=nan"),
        ("video", "--walk=2", "--method=attention", "--smooth=nan"),
        ("view", "--max-mb=nan"),
    ],
    ids=" ".join,
)
def test_other_numbers_of_commands_are_refused(given: tuple[str, ...], run: Run, photo: Path) -> None:
    code, out, err = run(given[0], photo, "--model", "scenes_vit", *given[1:])
    assert (code, out) == (2, "")
    assert err.startswith("visattn: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("noise", [math.nan, math.inf, -1.0, 101.0])
def test_noise_out_of_range_is_refused_by_the_method_itself(noise: float) -> None:
    pytest.importorskip("captum")
    with pytest.raises(OptionError, match="noise must be a positive share of the range of the image's values, up to 100, got"):
        methods.smoothgrad(None, scored=None, noise=noise)  # type: ignore[arg-type] # refused before they are read
