"""One step at work: what its rule learns of its arguments, and what becomes of places behind a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.placing.work import Unproven, Work, over_members, through
from visattn.core.capturing.tokens.planes import PADDING, Planes
from visattn.core.geometry import Box

CPU = torch.device("cpu")


def two_images(frames: int = 0) -> Planes:
    """Return the planes of a batch of two images, or clips, of 24 x 40 pixels."""
    planes = Planes(2, (24, 40), CPU, frames)
    planes.grid(24, 40, planes.input, max(frames, 1))  # pixels come first
    return planes


def grid(planes: Planes, rows: int, columns: int, box: Box | None = None, frames: int = 1) -> Tensor:
    """Return the position codes of a grid, `(images, rows, columns)`; with an axis of frames for clips."""
    return planes.codes(planes.grid(rows, columns, box or planes.input, frames))


def placed(codes: Tensor, **fields: Any) -> Places:
    return Places("placed", codes, **fields)


def noted(places: Places, **fields: Any) -> Places:
    """Return places with other notes, given by name."""
    return places._replace(**fields)


def learned(*shape: int, name: str = "") -> Places:
    return whole("learned", shape, CPU, name)


def members(planes: Planes, name: str, count: int) -> Tensor:
    """Return the position codes of a set, `(count,)`, before its members meet an image."""
    return planes.members(planes.set_of(name, count))


def at_work(planes: Planes, name: str, shape: Sequence[int], /, *more_shapes: Sequence[int], **given: Any) -> Work:
    """Return the step of an operation whose results have these shapes; arguments that are places stand for tensors there."""
    origins: list[Places] = []
    facts: list[Facts] = []

    def noted(value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(item, Places) for item in value):
            return [noted(item) for item in value]
        if not isinstance(value, Places):
            return value
        origins.append(value)
        facts.append(Facts(value.shape, torch.empty(value.shape, device="meta").stride(), 0, len(facts), True, True))
        return Node(len(facts) - 1)

    arguments = {key: noted(value) for key, value in given.items()}
    outs = [Facts(torch.Size(size), (), 0, -1, True, True) for size in (shape, *more_shapes)]
    return Work(Step(None, arguments), name, Shadows(planes, facts, origins.__getitem__), outs)


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
