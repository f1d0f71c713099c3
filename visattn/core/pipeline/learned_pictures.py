"""Figures of what a model has learned without any photo: its first kernels, and how it tells positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from visattn._support.faces import Later
from visattn.core.drawing.pictures import Picture, carrying
from visattn.core.families import provenance_of
from visattn.core.geometry import Box, Geometry
from visattn.core.methods.from_features.position_similarity import NO_POSITIONS
from visattn.core.methods.selection import spatial_refusal
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import answer_of, as_the_model, look
from visattn.core.records import Recording
from visattn.errors import UnsupportedModel

if TYPE_CHECKING:
    from visattn.core import methods
    from visattn.core.drawing import parameter_pages, sheets
else:
    methods = Later("visattn.core.methods")
    parameter_pages, sheets = Later("visattn.core.drawing.parameter_pages"), Later("visattn.core.drawing.sheets")

__all__ = ["kernels_picture", "positions_picture"]


def kernels_picture(model: nn.Module, prepared: Prepared, title: str) -> Picture:
    """Draw the kernels of the convolution that receives the image: those of a first layer, or of a patch embedding.

    Raises:
        UnsupportedModel: If no 2-d convolution receives the image itself.
    """
    name, kernels = _first_kernels(model, prepared)
    notes = [f"{name}: {len(kernels)} kernels of {' x '.join(map(str, kernels.shape[1:]))}"]
    page = parameter_pages.kernel_page(kernels.numpy(), title=f"{title}: kernels of the first layer", notes=notes)
    return carrying(page, provenance_of(model).but(method="kernels", parameters={"layer": name}))


def positions_picture(model: nn.Module, prepared: Prepared, title: str) -> Picture:
    """Draw how alike the position embeddings of patches are; for a model without them, attention on a plain picture.

    On a plain picture all patches hold the same, so what differs between them comes from positions: rotations, biases of scores, and the
    borders of convolutions.

    Raises:
        UnsupportedModel: If the model has neither a table of positions nor attention over patches.
        NoAttentionCaptured: If it has no attention at all.
    """
    recording = look(model, prepared, features="positions")
    table = next((feature for feature in recording.features if feature.role == "positions"), None)
    if table is None or table.layout is None:
        return _on_a_plain_picture(model, prepared, title)
    patches = F.normalize(table.value[0, len(table.layout.prefix) :].double(), dim=-1)
    alike = (patches @ patches.mT).float().view(*table.layout.grid, *table.layout.grid)
    notes = [f"{table.layer}: {' x '.join(map(str, table.layout.grid))} patches, width {patches.shape[1]}"]
    page = parameter_pages.position_page(alike.numpy(), title=f"{title}: position embeddings", notes=notes)
    return carrying(page, provenance_of(model).but(method="positions", parameters={"layer": table.layer}))


def _on_a_plain_picture(model: nn.Module, prepared: Prepared, title: str) -> Picture:
    """Draw the attention of the patch in the middle in each layer whose grid is that of the last, on pixels that are all zero."""
    plain = replace(prepared, pixels=torch.zeros_like(prepared.pixels))
    recording = look(model, plain, features="none").image(0)
    records = [record for record in recording if record.kind == "self" and record.keys.grid]
    if spatial_refusal(recording) or not records:
        raise UnsupportedModel(f"{NO_POSITIONS}; and no layer has attention over patches.")
    layout = records[-1].keys
    same = [record for record in records if record.keys == record.queries == layout]
    rows, columns = layout.grid
    chosen: Recording = replace(recording, records=same)
    shown = methods.attention(chosen, layer="all", fusion="mean", query=f"patch:{rows // 2},{columns // 2}").at(batch=0)
    height, width = recording.input_size
    notes = [
        "no single table of positions was found; all pixels are 0 as the model receives them, so what differs between patches comes from "
        "positions",
        f"{len(same)} of {len(records)} layers with attention over patches: those on the grid of the last, {rows} x {columns}",
    ]
    page = sheets.contact_sheet(
        Image.new("RGB", (width, height), (128, 128, 128)),
        shown,
        Geometry((height, width), (height, width), Box(0, 0, height, width)),
        panel=150,
        opacity=1.0,
        title=f"{title}: attention of the middle patch on a plain picture, mean over heads",
        notes=notes,
    )
    return carrying(page, page.provenance.but(notes=(*page.provenance.notes, *notes)))


def _first_kernels(model: nn.Module, prepared: Prepared) -> tuple[str, Tensor]:
    """Return name and weights `(O, C, height, width)` of the first convolution that receives the pixels."""
    pixels, first = as_the_model(model, prepared.pixels), list[tuple[str, Tensor]]()

    def seen(name: str) -> Any:  # noqa: ANN401 - a hook
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            given = args[0] if args else None
            if isinstance(given, Tensor) and given.shape == pixels.shape and torch.equal(given, pixels):
                weights: Any = module.weight
                first.append((name, weights.detach().float().cpu()))

        return hook

    handles = [
        module.register_forward_pre_hook(seen(name)) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)
    ]
    try:
        with torch.no_grad():
            answer_of(model, pixels, prepared)
    finally:
        for handle in handles:
            handle.remove()
    if not first:
        raise UnsupportedModel(
            f"{type(model).__name__}: no 2-d convolution receives the image itself, so there are no first kernels."
        )
    return first[0]
