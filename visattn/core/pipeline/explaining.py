"""Public ways in: an image, or many, to their explanations. `explain` is a list of one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visattn._support.checks import between
from visattn._support.faces import Later
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.typed import typed
from visattn._support.types import LARGEST_BATCH
from visattn.core.families.weight_facts import facts_read_once
from visattn.core.methods.method_table import MethodName
from visattn.core.pipeline.arguments import target_of
from visattn.core.pipeline.asking import Asked, asked_of, model_of
from visattn.core.pipeline.explanation import DrawOptions, Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.preprocessing import PreprocessingOptions
from visattn.core.pipeline.question import parameter_names
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.targets import Of, TargetOptions
from visattn.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from visattn.core.pipeline import own_targets, tensors
else:
    own_targets, tensors = Later(f"{__package__}.own_targets"), Later(f"{__package__}.tensors")

__all__ = ["BATCH", "explain", "explain_batch", "explain_each"]

BATCH = 16


@with_options(PreprocessingOptions, TargetOptions, DrawOptions, more=parameter_names)
@typed(but=("weights", "method"))
@in_own_modes
@facts_read_once()
def explain(
    model: nn.Module | str,
    image: Any = None,  # noqa: ANN401 - a source of `load_image`, a picture or an array
    *,
    method: MethodName | str = "auto",  # editors complete the names
    target: Of = None,
    pixels: Tensor | None = None,
    inputs: Mapping[Any, Any] | None = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - fields of `Target` and `Preprocessing`, and the method's parameters
) -> Explanation:
    """Show where a model looks in an image.

    Args:
        model: Name of a timm model, or a model.
        image: PIL image, array, tensor, or a source of `load_image`. A model with other than one or three input channels needs an array
            `(H, W, C)` or `(C, H, W)`. With `inputs` it may be the path of the one that is the picture, such as `rgb` or `batch.rgb`.
        method: Name from `visattn.methods.METHODS`, or `auto`. For a classifier, `auto` is relevance for the top class if attention
            can be multiplied across its layers, and Grad-CAM if it has no self-attention. Otherwise it is last-layer attention, or
            Grad-CAM if a target is given.
        target: Class to explain, by index or name; None: the top class. `class:K`, `label:A,B`, `output:N`, `output:-N`,
            `text:WORDS` and `similar:IMAGE` (or `similar_to(image)`) say what they name. For dense outputs and detectors: `pixel:X,Y`
            (the class predicted at a pixel of the upright photo), `mask:K` (a class, or a mask, over its pixels) or `box:N` (the class of
            a detection). Any other model without a classification head needs a function from its output to one number per image. For
            class-specific methods only.
        pixels: Input `(1, C, H, W)` that is ready for the model, in place of the preprocessing. `image` is then the picture that they show
            as a whole; without it, the pixels are shown with their normalization undone.
        inputs: Inputs of the model by name or by position from 0, such as `{"table": row}` or `{1: row}`, or all that a processor of
            transformers returns. Tensors may lie inside of lists, tuples, dictionaries and dataclasses; a path joins names, keys and places
            by dots: `views.1`. Photos (PIL images) are preprocessed. A photo that is given as `image` goes where an input is missing; if
            none is, pixels among the inputs must be those of the photo: what the model's own preprocessing makes of it, or an input that
            shows the photo as a whole.
        weights: See `load_model`; only if `model` is a name.
        seed: Seed of methods that draw samples, of models that draw in their forward pass and, if `model` is a name, of random weights.
        device: Device of a model that is given by name.
        options: Options of the target: `versus`, another class, whose score is subtracted; `target_space`, the score whose gradient
            is taken: `logit`, `prob` (after softmax) or `logprob`; `labels`, the names of the classes (`imagenet`: those of ImageNet;
            those of published weights are known); `task`, what the outputs are if that is not known, see `Target`; `prompt`, a text
            whose similarity to the image is explained, for models such as CLIP.
            Options of the preprocessing, see `Preprocessing`: `resize` (`auto`, `fit` or `model`), `img_size`, `mean`, `std`, `transform`,
            `color_profile`, `max_pixels`, `max_bytes`, `rgb`. All others are parameters of the method. A query is text, a pixel `(x, y)`
            of the upright photo, which selects the patch that covers it, or a tensor with one weight per token. A layer is an index, a
            dotted name or a module.

    Returns:
        The explanation; `.overlay()` draws it.

    Raises:
        OptionError: If the method, a parameter or the target is unknown, out of range, or does not fit the model.
        VisattnError: Any error of `load_image`, `load_model`, `prepare`, `prepare_tensor`, `capture` and the method.
    """
    bare, prepared, asked = ask_about(
        model, image, method, target=target, pixels=pixels, inputs=inputs, weights=weights, seed=seed, device=device, **options
    )
    (explanation,) = explained(bare, [prepared], asked.question, seed=seed)
    return explanation


def ask_about(
    model: nn.Module | str,
    image: Any,  # noqa: ANN401
    method: MethodName | str,
    *,
    target: Of = None,
    pixels: Tensor | None = None,
    inputs: Mapping[Any, Any] | None = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401
) -> tuple[nn.Module, Prepared, Asked]:
    """Check the arguments of `explain`, load the model and prepare the image.

    Raises:
        VisattnError: The errors of `explain` before the model runs.
    """
    _check_given(image, pixels, inputs, options)
    asked = asked_of(method, target, options, seed)
    photo = image if image is None or inputs is not None else read(image, asked.how)  # a bad file fails before a model is loaded
    bare, notes = model_of(model, asked.how, weights=weights, seed=seed, device=device)
    if inputs is not None:
        prepared = tensors.prepare_inputs(inputs, photo, bare, asked.how)
    elif pixels is not None:
        photos = None if photo is None else [photo]
        prepared = tensors.prepare_tensor(pixels, bare, photos=photos, mean=asked.how.mean, std=asked.how.std)
    else:
        prepared = prepare_with([photo], bare, asked.how)
    return bare, prepared.with_notes(*notes), asked


def _check_given(
    image: Any,  # noqa: ANN401
    pixels: Tensor | None,
    inputs: Mapping[Any, Any] | None,
    options: Mapping[str, Any],
) -> None:
    """Check what only `explain` can know about its arguments.

    Raises:
        OptionError: If there is no image, or an option of pictures is among the options.
        ShapeError: If there are several inputs.
    """
    if pixels is not None and inputs is not None:
        raise OptionError("pixels are one of the inputs. Pass them among inputs, under the name that the model has for them.")
    if image is None and pixels is None and inputs is None:
        raise OptionError('image is missing. Pass a file name, a picture or an array: explain(model, "photo:chelsea").')
    if isinstance(image, Prepared):
        raise OptionError(
            "image is already preprocessed. Pass its two parts: explain(model, prepared.photo, pixels=prepared.pixels)."
        )
    if isinstance(pixels, Tensor) and pixels.ndim == 4 and len(pixels) > 1:
        raise ShapeError(
            f"pixels must be one input (1, C, H, W), got {len(pixels)}. Explain them one by one: pixels=pixels[i : i + 1]."
        )
    if drawing := [name for name in options if name in DrawOptions.__annotations__]:
        raise OptionError(f"{drawing[0]} is an option of the picture: explain(...).overlay({drawing[0]}=...), or .save or .show.")


@with_options(PreprocessingOptions, TargetOptions, DrawOptions, more=parameter_names)
@typed(but=("weights", "method"))
def explain_batch(
    model: nn.Module | str,
    images: Iterable[Any],
    *,
    method: MethodName | str = "auto",
    target: Of | Iterable[Of] = None,
    batch_size: int = BATCH,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - as in `explain`
) -> Iterator[Explanation]:
    """Show where a model looks in many images: the explanations of `explain`, with one forward pass for several images.

    Images are read as they are needed, so they may be a generator, and any number of them fits into memory. Those of a batch whose inputs
    have one size run through the model together, or in halves if memory does not suffice. Methods that run the model many times for one
    image, such as Score-CAM, and questions whose answer depends on the place in a photo, are computed one by one.

    Args:
        model: Name of a timm model, or a model.
        images: Images, see `explain`.
        method: See `explain`.
        target: See `explain`; one for all images, or a list or an iterator with one for each. None: the top class of each.
        batch_size: Images that are read at once, 1 to 65,536. Image `i` is in batch `i // batch_size`, whatever the others are.
        weights: See `load_model`; only if `model` is a name.
        seed: See `explain`.
        device: Device of a model that is given by name.
        options: See `explain`.

    Yields:
        The explanation of each image, in order.

    Raises:
        OptionError: If `batch_size` is out of range, or any such error of `explain`.
        VisattnError: Any error of `explain`. Those of an image are raised when its batch is reached.
    """
    between(batch_size, 1, LARGEST_BATCH, "batch_size")
    if drawing := [name for name in options if name in DrawOptions.__annotations__]:
        raise OptionError(f"{drawing[0]} is an option of the picture: .overlay({drawing[0]}=...) of each explanation.")
    one: Any = target_of(target)
    each = isinstance(one, Iterable) and not isinstance(one, str) and not callable(one)
    asked = asked_of(method, None if each else one, options, seed)
    bare, notes = model_of(model, asked.how, weights=weights, seed=seed, device=device)
    if each:
        ask = partial(asked_of, method, options=options, seed=seed)
        explanations: Iterator[Explanation] = own_targets.explain_each_target(bare, images, one, ask, batch_size, notes)
        return explanations
    return explain_each(bare, images, asked, batch_size, notes)


def explain_each(
    model: nn.Module, images: Iterable[Any], asked: Asked, size: int = BATCH, notes: tuple[str, ...] = ()
) -> Iterator[Explanation]:
    """Yield the explanations of `explain_batch`, for a question that was asked; `notes` are added to each."""
    left = iter(images)
    while some := list(islice(left, size)):
        with facts_read_once():
            prepared = [prepare_with([read(image, asked.how)], model, asked.how).with_notes(*notes) for image in some]
            explanations = explained(model, prepared, asked.question, seed=asked.seed)
        yield from explanations
