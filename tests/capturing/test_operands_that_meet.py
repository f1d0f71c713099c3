"""Elementwise operations: where a result lies if its operands come from the same cells, from coarser ones, from sets, or from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, grid, learned, members, placed, two_images
from visattn.core.capturing.placing import pointwise
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, LOST, Places, whole
from visattn.core.capturing.placing.work import Unproven
from visattn.core.capturing.tokens.planes import PADDING, Planes
from visattn.core.geometry import Box


def combine(planes: Planes, *operands: Places, name: str = "mul", sets: bool = False, **named: Places) -> Places:
    given = {f"tensor{number}": operand for number, operand in enumerate(operands)} | named
    shape = torch.broadcast_shapes(*(operand.shape for operand in given.values()))  # type: ignore[no-untyped-call]
    work = at_work(planes, name, shape, **given)
    work.sets = sets
    result = pointwise.combined(work)
    assert isinstance(result, list)
    assert len(result) == 1
    return result[0]


def refused(planes: Planes, *operands: Places, why: str = "", name: str = "mul", sets: bool = False, **named: Places) -> None:
    with pytest.raises(Unproven, match=f"^{why or name}$"):
        combine(planes, *operands, name=name, sets=sets, **named)


def tokens(planes: Planes, rows: int = 3, columns: int = 4, **fields: Any) -> Places:
    """Return places of tokens `(images, tokens, channels)`."""
    return placed(grid(planes, rows, columns).flatten(1)[..., None].expand(2, rows * columns, 5), **fields)


def one(planes: Planes, box: Box | None = None, **fields: Any) -> Places:
    """Return places of one token for each image, such as a mean over a box."""
    return placed(grid(planes, 1, 1, box).expand(2, 1, 5), **fields)


def foreign(*shape: int, **fields: Any) -> Places:
    return whole("foreign", shape, CPU, "text")._replace(**fields)


# --- operands that do not come from the image


def test_learned_operands_keep_the_places_and_weight_cells_if_they_differ_between_them() -> None:
    planes = two_images()
    source = tokens(planes)
    for shape, weighs in (((5,), False), ((2, 1, 1), False), ((12, 1), True), ((12, 5), True), ((1, 5), False)):
        for operands in ((source, learned(*shape)), (learned(*shape), source)):
            result = combine(planes, *operands)
            assert torch.equal(result.codes, source.codes)
            assert result.weighted is weighs
        for name in ("add", "sub", "rsub", "subtract"):
            assert not combine(planes, source, learned(*shape), name=name).weighted
    assert combine(planes, source._replace(weighted=True), learned(5)).weighted


def test_results_of_another_shape_are_unknown() -> None:
    planes = two_images()
    source = tokens(planes)
    work = at_work(planes, "frexp", (2, 12, 5), (2, 12, 1), self=source)
    result = pointwise.combined(work)
    assert isinstance(result, list)
    assert [places.kind for places in result] == ["placed", "lost"]


def test_an_operand_of_another_input_must_be_the_same_at_all_positions() -> None:
    planes = two_images()
    source = tokens(planes)
    for shape in ((5,), (2, 1, 5), (2, 1, 1)):
        assert torch.equal(combine(planes, source, foreign(*shape)).codes, source.codes)
    refused(planes, source, foreign(12, 5), why="text")
    refused(planes, source, foreign(12, 1, name=""))
    assert combine(planes, source, foreign(12, 5, positions="given")).placed
    assert combine(planes, source, foreign(2, 12, 5, codes=source.codes)).placed
    refused(planes, source, foreign(2, 12, 5, codes=source.codes.flip(1)), why="text")
    assert combine(planes, source, learned(12, 5)).placed
    refused(planes, source, learned(12, 5, name="kv")._replace(summed=True), why="kv")
    assert combine(planes, source, learned(5)._replace(summed=True)).placed


def test_an_operand_of_unknown_origin_is_refused_unless_scores_meet_it() -> None:
    planes = two_images()
    source = tokens(planes)
    for shape in ((5,), (2, 12, 5), (2, 1, 1)):
        refused(planes, source, whole("lost", shape, CPU, "roll"), why="roll")
        refused(planes, source, whole("lost", shape, CPU))
    scores = source._replace(columns=source.codes.flip(1))
    assert combine(planes, scores, whole("lost", (2, 12, 5), CPU)).columns is not None


def test_a_condition_that_chooses_between_others_is_left_out() -> None:
    planes = two_images()
    source = tokens(planes)
    elsewhere = source._replace(codes=source.codes.flip(1))
    chosen = combine(planes, name="where", condition=elsewhere, self=source, other=learned(5))
    assert torch.equal(chosen.codes, source.codes)
    assert chosen.weighted is False
    assert combine(planes, name="where", condition=learned(12, 1), self=source, other=learned(5)).weighted
    masked = combine(planes, name="masked_fill", self=source, mask=elsewhere, value=learned())
    assert torch.equal(masked.codes, source.codes)
    alone = combine(planes, name="where", condition=elsewhere, self=learned(5), other=learned(5))
    assert torch.equal(alone.codes, elsewhere.codes)
    refused(planes, name="mul", condition=elsewhere, self=source)
    refused(planes, name="where", condition=elsewhere, self=learned(5), other=learned(5), sets=True)
    refused(planes, learned(5), learned(5))


def test_a_weight_of_its_own_for_each_token_must_not_meet_what_they_have_in_common() -> None:
    planes = two_images()
    source = tokens(planes)
    for common in (one(planes), foreign(2, 1, 5)):
        assert combine(planes, source, common, learned(5), name="addcmul").placed
        refused(planes, source, common, learned(12, 1), name="addcmul")
    assert combine(planes, source, source, learned(12, 1), name="addcmul").placed
    assert combine(planes, source, learned(5), learned(12, 1), name="addcmul").placed


# --- copies, other axes, merged cells


def test_copies_are_numbered_along_axes_that_broadcasting_adds_to_all_operands() -> None:
    planes = two_images()
    source = placed(grid(planes, 3, 4)[0].flatten()[:, None].expand(12, 5))
    copied = combine(planes, source, learned(3, 1, 1))
    assert copied.copies is not None
    assert torch.equal(copied.copies, torch.arange(3)[:, None, None].expand(3, 12, 5))
    inner = combine(planes, placed(source.codes[None]), learned(7, 1, 1), learned(2, 1, 1, 1))
    assert inner.copies is not None
    assert torch.equal(inner.copies, (torch.arange(2)[:, None] * 7 + torch.arange(7))[..., None, None].expand(2, 7, 12, 5))
    assert combine(planes, source, learned(1, 12, 5)).copies is None
    both = combine(planes, source, placed(source.codes.expand(3, 12, 5)))
    assert both.copies is None
    again = combine(planes, source._replace(copies=torch.full((12, 5), 4)), learned(3, 1, 1))
    assert again.copies is not None
    assert torch.equal(again.copies, 4 * 3 + torch.arange(3)[:, None, None].expand(3, 12, 5))


def test_an_operand_that_tells_copies_apart_makes_them_no_copies() -> None:
    planes = two_images()
    codes = grid(planes, 3, 4)[0].flatten()[:, None].expand(3, 12, 5)
    copies = torch.arange(3)[:, None, None].expand(3, 12, 5)
    copied = placed(codes, copies=copies)
    for other, stays in ((placed(codes), False), (placed(codes[0]), True), (placed(codes, copies=copies), True)):
        result = combine(planes, copied, other)
        assert (result.copies is not None) is stays
        if result.copies is not None:
            assert torch.equal(result.copies, copies)
    scores = copied._replace(columns=codes.flip(1))
    kept = combine(planes, scores, placed(codes))
    assert kept.copies is not None
    assert torch.equal(kept.copies, copies)


def test_a_product_with_members_keeps_their_codes_and_becomes_scores_where_an_unknown_number_meets_it() -> None:
    planes = two_images()
    words = members(planes, "token", 5).expand(2, 12, 5)
    source = tokens(planes, others=words)
    assert combine(planes, source, learned(5)).others is words
    assert combine(planes, tokens(planes), source).others is words
    assert combine(planes, source, learned(3, 1, 1, 1)).others is None
    scores = combine(planes, source, whole("lost", (2, 1, 1), CPU))
    assert scores.columns is words
    assert combine(planes, source, learned(2, 1, 1)).columns is None
    already = source._replace(columns=source.codes.flip(1))
    kept = combine(planes, already, whole("lost", (2, 1, 1), CPU))
    assert kept.columns is not None
    assert torch.equal(kept.columns, source.codes.flip(1))
    refused(planes, source, whole("lost", (2, 12, 1), CPU, "roll"), why="roll")
    refused(planes, source, whole("lost", (2, 1, 5), CPU, "roll"), why="roll")
    refused(planes, source, whole("lost", (2, 1, 1), CPU), whole("lost", (2, 1, 5), CPU))


def spread(planes: Planes, mean: Places, axis: int, other: Places) -> Places:
    """Return the places of a mean, expanded along an axis, times another operand."""
    work = at_work(planes, "mul", mean.shape, self=mean, other=other)
    facts = work.shadows.facts[0]
    strides = tuple(0 if dim == axis else stride for dim, stride in enumerate(facts.stride))
    work.shadows.facts = [facts._replace(stride=strides), *work.shadows.facts[1:]]
    (result,) = pointwise.combined(work)  # type: ignore[misc]
    assert isinstance(result, Places)
    return result


def test_a_mean_remembers_its_cells_until_something_tells_them_apart() -> None:
    planes = two_images()
    cells = tokens(planes).codes
    mean = placed(one(planes).codes.expand(2, 12, 5), parts=cells)
    assert spread(planes, mean, 1, learned(5)).parts is cells
    assert spread(planes, mean, 1, learned(2, 1, 1)).parts is cells
    assert spread(planes, mean, 1, learned(12, 1)).parts is None
    assert spread(planes, mean, 0, learned(5)).parts is None  # it differs between these cells itself
    assert combine(planes, one(planes, parts=cells), learned(5)).parts is None
    assert combine(planes, placed(cells, parts=cells), learned(12, 1)).parts is cells
    of_rows = placed(grid(planes, 3, 1)[..., None].expand(2, 3, 4, 5), parts=grid(planes, 3, 4)[..., None].expand(2, 3, 4, 5))
    assert spread(planes, of_rows, 2, learned(3, 1, 1)).parts is of_rows.parts
    assert spread(planes, of_rows, 2, learned(4, 1)).parts is None


# --- two operands from the image


def test_operands_from_the_same_cells_share_their_notes() -> None:
    planes = two_images()
    for field in ("mixture", "leaning"):
        for a, b in ((False, False), (False, True), (True, False), (True, True)):
            result = combine(planes, tokens(planes, **{field: a}), tokens(planes, **{field: b}))
            assert getattr(result, field) is (a or b)
    for a, b in ((False, False), (False, True), (True, False), (True, True)):
        assert combine(planes, tokens(planes, crossed=a), tokens(planes, crossed=b)).crossed is (a and b)
    left, right = tokens(planes, behind=(2, "a", 0)), tokens(planes, behind=(5, "b", 1))
    assert combine(planes, left, right).behind == combine(planes, right, left).behind == (5, "b", 1)
    refused(planes, left, left._replace(codes=left.codes.flip(1)))


def test_scores_meet_tokens_of_their_rows_or_columns_or_one_for_all() -> None:
    planes = two_images()
    rows, columns = grid(planes, 3, 4).flatten(1), grid(planes, 2, 5).flatten(1)
    scores = placed(rows[:, :, None].expand(2, 12, 10), columns=columns[:, None].expand(2, 12, 10))
    upper = grid(planes, 1, 1, Box(0, 0, 12, 40))
    for other in (placed(rows[:, :, None]), placed(columns[:, None]), placed(upper)):
        for result in (combine(planes, scores, other), combine(planes, other, scores)):
            assert result.codes is not None
            assert torch.equal(result.codes, scores.codes)
            assert result.columns is not None
            assert torch.equal(result.columns, columns[:, None].expand(2, 12, 10))
    for other in (placed(rows[:, :, None].flip(1)), placed(columns[:, None].flip(2))):
        refused(planes, scores, other)
        refused(planes, other, scores)
    refused(planes, scores, scores._replace(codes=scores.codes.flip(1)))


def test_a_mean_over_a_cell_meets_the_tokens_in_it_only() -> None:
    planes = two_images()
    source, upper = tokens(planes), Box(0, 0, 12, 40)
    for operands in ((source, one(planes)), (one(planes), source)):
        assert torch.equal(combine(planes, *operands).codes, source.codes)
    leaning = one(planes, leaning=True)
    refused(planes, source, leaning)
    refused(planes, leaning, source)
    refused(planes, source, one(planes, upper))
    leaning_source = source._replace(leaning=True)
    assert combine(planes, leaning_source, one(planes)).leaning
    halves, row = (
        tokens(planes, 1, 2),
        placed(grid(planes, 3, 1)[:, 1:2].expand(2, 1, 5)),
    )  # their centers lie in the second of three rows
    assert torch.equal(combine(planes, halves, row).codes, halves.codes)
    assert torch.equal(combine(planes, row, halves).codes, halves.codes)
    upper_tokens = placed(source.codes[:, :8])  # their centers lie in it, or half a cell below
    assert torch.equal(combine(planes, one(planes, upper), upper_tokens).codes, upper_tokens.codes)


def test_of_one_token_each_the_finer_cell_is_the_place() -> None:
    planes = two_images()
    fine, coarse = placed(grid(planes, 3, 4)[:, :1, :1].expand(2, 1, 5)), one(planes)
    assert torch.equal(combine(planes, fine, coarse).codes, fine.codes)
    assert torch.equal(combine(planes, coarse, fine).codes, fine.codes)
    refused(planes, fine, coarse._replace(leaning=True))
    assert combine(planes, fine._replace(leaning=True), coarse).leaning
    turned = placed(grid(planes, 4, 3)[:, :1, :1].expand(2, 1, 5))  # as many cells: the second is taken
    assert torch.equal(combine(planes, fine, turned).codes, turned.codes)
    assert torch.equal(combine(planes, turned, fine).codes, fine.codes)


def test_zeros_and_constants_in_one_operand_get_the_place_of_what_they_meet() -> None:
    planes = two_images()
    source = tokens(planes)
    codes = source.codes.clone()
    codes[:, 0], codes[:, 1] = PADDING, LEARNED
    other = source.codes.clone()
    other[:, 2] = PADDING
    for operands in ((placed(codes), placed(other)), (placed(other), placed(codes)), (placed(codes), source)):
        assert torch.equal(combine(planes, *operands).codes, source.codes)
    both = (placed(tensor.index_fill(1, torch.tensor([4]), LEARNED)) for tensor in (codes, other))
    assert combine(planes, *both).codes[:, 4].tolist() == [[LEARNED] * 5] * 2
    for code in (FOREIGN, LOST):
        codes[:, 3] = code
        expected = source.codes.clone()
        expected[:, 3] = LOST
        assert torch.equal(combine(planes, placed(codes), placed(other)).codes, expected)
        assert torch.equal(combine(planes, source, placed(codes)).codes, expected)


# --- maps


def maps(planes: Planes, rows: int, columns: int, box: Box | None = None, **fields: Any) -> Places:
    return placed(grid(planes, rows, columns, box)[:, None].expand(2, 5, rows, columns), **fields)


def test_rows_that_cross_columns_make_the_grid_of_both() -> None:
    planes = two_images()
    rows, columns, box = maps(planes, 3, 1), maps(planes, 1, 4), Box(0, 0, 24, 20)
    for operands in ((rows, columns), (columns, rows)):
        crossed = combine(planes, *operands)
        assert torch.equal(crossed.codes, maps(planes, 3, 4).codes)
        assert crossed.crossed
    for count, other_count in ((2, 4), (3, 2)):
        crossed = combine(planes, maps(planes, count, 1), maps(planes, 1, other_count))
        assert torch.equal(crossed.codes, maps(planes, count, other_count).codes)
    first_row = rows.codes.clone()
    first_row[:, :, 0] = FOREIGN
    assert not combine(planes, rows._replace(codes=first_row), columns).crossed
    part = combine(planes, maps(planes, 3, 1, box), maps(planes, 1, 4, box))
    assert torch.equal(part.codes, maps(planes, 3, 4, box).codes)
    refused(planes, rows._replace(leaning=True), columns)
    assert not combine(planes, rows, maps(planes, 1, 4, box)).crossed
    assert not combine(planes, rows, columns._replace(leaning=True)).crossed
    refused(planes, rows, columns._replace(codes=columns.codes.flip(0)))


def test_tokens_along_one_axis_that_meet_tokens_along_another_are_pairs() -> None:
    planes = two_images()
    tokens = grid(planes, 2, 3).flatten(1)
    queries, keys = placed(tokens[:, :, None, None].expand(2, 6, 1, 5)), placed(tokens[:, None, :, None].expand(2, 1, 6, 5))
    for operands in ((queries, keys), (keys, queries)):
        pairs = combine(planes, *operands)
        assert pairs.columns is not None
        for query in range(6):
            for key in range(6):
                assert (pairs.codes[:, query, key] == tokens[:, query, None]).all()
                assert (pairs.columns[:, query, key] == tokens[:, key, None]).all()
        assert pairs.one_stream
    assert not combine(planes, queries._replace(behind=(1, "attn", 0)), keys).one_stream
    assert combine(planes, queries, keys._replace(mixture=True)).mixture
    assert combine(planes, queries._replace(crossed=True), keys).crossed
    refused(planes, queries._replace(leaning=True), keys)
    refused(planes, queries, keys._replace(codes=keys.codes.flip(0)))  # of the other image
    rows, cells = maps(planes, 3, 1), maps(planes, 2, 4)
    first_cells = combine(planes, rows, cells._replace(codes=cells.codes[:, :, :1]))
    assert first_cells.columns is not None
    assert first_cells.columns[0, 0, 2].tolist() == cells.codes[0, 0, 0].tolist()


def gate(planes: Planes, **fields: Any) -> Places:
    """Return places of a coarser map that was enlarged to 6 x 8."""
    return placed(grid(planes, 3, 4).repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None].expand(2, 5, 6, 8), **fields)


def test_a_coarser_map_gates_finer_cells_if_it_has_one_value_for_each_of_its_cells() -> None:
    planes = two_images()
    fine, copies = maps(planes, 6, 8), torch.zeros(2, 5, 6, 8, dtype=torch.int32)
    for operands in ((fine, gate(planes, copies=copies)), (gate(planes, copies=copies), fine)):
        assert torch.equal(combine(planes, *operands).codes, fine.codes)
    upper = placed(fine.codes[:, :, :4]), gate(planes, copies=copies[:, :, :4])._replace(codes=gate(planes).codes[:, :, :4])
    assert torch.equal(combine(planes, *upper).codes, upper[0].codes)
    one_pair = torch.full((2, 4), PADDING, dtype=torch.int32), torch.full((2, 4), PADDING, dtype=torch.int32)
    for codes, cells in zip(one_pair, (grid(planes, 6, 8), grid(planes, 3, 4)), strict=True):
        codes[:1, 1] = cells[0, 0, 0]
    assert torch.equal(combine(planes, placed(one_pair[0]), placed(one_pair[1])).codes, one_pair[0])
    refused(planes, fine, gate(planes))
    refused(planes, fine, gate(planes, copies=copies, leaning=True))
    refused(planes, fine, gate(planes, copies=copies)._replace(codes=gate(planes).codes.flip(2)))
    by_columns = placed(grid(planes, 1, 4).repeat_interleave(2, 2)[:, None].expand(2, 5, 6, 8), copies=copies)
    refused(planes, fine, by_columns)  # its values differ from row to row
    row_gate = maps(planes, 6, 1)
    assert torch.equal(combine(planes, fine, row_gate).codes, fine.codes)
    assert torch.equal(combine(planes, fine, maps(planes, 1, 8)).codes, fine.codes)
    refused(planes, fine, placed(row_gate.codes.expand(2, 5, 6, 8)))


def test_a_gate_returns_to_the_cells_that_it_was_computed_from() -> None:
    planes = two_images()
    fine = maps(planes, 6, 8)
    returning = gate(planes, parts=fine.codes.clone())
    assert torch.equal(combine(planes, fine, returning).codes, fine.codes)
    assert torch.equal(combine(planes, returning, fine).codes, fine.codes)
    refused(planes, fine, returning._replace(leaning=True))
    refused(planes, fine, gate(planes, parts=fine.codes.flip(3)))


def test_cells_that_meet_one_coarser_cell_each_get_the_coarser_grid() -> None:
    planes = two_images()
    fine, coarse = placed(maps(planes, 6, 8).codes[:, :, ::2, ::2]), maps(planes, 3, 4)
    assert torch.equal(combine(planes, fine, coarse).codes, coarse.codes)
    assert torch.equal(combine(planes, coarse, fine).codes, coarse.codes)
    refused(planes, fine, placed(coarse.codes.flip(3)))
    thinner = placed(fine.codes[:1, :, :1, :2]), placed(coarse.codes[:1, :, :1, :2])
    assert torch.equal(combine(planes, *thinner).codes, thinner[1].codes)


def test_of_two_grids_with_as_many_cells_the_evener_is_taken() -> None:
    planes = two_images()
    even, uneven = maps(planes, 3, 4), maps(planes, 3, 4, Box(2, 0, 26, 40))
    assert torch.equal(combine(planes, even, uneven).codes, even.codes)
    assert torch.equal(combine(planes, uneven, even).codes, even.codes)
    refused(planes, even, maps(planes, 3, 4, Box(6, 0, 30, 40)))


# --- sets


def test_a_token_that_met_an_image_gives_it_to_the_same_token() -> None:
    planes = two_images()
    word_set = planes.set_of("word", 7)
    words, free = planes.codes(word_set)[..., None].expand(2, 7, 5), planes.members(word_set)[:, None].expand(2, 7, 5)
    for operands in ((placed(words), placed(free)), (placed(free), placed(words))):
        assert torch.equal(combine(planes, *operands).codes, words)
    refused(planes, placed(words), placed(free.flip(1)))


def word_places(codes: Tensor, **fields: Any) -> Places:
    return Places("learned", codes[:, None].expand(len(codes), 5), **fields)


def test_words_are_taken_rather_than_their_learned_positions() -> None:
    planes = two_images()
    for name in ("word#1", "foreign text"):
        words, learned_ones = word_places(members(planes, name, 7)), word_places(members(planes, "token", 7))
        for operands in ((words, learned_ones), (learned_ones, words)):
            assert torch.equal(combine(planes, *operands, sets=True).codes, words.codes)
    first, second = word_places(members(planes, "token", 7)), word_places(members(planes, "query", 7))
    assert torch.equal(combine(planes, first, second, sets=True).codes, first.codes)
    assert torch.equal(combine(planes, second, first, sets=True).codes, second.codes)
    of_image = word_places(planes.codes(planes.set_of("query", 7))[1])
    assert torch.equal(combine(planes, words, of_image, sets=True).codes, of_image.codes)


def test_one_word_is_not_taken_for_several_tokens_nor_other_members_for_the_same() -> None:
    planes = two_images()
    words, positions = members(planes, "word", 7), members(planes, "token", 7)
    refused(planes, word_places(words[:1]), word_places(positions), sets=True)
    refused(planes, word_places(positions), word_places(words[:1]), sets=True)
    assert torch.equal(combine(planes, word_places(words), word_places(positions[:1]), sets=True).codes, word_places(words).codes)
    refused(planes, word_places(words), word_places(words.flip(0)), sets=True)
    single = combine(planes, word_places(words), word_places(words[:1]), sets=True)
    assert torch.equal(single.codes, word_places(words).codes)
    along_channels = Places("learned", positions[:5].expand(7, 5))
    assert torch.equal(combine(planes, word_places(words), along_channels, sets=True).codes, word_places(words).codes)
    of_image = planes.codes(planes.set_of("word", 7))[1]
    assert torch.equal(combine(planes, word_places(words), word_places(of_image), sets=True).codes, word_places(of_image).codes)
