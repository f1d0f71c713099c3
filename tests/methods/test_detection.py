"""Relevance of an encoder-decoder with object queries, from pixels to a map, for a model that declares its token layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.oracles import methods as oracles
from visattn.core import families, methods
from visattn.core.geometry import Box
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout

WIDTH, OBJECTS = 16, 3
GRID = tiny.GRID


class Detector(nn.Module):
    """Detector with one encoder layer and two decoder layers, like DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, tiny.PATCH, tiny.PATCH)
        self.encoder = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.among = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.across = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.queries = nn.Parameter(torch.randn(OBJECTS, WIDTH))
        self.head = nn.Linear(WIDTH, 4)
        self.kept: list[Tensor] | None = None

    def attend(self, part: nn.Module, asking: Tensor, asked: Tensor) -> Tensor:
        """Apply attention with a residual connection, in explicit form if weights are to be kept."""
        assert isinstance(part, nn.MultiheadAttention)
        if self.kept is None:
            out: Tensor = part(asking, asked, asked, need_weights=False)[0]
            return asking + out
        projections = zip((asking, asked, asked), part.in_proj_weight.chunk(3), part.in_proj_bias.chunk(3), strict=True)
        query, key, value = (_heads(F.linear(x, w, b)) for x, w, b in projections)
        weights = (query @ key.mT / (WIDTH // 2) ** 0.5).softmax(-1)
        self.kept.append(weights)
        written: Tensor = part.out_proj((weights @ value).transpose(1, 2).flatten(2))
        return asking + written

    def forward(self, pixels: Tensor) -> Tensor:
        """Return `(B, objects, classes)` logits."""
        image = self.stem(pixels).flatten(2).mT
        image = self.attend(self.encoder, image, image)
        objects = self.queries.expand(len(pixels), -1, -1)
        for among, across in zip(self.among, self.across, strict=True):
            objects = self.attend(among, objects, objects)
            objects = self.attend(across, objects, image)
        logits: Tensor = self.head(objects)
        return logits


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 2, -1).transpose(1, 2)


@pytest.fixture
def detector() -> Iterator[Detector]:
    """Build the model, registered only during the test."""

    def describe(_model: Detector, provenance: Provenance) -> families.ModelDescription:
        def place(_owner: nn.Module, asking: int, asked: int, size: tuple[int, int]) -> tuple[str, TokenLayout, TokenLayout]:
            box = Box(0, 0, *size)
            image = TokenLayout("image", (), GRID, box)
            objects = TokenLayout("objects", tuple(f"query{i}" for i in range(OBJECTS)), (), box)
            queries, keys = (objects if count == OBJECTS else image for count in (asking, asked))
            return ("self" if asking == asked else "cross"), queries, keys

        return families.ModelDescription({}, "mean", provenance, place=place)  # type: ignore[arg-type]

    families.register(Detector)(describe)
    yield Detector().double().eval()
    del families._registered[Detector]


@pytest.mark.parametrize("query", range(OBJECTS))
def test_relevance_of_an_object_equals_the_equations(detector: Detector, query: int) -> None:
    pixels = tiny.pixels(2).double()
    with visattn.capture(detector, gradients=True) as recording:
        logits = detector(pixels)
    assert [record.kind for record in recording] == ["self", "self", "cross", "self", "cross"]
    found = methods.relevance(recording.gradients(logits[:, query, 1]), query=f"query:{query}", dtype=torch.float64)

    detector.kept = []
    again = detector(pixels)
    torch.testing.assert_close(again, logits)
    score = again[:, query, 1].sum()
    slopes = torch.autograd.grad(score, detector.kept)
    for image in range(2):
        weights, gradients = ([x[image].detach().numpy() for x in tensors] for tensors in (detector.kept, slopes))
        pairs = [("image", "image"), *[("objects", "objects"), ("objects", "image")] * 2]
        steps = [[oracles.AttentionCall(*pair, a, g)] for pair, a, g in zip(pairs, weights, gradients, strict=True)]
        expected = oracles.relevances(steps, {"image": GRID[0] * GRID[1], "objects": OBJECTS})["objects", "image"][query]
        assert expected.max() > 0
        torch.testing.assert_close(found.values[image].flatten(), torch.from_numpy(expected), atol=1e-10, rtol=1e-8)


def test_one_of_many_objects_must_be_chosen(detector: Detector) -> None:
    with visattn.capture(detector, gradients=True) as recording:
        logits = detector(tiny.pixels().double())
    with pytest.raises(visattn.VisattnError, match=r"the model has outputs for 3 queries\. Choose one: query='query:0'"):
        methods.relevance(recording.gradients(logits[:, 0, 1]))
    with pytest.raises(visattn.VisattnError, match="Use method 'attention'"):
        methods.rollout(recording)
