"""Training states on disk: folders of safetensors and JSON, written whole, checked when read, found by step.

`checkpoints/step_00000120/` has a safetensors file for each group of tensors (`model`, `optimizer`, `ema`, `random`) and `state.json`, with
all that is no tensor, the sha256 of each file, and its own. The folder gets its name when everything is on disk, so a name without
its content does not exist; two are kept, so that one that rots has a predecessor. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from visattn._support.checks import printable, told as brief
from visattn._support.files import building_folder, discard, read_own
from visattn.errors import CheckpointError, OutputError, ResourceError, VisattnWarning

FORMAT = 1
KEEP = 2
_STATE = "state.json"
_NAME = re.compile(r"step_(\d{8,})")
_FILE = re.compile(r"\w+\.safetensors")

Tensors = dict[str, Tensor]


@dataclass
class State:
    """What a run needs to go on: `facts` are JSON values; `tensors` are groups of tensors by name."""

    step: int
    facts: dict[str, Any]
    tensors: dict[str, Tensors] = field(default_factory=dict)


class Checkpoints:
    """The states of one run."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        """Nothing is written yet.

        Args:
            folder: Where the states are, or will be.
            keep: How many of the last states stay.
        """
        self.folder, self.keep = folder, keep

    def save(self, state: State) -> Path:
        """Write a state, then remove those that are too old.

        Raises:
            ResourceError: If the disk is full or the folder can no longer be written; earlier states stay as they are.
        """
        place = self.folder / f"step_{state.step:08d}"
        if place.exists():  # of the same step of the same run, or a damaged one that was passed over
            if readable(place):
                return place
            _remove(place)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with building_folder(place) as building:
                digests = {}
                for group, tensors in state.tensors.items():
                    content = safetensors.torch.save({name: _copy(tensor) for name, tensor in tensors.items()})
                    (building / f"{group}.safetensors").write_bytes(content)
                    digests[f"{group}.safetensors"] = hashlib.sha256(content).hexdigest()
                told = {
                    "format": FORMAT,
                    "made_by": version("visattn"),
                    "step": state.step,
                    "facts": state.facts,
                    "sha256": digests,
                }
                (building / _STATE).write_text(json.dumps(told | {"own_sha256": _own(told)}, indent=1))
        except OutputError as error:
            raise ResourceError(f"the state of step {state.step} could not be saved: {error}") from error
        found = self.found()
        here = found.index(place)
        damaged = [later for later in found[here + 1 :] if not readable(later)]  # they were passed over
        for old in (*found[: max(0, here + 1 - self.keep)], *damaged):
            _remove(old)
        return place

    def found(self) -> list[Path]:
        """Folders of states, the oldest first: by step, whatever clocks say."""
        if not self.folder.is_dir():
            return []
        named = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(named)]

    def latest(self) -> State | None:
        """The newest state that is whole, None if there never was one; damaged ones are passed over with a warning.

        Raises:
            CheckpointError: If there are states and none is whole, or the newest is of a newer version.
        """
        damaged: list[str] = []
        for place in reversed(self.found()):
            try:
                state = read(place)
            except DamagedState as error:
                damaged.append(str(error))
                continue
            for message in damaged:
                warnings.warn(f"{message}; going on from the one before, step {state.step}", VisattnWarning, stacklevel=2)
            return state
        if damaged:
            raise CheckpointError(
                f"{'; '.join(damaged)}. No state of this run is whole; restore one, or start again in another folder (-o/--output)."
            )
        return None

    def tidy(self) -> None:
        """Remove what a killed save left; only for who holds the run's lock."""
        for rest in self.folder.glob(".visattn-*") if self.folder.is_dir() else ():
            with contextlib.suppress(OutputError):
                discard(rest)


class DamagedState(CheckpointError):
    """A state that is not whole: the one before may be."""


def readable(place: Path) -> bool:
    """Whether a state is whole."""
    try:
        read(place)
    except CheckpointError:
        return False
    return True


def read(place: Path) -> State:
    """One state, checked against its digests.

    Raises:
        CheckpointError: If it is no state of visattn, or of a newer version.
        DamagedState: If it is not whole; the message names the file.
    """
    name = printable(str(place))
    if place.is_symlink() or not place.is_dir():
        raise CheckpointError(
            f"{name}: is no folder with safetensors and {_STATE}; only states that visattn saved can be resumed."
        )
    try:
        told = json.loads(read_own(place / _STATE))
        own = _own({key: value for key, value in told.items() if key != "own_sha256"}) if isinstance(told, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedState(f"{name}/{_STATE}: cannot be read ({_first_line(error)})") from error
    if isinstance(told, dict) and type(told.get("format")) is int and told["format"] > FORMAT:
        made = brief(told.get("made_by"))
        raise CheckpointError(f"{name}: made by visattn {made}, needs >= {made}; upgrade visattn.")
    if not isinstance(told, dict) or told.pop("own_sha256", None) != own:
        raise DamagedState(f"{name}/{_STATE}: is damaged (its sha256 differs)")
    if not _well_formed(told):
        raise CheckpointError(f"{name}/{_STATE}: must hold what visattn writes, got other names or types; restore the file.")
    tensors = {}
    for file, digest in told["sha256"].items():
        try:
            content = read_own(place / file)
        except OSError as error:
            raise DamagedState(f"{name}/{file}: cannot be read ({_first_line(error)})") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise DamagedState(f"{name}/{file}: is damaged (its sha256 differs)")
        try:
            tensors[file.removesuffix(".safetensors")] = safetensors.torch.load(content)
        except (safetensors.SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{name}/{file}: is no safetensors file ({_first_line(error)}); restore the file.") from error
    return State(told["step"], told["facts"], tensors)


def pack(tree: Any, name: str = "") -> tuple[Any, Tensors]:  # noqa: ANN401
    """Nested dictionaries, lists, tuples and plain values with tensors among them, as JSON values and the tensors by name."""
    if isinstance(tree, Tensor):
        return {"tensor": name}, {name: tree}
    if isinstance(tree, dict):
        parts = {key: pack(value, f"{name}.{_part(key)}" if name else _part(key)) for key, value in tree.items()}
        packed: Any = {"dict": [[key, value] for key, (value, _) in parts.items()]}  # keys may be numbers
    elif isinstance(tree, (list, tuple)):
        parts = {i: pack(value, f"{name}.{i}" if name else str(i)) for i, value in enumerate(tree)}
        packed = {type(tree).__name__: [value for value, _ in parts.values()]}
    else:
        return tree, {}
    return packed, {key: tensor for _, tensors in parts.values() for key, tensor in tensors.items()}


def _part(key: str | int) -> str:
    """A key in a tensor's name, such that no two paths have one name."""
    return key if isinstance(key, str) and key.isidentifier() else repr(key)


def unpack(packed: Any, tensors: Tensors) -> Any:  # noqa: ANN401
    """What `pack` was given."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unpack(value, tensors) for key, value in content}
    values = [unpack(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values


def _well_formed(told: dict[str, Any]) -> bool:
    """Whether all is there that `read` needs; digests tell of rot, not of who wrote them."""
    digests = told.get("sha256")
    return (
        type(told.get("format")) is int
        and type(told.get("step")) is int
        and 0 <= told["step"] < 2**63
        and isinstance(told.get("facts"), dict)
        and isinstance(digests, dict)
        and all(_FILE.fullmatch(file) for file in digests)
    )


def _remove(place: Path) -> None:
    """Remove a state; one that is half removed must not have the name of a state."""
    gone = place.with_name(f".visattn-{place.name}")
    with contextlib.suppress(OSError):
        place.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _own(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return printable(text.splitlines()[0].lower() if text else type(error).__name__)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()  # a copy: tensors that share memory are refused
