"""Class names from a text file."""

from __future__ import annotations

from pathlib import Path

from visattn._support.checks import printable
from visattn._support.files import is_file, regular
from visattn.core.families.timm import imagenet_classes
from visattn.errors import OptionError

__all__ = ["read_labels"]


def read_labels(path: Path) -> tuple[str, ...]:
    """Read class names from a text file with one name per line; `imagenet` stands for those of ImageNet, unless there is such a file.

    Raises:
        OptionError: If the file cannot be read as text.
    """
    if str(path) == "imagenet" and not is_file(path):
        return imagenet_classes()
    try:
        lines = regular(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{printable(str(path))}: labels must be a text file with one name per line; {error}.") from error
    return tuple(line.strip() for line in lines if line.strip())
