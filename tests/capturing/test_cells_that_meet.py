"""Cells of two tensors that meet elementwise: pairs, cells inside of cells, and the evener of two grids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, grid, learned, members, placed, two_images
from visattn.core.capturing.placing.cells import (
    cells_vary,
    check_parameters,
    evener,
    holds_all,
    is_from_before,
    most_cells,
    pairs,
    repeats_some,
    within,
)
from visattn.core.capturing.placing.places import UNWATCHED, whole
from visattn.core.capturing.placing.work import Unproven
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.geometry import Box


def test_the_finest_grid_counts_and_sets_count_as_one_cell() -> None:
    planes = two_images()
    fine, coarse, words = grid(planes, 3, 5), grid(planes, 2, 2), members(planes, "word", 7)
    assert most_cells(planes, fine) == 15
    assert most_cells(planes, words) == 1
    assert most_cells(planes, torch.cat([coarse.flatten(), fine.flatten(), words])) == 15
    assert most_cells(planes, torch.tensor([-1, -4])) == 0


def test_pairs_are_distinct_and_leave_out_elements_without_a_code() -> None:
    a = torch.tensor([[3], [0], [-1]])
    b = torch.tensor([[2, 9, 2, -2, 0]])
    assert pairs(a, b).tolist() == [[0, 0], [0, 2], [0, 9], [3, 0], [3, 2], [3, 9]]
    assert pairs(torch.tensor([5, 5, 0]), torch.tensor([0, 0, 5])).tolist() == [[0, 5], [5, 0]]
    assert pairs(torch.tensor([-1, 4]), torch.tensor([4, -1])).shape == (0, 2)


def test_some_cells_are_repeated_if_others_occur_less_often() -> None:
    assert not repeats_some(torch.tensor([0, 0, 1, 1, 2, 2]))
    assert repeats_some(torch.tensor([0, 0, 1]))
    assert repeats_some(torch.tensor([0, 1, 1]))
    assert not repeats_some(torch.tensor([-1, -1, -1, 4]))
    assert not repeats_some(torch.tensor([-1, -2]))
    assert not repeats_some(torch.tensor([[3], [4]]).expand(2, 5))


def test_cells_vary_along_an_axis_within_an_image_but_not_from_image_to_image() -> None:
    planes = two_images()
    grid(planes, 2, 2)  # the plane that is asked for is not the first
    codes = grid(planes, 3, 5)
    assert [cells_vary(planes, codes, dim) for dim in range(3)] == [False, True, True]
    assert not cells_vary(planes, codes[:1], 0)
    swapped = torch.stack([codes[0], codes[1].flip(1)])
    assert cells_vary(planes, swapped, 0)
    first_and_last = torch.stack([codes[0, 0, 0], codes[1, 2, 4]])
    assert cells_vary(planes, first_and_last, 0)
    assert cells_vary(planes, torch.stack([codes[0], grid(planes, 3, 5, Box(0, 0, 12, 40))[1]]), 0)


def test_members_that_met_no_image_are_told_from_the_cells_before_them() -> None:
    planes = two_images()
    cells, words = grid(planes, 3, 5), members(planes, "word", 7)
    assert cells_vary(planes, torch.stack([cells[0, 0, 0], words[0]]), 0)
    assert cells_vary(planes, torch.stack([cells[1, 2, 4], words[0], cells[1, 2, 4]])[:2], 0)


def test_cells_of_a_single_image_vary_wherever_codes_do() -> None:
    planes = Planes(1, (24, 40), CPU)
    codes = grid(planes, 3, 5)
    assert [cells_vary(planes, codes, dim) for dim in range(3)] == [False, True, True]
    assert cells_vary(planes, torch.tensor([0, -1]), 0)


def test_members_of_a_set_vary_within_it_and_not_from_image_to_image() -> None:
    planes = two_images()
    words = planes.codes(planes.set_of("word", 7))
    assert [cells_vary(planes, words, dim) for dim in range(2)] == [False, True]


def coarse(planes: Planes, *boxes: Box) -> Tensor:
    """Return codes of one cell for each box, `(images, boxes)`."""
    return torch.cat([grid(planes, 1, 1, box)[:, 0] for box in boxes], 1)


def test_a_cell_lies_in_another_if_its_center_is_at_most_half_a_cell_outside() -> None:
    planes = two_images()
    fine = grid(planes, 6, 10)[:, 2:3, 4]  # rows 8 to 12, columns 16 to 20: the center is (10, 18)
    inside = [
        Box(8, 16, 12, 20),
        Box(10, 18, 12, 20),
        Box(12, 16, 24, 20),
        Box(0, 16, 8, 20),
        Box(8, 20, 12, 40),
        Box(8, 0, 12, 16),
    ]
    outside = [Box(12.1, 16, 24, 20), Box(0, 16, 7.9, 20), Box(8, 20.1, 12, 40), Box(8, 0, 12, 15.9)]
    assert [within(planes, fine, coarse(planes, box)) for box in inside] == [True] * 6
    assert [within(planes, fine, coarse(planes, box)) for box in outside] == [False] * 4


def test_a_center_exactly_at_the_tolerance_counts_as_inside() -> None:
    planes = two_images()
    fine = grid(planes, 6, 10)[:, 2:3, 4]
    assert within(planes, fine, coarse(planes, Box(10 + 2.000001, 16, 24, 20)))
    assert within(planes, fine, coarse(planes, Box(0, 16, 10 - 2.000001, 20)))


def test_all_cells_must_lie_in_those_that_they_meet_and_in_the_same_image() -> None:
    planes = two_images()
    fine, upper, image = grid(planes, 4, 2), coarse(planes, Box(0, 0, 12, 40)), coarse(planes, Box(0, 0, 24, 40))
    assert within(planes, fine[:, :2], upper[:, None])
    assert within(planes, fine[:, :3], upper[:, None])  # the third row begins where the cell ends
    assert not within(planes, fine, upper[:, None])
    assert within(planes, fine, image[:, None])
    assert not within(planes, fine, image[:, None].flip(0))


def test_tokens_that_lie_nowhere_and_constants_may_meet_any_cell() -> None:
    planes = two_images()
    fine, words = grid(planes, 3, 5), members(planes, "word", 5)
    assert within(planes, fine, words.expand(2, 3, 5))
    assert within(planes, words.expand(2, 3, 5), fine)
    assert within(planes, fine, torch.tensor(-2).expand(2, 3, 5))
    far = coarse(planes, Box(20, 36, 24, 40))
    assert not within(planes, torch.cat([words, fine[0, 0]]), far[:1, :1].expand(1, 10)[0])


def test_cells_of_clips_must_also_agree_in_time() -> None:
    planes = two_images(frames=4)
    every_frame = grid(planes, 1, 1, frames=4)[:, :, 0, 0]
    halves = grid(planes, 1, 1, frames=2)[:, :, 0, 0]
    assert within(planes, every_frame, halves.repeat_interleave(2, 1))
    assert not within(planes, every_frame, halves.repeat(1, 2))
    assert not within(planes, every_frame[:, 1:2], halves[:, 1:])
    assert not within(planes, every_frame[:, 2:3], halves[:, :1])
    assert within(planes, grid(planes, 1, 1, frames=1)[:, 0, 0], halves[:, :1])
    assert within(planes, grid(planes, 1, 1, frames=1)[:, 0, 0], halves[:, 1:])


def test_a_parameter_holds_all_tokens_if_each_of_its_cells_does() -> None:
    planes = two_images()
    tokens, left, image = grid(planes, 3, 4), coarse(planes, Box(0, 0, 24, 20)), coarse(planes, Box(0, 0, 24, 40))
    single = Planes(1, (24, 40), CPU)
    of_one, image_of_one = grid(single, 3, 4), grid(single, 1, 1)
    assert holds_all(single, placed(image_of_one), placed(of_one))
    assert holds_all(planes, placed(image[:1]), placed(tokens[:1]))
    assert not holds_all(planes, placed(image), placed(tokens))  # each image has a parameter of its own
    assert not holds_all(planes, placed(left[:1]), placed(tokens[:1]))
    assert not holds_all(planes, placed(torch.cat([image[:1], left[:1]])), placed(tokens[:1]))


def test_parameters_may_be_learned_missing_or_from_before_the_forward_pass() -> None:
    planes = two_images()
    tokens = placed(grid(planes, 3, 5))
    given = {"weight": learned(5), "bias": None, "running_mean": whole("lost", (5,), CPU, UNWATCHED)}
    work = at_work(planes, "native_batch_norm", (2, 3, 5), **given)
    check_parameters(work, tokens, ("weight", "bias", "running_mean", "running_var"))
    work.shadows.told = True
    with pytest.raises(Unproven, match=f"^{UNWATCHED}$"):
        check_parameters(work, tokens, ("weight", "running_mean"))
    check_parameters(work, tokens, ("bias", "weight"))


def test_a_parameter_that_leans_is_unknown_or_lies_in_another_cell_is_refused() -> None:
    planes = two_images()
    tokens, image = placed(grid(planes, 3, 5)[:1]), grid(planes, 1, 1)[:1]
    work = at_work(
        planes,
        "native_layer_norm",
        (1, 3, 5),
        leaning=placed(image, leaning=True, name="gate"),
        lost=whole("lost", (5,), CPU, "roll"),
        unnamed=whole("lost", (5,), CPU),
        apart=placed(grid(planes, 3, 5)[:1, :1], name="row"),
        image=placed(image),
    )
    check_parameters(work, tokens, ["image"])
    for name, reason in (("leaning", "gate"), ("lost", "roll"), ("unnamed", "native_layer_norm"), ("apart", "native_layer_norm")):
        for names in ([name], ["image", name], ["missing", name]):
            with pytest.raises(Unproven, match=f"^{reason}$"):
                check_parameters(work, tokens, names)


def test_only_a_tensor_that_no_call_made_is_from_before_and_only_until_numbers_left() -> None:
    work = at_work(two_images(), "mm", (2,))
    assert is_from_before(work, whole("lost", (2,), CPU, UNWATCHED))
    assert not is_from_before(work, whole("lost", (2,), CPU, "mm"))
    work.shadows.told = True
    assert not is_from_before(work, whole("lost", (2,), CPU, UNWATCHED))


@pytest.mark.parametrize("shift", [4.0, -4.0])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_grid_that_ends_with_the_image_is_chosen_of_two_that_lie_half_a_cell_apart(shift: float, axis: int) -> None:
    planes = two_images()
    moved = Box(shift, 0, 24 + shift, 40) if axis == 0 else Box(0, shift, 24, 40 + shift)
    even, uneven = placed(grid(planes, 3, 5)), placed(grid(planes, 3, 5, moved))
    if shift > 0:
        assert evener(planes, even, uneven) is even
        assert evener(planes, uneven, even) is even
    else:  # both end in the image, so the first is taken
        assert evener(planes, even, uneven) is even
        assert evener(planes, uneven, even) is uneven
    further = Box(*(side * 4.1 / 4 if side in (shift,) else side for side in moved))
    assert evener(planes, even, placed(grid(planes, 3, 5, further))) is None


def test_a_grid_counts_as_ending_with_the_image_up_to_rounding() -> None:
    planes = two_images()
    longer, within_image = Box(0, 0, 24.01, 40), Box(0, 0, 23, 40)
    a, b = placed(grid(planes, 3, 5, longer)), placed(grid(planes, 3, 5, within_image))
    assert evener(planes, a, b) is b
    assert evener(planes, b, a) is b
    wider, narrower = placed(grid(planes, 3, 8, Box(0, 0, 24, 40.5))), placed(grid(planes, 3, 8, Box(0, 0, 24, 38.3)))
    assert evener(planes, wider, narrower) is narrower  # cells of 5 pixels, of which the last lie 2.06 pixels apart
    rounded = placed(grid(planes, 3, 4, Box(0, 0, 24 + 5e-7, 40 + 5e-7)))
    other = placed(grid(planes, 3, 4, Box(0, 0, 25, 40)))
    assert evener(planes, rounded, other) is rounded


def test_grids_match_only_if_each_is_one_grid_with_as_many_rows_and_columns_in_the_same_images() -> None:
    planes = two_images()
    even, moved = grid(planes, 3, 5), grid(planes, 3, 5, Box(1, 0, 25, 40))
    words = planes.codes(planes.set_of("word", 15)).view(2, 3, 5)
    assert evener(planes, placed(even), placed(moved)) is not None
    assert evener(planes, placed(even), placed(moved.flip(0))) is None
    assert evener(planes, placed(even), placed(even.flip(2))) is None
    assert evener(planes, placed(even), placed(even)) is None
    assert evener(planes, placed(words), placed(moved)) is None
    assert evener(planes, placed(even), placed(grid(planes, 5, 3).mT)) is None
    mixed = torch.cat([moved[:, :2], grid(planes, 4, 5)[:, :1]], 1)
    assert evener(planes, placed(even), placed(mixed)) is None
    assert evener(planes, placed(mixed), placed(even)) is None
    assert evener(planes, placed(even), learned(2, 3, 5)) is None


def test_the_smaller_of_two_cells_says_how_far_centers_may_lie_apart() -> None:
    planes = two_images()
    even = placed(grid(planes, 1, 1))
    assert evener(planes, even, placed(grid(planes, 1, 1, Box(0, 0, 8, 40)))) is None  # centers at rows 12 and 4
    assert evener(planes, even, placed(grid(planes, 1, 1, Box(0, 0, 12, 40)))) is even  # at 12 and 6, half of 12
    assert evener(planes, even, placed(grid(planes, 1, 1, Box(0, 0, 24, 20)))) is even
    assert evener(planes, even, placed(grid(planes, 1, 1, Box(0, 0, 24, 19)))) is None
