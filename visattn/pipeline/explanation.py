"""The sentence that is the architecture.

A photo is prepared, the model runs under a capture, a method turns the recording into a map, and the map is brought onto the photo.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image
from torch import nn

from visattn._support.files import check_output, check_png, write_whole
from visattn._support.typed import typed
from visattn._support.types import ColorProfile, Interpolation, Resize
from visattn.drawing.marks import draw_glimpses, outline
from visattn.drawing.overlays import painted, rgb_components
from visattn.drawing.pages import captioned
from visattn.drawing.pictures import Picture, carrying, to_png
from visattn.drawing.style import Style, StyleOptions
from visattn.errors import OptionError, ShapeError
from visattn.families import input_spec, labels as labels_of
from visattn.geometry import Geometry
from visattn.images import as_photo, facts, load_image
from visattn.images.bands import Bands, bands_of
from visattn.loading import load_model
from visattn.maps import AttentionMap, Heatmap
from visattn.methods import method_of
from visattn.methods.glimpse_paths import patches
from visattn.methods.selection import chain_refusal
from visattn.methods.sinks import find_sinks
from visattn.pipeline.choice import check_parameters
from visattn.pipeline.inputs import Prepared, prepare
from visattn.pipeline.recordings import layer_of_cam, replayed, seen_by
from visattn.pipeline.run import scoring
from visattn.pipeline.targets import Of, Space, Target
from visattn.provenance import Provenance
from visattn.records import Recording


@dataclass(frozen=True, eq=False)
class Explanation:
    """One method's answer for one photo.

    Attributes:
        photo: The upright photo.
        geometry: Where the model's input lies on it.
        map: Raw values on the token grid, of this photo alone.
    """

    photo: Image.Image
    geometry: Geometry
    map: AttentionMap

    @property
    def provenance(self) -> Provenance:
        """How it was made."""
        return self.map.provenance

    @property
    def panel(self) -> AttentionMap:
        """The map as one panel: several heads or layers are averaged; components of a PCA stay apart."""
        one = self.map
        for name in one.axes:
            one = one if name == "component" else one.mean(name)
        return one

    def at(self, **index: int) -> Explanation:
        """The explanation of one head, layer or component; see `AttentionMap.at`."""
        return replace(self, map=self.map.at(**index))

    def heatmap(self, interpolation: Interpolation = "bilinear") -> Heatmap:
        """The panel in the photo's pixels."""
        return self.panel.to_heatmap(self.geometry, interpolation)

    def draw(
        self, *, mass: float | None = None, caption: bool = False, **style: Unpack[StyleOptions]
    ) -> tuple[Picture, Provenance]:
        """The photo under its heatmap, and how the picture was made.

        Args:
            mass: Also draw the outline of the patches that hold this share. The path of glimpses is drawn without being asked for.
            caption: Write the predicted class with its probability, and what was explained, on a band below the picture.
            style: See `visattn.drawing.Style`; here `normalize="auto"` is percentile for attributions of single pixels. Components of a
                PCA become red, green and blue, and take no style.

        Returns:
            The picture and its provenance, with the range of values behind the colours.

        Raises:
            ShapeError: If there are components, and not three.
        """
        if "component" in self.map.axes:
            if self.map.values.shape[: len(self.map.axes)] != (3,):
                raise ShapeError(
                    f"components to draw must be three, got {self.map.axes} {tuple(self.map.values.shape)}. Choose with .at()."
                )
            parts = rgb_components(self.photo, self.heatmap("nearest"))
            return parts, parts.provenance
        chosen = Style(**style)
        if chosen.normalize == "auto" and self.map.provenance.parameters.get("segments") == "pixels":
            chosen = replace(chosen, normalize="percentile")  # of single pixels a few would leave all others white
        heat = self.heatmap(chosen.interpolation)
        colored = painted(self.photo, heat, replace(chosen, normalize=chosen.scale(heat.signed)))
        picture: Image.Image = colored
        if mass is not None:
            picture = outline(picture, self.panel.mass(mass).to_heatmap(self.geometry, "nearest"))
        if glimpses := patches(self.map):
            on_photo = [[self.geometry.box_to_photo(box) for box in boxes] for boxes in glimpses]
            picture = draw_glimpses(picture, on_photo, heat.seen)
        if caption:
            picture = captioned(picture, self._caption())
        made = colored.provenance
        asked = {"interpolation": chosen.interpolation, "mass": mass, "caption": caption}
        made = made.but(drawing=made.drawing | asked)
        return carrying(picture, made), made

    def _caption(self) -> list[str]:
        facts = self.provenance
        layer = facts.parameters.get("layer")
        how = f"{self.map.meaning} of {facts.model}" + (f", layer {layer}" if layer is not None else "")
        return [*facts.target[:1], *(f"warning: {text}" for text in facts.warnings), how]

    def overlay(self, **options: Any) -> Picture:  # noqa: ANN401
        """The photo under its heatmap; options of `draw`. A PNG that it is saved to carries how it was made."""
        return self.draw(**options)[0]

    @typed()
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False, **options: Any) -> Path:  # noqa: ANN401
        """Write the picture as PNG with its provenance inside; options of `draw`.

        Raises:
            OptionError: If the name does not end in .png.
            OutputError: If the file exists and `overwrite` is false, or cannot be written.
        """
        target = check_output(check_png(Path(path)), overwrite=overwrite)
        return write_whole(target, to_png(self.overlay(**options)))


@typed()
def explain(
    model: nn.Module | str,
    image: Any,  # noqa: ANN401 - a path, a picture or an array
    *,
    method: str = "auto",
    target: Of = None,
    versus: int | str | None = None,
    target_space: Space = "logit",
    labels: Sequence[str] | None = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    resize: Resize = "auto",
    img_size: int | None = None,
    color_profile: ColorProfile = "convert",
    rgb: Sequence[int] | None = None,
    **parameters: Any,  # noqa: ANN401 - the method's own
) -> Explanation:
    """Where does this model look in this photo?

    Args:
        model: A timm name, or a model.
        image: A path, a picture or an array; for a model of other than one or three channels an array `(H, W, C)` or `(C, H, W)`.
        method: A name of `visattn.methods.METHODS`; `auto` is relevance for the top class of a classifier whose layers compose,
            Grad-CAM for one without self-attention, else last-layer attention; of a class that was asked for, Grad-CAM.
        target: The class that is explained, by index or name; None: the top class; or a function from the model's output to a
            number for each image, which a model without a classification head needs. For class-specific methods only.
        versus: Another class, whose score is subtracted.
        target_space: Whose gradient is taken: `logit`, `prob` (after softmax) or `logprob`.
        labels: Names of the classes; ImageNet's are known.
        weights: See `load_model`; for a name only.
        seed: Of random weights, for a name only, and of methods that draw samples.
        device: Where a named model runs.
        resize: See `prepare`.
        img_size: See `prepare`.
        color_profile: See `load_image`; of a picture or an array it says nothing.
        rgb: Of an array of more channels, those that are drawn as red, green and blue; the first three by default.
        parameters: Parameters of the method; a query `pixel:X,Y` of the upright photo becomes the patch that covers it.

    Returns:
        The explanation; `.overlay()` is the picture.

    Raises:
        OptionError: If the method, a parameter or the target is unknown or out of range, or does not go with the model.
        VisattnError: As `load_image`, `load_model`, `prepare`, `capture` and the method raise.
    """
    if isinstance(image, (str, os.PathLike, bytes)):  # before a model is loaded
        image = load_image(image, color_profile=color_profile)
    parameters = {name: value.item() if isinstance(value, np.generic) else value for name, value in parameters.items()}
    asked = target is not None or versus is not None or target_space != "logit"
    check_parameters(method, parameters)
    if asked and method != "auto" and not method_of(method).targeted:
        raise OptionError(f"method '{method}' does not depend on a class. Leave the target out, or use method 'relevance'.")
    if isinstance(model, str):
        model = load_model(model, weights=weights, seed=seed, img_size=img_size, device=device)
    prepared = prepare(_as_the_model_takes(image, model, rgb), model, resize=resize, img_size=img_size)
    explained = Target(target, versus, target_space, labels_of(model) if labels is None else labels)
    if method != "auto" and "score" in method_of(method).needs:
        parameters |= {"seed": seed} if "seed" in method_of(method).parameters else {}
        features = [layer_of_cam(model, parameters)] if "cam layer" in method_of(method).needs else "none"
        with scoring(model, prepared, explained, features=features) as (recording, scored):
            return answer(recording, prepared, method, parameters, given={"scored": scored})
    name, recording = seen_by(method, model, prepared, explained, asked, parameters)
    given = {"replay": partial(replayed, model, prepared, explained)} if "replay" in method_of(name).needs else {}
    return answer(recording, prepared, name, parameters, given=given, auto=method == "auto")


def _as_the_model_takes(image: Any, model: nn.Module, rgb: Sequence[int] | None) -> Image.Image | Bands:  # noqa: ANN401
    """The photo, or the channels of an array for a model that takes more than three."""
    channels = input_spec(model).channels
    return as_photo(image) if channels in (1, 3) else bands_of(image, channels, rgb)


def answer(
    recording: Recording,
    prepared: Prepared,
    name: str,
    parameters: dict[str, Any],
    image: int = 0,
    *,
    given: Mapping[str, Any] = MappingProxyType({}),
    auto: bool = False,
) -> Explanation:
    """One method's map of one image of the batch, with the photo's facts and the sinks written into its provenance.

    `given` are the arguments of methods that run the model again: `replay`, `scored`.

    Raises:
        OptionError: If a parameter is not the method's, or the method does not apply.
    """
    check_parameters(name, parameters)
    chosen = method_of(name)
    if reason := chosen.accepts(recording):
        raise OptionError(f"{recording.provenance.model}: method '{name}' does not apply: {reason}")
    geometry, photo = prepared.geometries[image], prepared.photos[image]
    parameters = dict(parameters)
    how = "it explains a class" if chosen.targeted else "it does not depend on a class"
    notes: tuple[str, ...] = (f"method {name} was chosen; {how}",) if auto else ()
    query = parameters.get("query")
    if isinstance(query, str) and query.startswith("pixel:"):
        parameters["query"] = pixel_to_input(query, recording, geometry)
    result = chosen.function(recording, **parameters, **given)
    if isinstance(query, str) and query.startswith("pixel:"):
        notes += (f"query {query} is {result.provenance.parameters['query']}",)
    if chosen.sinks and chain_refusal(recording) is None and not result.provenance.sinks:
        result = replace(result, provenance=replace(result.provenance, sinks=find_sinks(recording)))
    source = facts(photo)
    provenance = result.provenance.but(image=source.name, image_sha256=source.sha256, geometry=geometry, notes=source.notes)
    found = replace(result, provenance=prepared.noted(provenance).but(notes=notes)).at(batch=image)
    if found.layout.holes:
        dropped = (
            f"{len(found.layout.holes)} of {math.prod(found.layout.grid)} patches are hatched: the model dropped their tokens"
        )
        found = replace(found, provenance=found.provenance.but(notes=(dropped,)))
    if chosen.targeted and not bool(found.values.nan_to_num().any()):
        empty = "nothing in the image speaks for the target: no positive evidence, so the photo is left as it is"
        found = replace(found, provenance=found.provenance.but(warnings=(empty,)))
    return Explanation(photo, geometry, found)


def pixel_to_input(query: str, recording: Recording, geometry: Geometry) -> str:
    """`pixel:X,Y` of the upright photo as `input:Y,X` of the model's input.

    Raises:
        OptionError: If it is no pixel of the photo that the model saw.
    """
    try:
        x, y = (float(part) for part in query.removeprefix("pixel:").split(","))
    except ValueError as error:
        raise OptionError(f"a pixel query must be pixel:X,Y with numbers, got '{query}'.") from error
    layouts = [record.keys for record in recording] + [feature.layout for feature in recording.features if feature.layout]
    layout = next(layout for layout in layouts if len(layout.grid) == 2)
    geometry.patch_at(y, x, (layout.grid[0], layout.grid[1]), layout.box)  # says what is wrong with a pixel outside
    at = geometry.to_input(y, x)
    return f"input:{at[0]:g},{at[1]:g}"
