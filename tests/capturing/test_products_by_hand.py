"""Products of matrices: layers, scores of queries and keys, sums of values, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, grid, learned, members, noted, placed, two_images
from visattn.core.capturing.placing import products
from visattn.core.capturing.placing.places import UNWATCHED, Places, whole
from visattn.core.capturing.placing.work import Result, Unproven
from visattn.core.capturing.tokens.planes import PADDING, Planes
from visattn.core.geometry import Box


def tokens(codes: Tensor, channels: int, **fields: Any) -> Places:
    """Return places `(..., tokens, channels)` from codes `(..., tokens)`."""
    return placed(codes[..., None].expand(*codes.shape, channels), **fields)


def turned(places: Places) -> Places:
    """Return places whose last two axes are swapped."""
    copies = None if places.copies is None else places.copies.mT
    columns = None if places.columns is None else places.columns.mT
    return places._replace(codes=places.codes.mT, copies=copies, columns=columns)


def bmm(planes: Planes, left: Places, right: Places, *, name: str = "bmm", sets: bool = False, told: bool = False) -> Places:
    shape = (*left.shape[:-1], right.shape[-1])
    work = at_work(planes, name, shape, self=left, mat2=right)
    work.sets, work.shadows.told = sets, told
    return single(products.multiplied(work))


def single(result: Result) -> Places:
    assert isinstance(result, Places)
    return result


def refused(planes: Planes, left: Places, right: Places, why: str = "bmm", **how: Any) -> Exception:
    with pytest.raises(Unproven, match=f"^{why}$") as caught:
        bmm(planes, left, right, **how)
    return caught.value


def queries(planes: Planes) -> Tensor:
    """Return codes of 12 tokens for 3 heads of each image, `(images x heads, tokens)`."""
    return grid(planes, 3, 4).flatten(1).repeat_interleave(3, 0)


def keys(planes: Planes) -> Tensor:
    """Return codes of 10 coarser tokens in the same form."""
    return grid(planes, 2, 5).flatten(1).repeat_interleave(3, 0)


def numbers(planes: Planes) -> Tensor:
    return torch.arange(6, dtype=torch.int32)[:, None, None].expand(6, 12, 4)


@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_a_learned_layer_keeps_each_token_on_either_side(name: str) -> None:
    planes = two_images()
    codes = queries(planes) if name == "bmm" else queries(planes)[0]
    left = tokens(codes, 4, copies=torch.full_like(codes, 3)[..., None].expand(*codes.shape, 4), behind=(5, "a", 0))
    weight = learned(*codes.shape[:-1], 4, 7)
    for result in (bmm(planes, left, weight, name=name), turned(bmm(planes, turned(weight), turned(left), name=name))):
        assert torch.equal(result.codes, codes[..., None].expand(*codes.shape, 7))
        assert result.columns is None
        assert result.copies is not None
        assert result.copies.tolist() == torch.full((*codes.shape, 7), 3).tolist()
        assert (result.mixture, result.leaning, result.behind, result.asked) == (False, False, (5, "a", 0), False)


def test_scores_have_the_places_of_queries_and_keys() -> None:
    planes = two_images()
    left = tokens(queries(planes), 4, copies=numbers(planes), behind=(2, "b", 1))
    right = turned(tokens(keys(planes), 4, behind=(7, "a", 0)))
    scores = bmm(planes, left, right)
    assert torch.equal(scores.codes, queries(planes)[:, :, None].expand(6, 12, 10))
    assert scores.columns is not None
    assert torch.equal(scores.columns, keys(planes)[:, None].expand(6, 12, 10))
    assert scores.copies is not None
    assert torch.equal(scores.copies, numbers(planes)[..., :1].expand(6, 12, 10))
    assert (scores.behind, scores.one_stream, scores.mixture) == ((7, "a", 0), False, False)
    same = bmm(planes, left._replace(mixture=True), right._replace(behind=(2, "b", 1)))
    assert (same.one_stream, same.mixture) == (True, True)
    assert bmm(planes, left, right._replace(mixture=True)).mixture
    assert not bmm(planes, left, right._replace(behind=(2, "b", 1), embedding=4)).one_stream
    assert bmm(planes, left._replace(copies=torch.arange(4).expand(6, 12, 4)), right).copies is None


def test_the_weighted_sum_of_values_lies_at_the_queries() -> None:
    planes = two_images()
    copies = torch.arange(12)[:, None].expand(6, 12, 10)
    codes, columns = queries(planes)[:, :, None].expand(6, 12, 10), keys(planes)[:, None].expand(6, 12, 10)
    weights = placed(codes, columns=columns, copies=copies, behind=(1, "a", 0), others=codes)
    values = tokens(keys(planes), 4, behind=(3, "c", 2))
    for result in (bmm(planes, weights, values), turned(bmm(planes, turned(values), turned(weights)))):
        assert torch.equal(result.codes, queries(planes)[:, :, None].expand(6, 12, 4))
        assert result.columns is None
        assert result.others is None
        assert result.copies is not None
        assert torch.equal(result.copies, torch.arange(12)[:, None].expand(6, 12, 4))
        assert result.behind == (3, "c", 2)


def test_weights_may_be_summed_over_their_queries_and_then_lie_at_the_keys() -> None:
    planes = two_images()
    weights = placed(keys(planes)[:, None].expand(6, 12, 10), columns=queries(planes)[:, :, None].expand(6, 12, 10))
    result = bmm(planes, weights, tokens(keys(planes), 4))
    assert torch.equal(result.codes, queries(planes)[:, :, None].expand(6, 12, 4))


def test_scores_times_scores_and_scores_in_disorder_have_no_place() -> None:
    planes = two_images()
    codes, columns = queries(planes)[:, :, None].expand(6, 12, 12), queries(planes)[:, None].expand(6, 12, 12)
    weights = placed(codes, columns=columns)
    refused(planes, weights, weights)
    disordered = placed(columns, columns=columns.flip(-1))
    refused(planes, disordered, tokens(queries(planes), 4))
    refused(planes, turned(tokens(queries(planes), 4)), turned(disordered))


def test_tokens_times_tokens_summed_over_the_same_tokens_are_told_from_other_sums() -> None:
    planes = two_images()
    left, right = turned(tokens(queries(planes), 4)), tokens(queries(planes), 7)
    assert products.is_sum(refused(planes, left, right))
    assert products.is_sum(refused(planes, left, tokens(queries(planes), 1)))
    assert not products.is_sum(refused(planes, left, right._replace(codes=right.codes.flip(1))))
    pairs = placed(queries(planes).view(6, 4, 3)[:, :, :1].expand(6, 4, 12) + torch.arange(12, dtype=torch.int32))
    assert not products.is_sum(refused(planes, pairs, right))
    for a, b in ((tokens(queries(planes)[:, :4], 12), right), (left, turned(tokens(queries(planes)[:, :7], 12)))):
        assert not products.is_sum(refused(planes, a, b))
    assert not products.is_sum(ValueError())


# --- tokens behind a layer whose weights come from the image


def test_a_matrix_from_a_cell_that_holds_all_tokens_is_a_layer() -> None:
    planes = two_images()
    codes, image = queries(planes)[0], grid(planes, 1, 1)[0, 0, 0]
    copies = torch.arange(12)[:, None].expand(12, 4)
    left = tokens(codes, 4, copies=copies)
    matrix = placed(image.expand(4, 7))
    for result in (bmm(planes, left, matrix, name="mm"), turned(bmm(planes, turned(matrix), turned(left), name="mm"))):
        assert torch.equal(result.codes, codes[:, None].expand(12, 7))
        assert result.columns is None
        assert result.copies is not None
        assert torch.equal(result.copies, torch.arange(12)[:, None].expand(12, 7))
    for count in (2, 7):  # in a batch as well
        narrow = placed(image.expand(1, 4, count))
        for result in (
            bmm(planes, tokens(codes[None], 4), narrow),
            turned(bmm(planes, turned(narrow), turned(tokens(codes[None], 4)))),
        ):
            assert result.columns is None
            assert torch.equal(result.codes, codes[None, :, None].expand(1, 12, count))
    for other in (matrix._replace(leaning=True), placed(grid(planes, 2, 1)[0, 0, 0].expand(4, 7))):
        refused(planes, left, other, "mm", name="mm")
        refused(planes, turned(other), turned(left), "mm", name="mm")


def test_one_column_from_another_cell_is_the_key_of_scores() -> None:
    planes = two_images()
    codes, image = queries(planes)[0], grid(planes, 1, 1)[0, 0, 0]
    left = tokens(codes, 4)
    scores = bmm(planes, left, placed(image.expand(4, 1)), name="mm")
    assert scores.columns is not None
    assert torch.equal(scores.columns, image.expand(12, 1))
    scores = bmm(planes, tokens(codes[None], 4), placed(image.expand(1, 4, 1)))
    assert scores.columns is not None
    scores = bmm(planes, placed(image.expand(1, 4)), turned(left), name="mm")
    assert scores.columns is not None
    assert torch.equal(scores.columns, codes[None])


def test_a_product_in_one_cell_is_no_score() -> None:
    planes = two_images()
    image = grid(planes, 1, 1)
    result = bmm(planes, placed(image.expand(2, 3, 4), mixture=True), placed(image.expand(2, 4, 7)))
    assert torch.equal(result.codes, image.expand(2, 3, 7))
    assert (result.columns, result.mixture) == (None, True)


# --- weights from the center of windows (outlook attention)


def windows(planes: Planes) -> tuple[Tensor, Tensor]:
    """Return codes of the 12 cells and of the 9 cells around each, `(images, cells, 9)`; -1 outside of the image."""
    cells = grid(planes, 3, 4)
    around = torch.full((2, 3, 4, 3, 3), PADDING, dtype=torch.int32)
    for row in range(3):
        for column in range(4):
            for down in range(3):
                for right in range(3):
                    r, c = row + down - 1, column + right - 1
                    if 0 <= r < 3 and 0 <= c < 4:
                        around[:, row, column, down, right] = cells[:, r, c]
    return cells.flatten(1), around.view(2, 12, 9)


def test_a_mean_over_windows_lies_in_the_cell_that_its_weights_come_from() -> None:
    planes = two_images()
    cells, around = windows(planes)
    copies = torch.arange(2)[:, None, None, None].expand(2, 12, 6, 9)
    weights = placed(cells[..., None, None].expand(2, 12, 6, 9), copies=copies, behind=(1, "a", 0))
    values = tokens(around, 5, behind=(4, "b", 0))
    for result in (bmm(planes, weights, values), turned(bmm(planes, turned(values), turned(weights)))):
        assert torch.equal(result.codes, cells[..., None, None].expand(2, 12, 6, 5))
        assert (result.columns, result.behind) == (None, (4, "b", 0))
        assert result.copies is not None
        assert torch.equal(result.copies, torch.arange(2)[:, None, None, None].expand(2, 12, 6, 5))
    refused(planes, weights._replace(codes=weights.codes.flip(1)), values)
    refused(planes, turned(values), turned(weights._replace(codes=weights.codes.flip(1))))
    refused(planes, placed(cells[:, :9, None].expand(2, 9, 9)), tokens(around[:, 0], 5))
    first = placed(cells[:, 1, None, None].expand(2, 6, 9), copies=torch.arange(2)[:, None, None].expand(2, 6, 9))
    first_values = tokens(around[:, 1], 5)
    for result in (bmm(planes, first, first_values), turned(bmm(planes, turned(first_values), turned(first)))):
        assert torch.equal(result.codes, cells[:, 1, None, None].expand(2, 6, 5))
        assert result.copies is not None
        assert torch.equal(result.copies, torch.arange(2)[:, None, None].expand(2, 6, 5))


@pytest.mark.parametrize(("row", "column", "inside"), [(0, 0, True), (1, 1, True), (0, 1, True), (2, 0, False), (0, 2, False)])
def test_the_center_of_the_cell_may_lie_at_the_edge_of_the_window(row: int, column: int, inside: bool) -> None:
    planes = two_images()
    cell, fine = grid(planes, 3, 4)[:, 0, 0], grid(planes, 6, 8)  # its center is the corner of four finer cells
    codes = torch.stack([fine[:, row, column], torch.full((2,), PADDING, dtype=torch.int32)], 1)
    weights, values = placed(cell[:, None, None].expand(2, 6, 2)), tokens(codes, 5)
    if not inside:
        refused(planes, weights, values)
        return
    assert torch.equal(bmm(planes, weights, values).codes, cell[:, None, None].expand(2, 6, 5))


def test_a_window_that_ends_or_begins_half_a_pixel_beside_the_center_does_not_hold_it() -> None:
    planes = two_images()
    cell = grid(planes, 3, 4)[:, 0, 0]  # its center is at row 4, column 5
    weights = placed(cell[:, None, None].expand(2, 6, 2))
    for box in (Box(0, 0, 3.5, 10), Box(4.5, 0, 8, 10), Box(0, 0, 8, 4.5), Box(0, 5.5, 8, 10)):
        window = grid(planes, 1, 1, box)[:, 0, 0]
        codes = torch.stack([window, torch.full((2,), PADDING, dtype=torch.int32)], 1)
        refused(planes, weights, tokens(codes, 5))


# --- matrices of unknown origin


def test_a_matrix_of_unknown_origin_mixes_channels_only_if_it_is_the_same_for_all_tokens() -> None:
    planes = two_images()
    left = tokens(grid(planes, 3, 4).flatten(1), 4)
    channels = whole("lost", (2, 4, 7), CPU, "kv")._replace(of_channels=True)
    before = whole("lost", (2, 4, 7), CPU, UNWATCHED)
    for result in (bmm(planes, left, channels), turned(bmm(planes, turned(channels), turned(left)))):
        assert torch.equal(result.codes, left.codes[..., :1].expand(2, 12, 7))
        assert result.name == "kv"
    assert bmm(planes, left, channels._replace(name="")).name == "bmm"
    assert bmm(planes, left, before).kind == "placed"
    refused(planes, left, before, UNWATCHED, told=True)
    refused(planes, left, channels._replace(of_channels=False), "kv")
    refused(planes, left, channels._replace(of_channels=False, name=""))
    refused(planes, turned(left), whole("lost", (2, 12, 7), CPU, "kv")._replace(of_channels=True), "kv")
    refused(planes, left._replace(columns=left.codes), channels, "kv")
    by_rows = tokens(grid(planes, 3, 4), 5)
    refused(planes, by_rows, whole("lost", (2, 3, 5, 7), CPU, "kv")._replace(of_channels=True), "kv")


# --- members of sets and learned operands


def test_tokens_times_learned_queries_keep_the_queries_beside_them() -> None:
    planes = two_images()
    left, asked = tokens(grid(planes, 3, 4).flatten(1), 4), members(planes, "token", 7)
    right = Places("learned", asked.expand(2, 4, 7), name="queries")
    result = bmm(planes, left, right)
    assert torch.equal(result.codes, left.codes[..., :1].expand(2, 12, 7))
    assert result.others is not None
    assert torch.equal(result.others, asked.expand(2, 12, 7))
    assert result.asked
    turned_result = bmm(planes, turned(right), turned(left))
    assert turned_result.others is not None
    assert torch.equal(turned_result.others, asked[:, None].expand(2, 7, 12))
    assert bmm(planes, left, right._replace(kind="foreign")).asked
    assert not bmm(planes, placed(left.codes[0]), Places("learned", asked.expand(4, 7)), name="mm").asked
    assert not bmm(planes, left, Places("learned", asked[:4, None].expand(2, 4, 7))).asked
    assert not bmm(planes, turned(left), Places("learned", asked.expand(2, 12, 7))).asked


def test_members_times_a_matrix_of_members_pass_a_layer_and_times_a_batch_make_scores() -> None:
    planes = two_images()
    words, others = members(planes, "word", 12), members(planes, "token", 7)
    left = Places("learned", words[:, None].expand(12, 4))
    layer = bmm(planes, left, Places("learned", others.expand(4, 7)), name="mm", sets=True)
    assert layer.columns is None
    assert torch.equal(layer.codes, words[:, None].expand(12, 7))
    batch = bmm(planes, left._replace(codes=left.codes.expand(2, 12, 4)), Places("learned", others.expand(2, 4, 7)), sets=True)
    assert batch.columns is not None
    assert torch.equal(batch.columns, others.expand(2, 12, 7))
    zeros = Places("learned", torch.tensor(PADDING, dtype=torch.int32).expand(4, 7))
    refused(planes, left, zeros, "mm", name="mm", sets=True)
    refused(planes, turned(zeros), turned(left), "mm", name="mm", sets=True)
    refused(planes, left, whole("lost", (4, 7), CPU, "roll"), "roll", name="mm", sets=True)


def scores_of_words(planes: Planes, words: Tensor) -> Places:
    codes = grid(planes, 3, 4).flatten(1)[..., None].expand(2, 12, 7)
    return placed(codes, columns=words.expand(2, 12, 7), copies=torch.arange(2)[:, None, None].expand(2, 12, 7))


def test_scores_of_words_are_summed_over_these_words_only() -> None:
    planes = two_images()
    words, others = members(planes, "word", 7), members(planes, "token", 7)
    weights = scores_of_words(planes, words)
    values = Places("learned", words[:, None].expand(2, 7, 5))
    for result in (bmm(planes, weights, values), turned(bmm(planes, turned(values), turned(weights)))):
        assert torch.equal(result.codes, weights.codes[..., :1].expand(2, 12, 5))
        assert result.columns is None
        assert result.copies is not None
        assert torch.equal(result.copies, torch.arange(2)[:, None, None].expand(2, 12, 5))
    assert bmm(planes, weights, Places("learned", words[:, None].expand(2, 7, 1))).placed
    swapped = noted(weights, codes=weights.columns, columns=weights.codes)
    assert torch.equal(bmm(planes, swapped, values).codes, weights.codes[..., :1].expand(2, 12, 5))
    for codes in (others[:, None].expand(2, 7, 5), words.flip(0)[:, None].expand(2, 7, 5), words[:5].expand(2, 7, 5)):
        refused(planes, weights, Places("learned", codes))
        refused(planes, weights, placed(codes))
    refused(planes, weights._replace(columns=(words + torch.arange(12)[:, None] % 2).expand(2, 12, 7)), values)


def test_scores_of_several_heads_are_mixed_and_pairs_of_tokens_are_not() -> None:
    planes = two_images()
    pairs = (grid(planes, 3, 4).flatten(1)[:, :, None, None], grid(planes, 2, 5).flatten(1)[:, None, :, None])
    codes, columns = (codes.expand(2, 12, 10, 3) for codes in pairs)
    mixed = bmm(planes, placed(codes, columns=columns), learned(2, 12, 3, 6))
    assert torch.equal(mixed.codes, codes[..., :1].expand(2, 12, 10, 6))
    assert mixed.columns is not None
    assert torch.equal(mixed.columns, columns[..., :1].expand(2, 12, 10, 6))
    both_vary = placed(columns[..., 0].clone(), columns=columns[..., 0].flip(-1))
    refused(planes, both_vary, learned(2, 10, 5))


# --- mixtures, vectors, further forms


def test_a_learned_mixture_of_tokens_leans_and_is_a_mixture_if_it_has_several_results() -> None:
    planes = two_images()
    left = turned(tokens(grid(planes, 3, 4).flatten(1), 4))
    image = grid(planes, 1, 1)
    for count in (1, 7):
        mixed = bmm(planes, left, learned(2, 12, count))
        assert torch.equal(mixed.codes, image.expand(2, 4, count))
        assert (mixed.leaning, mixed.mixture) == (True, count > 1)
    copied = left._replace(copies=torch.zeros(2, 4, 12, dtype=torch.int32))
    assert bmm(planes, copied, learned(2, 12, 1)).mixture
    assert bmm(planes, copied, learned(2, 12, 1)).copies is not None
    copied = left._replace(copies=torch.arange(12).expand(2, 4, 12))
    assert bmm(planes, copied, learned(2, 12, 1)).copies is None
    assert bmm(planes, left._replace(mixture=True), learned(2, 12, 1)).mixture


def linear(planes: Planes, source: Places, **given: Any) -> Places:
    return single(products.linear(at_work(planes, "linear", (*source.shape[:-1], 7), **given)))


def test_a_linear_layer_mixes_the_last_axis_also_of_scores_of_heads() -> None:
    planes = two_images()
    source = tokens(grid(planes, 3, 4), 5, leaning=True, others=grid(planes, 3, 4)[..., None].expand(2, 3, 4, 5))
    for given in ({"input": source}, {"self": source}):
        made = linear(planes, source, weight=learned(7, 5), **given)
        assert torch.equal(made.codes, source.codes[..., :1].expand(2, 3, 4, 7))
        assert (made.leaning, made.mixture, made.others) == (True, False, None)
    scores = source._replace(columns=source.codes.flip(1))
    made = linear(planes, scores, input=scores)
    assert made.columns is not None
    assert torch.equal(made.columns, source.codes.flip(1)[..., :1].expand(2, 3, 4, 7))
    for field in (
        {"columns": grid(planes, 1, 5)[:, :, None].expand(2, 3, 4, 5)},
        {"codes": grid(planes, 1, 5)[:, :, None].expand(2, 3, 4, 5)},
    ):
        with pytest.raises(Unproven, match=r"^linear$"):
            linear(planes, scores, input=noted(scores, **field))


def test_a_product_takes_all_that_it_knows_by_name() -> None:
    planes = two_images()
    left, right = tokens(grid(planes, 3, 4).flatten(1), 4), learned(2, 4, 7)
    work = at_work(planes, "bmm", (2, 12, 7), self=left, mat2=right)
    made = products.product(work=work, left=left, right=right, weight=True)
    assert torch.equal(made.codes, left.codes[..., :1].expand(2, 12, 7))
