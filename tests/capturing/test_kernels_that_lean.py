"""Mass of the kernels of convolutions: where new cells lie, and up to which distance a kernel counts as centered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.placing.kernels import UNKNOWN, Kernel, Kind, kernel_of, kind_of

KINDS: dict[str, tuple[tuple[int, ...], dict[str, Any], Kind]] = {
    "by default, stride 1, no padding, no gaps": ((3,), {}, Kind((1,), (1,), (1.0,))),
    "a kernel of size 1 that is padded": ((1,), {"padding": 2}, Kind((1,), (1,), (0.0,))),
    "half a cell before its own center": ((4,), {"padding": 1}, Kind((1,), (1,), (1.0,))),
    "half a cell behind its own center": ((4,), {"padding": 2}, Kind((1,), (1,), (2.0,))),
    "a whole cell before its own center": ((5,), {"padding": 1}, Kind((1,), (1,), (2.0,))),
    "new cells of two": ((3,), {"padding": 1, "stride": 2}, Kind((1,), (2,), (1.5,))),
    "new cells of two, one cell beside": ((4,), {"stride": 2}, Kind((1,), (2,), (0.5,))),
    "new cells of two, more than one cell beside": ((5,), {"stride": 2}, Kind((1,), (2,), (2.0,))),
    "new cells of three": ((3,), {"padding": 1, "stride": 3}, Kind((1,), (3,), (2.0,))),
    "windows that touch in one line": ((5,), {"stride": 4}, Kind((1,), (4,), (1.5,))),
    "gaps": ((3,), {"dilation": 3, "padding": 3}, Kind((3,), (1,), (3.0,))),
    "transposed, new cells are of size one": ((4,), {"stride": 2, "transposed": True}, Kind((1,), (1,), (1.5,))),
    "transposed, half a cell beside": ((3,), {"stride": 2, "padding": 1, "transposed": True}, Kind((1,), (1,), (1.5,))),
    "each axis for itself": (
        (3, 4, 5),
        {"stride": [1, 2, 3], "padding": [1, 0, 2], "dilation": [1, 1, 2]},
        Kind((1, 1, 2), (1, 2, 3), (1.0, 0.5, 3.0)),
    ),
    "one number in a list for all axes": ((3, 5), {"stride": [2], "padding": [1]}, Kind((1, 1), (2, 2), (1.5, 1.5))),
    "patches along one of two axes": ((4, 3), {"stride": [4, 2]}, Kind((1, 1), (4, 2), (1.5, 0.5))),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_first_tap_lies_as_far_from_the_new_cell_as_stride_and_padding_say(name: str) -> None:
    taps, given, kind = KINDS[name]
    assert kind_of(taps, given) == kind


@pytest.mark.parametrize(
    ("taps", "given"),
    [
        ((4, 3), {"stride": [4, 3]}),
        ((1, 1), {}),
        ((2, 2), {"stride": [3, 5]}),
        ((2,), {"stride": 4, "dilation": 3}),
    ],
)
def test_values_of_a_kernel_do_not_matter_if_each_window_lies_in_its_own_cell(
    taps: tuple[int, ...], given: dict[str, Any]
) -> None:
    assert kind_of(taps, given) is None


def test_padding_of_patches_makes_the_values_of_the_kernel_matter() -> None:
    assert kind_of((4, 3), {"stride": [4, 3], "padding": [0, 1]}) == Kind((1, 1), (4, 3), (1.5, 2.0))
    assert kind_of((2,), {"stride": 3, "dilation": 3}) == Kind((3,), (3,), (1.0,))


def line(*values: float) -> Tensor:
    """Return a kernel of one channel with these taps in one line."""
    return torch.tensor(values)[None, None]


@pytest.mark.parametrize(
    ("values", "kind", "centered"),
    [
        ((0, 0.50, 0.50), Kind((1,), (1,), (1.0,)), True),
        ((0.50, 0.50, 0), Kind((1,), (1,), (1.0,)), True),
        ((0, 0.48, 0.52), Kind((1,), (1,), (1.0,)), False),
        ((0.52, 0.48, 0), Kind((1,), (1,), (1.0,)), False),
        ((1, 0, 1), Kind((1,), (1,), (1.0,)), False),  # nothing of the cell itself is read
        ((1, 1e-3, 1), Kind((1,), (1,), (1.0,)), True),
        ((0, 0.42, 0.58, 0), Kind((1,), (1,), (1.0,)), True),  # its own center is half a cell away
        ((0, 0.38, 0.62, 0), Kind((1,), (1,), (1.0,)), False),
        ((0.0, 0.45, 0.55), Kind((2,), (1,), (2.0,)), False),  # distances count in gaps
        ((0.0, 0.50, 0.50), Kind((2,), (1,), (2.0,)), True),
        ((1, 1), Kind((2,), (1,), (1.0,)), False),  # a gap lies on the cell
        ((1, 1), Kind((2,), (2,), (1.0,)), True),  # both taps lie in a cell of two
        ((1, 1), Kind((3,), (2,), (1.5,)), False),
        ((1, 1), Kind((3,), (3,), (1.5,)), True),
        ((0, 0, 0, 1, 0), Kind((1,), (2,), (2.0,)), True),  # one of two lines of the cell
        ((0, 0, 0, 0, 1), Kind((1,), (2,), (2.0,)), False),
        ((1, 0, 0, 0, 0, 1), Kind((1,), (4,), (2.5,)), False),
        ((1, 0, 0, 0, 1), Kind((1,), (4,), (2.0,)), True),
    ],
)
def test_a_kernel_is_centered_up_to_half_a_cell(values: tuple[float, ...], kind: Kind, centered: bool) -> None:
    assert kernel_of(line(*values), kind).centered == centered


def test_all_channels_count_and_none_by_its_sign() -> None:
    kind = Kind((1,), (1,), (1.0,))
    weight = torch.zeros(2, 3, 3)
    weight[0, 1, 2], weight[1, 2, 2] = 3, -4  # together 5
    weight[1, 0, 1] = -4.9
    assert kernel_of(weight, kind) == Kernel(centered=True)
    weight[1, 0, 1] = -4.7
    assert kernel_of(weight, kind) == Kernel(centered=False)


def test_each_axis_has_its_own_center() -> None:
    kind = Kind((1, 1), (1, 1), (1.0, 2.0))
    weight = torch.zeros(1, 1, 3, 5)
    weight[0, 0, 1, 2] = 1
    assert kernel_of(weight, kind) == Kernel(centered=True, tap=(1, 2))
    weight[0, 0, 1, 3] = 2
    assert kernel_of(weight, kind) == Kernel(centered=False)
    weight[0, 0, 1, 1] = 2
    assert kernel_of(weight, kind) == Kernel(centered=True)
    weight[0, 0, 2, 2] = 8
    assert kernel_of(weight, kind) == Kernel(centered=False)


def test_the_cell_must_be_read_along_all_axes_at_once() -> None:
    weight = torch.zeros(1, 1, 3, 5)
    weight[0, 0, 1, 0] = weight[0, 0, 1, 4] = weight[0, 0, 0, 2] = weight[0, 0, 2, 2] = 1
    assert kernel_of(weight, Kind((1, 1), (1, 1), (1.0, 2.0))) == Kernel(centered=False)


def test_the_only_tap_is_found_where_it_lies() -> None:
    weight = torch.zeros(2, 3, 3, 5)
    weight[1, 2, 2, 3] = -7
    assert kernel_of(weight, Kind((1, 1), (1, 1), (1.0, 2.0))) == Kernel(centered=False, tap=(2, 3))


def test_a_kernel_of_zeros_moves_nothing_and_one_without_numbers_is_unknown() -> None:
    kind = Kind((1,), (1,), (1.0,))
    assert kernel_of(torch.zeros(2, 3, 3), kind) == Kernel(centered=True, tap=None)
    for value in (torch.nan, torch.inf):
        weight = torch.zeros(2, 3, 3)
        weight[0, 0, 1] = value
        assert kernel_of(weight, kind) == UNKNOWN == Kernel(centered=False, tap=None)
