"""Maps of several photos in one file."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import visattn
from tests import tiny
from visattn.core.maps import pack_maps
from visattn.errors import MapError


def found(count: int) -> list[tuple[str, visattn.AttentionMap, visattn.Geometry]]:
    made = [visattn.explain(tiny.vit(), f"scene:{number}", method="rollout") for number in range(count)]
    return [(f"folder/{number}", one.map, one.geometry) for number, one in enumerate(made)]


def test_maps_come_back_in_order_and_equal_maps_give_equal_files(tmp_path: Path) -> None:
    maps = found(3)
    (tmp_path / "a.tar").write_bytes(pack_maps(maps))
    assert pack_maps(maps) == (tmp_path / "a.tar").read_bytes()
    for (name, one, geometry), (known, other, place) in zip(visattn.load_maps(tmp_path / "a.tar"), maps, strict=True):
        assert name == known
        assert torch.equal(one.values, other.values)
        assert (geometry, one.layout) == (place, other.layout)


def test_each_member_is_a_map_file(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(pack_maps(found(1)))
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    one, _ = visattn.load_map(tmp_path / "folder" / "0.npz")
    assert one.values.shape


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = pack_maps(found(2))
    stream = io.BytesIO()
    np.save(stream, np.zeros((3, 3), np.float32))
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        member = tarfile.TarInfo("a.npy")
        member.size = len(stream.getvalue())
        archive.addfile(member, io.BytesIO(stream.getvalue()))
    for content in (whole[:1500], b"nothing", plain.getvalue(), whole.replace(b"PK\x03\x04", b"PK\x00\x00", 1)):
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(MapError, match=r"a.tar") as told:
            list(visattn.load_maps(tmp_path / "a.tar"))
        assert "\n" not in str(told.value)
    with pytest.raises(MapError, match=r"none.tar: cannot be read"):
        list(visattn.load_maps(tmp_path / "none.tar"))
