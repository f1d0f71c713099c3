"""Figure of a network's own attention gates on one photo: maps of spatial gates, and sorted bars of channel gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Unpack

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from visattn._support.options import with_options
from visattn._support.types import Role
from visattn.core.drawing import colormaps
from visattn.core.drawing.marks import draw_window
from visattn.core.drawing.overlays import on_scale
from visattn.core.drawing.pages import Bar, Cell, sheet
from visattn.core.drawing.pictures import Picture, carrying
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE, StyleOptions
from visattn.core.geometry import Box, Geometry, affine_corners
from visattn.core.maps import value_range
from visattn.core.maps.scaling import range_words, shows_nothing
from visattn.core.methods import gates
from visattn.core.methods.gate_maps import GATES, NO_GATES, PLACES, layer_of, mixed
from visattn.core.records import FeatureRecord, Recording
from visattn.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["gate_page"]

_INK, _FAINT, _PAPER = (24, 24, 27), (200, 200, 205), (255, 255, 255)
_STRIP = 0.2  # height of a strip of channel gates, relative to the panel width
_ACROSS = 4
_PARTS = ("channel", "spatial"), ("ChannelGate", "SpatialGate")  # submodules of one CBAM, as timm and its authors name them


@dataclass(eq=False)
class _Module:
    """Gates of one module: a spatial map and channel gates; or the window that a spatial transformer samples."""

    layer: str
    place: FeatureRecord | None = None
    channels: list[NDArray[np.float32]] = field(default_factory=list)
    window: FeatureRecord | None = None
    roles: set[Role] = field(default_factory=set)


@with_options(StyleOptions)
def gate_page(
    recording: Recording,
    photo: Image.Image,
    geometry: Geometry,
    *,
    layer: int | str = "all",
    panel: int = 240,
    shared_scale: bool = False,
    **style: Unpack[StyleOptions],
) -> Picture:
    """Draw the gates of one photo, one panel per module.

    Args:
        recording: Recording of a forward pass over the photo.
        photo: The upright photo.
        geometry: Position of the model's input on the photo.
        layer: `all`, or the index or dotted name of one module.
        panel: Width of a panel in pixels.
        shared_scale: Whether all maps share one color scale.
        style: See `visattn.drawing.Style`; by default `opacity` is 0.6 and `interpolation` is `nearest`.

    Returns:
        The figure. Each panel shows the spatial gates over the photo, and below it the channel gates, sorted. PNG files of it store
        its provenance.

    Raises:
        OptionError: If the network has no gates, or none in that layer.
    """
    modules = _chosen(_modules(recording), layer)
    chosen = Style(**PAGE | style).opaque()
    height = max(1, round(photo.height * panel / photo.width))
    small = photo.resize((panel, height), Image.Resampling.BOX if photo.width > panel else Image.Resampling.BICUBIC)
    place = geometry.resized((height, panel))
    heats = {
        number: gates(replace(recording, features=[module.place])).at(batch=0).to_heatmap(place, chosen.interpolation)
        for number, module in enumerate(modules)
        if module.place is not None and module.place.layout is not None
    }
    signed = any(heat.signed for heat in heats.values())
    mode = chosen.normalize
    if mode == "auto":  # factors: each map's whole range counts
        mode = "symmetric" if signed else "minmax"
    ends = [value_range(heat.grid, mode, signed) for heat in heats.values()]
    scale = (min(low for low, _ in ends), max(high for _, high in ends)) if ends and shared_scale else None

    def cell(number: int, module: _Module) -> Cell:
        pictures: list[Image.Image] = []
        words: list[str] = []
        if (heat := heats.get(number)) is not None:
            low, high = scale or value_range(heat.grid, mode, signed)
            pictures.append(on_scale(small, replace(heat, signed=signed), low, high, chosen))
            even = shows_nothing(chosen.normalize, low, high) and low < high
            words.append("nearly even, " * even + _range(heat.grid))
        elif module.place is not None or (module.window is not None and module.window.layout is None):
            pictures.append(Image.new("RGB", (panel, height), _FAINT))
            words.append("its position on the image could not be traced")
        if module.window is not None and module.window.layout is not None:
            pictures.append(draw_window(small, _corners(module.window.value, module.window.layout.box, place)))
            words.append("the sampled window; the dot marks its top-left corner")
        for values in module.channels:
            pictures.append(_strip(values, panel, chosen.colormap or "inferno"))
            words.append(f"{len(values)} channels {_range(values)}")
        share = mixed(recording, module.layer)
        words += [] if share is None else [f"blended with weight {share:.2g}"]
        return Cell(_stacked(pictures), "\n".join(words), module.layer)

    drawn = heats or any(module.window is not None for module in modules)
    cells = [] if drawn else [Cell(small, heading="photo")]
    cells += [cell(number, module) for number, module in enumerate(modules)]
    facts, notes = recording.provenance, []
    if heats:
        notes.append("map: the factor by which the features at each location are multiplied")
    if any(module.channels for module in modules):
        notes.append(
            "bars: the factor of each channel, from high to low; they start at 0; the gray line, or else the top, marks 1"
        )
    notes.append("a low gate does not mean unimportant: later layers can scale the features up again")
    ends_of_bar = ("minus the largest magnitude", "the largest magnitude") if signed else ("map minimum", "map maximum")
    ticks = tuple(f"{end:.2g}" for end in scale) if scale else ends_of_bar
    page = sheet(
        [cells[start : start + _ACROSS] for start in range(0, len(cells), _ACROSS)],
        panel=panel,
        title=f"{facts.title}: gates",
        notes=(*notes, *facts.notes, *(f"warning: {text}" for text in facts.warnings)),
        bar=Bar(chosen.colors(signed), ticks, "one scale for all maps" if scale else "each map on its own scale (range below it)")
        if any(not shows_nothing(chosen.normalize, *(scale or own)) for own in ends)
        else None,
    )
    drawing = chosen.facts(signed) | {"panel": panel, "interpolation": chosen.interpolation}
    scope = "one scale for all maps" if scale else "each map on its own scale"
    made = facts.but(
        geometry=geometry,
        normalization=f"{mode}, {scope}",
        drawing=drawing,
    )
    return carrying(
        page, made if not ends else made.but(value_range=(min(low for low, _ in ends), max(high for _, high in ends)))
    )


def _modules(recording: Recording) -> list[_Module]:
    """Group the gates of the last forward pass by module, in call order. A channel gate and the spatial gate next to it form one module."""
    found: list[_Module] = []
    for record in recording.select(forward=-1).features if recording.features else ():
        if record.role == "transform":
            found.append(_Module(record.layer, window=record))
        if record.role not in GATES:
            continue
        placed = record.role in PLACES
        if not (found and _same_module(found[-1], record)):
            found.append(_Module(record.layer))
        module = found[-1]
        module.layer = module.layer if module.layer == record.layer else _parent(record.layer)
        module.roles.add(record.role)
        if placed:
            module.place = record
        else:
            module.channels += list(record.value[0].float().reshape(-1, record.value.shape[-1]).cpu().numpy())
    return found


def _same_module(module: _Module, record: FeatureRecord) -> bool:
    """Check whether a gate belongs to the same module call as the previous ones; CBAM is two modules in timm and its authors' code."""
    if record.layer == module.layer:
        return record.role not in module.roles
    beside = _parent(record.layer) == _parent(module.layer)
    return beside and (_name(module.layer), _name(record.layer)) in _PARTS


def _parent(layer: str) -> str:
    return layer.rpartition(".")[0]


def _name(layer: str) -> str:
    return layer.rpartition(".")[2]


def _chosen(modules: list[_Module], layer: int | str) -> list[_Module]:
    if not modules:
        raise OptionError(NO_GATES)
    name = layer_of(layer, [module.layer for module in modules], also="all or ") if layer != "all" else layer
    return [module for module in modules if name in ("all", module.layer)]


def _corners(theta: Tensor, box: Box, place: Geometry) -> list[tuple[float, float]]:
    """Return the corners of a spatial transformer's window, as points on the photo."""
    shares = affine_corners(theta[0].tolist())
    return [place.to_photo(box.top + y * box.height, box.left + x * box.width) for y, x in shares]


def _strip(values: NDArray[np.float32], width: int, colormap: str) -> Image.Image:
    """Draw sorted gates as bars that start at 0; bars of negative gates point down."""
    height = max(24, round(width * _STRIP))
    top, bottom = max(1.0, float(values.max())), min(0.0, float(values.min()))
    ranks = np.linspace(0, len(values) - 1, width).round().astype(int)
    sorted_ = np.sort(values)[::-1][ranks]
    colors = colormaps.table(colormap)[
        ((sorted_ / top).clip(0, 1) * 200).round().astype(int)
    ]  # without the brightest, near white
    zero, ends = ((top - x) / (top - bottom) * height for x in (0.0, sorted_))
    rows = np.arange(height)[:, None] + 0.5
    filled = (rows >= np.minimum(zero, ends)) & (rows <= np.maximum(zero, ends))
    picture = Image.fromarray(np.where(filled[..., None], colors[None], np.uint8(255)).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for line in {1.0, 0.0} if bottom < 0 else {1.0}:
        at = round((top - line) / (top - bottom) * (height - 1))
        draw.line([(0, at), (width, at)], _FAINT)
    draw.rectangle([0, 0, width - 1, height - 1], outline=_FAINT)
    return picture


def _range(values: NDArray[np.float32]) -> str:
    low, high = float(values.min()), float(values.max())
    return range_words(low, high) if low < high else f"constant {low:.3g}"


def _stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    gap = 4
    height = sum(picture.height for picture in pictures) + gap * (len(pictures) - 1)
    page, top = Image.new("RGB", (pictures[0].width, height), _PAPER), 0
    for picture in pictures:
        page.paste(picture, (0, top))
        top += picture.height + gap
    return page
