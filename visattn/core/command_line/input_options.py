"""Options for other inputs of a model: files of numbers, and further photos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from visattn._support.checks import first_line, printable, unreadable
from visattn._support.files import regular
from visattn._support.json_files import decoded
from visattn.core.command_line.shared_options import reading
from visattn.errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

__all__ = ["input_options", "inputs_of", "with_photo"]

F = TypeVar("F", bound=Callable[..., Any])


def input_options(command: F) -> F:
    """Add options for other inputs of the model, and for the input that the images are."""
    place = click.option(
        "--image-input", "image", metavar="NAME", help="Input of the model that IMAGES are given as, such as rgb or batch.rgb."
    )
    given = click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="NAME=FILE",
        help="Another input: numbers as the model takes them (.npy, .json, or rows of floats in .csv), or a photo, prepared as IMAGES are.",
    )
    return place(given(command))


def inputs_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the other inputs; return them by name.

    Raises:
        OptionError: If a file cannot be read, or a name is malformed or given twice.
        ImageError: If a photo cannot be read.
    """
    given: dict[str, Any] = {}
    for name, file in map(_parted, options["inputs"]):
        if name in given or name == options["image"]:
            raise OptionError(f"the input {printable(name)} is given twice. Leave one out.")
        given[name] = _read(file, options)
    return given


def with_photo(inputs: Mapping[str, Any], photo: Image.Image, place: str | None) -> dict[str, Any]:
    """Return inputs with a photo at its place, if that is named; parts of names become keys of dictionaries, or places in lists.

    Raises:
        OptionError: If a name is both an input and a part of another, or the places in a list have gaps.
    """
    flat = dict(inputs) if place is None else {**inputs, place: photo}
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *outer, last = path.split(".")
        inside = nested
        for name in outer:
            inside = inside.setdefault(name, {})
        if not isinstance(inside, dict) or last in inside:
            raise OptionError(f"the input {printable(path)} lies inside of another that is given whole. Leave one out.")
        inside[last] = value
    return {int(name) if name.isdecimal() else name: _with_lists(value, name) for name, value in nested.items()}  # type: ignore[misc]


def _with_lists(value: Any, path: str) -> Any:  # noqa: ANN401
    """Return dictionaries whose keys are 0, 1 and so on as lists."""
    if not isinstance(value, dict):
        return value
    if not all(key.isdecimal() for key in value):
        return {key: _with_lists(part, f"{path}.{key}") for key, part in value.items()}
    missing = next((place for place in range(len(value)) if str(place) not in value), None)
    if missing is not None:
        raise OptionError(f"the input {printable(path)}.{missing} is missing. Places are counted from 0.")
    return [_with_lists(value[str(place)], f"{path}.{place}") for place in range(len(value))]


def _parted(given: str) -> tuple[str, str]:
    name, equals, file = given.partition("=")
    if not (name and equals and file) or "" in name.split("."):
        raise OptionError(
            f"--input must be NAME=FILE, the name of an input and its file, got {printable(given)}. IMAGES are given without an option."
        )
    return name, file


def _read(file: str, options: Mapping[str, Any]) -> Tensor | Image.Image:
    """Read an input from a file, by its ending."""
    reader = _READERS.get(Path(file).suffix.lower())
    if reader is None:
        from visattn.core.images.sources import load_image

        return load_image(file, **reading(dict(options)))
    try:
        return _tensor(reader(regular(Path(file))))
    except OSError as error:
        raise OptionError(unreadable(error, Path(file))) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise OptionError(f"{printable(file)}: holds no array of numbers ({first_line(error).rstrip('.')}).") from error


def _tensor(numbers: np.ndarray[Any, Any]) -> Tensor:
    """Return numbers as a tensor: floats in single precision, whole numbers as 64-bit integers."""
    import numpy as np
    import torch

    if numbers.dtype.kind not in "fiub":
        raise ValueError(f"its values are {numbers.dtype}")
    kind = {"f": np.float32, "b": np.bool_}.get(numbers.dtype.kind, np.int64)
    return torch.from_numpy(np.array(numbers, kind))


def _of_npy(file: Path) -> np.ndarray[Any, Any]:
    import numpy as np

    loaded: np.ndarray[Any, Any] = np.load(file, mmap_mode="r", allow_pickle=False)  # no more memory than the file has bytes
    return loaded


def _of_json(file: Path) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.array(decoded(file.read_bytes(), list[Any]))


def _of_csv(file: Path) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.loadtxt(file, delimiter=",", ndmin=2, dtype=np.float64, encoding="utf-8")


_READERS: Mapping[str, Callable[[Path], Any]] = {".npy": _of_npy, ".json": _of_json, ".csv": _of_csv}
