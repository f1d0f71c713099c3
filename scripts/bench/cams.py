"""Time and memory of Grad-CAM for a CNN, beside a plain forward pass and other libraries, as JSON.

`python -m bench.cams NAME LAYER ROUNDS` times all runs on one thread. `python -m bench.cams NAME LAYER peak RUN` returns the bytes by
which a run's first call makes the process grow. Each library is called as in its documentation. It is given the class, so that finding
the class costs it no time.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from captum.attr import LayerGradCam
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor

import visattn
from bench.measuring import medians, plain, ratio, series
from bench.memory import forget_peak, status
from visattn import data
from visattn.core import methods
from visattn.core.capturing import forget
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.targets import Target

Runs = dict[str, Callable[[], Any]]
_THREADS = 1


class RawGradCAM(GradCAM):  # type: ignore[misc]
    """Grad-CAM of another library that also keeps the map before it is clipped, resized and scaled."""

    def get_cam_image(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Compute the map."""
        self.raw = super().get_cam_image(*args, **kwargs)
        return self.raw


def prepared(name: str, layer: str) -> tuple[Runs, Runs]:
    """Return what is timed by name: passes and calls that make no map to compare, and runs that compute the same map."""
    torch.set_num_threads(_THREADS)
    torch.manual_seed(0)
    model: Any = visattn.load_model(f"tv:{name}", weights="none")
    photo = visattn.load_image(data.photo_path("coffee"))
    inputs = visattn.prepare(photo, model)
    pixels, features = inputs.pixels, model.get_submodule(layer)
    with torch.inference_mode():
        index = int(model(pixels).argmax())

    def ours() -> Tensor:
        return methods.gradcam(look(model, inputs, target=Target(), features=[layer])).values

    def first() -> Tensor:
        forget()
        return ours()

    def explain() -> Tensor:
        return visattn.explain(model, photo, method="gradcam", layer=layer).map.values

    def grad_cam() -> Tensor:
        with RawGradCAM(model=model, target_layers=[features]) as cam:
            cam(input_tensor=pixels, targets=[ClassifierOutputTarget(index)])
        return torch.from_numpy(cam.raw).clamp(min=0)

    def captum() -> Tensor:
        made: Tensor = LayerGradCam(model, features).attribute(pixels, target=index, relu_attributions=True)
        return made.detach()

    def torch_cam() -> Tensor:
        with import_module("torchcam.methods").GradCAM(model, features) as extractor:
            (made,) = extractor(index, model(pixels), normalized=False)
        return torch.as_tensor(made).detach()

    maps = {"visattn": ours, "explain": explain, "grad-cam": grad_cam, "torch-cam": torch_cam, "captum": captum}
    return {"plain": lambda: plain(model, pixels), "first": first}, maps


def main(name: str, layer: str, rounds: int) -> dict[str, Any]:
    """Return median seconds, ratios to a plain forward pass and to our run, and the difference of each raw map from ours."""
    bare, maps = prepared(name, layer)
    early = medians(bare, max(rounds // 4, 3), warmup=1)
    seconds = series({"plain": bare["plain"], **maps}, rounds, warmup=3, back=True)
    return {
        "seconds": {run: statistics.median(values) for run, values in seconds.items()} | {"first": early["first"]},
        "plain": {run: ratio(values, seconds["plain"]) for run, values in seconds.items()},
        "visattn": {run: ratio(values, seconds["visattn"]) for run, values in seconds.items()},
        "captum": ratio(seconds["visattn"], seconds["captum"]),
        "first": early["first"] / early["plain"],
        "differs": {run: difference(make(), maps["visattn"]()) for run, make in maps.items()},
        "versions": {
            library: version(library.replace("torch-cam", "torchcam")) for library in ("grad-cam", "torch-cam", "captum")
        },
    }


def peak(name: str, layer: str, run: str) -> int:
    """Return the bytes that the first call of a run needs beside the loaded model."""
    bare, maps = prepared(name, layer)
    forget_peak()
    loaded = status("VmRSS")
    (bare | maps)[run]()
    return status("VmHWM") - loaded


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two maps, relative to the largest value."""
    return float((one.flatten() - other.flatten()).abs().max() / other.abs().max())


if __name__ == "__main__":
    name, layer, *rest = sys.argv[1:]
    print(json.dumps(main(name, layer, int(rest[0])) if len(rest) == 1 else peak(name, layer, rest[1])))
