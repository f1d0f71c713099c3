"""Checkpoints: folders of safetensors and JSON files that are written atomically and verified when read.

`checkpoints/step_00000120/` contains a safetensors file for each group of tensors (`model`, `optimizer`, `ema`, and `random0`,
`random1`, ... for the random generators of each process) and `state.json`. That file stores all other values and the sha256 of each
file, including its own. A folder gets its final name only when all files are on disk, so an incomplete checkpoint never has that name.
The last two are kept, in case one gets damaged. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypedDict

import safetensors
import safetensors.torch
from msgspec import Meta
from torch import Tensor

from visattn._support.checks import printable, told as brief
from visattn._support.json_files import Count, converted, decoded
from visattn._support.language import flag
from visattn._support.notes import warn
from visattn._support.untrusted import read_own
from visattn._support.whole_files import building_folder, discard
from visattn.errors import CheckpointError, OutputError, ResourceError, VisattnError

FORMAT = 1
KEEP = 2
_STATE = "state.json"
_UNFIT = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError, AssertionError)
_NAME = re.compile(r"step_(\d{8,})")

Tensors = dict[str, Tensor]


class _Stored(TypedDict):
    """Content of `state.json`."""

    format: int
    step: Count
    facts: dict[str, Any]
    sha256: dict[Annotated[str, Meta(pattern=r"\A\w+\.safetensors\Z")], str]


@dataclass
class State:
    """Training state that a run needs to resume: `facts` are JSON values, `tensors` are named groups of tensors."""

    step: int
    facts: dict[str, Any]
    tensors: dict[str, Tensors] = field(default_factory=dict)


class Checkpoints:
    """Checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        """Set the folder, without writing to it.

        Args:
            folder: Folder of the checkpoints. It need not exist yet.
            keep: Number of most recent checkpoints to keep.
        """
        self.folder, self.keep = folder, keep

    def save(self, state: State) -> Path:
        """Write a checkpoint, then remove the ones that are too old.

        Returns:
            Folder of the checkpoint.

        Raises:
            ResourceError: If the disk is full or the folder can no longer be written. Earlier checkpoints are kept.
        """
        place = self.folder / f"step_{state.step:08d}"
        if place.exists():  # from an earlier attempt at this step, or a damaged checkpoint
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
            raise ResourceError(f"the checkpoint of step {state.step} could not be saved: {error}") from error
        found = self.found()
        here = found.index(place)
        damaged = [later for later in found[here + 1 :] if not readable(later)]  # the run resumed from an earlier one
        for old in (*found[: max(0, here + 1 - self.keep)], *damaged):
            _remove(old)
        return place

    def found(self) -> list[Path]:
        """List the checkpoint folders, sorted by step."""
        if not self.folder.is_dir():
            return []
        named = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(named)]

    def latest(self) -> State | None:
        """Load the newest intact checkpoint, or return None if there are no checkpoints. Damaged ones are skipped with a warning.

        Raises:
            CheckpointError: If all checkpoints are damaged, or the newest was made by a newer version.
        """
        damaged: list[str] = []
        for place in reversed(self.found()):
            try:
                state = read(place)
            except DamagedState as error:
                damaged.append(str(error))
                continue
            for message in damaged:
                warn(f"{message}; resuming from an earlier checkpoint, step {state.step}")
            return state
        if damaged:
            raise CheckpointError(
                f"{'; '.join(damaged)}. All checkpoints of this run are damaged. Restore one, or start again in another "
                f"folder{flag('output')}."
            )
        return None

    def tidy(self) -> None:
        """Remove leftovers of an interrupted save. The caller must hold the lock of the run."""
        for rest in self.folder.glob(".visattn-*") if self.folder.is_dir() else ():
            with contextlib.suppress(OutputError):
                discard(rest)


class DamagedState(CheckpointError):
    """Damaged or incomplete checkpoint. An earlier one may be intact."""


def readable(place: Path) -> bool:
    """Check whether a checkpoint is intact."""
    try:
        read(place)
    except CheckpointError:
        return False
    return True


def read(place: Path) -> State:
    """Load one checkpoint and verify the sha256 of its files.

    Raises:
        CheckpointError: If the folder is no visattn checkpoint, or was made by a newer version.
        DamagedState: If a file is missing or damaged. The message names the file.
    """
    name = printable(str(place))
    if place.is_symlink() or not place.is_dir():
        raise CheckpointError(
            f"{name}: must be a folder with safetensors files and {_STATE}. Only checkpoints that visattn saved can be resumed."
        )
    try:
        told = decoded(read_own(place / _STATE), dict[str, Any], lax=True)
        own = _own({key: value for key, value in told.items() if key != "own_sha256"})
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedState(f"{name}/{_STATE}: cannot be read ({_first_line(error)})") from error
    if type(told.get("format")) is int and told["format"] > FORMAT:
        made = brief(told.get("made_by"))
        raise CheckpointError(f"{name}: made by visattn {made}, needs >= {made}; upgrade visattn.")
    if told.pop("own_sha256", None) != own:
        raise DamagedState(f"{name}/{_STATE}: is damaged (its sha256 differs)")
    try:
        stored = converted(told, _Stored)
    except ValueError as error:
        raise CheckpointError(f"{name}/{_STATE}: {_first_line(error)}. Restore the file.") from error
    tensors = {}
    for file, digest in stored["sha256"].items():
        try:
            content = read_own(place / file)
        except OSError as error:
            raise DamagedState(f"{name}/{file}: cannot be read ({_first_line(error)})") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise DamagedState(f"{name}/{file}: is damaged (its sha256 differs)")
        try:
            tensors[file.removesuffix(".safetensors")] = safetensors.torch.load(content)
        except (safetensors.SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{name}/{file}: is no safetensors file ({_first_line(error)}). Restore the file.") from error
    return State(stored["step"], stored["facts"], tensors)


def pack(tree: Any, name: str = "") -> tuple[Any, Tensors]:  # noqa: ANN401
    """Split a nested structure of dictionaries, lists and tuples into JSON values and named tensors."""
    if isinstance(tree, Tensor):
        return {"tensor": name}, {name: tree}
    if isinstance(tree, dict):
        parts = {key: pack(value, f"{name}.{_part(key)}" if name else _part(key)) for key, value in tree.items()}
        packed: Any = {
            "dict": [[key, value] for key, (value, _) in parts.items()]
        }  # a list of pairs, because keys may be numbers
    elif isinstance(tree, (list, tuple)):
        parts = {i: pack(value, f"{name}.{i}" if name else str(i)) for i, value in enumerate(tree)}
        packed = {type(tree).__name__: [value for value, _ in parts.values()]}
    else:
        return tree, {}
    return packed, {key: tensor for _, tensors in parts.values() for key, tensor in tensors.items()}


def _part(key: str | int) -> str:
    """Format a key for the name of a tensor, so that different paths get different names."""
    return key if isinstance(key, str) and key.isidentifier() else repr(key)


def unpack(packed: Any, tensors: Tensors) -> Any:  # noqa: ANN401
    """Rebuild the structure that `pack` split."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unpack(value, tensors) for key, value in content}
    values = [unpack(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values


def _remove(place: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partly removed one does not look like a checkpoint."""
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
    return tensor.detach().to("cpu", copy=True).contiguous()  # copied, because safetensors refuses tensors that share memory


@contextlib.contextmanager
def fitting(run: Path, step: int | None) -> Iterator[None]:
    """Turn errors caused by a restored checkpoint into one clear error.

    Args:
        run: Folder of the run.
        step: Step of the checkpoint; None if none was restored, so that all errors are passed on.

    Yields:
        Nothing.

    Raises:
        CheckpointError: If the checkpoint does not fit the model.
    """
    try:
        yield
    except _UNFIT as error:
        if isinstance(error, VisattnError) or step is None or "memory" in str(error):
            raise
        cause = printable((str(error) or type(error).__name__).splitlines()[0])
        raise CheckpointError(
            f"{printable(str(run))}: the checkpoint of step {step} does not fit this model ({cause}). Choose another "
            f"folder{flag('output')}."
        ) from error
