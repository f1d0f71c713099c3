"""One forward pass over prepared pixels, and of a target also the way back."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn import capturing
from visattn._support.checks import first_line
from visattn._support.modes import evaluating
from visattn.errors import ModelError, OptionError, ResourceError, ShapeError, UnsupportedModel, VisattnError
from visattn.families import InputSpec, head, provenance_of
from visattn.methods.scored import Scored
from visattn.pipeline.captures import capture
from visattn.pipeline.inputs import Prepared
from visattn.pipeline.targets import NoClasses, Resolved, Target
from visattn.records import Recording


class Pass(NamedTuple):
    """One forward pass, and of a target the backward pass.

    Attributes:
        recording: What was recorded.
        resolved: What the target is of this output; None without one.
    """

    recording: Recording
    resolved: Resolved | None


def look(model: nn.Module, prepared: Prepared, **options: Any) -> Recording:  # noqa: ANN401
    """The recording of `one_pass`."""
    return one_pass(model, prepared, **options).recording


def one_pass(
    model: nn.Module,
    prepared: Prepared,
    *,
    target: Target | None = None,
    each_layer: bool = False,
    values: bool = False,
    features: str | Sequence[str] = "last",
    edit: Callable[[Tensor], Tensor] | None = None,
) -> Pass:
    """Run the model once on prepared pixels, in evaluation mode; its flags are put back.

    No inference mode is entered: what a model keeps of the forward, such as a table of positions, must still be of use to a training.

    Args:
        model: The model.
        prepared: Pixels.
        target: Record the gradient of this target's score as well; without one no graph is made.
        each_layer: Give each layer the gradient of its own score: what the model's head makes of the tokens behind it.
        values: See `capture`.
        features: See `capture`.
        edit: What is done to the pixels before.

    Returns:
        The recording, and the target as it was understood.

    Raises:
        NoClasses: If the target is a class and the model has none.
        OptionError: If the target, or a score of each layer, does not go with the model.
        UnsupportedModel: If the model takes another size.
    """
    spec = prepared.spec_of(model)
    pixels = _as_the_model(model, prepared.pixels)
    pixels = pixels if edit is None else edit(pixels)
    if target is not None:
        _check_classes(model, spec, target)
    resolved = None
    with evaluating(model, frozen=True):
        if target is None:
            with torch.no_grad(), capture(model, values=values, features=features) as recording:
                answer_of(model, pixels)
        else:
            with torch.enable_grad(), capture(model, values=values, features=features, gradients=True) as recording:
                output = answer_of(model, pixels)
            with torch.enable_grad():
                resolved = target.resolve(output)
                score = _layer_scores(model, recording, output, resolved.score) if each_layer else resolved.score(output)
            graded = recording.gradients(score)
            recording = replace(
                graded,
                records=[replace(record, source=None) for record in graded.records],  # the graph goes
                features=[replace(feature, source=None) for feature in graded.features],
                provenance=graded.provenance.but(target=resolved.texts),
            )
    _check_size(spec, pixels)
    return Pass(recording, resolved)


@contextmanager
def scoring(
    model: nn.Module, prepared: Prepared, target: Target, *, features: str | Sequence[str] = "none"
) -> Iterator[tuple[Recording, Scored]]:
    """The model as a function from pixels to the target's score, in evaluation mode; its flags are put back.

    Args:
        model: Any model, with attention or without.
        prepared: Pixels of one photo. The class that is explained is chosen on them as they are, once.
        target: What is explained.
        features: See `capture`.

    Yields:
        A recording that holds the model's and the target's names and the features, and what is asked.

    Raises:
        NoClasses: If the target is a class and the model has none.
        OptionError: If the target does not go with the model.
        ShapeError: If there are several photos.
        UnsupportedModel: If the model takes another size.
    """
    spec, pixels = prepared.spec_of(model), _as_the_model(model, prepared.pixels)
    if len(pixels) != 1:
        raise ShapeError(f"a score is asked of one photo, the batch has {len(pixels)}. Explain them one by one.")
    _check_classes(model, spec, target)
    _check_size(spec, pixels)
    with evaluating(model, frozen=True):
        with torch.no_grad():
            resolved = target.resolve(answer_of(model, pixels))

        def score(edited: Tensor) -> Tensor:
            return resolved.score(answer_of(model, edited))

        seen = [] if features == "none" else look(model, prepared, features=features).features
        provenance = provenance_of(model).but(target=resolved.texts)
        recording = Recording(features=seen, input_size=(pixels.shape[-2], pixels.shape[-1]), provenance=provenance)
        yield recording, Scored(pixels, score, spec.mean, spec.std, spec.stride, model)


def answer_of(model: nn.Module, pixels: Tensor) -> Any:  # noqa: ANN401 - a model's own
    """What a model gives for pixels.

    Raises:
        ResourceError: If the memory does not suffice.
        ModelError: If its forward fails; the message names the module, the error and the shape of the pixels.
    """
    try:
        with redirect_stdout(sys.stderr):  # what a model prints is no result
            return model(pixels)
    except BaseException as error:
        if isinstance(error, (VisattnError, KeyboardInterrupt)) or _is_ours(error):
            raise
        first = first_line(error)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in first for text in _NO_MEMORY):
            raise ResourceError(f"out of memory for pixels {tuple(pixels.shape)}; choose a smaller img_size.") from error
        where = _where(model, error) or type(model).__name__
        raise ModelError(
            f"{where} fails for pixels {tuple(pixels.shape)}: {type(error).__name__}: {first}. Run the model on such pixels by itself."
        ) from error


_NO_MEMORY = "can't allocate memory", "out of memory"


def _is_ours(error: BaseException) -> bool:
    """Whether the capture failed, and not the model: `mode` alone calls what the model would have called."""
    *_, last = traceback.walk_tb(error.__traceback__)
    file = Path(last[0].f_code.co_filename)
    return file.is_relative_to(Path(capturing.__file__).parent) and file.stem != "mode"


def _where(model: nn.Module, error: BaseException) -> str:
    """The innermost module of the model whose code was running."""
    names = {module: name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        if isinstance(running, nn.Module):
            found = names.get(running, found)
        trace = trace.tb_next
    return found


def _as_the_model(model: nn.Module, pixels: Tensor) -> Tensor:
    """Pixels in the precision of the model's parameters."""
    kind = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), pixels.dtype)
    return pixels.to(kind)


def _check_classes(model: nn.Module, spec: InputSpec, target: Target) -> None:
    if not spec.classifier and not callable(target.of):
        raise NoClasses(
            f"{type(model).__name__} has no classification head, so there is no class to explain. "
            "Use method 'attention' or 'rollout', of a CNN 'eigencam', or pass target=a function of its output."
        )


def _check_size(spec: InputSpec, pixels: Tensor) -> None:
    if not spec.dynamic and spec.size != tuple(pixels.shape[-2:]):
        raise UnsupportedModel(f"the model takes {spec.size}, got {tuple(pixels.shape[-2:])}.")


def _layer_scores(model: nn.Module, recording: Recording, output: Tensor, score: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The score of each layer with attention: what the model's head makes of the tokens behind its block."""
    read_out = head(model)
    behind = {feature.layer: feature.source.tensor for feature in recording.features if feature.source is not None}
    blocks = {layer: [name for name in behind if layer.startswith(f"{name}.")][-1:] for layer in recording.layers}
    last = next(iter(blocks[recording.layers[-1]]), None) if recording.layers else None
    whole = read_out is not None and last is not None and all(blocks.values())
    if read_out is None or not whole or not torch.allclose(read_out(behind[str(last)]), output, atol=1e-4, rtol=1e-4):
        raise OptionError(
            f"{type(model).__name__}: what its head makes of the tokens behind each layer is not known. Use method 'relevance'."
        )
    return {layer: score(read_out(behind[names[0]])) for layer, names in blocks.items()}
