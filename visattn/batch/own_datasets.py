"""Datasets of the user: `file.py:function`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from threading import Lock

from PIL import Image

from visattn._support.checks import first_line, printable
from visattn._support.own_code import made
from visattn.batch.items import Named
from visattn.core.images.sources import as_image
from visattn.errors import ImageError, OptionError


class _Dataset:
    """Dataset that the user's function returns. A process that receives it calls the function itself."""

    def __init__(self, name: str) -> None:
        self.name, self._dataset = name, made(name, OptionError)
        self._one_by_one = Lock()  # few datasets may be read by several threads
        if not (hasattr(self._dataset, "__len__") and hasattr(self._dataset, "__getitem__")):
            raise OptionError(
                f"{printable(name)}: the function returns a {type(self._dataset).__name__}; "
                "return a dataset with __len__ and __getitem__."
            )

    def __reduce__(self) -> tuple[Callable[[str], _Dataset], tuple[str]]:
        return _dataset, (self.name,)

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, index: int, _max_bytes: int) -> Image.Image:
        try:
            with self._one_by_one:
                item = self._dataset[index]
            image = item["image"] if isinstance(item, dict) else item[0] if isinstance(item, (tuple, list)) else item
            photo = as_image(image)
            photo.load()
            return photo
        except Exception as error:  # the user's code may raise anything
            raise ImageError(
                f"{printable(self.name)} {index}: cannot be read ({type(error).__name__}: {first_line(error)})"
            ) from error


@cache
def _dataset(name: str) -> _Dataset:
    return _Dataset(name)


def of_function(name: str) -> list[Named]:
    """Return the images of the dataset that a function returns."""
    dataset, title = _Dataset(name), Path(name.rpartition(":")[0]).stem
    return [Named(f"{name}/{index}", Path(f"{title}_{index:06}"), partial(dataset.image, index)) for index in range(len(dataset))]
