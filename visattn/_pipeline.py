"""The sentence that is the architecture.

A photo is prepared, the model runs under a capture, a method turns the recording into a map, and the map is brought onto the photo.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from visattn import render
from visattn._files import check_output, write_whole
from visattn._prepare import Prepared, prepare
from visattn._types import Interpolation, Normalization, Resize
from visattn.errors import OptionError, UnsupportedModel
from visattn.families import capture, input_spec, load_model
from visattn.geometry import Geometry
from visattn.images import as_photo, facts, load_image
from visattn.maps import AttentionMap, Heatmap, value_range
from visattn.methods import METHODS, diagnostics, method_of
from visattn.methods._select import chain_refusal
from visattn.provenance import Provenance
from visattn.records import Recording

_CHOSEN_BY_AUTO = "attention"  # class-agnostic; no method for a class is in METHODS


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
        self,
        *,
        interpolation: Interpolation = "bilinear",
        normalize: Normalization = "auto",
        mass: float | None = None,
        **options: Any,  # noqa: ANN401 - of visattn.overlay
    ) -> tuple[Image.Image, Provenance]:
        """The photo under its heatmap, and how the picture was made.

        Args:
            interpolation: See `AttentionMap.to_heatmap`.
            normalize: See `visattn.maps.value_range`.
            mass: Also draw the outline of the patches that hold this share.
            options: Others of `visattn.overlay`. Components of a PCA take none: they become red, green and blue.

        Returns:
            The picture and its provenance, with the range of values behind the colours.
        """
        if "component" in self.map.axes:
            heat = self.heatmap("nearest")
            return render.components(self.photo, heat), heat.provenance.but(normalization="percentile of each component")
        heat = self.heatmap(interpolation)
        picture = render.overlay(self.photo, heat, normalize=normalize, **options)
        if mass is not None:
            picture = render.outline(picture, self.panel.mass(mass).to_heatmap(self.geometry, "nearest"))
        how = normalize if normalize != "auto" else "symmetric" if heat.signed else "minmax"
        return picture, heat.provenance.but(normalization=how, value_range=value_range(heat.grid, how))

    def overlay(self, **options: Any) -> Image.Image:  # noqa: ANN401
        """The photo under its heatmap; options of `draw`."""
        return self.draw(**options)[0]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False, **options: Any) -> Path:  # noqa: ANN401
        """Write the picture as PNG with its provenance inside; options of `draw`.

        Raises:
            OutputError: If the file exists and `overwrite` is false, or cannot be written.
        """
        target = check_output(Path(path), overwrite=overwrite)
        return write_whole(target, render.to_png(*self.draw(**options)))


def explain(
    model: nn.Module | str,
    image: Any,  # noqa: ANN401 - a path, a picture or an array
    *,
    method: str = "auto",
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str = "cpu",
    resize: Resize = "auto",
    img_size: int | None = None,
    **parameters: Any,  # noqa: ANN401 - the method's own
) -> Explanation:
    """Where does this model look in this photo?

    Args:
        model: A timm name, or a model.
        image: A path, a picture or an array.
        method: A name of `visattn.methods.METHODS`; `auto` is last-layer attention.
        weights: See `load_model`; for a name only.
        seed: See `load_model`.
        device: Where a named model runs.
        resize: See `prepare`.
        img_size: See `prepare`.
        parameters: Parameters of the method; a query `pixel:X,Y` of the upright photo becomes the patch that covers it.

    Returns:
        The explanation; `.overlay()` is the picture.

    Raises:
        OptionError: If the method or a parameter is unknown or out of range.
        VisattnError: As `load_image`, `load_model`, `prepare`, `capture` and the method raise.
    """
    photo = load_image(image) if isinstance(image, (str, os.PathLike, bytes)) else as_photo(image)
    if method != "auto":
        check_parameters(method, parameters)
    if isinstance(model, str):
        model = load_model(model, weights=weights, seed=seed, img_size=img_size, device=device)
    prepared = prepare(photo, model, resize=resize, img_size=img_size)
    recording = look(model, prepared, values=parameters.get("of") == "values", all_features=parameters.get("layer", -1) != -1)
    return answer(recording, prepared, method, parameters)


def check_parameters(method: str, parameters: dict[str, Any]) -> None:
    """Refuse a parameter that a method does not have.

    Raises:
        OptionError: If the method or a parameter is unknown.
    """
    known = list(inspect.signature(method_of(method).function).parameters)[1:]
    for name in parameters:
        if name not in known:
            raise OptionError(f"method '{method}' has no parameter '{name}'. It has: {', '.join(known)}.")


def look(model: nn.Module, prepared: Prepared, *, values: bool = False, all_features: bool = False) -> Recording:
    """Run the model once on prepared pixels, in evaluation mode and without gradients; its training flags are put back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode(), capture(model, values=values, features="all" if all_features else "last") as recording:
            model(prepared.pixels)
    finally:
        for module, training in modes.items():
            module.training = training
    spec = input_spec(model)
    if not spec.dynamic and spec.size != tuple(prepared.pixels.shape[-2:]):
        raise UnsupportedModel(f"the model takes {spec.size}, got {tuple(prepared.pixels.shape[-2:])}.")
    return recording


def answer(recording: Recording, prepared: Prepared, method: str, parameters: dict[str, Any], image: int = 0) -> Explanation:
    """One method's map of one image of the batch, with the photo's facts and the sinks written into its provenance."""
    name = _CHOSEN_BY_AUTO if method == "auto" else method
    check_parameters(name, parameters)
    chosen = METHODS[next(key for key, value in METHODS.items() if value is method_of(name))]
    if reason := chosen.accepts(recording):
        raise OptionError(f"{recording.provenance.model}: method '{name}' does not apply: {reason}")
    geometry, photo = prepared.geometries[image], prepared.photos[image]
    parameters = dict(parameters)
    notes: tuple[str, ...] = () if method != "auto" else (f"method {name} was chosen; it does not depend on a class",)
    query = parameters.get("query")
    if isinstance(query, str) and query.startswith("pixel:"):
        parameters["query"] = pixel_to_input(query, recording, geometry)
    result = chosen.function(recording, **parameters)
    if isinstance(query, str) and query.startswith("pixel:"):
        notes += (f"query {query} is {result.provenance.parameters['query']}",)
    if chosen.sinks and chain_refusal(recording) is None and not result.provenance.sinks:
        result = replace(result, provenance=replace(result.provenance, sinks=diagnostics.sinks(recording)))
    source = facts(photo)
    provenance = result.provenance.but(
        image=source.name, image_sha256=source.sha256, geometry=geometry, notes=source.notes + prepared.notes + notes
    )
    return Explanation(photo, geometry, replace(result, provenance=provenance).at(batch=image))


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
