"""Checkpoints: read as written, kept by step, and refused if damaged, hostile or from a newer version."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.training.kills import state_of
from visattn.errors import CheckpointError, VisattnWarning
from visattn.training import Checkpoints, State
from visattn.training.run.checkpoints import DamagedState, pack, read, unpack

TENSORS = st.builds(
    lambda size, kind: torch.arange(size).to(kind),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=4) | TENSORS
KEYS = st.integers(0, 9) | st.text("abc", min_size=1, max_size=3)
TREES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Check whether two nested structures have equal types, keys, values and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_pack_and_unpack_survive_a_json_round_trip(tree: Any) -> None:
    packed, tensors = pack(tree)
    assert same(unpack(json.loads(json.dumps(packed)), tensors), tree)


def test_packed_tensors_are_named_by_their_path() -> None:
    packed, tensors = pack({"state": {0: {"step": torch.ones(1)}}, "rates": [0.1, (torch.zeros(2), None)]})
    assert sorted(tensors) == ["rates.1.0", "state.0.step"]
    assert "tensor" in json.dumps(packed)


def test_checkpoint_round_trip_is_exact(tmp_path: Path) -> None:
    shared = torch.randn(4, 3)
    tensors = {
        "model": {"a": shared, "b": shared[1:], "turned": shared.t(), "none": torch.empty(0), "one": torch.tensor(3)},
        "ema": {"half": torch.tensor([math.nan, math.inf, -0.0], dtype=torch.bfloat16)},
        "empty": {},
    }
    facts = {"rate": 0.1 + 0.2, "losses": [math.inf, 1e-320], "text": "\u20ac\n"}
    Checkpoints(tmp_path / "states").save(State(7, facts, tensors))
    found = Checkpoints(tmp_path / "states").latest()
    assert found is not None
    assert (found.step, found.facts, set(found.tensors)) == (7, facts, set(tensors))
    for group, expected in tensors.items():
        assert set(found.tensors[group]) == set(expected)
        for name, tensor in expected.items():
            assert found.tensors[group][name].dtype == tensor.dtype
            assert bits(found.tensors[group][name]) == bits(tensor)


def bits(tensor: Tensor) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape and the bytes of a tensor."""
    return tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_latest_is_none_without_checkpoints(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").latest() is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_last_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep)
    for step in (2, 4, 6, 8, 99_999_999, 100_000_000):
        checkpoints.save(state_of(step))
    names = ["step_00000006", "step_00000008", "step_99999999", "step_100000000"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[-keep:])
    assert [path.name for path in checkpoints.found()] == names[-keep:]


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_do_not_displace_intact_ones(tmp_path: Path, keep: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep)
    for step in (1, 2, 9):
        checkpoints.save(state_of(step))
    damage_file(tmp_path / "step_00000009" / "model.safetensors")
    for step in (3, 4):  # resumed from an older checkpoint, with more frequent saves
        checkpoints.save(state_of(step))
    assert [path.name for path in checkpoints.found()] == ["step_00000003", "step_00000004"][-keep:]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 4


def test_partly_removed_checkpoint_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(state_of(step))
    monkeypatch.setattr(
        "visattn.training.run.checkpoints.shutil.rmtree", lambda *_, **__: None
    )  # killed before anything is removed
    checkpoints.save(state_of(3))
    names = sorted(path.name for path in tmp_path.iterdir() if "step" in path.name)
    assert names == [".visattn-step_00000001", "step_00000002", "step_00000003"]
    monkeypatch.undo()
    (tmp_path / ".visattn-file").write_text("a kill left it")
    checkpoints.tidy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


def test_checkpoints_are_ordered_by_step_not_by_file_time(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step, time in ((9, 2_000_000_000), (10, 1)):
        os.utime(checkpoints.save(state_of(step)), (time, time))
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 10
    os.utime(checkpoints.save(state_of(11)), (0, 0))
    assert [path.name for path in checkpoints.found()] == ["step_00000010", "step_00000011"]


def damage_file(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut_file(path: Path) -> None:
    """Cut off the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("spoil", [damage_file, cut_file, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "optimizer.safetensors", "random0.safetensors"])
def test_damaged_checkpoint_is_skipped_and_its_file_named(tmp_path: Path, file: str, spoil: Callable[[Path], object]) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(3))
    spoil(checkpoints.save(state_of(4)) / file)
    with pytest.raises(DamagedState, match=rf"step_00000004/{file}: (is damaged|cannot be read)"):
        read(tmp_path / "step_00000004")
    with pytest.warns(VisattnWarning, match=rf"{file}: .*; resuming from an earlier checkpoint, step 3$"):
        latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 3
    checkpoints.save(state_of(4))  # the run reaches the same step again
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 4


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_changed_byte_of_the_facts_is_detected(tmp_path: Path, position: int) -> None:
    place = Checkpoints(tmp_path).save(state_of(1))
    content = bytearray((place / "state.json").read_bytes())
    content[position % len(content)] ^= 1
    (place / "state.json").write_bytes(content)
    try:
        assert same(read(place).facts, state_of(1).facts)  # bytes whose change keeps the JSON value, such as white space
        assert json.loads(bytes(content)) is not None
    except DamagedState:
        pass


def test_error_names_all_checkpoints_if_all_are_damaged(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        damage_file(checkpoints.save(state_of(step)) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step_00000002.*step_00000001.*All checkpoints of this run are damaged") as caught:
        checkpoints.latest()
    assert caught.value.exit_code == 4


def signed(told: dict[str, Any]) -> str:
    """Add the matching sha256 to the facts of a checkpoint."""
    told = {key: value for key, value in told.items() if key != "own_sha256"}
    own = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return json.dumps(told | {"own_sha256": own})


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": ["model.safetensors"]},
        {"sha256": {"../model.safetensors": "0"}},
        {"sha256": {"/etc/passwd": "0"}},
        {"sha256": None},
        {"facts": [1]},
        {"step": "4"},
        {"step": None},
        {"format": None},
        {"format": "1"},
    ],
    ids=str,
)
def test_facts_of_wrong_types_are_refused_despite_a_valid_digest(tmp_path: Path, change: dict[str, Any]) -> None:
    place = Checkpoints(tmp_path).save(state_of(4))
    told = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(signed(told | change))
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).latest()
    assert caught.value.exit_code == 4
    assert str(place) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", '"a"', "{", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass"), b"\xff\xfe"]
)
def test_invalid_state_file_is_refused(tmp_path: Path, text: str | bytes) -> None:
    place = Checkpoints(tmp_path).save(state_of(4))
    (place / "state.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=r"state\.json: "):
        Checkpoints(tmp_path).latest()


class Trap:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", ["model.safetensors", "random0.safetensors"])
def test_pickle_named_safetensors_is_refused_and_not_run(tmp_path: Path, file: str) -> None:
    place = Checkpoints(tmp_path / "states").save(state_of(4))
    torch.save({"all": Trap(tmp_path / "trapped")}, place / file)
    told = json.loads((place / "state.json").read_text())
    told["sha256"][file] = hashlib.sha256((place / file).read_bytes()).hexdigest()
    (place / "state.json").write_text(signed(told))
    with pytest.raises(CheckpointError, match=f"{file}: is no safetensors file"):
        Checkpoints(tmp_path / "states").latest()
    assert not (tmp_path / "trapped").exists()
    act, arguments = Trap(tmp_path / "trapped").__reduce__()
    act(*arguments)
    assert (tmp_path / "trapped").exists()  # unpickling would have created the file


def test_newer_format_is_refused_even_with_an_intact_older_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(3))
    place = checkpoints.save(state_of(4))
    told = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(json.dumps(told | {"format": 2, "made_by": "9.9", "more": "who knows"}))
    with pytest.raises(CheckpointError, match=r"step_00000004: made by visattn 9\.9, needs >= 9\.9; upgrade visattn\.") as caught:
        checkpoints.latest()
    assert caught.value.exit_code == 4
