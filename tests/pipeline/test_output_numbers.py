"""Targets that name numbers of an output, against functions of the output that are written out here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import visattn
from visattn.errors import ShapeError, VisattnError

PHOTO = "photo:chelsea"
LABELS = ["cat", "dog", "bird, flying", "sea"]


class Net(nn.Module):
    """Small CNN; `shape` turns its numbers into what it returns."""

    def __init__(self, numbers: int, shape: Callable[[Tensor], Any] = lambda numbers: numbers) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(8, numbers)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(self.head(self.conv(x).mean((2, 3))))


def explained(model: nn.Module, target: Any, **options: Any) -> visattn.AttentionMap:
    return visattn.explain(model.eval(), PHOTO, method="hirescam", target=target, img_size=64, **options).map


def by_hand(model: nn.Module, score: Callable[[Any], Tensor]) -> Tensor:
    """Compute HiResCAM of the last feature map: the gradient times the map, summed over channels, without what is negative."""
    prepared = visattn.prepare(PHOTO, model, img_size=64)
    features = model.get_submodule("conv")(prepared.pixels).detach().requires_grad_()
    output = model.shape(model.get_submodule("head")(features.mean((2, 3))))  # type: ignore[operator]
    (slope,) = torch.autograd.grad(score(output).sum(), features)
    made: Tensor = (features.detach() * slope).sum(1)[0].clamp(min=0)
    return made


@pytest.mark.parametrize(
    ("target", "score"),
    [
        ("output:0", lambda output: output[:, 0]),
        ("output:3", lambda output: output[:, 3]),
        ("output: +3 ", lambda output: output[:, 3]),
        ("output:-3", lambda output: -output[:, 3]),
        ("output:-0", lambda output: -output[:, 0]),
        ("class:2", lambda output: output[:, 2]),
        ("label:2", lambda output: output[:, 2]),
        ("label:1,3", lambda output: output[:, 1] + output[:, 3]),
        ("label:0, 1, 2", lambda output: output[:, :3].sum(1)),
    ],
)
def test_a_target_is_the_gradient_of_what_it_names(target: str, score: Callable[[Tensor], Tensor]) -> None:
    model = Net(4)
    assert torch.allclose(explained(model, target).values, by_hand(model, score), atol=1e-8)


@pytest.mark.parametrize("shape", [lambda out: out, lambda out: out[:, 0], lambda out: {"logits": out}])
@pytest.mark.parametrize("sign", ["", "-"])
def test_one_number_can_be_explained_either_way(shape: Callable[[Tensor], Any], sign: str) -> None:
    def numbers(out: Any) -> Tensor:
        flat: Tensor = out["logits"].flatten() if isinstance(out, dict) else out.flatten()
        return flat

    model = Net(1, shape)
    factor = -1 if sign else 1
    made = explained(model, f"output:{sign}0")
    assert torch.allclose(made.values, by_hand(model, lambda out: factor * numbers(out)), atol=1e-8)
    (said,) = made.provenance.target
    assert said.startswith("minus output 0 = " if sign else "output 0 = ")


def test_labels_are_found_by_name_and_are_no_classes() -> None:
    model = Net(4)
    made = explained(model, "label:dog,sea", labels=LABELS)
    assert torch.allclose(made.values, by_hand(model, lambda out: out[:, 1] + out[:, 3]), atol=1e-8)
    (said,) = made.provenance.target
    assert "dog" in said
    assert "sea" in said
    one = explained(model, "label:bird, flying", labels=LABELS)
    assert torch.allclose(one.values, by_hand(model, lambda out: out[:, 2]), atol=1e-8)


def test_the_probability_of_a_label_is_its_own() -> None:
    model = Net(4)
    made = explained(model, "label:2", target_space="prob")
    prepared = visattn.prepare(PHOTO, model, img_size=64)
    with torch.no_grad():
        expected = float(torch.sigmoid(model.eval()(prepared.pixels))[0, 2])
    (score,) = made.provenance.scores
    assert score["probability"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("output:4", {}, "has 4 numbers"),
        ("output:one", {}, "output:0 to output:3"),
        ("output:", {}, "names nothing"),
        ("label:", {}, "names nothing"),
        ("label:9", {}, "0 to 3"),
        ("label:1,9", {}, "0 to 3"),
        ("label:1,1", {}, "twice"),
        ("label:1,2", {"versus": 3}, "no versus"),
        ("label:dog", {}, "names are unknown"),
        ("label:1", {"task": "classes"}, "'classes'"),
        ("output:1", {"target_space": "prob"}, "no target_space"),
        ("class:9", {}, "0 to 3"),
        ("label:9", {}, "label from 0 to 3"),
        ("label:1,", {}, "names nothing"),
        ("label:", {"labels": LABELS}, "cat, dog, bird, flying, sea"),
        ("label:dog,dog", {"labels": LABELS}, "dog twice"),
        ("label:dgo", {"labels": LABELS}, "dog"),
        ("class:whale", {"labels": LABELS}, "cat, dog, bird, flying, sea"),
        ("class:dog", {}, "0 to 3"),
        ("lable:3", {}, "label:A,B"),
        ("Output:3", {}, "output:N"),
        ("bix:3", {"labels": LABELS}, "box:N"),
        ("zzz:3", {}, "similar:IMAGE"),
        ("output:-9", {}, "output:0 to output:3"),
        ("query:0", {}, "needs a detector"),
        ("text:a cat", {}, "no text tower"),
    ],
)
def test_what_is_not_there_gets_one_line(target: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(VisattnError) as caught:
        explained(Net(4), target, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dense_output_has_no_single_number() -> None:
    model = Net(4, lambda out: out[:, :, None, None].expand(-1, -1, 5, 5))
    with pytest.raises(ShapeError, match=r"\(1, 4, 5, 5\)"):
        explained(model, "output:1")


def test_a_class_whose_name_has_a_colon_is_found() -> None:
    labels = ["state: open", "state: shut", "kind: none", "sea"]
    made = explained(Net(4), "state: shut", labels=labels)
    assert torch.equal(made.values, explained(Net(4), 1, labels=labels).values)
