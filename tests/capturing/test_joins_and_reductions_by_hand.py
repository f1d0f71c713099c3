"""Tensors that are joined, and elements that are merged, ordered or normalized along axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, grid, learned, members, noted, placed, two_images
from visattn.core.capturing.placing import moves, reductions
from visattn.core.capturing.placing.places import LOST, Places, whole
from visattn.core.capturing.placing.work import Result, Unproven
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.geometry import Box


def single(result: Result) -> Places:
    assert isinstance(result, Places)
    return result


def tokens(planes: Planes, rows: int = 3, columns: int = 4, channels: int = 5, **fields: Any) -> Places:
    return placed(grid(planes, rows, columns).flatten(1)[..., None].expand(2, rows * columns, channels), **fields)


def join(planes: Planes, *parts: Places, dim: int, name: str = "cat") -> Places:
    stand_ins = [torch.empty(part.shape, device="meta") for part in parts if part.codes.numel()]
    shape = (torch.stack(stand_ins, dim) if name == "stack" else torch.cat(stand_ins, dim)).shape
    return single(moves.joined_by(at_work(planes, name, shape, tensors=list(parts), dim=dim)))


def test_a_class_token_beside_image_tokens_is_a_member_of_a_set() -> None:
    planes = two_images()
    source = tokens(planes)
    for part, name in (
        (learned(2, 2, 5, name="cls"), "cls"),
        (learned(2, 2, 5), "token"),
        (whole("foreign", (2, 2, 5), CPU, "text"), "foreign text"),
    ):
        joined = join(planes, part, source, dim=1)
        expected = torch.cat([members(planes, name, 2)[:, None].expand(2, 2, 5), source.codes], 1)
        assert torch.equal(joined.codes, expected)
        assert joined.kind == "placed"
        assert joined.copies is None
        assert torch.equal(join(planes, source, part, dim=-2).codes[:, 12:], expected[:, :2])
    words = Places("learned", members(planes, "word", 7)[:, None].expand(2, 7, 5))
    assert torch.equal(join(planes, source, words, dim=1).codes[:, 12:], words.codes)


def test_learned_channels_beside_those_of_tokens_belong_to_these_tokens() -> None:
    planes = two_images()
    source = tokens(planes)
    assert torch.equal(join(planes, source, learned(2, 12, 2), dim=2).codes, tokens(planes, channels=7).codes)
    lost = join(planes, source, whole("foreign", (2, 12, 2), CPU, "text"), dim=2)
    assert lost.codes[..., 5:].tolist() == torch.full((2, 12, 2), LOST).tolist()
    of_one_channel = join(planes, tokens(planes, channels=1), learned(2, 12, 2, name="more"), dim=2)
    assert torch.equal(of_one_channel.codes[..., 1:], members(planes, "more", 2).expand(2, 12, 2))


def test_what_is_lost_stays_lost_and_gives_the_reason() -> None:
    planes = two_images()
    source = tokens(planes, name="image")
    lost = whole("lost", (2, 1, 5), CPU, "roll")
    joined = join(planes, lost, source, whole("lost", (2, 1, 5), CPU, "sort"), dim=1)
    assert joined.codes[:, 0].tolist() == joined.codes[:, 13].tolist() == [[LOST] * 5] * 2
    assert joined.name == "roll"
    assert join(planes, learned(2, 1, 5, name="cls"), source, dim=1).name == "image"


def test_tokens_that_are_joined_to_themselves_are_numbered_copies() -> None:
    planes = two_images()
    source = tokens(planes)
    twice = join(planes, source, source, dim=1)
    assert twice.copies is not None
    assert torch.equal(twice.copies, torch.tensor([0, 1]).repeat_interleave(12)[:, None].expand(2, 24, 5))
    behind_token = join(planes, learned(2, 1, 5), source, source, dim=1)
    assert behind_token.copies is not None
    assert torch.equal(behind_token.copies, torch.tensor([0] + [1] * 12 + [2] * 12)[:, None].expand(2, 25, 5))
    again = join(planes, twice, source, dim=1)
    assert again.copies is not None
    assert torch.equal(again.copies, torch.tensor([0] * 12 + [2] * 12 + [1] * 12)[:, None].expand(2, 36, 5))
    stacked = join(planes, source, source, dim=0, name="stack")
    assert stacked.copies is not None
    assert torch.equal(stacked.copies, torch.arange(2)[:, None, None, None].expand(2, 2, 12, 5))
    assert torch.equal(stacked.codes, source.codes.expand(2, 2, 12, 5))
    with_copies = tokens(planes, copies=torch.full((2, 12, 5), 3, dtype=torch.int32))
    kept = join(planes, learned(2, 1, 5), with_copies, dim=1)
    assert kept.copies is not None
    assert torch.equal(kept.copies, torch.tensor([0] + [3] * 12)[:, None].expand(2, 13, 5))


def test_channels_and_different_cells_are_no_copies() -> None:
    planes = two_images()
    source = tokens(planes)
    assert join(planes, source, tokens(planes, channels=3), dim=2).copies is None
    turned = source._replace(codes=source.codes.flip(1))
    for order in ((source, turned), (turned, source)):
        assert join(planes, *order, dim=2).copies is not None
    upper, lower = (placed(part) for part in (source.codes[:, :4], source.codes[:, 4:]))
    assert join(planes, upper, lower, dim=1).copies is None
    assert join(planes, placed(source.codes[:, :5]), lower, dim=1).copies is not None
    token = members(planes, "cls", 1)[:, None].expand(2, 1, 5)
    first, second = (placed(torch.cat([token, part.codes], 1)) for part in (upper, lower))
    assert join(planes, first, second, dim=1).copies is None
    met = planes.codes(planes.set_of("cls", 1))[..., None].expand(2, 1, 5)
    first, second = (placed(torch.cat([met, part.codes], 1)) for part in (upper, lower))
    assert join(planes, first, second, dim=1).copies is None
    assert join(planes, placed(source.codes[0]), placed(source.codes[1]), dim=0).copies is None
    following = grid(planes, 1, 2).flatten(1)[..., None].expand(2, 2, 5)  # their codes follow those of the set
    assert join(planes, placed(torch.cat([met, following], 1)), placed(following), dim=1).copies is not None


def test_notes_of_all_parts_hold_for_what_is_joined() -> None:
    planes = two_images()
    upper, lower = (placed(part) for part in (tokens(planes).codes[:, :4], tokens(planes).codes[:, 4:]))
    for field in ("mixture", "leaning"):
        for a, b in ((False, False), (False, True), (True, False)):
            joined = join(planes, noted(upper, **{field: a}), noted(lower, **{field: b}), dim=1)
            assert getattr(joined, field) is (a or b)
    for first, second in (((1, "a", 0), (2, "b", 0)), ((2, "b", 0), (1, "a", 0)), (None, (2, "b", 0))):
        assert join(planes, upper._replace(behind=first), lower._replace(behind=second), dim=1).behind == (2, "b", 0)


def test_empty_tensors_join_nothing_and_without_tokens_there_is_nothing_to_join() -> None:
    planes = two_images()
    source = tokens(planes)
    assert torch.equal(join(planes, learned(0), source, dim=1).codes, source.codes)
    with pytest.raises(Unproven, match=r"^cat$"):
        join(planes, learned(2, 1, 5), learned(2, 2, 5), dim=1)
    first_axis = single(moves.joined_by(at_work(planes, "cat", (5, 12, 5), tensors=[source, learned(3, 12, 5, name="cls")])))
    assert torch.equal(first_axis.codes[2:], members(planes, "cls", 3)[:, None, None].expand(3, 12, 5))


def test_scores_are_joined_to_scores_and_to_constants_only() -> None:
    planes = two_images()
    scores = tokens(planes)._replace(columns=tokens(planes).codes.flip(1))
    assert scores.columns is not None
    joined = join(planes, scores, scores._replace(codes=scores.codes.flip(1)), dim=2)
    assert joined.columns is not None
    assert torch.equal(joined.columns, torch.cat([scores.columns, scores.columns], 2))
    sink = join(planes, scores, learned(2, 12, 1, name="sink"), dim=2)
    assert sink.columns is not None
    assert sink.codes[..., 5].tolist() == sink.columns[..., 5].tolist() == [[-2] * 12] * 2
    for parts in ((scores, tokens(planes)), (tokens(planes), scores)):
        with pytest.raises(Unproven, match=r"^cat$"):
            join(planes, *parts, dim=2)


# --- reductions


def reduce(
    planes: Planes, source: Places, shape: tuple[int, ...], *more: tuple[int, ...], name: str = "mean", **given: Any
) -> list[Places]:
    result = reductions.reduced(at_work(planes, name, shape, *more, self=source, **given))
    assert isinstance(result, list)
    return result


@pytest.mark.parametrize(
    ("dim", "shape", "cells"),
    [
        (1, (2, 1, 4, 5), (1, 4)),
        (-2, (2, 3, 1, 5), (3, 1)),
        ([1, 2], (2, 1, 1, 5), (1, 1)),
        ([-1], (2, 3, 4, 1), (3, 4)),
        ([1, -1], (2, 1, 4, 1), (1, 4)),
        (1, (2, 4, 5), (1, 4)),
        ([2, 1], (2, 5), (1, 1)),
        ([3, 1], (2, 4), (1, 4)),
        ([1, 2, 3], (2,), (1, 1)),
    ],
)
def test_merged_cells_are_one_larger_cell(dim: Any, shape: tuple[int, ...], cells: tuple[int, int]) -> None:
    planes = two_images()
    codes = grid(planes, 3, 4)[..., None].expand(2, 3, 4, 5)
    (merged,) = reduce(planes, placed(codes, others=codes), shape, dim=dim)
    expected = grid(planes, *cells)[..., None]
    kept = [size if axis < 3 else 5 for axis, size in enumerate(shape)] if len(shape) == 4 else None
    if kept is not None:
        assert torch.equal(merged.codes, expected.expand(shape))
    else:
        assert torch.equal(merged.codes.flatten(), expected.expand(2, *cells, 5 if shape[-1] == 5 else 1).flatten())
        assert merged.shape == shape
    assert merged.others is None
    keeps_axes, merges = len(shape) == 4, cells != (3, 4)
    assert (merged.parts is codes) == (keeps_axes and merges)


def test_a_reduction_of_all_axes_has_one_result_or_is_unproven() -> None:
    planes = Planes(1, (24, 40), CPU)
    codes = grid(planes, 3, 4)[0]
    all_axes: list[dict[str, Any]] = [{}, {"dim": []}]
    for given in all_axes:
        (merged,) = reduce(planes, placed(codes), (), **given)
        assert torch.equal(merged.codes, grid(planes, 1, 1)[0, 0, 0])
    (scalar,) = reduce(planes, placed(codes[1, 2]), ())
    assert torch.equal(scalar.codes, codes[1, 2])
    (scalar,) = reduce(planes, placed(codes[1, 2]), (), dim=0)
    assert torch.equal(scalar.codes, codes[1, 2])
    with pytest.raises(Unproven, match=r"^mean$"):
        reduce(planes, placed(codes), (3,))


def test_results_of_another_shape_are_unknown() -> None:
    planes = two_images()
    made = reduce(planes, tokens(planes), (2, 5), (2, 5), (2, 1, 5), name="var_mean", dim=1)
    assert [places.kind for places in made] == ["placed", "placed", "lost"]


def test_merged_cells_lean_if_they_were_weighted_or_some_occur_more_often() -> None:
    planes = two_images()
    source = tokens(planes)
    repeated = placed(torch.cat([source.codes, source.codes[:, :1]], 1))
    for places, leans in (
        (source, False),
        (source._replace(weighted=True), True),
        (repeated, True),
        (source._replace(leaning=True), False),
    ):
        assert reduce(planes, places, (2, 5), dim=1)[0].leaning is leans
    for places in (source, source._replace(weighted=True), repeated):
        assert reduce(planes, places, places.shape[:2], dim=2)[0].leaning is False
    assert reduce(planes, source._replace(leaning=True), (2, 12), dim=2)[0].leaning


def test_copies_stay_behind_a_merge_if_each_is_merged_for_itself() -> None:
    planes = two_images()
    codes = grid(planes, 3, 4)[0].flatten()[None, :, None].expand(3, 12, 5)
    by_batch = torch.arange(3, dtype=torch.int32)[:, None, None].expand(3, 12, 5)
    for shape in ((3, 1, 5), (3, 5)):
        (merged,) = reduce(planes, placed(codes, copies=by_batch), shape, dim=1)
        assert merged.copies is not None
        assert torch.equal(merged.copies, by_batch[:, :1].reshape(shape) if len(shape) == 3 else by_batch[:, 0])
        assert merged.mixture
    (same,) = reduce(planes, placed(codes, copies=torch.zeros_like(by_batch)), (3, 1, 5), dim=1)
    assert not same.mixture
    (channels,) = reduce(planes, placed(codes, copies=by_batch), (3, 12), dim=2)
    assert not channels.mixture
    by_token = torch.arange(12, dtype=torch.int32)[:, None].expand(3, 12, 5)
    (merged,) = reduce(planes, placed(codes, copies=by_token), (3, 1, 5), dim=1)
    assert merged.copies is None
    assert not merged.mixture
    assert reduce(planes, tokens(planes, mixture=True), (2, 5), dim=1)[0].mixture


def test_scores_that_are_summed_lie_at_the_axis_that_is_kept() -> None:
    planes = two_images()
    rows, columns = grid(planes, 3, 4).flatten(1)[:, None, :, None], grid(planes, 2, 5).flatten(1)[:, None, None]
    scores = placed(rows.expand(2, 3, 12, 10), columns=columns.expand(2, 3, 12, 10), copies=torch.zeros(2, 3, 12, 10))
    for shape in ((2, 3, 12, 1), (2, 3, 12)):
        (queries,) = reduce(planes, scores, shape, dim=-1)
        assert torch.equal(queries.codes, rows.expand(2, 3, 12, 1).reshape(shape))
        assert (queries.columns, queries.copies) == (None, None)
    (keys,) = reduce(planes, scores, (2, 3, 10), dim=[2])
    assert torch.equal(keys.codes, columns[:, :, 0].expand(2, 3, 10))
    assert keys.columns is None
    (heads,) = reduce(planes, scores, (2, 12, 10), dim=1)
    assert torch.equal(heads.codes, rows[:, 0].expand(2, 12, 10))
    assert heads.columns is not None
    assert torch.equal(heads.columns, columns[:, 0].expand(2, 12, 10))
    (both,) = reduce(planes, scores, (2, 12), dim=[1, 3])
    assert torch.equal(both.codes, rows[:, 0, :, 0])
    with pytest.raises(Unproven, match=r"^mean$"):
        reduce(planes, scores, (2, 3), dim=[2, 3])
    words = scores._replace(columns=members(planes, "word", 10).expand(2, 3, 12, 10))
    with pytest.raises(Unproven, match=r"^mean$"):
        reduce(planes, words, (2, 3, 12), dim=3)
    assert reduce(planes, words, (2, 3, 10), dim=2)[0].columns is None


# --- orders and normalizations


def order(planes: Planes, name: str, source: Places, *shapes: tuple[int, ...], **given: Any) -> list[Places]:
    result = reductions.reordered(at_work(planes, name, *shapes, self=source, **given))
    assert isinstance(result, list)
    return result


def test_channels_of_one_token_may_be_ordered_and_tokens_may_not() -> None:
    planes = two_images()
    source, first_axis = (
        tokens(planes, others=tokens(planes).codes),
        placed(grid(planes, 3, 4).flatten(1)[:, None].expand(2, 7, 12)),
    )
    for name, given in (("sort", {}), ("argsort", {}), ("argmax", {"dim": -1}), ("cumsum", {"dim": 2})):
        for places in order(planes, name, source, (2, 12, 5), (2, 12, 5), **given):
            assert torch.equal(places.codes, source.codes)
            assert places.others is None
    (fewer,) = order(planes, "topk", source, (2, 12, 3), dim=-1, k=3)
    assert torch.equal(fewer.codes, source.codes[..., :3])
    (best,) = order(planes, "argmax", source, (2, 12), dim=2)
    assert torch.equal(best.codes, source.codes[..., 0])
    (columns,) = order(planes, "argmin", first_axis, (2, 12), dim=1)
    assert torch.equal(columns.codes, first_axis.codes[:, 0])
    msorted = placed(grid(planes, 3, 4)[0].expand(7, 3, 4))
    assert torch.equal(order(planes, "msort", msorted, (7, 3, 4))[0].codes, msorted.codes)
    refused: list[tuple[str, Places, dict[str, Any]]] = [
        ("argmax", source, {}),
        ("argmin", source, {}),
        ("msort", source, {}),
        ("sort", first_axis, {}),
        ("argsort", first_axis, {}),
        ("sort", source, {"dim": 1}),
        ("sort", source._replace(columns=source.codes), {}),
    ]
    for name, places, given in refused:
        with pytest.raises(Unproven, match=f"^{name}$"):
            order(planes, name, places, tuple(places.shape), **given)


def test_copies_stay_behind_an_order_within_one_copy() -> None:
    planes = two_images()
    copies = torch.arange(2)[:, None, None].expand(2, 12, 5)
    (kept,) = order(planes, "sort", tokens(planes, copies=copies), (2, 12, 5))
    assert kept.copies is not None
    assert torch.equal(kept.copies, copies)
    (lost,) = order(planes, "sort", tokens(planes, copies=torch.arange(5).expand(2, 12, 5)), (2, 12, 5))
    assert lost.copies is None


def normalize(planes: Planes, name: str, source: Places, *more: tuple[int, ...], **given: Any) -> list[Places]:
    result = reductions.normalized(at_work(planes, name, tuple(source.shape), *more, input=source, **given))
    assert isinstance(result, list)
    return result


def test_normalized_elements_stay_and_their_statistics_are_lost() -> None:
    planes = two_images()
    source = tokens(planes, summed=True)
    made = normalize(planes, "native_layer_norm", source, (2, 12, 1), (2, 12, 5), normalized_shape=[5], weight=learned(5))
    assert [places.kind for places in made] == ["placed", "lost", "lost"]
    assert made[0].codes is source.codes
    assert (made[0].summed, made[0].weighted) == (False, False)
    for name in ("weight", "bias", "running_mean", "running_var"):
        with pytest.raises(Unproven, match=r"^roll$"):
            normalize(planes, "native_batch_norm", source, **{name: whole("lost", (5,), CPU, "roll")})


def test_a_normalization_weights_cells_if_its_axes_hold_cells() -> None:
    planes = two_images()
    source, maps = tokens(planes), placed(grid(planes, 3, 4)[:, None].expand(2, 5, 3, 4))
    cases: list[tuple[Places, dict[str, Any], bool]] = [
        (source, {"normalized_shape": [5], "weight": learned(5)}, False),
        (source, {"normalized_shape": [12, 5], "weight": learned(12, 5)}, True),
        (source, {"normalized_shape": [12, 5]}, False),
        (maps, {"weight": learned(5)}, False),
        (maps, {"normalized_shape": [4], "weight": learned(4)}, True),
        (source, {"weight": learned(12)}, True),
        (source, {"running_var": learned(12)}, True),
        (source, {"running_mean": learned(12)}, False),
        (source._replace(weighted=True), {}, True),
    ]
    for places, given, weighted in cases:
        assert normalize(planes, "native_layer_norm", places, **given)[0].weighted is weighted


def test_a_box_of_cells_that_is_merged_keeps_its_image() -> None:
    planes = two_images()
    codes: Tensor = grid(planes, 3, 4, Box(4, 5, 16, 25)).flatten(1)[[1, 0]]
    (merged,) = reduce(planes, placed(codes), (2,), dim=1)
    assert torch.equal(merged.codes, grid(planes, 1, 1, Box(4, 5, 16, 25)).flatten()[[1, 0]])
