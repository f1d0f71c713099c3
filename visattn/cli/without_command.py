"""The five commands that fit the folder in which `visattn` is called without a command. Nothing is opened, and no library is loaded."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

_PHOTOS = {".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".tif", ".tiff"}
_FILMS = {".mp4", ".mov", ".avi", ".mkv", ".webm", ".gif"}
_WEIGHTS = {".safetensors", ".pth", ".pt", ".ckpt"}
_MOST = 2_000  # entries of a folder that are looked at
_COUNT = 5


def tour(folder: Path) -> str:
    """Return the page for a folder."""
    chosen = list(islice(_commands(folder), _COUNT))
    room = max(len(command) for command, _ in chosen)
    return "\n".join(
        [
            "Where does a vision model look, and can you believe it? For this folder:",
            "",
            *(f"  {command:{room}}  {use}" for command, use in chosen),
            "",
            "All commands: visattn --help. The options of one: visattn overlay --help.",
        ]
    )


def _commands(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield commands with their use, those for what lies in the folder first."""
    found = _entries(folder)
    photo = _first(found, _PHOTOS)
    shown = photo or "photo:chelsea"
    if photo is None:
        yield "visattn demo", "four sample photos through DINOv2: pictures and a page"
    yield f"visattn overlay {shown}", "the attention of DINOv2 over the photo" if photo else "the same over one sample photo"
    yield f"visattn view {shown}", "a page: every head answers for the patch under the pointer"
    if network := next((one.name for one in found if one.is_dir() and Path(one.path, "model.json").is_file()), None):
        yield f"visattn overlay {shown} --model {shlex.quote(network)}", "what your trained network sees"
    if study := _first(found, {".attn"}):
        yield f"visattn view {study}", "the page of this study"
    if film := _first(found, _FILMS):
        yield f"visattn video {film}", "the film with its maps, on one color scale"
    if many := next((one.name for one in found if one.is_dir() and _first(_entries(Path(one.path)), _PHOTOS)), None):
        yield f"visattn batch {shlex.quote(many)}", "maps of every photo in the folder"
    if weights := _first(found, _WEIGHTS):
        yield f"visattn overlay {shown} --model NAME --weights {weights}", "your weights in a model of timm or torchvision"
    yield f"visattn overlay {shown} --model tf_efficientnet_lite0", "evidence for a class, by Grad-CAM"
    yield f"visattn heads {shown} --layer all", "all layers and heads as one picture"
    yield "visattn doctor", "is the installation complete?"


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            seen = [one for one in islice(entries, _MOST) if not one.name.startswith(".")]
    except OSError:
        return []
    return sorted(seen, key=lambda one: one.name)


def _first(entries: Iterable[os.DirEntry[str]], endings: set[str]) -> str | None:
    """Return the first file with one of the endings, as a word for a shell."""
    names = (one.name for one in entries if Path(one.name).suffix.lower() in endings and one.is_file())
    return next((shlex.quote(name if not name.startswith("-") else f"./{name}") for name in names), None)
