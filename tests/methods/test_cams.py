"""Class activation maps, compared with loops from the papers and the packages grad-cam and captum, and their properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import captum.attr
import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.conftest import Figures
from tests.methods.test_references import Golden, check
from tests.oracles.maps import Array, array
from visattn.core import methods
from visattn.core.geometry import Box
from visattn.core.maps import AttentionMap
from visattn.core.methods import ScoredImages, ablationcam, scorecam
from visattn.core.records import FeatureRecord, Recording, TokenLayout
from visattn.errors import MissingExtra, OptionError, ShapeError

BATCH, CHANNELS, CLASSES = 3, 5, 4
F64: Any = {"dtype": torch.float64}
EXACT: Any = {"atol": 1e-12, "rtol": 1e-10}
BOUND = 1e-5  # relative to the largest value, compared with other packages in float32


# oracles for one image: A[k][i] is the value of channel k at position i, g its gradient


def gradcam(a: Array, g: Array) -> list[float]:
    """Compute Selvaraju et al. 2017."""
    channels, positions = a.shape
    w = [math.fsum(g[k, i] for i in range(positions)) / positions for k in range(channels)]
    return [max(0.0, math.fsum(w[k] * a[k, i] for k in range(channels))) for i in range(positions)]


def gradcam_plus_plus(a: Array, g: Array, epsilon: float = 1e-6) -> list[float]:
    """Compute Chattopadhay et al. 2018, equation 19 and the sum over positions before it."""
    channels, positions = a.shape
    w = []
    for k in range(channels):
        total, weight = math.fsum(a[k]), 0.0
        for i in range(positions):
            if g[k, i] != 0:
                alpha = g[k, i] ** 2 / (2 * g[k, i] ** 2 + total * g[k, i] ** 3 + epsilon)
                weight += alpha * max(0.0, g[k, i])
        w.append(weight)
    return [max(0.0, math.fsum(w[k] * a[k, i] for k in range(channels))) for i in range(positions)]


def xgradcam(a: Array, g: Array) -> list[float]:
    """Compute Fu et al. 2020, equation 8."""
    channels, positions = a.shape
    w = []
    for k in range(channels):
        total = math.fsum(a[k]) + 1e-7
        w.append(math.fsum(a[k, i] / total * g[k, i] for i in range(positions)))
    return [max(0.0, math.fsum(w[k] * a[k, i] for k in range(channels))) for i in range(positions)]


def hirescam(a: Array, g: Array) -> list[float]:
    """Compute Draelos & Carin 2020."""
    return [max(0.0, math.fsum(g[k, i] * a[k, i] for k in range(len(a)))) for i in range(a.shape[1])]


def layercam(a: Array, g: Array) -> list[float]:
    """Compute Jiang et al. 2021."""
    return [max(0.0, math.fsum(max(0.0, g[k, i]) * a[k, i] for k in range(len(a)))) for i in range(a.shape[1])]


ORACLES: dict[str, Callable[[Array, Array], list[float]]] = {
    "gradcam": gradcam,
    "gradcam_plus_plus": gradcam_plus_plus,
    "xgradcam": xgradcam,
    "hirescam": hirescam,
    "layercam": layercam,
}
REFERENCE = dict(zip(ORACLES, ("GradCAM", "GradCAMPlusPlus", "XGradCAM", "HiResCAM", "LayerCAM"), strict=True))
every = pytest.mark.parametrize("name", list(ORACLES))


def run(name: str, made: Recording, **options: Any) -> AttentionMap:
    found: AttentionMap = getattr(methods, name)(made, **options)
    return found


# recordings made by hand


PLACES = {
    "map": TokenLayout("tokens", (), (3, 5), Box(0, 0, 48, 80)),
    "tokens": tiny.layout((), (2, 3)),
    "tokens with prefix": tiny.layout(("cls", "register0"), (3, 2)),
}
places = pytest.mark.parametrize("place", list(PLACES))


def recording(place: str = "map", *, positive: bool = False, scale: float = 1.0, seed: int = 0) -> Recording:
    """Record features of two layers, of which the first is not read."""
    layout = PLACES[place]
    made = Recording(input_size=(int(layout.box.bottom), int(layout.box.right)))
    generator = torch.Generator().manual_seed(seed)
    for i in range(2):
        shape = (BATCH, CHANNELS, *layout.grid) if place == "map" else (BATCH, len(layout), CHANNELS)
        value, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        value = value.abs() if positive else value
        role: Any = "activation" if place == "map" else "tokens"
        made.features.append(FeatureRecord(f"layer{i}", 0, role, value, gradient * scale, layout))
    return made


def channels(feature: FeatureRecord) -> list[tuple[Array, Array]]:
    """Return `(C, positions)` features and gradient of each image, by loops over the layout."""
    assert feature.layout is not None
    assert feature.gradient is not None
    out = []
    for value, gradient in zip(feature.value, feature.gradient, strict=True):
        pair = []
        for x in (value, gradient):
            rows, columns = feature.layout.grid
            cells = [(r, c) for r in range(rows) for c in range(columns)]
            at = x if feature.role == "activation" else x[len(feature.layout.prefix) :].T.reshape(-1, rows, columns)
            pair.append(np.array([[float(at[k, r, c]) for r, c in cells] for k in range(CHANNELS)]))
        out.append((pair[0], pair[1]))
    return out


@places
@every
@pytest.mark.parametrize("positive", [False, True], ids=["both signs", "behind a ReLU"])
def test_map_equals_its_oracle(name: str, place: str, positive: bool) -> None:
    made = recording(place, positive=positive)
    found = run(name, made, **F64)
    expected = np.array([ORACLES[name](a, g) for a, g in channels(made.features[-1])])
    assert np.count_nonzero(expected) > 0
    np.testing.assert_allclose(found.values, expected.reshape(BATCH, *PLACES[place].grid), **EXACT)
    assert found.layout == PLACES[place]
    assert found.provenance.parameters["layer"] == "layer1"


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_gradcam_plus_plus_equals_its_oracle_for_gradients_of_any_size(epsilon: float, scale: float) -> None:
    made = recording(positive=True, scale=scale)
    expected = np.array([gradcam_plus_plus(a, g, epsilon) for a, g in channels(made.features[-1])])
    found = run("gradcam_plus_plus", made, epsilon=epsilon, **F64).values
    np.testing.assert_allclose(found.flatten(1) / expected.max(), expected / expected.max(), atol=1e-12, rtol=0)


def test_gradcam_plus_plus_without_epsilon_does_not_depend_on_the_scale_of_features() -> None:
    made = recording(positive=True)
    last = made.features[-1]
    assert last.gradient is not None
    scaled = replace(made, features=[replace(last, value=last.value * 100, gradient=last.gradient / 100)])
    one, other = (run("gradcam_plus_plus", each, epsilon=0, **F64).values for each in (made, scaled))
    torch.testing.assert_close(one, other)


@every
def test_each_image_of_a_batch_is_explained_by_itself(name: str) -> None:
    made = recording()
    whole = run(name, made, **F64).values
    for b in range(BATCH):
        alone = [
            replace(feature, value=feature.value[b : b + 1], gradient=feature.gradient[b : b + 1])
            for feature in made.features
            if feature.gradient is not None
        ]
        torch.testing.assert_close(run(name, replace(made, features=alone), **F64).values[0], whole[b], rtol=1e-12, atol=1e-12)


@every
def test_map_is_invariant_to_channel_order_and_equivariant_to_positions(name: str) -> None:
    made, order, places = recording(), torch.randperm(CHANNELS), torch.randperm(15)
    last = made.features[-1]

    def edited(edit: Callable[[Tensor], Tensor]) -> Tensor:
        assert last.gradient is not None
        return run(
            name, replace(made, features=[replace(last, value=edit(last.value), gradient=edit(last.gradient))]), **F64
        ).values

    plain = edited(lambda x: x)
    torch.testing.assert_close(edited(lambda x: x[:, order]), plain)
    moved = edited(lambda x: x.flatten(2)[..., places].view_as(x))
    torch.testing.assert_close(moved, plain.flatten(1)[:, places].view_as(plain))


@every
def test_a_layer_is_chosen_by_name_and_by_position_among_features_without_gates(name: str) -> None:
    made = recording()
    gate = FeatureRecord("layer1.se", 0, "channel_gate", torch.rand(BATCH, CHANNELS))
    with_gate = replace(made, features=[*made.features, gate])
    first = run(name, with_gate, layer="layer0").values
    assert torch.equal(first, run(name, with_gate, layer=-2).values)
    assert torch.equal(first, run(name, with_gate, layer=0).values)
    assert not torch.equal(first, run(name, with_gate).values)


# other people's code


GOLDEN = Golden("grad_cam")


@pytest.mark.parametrize("model", ["resnet18", "cnn", "vit"])
@every
def test_map_equals_the_golden_output_of_the_package(name: str, model: str, figures: Figures) -> None:
    value, gradient = GOLDEN[f"{model}_activation"], GOLDEN[f"{model}_gradient"]
    grid = tuple(value.shape[2:])
    layout = TokenLayout("tokens", (), grid, Box(0, 0, *grid))
    raw = GOLDEN[f"{model}_{REFERENCE[name]}"]  # before the positive part
    sign = -1 if not bool((raw > 0).any()) else 1  # the map would be empty; that of the opposite target is its negative
    made = Recording(features=[FeatureRecord("layer", 0, "activation", value, sign * gradient, layout)], input_size=(32, 48))
    check(figures, f"{REFERENCE[name]} of {model}", run(name, made, **F64).values, (sign * raw).clamp(min=0))


class Case(NamedTuple):
    """A model, pixels, the layer, the package's reshaping of its output to `(B, C, H, W)`, and a recording for each class."""

    model: nn.Module
    pixels: Tensor
    layer: str
    transform: Callable[[Tensor], Tensor] | None
    recordings: list[Recording]


@cache
def resnet() -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, pixels = torchvision.models.resnet18(num_classes=CLASSES), tiny.pixels(2, (64, 96))
    with torch.no_grad():
        model(pixels)  # sets batch-norm statistics, without which all positions are equal
    return case_of(model, pixels, "layer4", None)


@cache
def vit() -> Case:
    return case_of(tiny.vit(), tiny.pixels(2), "blocks.1.norm1", lambda x: x[:, 1:].unflatten(1, tiny.GRID).movedim(-1, 1))


def case_of(model: nn.Module, pixels: Tensor, layer: str, transform: Any) -> Case:
    model.eval().requires_grad_(False)
    with visattn.capture(model, features=[layer], gradients=True) as made:
        logits = model(pixels)
    return Case(model, pixels, layer, transform, [made.gradients(logits[:, c]) for c in range(CLASSES)])


CASES = {"resnet18 of torchvision": resnet, "vit of timm": vit}
cases = pytest.mark.parametrize("case", list(CASES))


def close(figures: Figures, name: str, found: Tensor, expected: Any) -> None:
    largest = float(torch.as_tensor(expected).abs().max())
    assert largest > 0
    error = float((found - torch.as_tensor(expected)).abs().max()) / largest
    figures(f"{name}: relative error", error, f"<= {BOUND:g}")
    assert error <= BOUND


@cases
@every
def test_map_equals_the_package_grad_cam(name: str, case: str, figures: Figures) -> None:
    package: Any = pytest.importorskip("pytorch_grad_cam", reason="needs grad-cam")
    given, expected = CASES[case](), []
    target = given.model.get_submodule(given.layer)
    for c in range(CLASSES):
        with getattr(package, REFERENCE[name])(given.model, [target], given.transform) as cam:
            cam.activations_and_grads(given.pixels.clone().requires_grad_())[:, c].sum().backward()
            kept = [x[0].numpy() for x in (cam.activations_and_grads.activations, cam.activations_and_grads.gradients)]
            expected.append(np.maximum(cam.get_cam_image(given.pixels, target, None, *kept, False), 0))
    found = torch.stack([run(name, made).values for made in given.recordings])
    close(figures, f"{REFERENCE[name]} of {case}, package", found, np.stack(expected))


def test_gradcam_equals_captum(figures: Figures) -> None:
    given = resnet()
    layer = captum.attr.LayerGradCam(given.model, given.model.get_submodule(given.layer))
    pixels = given.pixels.clone().requires_grad_()
    expected = [layer.attribute(pixels, target=c, relu_attributions=True)[:, 0].detach() for c in range(CLASSES)]
    found = [methods.gradcam(made).values for made in given.recordings]
    close(figures, "Grad-CAM of captum", torch.stack(found), torch.stack(expected))


# averaged features and one linear layer


def linear(model: Any) -> nn.Linear:
    layer: nn.Linear = model.fc
    return layer


def test_mean_of_cam_and_the_bias_are_the_logit() -> None:
    given = resnet()
    found = [methods.cam(made) for made in given.recordings]
    means = torch.stack([each.values.mean((1, 2)) for each in found], 1)
    torch.testing.assert_close(means + linear(given.model).bias, given.model(given.pixels), rtol=1e-5, atol=1e-5)
    assert found[0].signed
    assert float(found[0].values.min()) < 0 < float(found[0].values.max())


@pytest.mark.parametrize("c", range(4))
def test_cam_is_class_weights_times_features_and_grad_cam_times_a_constant(c: int) -> None:
    given = resnet()
    made = given.recordings[c]
    features, weights = array(made.features[-1].value), array(linear(given.model).weight[c])
    expected = np.zeros((2, 2, 3))
    for b, row, column in np.ndindex(expected.shape):
        expected[b, row, column] = math.fsum(weights[k] * features[b, k, row, column] for k in range(len(weights)))
    found = methods.cam(made, **F64).values
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())
    positive = found.clamp(min=0) / 6
    torch.testing.assert_close(methods.gradcam(made, **F64).values, positive)
    torch.testing.assert_close(methods.hirescam(made, **F64).values, positive)


def test_cam_of_one_class_versus_another_is_the_difference() -> None:
    given = resnet()
    with visattn.capture(given.model, features=[given.layer], gradients=True) as made:
        logits = given.model(given.pixels)
    both = methods.cam(made.gradients(logits[:, 2] - logits[:, 3])).values
    one, other = (methods.cam(given.recordings[c]).values for c in (2, 3))
    torch.testing.assert_close(both, one - other, rtol=1e-4, atol=1e-5)


def test_hirescam_of_a_head_without_pooling_sums_to_the_score() -> None:
    weight = torch.rand(4, CHANNELS * 15, dtype=torch.float64)  # positive, so that the positive part changes nothing
    value = torch.rand(BATCH, CHANNELS, 3, 5, dtype=torch.float64, requires_grad=True)
    score = (value.flatten(1) @ weight.T)[:, 1]
    (gradient,) = torch.autograd.grad(score.sum(), value)
    made = Recording(features=[FeatureRecord("layer", 0, "activation", value.detach(), gradient, PLACES["map"])])
    torch.testing.assert_close(methods.hirescam(made, **F64).values.sum((1, 2)), score.detach())


# refusals


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no features": (lambda: methods.gradcam(Recording()), "no features of layer -1 were recorded (recorded: none)"),
    "another layer": (
        lambda: methods.hirescam(recording(), layer="layer7"),
        "no features of layer layer7 were recorded (recorded: layer0, layer1)",
    ),
    "position": (lambda: methods.layercam(recording(), layer=2), "no features of layer 2 were recorded"),
    "no gradient": (
        lambda: methods.xgradcam(replace(recording(), features=[replace(recording().features[0], gradient=None)])),
        "a score's gradient is needed. Use capture(model, gradients=True)",
    ),
    "epsilon": (lambda: methods.gradcam_plus_plus(recording(), epsilon=-1), "epsilon must be a number from 0 to 1, got -1"),
    "cam of tokens": (
        lambda: methods.cam(vit().recordings[0]),
        "blocks.1.norm1: CAM needs features that are averaged over all positions",
    ),
    "no layout": (
        lambda: methods.gradcam(unplaced((2, 4, 6))),
        "layer: the positions of its values (2, 4, 6) on the image are not known",
    ),
    "channels last": (lambda: methods.gradcam(unplaced((2, 3, 5, 64))), "on the image are not known. Choose another layer"),
    "one position": (
        lambda: methods.gradcam(unplaced((2, 64, 1, 1), (1, 1))),
        "layer: its features have only one position, which gives no map",
    ),
    "eigencam of nothing": (lambda: methods.eigencam(Recording()), "no features of layer -1 were recorded"),
}


def unplaced(shape: tuple[int, ...], grid: tuple[int, ...] | None = None) -> Recording:
    value, gradient = torch.randn(shape), torch.randn(shape)
    layout = None if grid is None else TokenLayout("tokens", (), grid, Box(0, 0, 48, 80))
    return Recording(features=[FeatureRecord("layer", 0, "activation", value, gradient, layout)], input_size=(48, 80))


@pytest.mark.parametrize("case", list(REFUSED))
def test_method_refuses(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(OptionError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [*ORACLES, "cam", "eigencam", "scorecam", "ablationcam"])
def test_methods_apply_to_recordings_with_features_only(name: str) -> None:
    assert methods.METHODS[name].accepts(recording()) is None
    assert methods.METHODS[name].accepts(vit().recordings[0]) is None
    gates = Recording(features=[FeatureRecord("se", 0, "channel_gate", torch.rand(1, 3))])
    assert methods.METHODS[name].accepts(gates) == "no features of a layer were recorded."


@pytest.mark.parametrize(
    ("alias", "name"),
    [("grad-cam", "gradcam"), ("grad-cam++", "gradcam_plus_plus"), ("gradcam++", "gradcam_plus_plus"), ("score-cam", "scorecam")],
)
def test_methods_have_their_usual_names_as_aliases(alias: str, name: str) -> None:
    assert methods.name_of(alias) == name


# measured weights


@cache
def network() -> nn.Sequential:
    """Build a network with features after a ReLU at 1 and after a tanh at 3."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        layers = nn.Conv2d(3, 6, 3, 4), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 3 * 5, 3)
        return nn.Sequential(*layers).eval().requires_grad_(False)


PIXELS = tiny.pixels(1, (12, 20), seed=5)


def asked(layer: str, sign: int = 1, model: nn.Module | None = None, pixels: Tensor = PIXELS) -> tuple[Recording, ScoredImages]:
    """Return the recording of a layer, and the score of class 1."""
    judge = network() if model is None else model
    with visattn.capture(judge, features=[layer]) as made:
        judge(pixels)
    return made, ScoredImages(pixels, lambda x: sign * judge(x)[:, 1], model=judge)


def enlarged(channel: Array, height: int, width: int) -> Array:
    """Upsample bilinearly with aligned corners."""
    rows, columns = channel.shape
    out = np.zeros((height, width))
    for y, x in np.ndindex(out.shape):
        v, u = y * (rows - 1) / (height - 1), x * (columns - 1) / (width - 1)
        r, c = min(int(v), rows - 2), min(int(u), columns - 2)
        p, q = v - r, u - c
        out[y, x] = (1 - p) * ((1 - q) * channel[r, c] + q * channel[r, c + 1]) + p * (
            (1 - q) * channel[r + 1, c] + q * channel[r + 1, c + 1]
        )
    return out


def weighted(weights: list[float], features: Array) -> Array:
    """Compute `(sum_k w_k A_k)^+` of `(C, H, W)`."""
    out = np.zeros(features.shape[1:])
    for r, c in np.ndindex(out.shape):
        out[r, c] = max(0.0, math.fsum(w * features[k, r, c] for k, w in enumerate(weights)))
    return out


@pytest.mark.parametrize("layer", ["1", "3"])
def test_scorecam_equals_its_oracle(layer: str) -> None:
    made, scored = asked(layer)
    features = array(made.features[-1].value)[0]
    scores = []
    for channel in features:
        large = enlarged(channel, 12, 20)
        mask = (large - large.min()) / (large.max() - large.min() + 1e-8)
        scores.append(float(scored.score(PIXELS * torch.from_numpy(mask).float())[0]))
    shares = [math.exp(score) for score in scores]
    expected = weighted([share / math.fsum(shares) for share in shares], features)
    for batch in (1, 4, 16):
        found = scorecam(made, scored=scored, batch_size=batch)
        np.testing.assert_allclose(found.values[0], expected, atol=1e-5 * expected.max())
    assert found.provenance.notes == (f"{len(features)} evaluations of the model",)
    assert "grad-cam" in found.provenance.versions


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("layer", ["1", "3"])
def test_ablationcam_equals_its_oracle(layer: str, sign: int) -> None:
    made, scored = asked(layer, sign)
    features = made.features[-1].value
    behind = network()[int(layer) + 1 :]
    whole = sign * float(behind(features)[0, 1])
    weights = []
    for k in range(features.shape[1]):
        without = features.clone()
        without[0, k] = 0
        weights.append((whole - sign * float(behind(without)[0, 1])) / abs(whole))
    expected = weighted(weights, array(features)[0])
    assert expected.max() > 0
    for batch in (1, 4, 32):
        found = ablationcam(made, scored=scored, batch_size=batch)
        np.testing.assert_allclose(found.values[0], expected, atol=1e-5 * expected.max())
    assert not any(module._forward_hooks for module in network().modules())


def test_ablationcam_after_a_relu_equals_the_package_on_the_model(figures: Figures) -> None:
    package: Any = pytest.importorskip("pytorch_grad_cam", reason="needs grad-cam")
    sign = 1 if float(network()(PIXELS)[0, 1]) > 0 else -1  # the package divides by the score itself
    made, scored = asked("1", sign)
    model: Any = nn.Sequential(*network())
    cam = package.AblationCAM(model, [model[1]], batch_size=4)
    features = made.features[-1].value
    assert float(features.min()) == 0
    expected = cam.get_cam_image(PIXELS, model[1], [lambda logits: sign * logits[1]], features.numpy(), None)
    close(figures, "Ablation-CAM, package", ablationcam(made, scored=scored).values, np.maximum(expected, 0))


def test_ablationcam_of_tokens_does_not_ablate_the_class_token() -> None:
    model = tiny.vit().requires_grad_(False)
    made, scored = asked("blocks.1.norm1", model=model, pixels=tiny.pixels())
    tokens = made.features[-1].value
    norm = model.get_submodule("blocks.1.norm1")
    scores = []
    for k in (None, *range(tokens.shape[2])):
        edited = tokens.clone()
        if k is not None:
            edited[:, 1:, k] = 0
        handle = norm.register_forward_hook(lambda *_, given=edited: given)
        scores.append(float(model(tiny.pixels())[0, 1]))
        handle.remove()
    weights = [(scores[0] - score) / abs(scores[0]) for score in scores[1:]]
    expected = weighted(weights, array(tokens)[0, 1:].T.reshape(-1, *tiny.GRID))
    found = ablationcam(made, scored=scored).values[0]
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.max())


def test_features_that_differ_from_the_layer_output_cannot_be_put_back() -> None:
    made, scored = asked("1")
    other = replace(made, features=[replace(made.features[-1], value=made.features[-1].value + 1)])
    with pytest.raises(OptionError, match="1: its features cannot be put back into the model"):
        ablationcam(other, scored=scored)
    assert not any(module._forward_hooks for module in network().modules())


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "batch": (
        lambda: scorecam(asked("1")[0], scored=asked("1")[1], batch_size=0),
        OptionError,
        "batch_size must be at least 1, got 0",
    ),
    "several photos": (
        lambda: scorecam(asked("1")[0], scored=replace(asked("1")[1], pixels=PIXELS.repeat(2, 1, 1, 1))),
        ShapeError,
        "this method takes one image at a time, got a batch of 2",
    ),
    "no model": (
        lambda: ablationcam(asked("1")[0], scored=replace(asked("1")[1], model=None)),
        OptionError,
        "the model that computes the score is not known or has no layer 1. Use visattn.explain",
    ),
    "score of 0": (
        lambda: ablationcam(asked("1")[0], scored=replace(asked("1")[1], score=lambda x: x.new_zeros(len(x)))),
        OptionError,
        "the score is 0, so the lost share of it is undefined. Use method 'scorecam'",
    ),
    "no number for each image": (
        lambda: scorecam(asked("1")[0], scored=replace(asked("1")[1], score=lambda x: x.sum())),
        ShapeError,
        "the score must be one number for each of",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_measured_weights_are_refused(case: str) -> None:
    call, kind, message = WRONG[case]
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["eigencam", "scorecam", "ablationcam"])
def test_without_the_package_the_error_names_the_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda _: None)
    made, scored = asked("1")
    options = {} if name == "eigencam" else {"scored": scored}
    with pytest.raises(MissingExtra, match=rf'{name} needs pytorch_grad_cam, .* pip install -e "\.\[cam\]"'):
        methods.METHODS[name].function(made, **options)


@places
def test_eigencam_is_the_first_principal_component(place: str) -> None:
    made = recording(place)
    found = methods.eigencam(made)
    for b, (a, _) in enumerate(channels(made.features[-1])):
        centered = a - a.mean(1, keepdims=True)
        vector = np.ones(CHANNELS)
        for _ in range(20_000):  # power iteration
            vector = centered @ (centered.T @ vector)
            vector /= np.linalg.norm(vector)
        projected = centered.T @ vector
        projected = projected if projected.max() > -projected.min() else -projected
        np.testing.assert_allclose(found.values[b].flatten(), projected.clip(0), atol=1e-4 * projected.max())
    assert methods.METHODS["eigencam"].targeted is False
