"""What methods do if no options are given, and on recordings of one head, one layer or maps with channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import tiny
from tests.methods.truths import graded
from visattn.core import methods
from visattn.core.methods import ScoredImages
from visattn.core.methods.by_perturbation.cams import _Made
from visattn.core.records import FeatureRecord, Recording
from visattn.errors import OptionError

SIDE = 28


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Seen:
    """Score of images whose batches are noted: the exponential of a mean of pixels, each with its own weight."""

    def __init__(self, height: int = SIDE, width: int = SIDE) -> None:
        self.weights, self.batches = noise(3, height, width, seed=1), list[int]()

    def __call__(self, pixels: Tensor) -> Tensor:
        self.batches.append(len(pixels))
        return (pixels * self.weights).mean((1, 2, 3)).exp()


def scored(seen: Seen) -> ScoredImages:
    return ScoredImages(noise(1, *seen.weights.shape), seen)


EVALUATED: dict[str, tuple[tuple[int, int], int, list[int]]] = {  # grid of the map, images scored, last batches
    "integrated_gradients": ((SIDE, SIDE), 52, [16, 16, 16, 2]),
    "smoothgrad": ((SIDE, SIDE), 50, [16, 16, 16, 2]),
    "occlusion": ((14, 14), 2 + 1 + 196, [1, *[16] * 12, 4]),
    "kernel_shap": ((5, 5), 2 + 500, [16] * 31 + [4]),
    "lime": ((7, 7), 2 + 500, [16] * 31 + [4]),
    "saliency": ((SIDE, SIDE), 1, [1]),
    "input_x_gradient": ((SIDE, SIDE), 3, [1]),
}


@pytest.mark.parametrize("name", list(EVALUATED))
def test_parts_and_evaluations_of_a_method_without_options(name: str) -> None:
    grid, count, batches = EVALUATED[name]
    seen = Seen()
    found = getattr(methods, name)(Recording(input_size=(SIDE, SIDE)), scored=scored(seen))
    assert found.layout.grid == grid
    assert sum(seen.batches) == count
    assert seen.batches[-len(batches) :] == batches


DOCUMENTED: dict[str, dict[str, Any]] = {
    "integrated_gradients": {"baseline": "blur", "segments": "pixels", "steps": 50},
    "smoothgrad": {"noise": 0.15, "samples": 50, "seed": 0},
    "occlusion": {"baseline": "blur", "segments": "grid", "num_segments": 196},
    "kernel_shap": {"baseline": "blur", "num_segments": 25, "samples": 500, "seed": 0},
    "lime": {"baseline": "blur", "num_segments": 50, "l1": 0.001, "samples": 500, "seed": 0},
}


@pytest.mark.parametrize("name", list(DOCUMENTED))
def test_options_that_are_left_out_are_the_documented_ones(name: str) -> None:
    made = Recording(input_size=(SIDE, SIDE))
    plain = getattr(methods, name)(made, scored=scored(Seen()))
    given = getattr(methods, name)(made, scored=scored(Seen()), **DOCUMENTED[name])
    assert torch.equal(plain.values, given.values)
    for option, value in {"seed": 1, "noise": 0.3, "steps": 3, "baseline": "black"}.items():
        if option in DOCUMENTED[name] and "num_segments" not in DOCUMENTED[name]:
            other = getattr(methods, name)(made, scored=scored(Seen()), **{option: value})
            assert not torch.equal(other.values, plain.values), option


OF_RECORDINGS: dict[str, dict[str, Any]] = {
    "attention": {"layer": 5, "call": 0},
    "attention_flow": {"residual": 0.5, "start_layer": 0},
    "gradient_rollout": {"discard": 0.9, "start_layer": 0},
    "norm_attention": {"layer": 5},
    "pca": {"layer": 5, "components": 3},
    "relevance": {"start_layer": 0},
    "rollout": {"residual": 0.5, "discard": 0.0, "start_layer": 0},
}


@pytest.mark.parametrize("name", list(OF_RECORDINGS))
def test_all_layers_or_the_last_are_taken_without_options(name: str) -> None:
    made = graded("1 + 2 x 3", 2, 6)
    plain, given = getattr(methods, name)(made), getattr(methods, name)(made, **OF_RECORDINGS[name])
    assert torch.equal(plain.values, given.values)
    for option, value in OF_RECORDINGS[name].items():
        if isinstance(value, int) and option != "call":
            other = getattr(methods, name)(made, **{option: value - 1 if value > 1 else 1})
            assert other.values.shape != plain.values.shape or not torch.equal(other.values, plain.values), option


def test_the_transition_of_attention_starts_at_layer_4_and_takes_20_steps() -> None:
    made, shares = graded("1 + 2 x 3", 2, 6), list[float]()

    def replay(edit: Callable[[Tensor], Tensor]) -> Recording:
        shares.append(float(edit(torch.ones(1))))
        return made

    plain = methods.transition_attention(made, replay=replay).values
    assert shares == pytest.approx([step / 19 for step in range(20)])
    for start, same in ((3, False), (4, True), (5, False)):
        found = methods.transition_attention(made, replay=replay, steps=2, start_layer=start).values
        assert torch.allclose(found, plain, rtol=1e-4) is same


def test_similarity_is_to_a_token_of_the_first_image_in_the_last_layer() -> None:
    made = graded()
    rows = made.features[-1].value.double()
    unit = rows / rows.norm(dim=-1, keepdim=True)
    expected = unit[:, 1:] @ unit[0, 1 + 4]
    found = methods.similarity(made, query="patch:1,1")
    torch.testing.assert_close(found.values, expected.reshape(-1, 2, 3).float())


# small recordings


def test_norms_of_one_head_are_its_weights_times_the_lengths_of_its_vectors() -> None:
    made = tiny.recording(heads=1, layers=1)
    record = made.records[0]
    assert record.value is not None
    projection = noise(5, 8, seed=4)  # (D, d)
    object.__setattr__(record, "output_weight", projection)
    lengths = (record.value[0, 0] @ projection.T).norm(dim=-1)
    expected = record.operator.dense()[0, 0, 0] * lengths
    for heads in (False, True):
        found = methods.norm_attention(made, query="cls", keep_heads=heads).values
        torch.testing.assert_close(found.flatten(), expected[1:])


def test_features_are_put_back_into_maps_with_channels_last_and_into_tokens_behind_their_prefix() -> None:
    value = noise(1, 4, 2, 3)
    scores = ScoredImages(noise(1, 3, 32, 48), lambda x: x.sum((1, 2, 3)))
    made = Recording(features=[FeatureRecord("a", 0, "activation", value, layout=tiny.layout((), (2, 3)))])
    part = _Made("ablationcam", made, scores, -1, 1)
    assert torch.equal(part.put_back(value), value)
    assert torch.equal(part.put_back(value.permute(0, 2, 3, 1)), value.permute(0, 2, 3, 1))
    edited = value.clone()
    edited[:, 2] = 0
    part.parts.given = edited
    assert torch.equal(part.put_back(value.permute(0, 2, 3, 1)), edited.permute(0, 2, 3, 1)), "an edit may differ from the output"
    with pytest.raises(OptionError, match="a: its features cannot be put back"):
        part.put_back(value.mT)
    tokens = noise(1, 8, 4, seed=5)
    made = Recording(features=[FeatureRecord("b", 0, "tokens", tokens, layout=tiny.layout(("cls", "register0"), (2, 3)))])
    part = _Made("ablationcam", made, scores, -1, 1)
    assert torch.equal(part.put_back(tokens), tokens)
    for error, fits in ((5e-4, True), (0.05, False)):
        other = tokens + error
        if fits:
            assert torch.equal(part.put_back(other)[:, :2], other[:, :2])
            assert torch.equal(part.put_back(other)[:, 2:], tokens[:, 2:])
        else:
            with pytest.raises(OptionError, match="b: its features cannot be put back"):
                part.put_back(other)


def test_pixels_are_not_normalized_unless_it_is_said() -> None:
    plain = ScoredImages(noise(2, 3, 5, 7), lambda x: x.sum((1, 2, 3)))
    assert not plain.baseline("black").any()
    assert not plain.alone
    assert len(plain.parts("grid", num_segments=35)[0]) == 35, "a cell may be one pixel"
    assert plain.parts("grid")[0].grid == (5, 7)
    half = ScoredImages(plain.pixels, plain.score, mean=(0.5, 0.25, 0.125))
    assert half.baseline("black")[0, :, 0, 0].tolist() == [-0.5, -0.25, -0.125]


@pytest.mark.parametrize(("call", "calls"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_an_edit_is_made_at_one_of_the_calls_of_a_layer(call: int, calls: int) -> None:
    layer = nn.Identity()
    model = nn.Sequential(layer)
    scores = ScoredImages(noise(1, 3, 5, 7), lambda x: x.sum((1, 2, 3)), model=model)
    with scores.editing("0", lambda x: x + 1, call=call, calls=calls):
        found = [float(layer(torch.zeros(()))) for _ in range(2 * calls)]
    assert found == [float(number == call) for _ in range(2) for number in range(calls)]
    assert float(layer(torch.zeros(()))) == 0
    with scores.editing("0", lambda x: x + 1):
        assert layer((torch.ones(()), "rest")) == (2, "rest")
        assert layer((torch.ones(()), "rest")) == (2, "rest")
    with pytest.raises(OptionError, match="has no layer 1"), scores.editing("1", lambda x: x):
        pass
