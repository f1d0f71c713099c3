"""Gradients of normalizations of one image, in all orders in memory, against the formula in float64; PyTorch's own are wrong in some."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import visattn
from visattn._support import norm_gradients

ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "own": torch.Tensor.contiguous,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "of tokens": lambda x: x.flatten(2).mT.contiguous().mT.view(x.shape),
    "of one image": lambda x: torch.stack([image.movedim(0, -1).contiguous().movedim(-1, 0) for image in x]),
    "odd stride of the batch": lambda x: x.contiguous().as_strided(x.shape, (1, *x.stride()[1:])) if len(x) == 1 else x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
}
SHAPES = (1, 8, 6, 6), (2, 8, 6, 6), (1, 8, 36), (1, 8, 1, 6), (1, 1, 6, 6), (1, 8, 3, 6, 4)


def of_batch(x: Tensor, gradient: Tensor, norm: nn.Module, axes: tuple[int, ...]) -> Tensor:
    """Return the gradient of a normalization over `axes`, or by running statistics without axes, times a weight of each channel."""
    x, gradient = x.double(), gradient.double()
    shape = (1, -1, *[1] * (x.ndim - 2))
    weight = norm.weight.detach().double().view(shape)  # type: ignore[operator]
    if not axes:
        return gradient * weight / (norm.running_var.double().view(shape) + norm.eps) ** 0.5  # type: ignore[operator]
    deviation = (((x - x.mean(axes, keepdim=True)) ** 2).mean(axes, keepdim=True) + norm.eps) ** 0.5  # type: ignore[operator]
    normal, scaled = (x - x.mean(axes, keepdim=True)) / deviation, gradient * weight
    centered = scaled - scaled.mean(axes, keepdim=True) - normal * (scaled * normal).mean(axes, keepdim=True)
    return centered / deviation


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["settled batch norm", "batch norm in training", "instance norm"])
def test_gradients_of_norms_are_right_in_every_order_in_memory(kind: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    values, slope = (torch.randn(shape, generator=generator) for _ in range(2))
    batch = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    instance = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]
    made = (instance if kind == "instance norm" else batch)[len(shape) - 3]
    norm = made(shape[1], affine=True)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2, generator=generator)
    if isinstance(norm, nn.modules.batchnorm._BatchNorm) and kind == "settled batch norm":
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.normal_(generator=generator)
        norm.running_var.uniform_(0.5, 2, generator=generator)
        norm.eval()
    space = tuple(range(2, len(shape)))
    axes = {"settled batch norm": (), "batch norm in training": (0, *space), "instance norm": space}[kind]
    for order, other in product([name for name in ORDERS if name != "expanded"], ORDERS):
        x = ORDERS[order](values).detach().requires_grad_()
        gradient = ORDERS[other](slope)
        out = norm(x)
        norm_gradients.set_right(out)
        (found,) = torch.autograd.grad(out, x, gradient)
        torch.testing.assert_close(found.double(), of_batch(x.detach(), gradient, norm, axes), rtol=1e-4, atol=2e-5)


class Flattened(nn.Module):
    """Patches that are normalized and flattened to tokens, with attention and a classifier behind."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.project, self.norm = nn.Conv2d(3, 8, 4, 4), norm
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.project(images)).flatten(2).mT
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head((tokens + mixed).mean(1))  # type: ignore[no-any-return]


@pytest.fixture(params=["batch", "instance"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8) if request.param == "batch" else nn.InstanceNorm2d(8, affine=True)
    if isinstance(norm, nn.BatchNorm2d):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return Flattened(norm).eval()


def truth(model: nn.Module, images: Tensor, at: str) -> Tensor:
    """Return the gradient of class 2 at the pixels, or at the output of the projection, in float64 by the formulas above."""
    double = Flattened(Formula(model.norm)).double().eval()  # type: ignore[arg-type]
    double.load_state_dict(
        {name: value for name, value in model.state_dict().items() if not name.startswith("norm.")}, strict=False
    )
    kept: list[Tensor] = []
    double.project.register_forward_hook(lambda _, __, out: kept.append(out))
    pixels = images.double().requires_grad_()
    score = double(pixels)[:, 2].sum()
    return torch.autograd.grad(score, pixels if at == "pixels" else kept[0])[0]


class Formula(nn.Module):
    """Normalization written out."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = [norm]

    def forward(self, x: Tensor) -> Tensor:
        (norm,) = self.norm
        weight, bias = (part.detach().double()[:, None, None] for part in (norm.weight, norm.bias))  # type: ignore[operator]
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            mean, var = (part.double()[:, None, None] for part in (norm.running_mean, norm.running_var))
        else:
            mean, var = x.mean((2, 3), keepdim=True), ((x - x.mean((2, 3), keepdim=True)) ** 2).mean((2, 3), keepdim=True)
        return (x - mean) / (var + norm.eps) ** 0.5 * weight + bias  # type: ignore[operator]


def test_attribution_of_one_image_takes_the_right_gradient(model: nn.Module) -> None:
    images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    found = visattn.explain(model, pixels=images, method="captum.saliency", target=2).map.values
    expected = truth(model, images, "pixels")[0].abs().amax(0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-7)


def test_a_capture_of_one_image_takes_the_right_gradient(model: nn.Module) -> None:
    images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with visattn.capture(model, features=["project"], gradients=True) as recording:
        scores = model(images)
    (feature,) = [feature for feature in recording.gradients(scores[:, 2]).features if feature.layer == "project"]
    assert feature.gradient is not None
    torch.testing.assert_close(feature.gradient.double(), truth(model, images, "project"), rtol=1e-4, atol=1e-7)
    explained = visattn.explain(model, pixels=images, method="hirescam", layer="project", target=2).map.values
    expected = (truth(model, images, "project") * feature.value.double()).sum(1)[0].relu()
    torch.testing.assert_close(explained.double(), expected, rtol=1e-4, atol=1e-7)
