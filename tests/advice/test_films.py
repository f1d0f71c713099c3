"""Films: what is wrong with them is true, and what the message says to do works."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests import tiny
from tests.advice.packing import owner
from tests.batch import films
from visattn.batch.films import Film, explain_video
from visattn.errors import ImageError


def test_a_film_that_was_changed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, film, whole = tiny.vit(), films.write(tmp_path / "film.mp4", [films.scene(n) for n in range(4)]), Film.frames
    lengths = iter((4, 2))
    monkeypatch.setattr(Film, "frames", lambda self: (one for one, _ in zip(whole(self), range(next(lengths)), strict=False)))
    with pytest.raises(ImageError, match=r"film\.mp4: was changed while it was read\. Try again when it is whole\.$"):
        explain_video(model, film, tmp_path / "out.gif", method="rollout")
    monkeypatch.setattr(Film, "frames", whole)
    assert explain_video(model, film, tmp_path / "out.gif", method="rollout").frames == 4


@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_frames_that_are_too_large_are_scaled_down_or_allowed(ending: str, tmp_path: Path) -> None:
    def write(name: str, side: int) -> Path:
        frames = [films.scene(number, side, side) for number in range(2)]
        if ending == "mp4":
            return films.write(tmp_path / name, frames)
        pictures = [Image.fromarray(frame) for frame in frames]
        pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:])
        return tmp_path / name

    film = write(f"large.{ending}", 64)
    with pytest.raises(
        ImageError,
        match=r"frames of 64 x 64 pixels exceed the limit of 0\.0025 million\. Scale the film down, or raise max_pixels",
    ):
        list(Film(film, max_pixels=2500).frames())
    assert len(list(Film(film, max_pixels=4096).frames())) == 2
    assert len(list(Film(write(f"small.{ending}", 50), max_pixels=2500).frames())) == 2


def test_a_path_of_no_film_is_corrected_and_a_download_repeated(tmp_path: Path) -> None:
    film = films.write(tmp_path / "film.mp4", [films.scene(0), films.scene(1)])
    with pytest.raises(ImageError, match=r"fill\.mp4: cannot be read \(no such file or directory\)\. Check its path\.$"):
        Film(tmp_path / "fill.mp4")
    assert len(list(Film(tmp_path / "film.mp4").frames())) == 2
    (tmp_path / "cut.mp4").write_bytes(film.read_bytes()[:-200])
    with pytest.raises(ImageError, match=r"cut\.mp4: is no film, or damaged or cut off \(.*\)\. Check the download\.$"):
        Film(tmp_path / "cut.mp4")
    (tmp_path / "cut.mp4").write_bytes(film.read_bytes())
    assert len(list(Film(tmp_path / "cut.mp4").frames())) == 2


def test_a_film_without_a_decoder_is_converted(tmp_path: Path) -> None:
    frames = [films.scene(0), films.scene(1)]
    whole = films.write(tmp_path / "film.mp4", frames).read_bytes()
    (tmp_path / "film.mp4").write_bytes(whole.replace(b"avc1\0", b"zzzz\0", 1))
    with pytest.raises(ImageError, match=r"film\.mp4: its pictures have no decoder here; convert it to H\.264\.$"):
        Film(tmp_path / "film.mp4")
    assert len(list(Film(films.write(tmp_path / "film.mp4", frames, codec="libx264")).frames())) == 2


@pytest.mark.usefixtures("ordinary_user")
@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_a_film_without_permission_is_not_damaged(ending: str, public_folder: Path) -> None:
    film = public_folder / f"film.{ending}"
    with owner():
        frames = [films.scene(0), films.scene(1)]
        if ending == "mp4":
            films.write(film, frames)
        else:
            Image.fromarray(frames[0]).save(film, save_all=True, append_images=[Image.fromarray(frames[1])])
        film.chmod(0)
    with pytest.raises(
        ImageError, match=r"cannot be read \(permission denied\)\. Check its permissions and those of its folder\.$"
    ):
        Film(film)
    with owner():
        film.chmod(0o644)
    assert len(list(Film(film).frames())) == 2


def test_a_path_with_a_null_byte_is_no_film() -> None:
    with pytest.raises(ImageError, match=r"cannot be read \(.*null byte.*\)\. Check its path\.$"):
        Film("a\0.mp4")
