"""Time of Grad-CAM for a CNN, compared with a plain forward pass and with other libraries, as JSON: `python -m bench.cams ROUNDS`.

Each library is called as in its documentation. It is given the class, so that finding the class costs it no time.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from captum.attr import LayerGradCam
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor

import visattn
from bench.measuring import medians, plain, ratio, series
from bench.shared import THREADS
from visattn import data
from visattn.core import methods
from visattn.core.capturing import forget
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.targets import Target

LAYER = "layer4"


class RawGradCAM(GradCAM):  # type: ignore[misc]
    """Grad-CAM of another library that also keeps the map before it is clipped, resized and scaled."""

    def get_cam_image(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Compute the map."""
        self.raw = super().get_cam_image(*args, **kwargs)
        return self.raw


def main(rounds: int) -> dict[str, Any]:
    """Return median seconds, ratios to a plain forward pass, and the difference of each unnormalized map from ours."""
    torch.set_num_threads(THREADS)
    model: Any = visattn.load_model("tv:resnet50", weights="none")
    photo = visattn.load_image(data.photo_path("coffee"))
    prepared = visattn.prepare(photo, model)
    pixels = prepared.pixels
    with torch.inference_mode():
        index = int(model(pixels).argmax())

    def ours() -> Tensor:
        return methods.gradcam(look(model, prepared, target=Target(), features=[LAYER])).values

    def explain() -> Tensor:
        return visattn.explain(model, photo, method="gradcam").map.values

    def first() -> Tensor:
        forget()
        return ours()

    def grad_cam() -> Tensor:
        with RawGradCAM(model=model, target_layers=[model.layer4]) as cam:
            cam(input_tensor=pixels, targets=[ClassifierOutputTarget(index)])
        return torch.from_numpy(cam.raw).clamp(min=0)

    def captum() -> Tensor:
        made: Tensor = LayerGradCam(model, model.layer4).attribute(pixels, target=index, relu_attributions=True)
        return made.detach()

    runs: dict[str, Callable[[], Tensor]] = {"visattn": ours, "explain": explain, "grad-cam": grad_cam, "captum": captum}
    early = medians({"plain": lambda: plain(model, pixels), "first": first}, max(rounds // 4, 3), warmup=1)
    seconds = series({"plain": lambda: plain(model, pixels), **runs}, rounds, warmup=3, back=True)
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()} | {"first": early["first"]},
        "ratios": {name: ratio(values, seconds["plain"]) for name, values in seconds.items()},
        "first": early["first"] / early["plain"],
        "differs": {name: difference(run(), ours()) for name, run in runs.items()},
        "versions": {name: version(name) for name in ("grad-cam", "captum")},
    }


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two maps, relative to the largest value."""
    return float((one.flatten() - other.flatten()).abs().max() / other.abs().max())


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
