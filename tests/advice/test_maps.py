# mypy: disable-error-code="no-untyped-call"
"""Maps and their files: the advice of messages, followed literally."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.maps.making import WINDOWS, make_map, random_map
from visattn._support.language import in_shell
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import load_map, load_maps, normalize, pack_maps, save_map, value_range
from visattn.errors import MapError, ModelError

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
WHOLE = Geometry((48, 64), tiny.INPUT, Box(0, 0, 48, 64))
pytestmark = pytest.mark.filterwarnings("ignore::visattn.errors.VisattnNote")


def test_one_image_of_a_batch_has_a_heatmap() -> None:
    batch = random_map(2, 3, 2, axes=("batch",))
    with pytest.raises(MapError, match=r"Choose one image of the batch: map\.at\(batch=0\)\.to_heatmap\(\.\.\.\)"):
        batch.to_heatmap(WINDOWS["crop"])
    assert np.array_equal(batch.at(batch=0).to_heatmap(WINDOWS["crop"]).grid, batch.values[0].numpy())


def test_the_geometry_of_the_photo_fits_its_map() -> None:
    found, other = (visattn.explain(tiny.vit(img_size=side), PHOTO, method="rollout") for side in ((32, 48), (64, 96)))
    with pytest.raises(MapError, match=r"the map was made for 48 x 32 input pixels, .*\. Pass the geometry of this photo"):
        found.map.to_heatmap(other.geometry)
    assert found.map.to_heatmap(found.geometry).values.shape == (48, 64)


def test_a_map_that_is_saved_with_its_geometry_is_loaded(tmp_path: Path) -> None:
    one, file = random_map(), tmp_path / "map.npz"
    whole = np.load(io.BytesIO(save_map(one, WHOLE)))
    facts = json.loads(str(whole["facts"]))
    facts["provenance"]["geometry"] = None
    np.savez(file, values=whole["values"], facts=np.array(json.dumps(facts)))
    with pytest.raises(MapError, match=r"the map has no geometry\. Save it with visattn\.maps\.save_map"):
        load_map(file)
    file.write_bytes(save_map(one, WHOLE))
    assert load_map(file)[1] == WHOLE


def test_a_map_or_an_array_is_loaded_in_place_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "map.npz"
    file.write_bytes(b"nothing")
    with pytest.raises(MapError, match=r"not a map .*; make one with visattn\.maps\.save_map, or pass an \.npy array"):
        load_map(file)
    file.write_bytes(save_map(random_map(), WHOLE))
    assert load_map(file)[1] == WHOLE
    np.save(tmp_path / "map.npy", np.eye(3))
    array: Any = load_map(tmp_path / "map.npy")
    assert np.array_equal(array, np.eye(3))


def test_a_file_of_pack_maps_is_loaded_in_place_of_a_folder_in_an_archive(tmp_path: Path) -> None:
    (tmp_path / "maps").mkdir()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "maps", "maps")
    with pytest.raises(MapError, match=r"a\.tar/maps: an array or a folder\. Pass a file of visattn\.maps\.pack_maps"):
        list(load_maps(tmp_path / "a.tar"))
    (tmp_path / "a.tar").write_bytes(pack_maps([("one", random_map(), WHOLE)]))
    assert [name for name, *_ in load_maps(tmp_path / "a.tar")] == ["one"]


def test_contours_are_drawn_where_no_mass_is() -> None:
    signed = make_map([[1.0, -1.0, 0.5], [0.0, 0.2, -0.3]])
    with pytest.raises(MapError, match=r"a mass mask needs grids of non-negative values .*, got .* from -1 to 1\. Use contours"):
        signed.mass()
    heat = normalize(signed.to_heatmap(WHOLE))
    plain, lined = (visattn.overlay(PHOTO, heat.values, contours=lines) for lines in ((), (0.5,)))
    assert not np.array_equal(np.asarray(plain), np.asarray(lined))


@pytest.mark.parametrize("how", ["minmax", "symmetric"])
def test_the_normalizations_that_are_named_scale_any_values(how: Any) -> None:
    heat = make_map([[-3.0, 0.0, 7.0]]).to_heatmap(Geometry((16, 48), (16, 48), Box(0, 0, 16, 48)))
    with pytest.raises(MapError, match=r"normalize='none' takes values in \[0, 1\], .*\. Choose 'minmax' or 'symmetric'"):
        normalize(heat, "none")
    assert float(normalize(heat, how).values.max()) == 1


def test_finite_weights_give_a_map_and_a_score() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).relu().mean((2, 3)))  # type: ignore[no-any-return]

    options: dict[str, Any] = {"layer": "conv", "img_size": 32}
    broken = Small().eval()
    with torch.no_grad():
        broken.head.weight[:] = torch.nan
    with pytest.raises(
        ModelError, match=r"the score is NaN or infinite\. Check the weights, the input and the target that give it"
    ):
        visattn.explain(broken, PHOTO, method="gradcam", target=0, **options)
    with pytest.raises(
        ModelError, match=r"the score is NaN or infinite\. Check the weights, the input and the target that give it"
    ):
        visattn.explain(broken, PHOTO, method="captum.occlusion", target=0, img_size=32)
    assert visattn.explain(Small().eval(), PHOTO, method="gradcam", target=0, **options).map.values.isfinite().all()
    assert visattn.explain(Small().eval(), PHOTO, method="captum.occlusion", target=0, img_size=32).map.values.isfinite().all()


def test_a_single_map_is_loaded_by_itself_and_several_together(tmp_path: Path) -> None:
    one, other = random_map(), random_map()
    (tmp_path / "one.npz").write_bytes(save_map(one, WHOLE))
    with pytest.raises(MapError, match=r"Pass one of visattn\.maps\.pack_maps; load_map reads a single map"):
        list(load_maps(tmp_path / "one.npz"))
    assert load_map(tmp_path / "one.npz")[1] == WHOLE
    (tmp_path / "two.tar").write_bytes(pack_maps([("a", one, WHOLE), ("b", other, WHOLE)]))
    with pytest.raises(MapError, match=r"not a map \(it is neither an \.npz nor an \.npy file\)"):
        load_map(tmp_path / "two.tar")
    assert [name for name, *_ in load_maps(tmp_path / "two.tar")] == ["a", "b"]


def test_an_array_in_a_file_of_maps_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.eye(3))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "a.npy", "a.npy")
    with pytest.raises(MapError, match=r"a\.tar/a\.npy: an array or a folder\. Pass a file of visattn\.maps\.pack_maps"):
        list(load_maps(tmp_path / "a.tar"))


@pytest.mark.parametrize("load", [load_map, lambda file: list(load_maps(file))])
def test_a_missing_file_is_told_as_such(load: Any, tmp_path: Path) -> None:
    with pytest.raises(MapError, match=r"gone: cannot be read \(no such file or directory\)\. Check its path\."):
        load(tmp_path / "gone")


def test_a_saved_map_whose_values_are_not_finite_is_made_again(tmp_path: Path) -> None:
    file, whole = tmp_path / "map.npz", np.load(io.BytesIO(save_map(random_map(), WHOLE)))
    np.savez(file, values=np.full_like(whole["values"], np.nan), facts=whole["facts"])
    with pytest.raises(MapError, match=r"map\.npz: is damaged \(\d+ of \d+ map values are NaN or infinite\)\. Make it again\.$"):
        load_map(file)
    with tarfile.open(tmp_path / "maps.tar", "w") as archive:
        archive.add(file, "map.npz")
    with pytest.raises(MapError, match=r"maps\.tar/map\.npz: is damaged \(.*\)\. Make it again\.$"):
        list(load_maps(tmp_path / "maps.tar"))
    file.write_bytes(save_map(random_map(), WHOLE))
    assert load_map(file)[1] == WHOLE


def test_the_shell_is_told_the_option_for_contours() -> None:
    with in_shell(), pytest.raises(MapError, match=r"from 0 to 0\. Use --contours\."):
        make_map([[0.0, 0.0]]).mass()


def test_a_map_of_holes_has_no_range() -> None:
    with pytest.raises(MapError, match="a map to normalize must have values, got holes alone"):
        value_range(np.full((2, 2), np.nan, np.float32), "minmax", holes=True)


def test_a_target_without_nan_gives_a_map() -> None:
    def target(factor: float) -> Any:
        return lambda outputs: outputs[:, 0] * factor

    with pytest.raises(ModelError, match=r"Check the weights, the input and the target that give it"):
        visattn.explain(tiny.vit(), PHOTO, method="relevance", target=target(torch.nan))
    assert visattn.explain(tiny.vit(), PHOTO, method="relevance", target=target(1.0)).map.values.isfinite().all()
