"""Gathering of queries and keys: every image runs once under a capture."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from visattn._support.checks import as_list, one_each
from visattn._support.language import option
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.progress import progress
from visattn._support.typed import typed
from visattn.core.images import image_facts
from visattn.core.loading.weights import state_digest
from visattn.core.pipeline.asking import model_of
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.pipeline.prompts import tokenized
from visattn.core.provenance import Provenance, versions
from visattn.embedding.joining import joined_images
from visattn.embedding.keeping import Kept, alike
from visattn.embedding.one_image import OneImage, image_states
from visattn.embedding.space import Space
from visattn.errors import OptionError
from visattn.evaluation import NULL_DRAWS, MaskLike, as_mask

POINTS = 1_000


@with_options(PreprocessingOptions)
@typed(but=("weights",))
@in_own_modes
def gather(
    model: nn.Module | str,
    images: Sequence[Any],
    *,
    layers: str = "*",
    points: int = POINTS,
    texts: Sequence[str] | None = None,
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
        texts: A text for each image, such as its caption, for a model with a text tower: layers over words are then gathered too.
        masks: A mask of an object for each image, of the photo's size.
        labels: A class of each image, for colors.
        groups: Photo of each image, if several are crops of one. Intervals are over photos.
        keep: Folder for what each image gives, from which a run that was interrupted goes on. What comes from another image, mask, model
            or setting is computed anew.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: Seed of random weights, of the choice of patches, and of the nulls.
        device: Device of a model that is given by name.
        options: See `visattn.Preprocessing`.

    Returns:
        The states of every layer with self-attention over two or more patches. A note of the provenance names other layers with attention.

    Raises:
        OptionError: If there are no images, no layer fits, masks, labels or groups do not fit, or an image gives other layers or tokens
            than the first one.
        OutputError: If `keep` cannot be written.
        VisattnError: Any error of `visattn.explain`.
    """
    images = as_list(images)
    if not images:
        raise OptionError("no images were given. Pass a list of them.")
    one_each(len(images), texts=texts, masks=masks, labels=labels, groups=groups)
    if points < 1:
        raise OptionError(f"points must be 1 or more, got {points}.")
    if options.get("transform") is None and options.get("resize", "auto") == "auto":
        options["resize"] = "model"
    how = Preprocessing(**options)
    model, notes = model_of(model, how, weights=weights, seed=seed, device=device)
    words = None if texts is None else tokenized(model, texts)
    source = _Source(model, layers, math.ceil(points / len(images)), seed, keep)
    every: list[OneImage] = []
    with progress("images", "image") as bar:
        for number, image in enumerate(images):
            prepared = prepare_with([read(image, how)], model, how).with_notes(*notes)
            if words is not None:
                prepared = words.beside(prepared, number)
            mask = None if masks is None else as_mask(masks[number])
            every.append(source.image(number, prepared, mask, words.words[number] if words else ()))
            _check(every, layers)
            bar.update()
    made = source.made.but(parameters={"layers": layers, "points": points, "seed": seed})
    of = range(len(every)) if groups is None else groups
    return joined_images(every, tuple(map(int, of)), () if labels is None else tuple(map(str, labels)), made)


class _Source:
    """States of one image after another: from the model, or from what an earlier run kept of it.

    Attributes:
        made: Provenance of the first image.
    """

    def __init__(self, model: nn.Module, layers: str, some: int, seed: int, keep: str | os.PathLike[str] | None) -> None:
        self.made = Provenance()
        self._model, self._layers, self._some, self._seed = model, layers, some, seed
        self._kept, self._trusted = None, False  # whether what was kept comes from this model, once an image has shown it
        if keep is not None:
            built = re.sub(r" at 0x\w+", "", repr(model))  # with activations and constants, which are no weights
            settings = {"versions": versions(), "model": state_digest(model), "built": built, "draws": NULL_DRAWS, "seed": seed}
            self._kept = Kept(Path(keep), **settings, layers=layers, points=some)

    def image(self, number: int, prepared: Prepared, mask: NDArray[np.bool_] | None, words: tuple[str, ...]) -> OneImage:
        if self._kept is None:
            return self._computed(number, prepared, mask, words)
        key = self._kept.key(prepared, mask)
        before = self._kept.read(number, key)
        if before is not None and self._trusted:
            facts = image_facts(prepared.photo)
            return replace(before, name=facts.name, sha256=facts.sha256)
        found = self._computed(number, prepared, mask, words)
        if before is not None:
            self._trusted = alike(before, found)
        self._kept.write(number, key, found)
        return found

    def _computed(self, number: int, prepared: Prepared, mask: NDArray[np.bool_] | None, words: tuple[str, ...]) -> OneImage:
        recording = look(self._model, prepared, values=True)
        if number == 0:
            self.made = prepared.noted(recording.provenance)
        return image_states(
            recording, prepared, self._layers, self._some, NULL_DRAWS, self._seed + number, mask=mask, words=words
        )


def _check(every: Sequence[OneImage], layers: str) -> None:
    """Check that the last image has layers, and those of the first one."""
    first, last = every[0], every[-1]
    if not last.layers:
        raise OptionError(f"no layer that fits '{layers}' has self-attention over patches.")
    if {name: one.layout for name, one in last.layers.items()} != {name: one.layout for name, one in first.layers.items()}:
        raise OptionError(
            f"{last.name}: has other layers or tokens than {first.name}. Pass {option('img_size')}, so that all are alike."
        )
