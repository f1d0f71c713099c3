"""Tensors of position codes: compared, aligned, padded, joined and reshaped as the tensors that they shadow, and einsum equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.tokens.codes import Geometry2d, aligned, along, equal, flat, joined, padded, reshaped, same_along
from visattn.core.capturing.tokens.equations import Equation


def codes(*shape: int) -> Tensor:
    """Return different codes."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


def test_nested_items_are_flattened_in_order() -> None:
    assert flat([1, (2, [3, (4,)]), [], "56", {7: 8}]) == [1, 2, 3, 4, "56", {7: 8}]


def test_codes_of_one_shape_are_compared_by_value() -> None:
    first = codes(2, 3, 4)
    assert equal(first, first)
    assert equal(first, first.clone())
    for place in ((0, 0, 0), (1, 2, 3), (0, 2, 1)):
        other = first.clone()
        other[place] += 1
        assert not equal(first, other)
        assert not equal(other, first)
    assert not equal(first, first[:, :, :3])
    square = codes(3, 3)
    assert not equal(square, square.T)  # the same memory
    assert not equal(codes(4)[:3], codes(4)[:2])
    assert not equal(codes(9)[:4:2], codes(9)[:2])
    assert equal(codes(0, 3), codes(0, 3) + 1)


def test_codes_with_expanded_axes_are_compared() -> None:
    column, row = codes(3, 1), codes(1, 4)
    assert equal(column.expand(3, 4), column.clone().expand(3, 4))
    assert not equal(column.expand(3, 4), (column + 1).expand(3, 4))
    assert not equal(column.expand(3, 4), row.expand(3, 4))
    assert equal(column.expand(3, 4), column.repeat(1, 4))
    assert equal(column.repeat(1, 4), column.expand(3, 4))
    assert not equal(row.expand(3, 4), (row + torch.tensor([[0], [0], [1]])).int())
    assert equal(codes(1).expand(0), codes(1).expand(0).clone())
    assert equal(codes(3, 1).expand(3, 0), codes(4, 1)[1:].expand(3, 0))
    both = codes(2, 1, 3, 1)
    assert not equal(both.expand(2, 5, 3, 4), both.flip(0).expand(2, 5, 3, 4))
    assert not equal(both.expand(2, 5, 3, 4), both.flip(2).expand(2, 5, 3, 4))


def test_codes_are_the_same_along_axes_without_changes() -> None:
    varied = codes(2, 3, 1, 4)
    assert [same_along(varied, dim) for dim in (0, 1, 2, 3, -1, -2)] == [False, False, True, False, False, True]
    wide = varied.expand(2, 3, 5, 4)
    for stored in (wide, wide.contiguous()):
        assert [same_along(stored, dim) for dim in range(4)] == [False, False, True, False]
    assert same_along(codes(2, 0, 3), 0)
    assert same_along(codes(2, 0, 3), 2)


def test_a_change_in_the_middle_is_a_change() -> None:
    inside = torch.zeros(3, 5, dtype=torch.int32)
    inside[1, 2] = 7  # the ends are the same
    assert not same_along(inside, 0)
    assert not same_along(inside, 1)
    second = torch.zeros(3, 5, dtype=torch.int32)
    second[:, 1] = 7
    assert same_along(second, 0)
    assert not same_along(second, 1)
    last = torch.zeros(3, 5, dtype=torch.int32)
    last[2, 4] = 7
    assert not same_along(last, 0)
    assert not same_along(last, 1)


def test_operands_are_aligned_to_the_result_of_an_einsum() -> None:
    tokens = codes(2, 5)
    queries = tokens[:, :, None].expand(2, 5, 4)
    shape = torch.Size((2, 5, 7))
    found = aligned(queries, "bqd", "bqk", shape)
    assert found is not None
    assert torch.equal(found, tokens[:, :, None].expand(shape))
    single = aligned(tokens[:, :, None], "bqd", "bqk", shape)
    assert single is not None
    assert torch.equal(single, found)
    keys = codes(7, 2)
    found = aligned(keys[None].expand(4, 7, 2), "dkb", "bqk", shape)
    assert found is not None
    assert torch.equal(found, keys.T[:, None].expand(shape))
    assert aligned(codes(2, 5, 4), "bqd", "bqk", shape) is None
    assert aligned(queries.contiguous(), "bqd", "bqk", shape) is not None
    two_sums = codes(2, 1, 5, 1).expand(2, 3, 5, 4)
    found = aligned(two_sums, "bcqd", "qb", torch.Size((5, 2)))
    assert found is not None
    assert torch.equal(found, codes(2, 5).T)
    assert aligned(codes(2, 3, 5, 1).expand(2, 3, 5, 4), "bcqd", "qb", torch.Size((5, 2))) is None


def test_changes_along_some_axes_keep_others_expanded() -> None:
    wide = codes(2, 3, 1).expand(2, 3, 4)
    seen = []

    def roll(stored: Tensor, by: int, *, dims: int) -> Tensor:
        seen.append(tuple(stored.shape))
        return stored.roll(by, dims)

    changed = along(roll, [1], wide, 1, dims=1)
    assert seen == [(2, 3, 1)]
    assert torch.equal(changed, wide.roll(1, 1))
    assert (changed.shape, changed.stride(2)) == ((2, 3, 4), 0)
    for axis in (2, -1):
        seen.clear()
        assert torch.equal(along(roll, [axis], wide, 1, dims=2), wide)
        assert seen == [(2, 3, 4)]
    grown = along(F.pad, [1], wide, [0, 0, 1, 2], value=-1)
    assert torch.equal(grown, F.pad(wide, [0, 0, 1, 2], value=-1))
    assert grown.stride(2) == 0
    plain = codes(2, 3)
    assert torch.equal(along(roll, [0], plain, 1, dims=0), plain.flip(0))
    many = codes(1, 3, 1).expand(5, 3, 4)
    seen.clear()
    assert torch.equal(along(roll, [1], many, 1, dims=1), many.roll(1, 1))
    assert seen == [(1, 3, 1)]


def test_channels_stay_expanded_in_a_reshape_that_keeps_them() -> None:
    tokens = codes(2, 6, 1).expand(2, 6, 4)
    split = reshaped(tokens, (2, 2, 3, 4))
    assert torch.equal(split, tokens.reshape(2, 2, 3, 4))
    assert split.stride(-1) == 0
    exchanged = codes(6, 2, 1).transpose(0, 1).expand(2, 6, 4)
    merged = reshaped(exchanged, (12, 4))
    assert torch.equal(merged, exchanged.reshape(12, 4))
    assert merged.stride(-1) == 0
    split = reshaped(exchanged, (4, 3, 4))
    assert torch.equal(split, exchanged.reshape(4, 3, 4))
    assert split.stride(-1) == 0
    assert torch.equal(reshaped(tokens, (2, 3, 8)), tokens.reshape(2, 3, 8))
    assert torch.equal(reshaped(tokens, (6, 2, 4)), tokens.reshape(6, 2, 4))
    assert torch.equal(reshaped(codes(2, 6), (3, 4)), codes(3, 4))
    assert torch.equal(reshaped(codes(2, 6), (4, 3, 1)), codes(4, 3, 1))
    assert reshaped(torch.tensor(3), (1, 1)).tolist() == [[3]]
    assert reshaped(codes(2, 1).expand(2, 4), (2, 2, 2)).tolist() == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    assert torch.equal(reshaped(codes(6, 4).T, (2, 2, 6)), codes(6, 4).T.reshape(2, 2, 6))
    assert torch.equal(reshaped(codes(1, 6).expand(4, 6), (2, 2, 6)), codes(6).expand(2, 2, 6))


def test_one_element_is_reshaped_to_a_scalar_and_back() -> None:
    assert torch.equal(reshaped(codes(1, 1), torch.Size(())), torch.tensor(0, dtype=torch.int32))
    assert torch.equal(reshaped(codes(1)[0], (1, 1)), codes(1, 1))


def test_joined_codes_keep_axes_expanded_that_all_have_so() -> None:
    first, second = codes(2, 3, 1).expand(2, 3, 4), (codes(2, 5, 1) + 100).expand(2, 5, 4)
    both = joined([first, second], 1)
    assert torch.equal(both, torch.cat([first, second], 1))
    assert both.stride(2) == 0
    plain = second.contiguous()
    assert torch.equal(joined([first, plain], 1), both)
    assert torch.equal(joined([plain, first], 1), torch.cat([plain, first], 1))
    assert torch.equal(joined([first, first + 50], 2), torch.cat([first, first + 50], 2))
    assert joined([first, first], 2).tolist() == first.repeat(1, 1, 2).tolist()
    assert torch.equal(joined([codes(2, 3), codes(4, 3)], 0), torch.cat([codes(2, 3), codes(4, 3)]))


PADDINGS: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = [
    (((0, 0, 2, 1),), {}, (0, 0, 2, 1)),
    ((), {"pad": (0, 0, 2, 1)}, (0, 0, 2, 1)),
    (((0, 0, 2, 1), "constant", 9.0), {}, (0, 0, 2, 1)),
    (([0, 0, 0, 3, 2, 1],), {"value": 4}, (0, 0, 0, 3, 2, 1)),
    (((0, 0, -1, 3),), {}, (0, 0, -1, 3)),
]


@pytest.mark.parametrize(("args", "kwargs", "widths"), PADDINGS)
def test_padded_tokens_have_the_code_of_padding(args: tuple[Any, ...], kwargs: dict[str, Any], widths: tuple[int, ...]) -> None:
    tokens = codes(2, 3, 5, 1).expand(2, 3, 5, 4)
    found = padded(tokens, args, kwargs)
    assert torch.equal(found, F.pad(tokens, widths, value=-1))
    assert found.stride(-1) == 0
    assert torch.equal(padded(tokens.contiguous(), args, kwargs), found)


def test_padded_channels_belong_to_their_tokens() -> None:
    tokens = codes(2, 5, 1).expand(2, 5, 4)
    assert torch.equal(padded(tokens, [(3, 1)], {}), tokens[..., :1].expand(2, 5, 8))
    assert torch.equal(padded(tokens.contiguous(), [(0, 2)], {}), tokens[..., :1].expand(2, 5, 6))
    both = padded(tokens, [(3, 2, 1, 0)], {})
    assert torch.equal(both, F.pad(tokens[..., :1], (0, 0, 1, 0), value=-1).expand(2, 6, 9))
    maps = codes(2, 1, 3, 5).expand(2, 4, 3, 5)
    found = padded(maps, [(1, 2, 0, 1, 2, 5)], {})
    assert torch.equal(found, F.pad(maps[:, :1], (1, 2, 0, 1), value=-1).expand(2, 11, 4, 8))
    fewer = padded(tokens, [(-1, -2)], {})
    assert torch.equal(fewer, tokens[..., :1])
    alone = codes(2, 5, 1)
    assert torch.equal(padded(alone, [(0, 1)], {}), F.pad(alone, (0, 1), value=-1))  # it may be no channel
    assert torch.equal(padded(alone, [(0, 0, 1, 0)], {}), F.pad(alone, (0, 0, 1, 0), value=-1))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_that_repeats_tokens_repeats_their_codes(mode: str) -> None:
    maps = codes(2, 3, 4, 5)
    expected = F.pad(maps.double(), (1, 2, 0, 1), mode=mode).int()
    assert torch.equal(padded(maps, [(1, 2, 0, 1), mode], {}), expected)
    assert torch.equal(padded(maps, [(1, 2, 0, 1)], {"mode": mode}), expected)
    assert torch.equal(padded(maps, [], {"pad": (1, 2, 0, 1), "mode": mode}), expected)


def test_kernels_are_described_by_three_pairs() -> None:
    assert Geometry2d((1, 2), (3, 4), (5.0, 6.0)) == ((1, 2), (3, 4), (5, 6))


@pytest.mark.parametrize(
    ("equation", "sizes", "letters", "result"),
    [
        ("bqd,bkd->bqk", (3, 3), ["bqd", "bkd"], "bqk"),
        (" b q d , b k d -> b q k ", (3, 3), ["bqd", "bkd"], "bqk"),
        ("...qd,...kd->...qk", (4, 4), ["abqd", "abkd"], "abqk"),
        ("...qd,...kd->...qk", (4, 3), ["abqd", "bkd"], "abqk"),
        ("...qd,kd->...qk", (3, 2), ["aqd", "kd"], "aqk"),
        ("kd,q...d->...qk", (2, 4), ["kd", "qabd"], "abqk"),
        ("...ad,...bd->...ab", (3, 4), ["ead", "cebd"], "ceab"),
        ("qd,kd", (2, 2), ["qd", "kd"], "kq"),
        ("...qd,...kd", (3, 3), ["aqd", "akd"], "akq"),
        ("...,...", (2, 2), ["ab", "ab"], "ab"),
        ("...q,q", (1, 1), ["q", "q"], ""),
        ("...qd,kd->qk", (2, 2), ["qd", "kd"], "qk"),
        ("bqd->qb", (3,), ["bqd"], "qb"),
        ("a,b,c->abc", (1, 1, 1), ["a", "b", "c"], "abc"),
    ],
)
def test_equations_are_written_out(equation: str, sizes: tuple[int, ...], letters: list[str], result: str) -> None:
    operands = [torch.zeros([2] * size) for size in sizes]
    found = Equation.of([equation, *operands])
    assert found is not None
    assert (found.letters, found.result) == (letters, result)
    assert all(one is other for one, other in zip(found.operands, operands, strict=True))
    assert Equation.of([equation, operands]) is not None
    assert Equation.of([equation, tuple(operands)]) == found
    numbered = Equation.of([equation, *sizes], lambda size: size)
    assert numbered == Equation(list(sizes), letters, result)


def test_equations_in_another_form_are_unknown() -> None:
    matrix = torch.zeros(3, 3)
    assert Equation.of([]) is None
    assert Equation.of([matrix, [0, 1], matrix, [1, 2]]) is None
    assert Equation.of(["ab,bc->ac", matrix]) is None
    assert Equation.of(["ab->ab", matrix, matrix]) is None
    assert Equation.of(["aa->a", matrix]) is None  # a diagonal
    assert Equation.of(["ab,bb->ab", matrix, matrix]) is None
    assert Equation.of(["...aa->...", torch.zeros(2, 3, 3)]) is None
