"""Forward pass over preprocessed pixels and, if a target is given, the backward pass."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.checks import check_scores, first_line
from visattn._support.faces import Later
from visattn._support.language import option, worded
from visattn._support.modes import callers_autocast, callers_modes, evaluating, seeded
from visattn._support.shortages import lacks_memory
from visattn.core import capturing
from visattn.core.families import InputSpec
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.outputs import tensor_of
from visattn.core.pipeline.targets import NoClasses, ResolvedTarget, Target
from visattn.core.records import NoGradient, Recording, split_call
from visattn.errors import ModelError, OptionError, ResourceError, ShapeError, UnsupportedModel, VisattnError

if TYPE_CHECKING:
    from visattn._support import nested
    from visattn.core.families import forward_calls
    from visattn.core.pipeline import structure, summing
else:
    nested = Later("visattn._support.nested")
    forward_calls, structure = Later("visattn.core.families.forward_calls"), Later(f"{__package__}.structure")
    summing = Later(f"{__package__}.summing")

__all__ = ["Pass", "answer_of", "as_the_model", "look", "one_pass", "with_readout"]


class Pass(NamedTuple):
    """Result of one forward pass and, if a target was given, the backward pass.

    Attributes:
        recording: The recording.
        resolved: The target, resolved for this output; None without a target.
        output: What the model returned.
    """

    recording: Recording
    resolved: ResolvedTarget | None
    output: Any


Run = Callable[..., Pass]  # `one_pass`, or what runs it only once for all that ask for the same


def look(model: nn.Module, prepared: Prepared, **options: Any) -> Recording:  # noqa: ANN401
    """Return the recording of `one_pass`."""
    return one_pass(model, prepared, **options).recording


def one_pass(
    model: nn.Module,
    prepared: Prepared,
    *,
    target: Target | None = None,
    each_layer: bool = False,
    values: bool = False,
    features: str | Sequence[str] = "last",
    gates: bool = False,
    edit: Callable[[Tensor], Tensor] | None = None,
    terms: bool = False,
) -> Pass:
    """Run the model once on preprocessed pixels, in evaluation mode; restore its training flags afterward.

    Inference mode is not used: tensors that a model caches in the forward pass, such as position tables, must remain usable for
    training.

    Args:
        model: The model.
        prepared: The preprocessed photos.
        target: If given, the gradient of this target's score is recorded too; otherwise no autograd graph is built.
        each_layer: Whether to use one score per layer: the score that the model's head computes from the layer's tokens.
        values: See `capture`.
        features: See `capture`.
        gates: See `capture`.
        edit: Function that is applied to the pixels before the forward pass.
        terms: Whether the graph is linear, so that the score of one image is a sum; the model then runs twice.

    Returns:
        The recording and the resolved target.

    Raises:
        NoClasses: If the target is a class and the model has none.
        ModelError: If the score is NaN or infinite.
        OptionError: If the target, or one score per layer, does not fit the model.
        ShapeError: If the score of several images is not one number for each.
        UnsupportedModel: If the model takes another input size.
    """
    spec = prepared.spec_of(model)
    features = features if isinstance(features, str) else [split_call(name)[0] for name in features]
    pixels = as_the_model(model, prepared.pixels)
    pixels = pixels if edit is None else edit(pixels)
    if target is not None:
        check_classes(model, spec, target)
    resolved, modes = None, modes_of(model, pixels)
    kept: Any = {"values": values, "features": features, "gates": gates}
    with evaluating(model, frozen=True):
        if target is None:
            with torch.no_grad(), capture(model, **kept) as recording:
                output = answer_of(model, pixels, prepared)
        else:
            if terms:
                recording, output = summing.with_terms(model, lambda: answer_of(model, pixels, prepared))
            else:
                with torch.enable_grad(), capture(model, **kept, gradients=True) as recording:
                    output = answer_of(model, pixels, prepared)
            _check_called(model, recording, features)
            with torch.enable_grad():
                resolved = target.resolve(output)
                again = lambda x: answer_of(model, x, prepared)  # noqa: E731
                score: Tensor | Mapping[str, Tensor]
                if each_layer:
                    with callers_modes():
                        score = structure.layer_scores(model, recording, output, resolved.score, pixels, again)
                else:
                    with summing.frozen_norms(recording) if terms else nullcontext():
                        score = _of_each(resolved.score(output), len(pixels))
                        if not resolved.scores:  # those of classes were checked
                            check_scores(score)
            graded = _graded(model, recording, score)
            provenance = graded.provenance.but(target=resolved.texts, scores=resolved.scores)
            recording = replace(graded.without_graph(), provenance=provenance)
    check_size(spec, pixels)
    recording = replace(recording, provenance=recording.provenance.but(notes=modes)) if modes else recording
    return Pass(recording, resolved, output)


def _graded(model: nn.Module, recording: Recording, score: Tensor | Mapping[str, Tensor]) -> Recording:
    try:
        return recording.gradients(score)
    except NoGradient as error:
        raise OptionError(
            f"{type(model).__name__}: PyTorch has no gradient of the score with respect to its layers. Use a method "
            "without gradients, such as 'captum.occlusion'."
        ) from error


def modes_of(model: nn.Module, pixels: Tensor) -> tuple[str, ...]:
    """Return a note on each mode in which the model computes something else for the caller, or runs otherwise than it was."""
    cast = callers_autocast(pixels.device.type)
    notes = [f"the model ran under autocast to {str(cast).removeprefix('torch.')}"] if cast is not None else []
    notes += ["the model was in training mode, and ran in evaluation mode"] if model.training else []
    return tuple(notes)


def with_readout(model: nn.Module, prepared: Prepared, recording: Recording) -> Recording:
    """Return a recording with what the model's output is computed from, by a second pass with gradients if only they can tell."""
    if not recording.reading.measurable:
        return recording
    pixels = as_the_model(model, prepared.pixels)
    with (
        evaluating(model, frozen=True),
        torch.enable_grad(),
        capture(model, features="none", gates=False, gradients=True) as graded,
    ):
        output = tensor_of(answer_of(model, pixels, prepared), "logits", "pooler_output")
    if output is None or not output.ndim:
        return recording
    return replace(recording, readouts=graded.read_by(output).without_graph().readouts)


def answer_of(model: nn.Module, pixels: Tensor, prepared: Prepared) -> Any:  # noqa: ANN401 - a model's own
    """Return the model's output for pixels and the other inputs; `prepared` tells how they were made.

    Raises:
        ResourceError: If there is not enough memory.
        ModelError: If the forward pass fails; the message names the module, the error and the shape of the pixels.
    """
    try:
        with (
            callers_modes(),
            seeded(prepared.seed),
            redirect_stdout(sys.stderr),
        ):  # stdout is for results, not for a model's own prints
            keyword = prepared.spec_of(model).keyword
            plain = not keyword and not prepared.inputs
            return model(pixels) if plain else forward_calls.called(model, pixels, prepared.inputs, keyword)
    except BaseException as error:
        if isinstance(error, (VisattnError, KeyboardInterrupt)):
            raise
        if lacks_memory(error):
            raise ResourceError(_no_room(pixels)) from error
        if _is_ours(error):
            raise
        first = first_line(error).rstrip(".")
        where = _where(model, error) or type(model).__name__
        remedy = _remedy_of_inference(model, prepared) if "nference tensor" in first else _remedy(model, prepared, error)
        raise ModelError(f"{where} fails for pixels {tuple(pixels.shape)}: {type(error).__name__}: {first}. {remedy}") from error


def _remedy_of_inference(model: nn.Module, prepared: Prepared) -> str:
    """Say which tensor was made under inference mode, through which PyTorch takes no gradient."""
    under = "made under torch.inference_mode, through which PyTorch takes no gradient"
    if any(tensor.is_inference() for tensor in chain(model.parameters(), model.buffers())):
        return f"The model holds tensors that were {under}. Copy the model outside of it: copy.deepcopy(model)."
    for name, value in nested.leaves(prepared.inputs):
        if isinstance(value, Tensor) and value.is_inference():
            return f"The input {name} was {under}. Pass {name}.clone() instead."
    return f"It uses a tensor {under}. Make it outside of it."


def _remedy(model: nn.Module, prepared: Prepared, error: BaseException) -> str:
    if "input_ids" in _parameters(model) and "input_ids" not in prepared.inputs:
        words = worded('inputs=processor(text="...", images=photo, return_tensors="pt")', "--prompt TEXT")
        return f"The model also reads words. Pass them: {words}."
    if prepared.inputs:
        return f"Its other inputs are a {nested.described(dict(prepared.inputs))}. Check their shapes and types."
    sizes = prepared.preprocessing.get("size", {})
    if sizes.get("source") == "assumed" and not isinstance(error, (TypeError, AttributeError, LookupError, NameError)):
        size = worded("img_size=(height, width)", "--img-size HxW")
        return f"The model does not state its input size, so it was assumed. If it is another, pass it: {size}."
    return "Check that the model runs on such pixels without visattn."


def _parameters(model: nn.Module) -> Collection[str]:
    """Return the names of what the forward function takes; none for code of TorchScript, which has no signature."""
    try:
        return inspect.signature(model.forward).parameters
    except ValueError:
        return ()


@contextmanager
def telling_memory(pixels: Tensor) -> Iterator[None]:
    """Tell that what runs on pixels needs more memory than there is, be it a pass, its gradient or a method.

    Yields:
        Nothing.

    Raises:
        ResourceError: If there is not enough memory.
    """
    try:
        yield
    except Exception as error:
        if not lacks_memory(error):
            raise
        raise ResourceError(_no_room(pixels)) from error


_CALLING = frozenset({"mode", "noting", "steps"})


def _is_ours(error: BaseException) -> bool:
    """Check whether the capture failed rather than the model: only some of its modules call the model's own operations."""
    *_, last = traceback.walk_tb(error.__traceback__)
    file = Path(last[0].f_code.co_filename)
    return file.is_relative_to(Path(capturing.__file__).parent) and file.stem not in _CALLING


def _where(model: nn.Module, error: BaseException) -> str:
    """Return the name of the innermost module that was running."""
    names = {module: name for name, module in model.named_modules()}
    innermost, trace = "", error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        if isinstance(running, nn.Module):
            innermost = names.get(running, innermost)
        trace = trace.tb_next
    return innermost


def _of_each(score: Tensor, count: int) -> Tensor:
    """Check that a score of several images is one number for each; their sum would mix the images."""
    if count > 1 and isinstance(score, Tensor) and (score.numel() != count or score.shape[0] != count):
        raise ShapeError(
            f"target must return one number per image, so {count} numbers, not {tuple(score.shape)}. Return a tensor (B,): out[:, 3]."
        )
    return score


def as_the_model(model: nn.Module, pixels: Tensor) -> Tensor:
    """Convert pixels to the dtype of the model's parameters."""
    kind = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), pixels.dtype)
    return pixels.to(kind)


def check_classes(model: nn.Module, spec: InputSpec, target: Target) -> None:
    if not spec.classifier and not callable(target.of):
        raise NoClasses(
            f"{type(model).__name__} has no classification head, so there is no class to explain. "
            "Use method 'attention' or 'rollout' ('eigencam' for a CNN)"
            + worded(", or pass a function of its output as target.", ".")
        )


def _check_called(model: nn.Module, recording: Recording, features: str | Sequence[str]) -> None:
    """Check that every module that was named has an output in the recording."""
    seen = {feature.layer for feature in recording.features}
    named = [] if isinstance(features, str) else [name for name in features if name not in seen]
    if named:
        children = dict(model.get_submodule(named[0]).named_children())
        parts = f"; its parts are {', '.join(f'{named[0]}.{child}' for child in children)}" if children else ""
        raise OptionError(
            f"{type(model).__name__}: {named[0]} has no output in this forward pass, which did not call it as a module, or got no tensor "
            f"from it{parts}. Name another layer."
        )


def check_size(spec: InputSpec, pixels: Tensor) -> None:
    if not spec.dynamic and spec.size != tuple(pixels.shape[-2:]):
        raise UnsupportedModel(f"the model takes pixels of size {spec.size}, got {tuple(pixels.shape[-2:])}.")


def _no_room(pixels: Tensor) -> str:
    return f"out of memory for pixels {tuple(pixels.shape)}; choose a smaller {option('img_size')}."
