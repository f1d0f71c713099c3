"""Tokens that lie nowhere in the image are told apart: object queries, words, latents, repeated class tokens.

The checks change one parameter row, one word or the pixels of one cell, and compare which rows or columns of the recorded calls change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.capturing.moving import GRID, PATCH, WIDTH, Moving, image, see
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import AttentionRecord
from visattn.errors import OptionError

WORDS = 5


def attended(written: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with one head, by one fused call or written out."""
    if written:
        return (query @ key.mT / WIDTH**0.5).softmax(-1) @ value  # type: ignore[no-any-return]
    return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]


class Decoder(Moving):
    """Two layers in which object queries attend to each other and then to the patches, as in DETR."""

    def __init__(self, written: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.query_embed = nn.Embedding(4, WIDTH)
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        place = self.query_embed.weight[None].repeat(len(x), 1, 1)
        q = torch.zeros_like(place)
        for _ in range(2):
            q = q + attended(self.written, q + place, q + place, q)
            q = self.norm(q + attended(self.written, self.part(q + place), t, t))
        return q


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("written", [False, True])
def test_object_queries_are_one_set_through_all_layers(written: bool, batch: int) -> None:
    recording = see(Decoder(written), image(batch=batch))
    names = tuple(f"query{i}" for i in range(4))
    assert [(record.kind, record.reason) for record in recording] == [("self", None), ("pool", None)] * 2
    assert all(record.queries.prefix == names and record.queries == recording[0].queries for record in recording)
    assert [record.keys.grid for record in recording] == [(), GRID, (), GRID]
    assert all(record.operator.shape[:2] == (batch, 1) for record in recording)
    assert [record.follows for record in recording] == [("", 0), *((record.layer, record.call) for record in recording[:3])]


@pytest.mark.parametrize("written", [False, True])
def test_a_changed_object_query_changes_its_own_row(written: bool) -> None:
    model, x = Decoder(written), image(batch=2)
    before = see(model, x)[1].operator.dense()
    with torch.no_grad():
        model.query_embed.weight[2] += 5
    after = see(model, x)[1]
    changed = (after.operator.dense() - before).abs().amax((0, 1, 3))
    assert int(changed.argmax()) == after.queries.prefix.index("query2")
    assert float(changed[2]) > 10 * float(changed[[0, 1, 3]].max())


def test_queries_with_the_batch_on_the_second_axis_are_told_apart() -> None:
    class Second(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            t = self.tokens(x)
            q = self.query_embed.weight[:, None].repeat(1, len(x), 1)  # (N, B, D)
            q = q + attended(False, q.transpose(0, 1), q.transpose(0, 1), q.transpose(0, 1)).transpose(0, 1)
            return attended(False, q.transpose(0, 1), t, t)

    first, second = see(Second(), image(batch=3))
    assert (first.kind, second.kind, second.keys.grid) == ("self", "pool", GRID)
    assert first.queries == second.queries
    assert second.follows == (first.layer, first.call)


@pytest.mark.parametrize("move", [lambda q: q.flip(1), lambda q: q.roll(1, 1), lambda q: q[:, [2, 0, 3, 1]]])
def test_queries_that_are_reordered_keep_their_names(move: Callable[[Tensor], Tensor]) -> None:
    class Reordering(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            t = self.tokens(x)
            q = self.query_embed.weight[None].repeat(len(x), 1, 1)
            q = q + attended(False, q, t, t)
            return attended(False, move(q), t, t)

    model, x = Reordering(), image()
    before = see(model, x)
    assert before[0].queries == before[1].queries
    with torch.no_grad():
        model.query_embed.weight[2] += 5
    for one, other in zip(before, see(model, x), strict=True):
        changed = (one.operator.dense() - other.operator.dense()).abs().amax((0, 1, 3))
        assert int(changed.argmax()) == one.queries.prefix.index("query2")


def test_heads_of_learned_queries_are_not_taken_for_images() -> None:
    class Heads(Moving):
        def __init__(self) -> None:
            super().__init__()
            self.latent = nn.Parameter(torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(3)))

        def forward(self, x: Tensor) -> Tensor:
            heads = self.same(self.latent).transpose(0, 1).transpose(0, 1)  # (heads, N, d), as many heads as images
            q = heads.expand(len(x), -1, -1, -1)
            return F.scaled_dot_product_attention(q, q, q)

    record = see(Heads(), image(batch=2))[0]
    own = F.softmax(Heads().latent @ Heads().latent.mT / WIDTH**0.5, -1)
    assert record.reason is not None or torch.allclose(record.operator.dense(), own.expand(2, -1, -1, -1), atol=1e-6)


class Captioner(Moving):
    """Words that attend to each other and to the patches, or one sequence of words and patches."""

    def __init__(self, joined: bool, written: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.words, self.where = nn.Embedding(20, WIDTH), nn.Embedding(200, WIDTH)
        self.joined, self.written = joined, written

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        t = self.tokens(x)
        w = self.words(input_ids) + self.where(torch.arange(input_ids.shape[1]))
        if self.joined:
            w = w.masked_scatter((input_ids == 19)[..., None], t)
            return attended(self.written, w, w, w)
        w = w + attended(self.written, w, w, w)
        return attended(self.written, self.part(w), t, t)


def words(batch: int = 1) -> Tensor:
    return torch.arange(WORDS).repeat(batch, 1)


@pytest.mark.parametrize("written", [False, True])
def test_words_attend_to_each_other_and_to_the_image(written: bool) -> None:
    model, x = Captioner(False, written), image(batch=2)
    among, across = see(model, x, words(2))
    assert (among.kind, among.keys.grid, across.kind, across.keys.grid) == ("self", (), "cross", GRID)
    assert among.queries.prefix == across.queries.prefix == tuple(f"word{i}" for i in range(WORDS))
    other = words(2)
    other[:, 3] = 11
    change = (see(model, x, other)[0].operator.dense() - among.operator.dense()).abs()[0, 0]
    assert int(change.amax(1).argmax()) == 3
    with pytest.raises(OptionError, match="its keys are other tokens"):
        visattn.methods.rollout(see(model, x, words(2)))


@pytest.mark.parametrize("batch", [1, 2])
def test_patches_among_words_keep_their_places(batch: int) -> None:
    model, cells = Captioner(True), GRID[0] * GRID[1]
    ids = torch.cat([words(batch), torch.full((batch, cells), 19), words(batch)], 1)
    x = image(batch=batch)
    record = see(model, x, ids)[0]
    assert record.queries == record.keys
    assert record.keys.grid == GRID
    assert record.keys.prefix == tuple(f"word{i}" for i in (*range(WORDS), *range(WORDS + cells, 2 * WORDS + cells)))
    lit = x.clone()
    lit[:, :, 5 * PATCH : 6 * PATCH, 7 * PATCH : 8 * PATCH] += 10
    change = (_keys(see(model, lit, ids)[0]) - _keys(record)).abs().amax((0, 2))
    assert change.nonzero().flatten().tolist() == [record.keys.patch(5, 7)]
    other = ids.clone()
    other[:, WORDS + cells + 2] = 12
    change = (_keys(see(model, x, other)[0]) - _keys(record)).abs().amax((0, 2))
    assert [record.keys.prefix[i] for i in change.nonzero().flatten().tolist()] == [f"word{WORDS + cells + 2}"]


def _keys(record: AttentionRecord) -> Tensor:
    assert isinstance(record.operator, SoftmaxOperator)
    return record.operator.keys()[:, 0]


def test_a_class_token_in_each_window_is_a_token_of_each() -> None:
    class Windows(Moving):
        def __init__(self) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(3)))

        def forward(self, x: Tensor) -> Tensor:
            t = self.tokens(x).view(len(x), *GRID, WIDTH)
            halves = t.unfold(2, GRID[1] // 2, GRID[1] // 2).permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1)
            t = torch.cat([self.cls_token.repeat(len(halves), 1, 1), halves], 1)
            return attended(False, t, t, t)

    record = see(Windows(), image(batch=2))[0]
    assert (record.kind, record.keys.prefix, record.keys.grid) == ("self", ("cls", "cls2"), GRID)
    dense = record.operator.dense()
    assert torch.allclose(dense.sum(-1), torch.ones(()))
    assert not bool(dense[:, :, 0, 1].any())  # the class tokens of two windows do not see each other


def test_a_learned_token_at_the_end_of_each_row_is_told_apart() -> None:
    class Lines(Moving):
        def __init__(self) -> None:
            super().__init__()
            self.newline = nn.Parameter(torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)))

        def forward(self, x: Tensor) -> Tensor:
            t = self.tokens(x).view(len(x), *GRID, WIDTH)
            t = torch.cat([t, self.newline.expand(len(x), GRID[0], 1, WIDTH)], 2).flatten(1, 2)
            return attended(False, t, t, t)

    record = see(Lines(), image(batch=2))[0]
    assert record.keys.prefix == tuple(f"token{i}" for i in range(GRID[0]))
    assert record.keys.grid == GRID
    assert torch.allclose(record.operator.dense().sum(-1), torch.ones(()))


class Deformable(Moving):
    """Each token reads the image at points that it computes, then all attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        points = self.part(t)[..., :8].view(len(x), -1, 4, 2).tanh()
        weights = self.part(t)[..., :4].softmax(-1)
        read = F.grid_sample(t.mT.reshape(len(x), WIDTH, *GRID), points, align_corners=False)  # (B, C, N, 4)  # type: ignore[no-untyped-call]
        t = self.norm(t + (read * weights[:, None]).sum(-1).mT)
        return attended(False, t, t, t)


def test_sampled_values_belong_to_the_token_that_chose_the_points() -> None:
    recording = see(Deformable(), image(batch=2))
    assert [(record.kind, record.keys.grid) for record in recording] == [("sampled", GRID), ("self", GRID)]
    assert recording.unseen == []
    with pytest.raises(OptionError, match="deformable attention"):
        visattn.methods.rollout(recording)


def test_tokens_chosen_from_several_grids_form_a_set() -> None:
    class TwoStage(Moving):
        def forward(self, x: Tensor) -> Tensor:
            t = self.tokens(x)
            coarse = F.avg_pool2d(t.mT.reshape(len(x), WIDTH, *GRID), 2).flatten(2).mT
            every = self.norm(torch.cat([t, coarse], 1))
            best = self.part(every)[..., 0].topk(6, 1).indices[..., None].expand(-1, -1, WIDTH)
            q = every.gather(1, best)
            q = q + attended(False, q, q, q)
            return attended(False, q, t, t)

    among, across = see(TwoStage(), image(batch=2))
    assert (among.kind, among.keys.grid, across.kind, across.keys.grid) == ("self", (), "pool", GRID)
    assert among.queries == across.queries


@pytest.mark.parametrize("arguments", [{"query": "query:2"}, {"query": "mean"}])
def test_a_map_of_an_object_query_is_its_row(arguments: dict[str, Any]) -> None:
    recording = see(Decoder(), image())
    found = visattn.methods.attention(recording, layer=-1, call=3, **arguments)
    rows = recording[-1].operator.dense()[0, 0]
    expected = rows[2] if arguments["query"] == "query:2" else rows.mean(0)
    assert torch.allclose(found.at(batch=0, head=0).values.flatten(), expected, atol=1e-6)


class Layers(nn.Module):
    """Encoder and decoder with their own names, so that layers of both can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Moving(), Decoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x) + self.encoder(x)[:, None]  # type: ignore[no-any-return]


@pytest.mark.parametrize("query", ["query:3", "object:3", "latent:3"])
def test_a_query_that_names_a_member_is_read_where_members_attend(query: str) -> None:
    recording = see(Layers(), image())
    found = visattn.methods.attention(recording, query=query, call=3)
    assert torch.allclose(found.at(batch=0, head=0).values.flatten(), recording[3].operator.dense()[0, 0, 3], atol=1e-6)


def test_a_word_is_asked_for_by_its_number_in_the_input() -> None:
    recording = see(Captioner(False), image(), words())
    found = visattn.methods.attention(recording, query="word:3", call=1)
    assert torch.allclose(found.at(batch=0, head=0).values.flatten(), recording[1].operator.dense()[0, 0, 3], atol=1e-6)
    with pytest.raises(OptionError, match="unknown query 'word:9'"):
        visattn.methods.attention(recording, query="word:9", call=1)


class TwoTexts(Moving):
    """Model whose patches attend to the words of two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        t = torch.cat([self.words(first), self.words(second), self.tokens(x)], 1)[:, None]
        return F.scaled_dot_product_attention(t, t, t).mean((1, 2))


def test_words_of_a_second_text_have_names_of_no_others() -> None:
    with torch.no_grad(), visattn.capture(model := TwoTexts().eval()) as recording:
        model(image(), torch.arange(13)[None], torch.arange(2)[None])
    assert recording[0].queries.prefix == (*(f"word{i}" for i in range(13)), "word0.2", "word1.2")


class Contents(Decoder):
    """Decoder whose queries attend to each other by a layer of their content plus their place, as in Conditional DETR."""

    def __init__(self, content: Callable[[Tensor], Tensor], written: bool) -> None:
        super().__init__(written)
        self.content = content

    def forward(self, x: Tensor) -> Tensor:
        place = self.query_embed.weight[None].repeat(len(x), 1, 1)
        q = self.part(self.content(place)) + self.part(place)
        return attended(self.written, q, q, self.content(place)) + 0 * self.tokens(x).sum()


def check_row_of_a_changed_query(model: Any, x: Tensor) -> None:
    """Check that four object queries keep their names, and that a change of one of them changes its own row the most."""
    (before,) = see(model, x)
    assert (before.kind, before.queries.prefix) == ("self", tuple(f"query{i}" for i in range(4)))
    with torch.no_grad():
        model.query_embed.weight[2] += 5
    (after,) = see(model, x)
    changed = (after.operator.dense() - before.operator.dense()).abs().amax((0, 1, 3))
    assert int(changed.argmax()) == before.queries.prefix.index("query2")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("written", [False, True])
def test_queries_that_begin_with_zeros_are_told_apart_by_their_places(written: bool, batch: int) -> None:
    model, x = Contents(torch.zeros_like, written), image(batch=batch)
    check_row_of_a_changed_query(model, x)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        lambda place: torch.zeros_like(place) + place[:, :1],
        lambda place: torch.zeros_like(place).add_(place[:, 3:]),
        lambda place: torch.zeros_like(place).copy_(place[:, 3:]),
    ],
)
def test_queries_that_begin_with_one_of_them_are_refused(content: Callable[[Tensor], Tensor], written: bool) -> None:
    (record,) = see(Contents(content, written), image(batch=2))
    assert record.kind == "unplaced"


def inverse(order: Tensor, put: Callable[[Tensor, Tensor, Tensor], Any]) -> Tensor:
    """Write the numbers of places into memory that was never written, as routers of experts do."""
    made = torch.empty_like(order)
    put(made, order, torch.arange(len(order)))
    return made % len(order)


PUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "index": lambda made, order, numbers: made.__setitem__(order, numbers),
    "scatter": lambda made, order, numbers: made.scatter_(0, order, numbers),
    "index_copy": lambda made, order, numbers: made.index_copy_(0, order, numbers),
    "mask": lambda made, order, numbers: made.__setitem__(torch.ones_like(order, dtype=torch.bool), numbers[order]),
}
PARTIAL: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "one twice": lambda made, order, numbers: made.__setitem__(order.clamp(max=2), numbers),
    "all but one": lambda made, order, numbers: made.__setitem__(order[1:], numbers[1:]),
    "added": lambda made, order, numbers: made.index_put_((order,), numbers, accumulate=True),
    "scattered and added": lambda made, order, numbers: made.scatter_add_(0, order, numbers),
}


def reordering(put: Callable[[Tensor, Tensor, Tensor], Any]) -> Decoder:
    class Reordering(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            q = self.query_embed.weight[inverse(torch.tensor([2, 0, 3, 1]), put)].expand(len(x), -1, -1)
            return attended(False, q, q, q) + 0 * self.tokens(x).sum()

    return Reordering()


@pytest.mark.parametrize("name", PUTS)
def test_an_index_that_was_written_as_a_whole_keeps_names(name: str) -> None:
    model, x = reordering(PUTS[name]), image(batch=2)
    check_row_of_a_changed_query(model, x)


@pytest.mark.parametrize("name", PARTIAL)
def test_an_index_of_which_something_was_never_written_is_refused(name: str) -> None:
    (record,) = see(reordering(PARTIAL[name]), image(batch=2))
    assert record.kind == "unplaced"
