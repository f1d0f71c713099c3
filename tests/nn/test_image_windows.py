"""Image windows of spatial transformer, retina and DRAW, against loops and slices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.arithmetic import Vector, dense, example, ready
from visattn.nn import DrawRead, DrawWrite, Retina, SpatialTransformer


def bilinear(image: Tensor, y: float, x: float) -> Tensor:
    """Sample the image bilinearly at pixel coordinates, where centers are whole numbers; it is 0 outside."""
    out, (rows, columns) = torch.zeros_like(image[:, 0, 0]), image.shape[1:]
    for i, j in itertools.product((math.floor(y), math.floor(y) + 1), (math.floor(x), math.floor(x) + 1)):
        if 0 <= i < rows and 0 <= j < columns:
            out = out + image[:, i, j] * (1 - abs(y - i)) * (1 - abs(x - j))
    return out


class Fixed(nn.Module):
    """Localization network with constant features, so the output depends on the last layer's bias alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 1, dtype=x.dtype)


@pytest.mark.parametrize("attention", [False, True], ids=["affine", "attention"])
@pytest.mark.parametrize("size", [(3, 4), (6, 5), (1, 1)], ids=str)
def test_spatial_transformer_equals_loops(attention: bool, size: tuple[int, int]) -> None:
    module, image = (
        SpatialTransformer(2, localization=Fixed(), features=1, attention=attention, size=size).double(),
        example(2, 5, 7),
    )
    a, b, c, d, e, f = (0.6, 0.0, 0.3, 0.0, 0.6, -0.5) if attention else (0.8, -0.3, 0.2, 0.4, 1.1, -0.1)
    learned = (a, c, f) if attention else (a, b, c, d, e, f)
    module.theta.bias.data = torch.tensor(learned, dtype=torch.float64)
    expected = torch.zeros(2, 2, *size, dtype=torch.float64)
    for n, i, j in itertools.product(range(2), range(size[0]), range(size[1])):
        u, v = (2 * j + 1) / size[1] - 1, (2 * i + 1) / size[0] - 1
        x, y = a * u + b * v + c, d * u + e * v + f
        expected[n, :, i, j] = bilinear(image[n], ((y + 1) * 5 - 1) / 2, ((x + 1) * 7 - 1) / 2)
    torch.testing.assert_close(module(image), expected, rtol=0, atol=1e-12)


def test_positions_are_exact_under_autocast() -> None:
    module, x = SpatialTransformer(2, localization=Fixed(), features=1), example(2, 37, 53).float()
    module.theta.bias.data = torch.tensor([0.7, 0.1, 0.013, -0.2, 0.9, 0.007])
    expected, at = module(x), torch.tensor([[0.013, 0.007]] * 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(x), expected, rtol=0, atol=0)
        torch.testing.assert_close(Retina(4, 2)(x, at), Retina(4, 2)(x.double(), at.double()).float(), rtol=0, atol=1e-4)
    half = module.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert float((half - expected).detach().norm() / expected.detach().norm()) < 0.1


def test_corners_of_the_output_are_given_on_the_input() -> None:
    theta = torch.tensor([[[1.0, 0, 0], [0, 1, 0]], [[0.5, 0, 0.5], [0, 0.25, -0.75]], [[0, -1, 0], [1, 0, 0]]])
    whole = [(0, 0), (0, 1), (1, 1), (1, 0)]
    right = [(0, 0.5), (0, 1), (0.25, 1), (0.25, 0.5)]
    turned = [(0, 1), (1, 1), (1, 0), (0, 0)]  # the top left of the output shows the top right of the input
    torch.testing.assert_close(SpatialTransformer.corners(theta), torch.tensor([whole, right, turned], dtype=torch.float32))


def test_a_quarter_turn_shows_the_image_turned() -> None:
    module, x = SpatialTransformer(2, localization=Fixed(), features=1).double(), example(2, 4, 4)
    module.theta.bias.data = torch.tensor([0, -1, 0, 1, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(module(x), x.rot90(1, (2, 3)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "center"), [(4, (6, 5)), (3, (6.5, 5.5)), (4, (1, 9)), (2, (0, 0))], ids=str)
@pytest.mark.parametrize("factor", [2, 3])
def test_retina_equals_slices_around_pixel_centers(size: int, factor: int, center: tuple[float, float]) -> None:
    x, scales = example(2, 10, 12), 2 if size % 2 else 3
    if size % 2 and factor == 2:
        scales = 1  # wider patches would lie between pixels
    found = Retina(size, scales, factor)(x, torch.tensor([[center[1] / 6 - 1, center[0] / 5 - 1]] * 2, dtype=torch.float64))
    padded = F.pad(x, (99, 99, 99, 99))
    patches = []
    for scale in range(scales):
        side = size * factor**scale
        top, left = (int(99 + c - side / 2) for c in center)
        wide = padded[:, :, top : top + side, left : left + side]
        patches.append(wide.reshape(2, 2, size, factor**scale, size, factor**scale).mean((3, 5)))
    torch.testing.assert_close(found, torch.cat(patches, 1), rtol=0, atol=1e-12)


def test_retina_takes_one_location_for_each_image() -> None:
    x, at = example(1, 8, 8), torch.tensor([[-0.25, 0.5], [0.75, 0.0]], dtype=torch.float64, requires_grad=True)
    together = Retina(2, 2)(x, at)
    alone = torch.cat([Retina(2, 2)(x[i : i + 1], at[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    (slope,) = torch.autograd.grad(together.square().sum(), at)
    assert bool((slope != 0).all())


# DRAW


def filters(center: float, spacing: float, variance: float, count: int, side: int) -> list[Vector]:
    """Compute filters 1 to N on pixels 1 to A, counted as in the paper."""
    out = []
    for i in range(1, count + 1):
        middle = center + (i - count / 2 - 0.5) * spacing
        row = [math.exp(-((a - middle) ** 2) / (2 * variance)) for a in range(1, side + 1)]
        out.append([r / sum(row) for r in row])
    return out


def windows(module: DrawRead | DrawWrite, state: Tensor, rows: int, columns: int) -> tuple[list[Vector], list[Vector], float]:
    x, y, variance, spacing, gamma = dense(module.window, state.tolist())
    apart = (max(rows, columns) - 1) / (module.patch_size - 1) * math.exp(spacing)
    across = filters((columns + 1) / 2 * (x + 1), apart, math.exp(variance), module.patch_size, columns)
    down = filters((rows + 1) / 2 * (y + 1), apart, math.exp(variance), module.patch_size, rows)
    return down, across, math.exp(gamma)


def window(module: DrawRead | DrawWrite, *numbers: float) -> None:
    """Fix the window of the module to the given numbers, whatever the state."""
    nn.init.zeros_(module.window.weight)
    module.window.bias.data = torch.tensor(numbers, dtype=torch.float64)


def test_draw_read_equals_loops() -> None:
    module, images, states = ready(DrawRead(4, patch_size=3)), example(2, 5, 7), example(4, 1, 1)[..., 0, 0] * 0.3
    expected = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    for n in range(2):
        down, across, gamma = windows(module, states[n], 5, 7)
        for i, j, a, b in itertools.product(range(3), range(3), range(5), range(7)):
            expected[n, :, i, j] += gamma * down[i][a] * images[n, :, a, b] * across[j][b]
    torch.testing.assert_close(module(images, states), expected, rtol=0, atol=1e-12)
    found, weights = module(images, states, need_weights=True)
    gammas = torch.tensor([windows(module, state, 5, 7)[2] for state in states], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    by_weights = (weights @ images.flatten(2).mT[:, None]).squeeze(1).mT.reshape(2, 2, 3, 3) * gammas[:, None, None, None]
    torch.testing.assert_close(by_weights, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(3), torch.ones(2, 1, 9, dtype=torch.float64), rtol=0, atol=1e-12)


def test_draw_write_equals_loops() -> None:
    module, canvas, states = ready(DrawWrite(2, 4, patch_size=3)), example(2, 5, 7), example(4, 1, 1)[..., 0, 0] * 0.3
    expected = canvas.clone()
    for n in range(2):
        down, across, gamma = windows(module, states[n], 5, 7)
        patch = torch.tensor(dense(module.patch, states[n].tolist()), dtype=torch.float64).reshape(2, 3, 3)
        for i, j, a, b in itertools.product(range(3), range(3), range(5), range(7)):
            expected[n, :, a, b] += down[i][a] * patch[:, i, j] * across[j][b] / gamma
    torch.testing.assert_close(module(canvas, states), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("glimpse", [1, 4, 5])
def test_filters_lie_around_the_center_of_the_window(glimpse: int) -> None:
    module = DrawRead(4, patch_size=glimpse).double()
    window(module, -0.25, 0.5, -1.0, -2.0, 0.0)  # at row 9, column 4.5 of 11 x 11, counted from 1
    weights = module(torch.zeros(1, 1, 11, 11, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64), need_weights=True)[1]
    middle = weights.detach()[0, 0].mean(0).reshape(11, 11)
    place = torch.arange(1, 12, dtype=torch.float64)
    assert float(middle.sum(1) @ place) == pytest.approx(9, abs=1e-3)
    assert float(middle.sum(0) @ place) == pytest.approx(4.5, abs=1e-3)


def test_a_point_at_the_center_is_read_into_the_middle_of_the_patch() -> None:
    module = DrawRead(4, patch_size=5).double()
    window(module, 0.0, 0.5, -1.0, math.log(0.4), 0.0)
    image = torch.zeros(1, 1, 11, 11, dtype=torch.float64)
    image[0, 0, 8, 5] = 1  # row 9, column 6
    assert int(module(image, torch.zeros(1, 4, dtype=torch.float64)).argmax()) == 12


@pytest.mark.parametrize("far", [40.0, -1e6], ids=str)
def test_windows_off_the_image_read_and_write_zeros(far: float) -> None:
    reader, writer = DrawRead(4).double(), DrawWrite(1, 4).double()
    image, state = torch.ones(1, 1, 9, 9, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    for module in (reader, writer):
        window(module, far, 0.0, 0.0, -3.0, 0.0)
    assert bool((reader(image, state) == 0).all())
    assert bool((writer(image, state) == image).all())
    (slope,) = torch.autograd.grad(reader(image, state).sum(), state)
    assert bool(slope.isfinite().all())
