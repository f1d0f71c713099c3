"""Similarity to another image as target, against networks whose evidence is known and against cosines that are written out here."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import visattn
from tests.cli.test_commands import Run, photo, run
from tests.pipeline.test_prompts import TOWER, WORDS
from visattn.core.pipeline.targets import Target
from visattn.errors import OptionError, VisattnError, VisattnWarning

__all__ = ["photo", "run"]

PHOTO, OTHER = "photo:chelsea", "photo:coffee"
SIDE, CELL = 64, 8


class Counting(nn.Module):
    """Embedding of two numbers: how much red the left half has, and how much blue the right half."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size, self.preprocess_cfg = SIDE, {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        self.cells = nn.Conv2d(3, 2, CELL, CELL, bias=False)
        with torch.no_grad():
            self.cells.weight.zero_()
            self.cells.weight[0, 0] = self.cells.weight[1, 2] = 1 / CELL**2

    def forward(self, x: Tensor) -> Tensor:
        red, blue = self.cells(x).unbind(1)
        half = red.shape[2] // 2
        return torch.stack([red[:, :, :half].sum((1, 2)), blue[:, :, half:].sum((1, 2))], 1)


class Embedder(nn.Module):
    """Small CNN; `shape` turns its numbers into what it returns."""

    def __init__(self, shape: Callable[[Tensor], Any] = lambda numbers: numbers) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(8, 5)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(self.head(self.conv(x).mean((2, 3))))


def painted(**cells: tuple[int, int]) -> NDArray[np.uint8]:
    """Return a black picture with cells `(row, column)` in a color; `red_1` is another red one."""
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    for name, (row, column) in cells.items():
        channel = {"red": 0, "blue": 2}[name.partition("_")[0]]
        pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL, channel] = 255
    return pixels


def test_what_red_is_similar_to_is_red_and_nothing_else_down_to_the_pixel(tmp_path: Path) -> None:
    photo = painted(red=(1, 2), red_1=(6, 0), red_2=(3, 6), blue=(2, 5), blue_1=(5, 1))
    Image.fromarray(painted(red=(4, 3))).save(tmp_path / "red.png")
    model = Counting().eval()
    made = visattn.explain(
        model, Image.fromarray(photo), target=f"similar:{tmp_path / 'red.png'}", method="hirescam", layer="cells"
    )
    expected = {(1, 2), (6, 0)}  # red in the left half
    assert {(int(row), int(column)) for row, column in made.map.values.nonzero()} == expected
    made.save(tmp_path / "out.png", interpolation="nearest", normalize="minmax", ground="photo")
    drawn = np.asarray(Image.open(tmp_path / "out.png").convert("RGB"))
    changed = (drawn != photo).any(2)
    lit = np.zeros((SIDE, SIDE), bool)
    for row, column in expected:
        lit[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = True
    assert np.array_equal(changed, lit)
    (said,) = made.provenance.target
    cosine = 2 / (2**2 + 1) ** 0.5  # two red cells on the left, one blue on the right
    assert float(said.rpartition(" = ")[2]) == pytest.approx(cosine, abs=5e-4)
    assert "red.png" in said
    assert "probab" not in said


def cosine_by_hand(one: Tensor, other: Tensor) -> Tensor:
    total = squares = others = torch.zeros((), dtype=one.dtype)
    for a, b in zip(one, other, strict=True):
        total, squares, others = total + a * b, squares + a * a, others + b * b
    return total / (squares.sqrt() * others.sqrt())


@pytest.mark.parametrize("as_text", [True, False])
def test_grad_cam_of_the_cosine_equals_a_loop_over_autograd(as_text: bool) -> None:
    model = Embedder().double().eval()
    target = f"similar:{OTHER}" if as_text else visattn.similar_to(visattn.load_image(OTHER))
    made = visattn.explain(model, PHOTO, target=target, method="gradcam", layer="conv", img_size=SIDE)
    photo, other = (visattn.prepare(name, model, img_size=SIDE).pixels.double() for name in (PHOTO, OTHER))
    features = model.conv(photo).detach().requires_grad_()
    score = cosine_by_hand(model.head(features.mean((2, 3)))[0], model(other)[0].detach())
    (slope,) = torch.autograd.grad(score, features)
    expected = torch.zeros(features.shape[2:])
    for channel in range(features.shape[1]):
        expected += slope[0, channel].mean() * features[0, channel].detach()
    expected = expected.clamp(min=0)
    assert float(expected.max()) > 0
    assert float((made.map.values - expected).abs().max()) <= 1e-6 * float(expected.max())
    assert float(made.provenance.target[0].rpartition(" = ")[2]) == pytest.approx(float(score.detach()), abs=5e-4)


def clip() -> Any:
    settings: dict[str, Any] = {
        "text_config": {**TOWER, "vocab_size": len(WORDS), "max_position_embeddings": 16, "eos_token_id": 3, "bos_token_id": 2},
        "vision_config": {**TOWER, "image_size": 32, "patch_size": 8},
        "projection_dim": 16,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    model: Any = transformers.CLIPModel(transformers.CLIPConfig(**settings))
    return model.eval()


def test_relevance_of_clip_from_image_to_image_equals_autograd_through_dense_attention() -> None:
    model = clip()
    made = visattn.explain(model, PHOTO, target=f"similar:{OTHER}", method="relevance")
    photo, other = (visattn.prepare(name, model).pixels for name in (PHOTO, OTHER))
    layers = model.vision_model(photo, output_attentions=True)
    score = cosine_by_hand(
        model.visual_projection(layers.pooler_output)[0],
        model.visual_projection(model.vision_model(other).pooler_output)[0].detach(),
    )
    gradients = torch.autograd.grad(score, layers.attentions)
    count = layers.attentions[0].shape[-1]
    total = torch.eye(count)
    for weights, gradient in zip(layers.attentions, gradients, strict=True):
        each = sum((weights[0, head] * gradient[0, head]).clamp(min=0) / weights.shape[1] for head in range(weights.shape[1]))
        total = total + torch.as_tensor(each).detach() @ total
    expected = total[0, 1:]
    assert float(expected.max()) > 0
    assert torch.allclose(made.map.values.flatten(), expected, atol=1e-5 * float(expected.max()))
    assert made.provenance.target[0].startswith("similarity to coffee.png = ")


def test_the_other_image_is_named_with_its_digest_and_read_upright(tmp_path: Path) -> None:
    model, photo = Embedder().eval(), visattn.load_image(OTHER).resize((40, 30))
    turned = photo.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned clockwise
    photo.save(tmp_path / "upright.png")
    turned.save(tmp_path / "turned.png", exif=exif)
    first, second = (
        visattn.explain(model, PHOTO, target=f"similar:{tmp_path / name}", method="gradcam", img_size=SIDE)
        for name in ("upright.png", "turned.png")
    )
    assert torch.equal(first.map.values, second.map.values)
    digest = visattn.images.image_facts(visattn.load_image(tmp_path / "turned.png")).sha256
    (told,) = (note for note in second.provenance.notes if digest in note)
    assert "turned.png" in told


@pytest.mark.parametrize("method", ["gradcam", "hirescam", "gradcam_plus_plus"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_photo_beside_itself_has_no_gradient_and_is_left_as_it_is(method: str, kind: torch.dtype) -> None:
    model = Embedder().eval().to(kind)
    made = visattn.explain(model, PHOTO, target=f"similar:{PHOTO}", method=method, layer="conv", img_size=SIDE)
    assert not made.map.values.any()
    assert " = 1;" in made.provenance.target[0]
    assert any("zero everywhere" in text for text in made.provenance.warnings)
    with pytest.warns(VisattnWarning, match="unchanged"):
        picture = made.overlay()
    assert np.array_equal(np.asarray(picture), np.asarray(visattn.load_image(PHOTO)))


def test_nearly_the_same_photo_still_has_its_gradient() -> None:
    model = Embedder().double().eval()
    changed = np.asarray(visattn.load_image(PHOTO)).copy()
    changed[100:200, 150:300] ^= 1
    made = visattn.explain(model, changed, target=f"similar:{PHOTO}", method="captum.saliency", img_size=SIDE)
    assert made.map.values.any()


def test_the_other_image_runs_once_for_all_photos_of_a_call() -> None:
    model = Embedder().eval()
    other = visattn.prepare(OTHER, model, img_size=SIDE).pixels
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, given: seen.append(int((given[0] == other).flatten(1).all(1).sum())))
    photos = [PHOTO, "photo:rocket", "photo:astronaut", PHOTO, "photo:rocket"]
    made = list(
        visattn.explain_batch(model, iter(photos), target=f"similar:{OTHER}", method="gradcam", batch_size=2, img_size=SIDE)
    )
    assert sum(seen) == 1
    for source, one in zip(photos, made, strict=True):
        alone = visattn.explain(model, source, target=f"similar:{OTHER}", method="gradcam", img_size=SIDE)
        assert torch.equal(one.map.values, alone.map.values)
        assert one.provenance.target == alone.provenance.target


def test_a_target_that_is_kept_follows_the_weights_and_the_model() -> None:
    model, target = Embedder().train(), visattn.similar_to(OTHER)
    options: dict[str, Any] = {"method": "gradcam", "img_size": SIDE}
    visattn.explain(model, PHOTO, target=target, **options)
    assert model.training
    with torch.no_grad():
        model.head.weight.neg_()
        model.head.bias.add_(1)
    for net in (model, Embedder(lambda out: out * torch.arange(5)).eval()):
        kept, fresh = (visattn.explain(net, PHOTO, target=of, **options) for of in (target, visattn.similar_to(OTHER)))
        assert kept.provenance.target == fresh.provenance.target
        assert torch.equal(kept.map.values, fresh.map.values)


@pytest.mark.parametrize("method", ["relevance", "gradcam"])
def test_a_network_of_timm_without_a_head_is_an_embedding(method: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=0).eval()
    made = visattn.explain(model, PHOTO, target=f"similar:{OTHER}", method=method)
    assert made.provenance.target[0].startswith("similarity to coffee.png = ")
    photo, other = (visattn.prepare(name, model).pixels for name in (PHOTO, OTHER))
    by_function = visattn.explain(
        model, PHOTO, method=method, target=lambda out: torch.cosine_similarity(out, model(other).detach().expand_as(out))
    )
    assert photo.shape
    scale = float(by_function.map.values.abs().max())
    assert torch.allclose(made.map.values, by_function.map.values, atol=1e-4 * scale)


def test_classes_are_no_embedding_unless_it_is_said() -> None:
    model = timm.create_model("test_vit").eval()
    with pytest.raises(OptionError, match=r"logits.*num_classes=0.*task='embedding'") as caught:
        visattn.explain(model, PHOTO, target=f"similar:{OTHER}", method="gradcam")
    assert "\n" not in str(caught.value)
    made = visattn.explain(model, PHOTO, target=f"similar:{OTHER}", method="gradcam", task="embedding")
    assert made.provenance.target[0].startswith("similarity to ")


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        (lambda out: out.softmax(1), {}, "probabilities"),
        (lambda out: out, {"labels": list("abcde")}, "logits"),
        (lambda out: out, {"task": "multi_label"}, "logits of labels"),
        (lambda out: out, {"task": "regression"}, "values"),
        (lambda out: {"logits": out}, {}, "logits"),
        (lambda out: out[:, :1], {}, "(1, 1)"),
        (lambda out: out[:, :, None, None].expand(-1, -1, 2, 2), {}, "(1, 5, 2, 2)"),
        (lambda out: [out], {}, "list"),
        (lambda out: out * 0, {}, "zero everywhere"),
        (lambda out: out, {"target": "similar:"}, "similar:photo:coffee"),
        (lambda out: out, {"target": "similar: "}, "similar:photo:coffee"),
        (lambda out: out, {"target": "similar:none.jpg"}, "none.jpg"),
        (lambda out: out, {"target": "similar:photo:cofee"}, "photo:coffee"),
        (lambda out: out, {"versus": 1}, "no versus"),
        (lambda out: out, {"target_space": "prob"}, "no target_space"),
        (lambda out: out, {"pixels": torch.rand(1, 3, 64, 64)}, "pixels"),
    ],
)
def test_what_cannot_be_compared_gets_one_line(shape: Callable[[Tensor], Any], options: dict[str, Any], words: str) -> None:
    photo = None if "pixels" in options else PHOTO
    given = {"target": f"similar:{OTHER}", "layer": "conv", **({} if "pixels" in options else {"img_size": SIDE}), **options}
    with pytest.raises(VisattnError) as caught:
        visattn.explain(Embedder(shape).eval(), photo, method="gradcam", **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outputs_that_nothing_calls_an_embedding_are_called_outputs() -> None:
    model = Embedder().eval()
    plain, stated = (
        visattn.explain(model, PHOTO, target=f"similar:{OTHER}", method="gradcam", img_size=SIDE, task=task).provenance.target[0]
        for task in (None, "embedding")
    )
    assert plain.replace("of the outputs ", "") == stated != plain


MODEL = ("--model", "own.py:build", "--method", "gradcam", "--img-size", "64", "--target", "similar:other.png")


@pytest.fixture
def own(photo: Path) -> Path:
    """Write a file with a network, and the other image."""
    code = "from tests.pipeline.test_other_images import Embedder\n\n\ndef build():\n    return Embedder().eval()\n"
    Path("own.py").write_text(code)
    visattn.load_image(OTHER).resize((60, 40)).save("other.png")
    return photo


def test_the_command_names_the_other_image_and_never_replaces_it(run: Run, own: Path) -> None:
    code, out, err = run("overlay", own, *MODEL, "-o", "out.png", "--json")
    assert code == 0, err
    made = json.loads(out)[0]["provenance"]
    assert made["target"][0].startswith("similarity of the outputs to other.png = ")
    assert any(hashlib.sha256(Path("other.png").read_bytes()).hexdigest() in note for note in made["notes"])
    before = Path("other.png").read_bytes()
    assert run("overlay", own, *MODEL, "-o", "other.png", "--overwrite")[0] == 2
    assert Path("other.png").read_bytes() == before


def test_a_run_over_many_images_notices_that_the_other_image_was_changed(run: Run, own: Path) -> None:
    code, _, err = run("batch", own, *MODEL, "-o", "maps", "--maps", "--no-pictures")
    assert code == 0, err
    (file,) = Path("maps").glob("*.npz")
    alone = visattn.explain(Embedder().eval(), own, target="similar:other.png", method="gradcam", img_size=SIDE)
    assert np.allclose(visattn.load_map(file)[0].values, alone.map.values)
    visattn.load_image("photo:rocket").save("other.png")
    code, _, err = run("batch", own, *MODEL, "-o", "maps", "--maps", "--no-pictures")
    assert (code, "computes something else now" in err) == (2, True)
    Path("other.png").unlink()
    code, _, err = run("batch", own, own.with_name("other.png"), *MODEL, "-o", "maps2", "--no-pictures", "--maps")
    assert "other.png" in err


def test_a_target_travels_to_other_processes_without_what_it_found_out() -> None:
    target = Target(f"similar:{OTHER}")
    model = Embedder().eval()
    visattn.explain(model, PHOTO, target=target.of, method="gradcam", img_size=SIDE)
    copy = pickle.loads(pickle.dumps(target))
    assert copy.named == target.named == ("similar", OTHER)
    assert (
        visattn.explain(model, PHOTO, target=copy.of, method="gradcam", img_size=SIDE)
        .provenance.target[0]
        .startswith("similarity")
    )
