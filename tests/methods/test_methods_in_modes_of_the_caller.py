"""Each method gives the same map in the caller's inference mode and autocast as outside, of tensors that autograd can use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import tiny
from tests.methods.truths import graded
from visattn.core import methods
from visattn.core.methods import ScoredImages
from visattn.core.methods.sinks import attention_received, find_sinks, sink_mass
from visattn.core.provenance import Sink
from visattn.core.records import FeatureRecord, Recording

PLACE = tiny.layout((), (2, 3))
SINKS = [(Sink(0, 1, 30.0, "layer0"),), (), (Sink(1, 2, 25.0, "layer1"),)]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache
def features() -> Recording:
    """Record maps of one image whose gradient is the same at each position, a gate, and a glimpse of 1.5 x 2 cells."""
    value, slope = noise(1, 4, 2, 3, seed=0), noise(1, 4, 1, 1, seed=1).expand(-1, -1, 2, 3)
    made = Recording(input_size=(32, 48))
    made.features += [
        FeatureRecord("maps", 0, "activation", value, slope, PLACE),
        FeatureRecord("gate", 0, "spatial_gate", value[:, :1].sigmoid(), layout=PLACE),
        FeatureRecord("eye", 0, "glimpse", torch.tensor([[[0.0, 0.0, 1.5, 2.0]]]), layout=PLACE),
    ]
    return made


@cache
def scored() -> ScoredImages:
    """Score one image by a layer whose output is recorded as `maps`; the score is no linear function of it."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 1)).requires_grad_(False)
    pixels = noise(1, 3, 4, 6, seed=3)
    return ScoredImages(pixels, lambda x: model(x)[:, 0].exp(), patch=(2, 2), model=model)


@cache
def first_layer() -> Recording:
    """Record the output of the first layer of the model that computes the score."""
    model: Any = scored().model
    return Recording(input_size=(4, 6), features=[FeatureRecord("0", 0, "activation", model[0](scored().pixels), layout=PLACE)])


def of_layer(name: str) -> Tensor:
    found: Tensor = getattr(methods, name)(first_layer(), scored=scored()).values
    return found


def of_pixels(name: str, **options: Any) -> Tensor:
    found: Tensor = getattr(methods, name)(features(), scored=scored(), **options).values
    return found


def of(made: Callable[[], Recording], name: str, **options: Any) -> Tensor:
    found: Tensor = getattr(methods, name)(made(), **options).values
    return found


ATTENTION = (
    *(
        "attention",
        "attention_flow",
        "attention_gradient",
        "gradient_rollout",
        "legrad",
        "norm_attention",
        "relevance",
        "rollout",
    ),
    *("pca", "similarity"),
)
FEATURES = "cam", "eigencam", "gates", "glimpses", "gradcam", "gradcam_plus_plus", "hirescam", "layercam", "xgradcam"
FEW: Any = {"grid_size": (2, 3), "samples": 16}
MADE: dict[str, Callable[[], Tensor]] = {
    **{name: partial(of, graded, name) for name in ATTENTION if name != "similarity"},
    "similarity": partial(of, graded, "similarity", query="patch:1,2"),
    "transition_attention": partial(of, graded, "transition_attention", replay=lambda _: graded(), steps=2, start_layer=0),
    **{name: partial(of, features, name, **({"layer": "maps"} if "cam" in name else {})) for name in FEATURES},
    **{name: partial(of_layer, name) for name in ("scorecam", "ablationcam")},
    **{name: partial(of_pixels, name) for name in ("saliency", "input_x_gradient")},
    "integrated_gradients": partial(of_pixels, "integrated_gradients", steps=4),
    "smoothgrad": partial(of_pixels, "smoothgrad", samples=3),
    "occlusion": partial(of_pixels, "occlusion", grid_size=(2, 3)),
    "kernel_shap": partial(of_pixels, "kernel_shap", **FEW),
    "lime": partial(of_pixels, "lime", **FEW),
    "attention received": lambda: attention_received(graded()),
    "mass of sinks": lambda: sink_mass(graded(), SINKS),
}


@pytest.mark.parametrize("name", list(MADE))
def test_a_map_in_the_callers_modes_is_the_map_outside_them(name: str) -> None:
    plain = MADE[name]()
    assert plain.abs().max() > 0
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        inside = MADE[name]()
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(inside, plain)
    assert not inside.is_inference()
    (slope,) = torch.autograd.grad(inside.requires_grad_().sum(), inside)
    assert torch.equal(slope, torch.ones_like(plain))


def test_sinks_in_the_callers_modes_are_the_sinks_outside_them() -> None:
    plain = find_sinks(graded("1 + 3 x 5"), 1.5)
    assert any(plain)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert find_sinks(graded("1 + 3 x 5"), 1.5) == plain
