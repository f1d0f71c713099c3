"""Processing of many photos, one after the other: an error of one photo is printed, and the others continue."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visattn._support.checks import printable
from visattn.core.command_line.faults import FULL, complain, fault, no_room
from visattn.core.command_line.shared_options import reading
from visattn.errors import ResourceError, VisattnError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Each"]


@dataclass
class Each:
    """Photos of a command, with the errors that occurred.

    Attributes:
        several: Whether there is more than one photo, so that error messages name the photo.
        debug: Whether tracebacks are printed.
        fatal: Errors that concern all photos; they are raised.
        tell: Function that prints an error message.
        codes: Exit code of each error.
    """

    several: bool
    debug: bool = False
    fatal: tuple[type[VisattnError], ...] = ()
    tell: Callable[[str], None] = complain
    codes: list[int] = field(default_factory=list)

    @contextmanager
    def photo(self, image: Path) -> Iterator[None]:
        """Print an error of one photo, with its name, and continue after the `with` block."""
        name = printable(str(image))
        try:
            yield
        except VisattnError as error:
            if isinstance(error, self.fatal):
                raise
            text = str(error)
            self._failed(text if text.startswith(name) or not self.several else f"{name}: {text}", error.exit_code)
        except MemoryError:
            self._failed(f"{name}: out of memory; choose a smaller --img-size", ResourceError.exit_code)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                self._failed(f"{name}: {no_room(error)}", ResourceError.exit_code)
            else:
                self._failed(f"{name}: {fault(error)}", 70)

    def readable(self, images: Iterable[Path], options: dict[str, Any]) -> Iterator[tuple[int, Image.Image]]:
        """Read the photos one by one; yield the index and the image of each that can be read. Only one is in memory at a time."""
        from visattn.core.images.sources import load_image

        for i, image in enumerate(images):
            photo = None
            with self.photo(image):
                photo = load_image(image, **reading(options))
            if photo is not None:
                yield i, photo
                del photo

    def _failed(self, text: str, code: int) -> None:
        if self.debug:
            traceback.print_exc()
        self.tell(text)
        self.codes.append(code)

    def exit_code(self, done: int) -> int:
        """Return the exit code: 0 without errors, 70 after an internal error, 1 if some photos failed, else the first error's code."""
        if 70 in self.codes:
            return 70
        if self.codes:
            return VisattnError.exit_code if done else self.codes[0]
        return 0
