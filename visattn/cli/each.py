"""Many photos, one after the other: what fails for one is told, and the others go on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visattn._support.checks import printable
from visattn.cli.commands import FULL, complain, fault, no_room
from visattn.cli.options import reading
from visattn.errors import ResourceError, VisattnError

if TYPE_CHECKING:
    from PIL import Image


@dataclass
class Each:
    """The photos of a command.

    Attributes:
        several: Whether there are more than one, so that a failure is told with its photo's name.
        debug: Whether tracebacks are printed.
        fatal: Errors that concern all photos; they are raised.
        tell: Prints a failure.
        codes: The exit code of each failure.
    """

    several: bool
    debug: bool = False
    fatal: tuple[type[VisattnError], ...] = ()
    tell: Callable[[str], None] = complain
    codes: list[int] = field(default_factory=list)

    @contextmanager
    def photo(self, image: Path) -> Iterator[None]:
        """Tell what fails for one photo, by its name, and go on behind the `with`."""
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
        """Read the photos one by one, and give each that can be read with its position; only one is in memory."""
        from visattn.images import load_image

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
        """Return 0 if nothing failed; 1 if some did; of nothing done and of a fault of ours, its own code."""
        if 70 in self.codes:
            return 70
        if self.codes:
            return VisattnError.exit_code if done else self.codes[0]
        return 0
