"""Gathering of queries and keys: every image runs once under a capture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.files import write_whole
from visattn._support.progress import progress
from visattn._support.spellings import spelled
from visattn._support.typed import typed
from visattn.embedding.one_image import OneImage, image_states
from visattn.embedding.space import LayerStates, Space, Tokens
from visattn.errors import OptionError, OutputError
from visattn.evaluation.given import MaskLike, as_mask
from visattn.evaluation.specialization import DRAWS, HeadScores
from visattn.families.wrappers import unwrapped
from visattn.images import image_facts
from visattn.loading import load_model
from visattn.loading.weights import state_digest
from visattn.pipeline.inputs import Prepared, prepare_with, read
from visattn.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.pipeline.run import look
from visattn.provenance import Provenance
from visattn.records import TokenLayout

POINTS = 1_000
_SETTINGS = "settings.json"


@spelled(PreprocessingOptions)
@typed(but=("weights",))
def gather(
    model: nn.Module | str,
    images: Sequence[Any],
    *,
    layers: str = "*",
    points: int = POINTS,
    masks: Sequence[MaskLike] | None = None,
    labels: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    keep: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Unpack[PreprocessingOptions],
) -> Space:
    """Gather queries and keys of every head for many images.

    They are the operands of the product before the softmax, so rotary position embeddings are included. States are kept in float16:
    200 images of 257 tokens take 13 MB a head of 64 dimensions.

    Args:
        model: Name of a timm model, or a model.
        images: Images, see `visattn.explain`. All need the same size for the model, so `resize="auto"` is `"model"` here.
        layers: Glob of the names of layers.
        points: Number of patches, over all images, whose attention is kept; they are drawn evenly from the images.
        masks: A mask of an object for each image, of the photo's size.
        labels: A class of each image, for colors.
        groups: Photo of each image, if several are crops of one. Intervals are over photos.
        keep: Folder for what each image gives, from which a run that was interrupted goes on.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: Seed of random weights, of the choice of patches, and of the nulls.
        device: Device of a model that is given by name.
        options: See `visattn.Preprocessing`.

    Returns:
        The states of every layer with self-attention over patches.

    Raises:
        OptionError: If there are no images, no layer fits, masks, labels or groups do not fit, or an image gives other layers or tokens
            than the first one.
        OutputError: If `keep` is of a run with other settings, or cannot be written.
        VisattnError: Any error of `visattn.explain`.
    """
    if not images:
        raise OptionError("no images were given. Pass a list of them.")
    for what, given in (("masks", masks), ("labels", labels), ("groups", groups)):
        if given is not None and len(given) != len(images):
            raise OptionError(f"{what} must have an entry for each of the {len(images)} images, got {len(given)}.")
    if points < 1:
        raise OptionError(f"points must be 1 or more, got {points}.")
    if options.get("resize", "auto") == "auto":
        options["resize"] = "model"
    how = Preprocessing(**options)
    if isinstance(model, str):
        model = load_model(model, weights=weights, seed=seed, img_size=how.img_size, device=device)
    model, some = unwrapped(model), math.ceil(points / len(images))
    kept = None if keep is None else _Kept(Path(keep), model, layers, some, seed, options)
    every: list[OneImage] = []
    made = Provenance()
    with progress("images", "image") as bar:
        for number, image in enumerate(images):
            prepared = prepare_with([read(image, how)], model, how)
            mask = None if masks is None else as_mask(masks[number])
            found = kept.read(number, prepared, mask is not None) if kept else None
            if found is None or not every:
                recording = look(model, prepared, values=True)
                found = image_states(recording, prepared, layers, some, mask, DRAWS, seed + number)
                made = made if every else prepared.noted(recording.provenance)
                if kept:
                    kept.write(number, found)
            if every and _places(found) != _places(every[0]):
                raise OptionError(
                    f"{found.name}: has other layers or tokens than {every[0].name}. Pass img_size, so that all are alike."
                )
            every.append(found)
            bar.update()
    if not every[0].layers:
        raise OptionError(f"no layer that fits '{layers}' has self-attention over patches.")
    of = tuple(range(len(every)) if groups is None else groups)
    states = tuple(_stacked(name, every) for name in tuple(every[0].layers))
    pictures, codes = tuple(one.picture for one in every), torch.stack([one.code for one in every])
    names = tuple(one.name for one in every)
    made = made.but(image=names[0] if len(names) == 1 else f"{len(names)} images", method="embedding")
    return Space(states, names, pictures, codes, tuple(labels or ()), of, _scores(every, of, made), made)


def _places(one: OneImage) -> dict[str, tuple[TokenLayout, TokenLayout]]:
    return {name: (layer.of_queries, layer.of_keys) for name, layer in one.layers.items()}


def _stacked(name: str, every: Sequence[OneImage]) -> LayerStates:
    """Put the images of one layer after one another, and let go of their parts."""
    parts = [one.layers.pop(name) for one in every]
    first = parts[0]
    queries, keys = (torch.cat([getattr(part, side) for part in parts], 1) for side in ("queries", "keys"))
    count, sinks = len(first.of_queries), [one.sinks for one in every]
    some = torch.cat([part.some + number * count for number, part in enumerate(parts)])
    rows = torch.cat([part.rows for part in parts], 1)
    properties = [torch.cat([getattr(part, side) for part in parts]) for side in ("color", "object")]
    of_queries = _tokens(first.of_queries, sinks, *properties)
    empty = torch.full((len(first.of_keys) * len(parts), 4), torch.nan)
    same = first.of_keys == first.of_queries
    of_keys = of_queries if same else _tokens(first.of_keys, sinks, empty[:, :3], empty[:, 3])
    return LayerStates(name, queries, keys, of_queries, of_keys, some, rows, first.notes)


def _scores(every: Sequence[OneImage], of: tuple[int, ...], made: Provenance) -> tuple[HeadScores, ...]:
    titles = every[0].scores
    heads = every[0].heads
    return tuple(
        HeadScores(
            title,
            heads,
            torch.stack([one.scores[title][0] for one in every]),
            torch.stack([one.scores[title][1] for one in every], 1),
            of,
            made,
        )
        for title in titles
    )


def _tokens(layout: TokenLayout, sinks: Sequence[tuple[tuple[int, int], ...]], color: Tensor, covered: Tensor) -> Tokens:
    """Describe the tokens of all images, whose layout is the same."""
    prefix, across = len(layout.prefix), layout.grid[-1]
    cells = torch.tensor(layout.present)
    row = torch.cat([torch.full((prefix,), -1), cells // across])
    column = torch.cat([torch.full((prefix,), -1), cells % across])
    marked = torch.zeros(len(sinks), len(layout), dtype=torch.bool)
    for number, at in enumerate(sinks):
        marked[number] = torch.tensor([(int(r), int(c)) in at for r, c in zip(row, column, strict=True)])
    count = len(sinks)
    image = torch.arange(count).repeat_interleave(len(layout))
    return Tokens(
        image, row.repeat(count), column.repeat(count), marked.flatten(), color, covered, layout.prefix, (layout.grid[0], across)
    )


def forget(keep: Path) -> None:
    """Delete what `gather` kept in a folder, and the folder if nothing else is in it."""
    for file in (keep / _SETTINGS, *keep.glob("[0-9]*.safetensors")):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # files of somebody else, or a link
        keep.rmdir()


class _Kept:
    """Folder with what each image gave."""

    def __init__(self, folder: Path, model: nn.Module, layers: str, some: int, seed: int, options: Any) -> None:  # noqa: ANN401
        self.folder = folder
        told = {
            "model": state_digest(model),
            "layers": layers,
            "points": some,
            "seed": seed,
            "options": repr(sorted(options.items())),
        }
        file = folder / _SETTINGS
        if file.exists():
            if json.loads(file.read_text(encoding="utf-8")) != told:
                raise OutputError(
                    f"{printable(str(folder))}: was begun with another model or other settings. Remove this folder, or choose another."
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(told).encode())

    def read(self, number: int, prepared: Prepared, masked: bool) -> OneImage | None:
        """Return what an image gave, if it was kept, is whole, and is of this image."""
        file = self.folder / f"{number:06}.safetensors"
        if not file.exists():
            return None
        found = OneImage.load(file)
        same = found.sha256 == image_facts(prepared.photo).sha256 and ("object" in found.scores) == masked
        return found if same else None

    def write(self, number: int, found: OneImage) -> None:
        found.save(self.folder / f"{number:06}.safetensors")
