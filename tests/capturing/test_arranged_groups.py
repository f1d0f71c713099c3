"""Images, heads, windows and tokens of attention calls, found from the position codes of queries and keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.tokens.arrangement import Arrangement, arrange, arrange_tokens, channels, token_names, unplaced
from visattn.core.capturing.tokens.planes import PADDING, Planes
from visattn.core.capturing.tokens.points import Drift, Points
from visattn.core.capturing.tokens.refusals import Unplaced, WithoutImage
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout

BOX = Box(0.0, 0.0, 12.0, 20.0)
LAYOUT = TokenLayout("tokens", ("cls",), (2, 3), BOX)
QUERIES, KEYS, SIZE = 5, 7, 4


class Scene:
    """Two images of two by three patches, with a class token each."""

    def __init__(self, images: int = 2) -> None:
        self.planes = Planes(images, (12, 20), torch.device("cpu"))
        self.cls = self.planes.codes(self.planes.set_of("cls_token"))
        self.grid = self.planes.codes(self.planes.grid(2, 3, BOX))
        self.patches = self.grid.flatten(1)
        self.tokens = torch.cat([self.cls, self.patches], 1)  # (2, 7)

    def self(self, tokens: Tensor, *lead: int) -> Arrangement:
        """Arrange tokens `(*lead, N)` that attend to each other."""
        return arrange(self.planes, tokens, tokens, lead, tokens.shape[-1])


def vectors(lead: tuple[int, ...], tokens: int = QUERIES) -> Tensor:
    return torch.randn(*lead, tokens, SIZE)


def refused(scene: Scene, queries: Tensor | None, keys: Tensor, lead: tuple[int, ...], rows: int) -> Unplaced:
    with pytest.raises(Unplaced) as caught:
        arrange(scene.planes, queries, keys, lead, rows)
    return caught.value


ORDERS = {
    "heads first": torch.arange(30).view(2, 3, 5),
    "windows first": torch.arange(30).view(2, 5, 3).transpose(1, 2),
    "images last": torch.arange(30).view(3, 5, 2).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_operands_are_taken_in_the_order_of_images_heads_and_windows(name: str) -> None:
    order, index = ORDERS[name], torch.arange(QUERIES).expand(5, QUERIES)
    tensor = vectors((30,))
    windows = Arrangement("self", LAYOUT, LAYOUT, order, index, index)
    expected = torch.stack([torch.stack([torch.stack([tensor[i] for i in row]) for row in image]) for image in order])
    assert torch.equal(windows.take(tensor), expected)
    assert torch.equal(windows.take(tensor.view(6, 5, QUERIES, SIZE)), expected)
    without = Arrangement("self", LAYOUT, LAYOUT, order)
    assert torch.equal(without.take(tensor), expected[:, :, 0])
    plain = Arrangement("self", LAYOUT, LAYOUT)
    assert plain.take(tensor) is tensor


@pytest.mark.parametrize("name", ORDERS)
def test_shared_axes_of_a_bias_keep_size_one(name: str) -> None:
    order, index = ORDERS[name], torch.arange(QUERIES).expand(5, QUERIES)
    windows, lead = Arrangement("self", LAYOUT, LAYOUT, order, index, index), (30,)
    scores = torch.randn(30, QUERIES, KEYS)
    assert torch.equal(windows.take_bias(scores, lead), scores[order])
    of_all = windows.take_bias(scores[0], lead)
    assert torch.equal(of_all, scores[:1, None, None])
    for axes, sizes in (((1, 2), (1, 3, 5)), ((0, 2), (2, 1, 5)), ((0, 1), (2, 3, 1)), ((1,), (1, 3, 1))):
        bias = torch.randn(sizes)[..., None, None].expand(2, 3, 5, QUERIES, KEYS)
        flat = torch.empty(30, QUERIES, KEYS)
        flat[order.flatten()] = bias.flatten(0, 2)
        assert torch.equal(windows.take_bias(flat, lead).expand(2, 3, 5, QUERIES, KEYS), bias), axes
    without = Arrangement("self", LAYOUT, LAYOUT, order)
    assert torch.equal(without.take_bias(scores, lead), scores[order[:, :, 0]])


def test_a_bias_of_fewer_axes_is_shared_along_the_others() -> None:
    order = torch.arange(6).view(2, 3, 1)
    arranged = Arrangement("self", LAYOUT, LAYOUT, order)
    for_heads = torch.randn(3, QUERIES, KEYS)
    assert torch.equal(arranged.take_bias(for_heads, (2, 3)), for_heads[None])
    for_images = torch.randn(2, 1, QUERIES, KEYS)
    assert torch.equal(arranged.take_bias(for_images, (2, 3)), for_images)
    for_keys = torch.randn(KEYS)
    assert torch.equal(arranged.take_bias(for_keys[None], (2, 3)), for_keys[None, None, None])
    plain = Arrangement("self", LAYOUT, LAYOUT)
    assert torch.equal(plain.take_bias(for_heads, (2, 3)), for_heads[None])
    assert torch.equal(plain.take_bias(torch.ones(1, KEYS), (2, 3)), torch.ones(1, 1, 1, KEYS))


def test_the_reason_says_how_far_values_drifted() -> None:
    points = Points(torch.zeros(1))
    points.distance = 3.0
    drift = Drift(torch.inf, frozenset({points}))
    refused = Arrangement("unplaced", LAYOUT, LAYOUT, reason="it moved")
    assert refused.why == "it moved"
    assert Arrangement("unplaced", LAYOUT, LAYOUT, reason="it moved", drift=drift).why == "it moved, up to 3.0 cells away"
    assert Arrangement("self", LAYOUT, LAYOUT, drift=drift).why is None
    apart = refused.apart()
    assert (apart.queries.space, apart.keys.space, apart.keys.grid, apart.reason) == ("apart", "apart", (2, 3), "it moved")


def test_unknown_tokens_are_numbered() -> None:
    found = unplaced((2, 3, 4), 2, 3, BOX, "why")
    assert found.queries == TokenLayout("unknown", ("token0", "token1"), (), BOX)
    assert found.keys == TokenLayout("unknown", ("token0", "token1", "token2"), (), BOX)
    assert found.order is not None
    assert torch.equal(found.order, torch.arange(24).view(2, 12, 1))
    assert (found.kind, found.reason, found.drift, found.query_index, found.key_index) == ("unplaced", "why", None, None, None)
    alone = unplaced((), 1, 1, BOX, "")
    assert alone.order is not None
    assert alone.order.tolist() == [[[0]]]


def test_channels_that_attend_are_numbered() -> None:
    found = channels((6,), 2, 3, BOX, 2)
    assert found.queries == TokenLayout("channels", ("channel0", "channel1"), (), BOX)
    assert found.keys == TokenLayout("channels", ("channel0", "channel1", "channel2"), (), BOX)
    assert found.order is not None
    assert found.order.tolist() == [[[0], [1], [2]], [[3], [4], [5]]]
    assert (found.kind, found.reason) == ("channel", None)
    with pytest.raises(Unplaced, match="the channels of several images are mixed"):
        channels((5,), 2, 3, BOX, 2)


def test_tokens_in_order_need_no_order() -> None:
    scene = Scene()
    found = scene.self(scene.tokens[:, None].expand(2, 3, 7), 2, 3)
    assert (found.kind, found.queries, found.keys) == ("self", LAYOUT, LAYOUT)
    assert (found.order, found.query_index, found.key_index, found.reason) == (None, None, None, None)


def test_heads_may_be_folded_into_the_batch() -> None:
    scene = Scene()
    folded = scene.self(scene.tokens.repeat_interleave(3, 0), 6)
    assert folded.order is not None
    assert folded.order.tolist() == [[[0], [1], [2]], [[3], [4], [5]]]
    assert (folded.query_index, folded.key_index) == (None, None)
    heads_first = scene.self(scene.tokens.expand(3, 2, 7), 3, 2)
    assert heads_first.order is not None
    assert heads_first.order.tolist() == [[[0], [2], [4]], [[1], [3], [5]]]
    one = Scene(1)
    of_one_image = one.self(one.tokens.expand(3, 1, 7), 3, 1)
    assert of_one_image.order is not None
    assert of_one_image.order.tolist() == [[[0], [1], [2]]]
    split = scene.self(scene.tokens[:, None, None].expand(2, 3, 1, 7), 2, 3, 1)
    assert split.order is not None
    assert split.order.tolist() == folded.order.tolist()


def test_windows_hold_some_tokens_each() -> None:
    scene = Scene()
    rows = scene.grid[:, :, None].expand(2, 2, 3, 3).flatten(0, 1)  # each window has one row of patches, in three heads
    found = scene.self(rows, 4, 3)
    assert found.order is not None
    assert found.order.tolist() == [[[0, 3], [1, 4], [2, 5]], [[6, 9], [7, 10], [8, 11]]]
    assert found.query_index is not None
    assert found.key_index is not None
    assert found.query_index.tolist() == found.key_index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (found.kind, found.keys) == ("self", TokenLayout("tokens", (), (2, 3), BOX))


def test_padding_in_windows_is_no_token() -> None:
    scene = Scene()
    columns = scene.grid.mT.contiguous()  # three windows of two
    padded = torch.nn.functional.pad(columns, (0, 1), value=PADDING).view(6, 1, 3)
    found = scene.self(padded, 6, 1)
    assert found.key_index is not None
    assert found.key_index.tolist() == [[0, 3, -1], [1, 4, -1], [2, 5, -1]]
    empty = torch.full((6, 1, 3), PADDING, dtype=torch.int32)
    assert str(refused(scene, empty, empty, (6, 1), 3)) == "a window holds nothing but padding"


def test_shuffled_tokens_have_an_index() -> None:
    scene = Scene()
    shuffled = scene.tokens[:, torch.tensor([3, 0, 1, 6, 2, 4, 5])]
    found = arrange(scene.planes, scene.tokens[:, None], shuffled[:, None], (2, 1), 7)
    assert found.order is not None
    assert found.query_index is not None
    assert found.key_index is not None
    assert (found.order.tolist(), found.query_index.tolist()) == ([[[0]], [[1]]], [[0, 1, 2, 3, 4, 5, 6]])
    assert found.key_index.tolist() == [[3, 0, 1, 6, 2, 4, 5]]
    assert (found.kind, found.queries, found.keys) == ("self", LAYOUT, LAYOUT)
    other = arrange(scene.planes, shuffled[:, None], scene.tokens[:, None], (2, 1), 7)
    assert other.query_index is not None
    assert other.query_index.tolist() == [[3, 0, 1, 6, 2, 4, 5]]


def test_dropped_tokens_leave_holes_or_a_smaller_grid() -> None:
    scene = Scene()
    found = scene.self(scene.tokens[:, None, [0, 1, 3, 5]], 2, 1)
    assert found.keys == TokenLayout("tokens", ("cls",), (2, 3), BOX, (1, 3, 5))
    holed = scene.self(scene.tokens[:, None, [0, 6, 1]], 2, 1)
    assert holed.key_index is not None
    assert holed.key_index.tolist() == [[0, 2, 1]]
    assert holed.keys == TokenLayout("tokens", ("cls",), (2, 3), BOX, (1, 2, 3, 4))
    smaller = scene.self(scene.tokens[:, None, [0, 2, 3, 5, 6]], 2, 1)
    assert smaller.keys == TokenLayout("tokens", ("cls",), (2, 2), Box(0, 20 / 3, 12, 20))


def test_one_cell_for_the_image_is_a_grid_of_its_own() -> None:
    scene = Scene()
    whole = scene.planes.codes(scene.planes.grid(1, 1, BOX)).flatten(1)
    alone = scene.self(whole[:, None], 2, 1)
    assert alone.keys == TokenLayout("tokens", (), (1, 1), BOX)
    with_patches = scene.self(torch.cat([whole, scene.patches], 1)[:, None], 2, 1)
    assert with_patches.keys == TokenLayout("tokens", ("mean",), (2, 3), BOX)
    both = torch.cat([scene.cls, whole], 1)[:, None]
    assert scene.self(both, 2, 1).keys.grid == ()


def test_the_first_code_may_be_that_of_the_whole_image() -> None:
    planes = Planes(2, (12, 20), torch.device("cpu"))
    whole = planes.codes(planes.grid(1, 1, BOX)).flatten(1)
    tokens = torch.cat([whole, planes.codes(planes.grid(2, 3, BOX)).flatten(1)], 1)[:, None]
    found = arrange(planes, tokens, tokens, (2, 1), 7)
    assert (found.keys, found.key_index) == (TokenLayout("tokens", ("mean",), (2, 3), BOX), None)


def test_learned_queries_pool_the_image() -> None:
    scene = Scene()
    found = arrange(scene.planes, None, scene.tokens[:, None], (2, 1), 3)
    assert (found.kind, found.keys) == ("pool", LAYOUT)
    assert found.queries == TokenLayout("pool", ("query0", "query1", "query2"), (), BOX)
    assert (found.order, found.query_index) == (None, None)
    windows = scene.grid.view(4, 1, 3)
    assert str(refused(scene, None, windows, (4, 1), 3)) == "learned queries attend within windows"
    words = scene.planes.codes(scene.planes.set_of("word#0", 4))[:, None]
    assert arrange(scene.planes, None, words, (2, 1), 3).kind == "cross"


def test_sets_that_ask_pool_the_image_unless_they_are_words() -> None:
    scene = Scene()
    queries = scene.planes.codes(scene.planes.set_of("query_embed", 3))[:, None]
    words = scene.planes.codes(scene.planes.set_of("word#0", 4))[:, None]
    pooled = arrange(scene.planes, queries, scene.tokens[:, None], (2, 1), 3)
    assert (pooled.kind, pooled.queries) == ("pool", TokenLayout("pool", ("query0", "query1", "query2"), (), BOX))
    asked = arrange(scene.planes, words, scene.tokens[:, None], (2, 1), 4)
    assert (asked.kind, asked.queries) == ("cross", TokenLayout("words", ("word0", "word1", "word2", "word3"), (), BOX))
    answered = arrange(scene.planes, scene.tokens[:, None], words, (2, 1), 7)
    assert (answered.kind, answered.queries, answered.keys.space) == ("cross", LAYOUT, "words")
    both = arrange(scene.planes, torch.cat([words, queries], 2), scene.tokens[:, None], (2, 1), 7)
    assert (both.queries.space, both.queries.prefix[3:5]) == ("pool", ("word3", "query0"))
    other = scene.planes.codes(scene.planes.set_of("query_other", 3))[:, None]
    assert arrange(scene.planes, queries, queries, (2, 1), 3).kind == "self"
    assert arrange(scene.planes, queries, other, (2, 1), 3).kind == "cross"  # the same names
    repeated = queries.expand(2, 2, 3).reshape(4, 1, 3)
    assert refused(scene, repeated, scene.grid.view(4, 1, 3), (4, 1), 3).args == ("learned queries attend within windows",)


def test_queries_that_no_image_reached_are_given_to_the_images() -> None:
    scene = Scene()
    members = scene.planes.members(scene.planes.set_of("query", 3))
    found = arrange(scene.planes, members.expand(2, 1, 3), members.expand(2, 1, 3), (2, 1), 3)
    assert (found.kind, found.queries.prefix, found.order) == ("self", ("query0", "query1", "query2"), None)
    folded = members.expand(6, 3)
    assert isinstance(refused(scene, folded, folded, (6,), 3), WithoutImage)
    asked = arrange(scene.planes, members.expand(6, 3), scene.tokens.repeat_interleave(3, 0), (6,), 3)
    assert asked.order is not None
    assert asked.order.tolist() == [[[0], [1], [2]], [[3], [4], [5]]]


def test_groups_without_one_image_each_are_refused() -> None:
    scene = Scene()
    mixed = scene.tokens.clone()[:, None]
    mixed[1, 0, 5] = scene.tokens[0, 5]
    assert str(refused(scene, mixed, mixed, (2, 1), 7)) == "tokens of several images attend to each other"
    first = scene.tokens[:1].expand(2, 7)[:, None]
    assert str(refused(scene, first, first, (2, 1), 7)) == "it holds only some images of the batch"
    uneven = torch.cat([scene.tokens, scene.tokens[:1]])[:, None]
    assert "arranged differently" in str(refused(scene, uneven, uneven, (3, 1), 7))
    of_windows = torch.cat([scene.grid.flatten(0, 1), scene.grid[1:, 0]])[:, None]
    assert "or its windows, are arranged differently" in str(refused(scene, of_windows, of_windows, (5, 1), 3))
    sets = scene.planes.codes(scene.planes.set_of("query", 3))
    exchanged = sets.flip(0)[:, None]
    assert str(refused(scene, exchanged, exchanged, (2, 1), 3)) == "the images of the batch are arranged differently"


def test_members_that_met_another_image_are_refused() -> None:
    scene = Scene()
    queries = scene.planes.set_of("query", 3)
    mixed = torch.stack([scene.planes.members(queries), scene.planes.codes(queries)[0]])[:, None]
    assert str(refused(scene, mixed, mixed, (2, 1), 3)) == "the images of the batch are arranged differently"


def test_images_must_be_arranged_alike() -> None:
    scene = Scene()
    exchanged = scene.tokens.clone()
    exchanged[1, 2:4] = exchanged[1, 2:4].flip(0)
    reason = refused(scene, exchanged[:, None], exchanged[:, None], (2, 1), 7)
    assert str(reason) == "the images of the batch are arranged differently"
    sets = scene.planes.codes(scene.planes.set_of("query", 3)).clone()
    sets[1] = sets[1].flip(0)
    tokens = torch.cat([sets, scene.patches], 1)[:, None]
    reason = refused(scene, tokens, tokens, (2, 1), 9)
    assert str(reason) == "tokens that lie nowhere in the image cannot be matched with the images"


def test_tokens_that_lie_twice_are_refused() -> None:
    scene = Scene()
    twice = torch.cat([scene.patches, scene.patches[:, :1]], 1)[:, None]
    reason = refused(scene, scene.patches[:, None], twice, (2, 1), 6)
    assert (str(reason), reason.of_places, reason.drift) == ("a token occurs several times", True, None)
    reason = refused(scene, twice, scene.patches[:, None], (2, 1), 7)
    assert (str(reason), reason.of_places) == ("a token is a query in several windows", True)
    other = scene.planes.codes(scene.planes.grid(1, 2, BOX)).flatten(1)
    both = torch.cat([scene.patches, other], 1)[:, None]
    reason = refused(scene, both, both, (2, 1), 8)
    assert str(reason) == "tokens of several grids attend together: 2 x 3 and 1 x 2"
    assert not reason.of_places


def test_class_tokens_of_several_windows_are_told_apart() -> None:
    scene = Scene()
    rows = torch.cat([scene.cls[:, None].expand(2, 2, 1), scene.grid], 2).flatten(0, 1)[:, None]
    found = scene.self(rows, 4, 1)
    assert found.keys == TokenLayout("tokens", ("cls", "cls2"), (2, 3), BOX)
    assert found.key_index is not None
    assert found.key_index.tolist() == [[0, 2, 3, 4], [1, 5, 6, 7]]


def test_sets_come_in_the_order_of_their_first_tokens() -> None:
    scene = Scene()
    register = scene.planes.codes(scene.planes.set_of("register_tokens", 2))
    tokens = torch.cat([scene.patches, register.flip(1), scene.cls], 1)[:, None]
    found = scene.self(tokens, 2, 1)
    assert found.keys == TokenLayout("tokens", ("register0", "register1", "cls"), (2, 3), BOX)
    assert found.key_index is not None
    assert found.key_index.tolist() == [[3, 4, 5, 6, 7, 8, 1, 0, 2]]


def test_tokens_are_named_after_their_parameters() -> None:
    planes = Planes(2, (12, 20), torch.device("cpu"))
    names = ("cls_token", "Class_Embedding", "dist_token", "reg_token", "storage_tokens", "mask", "object_queries", "detection")
    sets = [planes.set_of(name, 2) for name in names]
    words = [planes.set_of(name, 2) for name in ("word#0", "word#1", "foreign text")]
    codes = [planes.grid(1, 1, BOX).base, *(plane.base + member for plane in sets + words for member in (1, 0))]
    assert token_names(planes, torch.tensor(codes)) == (
        *("mean", "cls", "cls2", "cls3", "cls4", "distillation", "distillation2"),
        *("register0", "register1", "register2", "register3", "token0", "token1"),
        *("query0", "query1", "query2", "query3", "word1", "word0", "word3", "word2", "foreign0", "foreign1"),
    )
    assert token_names(planes, torch.tensor(codes[11:13]), "query") == ("query0", "query1")
    twice = torch.tensor([words[0].base, words[0].base, words[0].base])
    assert token_names(planes, twice) == ("word0", "word0.2", "word0.3")


def test_activations_are_arranged_along_either_axis_of_channels() -> None:
    scene = Scene()
    activation = torch.randn(2, 7, SIZE)
    found = arrange_tokens(scene.planes, scene.tokens[:, :, None].expand(2, 7, SIZE))
    assert found is not None
    assert (found.layout, found.channels, found.order) == (LAYOUT, 2, None)
    assert torch.equal(found.take(activation), activation)
    first = arrange_tokens(scene.planes, scene.grid[:, None].expand(2, SIZE, 2, 3))
    assert first is not None
    assert (first.layout.grid, first.channels, first.order) == ((2, 3), 1, None)
    image = torch.randn(2, SIZE, 2, 3)
    assert torch.equal(first.take(image), image.flatten(2).mT)
    assert first.maps(image) is not image
    assert torch.equal(first.maps(image), image)
    last = arrange_tokens(scene.planes, scene.grid[..., None].expand(2, 2, 3, SIZE))
    assert last is not None
    assert last.channels == 3
    assert torch.equal(last.maps(image.permute(0, 2, 3, 1)), image)
    assert torch.equal(last.take(image.permute(0, 2, 3, 1)), image.flatten(2).mT)


def test_shuffled_activations_are_put_in_order() -> None:
    scene = Scene()
    at = torch.tensor([3, 0, 1, 6, 2, 4, 5])
    found = arrange_tokens(scene.planes, scene.tokens[:, at, None].expand(2, 7, SIZE))
    assert found is not None
    activation = torch.randn(2, 7, SIZE)
    assert torch.equal(found.take(activation[:, at]), activation)


def test_activations_that_are_no_complete_layout_are_not_arranged() -> None:
    scene = Scene()
    codes = scene.tokens[:, :, None].expand(2, 7, SIZE)
    assert arrange_tokens(scene.planes, codes[:1]) is None
    assert arrange_tokens(scene.planes, codes[..., 0]) is None
    assert arrange_tokens(scene.planes, codes[:, None, None]) is None
    assert arrange_tokens(scene.planes, torch.cat([codes, codes[:, 1:2]], 1)) is None
    padded = torch.nn.functional.pad(codes, (0, 0, 0, 1), value=PADDING)
    assert arrange_tokens(scene.planes, padded) is None
    mixed = codes.clone()
    mixed[1, 6, 2] = 1
    assert arrange_tokens(scene.planes, mixed) is None
    holed = arrange_tokens(scene.planes, codes[:, :6])
    assert holed is not None
    assert holed.layout == TokenLayout("tokens", ("cls",), (2, 3), BOX, (5,))
