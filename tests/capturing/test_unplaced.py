"""Attention whose tokens cannot be located is not drawn on the image and gives the reason."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests import tiny, zoo
from visattn.core.records import Recording


class Patches(nn.Module):
    """Model with one attention call over 16-pixel patches; subclasses change its tokens, queries or keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 16, 16)

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    def query(self, tokens: Tensor) -> Tensor:
        return tokens

    def key(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query[:, None], key[:, None], key[:, None])

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.tokens(self.embed(pixels).flatten(2).transpose(1, 2))
        return self.attend(self.query(tokens), self.key(tokens))


class Sorted(Patches):
    def tokens(self, tokens: Tensor) -> Tensor:
        return torch.sort(tokens, dim=1)[0]


class Shuffled(Patches):
    def tokens(self, tokens: Tensor) -> Tensor:
        order = tokens.sum(-1).argsort(1)
        return tokens.gather(1, order[..., None].expand_as(tokens))


class MixedImages(Patches):
    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens.flatten(0, 1)[None]


class MeanOfTwoImages(Patches):
    def key(self, tokens: Tensor) -> Tensor:
        return tokens + tokens.flip(0)


class LostQueries(Patches):
    def query(self, tokens: Tensor) -> Tensor:
        return torch.cumsum(tokens, 1)


class LostQueriesWrittenOut(LostQueries):
    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return (query @ key.transpose(1, 2)).softmax(-1) @ key


class LostKeys(Patches):
    def key(self, tokens: Tensor) -> Tensor:
        return torch.cumsum(tokens, 1)


class HiddenQueries(Patches):
    def query(self, tokens: Tensor) -> Tensor:
        return torch.from_numpy(tokens.numpy()[:, ::-1].copy())


class Doubled(Patches):
    def key(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens, tokens[:, :1]], 1)


class Averaged(Patches):
    """Model with a linear layer over tokens, as in MLP-Mixer, after which no token has a location."""

    def tokens(self, tokens: Tensor) -> Tensor:
        return F.linear(tokens.transpose(1, 2), torch.randn(6, 6)).transpose(1, 2)


class Overwritten(Patches):
    def tokens(self, tokens: Tensor) -> Tensor:
        tokens = tokens.contiguous()
        tokens[:] = torch.cumsum(tokens, 1)
        return tokens


def windows(tokens: Tensor) -> Tensor:
    """Split the tokens of each image into two windows of three."""
    return tokens.reshape(-1, 3, tokens.shape[-1])


class LearnedInWindows(Patches):
    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 2, 8))

    def query(self, tokens: Tensor) -> Tensor:
        return self.latent.expand(2 * len(tokens), -1, -1)

    def key(self, tokens: Tensor) -> Tensor:
        return windows(tokens)


class AskedTwice(Patches):
    def query(self, tokens: Tensor) -> Tensor:
        return tokens.repeat_interleave(2, 0)

    def key(self, tokens: Tensor) -> Tensor:
        return windows(tokens)


class TwoGrids(Patches):
    def key(self, tokens: Tensor) -> Tensor:
        image = tokens.transpose(1, 2).reshape(len(tokens), -1, *tiny.GRID)
        return torch.cat([tokens, F.adaptive_avg_pool2d(image, (1, 3)).flatten(2).transpose(1, 2)], 1)


class PaddingAlone(Patches):
    def tokens(self, tokens: Tensor) -> Tensor:
        return windows(F.pad(tokens, (0, 0, 0, 3)))


class ChannelsOfAllImages(Patches):
    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens.flatten(0, 1).T[None]


class OneImageTwice(Patches):
    def tokens(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens, tokens[:1]])


class WrittenOut(Patches):
    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return self.mix((query @ key.transpose(1, 2)).softmax(-1), key)

    def mix(self, weights: Tensor, value: Tensor) -> Tensor:
        return weights @ value


class Turned(WrittenOut):
    def mix(self, weights: Tensor, value: Tensor) -> Tensor:
        return weights.transpose(1, 2) @ value


class OtherValues(WrittenOut):
    def mix(self, weights: Tensor, value: Tensor) -> Tensor:
        return weights @ value.flip(1)


class ChannelsAsk(Patches):
    """Model whose queries are channels and whose keys are tokens, with as many channels as tokens."""

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens[..., :6]

    def query(self, tokens: Tensor) -> Tensor:
        return tokens.transpose(1, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "learned queries of windows": (LearnedInWindows, r"learned queries attend within windows"),
    "queries in several windows": (AskedTwice, r"a token is a query in several windows"),
    "keys of two grids": (TwoGrids, r"tokens of several grids attend together: 2 x 3 and 1 x 3"),
    "a window of padding": (PaddingAlone, r"a window holds nothing but padding"),
    "channels over all images": (ChannelsOfAllImages, r"the channels of several images are mixed"),
    "one image given twice": (OneImageTwice, r"the images of the batch, or its windows, are arranged differently"),
    "weights flipped": (Turned, r"its softmax was turned: its rows are the columns of the softmax"),
    "values of other tokens": (OtherValues, r"its keys and values belong to different tokens"),
    "channels that attend to tokens": (ChannelsAsk, r"its queries are channels, its keys are tokens"),
    "queries of unknown origin": (
        HiddenQueries,
        r"its queries could not be traced from the pixels beyond a tensor of an earlier forward pass, or of code that is not intercepted",
    ),
    "a key given twice": (Doubled, r"a token occurs several times"),
    "tokens mixed with each other": (Averaged, r"its tokens mix several image locations each"),
    "tokens overwritten": (Overwritten, r"beyond cumsum"),
    "tokens sorted channel by channel": (Sorted, r"could not be traced from the pixels beyond sort"),
    "tokens shuffled by data, differently in each image": (Shuffled, r"the images of the batch are arranged differently"),
    "tokens of two images together": (MixedImages, r"tokens of several images attend to each other"),
    "keys that are the sum of two images": (MeanOfTwoImages, r"could not be traced from the pixels beyond add"),
    "queries lost, fused": (LostQueries, r"queries could not be traced from the pixels beyond cumsum"),
    "queries lost, explicit": (LostQueriesWrittenOut, r"queries or keys could not be traced from the pixels beyond cumsum"),
    "keys lost": (LostKeys, r"could not be traced from the pixels beyond cumsum"),
}


def record(model: nn.Module, pixels: Tensor) -> Recording:
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixels)
    return recording


@pytest.mark.parametrize("name", list(MODELS))
def test_tokens_of_unknown_position_are_unplaced(name: str) -> None:
    build, reason = MODELS[name]
    recording = record(build(), tiny.pixels(2))
    assert [found.kind for found in recording] == ["unplaced"]
    assert recording[0].reason is not None
    assert re.search(reason, recording[0].reason), recording[0].reason
    assert not recording[0].keys.grid


def test_shuffled_tokens_are_put_at_their_original_positions() -> None:
    """Check a single shuffled image, whose order is known: its attention is the same as without the shuffle."""
    plain, shuffled = Patches(), Shuffled()
    shuffled.load_state_dict(plain.state_dict())
    expected, found = (record(model, tiny.pixels())[0] for model in (plain, shuffled))
    assert found.keys == expected.keys
    torch.testing.assert_close(found.operator.dense(), expected.operator.dense())


class Written(Patches):
    """Model that writes its tokens in reverse order over themselves or into padding."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def tokens(self, tokens: Tensor) -> Tensor:
        turned = tokens.flip(1)
        if self.way == "setitem":
            tokens = tokens.contiguous()
            tokens[:, :3], tokens[:, 3:] = turned[:, :3], turned[:, 3:].clone()
        elif self.way == "copy":
            tokens = tokens.contiguous().copy_(turned.clone())
        elif self.way == "view":
            tokens = tokens.contiguous()
            tokens[:, :].copy_(turned.clone())
        else:
            tokens = torch.zeros(len(tokens), 8, 8)
            tokens[:, 1:7] = turned
        return tokens


@pytest.mark.parametrize("way", ["setitem", "copy", "view", "padding"])
def test_tokens_written_into_a_buffer_keep_their_positions(way: str) -> None:
    model = Written(way)
    found = record(model, tiny.pixels(2))[0]
    assert (found.kind, found.keys.grid) == ("self", tiny.GRID)
    plain = Patches()
    plain.load_state_dict(model.state_dict())
    expected = record(plain, tiny.pixels(2))[0].operator.dense()
    if way == "padding":
        notes = visattn.methods.attention(Recording([found]), fusion="mean").provenance.notes
        assert any("of the attention goes to padding and is not drawn" in note for note in notes)
        leaked = found.operator.leaked()
        assert float(leaked.min()) > 0
        torch.testing.assert_close(found.operator.dense() / (1 - leaked[..., None]), expected)
    else:
        torch.testing.assert_close(found.operator.dense(), expected)


@pytest.mark.parametrize("size", [(64, 64), (64, 96)], ids=["one window", "two windows"])
def test_token_alone_in_its_window_attends_to_itself(size: tuple[int, int]) -> None:
    """Check EfficientViT, whose windows are at most as large as the shorter side of its grid, which may be one."""
    last = record(zoo.FAMILIES["efficientvit"].build(size).eval(), tiny.pixels(2, size))[-1]
    assert (last.kind, last.queries.grid, last.keys.grid) == ("self", (1, size[1] // 48), (1, size[1] // 48))
    torch.testing.assert_close(last.operator.dense(), torch.eye(size[1] // 48).expand(last.operator.shape))


ALONE = "its softmax runs over the keys alone: no weight belongs to a pair of tokens"
ONE_TOKEN = "its weights come from one token each: no key comes from the image"
LAYERS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "lambda": (lambda: timm.create_model("lambda_resnet26t", num_classes=4), "", ALONE),
    "coat": (
        lambda: timm.create_model("coat_tiny", num_classes=4, img_size=64, serial_depths=(1, 1, 1, 1), parallel_depth=1),
        "",
        ALONE,
    ),
    "volo's outlook": (lambda: zoo.FAMILIES["volo"].build(zoo.SQUARE), "network.0.", ONE_TOKEN),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_unplaced_layers_state_the_reason(name: str) -> None:
    build, layers, reason = LAYERS[name]
    recording = record(build().eval(), tiny.pixels(size=zoo.SQUARE))
    found = [(one.kind, one.reason) for one in recording if one.layer.startswith(layers)]
    assert found
    assert found[0] == ("unplaced", reason)
    behind = {("unplaced", reason), *((kind, why) for kind, why in found if why is not None and "beyond" in why)}
    assert set(found) <= behind  # layers behind it have lost their locations there


class Worded(nn.Module):
    """Model that attends among words in floating point behind a table of learned positions, beside its image tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Conv2d(3, 16, 4, 4), nn.MultiheadAttention(16, 2, batch_first=True)
        self.positions = nn.Parameter(torch.randn(1, 5, 16))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        words = F.linear(self.positions + words.mean(1, keepdim=True), self.attend.out_proj.weight)
        out: Tensor = self.embed(x).mean() + self.attend(words, words, words)[0].mean()
        return out


def test_a_reason_names_the_input_and_no_parameter() -> None:
    model = Worded().eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(torch.randn(2, 3, 32, 32), words=torch.randn(2, 5, 16))
    told = [recording[0].reason] if len(recording) else [each.reason for each in recording.unseen]
    assert "(words)" in str(told[0])
