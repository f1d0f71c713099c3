"""Films: frames, sizes, times and colors against OpenCV; one scale; damaged, turned and odd films; views."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from sklearn.decomposition import PCA

import visattn
from tests import tiny
from tests.batch import films
from tests.images import icc
from visattn.batch.films import Film, Looks, Walk, explain_video, frames as reading, video
from visattn.batch.films.encoder import writing
from visattn.batch.films.mapping import chosen, exact, maps_of
from visattn.core.geometry import Box
from visattn.core.maps import value_range
from visattn.core.pipeline.asking import Asked
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask
from visattn.core.provenance import Provenance
from visattn.errors import ImageError, OptionError, OutputError, ResourceError, VisattnNote

EXACT_READER = pytest.mark.skipif(films.OPENCV < (4, 13), reason="older OpenCV, such as 4.10, reads other colors")
COUNT = 12
FRAMES = [films.scene(number) for number in range(COUNT)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.vit()


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return films.write(tmp_path_factory.mktemp("films") / "film.mp4", FRAMES)


@pytest.mark.parametrize(("ending", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9")])
def test_frames_are_read_upright_in_their_colors_at_their_times(ending: str, codec: str, tmp_path: Path) -> None:
    found = list(Film(films.write(tmp_path / f"a.{ending}", FRAMES, codec=codec)).frames())
    assert [frame.at for frame in found] == [Fraction(number, 10) for number in range(COUNT)]
    for frame, known in zip(found, FRAMES, strict=True):
        assert np.abs(np.asarray(frame.image).astype(int) - known).mean() < 4
        for place in ((40, 20), (40, 70)):  # flat areas
            assert np.abs(np.asarray(frame.image)[place].astype(int) - known[place]).max() <= 3


@EXACT_READER
@pytest.mark.parametrize("ending", ["mp4", "webm"])
def test_an_independent_reader_sees_what_was_written(ending: str, model: Any, film: Path, tmp_path: Path) -> None:
    made = explain_video(model, film, tmp_path / f"out.{ending}", method="rollout", opacity=0.0)
    seen, rate = films.read(made.path)
    assert len(seen) == COUNT
    assert rate == pytest.approx(10, rel=0.01)
    assert made.frames == COUNT
    for frame, known in zip(seen, FRAMES, strict=True):
        assert frame.shape == known.shape
        for place in ((40, 20), (40, 70), (28, 20)):
            assert np.abs(frame[place].astype(int) - known[place]).max() <= 6
    again = [np.asarray(frame.image) for frame in Film(made.path).frames()]
    assert all(np.abs(one.astype(int) - other).mean() < 2 for one, other in zip(again, seen, strict=True))


def test_all_frames_share_one_scale(model: Any, film: Path, tmp_path: Path) -> None:
    made = explain_video(model, film, tmp_path / "out.gif", method="rollout", normalize="minmax")
    every = [visattn.explain(model, frame.image, method="rollout") for frame in Film(film).frames()]
    values = np.concatenate([one.map.values.numpy().ravel() for one in every])
    assert made.provenance.value_range == pytest.approx(value_range(values, "minmax"))
    own = [value_range(one.map.values.numpy(), "minmax") for one in every]
    assert len({round(high, 6) for _, high in own}) > 1  # with its own scale each frame would look as strong as the others
    strongest = int(np.argmax([high for _, high in own]))
    weakest = int(np.argmin([high for _, high in own]))
    picture = [np.asarray(frame.image).astype(int) for frame in Film(made.path).frames()]
    colored = [np.abs(picture[number] - FRAMES[number]).max() for number in (strongest, weakest)]
    assert colored[0] > colored[1]


def test_maps_are_smoothed_by_a_running_mean(model: Any, film: Path, tmp_path: Path) -> None:
    every = [visattn.explain(model, frame.image, method="rollout").map.values.numpy() for frame in Film(film).frames()]
    mean, expected = every[0], [every[0]]
    for one in every[1:]:
        mean = 0.7 * mean + 0.3 * one
        expected.append(mean)
    made = explain_video(model, film, tmp_path / "out.gif", method="rollout", normalize="minmax", smooth=0.7)
    assert made.provenance.value_range == pytest.approx((np.min(expected), np.max(expected)), rel=1e-4)


def test_times_that_vary_are_kept_and_a_rate_takes_fewer_frames(model: Any, tmp_path: Path) -> None:
    times = [Fraction(one, 1000) for one in (0, 40, 80, 400, 440, 1000)]
    source = films.write(tmp_path / "a.mp4", FRAMES[:6], times=times)
    made = explain_video(model, source, tmp_path / "out.mp4", method="rollout")
    assert [float(frame.at) for frame in Film(made.path).frames()] == pytest.approx([float(one) for one in times], abs=2e-3)
    fewer = explain_video(model, source, tmp_path / "few.mp4", method="rollout", rate=5)
    assert [float(frame.at) for frame in Film(fewer.path).frames()] == pytest.approx([0, 0.4, 1.0], abs=2e-3)


@EXACT_READER
def test_a_turned_film_is_read_upright(tmp_path: Path, film: Path) -> None:
    turned = films.rotated(tmp_path / "turned.mp4", film)
    seen, _ = films.read(turned)  # OpenCV turns it too
    found = [np.asarray(frame.image) for frame in Film(turned).frames()]
    assert found[0].shape == (96, 64, 3)
    assert all(np.abs(one.astype(int) - other).mean() < 3 for one, other in zip(found, seen, strict=True))


def test_odd_sizes_get_another_row_and_column(model: Any, tmp_path: Path) -> None:
    Image.fromarray(films.scene(0, 65, 81)).save(
        tmp_path / "a.gif", save_all=True, append_images=[Image.fromarray(films.scene(1, 65, 81))], duration=100
    )
    made = explain_video(model, tmp_path / "a.gif", tmp_path / "out.mp4", method="rollout")
    seen, _ = films.read(made.path)
    assert [frame.shape for frame in seen] == [(66, 82, 3)] * 2


@pytest.mark.parametrize("ending", ["gif", "webp", "png"])
def test_animations_are_read_with_their_times(ending: str, tmp_path: Path) -> None:
    pictures = [Image.fromarray(frame) for frame in FRAMES[:4]]
    options: dict[str, Any] = {"lossless": True} if ending == "webp" else {}
    pictures[0].save(tmp_path / f"a.{ending}", save_all=True, append_images=pictures[1:], duration=[100, 200, 100, 50], **options)
    found = list(Film(tmp_path / f"a.{ending}").frames())
    assert [float(frame.at) for frame in found] == pytest.approx([0, 0.1, 0.3, 0.4])
    assert all(np.abs(np.asarray(one.image).astype(int) - known).mean() < 8 for one, known in zip(found, FRAMES, strict=False))


def test_frames_after_a_damaged_part_are_used_and_the_damage_is_told(model: Any, tmp_path: Path) -> None:
    whole = films.write(tmp_path / "whole.mp4", [films.scene(number) for number in range(60)])
    data = bytearray(whole.read_bytes())
    start = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 3
    data[start : start + 300] = bytes(300)
    (tmp_path / "damaged.mp4").write_bytes(data)
    made = explain_video(model, tmp_path / "damaged.mp4", tmp_path / "out.mp4", method="rollout")
    assert 40 <= made.frames < 60
    assert made.lost
    assert any("could not be decoded" in text for text in made.provenance.warnings)
    last = list(Film(made.path).frames())[-1]
    assert float(last.at) == pytest.approx(5.9, abs=0.01)


@pytest.mark.parametrize("content", [b"", b"nothing at all", b"\x00\x00\x00\x18ftypmp42"])
def test_files_that_are_no_films_are_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(content)
    (tmp_path / "a.gif").write_bytes(content)
    for name in ("a.mp4", "a.gif", "missing.mp4"):
        with pytest.raises(ImageError, match=rf"{name}: .*") as caught:
            list(Film(tmp_path / name).frames())
        assert "\n" not in str(caught.value)


def test_a_film_that_is_cut_off_is_refused(film: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.mp4").write_bytes(film.read_bytes()[: film.stat().st_size // 2])
    with pytest.raises(ImageError, match="damaged or cut off"):
        Film(tmp_path / "cut.mp4")


def test_sound_without_pictures_is_refused(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream: Any = container.add_stream("aac", rate=44_100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44_100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(ImageError, match=r"sound.mp4: has no pictures. Pass a film.$"):
        Film(tmp_path / "sound.mp4")


def test_films_that_are_too_large_are_refused(model: Any, film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn.batch.films.mapping._MOST_FEATURES", 10)
    with pytest.raises(ResourceError, match=r"the features of more than 12 frames do not fit. Pass a lower rate"):
        explain_video(model, film, tmp_path / "out.gif", method="pca")
    with pytest.raises(ImageError, match=r"film.mp4: frames of 96 x 64 pixels exceed the limit of 0.0001 million. Scale"):
        explain_video(model, film, tmp_path / "out.gif", max_pixels=100)
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(OutputError, match=r"out.mp4: cannot be encoded \(.*\). Choose another format or size"),
        writing(tmp_path / "out.mp4", Fraction(10)) as add,
    ):
        add(Fraction(0), Image.new("RGB", (16_400, 2)))
    assert not (tmp_path / "out.mp4").exists()


LEFT_EARLY = """
import sys
from contextlib import suppress
from itertools import islice
import av
from visattn.batch.films.frames import Film
from visattn.errors import ImageError

av.logging.set_level(av.logging.ERROR)  # as torchvision 0.25 does
for reading in range(80):
    frames = Film(sys.argv[1]).frames()
    with suppress(ImageError):
        list(islice(frames, reading % 20 + 1))
    frames.close()
"""


def test_a_damaged_film_that_is_left_early_is_closed_while_its_decoder_logs(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (30, 256, 256, 3), np.uint8)
    data = bytearray(films.write(tmp_path / "noise.mp4", list(noise)).read_bytes())
    for at in range(data.index(b"mdat") + 100, len(data) - 2000, 1000):
        data[at : at + 8] = b"\xff" * 8
    (tmp_path / "damaged.mp4").write_bytes(data)
    command = [sys.executable, "-W", "ignore", "-c", LEFT_EARLY, str(tmp_path / "damaged.mp4")]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def test_colors_of_bt2020_are_read_and_hdr_is_told(model: Any, tmp_path: Path) -> None:
    films.write(tmp_path / "wide.mp4", FRAMES, colors=9, brightness=16)
    film = Film(tmp_path / "wide.mp4")
    for frame, scene in zip(film.frames(), FRAMES, strict=True):
        assert np.abs(np.asarray(frame.image, np.int16) - scene).mean() < 4
    assert film.hdr
    made = explain_video(model, tmp_path / "wide.mp4", tmp_path / "out.gif", method="rollout")
    assert made.provenance.warnings[-1] == "the film is HDR; its colors are read as if it were not"


def test_an_animation_in_other_colors_is_converted_and_one_that_is_cut_off_is_told(model: Any, tmp_path: Path) -> None:
    frames = [Image.fromarray(frame) for frame in FRAMES]
    profile = icc.matrix_profile("Adobe RGB", icc.curve(2.2))
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True, icc_profile=profile)
    kept, converted = (
        np.asarray(next(Film(tmp_path / "a.webp", color_profile=how).frames()).image, np.int16) for how in ("ignore", "convert")
    )
    assert np.array_equal(kept, FRAMES[0])
    alone = visattn.load_image(tmp_path / "a.webp")
    assert np.array_equal(converted, np.asarray(alone))
    assert not np.array_equal(kept, converted)
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100)
    whole = (tmp_path / "a.gif").read_bytes()
    (tmp_path / "cut.gif").write_bytes(whole[:-1])
    assert not explain_video(model, tmp_path / "a.gif", tmp_path / "out.gif", method="rollout").lost
    assert explain_video(model, tmp_path / "cut.gif", tmp_path / "out.gif", method="rollout").lost


@pytest.mark.parametrize(("ending", "rate"), [("gif", 30), ("gif", 24), ("gif", 50), ("webp", 30), ("webp", 60), ("webp", 24)])
def test_times_of_animations_do_not_drift(ending: str, rate: int, tmp_path: Path) -> None:
    with writing(tmp_path / f"a.{ending}", Fraction(rate)) as add:
        for number in range(100):
            add(Fraction(number, rate), Image.new("RGB", (8, 8), (2 * number, 0, 255 - number)))
    with Image.open(tmp_path / f"a.{ending}") as animation:
        shown = []
        for frame in ImageSequence.Iterator(animation):
            frame.load()
            shown.append(frame.info["duration"])
    assert sum(shown) == pytest.approx(1000 * 100 / rate, abs=10)
    assert min(shown) >= 16


@pytest.mark.parametrize("rate", [0.0003, 0.5, 7.3, 24_000 / 1001, 1000])
def test_rates_are_exact(rate: float) -> None:
    assert float(exact(rate)) == pytest.approx(rate, rel=1e-4)


def test_a_rate_above_that_of_the_film_changes_nothing(model: Any, film: Path, tmp_path: Path) -> None:
    for rate in (None, 100.0):
        explain_video(model, film, tmp_path / f"{rate}.mp4", method="rollout", rate=rate)
    (plain, rate), (limited, same) = (films.read(tmp_path / f"{name}.mp4") for name in ("None", "100.0"))
    assert rate == same
    assert len(plain) == len(limited) == COUNT
    every, some = (list(chosen(Film(film), rate)) for rate in (None, 100.0))  # two encodings differ by their threads
    assert [frame.at for frame in every] == [frame.at for frame in some]
    assert all(one.image == other.image for one, other in zip(every, some, strict=True))
    assert explain_video(model, film, tmp_path / "a.mp4", method="rollout", rate=0.0003).frames == 1


@pytest.mark.parametrize(("method", "normalize"), [("rollout", "symmetric"), ("rollout", "percentile"), ("gradcam", "auto")])
def test_a_frame_is_drawn_as_overlay_draws_it(method: str, normalize: str, model: Any, tmp_path: Path) -> None:
    Image.fromarray(FRAMES[0]).save(tmp_path / "photo.png")
    still = [Image.fromarray(FRAMES[0])] * 2
    still[0].save(tmp_path / "film.png", save_all=True, append_images=still[1:], duration=100)
    options: Any = (
        {"method": method, "normalize": normalize, "target": 1}
        if method == "gradcam"
        else {"method": method, "normalize": normalize}
    )
    drawn: list[Image.Image] = []

    @contextmanager
    def kept(path: Path, rate: Fraction) -> Iterator[Any]:
        yield lambda at, image: drawn.append(image)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("visattn.batch.films.video.writing", kept)
        explain_video(model, tmp_path / "film.png", tmp_path / "out.gif", **options)
    drawing = {"normalize": options.pop("normalize")}
    alone = visattn.explain(model, tmp_path / "photo.png", **options).overlay(**drawing)
    assert np.abs(np.asarray(drawn[0], np.int16) - np.asarray(alone, np.int16)).max() <= 1


def test_views_lie_beside_each_other(model: Any, film: Path, tmp_path: Path) -> None:
    beside = explain_video(model, film, tmp_path / "a.gif", method="rollout", view="beside")
    first = next(iter(Film(beside.path).frames())).image
    assert first.size == (96 + 4 + 96, 64)
    assert np.abs(np.asarray(first)[:, :96].astype(int) - FRAMES[0]).mean() < 8
    heads = explain_video(model, film, tmp_path / "b.gif", method="attention", view="heads")
    assert next(iter(Film(heads.path).frames())).image.size == (240 * tiny.HEADS + 4, 160)


def features(model: Any, film: Path) -> torch.Tensor:
    """Return the features of the patches of all frames `(frames, patches, D)`, with a hook."""
    kept: list[torch.Tensor] = []
    handle = model.norm.register_forward_hook(lambda _m, _a, output: kept.append(output[0, 1:]))
    with torch.no_grad():
        for frame in Film(film).frames():
            model(visattn.prepare(frame.image, model).pixels)
    handle.remove()
    return torch.stack(kept)


def test_components_of_a_film_have_one_basis(model: Any, film: Path, tmp_path: Path) -> None:
    asked = Asked(ask("pca"), Preprocessing())
    maps = maps_of(model, Film(film), asked, Looks(batch_size=5))
    found = torch.stack([one.map.values.flatten(1).T for one in maps])  # (frames, patches, 3)
    every = features(model, film).flatten(0, 1).double()
    known = PCA(3, svd_solver="full").fit_transform(every.numpy())
    shown = found.flatten(0, 1).double().numpy()
    signs = np.sign((shown * known).sum(0))
    assert np.allclose(shown * signs, known, atol=5e-3 * np.abs(known).max())  # features are kept in half precision
    made = explain_video(model, film, tmp_path / "out.gif", method="pca")
    assert made.frames == COUNT


def test_similarity_is_that_to_a_patch_of_the_first_frame(model: Any, film: Path) -> None:
    asked = Asked(ask("similarity", {"query": "patch:1,2"}), Preprocessing())
    maps = maps_of(model, Film(film), asked, Looks(batch_size=5))
    every = torch.nn.functional.normalize(features(model, film).double(), dim=-1)
    rows, columns = maps[0].map.layout.grid
    known = every @ every[0, columns + 2]
    for one, row in zip(maps, known, strict=True):
        assert torch.allclose(one.map.values.double(), row.view(rows, columns), atol=2e-3)


def test_bad_options_are_refused_and_nothing_is_written(model: Any, film: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"view": "heads", "method": "rollout"}, "view heads needs a map with heads"),
        ({"view": "both"}, "overlay, beside, heads"),
        ({"rate": 0}, "rate must be above 0"),
        ({"smooth": 1.0}, "smooth must be a number from 0 to 0.99"),
        ({"method": "pca", "view": "heads"}, "view heads needs a map with heads"),
        ({"method": "similarity", "query": "cls", "of": "keys"}, "only tokens are compared"),
        ({"metod": "rollout"}, "has no option metod"),
        ({"walk": 1, "method": "attention"}, "walk must be a number from 2 to 10000"),
        ({"walk": 4, "method": "rollout"}, "a walk chooses the query"),
        ({"walk": 4, "method": "similarity", "query": "cls"}, "a walk chooses the query"),
    ):
        with pytest.raises(OptionError, match=message):
            explain_video(model, film, tmp_path / "out.mp4", **options)
    with pytest.raises(OptionError, match=r"films are written as .mp4"):
        explain_video(model, film, tmp_path / "out.avi")
    with pytest.raises(OutputError, match="the output is the input itself"):
        explain_video(model, film, film)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_film_leaves_nothing(model: Any, film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from visattn.batch.films import video as module

    drawn: list[int] = []

    def stopping(*_args: object) -> Any:
        drawn.append(0)
        if len(drawn) == 5:
            raise KeyboardInterrupt
        return Image.fromarray(FRAMES[0])

    monkeypatch.setattr(module, "_drawn", stopping)
    with pytest.raises(KeyboardInterrupt):
        explain_video(model, film, tmp_path / "out.mp4", method="rollout")
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_film(film: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "visattn",
            "video",
            film,
            "--model",
            "scenes_vit",
            "--method",
            "rollout",
            "-o",
            tmp_path / "out.mp4",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "12 frames" in done.stderr
    assert len(films.read(tmp_path / "out.mp4")[0]) == COUNT


def test_on_a_device_and_with_weights_by_name_the_arguments_are_those_of_explain(film: Path, tmp_path: Path) -> None:
    made = explain_video("scenes_vit", film, tmp_path / "out.gif", method="rollout", rate=5, device=torch.device("cpu"))
    assert made.frames == COUNT // 2


@pytest.mark.parametrize("method", ["attention", "similarity"])
def test_a_query_walks_over_a_photo(method: str, model: Any, tmp_path: Path) -> None:
    Image.fromarray(FRAMES[0]).save(tmp_path / "photo.png")
    made = explain_video(model, tmp_path / "photo.png", tmp_path / "walk.mp4", method=method, walk=10)
    assert made.frames == 10
    assert made.provenance.parameters["query"] == "10 pixels in turn"
    seen, rate = films.read(tmp_path / "walk.mp4")
    assert [frame.shape for frame in seen] == [(64, 96, 3)] * 10
    assert rate == pytest.approx(12)
    with pytest.warns(VisattnNote, match="'last' is understood as -1"):
        made = explain_video(model, tmp_path / "photo.png", tmp_path / "slow.mp4", method=method, walk=10, rate=5, layer="last")
    assert films.read(tmp_path / "slow.mp4")[1] == pytest.approx(5)
    assert made.frames == 10
    walk = Walk(tmp_path / "photo.png", 10, Preprocessing())
    queries = list(walk.queries(Box(0, 0, 64, 96)))
    assert len(set(queries)) >= 9  # the middle of the eight is passed twice
    maps = maps_of(model, walk, Asked(ask(method, {"query": "patch:0,0"}), Preprocessing()), Looks(walk=10))
    for query, one in zip(queries, maps, strict=True):
        alone = visattn.explain(model, tmp_path / "photo.png", method=method, query=query)
        assert torch.equal(one.map.values, alone.panel.values)
    low, high = value_range(torch.stack([one.map.values for one in maps]).numpy(), "minmax")
    assert made.provenance.value_range == pytest.approx((low, high))


class _Damaged:
    """Container whose reading ends with an error, while its decoder still holds two frames. No file of FFmpeg starts before zero."""

    time_base, thread_type = Fraction(1, 1000), ""

    def __init__(self, *_path: Any) -> None:
        self.codec_context = self

    def __enter__(self) -> tuple[Any, Any]:
        return self, self

    def __exit__(self, *_error: object) -> None:
        pass

    def demux(self, _stream: Any) -> Iterator[str]:
        yield from ("first", "second")
        raise av.error.InvalidDataError(1, "damaged")

    def decode(self, packet: str | None) -> list[Any]:
        times = {"first": [-2000], "second": [-1900], None: [-500, 500]}[packet]
        return [SimpleNamespace(pts=time, time_base=None, color_trc=1, width=4, height=4) for time in times]


def test_times_before_zero_count_and_frames_that_the_decoder_holds_are_read(film: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Film(film)
    monkeypatch.setattr(reading, "_Opened", _Damaged)
    monkeypatch.setattr(reading, "_upright", lambda frame: Image.new("RGB", (8, 8)))
    assert [float(frame.at) for frame in opened.frames()] == [0, 0.1, 1.5, 2.5]
    assert opened.lost == 1


def test_a_film_that_changes_while_it_is_read_is_told(
    model: Any, film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter((12, 9))
    whole = Film.frames
    monkeypatch.setattr(Film, "frames", lambda self: islice(whole(self), next(readings)))
    with pytest.raises(ImageError, match=r"film.mp4: was changed while it was read. Try again when it is whole."):
        explain_video(model, film, tmp_path / "out.mp4", method="rollout")
    assert not (tmp_path / "out.mp4").exists()


def test_provenance_of_a_film_is_what_is_true_of_all_frames(model: Any, film: Path, tmp_path: Path) -> None:
    asked = Asked(ask("gradcam", {}), Preprocessing())
    every = [one.map.provenance for one in maps_of(model, Film(film), asked, Looks())]
    made = explain_video(model, film, tmp_path / "out.mp4", method="gradcam").provenance
    assert made.image_sha256 is None
    assert made.scores == ()
    classes = {one.target[0].partition(" = ")[0] for one in every}
    assert made.target == (("the largest output of each frame",) if len(classes) > 1 else tuple(classes))
    empty = sum(any("zero everywhere" in text for text in one.warnings) for one in every)
    told = [text for text in made.warnings if "zero everywhere" in text]
    assert [f"(in {empty} of {COUNT} frames)" in text for text in told] == [True] * (0 < empty < COUNT)
    fixed = explain_video(model, film, tmp_path / "fixed.mp4", method="gradcam", target=2).provenance
    assert fixed.target == ("output 2",)


def test_warnings_that_differ_in_numbers_alone_are_told_once() -> None:
    told = iter(
        [
            ["1 sink receives: patch 1,2 (30 x in blocks.0)"],
            ["2 sinks receive: patch 1,2 (31 x in blocks.3), patch 0,1 (22 x in blocks.0)", "dark"],
            ["dark"],
            [],
        ]
    )
    every = [Provenance(warnings=("blocks.0 is lost", "blocks.1 is lost", *some)) for some in told]
    assert video._common(every).warnings == (
        "blocks.0 is lost",
        "blocks.1 is lost",
        "1 sink receives: patch 1,2 (30 x in blocks.0) (in 2 of 4 frames, each with its own numbers)",
        "dark (in 2 of 4 frames)",
    )


def two_streams(path: Path, frames: list[Any]) -> Path:
    """Write a film whose first stream of pictures (gray, MPEG-4) is followed by one in H.264."""
    with av.open(str(path), "w") as container:
        streams: list[Any] = [container.add_stream(codec, rate=10) for codec in ("mpeg4", "libx264")]
        for stream in streams:
            stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for number, array in enumerate(frames):
            for stream, shown in zip(streams, (np.full_like(array, 128), array), strict=True):
                frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, 10)
                container.mux(stream.encode(frame))
        for stream in streams:
            container.mux(stream.encode(None))
    return path


def test_a_stream_without_a_decoder_is_passed_over(tmp_path: Path) -> None:
    frames = [films.scene(number) for number in range(4)]
    content = two_streams(tmp_path / "two.mp4", frames).read_bytes()
    hidden = content.replace(b"mp4v\0", b"zzzz\0", 1).replace(b"esds", b"free", 1)
    (tmp_path / "two.mp4").write_bytes(hidden)
    shown = [np.asarray(frame.image, dtype=int) for frame in Film(tmp_path / "two.mp4").frames()]
    assert len(shown) == 4
    assert all(np.abs(image - frame).mean() < 12 for image, frame in zip(shown, frames, strict=True))
    (tmp_path / "two.mp4").write_bytes(hidden.replace(b"avc1\0", b"zzzz\0", 1))
    with pytest.raises(ImageError, match=r"two.mp4: its pictures have no decoder here; convert it to H.264"):
        next(iter(Film(tmp_path / "two.mp4").frames()))


def test_frames_before_the_damage_of_an_animation_are_read(tmp_path: Path) -> None:
    pictures = [Image.new("RGB", (40, 30), color) for color in ("red", "lime", "blue", "white")]
    pictures[0].save(tmp_path / "whole.gif", save_all=True, append_images=pictures[1:], duration=100)
    whole = (tmp_path / "whole.gif").read_bytes()
    counts = set()
    for cut in range(len(whole) // 4, len(whole), 3):
        (tmp_path / "cut.gif").write_bytes(whole[:cut])
        try:
            film = Film(tmp_path / "cut.gif")
            counts.add(len(list(film.frames())))
        except ImageError as error:
            assert "cut.gif: " in str(error)  # noqa: PT017 - some cuts leave no frame
        else:
            assert film.lost == 1
    assert len(counts) > 1
