"""Embeddings of images in the output of a model, and whether the model tells that they are embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from visattn._support.language import option, worded
from visattn._support.modes import evaluating
from visattn._support.types import Task
from visattn.core.families.owners import owner
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.outputs import Meaning, tensor_of
from visattn.core.pipeline.passes import answer_of, as_the_model
from visattn.errors import OptionError, ShapeError

__all__ = ["with_words"]

_FIELDS = "image_embeds", "image_features", "pooler_output"  # of transformers and open_clip
_BESIDE = "the model ran beside a text, on which the embedding of an image does not depend"
_WORDS = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])  # any two texts, which an image tower does not read


def vectors_in(output: Any) -> Tensor:  # noqa: ANN401
    """Return the embedding of each image, `(B, d)`, in at least single precision.

    Raises:
        ShapeError: If the output has none.
    """
    tensor = _tensor(output)
    if tensor is not None and tensor.ndim > 2 and tensor.shape[2:].numel() == 1:
        tensor = tensor.flatten(1)
    if tensor is None or tensor.ndim != 2 or tensor.shape[1] < 2 or not tensor.is_floating_point():
        shape = type(output).__name__ if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ShapeError(
            f"target similar: needs one embedding for each image, numbers (B, d) with d of at least 2; the model returned {shape}. "
            + worded("Pass a function of its output as target.", "Choose another target.")
        )
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _tensor(output: Any) -> Tensor | None:  # noqa: ANN401
    embedding = _named(output)
    return tensor_of(output, "logits") if embedding is None else embedding


def _named(output: Any) -> Tensor | None:  # noqa: ANN401
    """Return the embedding of images by the name that its library gives it; None if there is none."""
    if isinstance(output, tuple) and len(output) > 2 and output[1] is None:  # open_clip without texts
        output = {"image_features": output[0]}
    return tensor_of(output, *_FIELDS)


def are_embeddings(
    output: Any,  # noqa: ANN401
    model: nn.Module,
    prepared: Prepared,
    task: Task | None,
    labels: Sequence[str] | None,
) -> bool:
    """Check whether the vectors in an output are known to be embeddings; False if nothing tells what they are.

    They are known to be if they have such a name, if the model's library built it without a head, or by `task`.

    Raises:
        OptionError: If they are known to be something else, such as logits of classes.
    """
    if task == "embedding" or _named(output) is not None or not prepared.spec_of(model).classifier:
        return True
    named = not isinstance(output, (Tensor, tuple)) and tensor_of(output, "logits") is not None
    given = task or (None if labels is None else "classes")
    if given is not None or named or owner(model) != "custom":  # a library gave the model this head
        _refuse(model, Meaning.of(vectors_in(output), given or "classes", labels).kind)
    return False


def check_values(model: nn.Module, vectors: Tensor) -> None:
    """Check that the outputs for several images `(B, d)` are not probabilities of classes. A row with a single 1 proves nothing.

    Raises:
        OptionError: If they are.
    """
    kind = Meaning.of(vectors, None, None).kind
    if kind != "unknown" and not bool((vectors == vectors.round()).all(1).any()):
        _refuse(model, kind)


def _refuse(model: nn.Module, kind: str) -> NoReturn:
    """Tell what the outputs are.

    Raises:
        OptionError: Always.
    """
    without = worded("timm.create_model(..., num_classes=0), or model.fc = torch.nn.Identity()", "in timm num_classes=0")
    raise OptionError(
        f"{type(model).__name__}: its outputs are {kind}, and no embedding that could be similar to another. Take its head away "
        f"({without}), or say that they are one: {option('task', 'embedding')}."
    )


def with_words(model: nn.Module, prepared: Prepared, number: int = 0) -> Prepared:
    """Return a photo for a model that embeds images and texts beside a text, without which those of transformers do not run."""
    if not (hasattr(model, "get_image_features") and hasattr(model, "get_text_features")):
        return prepared
    ids = _WORDS[number].to(prepared.pixels.device)
    return replace(prepared, inputs={**prepared.inputs, "input_ids": ids}).with_notes(_BESIDE)


def embedded(model: nn.Module, prepared: Prepared) -> Any:  # noqa: ANN401
    """Return the output for one image, whose embedding does not depend on the text that `with_words` adds, which is tried with two.

    Raises:
        OptionError: If it does.
        ShapeError: If the output has no embedding.
    """
    beside = [with_words(model, prepared, number) for number in range(len(_WORDS))]
    beside = beside[:1] if beside[0] is prepared else beside
    with evaluating(model, frozen=True), torch.no_grad():
        outputs = [answer_of(model, as_the_model(model, text.pixels), text) for text in beside]
    one, *others = map(vectors_in, outputs)
    if any(not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max())) for other in others):
        raise OptionError(
            f"{type(model).__name__}: its embedding of an image depends on the text beside it, so images cannot be compared alone. "
            + worded("Pass inputs= and a function of the output as target.", "Choose another model.")
        )
    return outputs[0]


def rounding_in(output: Any) -> float:  # noqa: ANN401
    """Return the share of an embedding by which two forward passes may differ by rounding alone."""
    tensor = _tensor(output)
    assert tensor is not None  # noqa: S101 - `vectors_in` found it
    return float(torch.finfo(tensor.dtype).eps ** 0.5)
