"""States of every head for many images: those of the model, with their places, and their projection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from torch import Tensor, nn

import visattn
from tests import tiny, zoo
from visattn import embedding
from visattn.errors import OptionError

PHOTOS = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 48, 3), dtype=np.uint8)) for seed in range(3)]


def by_hand(model: Any, pixels: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return queries and keys `(heads, tokens, D)` of one block of a timm ViT, from the output of its linear layer."""
    kept: list[Tensor] = []
    handle = model.blocks[block].attn.qkv.register_forward_hook(lambda _m, _a, output: kept.append(output))
    with torch.no_grad():
        model(pixels)
    handle.remove()
    parts = kept[0].reshape(1, kept[0].shape[1], 3, model.blocks[block].attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    return parts[0][0], parts[1][0]


def test_states_are_those_of_the_model_with_their_places() -> None:
    model = tiny.vit(reg_tokens=2)
    space = embedding.gather(model, PHOTOS)
    assert [one.layer for one in space.layers] == [name for name, _ in model.named_modules() if name.endswith("attn")]
    states = space.layer("blocks.1.attn")
    count = len(states.tokens.image) // 3
    for index, photo in enumerate(PHOTOS):
        queries, keys = by_hand(model, visattn.prepare(photo, model).pixels, 1)
        some = slice(index * count, (index + 1) * count)
        scale = float(
            (states.queries[:, some].float() * queries).sum() / queries.square().sum()
        )  # the model's own, if it applies one
        assert torch.allclose(states.queries[:, some].float(), queries * scale, rtol=2e-3, atol=2e-3)
        assert torch.allclose(states.keys[:, some].float(), keys, rtol=2e-3, atol=2e-3)
        assert set(states.tokens.image[some].tolist()) == {index}
    rows, columns = states.tokens.row[:count].tolist(), states.tokens.column[:count].tolist()
    assert states.tokens.names == ("cls", "register0", "register1")
    assert rows[:3] == columns[:3] == [-1, -1, -1]
    grid = [(row, column) for row, column in zip(rows, columns, strict=True) if row >= 0]
    assert grid == sorted(grid)
    assert grid[0] == (0, 0)
    assert states.notes == ()


def test_axes_are_fitted_to_patches_and_all_tokens_are_projected() -> None:
    space = embedding.gather(tiny.vit(), PHOTOS, layers="blocks.0.*")
    (found,) = space.project(2)
    states = space.layer(0)
    assert len(found.queries[0]) == len(states.tokens.image)
    for head in range(len(states.queries)):
        both = space.joint(0, head)
        plain = torch.cat([both.queries[states.tokens.plain], both.keys[states.tokens.plain]])
        known = PCA(2, svd_solver="full").fit(plain.numpy())
        for points, each in ((found.queries[head], both.queries), (found.keys[head], both.keys)):
            expected = known.transform(each.numpy())
            signs = np.sign((points.numpy() * expected).sum(0))
            assert np.allclose(points.numpy() * signs, expected, atol=1e-4 * np.abs(expected).max())


def test_attention_in_the_joint_space_is_that_of_the_states() -> None:
    space = embedding.gather(tiny.vit(), PHOTOS, layers="blocks.0.*")
    queries, keys = (each.double() for each in space.layer(0).head(1))
    both = space.joint(0, 1)
    assert torch.allclose((both.queries @ both.keys.T).softmax(1), (queries @ keys.T).softmax(1), atol=1e-12)


def test_windows_and_biases_are_said() -> None:
    model = zoo.FAMILIES["swin"].build((64, 96))
    photos = [photo.resize((96, 64)) for photo in PHOTOS]
    notes = {note for one in embedding.gather(model, photos, img_size=(64, 96)).layers for note in one.notes}
    assert any("a bias or a mask is added" in note for note in notes)
    assert any("only to its own window" in note for note in notes)


def test_attention_that_a_model_writes_out_is_told_by_its_products_or_not() -> None:
    for name, expected in (("query and key norm", False), ("beit with relative positions", True)):
        model = tiny.MODELS[name].build()
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                vars(module)["fused_attn"] = False
        notes = [one.notes for one in embedding.gather(model, PHOTOS[:1]).layers]
        assert all(bool(note) is expected for note in notes)


def test_bad_arguments_are_refused() -> None:
    model = tiny.vit()
    with pytest.raises(OptionError, match="no images were given"):
        embedding.gather(model, [])
    with pytest.raises(OptionError, match="no layer that fits 'nothing'"):
        embedding.gather(model, PHOTOS[:1], layers="nothing")
    space = embedding.gather(model, PHOTOS[:1], layers="blocks.0.*")
    with pytest.raises(OptionError, match=r"there is no layer 'x' in the space. Its layers: blocks.0.attn"):
        space.layer("x")
    with pytest.raises(OptionError, match=r"blocks.0.attn has heads 0 to"):
        space.layer(0).head(99)


def test_images_with_other_tokens_than_the_first_are_refused() -> None:
    model: Any = tiny.vit()
    calls = []

    def drop(_module: nn.Module, _args: Any, tokens: Tensor) -> Tensor:
        calls.append(0)
        return tokens if len(calls) == 1 else tokens[:, :-1]  # a patch of the second image

    model.pos_drop.register_forward_hook(drop)
    with pytest.raises(OptionError, match=r"has other layers or tokens than image. Pass img_size, so that all are alike"):
        embedding.gather(model, PHOTOS)


def test_a_network_without_attention_is_refused() -> None:
    with pytest.raises(visattn.VisattnError):
        embedding.gather(nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), PHOTOS[:1], img_size=32)
