"""Steps of the attention of one query, against loops over keys and channels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import visattn
from tests.nn.cases import with_nonzero_parameters
from tests.nn.test_captured import NETWORKS
from visattn.core.drawing.step_pages import bars, step_page
from visattn.core.geometry import Box, Geometry
from visattn.core.methods.from_attention.attention_steps import STEPS, attention_steps
from visattn.errors import OptionError


def seen(name: str = "vit_tiny_patch16_224", size: tuple[int, int] = (48, 64), **options: Any) -> tuple[Any, visattn.Recording]:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, **options).eval()
    with torch.no_grad(), visattn.capture(model, values=True) as recording:
        model(torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1)))
    return model, recording


def entropy_of(scores: list[float]) -> float:
    powers = [math.exp(score - max(scores)) for score in scores]
    return -sum(p / sum(powers) * math.log(p / sum(powers)) for p in powers if p > 0)


@pytest.mark.parametrize("query", ["cls", "patch:1,2"])
def test_every_step_equals_loops(query: str) -> None:
    _, recording = seen()
    found = attention_steps(recording, layer=3, head=1, query=query)
    queries, keys, values = (part(3)[0, 1].double().tolist() for part in (recording.queries, recording.keys, recording.values))
    asked = queries[0 if query == "cls" else 1 + 4 + 2]
    dots = [sum(a * b for a, b in zip(asked, key, strict=True)) for key in keys]
    scores = [dot / math.sqrt(64) for dot in dots]
    powers = [math.exp(score) for score in scores]
    weights = [power / sum(powers) for power in powers]
    output = [sum(weight * value[channel] for weight, value in zip(weights, values, strict=True)) for channel in range(64)]
    length = math.sqrt(sum(x * x for x in output))
    added = [
        weight * sum(a * b for a, b in zip(value, output, strict=True)) / length
        for weight, value in zip(weights, values, strict=True)
    ]
    assert sum(added) == pytest.approx(length, rel=1e-9)
    assert found.map.labels["step"] == STEPS
    for values_of_step, expected in zip(found.map.values.flatten(1).tolist(), (dots, scores, weights, added), strict=True):
        assert values_of_step == pytest.approx(expected[1:], rel=1e-5, abs=1e-7)
    assert found.weights.tolist() == pytest.approx(weights, rel=1e-5)
    every = [[sum(a * b for a, b in zip(one, key, strict=True)) for key in keys] for one in queries]
    flat = [dot for row in every for dot in row]
    mean = sum(flat) / len(flat)
    variance = sum((dot - mean) ** 2 for dot in flat) / len(flat)
    assert found.variances == pytest.approx((variance, variance / 64), rel=1e-6)
    without = sum(entropy_of(row) for row in every) / len(every)
    with_it = sum(entropy_of([dot / 8 for dot in row]) for row in every) / len(every)
    assert found.entropies == pytest.approx((without, with_it), rel=1e-6)
    assert (found.width, found.scale) == (64, 64**-0.5)
    assert "width 64" in found.facts[0]


@pytest.mark.parametrize("name", ["window", "window shifted", "sliding window"])
def test_windows_and_biases_take_part(name: str) -> None:
    net = with_nonzero_parameters(NETWORKS[name])
    with torch.no_grad(), visattn.capture(net, values=True) as recording:
        net(torch.randn(1, 3, 20, 28, generator=torch.Generator().manual_seed(0)))
    for head in range(2):
        found = attention_steps(recording, head=head, query="patch:3,2")
        weights = recording.attention()[0, head, 3 * 7 + 2]
        torch.testing.assert_close(found.weights, weights, rtol=1e-4, atol=1e-7)
        scores = found.map.values[1].flatten()[weights > 0]
        torch.testing.assert_close(scores.softmax(0), weights[weights > 0], rtol=1e-4, atol=1e-7)
        assert found.map.values[1].isfinite().all()


class PaddedWindows(nn.Module):
    """Windows of 2 x 2 of 3 x 3 tokens: padding takes part in them, as in the image encoder of SAM, unless a mask hides it."""

    def __init__(self, *, masked: bool = False) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24)
        self.masked = masked
        self.weights: Tensor

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.pad(self.embed(x), (0, 1, 0, 1))  # (B, 8, 4, 4)
        windows = tokens.view(len(x), 8, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(4 * len(x), 1, 4, 8)
        query, key, value = self.qkv(windows).chunk(3, -1)
        mask = torch.zeros(4, 1, 4, 4)
        if self.masked:
            mask[3, :, 0] = -torch.inf  # the last window has one token, which sees nothing
        self.weights = (query @ key.mT * 0.5 + mask).softmax(-1).nan_to_num(0)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.5)
        return out.mean((1, 2))


def recorded(model: nn.Module) -> visattn.Recording:
    with torch.no_grad(), visattn.capture(model, values=True) as recording:
        model(torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0)))
    return recording


def test_padding_takes_its_part_of_the_weights() -> None:
    torch.manual_seed(0)
    model = PaddedWindows().eval()
    found = attention_steps(recorded(model), query="patch:0,2")
    row = model.weights[1, 0, 0].tolist()  # patches (0, 2) and (1, 2) are the first column of the second window
    expected = [row[0] if at == 2 else row[2] if at == 5 else 0.0 for at in range(9)]
    assert found.weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert found.padding == pytest.approx(row[1] + row[3], abs=1e-6)
    assert found.hidden == 7
    assert found.facts[2:] == (
        "7 keys that the query cannot see are drawn with the lowest dot product and score of the others",
        f"{found.padding:.3g} of the query's weight lies on padding",
    )
    entropies = []
    for window, real in enumerate([(0, 1, 2, 3), (0, 2), (0, 1), (0,)]):
        for token in real:
            weights = model.weights[window, 0, token].tolist()
            seen_keys = [weights[key] for key in real] + [1 - sum(weights[key] for key in real)]
            entropies.append(-sum(w * math.log(w) for w in seen_keys if w > 0))
    assert found.entropies[1] == pytest.approx(sum(entropies) / 9, abs=1e-5)


def test_a_query_that_sees_nothing_has_no_weights() -> None:
    torch.manual_seed(0)
    found = attention_steps(recorded(PaddedWindows(masked=True).eval()), query="patch:2,2")
    assert found.hidden == 9
    assert found.weights.tolist() == [0] * 9
    assert found.map.values.abs().sum() == 0
    assert math.isfinite(found.entropies[1])
    assert found.padding == 0


def test_a_model_that_scales_its_queries_itself_is_told() -> None:
    class Scaled(PaddedWindows):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(self.embed(x).flatten(2).mT)[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(query * 8**-0.5, key, value, scale=1.0).mean((1, 2))

    facts = attention_steps(recorded(Scaled().eval()), query="patch:1,1").facts
    assert facts[0].endswith("of the dot products (width 8); a scale would be part of the queries")
    assert "without the scale" not in facts[1]


def test_the_scale_of_independent_entries_gives_scores_of_variance_one() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 3 * 256, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.embed(x).flatten(2).mT[:, None].chunk(3, -1)
            noise = torch.randn(2, 1, 1, query.shape[2], 256, generator=torch.Generator().manual_seed(0))
            out = F.scaled_dot_product_attention(query * 0 + noise[0], key * 0 + noise[1], value)
            return out.mean((1, 2))

    model = Alone().eval()
    with torch.no_grad(), visattn.capture(model, values=True) as recording:
        model(torch.randn(1, 3, 64, 64))
    found = attention_steps(recording, layer=0, query="patch:0,0")
    assert found.variances == pytest.approx((256, 1), rel=0.05)
    assert found.entropies[0] < 0.5 < 5 < found.entropies[1]


def test_what_has_no_steps_is_refused_in_one_line() -> None:
    model, recording = seen()
    with pytest.raises(OptionError, match=r"head must lie in \[-3, 2\], got 3"):
        attention_steps(recording, head=3, query="cls")
    with pytest.raises(OptionError, match=r"steps are those of one query token, and 'mean' stands for 12\. Choose one, such as"):
        attention_steps(recording, query="mean")
    with torch.no_grad(), visattn.capture(model) as without:
        model(torch.randn(1, 3, 48, 64))
    with pytest.raises(OptionError, match="values were not kept"):
        attention_steps(without, query="cls")
    with torch.no_grad(), visattn.capture(model, values=True) as several:
        model(torch.randn(2, 3, 48, 64))
    with pytest.raises(OptionError, match="steps are those of one image, got 2"):
        attention_steps(several, query="cls")
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad(), visattn.capture(model, values=True) as written_out:
        model(torch.randn(1, 3, 48, 64))
    with pytest.raises(
        OptionError, match=r"blocks.11.attn writes its attention out, so the scale is part of its queries or scores"
    ):
        attention_steps(written_out, query="cls")


def test_bars_are_as_high_as_their_values() -> None:
    values = torch.tensor([0.5, 1.0, 0.0, 0.25]).numpy()
    picture = bars(values, (40, 100), 1)
    heights = [
        sum(picture.getpixel((10 * number + 5, y)) == color for y in range(100))
        for number, color in enumerate(((213, 94, 0), (0, 114, 178), (0, 114, 178), (0, 114, 178)))
    ]
    assert heights[1] > 70
    assert heights[0] == pytest.approx(heights[1] / 2, abs=1)
    assert heights[3] == pytest.approx(heights[1] / 4, abs=1)
    assert heights[2] <= 1


def test_the_page_holds_a_panel_for_each_step_and_its_provenance() -> None:
    photo = visattn.load_image(visattn.data.photo_path("coffee")).resize((64, 48))
    _, recording = seen()
    geometry = Geometry((48, 64), (48, 64), Box(0, 0, 48, 64))
    found = attention_steps(recording, layer=2, query="patch:0,3")
    page = step_page(photo, found.map, geometry, found.weights.numpy(), panel=100, title="steps", notes=found.facts)
    assert page.provenance.parameters["query"] == "patch:0,3"
    whole, starts = np.asarray(page).astype(int), []
    for number in range(len(STEPS)):
        values = found.map.values.clone()
        values[number] = values[number].flip(0, 1)
        other = step_page(photo, replace(found.map, values=values), geometry, found.weights.numpy(), panel=100, title="steps")
        starts.append(changed_columns(whole, np.asarray(other)))
    bars_alone = step_page(photo, found.map, geometry, found.weights.numpy()[::-1], panel=100, title="steps")
    starts.append(changed_columns(whole, np.asarray(bars_alone)))
    for first, last in starts:
        assert last - first < 100
    columns = [first // 108 for first, _ in starts]  # a panel and a gap
    assert columns == [0, 1, 2, 3, 4]


def test_the_ring_stands_on_the_query() -> None:
    """Check the distance of the rings of two queries, on a photo that is shown in its own size."""
    _, recording = seen()
    photo, geometry = Image.new("RGB", (128, 96)), Geometry((96, 128), (48, 64), Box(0, 0, 96, 128))

    def middle(query: str) -> tuple[float, float]:
        found = attention_steps(recording, layer=2, query=query)
        without = replace(found.map, facts=replace(found.map.facts, query_at=()))
        pages = (
            np.asarray(step_page(photo, shown, geometry, found.weights.numpy(), panel=128, title=""))
            for shown in (found.map, without)
        )
        page, other = (page[:140, :140] for page in pages)  # the first panel
        rows, columns = np.nonzero((page != other).any(-1))
        return (rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2

    (top, left), (bottom, right) = middle("patch:0,0"), middle("patch:2,2")
    assert (bottom - top, right - left) == pytest.approx((64, 64), abs=2)  # two patches of 16, twice as large on the photo


def changed_columns(page: Any, other: Any) -> tuple[int, int]:
    """Return the first and the last column of pixels that differ above the lines of text below the panels."""
    height = 120
    columns = np.nonzero((page[:height] != other[:height]).any((0, 2)))[0]
    return int(columns[0]), int(columns[-1])
