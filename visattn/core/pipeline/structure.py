"""Parts of a model that methods need and no family names, found by running the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.memory import OfStructure
from visattn._support.modes import evaluating
from visattn._support.module_hooks import module_hooks
from visattn.core.capturing.hooks import with_first
from visattn.core.families import head
from visattn.core.methods.selection import of_the_image
from visattn.core.pipeline.captures import capture
from visattn.core.records import Recording
from visattn.errors import NoAttentionCaptured, OptionError

_CLOSE = 1e-4  # absolute and relative tolerance of outputs that are computed twice
_inputs: OfStructure[str | None] = OfStructure()


def before_last_attention(model: nn.Module, run: Callable[[], Any], about: Hashable) -> str | None:
    """Return the module whose output is the input of the last self-attention over the image, or None.

    This is the last layer in which every patch has a gradient, whichever token the head uses: in most transformers a normalization.

    Args:
        model: The model.
        run: Function that runs it once.
        about: Shape of the pixels and the input that they are; the answer is kept for each.
    """
    return _inputs.of(model, about, lambda: _before_last_attention(model, run))


def _before_last_attention(model: nn.Module, run: Callable[[], Any]) -> str | None:
    made: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # the module that first returned a tensor, by id of the tensor
    source: dict[str, str] = {}  # the module that made a module's input

    def begun(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        seen = None if first is None else made.get(id(first))
        if seen is not None and seen[0]() is first:
            source[name] = seen[1]

    def ended(name: str, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and ((seen := made.get(id(first))) is None or seen[0]() is not first):
            made[id(first)] = weakref.ref(first), name

    try:
        with (
            evaluating(model),
            torch.no_grad(),
            module_hooks(model, before=begun, after=ended),
            capture(model, features="none", gates=False) as recording,
        ):
            run()
    except NoAttentionCaptured:
        return None
    last = next((record for record in reversed(list(recording)) if record.kind == "self" and record.keys.grid), None)
    owner = last.layer if last is not None else ""
    while owner and owner not in source:
        owner = owner.rpartition(".")[0]
    return source.get(owner)


def layer_scores(
    model: nn.Module,
    recording: Recording,
    output: Any,  # noqa: ANN401 - a model's own
    score: Callable[[Any], Tensor],
    pixels: Tensor,
    run: Callable[[Tensor], Any],
) -> dict[str, Tensor]:
    """Compute one score per attention layer: that of the output which the rest of the model computes from the tokens after its block.

    Args:
        model: The model.
        recording: Recording of its forward pass, with the tokens of all blocks and their graph.
        output: Output of this pass.
        score: Function from an output to one number per image.
        pixels: Pixels of this pass.
        run: Function from pixels to the model's output.

    Returns:
        The score of each layer, by its name. Layers without self-attention over the image have that of the model.

    Raises:
        OptionError: If the output is no function of the last block's tokens alone, or self-attention belongs to no block.
    """
    behind = {feature.layer: feature.source.tensor for feature in recording.features if feature.source is not None}
    layers = [record.layer for record in of_the_image(recording) if record.kind == "self"]
    blocks = {layer: next((name for name in reversed(behind) if layer.startswith(f"{name}.")), "") for layer in layers}
    last = next(reversed(blocks.values()), "")
    read_out = head(model) if all(blocks.values()) and last else None
    if read_out is None or not _reproduces(read_out(behind[last]), output):

        def read_out(tokens: Tensor) -> Any:  # noqa: ANN401
            return _with_output(model, last, tokens, lambda: run(pixels))

        if not all(blocks.values()) or not last or not _is_all(model, last, behind[last], score, pixels, run, score(output)):
            raise OptionError(
                f"{type(model).__name__}: its head cannot be applied to the tokens of each layer. Use method 'relevance'."
            )
    whole = score(output)
    others: dict[str, Tensor] = {}  # of a pooling head or a text tower; the score may not depend on them
    for record in recording:
        if record.layer not in blocks and record.source is not None:
            others[record.layer] = others.get(record.layer, whole) + 0 * record.source.tensor.sum()
    return others | {layer: score(read_out(behind[name])) for layer, name in blocks.items()}


def _reproduces(made: Any, output: Any) -> bool:  # noqa: ANN401
    return isinstance(output, Tensor) and isinstance(made, Tensor) and torch.allclose(made, output, atol=_CLOSE, rtol=_CLOSE)


def _is_all(
    model: nn.Module,
    layer: str,
    tokens: Tensor,
    score: Callable[[Any], Tensor],
    pixels: Tensor,
    run: Callable[[Tensor], Any],
    expected: Tensor,
) -> bool:
    """Check that the score depends on the image only through the tokens that a module returns."""
    traced = pixels.detach().clone().requires_grad_()
    again = score(_with_output(model, layer, tokens.detach(), lambda: run(traced)))
    return not again.requires_grad and _reproduces(again, expected)


def _with_output(model: nn.Module, layer: str, tokens: Tensor, run: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Run a model with the output of one module, or the first part of it, replaced by `tokens`."""
    handle = model.get_submodule(layer).register_forward_hook(lambda _module, _args, output: with_first(output, tokens))
    try:
        return run()
    finally:
        handle.remove()
