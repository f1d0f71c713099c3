"""One step at work: what its rule learns of its arguments, and what becomes of places behind a mixture."""

from __future__ import annotations

import pytest
import torch

from tests.capturing.steps import at_work, grid, learned, members, placed, two_images
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.work import Unproven, over_members, through
from visattn.core.capturing.tokens.planes import PADDING


def test_an_argument_that_is_none_counts_as_missing_but_zero_does_not() -> None:
    work = at_work(two_images(), "sum", (3,), dim=None, start=0, flag=False)
    assert work.get("dim", 7) == 7
    assert work.get("start", 7) == 0
    assert work.get("flag", True) is False
    assert work.get("missing") is None


def test_the_tensors_that_are_read_leave_out_what_is_written() -> None:
    work = at_work(
        two_images(), "x", (2,), out=learned(2), grad_input=learned(3), out0=learned(4), dim=1, tensors=[learned(5), learned(6)]
    )
    assert [tuple(work.facts(node).shape) for node in work.nodes()] == [(5,), (6,)]
    assert work.main().shape == (5,)


def test_members_of_sets_count_only_where_sets_are_followed() -> None:
    planes = two_images()
    words, constant = Places("learned", members(planes, "word", 5)), learned(5)
    work = at_work(planes, "add", (5,))
    assert not work.counts(words)
    work.sets = True
    assert work.counts(words)
    assert not work.counts(constant)
    assert work.counts(placed(grid(planes, 3, 5)))


def test_the_first_code_of_all_has_a_place_and_padding_has_none() -> None:
    assert placed(torch.tensor([0, -1])).located
    assert not Places("learned", torch.tensor([-1, -2])).located


def test_an_argument_varies_along_its_own_axes_that_are_neither_broadcast_nor_expanded() -> None:
    planes = two_images()
    work = at_work(planes, "add", (2, 3, 5), other=learned(3, 1))
    (node,) = work.nodes()
    assert [work.varies(node, dim, 3) for dim in range(3)] == [False, True, False]
    assert [work.varies(node, dim, 2) for dim in range(2)] == [True, False]
    facts = work.facts(node)._replace(shape=torch.Size([3, 5]), stride=(0, 1))
    work.shadows.facts = [facts]
    assert [work.varies(node, dim, 3) for dim in range(3)] == [False, False, True]
    work.shadows.note_even(node, frozenset({1}))
    assert [work.varies(node, dim, 3) for dim in range(3)] == [False, False, False]
    work.shadows.overwritten.add(facts.memory)
    assert [work.varies(node, dim, 3) for dim in range(3)] == [False, False, True]
    work.shadows.facts = [facts._replace(stride=())]  # without strides of its own, as a sparse tensor
    assert [work.varies(node, dim, 3) for dim in range(3)] == [False, True, True]


def test_a_mixture_of_channels_keeps_each_token_where_it_is() -> None:
    planes = two_images()
    codes = grid(planes, 3, 5).flatten(1)[..., None].expand(2, 15, 4)
    assert through(planes, codes, 2, 4) is codes
    widened = through(planes, codes, 2, 7)
    assert widened.shape == (2, 15, 7)
    assert torch.equal(widened, codes[..., :1].expand(2, 15, 7))
    assert torch.equal(through(planes, codes[..., :1], 2, 7), widened)


def test_a_mixture_of_all_tokens_lies_in_the_whole_image() -> None:
    planes = two_images()
    codes = grid(planes, 3, 5).flatten(1)[..., None].expand(2, 15, 4)
    mixed = through(planes, codes, 1, 7)
    assert torch.equal(mixed, grid(planes, 1, 1)[..., :1].expand(2, 7, 4))


def test_a_mixture_with_padding_lies_in_the_cells_and_one_with_constants_nowhere() -> None:
    planes = two_images()
    codes = torch.cat([grid(planes, 3, 5).flatten(1), torch.full((2, 1), PADDING)], 1)
    assert torch.equal(through(planes, codes, 1, 1), grid(planes, 1, 1)[:, 0])
    for code in (-2, -4):
        with pytest.raises(Unproven, match="a mixture of tokens with others"):
            through(planes, torch.cat([codes, torch.full((2, 1), code)], 1), 1, 1)


def test_a_mixture_of_a_part_that_is_no_rectangle_is_unproven() -> None:
    planes = two_images()
    with pytest.raises(Unproven, match=r"^$"):
        through(planes, grid(planes, 3, 5).flatten(1)[:, [0, 1, 5]], 1, 1)


def test_scores_are_summed_over_members_unless_both_lie_in_one_plane_or_the_sum_is_over_the_image() -> None:
    planes = two_images()
    image, words, others = grid(planes, 3, 5), members(planes, "word", 7), members(planes, "token", 7)
    work = at_work(planes, "sum", (5,))
    assert over_members(work, image, words)
    assert over_members(work, words, others)
    assert not over_members(work, words, image)
    assert not over_members(work, words, words)
    work.sets = True
    assert not over_members(work, image, words)
