from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import timm
import timm.data
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from visattn.core.drawing.overlays import overlay
from visattn.core.families import input_spec
from visattn.core.geometry import Box
from visattn.core.maps import AttentionMap
from visattn.core.pipeline import inputs
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.inputs import prepare, prepare_batch
from visattn.errors import ImageError, OptionError, ShapeError, UnsupportedModel

CONFIG: dict[str, Any] = {
    "input_size": (3, 64, 64),
    "crop_pct": 0.875,
    "crop_mode": "center",
    "interpolation": "bicubic",
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.25, 0.3),
    "num_classes": 5,
    "classifier": "head",
}


def small_vit(*, classes: int = 5, patch: int | tuple[int, int] = 16, side: int | tuple[int, int] = 64, **options: Any) -> Any:
    """Build a small timm VisionTransformer with its own data configuration."""
    config = {key: options.pop(key) for key in list(options) if key in CONFIG}
    model = VisionTransformer(
        img_size=side, patch_size=patch, embed_dim=16, depth=1, num_heads=2, num_classes=classes, **options
    ).eval()
    sides = (side, side) if isinstance(side, int) else side
    model.pretrained_cfg = CONFIG | {"input_size": (3, *sides)} | config
    return model


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(7).integers(0, 256, (height, width, 3), dtype=np.uint8))


def timms_own(model: nn.Module, photo: Image.Image) -> Tensor:
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    pixels: Tensor = transform(photo)
    return pixels


SIZES = {"landscape": (120, 200), "portrait": (210, 90), "square": (101, 101), "tiny": (7, 5), "strip": (3, 90), "dot": (1, 1)}
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())


# ---- resize='model' is timm's own transform ---------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "vit_tiny_patch16_384",
        "vit_relpos_small_patch16_224",
    ],
)
def published(request: pytest.FixtureRequest) -> Any:
    """Build a registered model with its own configuration, but with a single block and random weights."""
    return timm.create_model(request.param, pretrained=False, depth=1).eval()


@sizes
def test_model_pixels_of_a_published_model_equal_timm_bit_for_bit(published: Any, size: tuple[int, int]) -> None:
    photo = noise(*size)
    assert torch.equal(prepare(photo, published, resize="model").pixels[0], timms_own(published, photo))


@sizes
@pytest.mark.parametrize("crop_pct", [0.8, 0.95, 1.0])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_model_pixels_equal_timm_bit_for_bit(interpolation: str, crop_mode: str, crop_pct: float, size: tuple[int, int]) -> None:
    model = small_vit(crop_mode=crop_mode, crop_pct=crop_pct, interpolation=interpolation)
    photo = noise(*size)
    assert torch.equal(prepare(photo, model, resize="model").pixels[0], timms_own(model, photo))


@sizes
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_model_pixels_of_an_oblong_model_equal_timm_bit_for_bit(crop_mode: str, size: tuple[int, int]) -> None:
    model = small_vit(side=(48, 96), crop_mode=crop_mode)
    photo = noise(*size)
    assert torch.equal(prepare(photo, model, resize="model").pixels[0], timms_own(model, photo))


def test_classifier_is_prepared_by_its_own_transform() -> None:
    model, photo = small_vit(), noise(120, 200)
    assert torch.equal(prepare(photo, model).pixels[0], timms_own(model, photo))


def test_headless_model_receives_the_uncropped_photo() -> None:
    geometry = prepare(noise(120, 200), small_vit(classes=0)).geometry
    assert geometry.seen() == Box(0, 0, 120, 200)


class Trimmed:
    """Transform step of an unknown type."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.crop((1, 1, image.width, image.height))


def test_unknown_step_of_the_transform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_vit()
    spec = input_spec(model)
    odd = type(spec)(**{**vars(spec), "transform": (Trimmed(), *spec.transform)})
    monkeypatch.setattr(inputs, "input_spec", lambda *_: odd)
    with pytest.raises(UnsupportedModel, match=r"has the unsupported step Trimmed\. Use resize='fit'"):
        prepare(noise(9, 9), model, resize="model")


# ---- the geometry maps pixels to the input ----------------------------------------------------------------------------------------


def marked(height: int, width: int, y: int, x: int, side: int) -> Image.Image:
    """Draw a black photo with a white block whose top-left corner is at (y, x)."""
    photo = Image.new("RGB", (width, height))
    photo.paste((255, 255, 255), (x, y, x + side, y + side))
    return photo


def light_of(pixels: Tensor, model: Any) -> NDArray[np.float64]:
    """Undo the normalization of pixels."""
    mean, std = (torch.tensor(model.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    light: NDArray[np.float64] = (pixels * std + mean).mean(0).double().clamp(0, 1).numpy()
    return light


def centroid(light: NDArray[np.float64]) -> tuple[float, float]:
    y, x = np.mgrid[: light.shape[0], : light.shape[1]] + 0.5
    return float((y * light).sum() / light.sum()), float((x * light).sum() / light.sum())


@pytest.mark.parametrize(
    ("height", "width", "y", "x"),
    [
        pytest.param(120, 200, 70, 90, id="landscape"),
        pytest.param(210, 90, 80, 20, id="portrait"),
        pytest.param(128, 128, 44, 75, id="square"),
        pytest.param(500, 401, 200, 150, id="large"),
    ],
)
@pytest.mark.parametrize("crop_pct", [0.75, 1.0])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("resize", ["model", "fit"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["one size", "any size"])
def test_block_of_the_photo_lands_where_the_geometry_maps_it(
    dynamic: bool, resize: Literal["model", "fit"], crop_mode: str, crop_pct: float, height: int, width: int, y: int, x: int
) -> None:
    model = small_vit(dynamic_img_size=dynamic, crop_mode=crop_mode, crop_pct=crop_pct, side=(96, 128), mean=(0.0, 0.0, 0.0))
    side = max(height, width) // 10
    prepared = prepare(marked(height, width, y, x, side), model, resize=resize)
    expected = prepared.geometry.to_input(y + side / 2, x + side / 2)
    assert centroid(light_of(prepared.pixels[0], model)) == pytest.approx(expected, abs=0.6)


def test_padding_keeps_all_of_the_photo() -> None:
    model = small_vit(crop_mode="border", crop_pct=1.0)
    geometry = prepare(noise(100, 200), model, resize="model").geometry
    assert geometry.seen() == Box(0, 0, 100, 200)
    assert geometry.window == Box(-50, 0, 150, 200)


def test_photo_is_not_modified() -> None:
    photo = noise(50, 70)
    prepare_batch([photo], small_vit())
    assert photo.tobytes() == noise(50, 70).tobytes()


def test_photo_is_returned_with_the_pixels() -> None:
    prepared = prepare(Image.new("L", (20, 10), 50), small_vit())
    assert (prepared.photo.mode, prepared.photo.size) == ("RGB", (20, 10))
    assert prepared.geometry.photo == (10, 20)
    assert prepared.geometry.rule == "the model's own evaluation transform"


def test_pixels_are_on_the_models_device_and_normalized() -> None:
    prepared = prepare(Image.new("RGB", (80, 80), (255, 0, 51)), small_vit(classes=0))
    assert prepared.pixels.device.type == "cpu"
    expected = [(1 - 0.5) / 0.2, (0 - 0.4) / 0.25, (0.2 - 0.3) / 0.3]
    assert prepared.pixels[0].mean((1, 2)).tolist() == pytest.approx(expected, abs=1e-5)


# ---- resize='fit' -----------------------------------------------------------------------------------------------------------------


def nearest_multiple(side: float, step: int) -> int:
    """Round a side to a whole number of patches, at least one."""
    return min((count * step for count in range(1, 200)), key=lambda length: abs(length - side))


@pytest.mark.parametrize("size", [(120, 200), (210, 90), (101, 101), (300, 301), (50, 499), (640, 77), (7, 5)], ids=str)
@pytest.mark.parametrize(("patch", "side"), [(16, 224), (14, 518), (8, (96, 64))], ids=str)
def test_fit_is_the_shape_of_full_patches_nearest_to_the_photo(
    patch: int, side: int | tuple[int, int], size: tuple[int, int]
) -> None:
    model = small_vit(classes=0, patch=patch, side=side, dynamic_img_size=True)
    area = side * side if isinstance(side, int) else side[0] * side[1]
    ideal = math.sqrt(area * size[0] / size[1]), math.sqrt(area * size[1] / size[0])
    prepared = prepare(noise(*size), model, resize="fit")
    assert prepared.pixels.shape[2:] == (nearest_multiple(ideal[0], patch), nearest_multiple(ideal[1], patch))
    assert prepared.geometry.input == prepared.pixels.shape[2:]
    assert prepared.geometry.window == Box(0, 0, *size)


def test_fit_of_patches_that_are_not_square_has_full_patches() -> None:
    prepared = prepare(noise(100, 150), small_vit(classes=0, patch=(8, 16), side=(64, 64), dynamic_img_size=True))
    height, width = prepared.pixels.shape[2:]
    assert (height % 8, width % 16) == (0, 0)


def test_fit_of_a_square_photo_is_the_models_own_size() -> None:
    assert prepare(noise(99, 99), small_vit(dynamic_img_size=True), resize="fit").pixels.shape == (1, 3, 64, 64)


@pytest.mark.parametrize("size", [(1, 60000), (60000, 1), (2, 500), (30, 9000)], ids=str)
def test_strip_takes_no_more_than_the_area_of_the_model(size: tuple[int, int]) -> None:
    """Check the input of a very narrow photo: 16 x 54,864, 17 times the model's area, would take minutes."""
    model = small_vit(side=224, dynamic_img_size=True)
    prepared = prepare(Image.new("RGB", size[::-1]), model, resize="fit")
    height, width = prepared.geometry.input
    assert height * width <= 224 * 224 * 1.05
    assert min(height, width) == 16
    assert prepared.geometry.window == Box(0, 0, *size)  # still the whole photo


def test_strip_fits_with_one_patch_across() -> None:
    assert prepare(noise(400, 1), small_vit(dynamic_img_size=True), resize="fit").pixels.shape[3] == 16


def test_fit_squashes_for_a_fixed_size_model_and_states_it() -> None:
    prepared = prepare(noise(50, 200), small_vit(classes=0), resize="fit")
    assert prepared.pixels.shape == (1, 3, 64, 64)
    assert prepared.geometry.window == Box(0, 0, 50, 200)
    assert prepared.geometry.rule == "the whole photo, squashed to one size"


def test_fit_for_a_dynamic_size_model_does_not_mention_squashing() -> None:
    assert prepare(noise(50, 200), small_vit(dynamic_img_size=True), resize="fit").geometry.rule == "the whole photo"


@pytest.mark.parametrize(("asked", "got"), [(64, 64), (230, 224), (233, 240), (1, 16), (100, 96)], ids=str)
@pytest.mark.parametrize("resize", ["model", "fit"])
def test_img_size_is_rounded_to_full_patches(resize: Literal["model", "fit"], asked: int, got: int) -> None:
    prepared = prepare(noise(90, 90), small_vit(dynamic_img_size=True), resize=resize, img_size=asked)
    assert prepared.pixels.shape == (1, 3, got, got)


def test_img_size_of_a_fixed_size_model_is_refused() -> None:
    with pytest.raises(
        OptionError,
        match=r"takes only 64 x 64 pixels, got 128 x 128. Build it for this size: load_model or timm.create_model with img_size=128",
    ):
        prepare(noise(9, 9), small_vit(), img_size=128)


def test_img_size_equal_to_the_models_size_is_allowed() -> None:
    assert prepare(noise(9, 9), small_vit(), img_size=64).pixels.shape == (1, 3, 64, 64)


# ---- batches ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", ["model", "fit"])
def test_batch_equals_single_photos(resize: Literal["model", "fit"]) -> None:
    model = small_vit()
    photos = [noise(50, 80), noise(120, 60), noise(30, 30)]
    batch = prepare_batch(photos, model, resize=resize)
    alone = [prepare(photo, model, resize=resize) for photo in photos]
    assert torch.equal(batch.pixels, torch.cat([one.pixels for one in alone]))
    assert batch.geometries == tuple(one.geometry for one in alone)


def test_batch_of_different_photos_fits_their_mean_shape_without_cropping() -> None:
    batch = prepare_batch([noise(100, 200), noise(300, 150)], small_vit(side=224, dynamic_img_size=True), resize="fit")
    assert batch.pixels.shape == (2, 3, 224, 224)  # the two aspect ratios cancel
    assert [geometry.window for geometry in batch.geometries] == [Box(0, 0, 100, 200), Box(0, 0, 300, 150)]
    assert {geometry.input for geometry in batch.geometries} == {(224, 224)}


def test_batch_of_photos_of_one_shape_keeps_it() -> None:
    model = small_vit(side=224, dynamic_img_size=True)
    batch = prepare_batch([noise(100, 200), noise(50, 100)], model, resize="fit")
    assert batch.pixels.shape[2:] == prepare(noise(100, 200), model, resize="fit").pixels.shape[2:]


def test_no_photos_are_refused() -> None:
    with pytest.raises(ImageError, match="no photos were given; nothing to do"):
        prepare_batch([], small_vit())


@pytest.mark.parametrize("name", ["photo", "geometry"])
def test_one_photo_of_a_batch_of_two_is_refused(name: str) -> None:
    batch = prepare_batch([noise(9, 9), noise(9, 9)], small_vit())
    with pytest.raises(ShapeError, match=r"the batch has 2 photos. Use .photos and .geometries"):
        getattr(batch, name)


# ---- models that do not fit -------------------------------------------------------------------------------------------------------


def test_unknown_resize_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown resize 'fitt'; did you mean 'fit'"):
        prepare(noise(9, 9), small_vit(), resize="fitt")  # type: ignore[arg-type]


@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("resize", ["model", "fit"])
def test_model_of_other_channels_is_refused(resize: Literal["model", "fit"], channels: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"takes {channels} channels, got an image of mode RGB. Pass an array") as caught:
        prepare(noise(9, 9), small_vit(in_chans=channels), resize=resize)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("resize", ["model", "fit"])
def test_model_of_one_channel_receives_the_luminance(resize: Literal["model", "fit"]) -> None:
    photo = Image.new("RGB", (64, 64), (200, 100, 20))
    prepared = prepare(photo, small_vit(in_chans=1, crop_pct=1.0), resize=resize)
    luminance = (0.299 * 200 + 0.587 * 100 + 0.114 * 20) / 255
    assert prepared.pixels.shape == (1, 1, 64, 64)
    assert torch.allclose(prepared.pixels, torch.tensor((luminance - 0.4) / 0.25), atol=0.5 / 255 / 0.25)
    assert prepared.photo.mode == "RGB"
    assert "it received the photo's luminance" in prepared.notes[0]


def test_model_of_one_channel_is_normalized_by_its_own_mean() -> None:
    model = small_vit(in_chans=1, mean=(0.1,), std=(0.5,), classes=0)
    assert torch.allclose(prepare(Image.new("RGB", (64, 64), "white"), model).pixels, torch.tensor(0.9 / 0.5))


def test_model_of_three_channels_needs_no_note() -> None:
    assert prepare(noise(9, 9), small_vit()).notes == ()


def test_custom_model_gets_224_pixels_and_the_statistics_of_imagenet() -> None:
    prepared = prepare(noise(300, 200), nn.Sequential(nn.Conv2d(3, 4, 16, 16)))
    assert tuple(prepared.pixels.shape) == (1, 3, 224, 224)
    assert input_spec(nn.Sequential(nn.Conv2d(3, 4, 16, 16))).mean == (0.485, 0.456, 0.406)


def test_map_of_a_patch_that_does_not_divide_covers_what_the_patches_cover() -> None:
    """Check an input of 230 pixels with 16-pixel patches: the last 6 pixels belong to no patch."""
    model, photo = small_vit(side=230, crop_pct=1.0, classes=0), noise(460, 230)
    prepared = prepare(photo, model)
    assert prepared.pixels.shape == (1, 3, 230, 230)
    with torch.inference_mode(), capture(model) as recording:
        model(prepared.pixels)
    layout = recording[0].keys
    assert (layout.grid, layout.box) == ((14, 14), Box(0, 0, 224, 224))
    values = torch.rand(14, 14, generator=torch.Generator().manual_seed(0))
    heat = AttentionMap(values, (), layout, {}, "attention").to_heatmap(prepared.geometry)
    assert heat.seen == Box(0, 0, 448, 224)
    changed = (np.asarray(overlay(photo, heat, ground="photo")) != np.asarray(photo)).any(axis=2)
    assert not changed[448:].any()
    assert not changed[:, 224:].any()
    assert changed[:448, :224].mean() > 0.98


def test_strip_through_a_center_crop_is_prepared() -> None:
    """Check a photo that is one pixel high: its crop contains a part of that pixel."""
    model, photo = small_vit(crop_pct=0.875), noise(1, 64)
    prepared = prepare(photo, model, resize="model")
    assert prepared.pixels.shape == (1, 3, 64, 64)
    assert prepared.geometry.window.height == pytest.approx(0.875, abs=0.02)
