"""Readers of photos with segmentations, on small data sets in the layout of the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from visattn.data import load_segmented
from visattn.errors import ImageError

SIZE = 20, 30  # rows and columns


def picture(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (*SIZE, 3), np.uint8)


def saved(path: Path, array: NDArray[Any], palette: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array.astype(np.uint8))
    if palette:
        image = image.convert("P") if image.mode != "L" else Image.fromarray(array.astype(np.uint8), "P")
        image.putpalette([number for index in range(256) for number in (index, 255 - index, 7)])
    image.save(path)


def voc(root: Path) -> Path:
    classes, objects = np.zeros(SIZE, int), np.zeros(SIZE, int)
    classes[2:8, 3:9], objects[2:8, 3:9] = 15, 1
    classes[10:15, 12:20], objects[10:15, 12:20] = 8, 2
    classes[8, 3:9] = objects[8, 3:9] = 255
    for number, name in enumerate(("2007_000033", "2007_000042")):
        saved(root / "JPEGImages" / f"{name}.jpg", picture(number))
        saved(root / "SegmentationClass" / f"{name}.png", classes, palette=True)
        saved(root / "SegmentationObject" / f"{name}.png", objects, palette=True)
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "val.txt").write_text("2007_000042\n")
    (lists / "train.txt").write_text("2007_000033\n")
    return root


def test_voc(tmp_path: Path) -> None:
    photos = load_segmented(voc(tmp_path / "VOC2012"))
    assert photos.names == ("2007_000042",)
    photo = photos[0]
    assert photo.image.size == (30, 20)
    assert sorted(np.unique(photo.labels)) == [-1, 0, 8, 15]
    assert photo.objects is not None
    assert [int(mask.sum()) for mask in photo.objects] == [36, 40]
    assert not photo.objects[:, photo.labels == -1].any()
    assert load_segmented(tmp_path / "VOC2012", split="train")[0].name == "2007_000033"
    with pytest.raises(ImageError, match=r"test\.txt"):
        load_segmented(tmp_path / "VOC2012", split="test")


def test_imagenet_segmentation(tmp_path: Path) -> None:
    """The file refers from cells of MATLAB to arrays, whose axes come in MATLAB's order."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    mask = np.zeros(SIZE, np.uint8)
    mask[4:9, 10:25] = 1
    with h5py.File(tmp_path / "gtsegs_ijcv.mat", "w") as file:
        for kind in ("img", "gt"):
            file.create_dataset(f"value/{kind}", (3, 1), h5py.ref_dtype)
        for number in range(3):
            file[f"#refs#/photo{number}"] = picture(number).transpose()
            file[f"#refs#/mask{number}"] = np.roll(mask, number, 0).transpose()
            cell = file.create_dataset(f"#refs#/cell{number}", (1, 1), h5py.ref_dtype)
            cell[0, 0] = file[f"#refs#/mask{number}"].ref
            file["value/img"][number, 0] = file[f"#refs#/photo{number}"].ref
            file["value/gt"][number, 0] = cell.ref
    photos = load_segmented(tmp_path / "gtsegs_ijcv.mat")
    assert len(photos) == 3
    for number, photo in enumerate(photos):
        assert (np.asarray(photo.image) == picture(number)).all()
        assert (photo.labels == np.roll(mask, number, 0)).all()
    (tmp_path / "other.mat").write_bytes(b"MATLAB 5.0 and no more")
    with pytest.raises(ImageError, match=r"other\.mat"):
        load_segmented(tmp_path / "other.mat")
    with h5py.File(tmp_path / "empty.mat", "w"):
        pass
    with pytest.raises(ImageError, match="no photos with masks"):
        load_segmented(tmp_path / "empty.mat")


@pytest.mark.parametrize("split", ["val", None])
def test_folders_of_parts(split: str | None, tmp_path: Path) -> None:
    parts = np.full(SIZE, 40)
    parts[2:8, 3:9], parts[10:12, 3:9] = 0, 7
    within = tmp_path / "images" / (split or "") / "n01440764"
    saved(within / "n01440764_18.jpg", picture(0))
    saved(within / "n01440764_37.jpg", picture(1))
    saved(tmp_path / "annotations" / (split or "") / "n01440764_18.png", parts)
    photos = load_segmented(tmp_path, background=40)
    assert photos.names == ("n01440764_18",)
    assert sorted(np.unique(photos[0].labels)) == [0, 1, 8]
    assert photos[0].objects is None


def test_annotations_that_do_not_fit_are_named(tmp_path: Path) -> None:
    saved(tmp_path / "images" / "a.png", picture(0))
    saved(tmp_path / "annotations" / "a.png", np.zeros((5, 5)))
    with pytest.raises(ImageError, match=r"a\.png: must have one channel of 30 x 20 pixels"):
        load_segmented(tmp_path)[0]
    (tmp_path / "annotations" / "a.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"a\.png: cannot be read"):
        load_segmented(tmp_path)[0]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="neither gtsegs_ijcv"):
        load_segmented(tmp_path)
    for name in ("images", "annotations"):
        (tmp_path / name).mkdir()
    with pytest.raises(ImageError, match="no image has an annotation"):
        load_segmented(tmp_path)


def test_photos_of_one_name_in_several_folders_keep_their_own_annotation(tmp_path: Path) -> None:
    for number, folder in enumerate("ab"):
        saved(tmp_path / "images" / folder / "1.png", picture(number))
        saved(tmp_path / "annotations" / folder / "1.png", np.full(SIZE, number))
    photos = load_segmented(tmp_path)
    assert photos.names == ("a/1", "b/1")
    assert [photo.labels.max() for photo in photos] == [0, 1]
    assert all(np.array_equal(np.asarray(photo.image), picture(number)) for number, photo in enumerate(photos))
    (tmp_path / "annotations" / "1.png").write_bytes((tmp_path / "annotations" / "a" / "1.png").read_bytes())
    for folder in "ab":
        (tmp_path / "annotations" / folder / "1.png").unlink()
    with pytest.raises(ImageError, match=r"b/1\.png: has the name of .*a/1\.png; rename one"):
        load_segmented(tmp_path)


@pytest.mark.parametrize(("content", "text"), [(b"\xff\xfe2007", "cannot be read"), (b"\n", "names no photos")])
def test_lists_that_name_no_photos_are_refused(content: bytes, text: str, tmp_path: Path) -> None:
    (voc(tmp_path) / "ImageSets" / "Segmentation" / "val.txt").write_bytes(content)
    with pytest.raises(ImageError, match=rf"val\.txt: {text}"):
        load_segmented(tmp_path)
