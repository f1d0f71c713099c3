"""Another image as target: how similar its embedding and that of the photo are, by the same model."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visattn._support.checks import printable
from visattn._support.language import option
from visattn._support.memory import OfWeights
from visattn._support.modes import callers_autocast
from visattn.core.images import image_facts
from visattn.core.pipeline.embeddings import are_embeddings, check_values, embedded, rounding_in, vectors_in, with_words
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.output_places import Place, Score
from visattn.core.pipeline.targets import Target
from visattn.errors import ImageError, OptionError

__all__ = ["similar_to"]


class OtherImage(NamedTuple):
    """An image that photos are compared with, as a model sees it.

    Attributes:
        vector: Its embedding, `(d,)`.
        unit: The same divided by its norm.
        name: Its name.
        of: What is compared, if nothing tells that the outputs are embeddings; else empty.
        notes: Its name with the digest of its file, and how it was read.
        rounding: Share of an embedding that is rounding.
    """

    vector: Tensor
    unit: Tensor
    name: str
    of: str
    notes: tuple[str, ...]
    rounding: float


class SimilarTo:
    """Target of photos that are compared with one image; made by `similar_to`."""

    def __init__(self, image: Any) -> None:  # noqa: ANN401
        """Store the image; it is read when a model first needs it."""
        self.image = image
        self.named_target = ("similar", printable(str(image)) if isinstance(image, (str, os.PathLike)) else "an image")
        self._of_models: OfWeights[OtherImage] = OfWeights()

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"similar_to({self.named_target[1]!r})"

    def __str__(self) -> str:
        """Return the target as a command takes it."""
        return ":".join(self.named_target)

    def __reduce__(self) -> tuple[type[SimilarTo], tuple[Any]]:
        """Return what a copy is made of; each process computes embeddings anew."""
        return SimilarTo, (self.image,)

    def __call__(self, output: Any) -> Tensor:  # noqa: ANN401
        """Refuse an output, as the model has to see the other image first.

        Raises:
            OptionError: Always.
        """
        raise OptionError(
            "the similarity to an image is a target of visattn.explain and its kin. Here, pass a function of the output."
        )

    def seen_by(self, model: nn.Module, photo: Prepared, target: Target) -> OtherImage:
        """Return the image as the model sees it, prepared as a photo was; it is computed once for these weights.

        Raises:
            OptionError: If it cannot be read, or has no embedding, or how the photo was prepared is not known.
        """
        if photo.how is None or photo.inputs:
            given = f"inputs {', '.join(photo.inputs)}" if photo.inputs else "pixels"
            raise OptionError(
                f"target {self}: the photo came with {given} of its own, and those of the other image are not known. Pass the photo "
                "alone, or a function of the output."
            )
        how = tuple(tuple(value) if isinstance(value, list) else value for value in vars(photo.how).values())
        about = how, photo.seed, callers_autocast(photo.pixels.device.type), target.task, target.labels is None
        return self._of_models.of(model, about, lambda: self._seen(model, photo, target))

    def _seen(self, model: nn.Module, photo: Prepared, target: Target) -> OtherImage:
        assert photo.how is not None  # noqa: S101 - checked by the caller
        try:
            prepared = prepare_with([read(self.image, photo.how)], model, photo.how)
        except ImageError as error:
            raise OptionError(f"the other image of target {self}: {error}") from error
        facts, output = image_facts(prepared.photo), embedded(model, replace(prepared, seed=photo.seed))
        is_known = are_embeddings(output, model, prepared, target.task, target.labels)
        vector = vectors_in(output)[0]
        notes = (f"compared with {facts.name} (sha256 {facts.sha256})", *(f"{facts.name}: {note}" for note in facts.notes))
        of = "" if is_known else "of the outputs "
        return OtherImage(vector, _unit(vector, facts.name), facts.name, of, notes, rounding_in(output))


def similar_to(image: Any) -> SimilarTo:  # noqa: ANN401 - what `explain` takes as an image
    """Return the target that a photo is similar to another image: the cosine of their embeddings, by the same model.

    `similar:IMAGE` is the same for a source of `load_image`. The other image is loaded and preprocessed as the photo is, and runs through
    the model once for all photos of a call; its embedding is a constant.

    Args:
        image: The other image, as `explain` takes it: a source of `load_image`, a PIL image, an array or a tensor.

    Returns:
        A value for `target`, of models that return an embedding `(B, d)` for each image.

    Raises:
        OptionError: If there is no image.
    """
    if image is None or (isinstance(image, str) and not image):
        example = option("target", "similar:photo:coffee")
        raise OptionError(f"target similar: names no image. Pass a file, an address or a shipped photo: {example}.")
    return SimilarTo(image)


def completed(model: nn.Module, prepared: Prepared, target: Target) -> tuple[Prepared, Target]:
    """Return the similarity to another image as a function of the output, and notes on that image with the photo.

    Raises:
        OptionError: If the other image or the model does not fit, or `versus` or `target_space` is given too.
    """
    assert isinstance(target.of, SimilarTo)  # noqa: S101 - the step was looked up by it
    if target.versus is not None or target.target_space != "logit":
        raise OptionError(f"target {target.of} has no versus and no target_space. Leave them out.")
    other = target.of.seen_by(model, prepared, target)
    with_notes = with_words(model, prepared).with_notes(*other.notes)
    return with_notes, replace(target, of=Place(lambda output: _settled(output, other, model)))


def _settled(output: Any, other: OtherImage, model: nn.Module) -> Score:  # noqa: ANN401
    vectors = vectors_in(output).detach()
    _unit(vectors[0], "the photo")
    if other.of:
        check_values(model, torch.cat([vectors, other.vector.to(vectors)[None]]))
    value, is_same = float(_cosine(vectors, other.unit)[0]), not bool(_differ(vectors, other)[0])
    told = f"similarity {other.of}to {other.name} = {value:.3g}"
    told += "; the direction is the same up to rounding, so the gradient is zero" if is_same else ""
    return Score(lambda output: _score(vectors_in(output), other), told)


def _unit(vector: Tensor, name: str) -> Tensor:
    """Return an embedding `(d,)` divided by its norm.

    Raises:
        OptionError: If it has no direction.
    """
    if not bool(vector.isfinite().all()) or not bool(vector.any()):
        what = "has numbers that are not finite" if not bool(vector.isfinite().all()) else "is zero everywhere"
        raise OptionError(f"{name}: its embedding {what}, so it is similar to nothing. Choose another image.")
    return normalize(vector, dim=0)


def _score(vectors: Tensor, other: OtherImage) -> Tensor:
    """Return the cosine of each embedding with the other's. Where both have one direction, its gradient would be rounding, and is 0."""
    cosine = _cosine(vectors, other.unit)
    return torch.where(_differ(vectors.detach(), other), cosine, cosine.detach())


def _cosine(vectors: Tensor, unit: Tensor) -> Tensor:
    cosine: Tensor = normalize(vectors, dim=1) @ unit.to(vectors)
    return cosine


def _differ(vectors: Tensor, other: OtherImage) -> Tensor:
    """Check which embeddings `(B, d)` leave the line of the other's by more than rounding, which a forward pass adds up."""
    units, unit = normalize(vectors.double(), dim=1), other.unit.to(vectors.device).double()
    aside: Tensor = (units - (units @ unit)[:, None] * unit).norm(dim=1)
    return aside > other.rounding
