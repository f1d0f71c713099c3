"""Effects of heads on a score: direct contributions beside an own computation by hooks, and losses beside interventions one by one."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import visattn
from visattn.core.pipeline.inputs import prepare
from visattn.evaluation import HeadEffects, head_effects

HEADS, DEPTH = 3, 3


@cache
def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=DEPTH, num_heads=HEADS, num_classes=5, init_values=0.5
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval().requires_grad_(requires_grad=False)


@cache
def photos() -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)) for _ in range(3)]


@cache
def effects(count: int) -> HeadEffects:
    return head_effects(vit(), photos()[:count], target=2)


@torch.no_grad()
def own(photo: Image.Image) -> tuple[torch.Tensor, float]:
    """Return the direct contribution of each head: its part of the projection's result, through the frozen last norm."""
    model: Any = vit()
    pixels, kept, last = prepare(photo, model).pixels, list[torch.Tensor](), list[torch.Tensor]()
    handles = [block.attn.proj.register_forward_pre_hook(lambda _, args: kept.append(args[0])) for block in model.blocks]
    handles.append(model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0])))
    score = float(model(pixels)[0, 2])
    for handle in handles:
        handle.remove()
    x = last[0][0, 0].double()
    scale = (x.var(correction=0) + model.norm.eps) ** -0.5
    direction = model.head.weight[2].double() * model.norm.weight.double() * scale
    direction = direction - direction.mean()
    width = 24 // HEADS
    shares = []
    for block, mixed in zip(model.blocks, kept, strict=True):
        for head in range(HEADS):
            part = slice(head * width, (head + 1) * width)
            out = block.attn.proj.weight[:, part].double() @ mixed[0, 0, part].double() * block.ls1.gamma.double()
            shares.append(float(direction @ out))
    return torch.tensor(shares, dtype=torch.float64), score


def test_direct_contributions_are_those_of_hooks() -> None:
    for number, photo in enumerate(photos()):
        shares, score = own(photo)
        assert float(effects(3).scores[number]) == pytest.approx(score, abs=1e-6)
        torch.testing.assert_close(effects(3).direct[number], shares, rtol=1e-5, atol=1e-7)


def test_losses_are_those_of_interventions_one_by_one() -> None:
    model = vit()
    for number, photo in enumerate(photos()):
        pixels = prepare(photo, model).pixels
        with torch.no_grad():
            plain = float(model(pixels)[0, 2])
            for column, (layer, head) in enumerate(effects(3).heads):
                with visattn.intervene(model, layer, head=head, scale=0.0):
                    without = float(model(pixels)[0, 2])
                assert float(effects(3).zeroed[number, column]) == pytest.approx(plain - without, abs=1e-5)


def test_mean_outputs_are_those_of_the_photos() -> None:
    model: Any = vit()
    kept: list[torch.Tensor] = []
    handle = model.blocks[1].attn.proj.register_forward_pre_hook(lambda _, args: kept.append(args[0].clone()))
    pixels = [prepare(photo, model).pixels for photo in photos()]
    with torch.no_grad():
        plain = [float(model(one)[0, 2]) for one in pixels]
        handle.remove()
        mean = torch.cat(kept).mean(0)
        for head in range(HEADS):
            part = slice(head * 8, (head + 1) * 8)

            def put(_: nn.Module, args: Any, part: slice = part) -> Any:
                changed = args[0].clone()
                changed[..., part] = mean[..., part]
                return (changed,)

            handle = model.blocks[1].attn.proj.register_forward_pre_hook(put)
            for number, one in enumerate(pixels):
                found = effects(3).averaged
                assert found is not None
                expected = plain[number] - float(model(one)[0, 2])
                assert float(found[number, HEADS + head]) == pytest.approx(expected, abs=1e-5)
            handle.remove()


def test_rows_add_up_to_the_mean_score() -> None:
    for count in (1, 3):
        rows = effects(count).rows()
        assert sum(row["direct"] for row in rows) == pytest.approx(float(effects(count).scores.mean()), abs=1e-5)
        assert [row["head"] for row in rows[: DEPTH * HEADS]] == [*range(HEADS)] * DEPTH
        assert all((row["low"] is None) == (count == 1) for row in rows)
        assert all(row["head"] is None for row in rows[DEPTH * HEADS :])


def test_heads_that_others_make_up_for_are_marked() -> None:
    one = effects(1)
    direct, loss = one.direct[0], one.zeroed[0]
    marked = [bool(row["opposite"]) for row in one.rows()[: DEPTH * HEADS]]
    expected = (direct * loss < 0) & (direct.abs() > 0.01 * direct.abs().max()) & (loss.abs() > 0.01 * loss.abs().max())
    assert marked == expected.tolist()
    assert any(marked)  # else nothing was compared
