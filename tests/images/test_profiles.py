"""ICC profiles, compared with the formulas of the specification and with ArgyllCMS (`tests/golden/color.py`)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import torch
from numpy.typing import NDArray
from PIL import Image

import visattn
from tests.golden.color import table_profiles
from tests.images import icc
from visattn import load_image
from visattn.cli import main
from visattn.core.images import as_photo, image_facts
from visattn.errors import OptionError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "color.json").read_text())
LOSSLESS: dict[str, dict[str, Any]] = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}
CONVERTED = ("colors converted from made for a test to sRGB",)


@pytest.fixture(scope="module")
def colors() -> NDArray[np.uint8]:
    """Return the corners and edges of the color cube, grays, and random colors."""
    steps = np.array([0, 1, 2, 5, 10, 40, 128, 200, 254, 255], np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 3)
    gray = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(-1, 3)
    drawn = np.random.default_rng(5).integers(0, 256, (744, 3), dtype=np.uint8)
    return np.concatenate([cube, gray, drawn])[None]


def file_of(pixels: NDArray[Any] | Image.Image, profile: bytes | None, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    picture.save(stream, kind, icc_profile=profile, **options)
    return stream.getvalue()


def encoded(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Encode linear light as sRGB levels (IEC 61966-2-1)."""
    light = light.clip(0, 1)
    return 255 * np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)


def by_matrix(colors: NDArray[np.uint8], primaries: str, gamma: float) -> NDArray[np.float64]:
    """Convert colors by ICC.1, annex F.3: linear light, device to XYZ, and back through sRGB's own matrix."""
    light = (colors / 255) ** gamma
    xyz = light @ np.array(icc.PRIMARIES[primaries])
    return encoded(xyz @ np.linalg.inv(np.array(icc.PRIMARIES["sRGB"])))


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize(("primaries", "gamma"), [("Adobe RGB", 2.19921875), ("ProPhoto RGB", 1.8), ("sRGB", 1.0), ("sRGB", 2.5)])
def test_matrix_profile_equals_the_specification(kind: str, primaries: str, gamma: float, colors: NDArray[np.uint8]) -> None:
    profile = icc.matrix_profile(primaries, icc.curve(round(gamma * 256) / 256))
    photo = load_image(file_of(colors, profile, kind, **LOSSLESS[kind]))
    expected = by_matrix(colors, primaries, round(gamma * 256) / 256)
    assert np.abs(np.asarray(photo) - expected).max() <= 2
    assert image_facts(photo).notes == CONVERTED


@pytest.mark.parametrize("gamma", [1.0, 1.796875, 2.19921875])
def test_gray_profile_equals_the_specification(gamma: float) -> None:
    levels = np.arange(256, dtype=np.uint8)[None]
    photo = load_image(file_of(levels, icc.gray_profile(icc.curve(gamma))))
    assert np.abs(np.asarray(photo)[0] - encoded((levels[0, :, None] / 255) ** gamma)).max() <= 2


def test_gray_profile_of_16_bits_keeps_dark_steps() -> None:
    """Check that linear gray is not rounded to 8 bits first, which would be up to 6 levels off."""
    levels = np.arange(0, 65536, 16, dtype=np.uint16)[None]
    photo = load_image(file_of(levels, icc.gray_profile(icc.curve(1.0)), "TIFF"))
    assert np.abs(np.asarray(photo)[0] - encoded(levels[0, :, None] / 65535)).max() <= 2


@pytest.mark.parametrize("space", ["RGB", "CMYK"])
def test_table_profile_equals_another_engine(space: str) -> None:
    colors = np.array(GOLDEN[space]["colors"], np.uint8)[None]
    photo = load_image(file_of(Image.fromarray(colors, space), table_profiles()[space], "TIFF"))
    assert np.abs(np.asarray(photo)[0] - np.array(GOLDEN[space]["srgb"])).max() <= 2
    plain = np.asarray(Image.fromarray(colors, space).convert("RGB"))[0].astype(float)
    assert np.abs(plain - np.array(GOLDEN[space]["srgb"])).mean() > 10  # the profile matters


@pytest.mark.parametrize("tone", [icc.SRGB_CURVE, icc.curve(list(icc.srgb_decoded(np.linspace(0, 1, 1024))))])
def test_srgb_profile_does_not_change_pixels(tone: bytes, colors: NDArray[np.uint8]) -> None:
    photo = load_image(file_of(colors, icc.matrix_profile("sRGB", tone)))
    assert np.array_equal(np.asarray(photo), colors)
    assert image_facts(photo).notes == ()


def test_alpha_is_kept_while_colors_are_converted(colors: NDArray[np.uint8]) -> None:
    alpha = np.random.default_rng(2).integers(0, 256, (*colors.shape[:2], 1), dtype=np.uint8)
    profile = icc.matrix_profile("Adobe RGB", icc.curve(2.2))
    photo = load_image(file_of(np.concatenate([colors, alpha], -1), profile))
    opaque = np.asarray(load_image(file_of(colors, profile))).astype(float)
    share = alpha / 255
    assert np.abs(np.asarray(photo) - (opaque * share + 255 * (1 - share))).max() <= 1
    assert image_facts(photo).notes == (*CONVERTED, "transparent pixels shown on white")


def test_palette_is_converted(colors: NDArray[np.uint8]) -> None:
    palette = Image.fromarray(colors[:, :200]).quantize(200, dither=Image.Dither.NONE)
    profile = icc.matrix_profile("ProPhoto RGB", icc.curve(1.8))
    expected = np.asarray(load_image(file_of(palette.convert("RGB"), profile)))
    assert np.array_equal(np.asarray(load_image(file_of(palette, profile))), expected)


def test_gray_with_a_profile_of_rgb_is_neutral() -> None:
    levels = np.arange(256, dtype=np.uint8)[None]
    photo = np.asarray(load_image(file_of(levels, icc.matrix_profile("Adobe RGB", icc.curve(1.0)), "TIFF")))[0]
    assert np.abs(photo - encoded(levels[0, :, None] / 255)).max() <= 2


@pytest.mark.parametrize(
    ("mode", "profile", "note"),
    [
        ("RGB", b"not a profile at all", "its color profile is for all, its pixels are RGB; taken as sRGB"),
        ("RGB", icc.gray_profile(icc.curve(1.0)), "its color profile is for GRAY, its pixels are RGB; taken as sRGB"),
        (
            "CMYK",
            icc.matrix_profile("sRGB", icc.curve(1.0)),
            "its color profile is for RGB, its pixels are CMYK; taken as sRGB",
        ),
        ("L", table_profiles()["CMYK"], "its color profile is for CMYK, its pixels are GRAY; taken as sRGB"),
        ("RGB", icc.matrix_profile("sRGB", icc.curve(1.0))[:150], "its color profile cannot be read; taken as sRGB"),
    ],
    ids=["text", "gray for RGB", "RGB for CMYK", "CMYK for gray", "cut"],
)
def test_profile_that_does_not_fit_is_noted(mode: str, profile: bytes, note: str) -> None:
    picture = Image.new(mode, (3, 2), 7)
    photo = load_image(file_of(picture, profile, "TIFF"))
    assert image_facts(photo).notes == (note,)
    assert np.array_equal(np.asarray(photo), np.asarray(picture.convert("RGB")))


@pytest.mark.parametrize("seed", range(40))
def test_damaged_profile_is_never_fatal(seed: int, colors: NDArray[np.uint8]) -> None:
    random = np.random.default_rng(seed)
    whole = [*table_profiles().values(), icc.matrix_profile("Adobe RGB", icc.curve(2.2))][seed % 3]
    damaged = np.frombuffer(whole, np.uint8).copy()
    where = random.integers(0, min(len(damaged), 400), random.integers(1, 30))
    damaged[where] = random.integers(0, 256, len(where))
    mode = "CMYK" if seed % 3 == 1 else "RGB"
    photo = load_image(file_of(Image.fromarray(colors).convert(mode), damaged.tobytes(), "TIFF"))
    assert photo.size == (colors.shape[1], 1)
    assert len(image_facts(photo).notes) <= 1


def test_profile_can_be_ignored(colors: NDArray[np.uint8]) -> None:
    photo = load_image(file_of(colors, icc.matrix_profile("Adobe RGB", icc.curve(2.2))), color_profile="ignore")
    assert np.array_equal(np.asarray(photo), colors)
    assert image_facts(photo).notes == ("its color profile is ignored",)
    with pytest.raises(OptionError, match="unknown color_profile 'srgb'"):
        load_image(b"x", color_profile="srgb")  # type: ignore[arg-type]


def test_pil_image_is_converted_with_a_note(colors: NDArray[np.uint8]) -> None:
    data = file_of(colors, icc.matrix_profile("Adobe RGB", icc.curve(2.2)))
    with Image.open(io.BytesIO(data)) as image:
        photo = as_photo(image)
        assert np.array_equal(np.asarray(photo), np.asarray(load_image(data)))
        assert image_facts(photo).notes == CONVERTED
        assert as_photo(photo) is photo
        assert "icc_profile" in image.info  # the argument is not modified


def test_pil_image_in_srgb_drops_its_profile(colors: NDArray[np.uint8]) -> None:
    with Image.open(io.BytesIO(file_of(colors, icc.matrix_profile("sRGB", icc.SRGB_CURVE)))) as image:
        photo = as_photo(image)
        assert np.array_equal(np.asarray(photo), colors)
        assert "icc_profile" not in photo.info
        assert "icc_profile" in image.info


@pytest.fixture
def wide_gamut(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(3).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    path = tmp_path / "wide.png"
    path.write_bytes(file_of(pixels, icc.matrix_profile("ProPhoto RGB", icc.curve(1.8))))
    return path


def test_model_receives_srgb_or_the_pixels_of_timm(wide_gamut: Path) -> None:
    seen: list[torch.Tensor] = []
    model = timm.create_model("vit_tiny_patch16_224").eval()
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with Image.open(wide_gamut) as image:
        pixels = image.convert("RGB")
    del pixels.info["icc_profile"]
    of_timm = transform(pixels)
    converted = visattn.explain(model, wide_gamut, method="rollout")
    ignored = visattn.explain(model, wide_gamut, method="rollout", color_profile="ignore")
    assert torch.equal(seen[1][0], of_timm)
    assert torch.equal(seen[0][0], transform(load_image(wide_gamut)))
    assert not torch.allclose(seen[0], seen[1], atol=0.1)
    assert converted.provenance.notes[0] == CONVERTED[0]
    assert ignored.provenance.notes[0] == "its color profile is ignored"
    assert np.array_equal(np.asarray(converted.photo), np.asarray(load_image(wide_gamut)))


@pytest.mark.parametrize(("how", "note"), [("convert", CONVERTED[0]), ("ignore", "its color profile is ignored")])
@pytest.mark.parametrize("command", ["overlay", "heads"])
def test_command_line_reports_the_color_conversion(
    command: str, how: str, note: str, wide_gamut: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--model", "vit_tiny_patch16_224", "--weights", "none", "-o", str(tmp_path / "out.png")]
    with pytest.raises(SystemExit) as ended:
        main([command, str(wide_gamut), *tiny, "--color-profile", how, "--overwrite"])
    assert ended.value.code == 0
    assert f"visattn:   {note}\n" in capfd.readouterr().err
