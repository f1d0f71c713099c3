"""Gallery pictures of single mechanisms: the steps of one query, position embeddings, kernels, and addressing by content and location."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

import visattn
from visattn import data
from visattn.core.drawing.sheets import contact_sheet
from visattn.core.drawing.step_pages import step_page
from visattn.core.maps import AttentionMap
from visattn.core.methods import attention_steps
from visattn.core.pipeline.learned_pictures import kernels_picture, positions_picture
from visattn.core.pipeline.passes import look
from visattn.nn import ContentLocationAddressing

SIDE = 224
STRENGTH, GATE, SHIFT, SHARPNESS = 80.0, 0.85, (0, 2), 2.0  # of the addressing
LAST, LIKE = (2, 4), (9, 8)  # patches of chelsea: where the last step attended, and what the key is like: her nose


def mechanism_pictures() -> dict[str, Image.Image]:
    """Return the pictures by name."""
    small = visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights(), img_size=SIDE)
    prepared = visattn.prepare(visattn.load_image(data.photo_path("chelsea")), small, img_size=SIDE)
    recording = look(small, prepared, values=True)
    steps = attention_steps(recording, layer=11, head=2, query="patch:8,9")
    title = "DINOv2 ViT-S/14, layer 11, head 2, one patch"
    page = step_page(
        prepared.photo, steps.map, prepared.geometry, steps.weights.numpy(), panel=260, title=title, notes=steps.facts
    )
    efficientnet = visattn.load_model("tf_efficientnet_lite0")
    photo = visattn.prepare(visattn.load_image(data.photo_path("chelsea")), efficientnet)
    return {
        "steps": page,
        "positions": positions_picture(small, prepared, "DINOv2 ViT-S/14"),
        "kernels": kernels_picture(efficientnet, photo, "EfficientNet-Lite0"),
        "addressing": _addressing(prepared, recording),
    }


def _addressing(prepared: visattn.Prepared, recording: visattn.Recording) -> Image.Image:
    """Draw the weights behind each step of the addressing: the keys are patch features, and the key asked for is one of them."""
    feature = next(one for one in recording.features if one.role == "tokens" and one.layout is not None)
    layout = feature.layout
    assert layout is not None  # noqa: S101 - it was chosen so
    patches = feature.value[:, len(layout.prefix) :]  # (1, N, D)
    rows, columns = layout.grid
    module = ContentLocationAddressing(patches.shape[2], patches.shape[2], reach=2, axes=2)
    _set(module, patches[0, LIKE[0] * columns + LIKE[1]])
    previous = torch.zeros(1, 1, rows * columns)
    previous[..., LAST[0] * columns + LAST[1]] = 1
    with torch.no_grad():
        steps = module.steps(torch.zeros(1, 1, patches.shape[2]), patches, layout.grid, previous)
    names = "by content", "mixed with the last weights", "shifted by two columns", "sharpened"
    values = torch.cat([weights[0] for weights in steps]).view(len(names), rows, columns)
    shown = AttentionMap(values, ("step",), layout, {"step": names}, "weight", recording.provenance)
    return contact_sheet(prepared.photo, shown, prepared.geometry, panel=260, title="Addressing by content and location")


@torch.no_grad()
def _set(module: ContentLocationAddressing, key: Tensor) -> None:
    """Let the module address as the constants say, whatever the query is."""
    for layer in (module.key, module.strength, module.gate, module.shift, module.sharpness):
        layer.weight.zero_()
    module.key.bias.copy_(key)
    module.strength.bias.fill_(STRENGTH)  # the softplus of a large number is this number
    module.gate.bias.fill_(torch.tensor(GATE).logit())
    module.shift.bias.copy_(torch.tensor([30.0 * (shift == SHIFT) for shift in module.shifts]))
    module.sharpness.bias.fill_(float(torch.tensor(SHARPNESS - 1).expm1().log()))
