"""Inputs inside of lists, tuples, dictionaries and dataclasses, by name and by position: each map is that of its own picture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.tensors import prepare_inputs
from visattn.errors import ImageError, ModelError, OptionError, ShapeError, VisattnNote

GENERATOR = torch.Generator().manual_seed(0)
LEFT, RIGHT = (torch.rand(1, 3, 32, 32, generator=GENERATOR) for _ in range(2))
TARGET = 2


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Sample:
    left: Tensor
    others: dict[str, list[Tensor]]

    def __post_init__(self) -> None:
        if self.left is None or any(one is None for one in self.others["views"]):
            raise ValueError("a sample needs its pictures")


class TwoStems(nn.Module):
    """Two stems of one shape, so that nothing but the place tells the pictures apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_left, self.of_right = (nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(12, 4)

    def scores(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.of_left(left).mean((2, 3)), self.of_right(right).mean((2, 3))], 1))
        return out


class Named(TwoStems):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.scores(left, right)


class OfDictionary(TwoStems):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.scores(batch["left"], batch["right"])


class OfSequence(TwoStems):
    def forward(self, pair: Pair) -> Tensor:
        return self.scores(*pair)


class OfPair(TwoStems):
    def forward(self, pair: Pair) -> Tensor:
        return self.scores(pair.left, pair.right)


class OfViews(TwoStems):
    def forward(self, *views: Tensor) -> Tensor:
        return self.scores(*views)


class ByPosition(TwoStems):
    def forward(self, left: Tensor, right: Tensor, /) -> Tensor:
        return self.scores(left, right)


class OfSample(TwoStems):
    def forward(self, sample: Sample, scale: float = 1.0) -> Tensor:
        return scale * self.scores(sample.left, sample.others["views"][1])


def gradcam_by_hand(model: TwoStems, left: Tensor, right: Tensor, which: str) -> Tensor:
    """Compute Grad-CAM of one stem, whose features are cut from the other's by hand."""
    features = {"left": model.of_left(left).detach(), "right": model.of_right(right).detach()}
    features[which].requires_grad_()
    score = model.head(torch.cat([one.mean((2, 3)) for one in features.values()], 1))[0, TARGET]
    (slope,) = torch.autograd.grad(score, features[which])
    expected: Tensor = (slope.mean((2, 3), keepdim=True) * features[which].detach()).sum(1)[0].clamp(min=0)
    return expected


def explained(model: nn.Module, image: Any, inputs: Mapping[Any, Any], **options: Any) -> visattn.Explanation:
    return visattn.explain(model, image, method="gradcam", inputs=inputs, target=TARGET, **options)


CASES: dict[str, tuple[Callable[[], TwoStems], Callable[[Tensor, Tensor], Any], str, str]] = {
    "dictionary": (OfDictionary, lambda a, b: {"batch": {"left": a, "right": b}}, "batch.left", "batch.right"),
    "dictionary in another order": (OfDictionary, lambda a, b: {"batch": {"right": b, "left": a}}, "batch.left", "batch.right"),
    "dictionary by position": (OfDictionary, lambda a, b: {0: {"left": a, "right": b}}, "0.left", "batch.right"),
    "list": (OfSequence, lambda a, b: {"pair": [a, b]}, "pair.0", "pair.1"),
    "tuple": (OfSequence, lambda a, b: {"pair": (a, b)}, "pair.0", "pair.1"),
    "named tuple": (OfPair, lambda a, b: {"pair": Pair(a, b)}, "pair.left", "pair.right"),
    "positions": (OfViews, lambda a, b: {1: b, 0: a}, "0", "views.1"),
    "views": (OfViews, lambda a, b: {"views": [a, b]}, "views.0", "1"),
    "positional only": (ByPosition, lambda a, b: {0: a, 1: b}, "left", "1"),
    "positional only by name": (ByPosition, lambda a, b: {"right": b, "left": a}, "0", "right"),
    "dataclass": (
        OfSample,
        lambda a, b: {"sample": Sample(a, {"views": [torch.zeros(2), b]})},
        "sample.left",
        "sample.others.views.1",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_each_picture_has_its_own_map(name: str) -> None:
    kind, given, left, right = CASES[name]
    model = kind().eval()
    for which, place in {"left": left, "right": right}.items():
        made = explained(model, place, given(LEFT, RIGHT))
        assert torch.allclose(made.map.values, gradcam_by_hand(model, LEFT, RIGHT, which), atol=1e-6)
        assert made.provenance.parameters["layer"] == f"of_{which}"


def test_dry_runs_with_what_a_model_does_not_take_are_silent() -> None:
    photo = Image.new("RGB", (40, 30), (90, 60, 30))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        explained(OfDictionary().eval(), "batch.left", {"batch": {"left": photo, "right": photo}})
    assert not [one for one in caught if not issubclass(one.category, VisattnNote)]


def test_the_picture_is_said() -> None:
    (note,) = explained(OfDictionary().eval(), "batch.right", {"batch": {"left": LEFT, "right": RIGHT}}).provenance.notes
    assert note.startswith("the picture is the input batch.right")
    assert "batch.left (1, 3, 32, 32)" in note


def test_swapped_pictures_have_swapped_maps() -> None:
    model = Named().eval()
    for one, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
        made = explained(model, "left", {"right": other, "left": one})
        assert torch.allclose(made.map.values, gradcam_by_hand(model, one, other, "left"), atol=1e-6)


def test_one_tensor_may_be_given_twice() -> None:
    model = Named().eval()
    for which in ("left", "right"):
        made = explained(model, which, {"left": LEFT, "right": LEFT})
        assert torch.allclose(made.map.values, gradcam_by_hand(model, LEFT, LEFT, which), atol=1e-6)
        assert made.provenance.parameters["layer"] == f"of_{which}"


def test_inputs_are_not_changed() -> None:
    sample = Sample(LEFT, {"views": [torch.zeros(2), RIGHT]})
    explained(OfSample().eval(), "sample.left", {"sample": sample})
    assert sample.left is LEFT
    assert sample.others["views"][1] is RIGHT
    assert not LEFT.requires_grad
    assert not RIGHT.requires_grad


def test_half_precision_and_training_mode() -> None:
    model = OfDictionary().half().train()
    made = explained(model, "batch.right", {"batch": {"left": LEFT, "right": RIGHT}})
    expected = gradcam_by_hand(OfDictionary(), LEFT, RIGHT, "right")
    assert torch.allclose(made.map.values.float(), expected, atol=0.01 * float(expected.max()))
    assert model.training


@pytest.mark.parametrize("image", [None, "batch", "batch.rigth"])
def test_what_may_be_the_picture_is_listed(image: str | None) -> None:
    with pytest.raises(OptionError, match=r"batch\.left \(1, 3, 32, 32\), batch\.right \(1, 3, 32, 32\)"):
        explained(OfDictionary().eval(), image, {"batch": {"left": LEFT, "right": RIGHT}})


@pytest.mark.parametrize(
    ("image", "inputs", "kind", "message"),
    [
        ("left", {"left": LEFT, "rihgt": RIGHT}, OptionError, "'rihgt'; did you mean 'right'"),
        ("left", {0: LEFT, 2: RIGHT}, OptionError, "position 2. Its inputs: left, right"),
        ("left", {0: LEFT, "left": LEFT}, OptionError, "left is given twice"),
        ("lefft", {"left": LEFT, "right": RIGHT}, OptionError, r"'lefft' is no input and no file. Inputs: left"),
        ("lefft.png", {"left": LEFT, "right": RIGHT}, ImageError, r"lefft\.png: no such file"),
        (
            "left",
            {"left": LEFT.expand(2, -1, -1, -1), "right": RIGHT},
            ShapeError,
            r"left must be one image .* got \(2, 3, 32, 32\)",
        ),
        ("left", {"left": LEFT, "right": RIGHT[:, :1]}, ModelError, r"of_right\.0 .*right \(1, 1, 32, 32\)"),
        ("photo:chelsea", {}, OptionError, "inputs left, right is the photo, and the others are missing"),
    ],
)
def test_what_does_not_fit_is_told(image: str, inputs: Mapping[Any, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        explained(Named().eval(), image, inputs)


def test_a_photo_goes_where_an_input_is_missing() -> None:
    photo = visattn.load_image("photo:chelsea")
    how = Preprocessing(img_size=32)
    own = visattn.prepare(photo, Named(), img_size=32).pixels
    cases: list[tuple[nn.Module, dict[Any, Any], str | None]] = [
        (Named(), {"left": RIGHT}, "right"),
        (Named(), {1: own}, ""),  # the other picture may show the same
        (OfViews(), {0: RIGHT}, None),
        (OfViews(), {1: RIGHT}, "views.0"),
        (OfDictionary(), {"batch": {"left": RIGHT, "right": own}}, "batch.right"),  # these pixels are those of the photo
    ]
    for model, inputs, place in cases:
        if place is None:  # a function of any number of arguments lacks none
            with pytest.raises(OptionError, match="the only one that may be the photo"):
                prepare_inputs(inputs, photo, model, how)
            continue
        prepared = prepare_inputs(inputs, photo, model, how)
        assert prepared.spec_of(model).keyword == place
        assert torch.equal(prepared.pixels, own)


def test_a_photo_without_a_place_is_refused() -> None:
    with pytest.raises(OptionError, match=r"batch\.right is the only one that may be the photo.*pass it there"):
        explained(OfDictionary().eval(), "photo:chelsea", {"batch": {"right": RIGHT}}, img_size=32)
    own = visattn.prepare("photo:chelsea", Named(), img_size=32).pixels
    with pytest.raises(OptionError, match=r"batch\.left .*batch\.right .*may be the picture"):
        explained(OfDictionary().eval(), "photo:chelsea", {"batch": {"left": own, "right": own}}, img_size=32)


def test_a_table_of_the_shape_of_the_photo_is_not_the_photo() -> None:
    model, table = Named().eval(), torch.full((1, 3, 32, 32), 0.5)
    made = explained(model, "photo:chelsea", {"right": table}, img_size=32)
    own = visattn.prepare("photo:chelsea", model, img_size=32).pixels
    assert torch.allclose(made.map.values, gradcam_by_hand(model, own, table, "left"), atol=1e-6)


def test_photos_among_the_inputs_are_preprocessed_as_the_picture_is() -> None:
    model, photos = OfDictionary().eval(), [visattn.load_image(f"photo:{name}") for name in ("chelsea", "coffee")]
    left, right = (visattn.prepare(photo, model, img_size=32).pixels for photo in photos)
    made = explained(model, "batch.right", {"batch": dict(zip(("left", "right"), photos, strict=True))}, img_size=32)
    assert torch.allclose(made.map.values, gradcam_by_hand(model, left, right, "right"), atol=1e-6)
    assert made.photo.tobytes() == photos[1].tobytes()
    assert any("batch.left: chelsea.png, preprocessed" in note for note in made.provenance.notes)


class Joined(nn.Module):
    """Color and depth, whose stems end in one trunk; or one network for both, joined as channels or as a batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.rgb, self.depth, self.trunk = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(12, 6, 3, 1, 1)
        self.early, self.head = nn.Conv2d(6, 6, 3, 2, 1), nn.Linear(6, 4)

    def forward(self, pictures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rgb, depth = pictures["rgb"], pictures["depth"]
        if self.how == "channels":
            features = self.early(torch.cat([rgb, depth], 1))
        elif self.how == "batch":
            features = self.rgb(torch.cat([rgb, depth])).mean(0, keepdim=True)
        else:
            features = self.trunk(torch.cat([self.rgb(rgb), self.depth(depth)], 1))
        return {"logits": self.head(features.mean((2, 3)))}


@pytest.mark.parametrize("target", [TARGET, lambda output: output["logits"][:, TARGET]])
@pytest.mark.parametrize("picture", ["rgb", "depth"])
def test_the_layer_is_of_the_own_branch(picture: str, target: Any) -> None:
    inputs = {"pictures": {"rgb": LEFT, "depth": RIGHT}}
    made = visattn.explain(Joined("trunk").eval(), f"pictures.{picture}", method="gradcam", inputs=inputs, target=target)
    assert made.provenance.parameters["layer"] == picture


@pytest.mark.parametrize("how", ["channels", "batch"])
@pytest.mark.parametrize("layer", [None, "early", "rgb"])
def test_features_of_two_pictures_are_the_map_of_none(how: str, layer: str | None) -> None:
    inputs, named = {"pictures": {"rgb": LEFT, "depth": RIGHT}}, {} if layer is None else {"layer": layer}
    with pytest.raises(OptionError, match=r"none of this image alone|positions of its values|has no output"):
        explained(Joined(how).eval(), "pictures.rgb", inputs, **named)
