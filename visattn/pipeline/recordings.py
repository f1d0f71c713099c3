"""What a method wants to be recorded, recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from visattn.errors import NoAttentionCaptured, OptionError
from visattn.families import cam_layer, input_spec
from visattn.methods import method_of
from visattn.pipeline.choice import candidates, chosen
from visattn.pipeline.inputs import Prepared
from visattn.pipeline.run import look
from visattn.pipeline.targets import NoClasses, Target
from visattn.records import Recording


def seen_by(
    method: str, model: nn.Module, prepared: Prepared, target: Target, asked: bool, parameters: dict[str, Any]
) -> tuple[str, Recording]:
    """The method that `auto` stands for, and a recording of all that it needs; `asked` is whether a target was."""
    if method != "auto":
        return method, recorded(method, model, prepared, target, parameters)
    among = candidates(parameters)
    if asked or (set(among) != {"attention"} and input_spec(model).classifier):
        layer = parameters.get("layer")
        known = layer if isinstance(layer, str) else cam_layer(model)
        try:
            recording = look(model, prepared, target=target, features="none" if known is None else [known])
        except NoClasses:
            if asked:
                raise
        else:
            return chosen(recording, among, asked), recording
    return among[-1], look(model, prepared)


def recorded(method: str, model: nn.Module, prepared: Prepared, target: Target, parameters: dict[str, Any]) -> Recording:
    """What a method needs, recorded."""
    known, layer = method_of(method), parameters.get("layer", -1)
    needs = known.wants(parameters)
    features: str | list[str] = "none" if needs & {"gates", "glimpses"} else "last"
    if "cam layer" in needs:
        features = [layer_of_cam(model, parameters)] if layer == -1 or isinstance(layer, str) else "all"
    elif "features" in needs:
        features = "last" if layer == -1 else "all"
    try:
        return look(
            model,
            prepared,
            target=target if known.targeted else None,
            each_layer="layer gradients" in needs,
            values="values" in needs,
            features="all" if "layer gradients" in needs else features,
        )
    except NoAttentionCaptured as nothing:
        if "cam layer" in needs:
            raise OptionError(
                f"layer {layer} counts layers of tokens, and the model has none. Name the layer: layer='...'."
            ) from nothing
        if known.lacking is None:
            raise
        raise OptionError(known.lacking) from nothing


def replayed(model: nn.Module, prepared: Prepared, target: Target, edit: Callable[[Tensor], Tensor]) -> Recording:
    """The recording of pixels that a method edits, with the gradient of the target's score."""
    return look(model, prepared, target=target, edit=edit, features="none")


def layer_of_cam(model: nn.Module, parameters: dict[str, Any]) -> str:
    """The layer that class activation maps read: the one that was named, else that of the family."""
    layer = parameters.get("layer", -1)
    known = layer if isinstance(layer, str) else cam_layer(model) if layer == -1 else None
    if known is None:
        raise OptionError(f"{type(model).__name__}: which layer Grad-CAM should read is not known. Name it: layer='...'.")
    return known
