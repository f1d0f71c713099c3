"""Tensors through which an output passes, found from the output back to the last attention call."""

from __future__ import annotations

import pytest
import torch

from tests.capturing.behind import BOX, OPS, SIZE, TOKENS, Chain
from visattn.core.capturing.following.cut import Cut, _are_apart, _part_in, _sources, find_cut
from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.steps import Step
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout

GRID = TokenLayout("tokens", (), (2, 3), BOX)
ANSWER = TokenLayout("pool", ("query0",), (), BOX)


def attended(chain: Chain, *more: int | None) -> Node:
    """Add an attention call, whose result is the tokens of the image."""
    result = chain.tokens()
    chain.entry([], [], int(result), *more)
    return result


def found(
    chain: Chain, *outputs: Node, layouts: tuple[TokenLayout, ...] = (GRID,), answer: TokenLayout | None = None
) -> Cut | None:
    chain.tape.output = tuple(map(int, outputs))
    return find_cut(chain.tape, 0, chain.shadows, layouts, answer)


def slots(cut: Cut | None) -> tuple[list[int], tuple[int, ...], tuple[int, ...]] | None:
    return None if cut is None else ([part.slot for part in cut.parts], cut.entries, cut.outputs)


# --- from the end to the sources


def test_sources_are_ever_earlier_tensors_that_depend_on_the_image() -> None:
    chain = Chain()
    a, b, c, d, w = (chain.tokens() for _ in range(5))
    chain.tape.descends.discard(int(w))
    for reads, out in (([w], a), ([a, w], b), ([w], c), ([b, w], d)):
        chain.entry([], reads, int(out))
    yielded = list(_sources(chain.tape, 0, [int(d)]))
    assert yielded == [({d}, (), True), ({b}, (3,), True), ({a}, (1, 3), True), (set(), (0, 1, 3), True)]
    assert list(_sources(chain.tape, 2, [int(d)])) == yielded[:2]
    assert list(_sources(chain.tape, 4, [int(d)])) == yielded[:1]
    both = list(_sources(chain.tape, 1, [int(b), int(d)]))
    assert both == [({b, d}, (), True), ({b}, (3,), True), ({a}, (1, 3), True)]


@pytest.mark.parametrize("by", ["before", "rewritten", "neither"])
def test_a_tensor_that_a_later_call_overwrites_is_not_intact(by: str) -> None:
    chain = Chain()
    a, b, c, d = (chain.tokens() for _ in range(4))
    chain.entry([], [a], int(b))
    chain.entry([], [b], int(c))
    before = (int(b) if by == "before" else None,)
    chain.entry([], [a], int(d), writes=True, before=before, rewritten=((int(b), int(d)),) if by == "rewritten" else ())
    assert list(_sources(chain.tape, 0, [int(c)])) == [({c}, (), True), ({b}, (1,), by == "neither"), ({a}, (0, 1), True)]
    chain.tape.entries[2].writes = False
    assert all(intact for *_, intact in _sources(chain.tape, 0, [int(c)]))


def test_what_a_call_rewrites_comes_from_what_it_reads() -> None:
    chain = Chain()
    a, b, c = (chain.tokens() for _ in range(3))
    chain.entry([], [a], None, rewritten=((int(b), int(c)),))
    assert list(_sources(chain.tape, 0, [int(c)]))[1][0] == {a}


# --- tensors that hold tokens apart


def test_a_part_holds_all_tokens_of_a_layout() -> None:
    chain = Chain()
    x, some = chain.tokens(), chain.tokens(chain.codes[:, :5])
    scores = chain.tokens(columns=chain.codes[..., None].expand(2, TOKENS, SIZE))
    nowhere, unknown = chain.learned(2, TOKENS, SIZE), chain.lost(2, TOKENS, SIZE)
    without = chain.learned(2, TOKENS, SIZE, columns=torch.full((2, TOKENS, SIZE), -2))

    def part(slot: int, *layouts: TokenLayout, mixed: set[int] | None = None) -> tuple[int, TokenLayout] | None:
        made = _part_in(chain.tape, chain.shadows, mixed or set(), layouts or (GRID,), slot)
        return None if made is None else (made.slot, made.layout)

    with_class = TokenLayout("tokens", ("cls",), (2, 3), BOX)
    assert part(int(x)) == (x, GRID)
    assert part(int(x), ANSWER, with_class, GRID) == (x, with_class)
    assert part(int(x), ANSWER) is None
    assert part(int(x), mixed={int(some)}) == (x, GRID)
    assert part(int(x), mixed={int(x)}) is None
    assert part(99) is None
    for node in (some, scores, nowhere, unknown, without):
        assert part(int(node)) is None
    words = chain.put(Places("learned", chain.planes.codes(chain.planes.set_of("word", 3))[..., None].expand(2, 3, SIZE)))
    given = TokenLayout("words", ("word0", "word1", "word2"), (), Box(0, 0, 12, 20))
    assert part(int(words), given) == (words, given)
    assert part(int(chain.put(chain.shadows.of(words)._replace(columns=chain.shadows.of(words).codes))), given) is None


def test_tensors_are_apart_if_no_token_is_in_two_of_them() -> None:
    chain = Chain()
    first, rest, last = chain.tokens(chain.codes[:, :2]), chain.tokens(chain.codes[:, 2:]), chain.tokens(chain.codes[:, 5:])
    assert _are_apart(chain.tape, [int(first), int(rest)], chain.shadows)
    assert not _are_apart(chain.tape, [int(rest), int(last)], chain.shadows)
    assert not _are_apart(chain.tape, [int(first), int(rest), int(last)], chain.shadows)
    assert _are_apart(chain.tape, [int(rest)], chain.shadows)


# --- the cut


def test_the_cut_is_the_last_tensor_that_holds_each_token_apart() -> None:
    chain = Chain()
    x = attended(chain)
    y = chain.call(OPS.relu.default, chain.tokens(), self=x)
    mean = chain.call(OPS.mean.dim, chain.tokens(chain.codes[:, :1]), self=y, dim=[1])
    result = chain.call(OPS.relu.default, chain.tokens(chain.codes[:, :1]), self=mean)
    assert slots(found(chain, result)) == ([y], (2, 3), (result,))
    assert slots(found(chain, result, result)) == ([y], (2, 3), (result,))
    assert slots(found(chain, y)) == ([y], (), (y,))
    assert slots(found(chain, result, y)) == ([y], (2, 3), (result,))
    assert found(chain, result, layouts=(ANSWER,)) is None
    assert found(chain, result, layouts=()) is None
    unknown = TokenLayout("unknown", (), (2, 3), BOX)
    assert found(chain, result, layouts=(unknown,)) is None
    assert found(chain) is None
    assert found(chain, chain.learned(3)) is None
    chain.tape.output = (int(result), -1, 99)
    assert slots(find_cut(chain.tape, 0, chain.shadows, (GRID,), None)) == ([y], (2, 3), (result,))


def test_the_call_behind_the_last_attention_may_mix_its_tokens() -> None:
    chain = Chain()
    x = attended(chain)
    mixed = chain.call(OPS.cumsum.default, chain.tokens(), self=x, dim=1)
    result = chain.call(OPS.relu.default, chain.tokens(), self=mixed)
    assert slots(found(chain, result)) == ([x], (1, 2), (result,))


def test_a_tensor_that_is_overwritten_later_is_no_cut() -> None:
    chain = Chain()
    x = attended(chain)
    y = chain.call(OPS.relu.default, chain.tokens(), self=x)
    mean = chain.call(OPS.mean.dim, chain.tokens(chain.codes[:, :1]), self=y, dim=[1])
    after = chain.tokens()
    entry = chain.entry([Step(OPS.relu_.default, {"self": y}, (None,), ((y, after),))], [y], None, writes=True)
    entry.rewritten = ((int(y), int(after)),)
    assert slots(found(chain, mean)) == ([x], (1, 2), (mean,))


@pytest.mark.parametrize(("count", "is_cut"), [(1, True), (2, True), (4, True), (5, False)])
def test_a_cut_has_at_most_four_tensors(count: int, is_cut: bool) -> None:
    chain = Chain()
    sizes = [(2, 3), (3, 2), (1, 4), (2, 2), (1, 5)][:count]
    chain.entry([], [], int(chain.tokens()))
    parts = [chain.tokens(chain.grid(*size)) for size in sizes]
    joined = chain.put(Places("placed", chain.codes[:, :1, None].expand(2, 1, SIZE)))
    chain.entry([], parts, int(joined))
    cut = found(chain, joined, layouts=tuple(TokenLayout("tokens", (), size, BOX) for size in sizes))
    assert slots(cut) == ((parts, (1,), (joined,)) if is_cut else None)


def test_tensors_of_one_layout_or_with_common_tokens_are_no_cut() -> None:
    chain = Chain()
    chain.entry([], [], int(chain.tokens()))
    joined = chain.put(Places("placed", chain.codes[:, :1, None].expand(2, 1, SIZE)))
    chain.entry([], [chain.tokens(), chain.tokens()], int(joined))
    assert found(chain, joined) is None


def test_a_single_query_is_the_cut_if_the_output_comes_from_it_alone() -> None:
    chain = Chain()
    answer, weights = chain.learned(2, 1, SIZE), chain.learned(2, 1, TOKENS)
    chain.tape.descends |= {int(answer), int(weights)}
    chain.entry([], [], int(answer), int(weights))
    result = chain.call(OPS.relu.default, chain.learned(2, 1, SIZE), self=answer)
    chain.tape.descends.add(int(result))
    cut = found(chain, result, answer=ANSWER)
    assert slots(cut) == ([answer], (1,), (result,))
    assert cut is not None
    assert cut.parts[0][1:] == (None, ANSWER)
    assert found(chain, result) is None
    both = chain.call(OPS.add.Tensor, chain.learned(2, 1, SIZE), self=result, other=weights)
    chain.tape.descends.add(int(both))
    assert found(chain, both, answer=ANSWER) is None
    chain.tape.entries[0].outs = (None, *chain.tape.entries[0].outs[1:])
    assert found(chain, result, answer=ANSWER) is None
