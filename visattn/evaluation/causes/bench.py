"""Methods of anybody over the shipped networks of known causes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from torch import Tensor, nn
from tqdm import tqdm

from visattn._support.checks import at_least, one_of, shown as brief_of
from visattn._support.files import is_folder
from visattn.core.maps import AttentionMap
from visattn.core.methods import METHODS, name_of
from visattn.core.pipeline.asking import asked_of
from visattn.core.pipeline.explaining import explain
from visattn.core.pipeline.inputs import prepare
from visattn.errors import MapError, NoAttentionCaptured, OptionError, ShapeError
from visattn.evaluation.causes.findings import CONTROLS, Causes, Findings, scene_numbers
from visattn.evaluation.causes.networks import PATCH, SEED, Case, CauseNetwork, another, cause_networks
from visattn.evaluation.given import MapLike, on_input
from visattn.evaluation.journal_file import JournalFile
from visattn.evaluation.stored_maps import MAPS, map_of, stored

Function: TypeAlias = Callable[[nn.Module, Tensor, int], MapLike]
Method: TypeAlias = str | Mapping[str, Any] | Path | Function
WITHOUT = "without"  # folder of the maps where the cause has no effect
SCENES = 60


def find_causes(
    methods: Mapping[str, Method] | Sequence[str] | str,
    *,
    networks: Sequence[str] | str | None = None,
    scenes: int = SCENES,
    seed: int = SEED,
    journal: str | os.PathLike[str] | None = None,
    anew: bool = False,
    quiet: bool = True,
) -> Causes:
    """Measure how well methods find what a network decides by, on shipped networks whose one cause is known.

    Args:
        methods: Names of methods of visattn; or, by a name of your choice: such a name; options of `visattn.explain`, such as
            `{"method": "gradcam", "layer": "layer3"}`; a function; or a folder. A function takes the network, one input `(1, 3, H, W)` and
            the class, and returns a map of the input; it gets a copy of each network. A folder holds maps as `export_scenes` lists them.
        networks: Names of networks, such as `mark_cnn_0`, or of causes or kinds, such as `mark` or `cnn`; None: all.
        scenes: Number of scenes of each network, at least 2.
        seed: Seed of the scenes.
        journal: File that keeps the numbers of each method and network as soon as they are known. A run that finds it there goes on, but
            measures a function again, unless it has an attribute `source`, a text that tells its versions apart.
        anew: Whether to forget what the journal holds.
        quiet: Whether to show no progress bar.

    Returns:
        The findings. A method of visattn that does not apply to a network is left out there, and says why.

    Raises:
        MissingExtra: If the package with the networks is not installed.
        OptionError: If a name is unknown, or a number out of range.
        MapError: If a map is missing, or is no map of the input.
        OutputError: If the journal is of a run with other settings, or cannot be read or written.
    """
    at_least("scenes", scenes, 2)
    at_least("seed", seed, 0)
    listed = [methods] if isinstance(methods, str) else methods
    sources = dict(listed) if isinstance(listed, Mapping) else {name: name for name in listed}
    if not sources:
        raise OptionError("there must be a method.")
    shown_by = {name: _drawing(method) for name, method in sources.items()}
    every = cause_networks()
    chosen = chosen_of(every, networks)
    settings = {"scenes": scenes, "seed": seed, "visattn": version("visattn")}
    file = JournalFile(None if journal is None else Path(journal), "causes", settings, _Line, anew=anew)
    sourced = {name: _source(method) for name, method in sources.items()}
    known = {(line.map, line.source, line.network): line for line in file.lines}
    findings = list[Findings]()
    for network in tqdm(chosen, unit="network", disable=True if quiet else None):
        other = network if network.cause == PATCH else another(network, every)
        for name, shown in shown_by.items():
            source = sourced[name] and _joined(sourced[name], network.digest, other.digest)
            line = known.get((name, source, network.name)) if source else None
            line = line or file.add(_measured(name, source, shown, network, other, scenes, seed))
            findings.append(_findings(line, network))
    return Causes(findings)


def _source(method: Method) -> str:
    """Return a digest of what a method is: of its options, of its maps, or of the text of a function; nothing without a text."""
    digest = hashlib.sha256()
    if callable(method) and not hasattr(method, "source"):
        return ""
    if isinstance(method, Path):
        for path in sorted(path for path in method.rglob("*") if path.suffix in MAPS):
            digest.update(f"{path.relative_to(method)} {path.stat().st_size}".encode() + path.read_bytes())
    elif callable(method):
        digest.update(str(method.source).encode())
    else:
        digest.update(json.dumps(method, default=str).encode())
    return digest.hexdigest()


def _joined(*digests: str) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def chosen_of(every: Sequence[CauseNetwork], names: Sequence[str] | str | None) -> list[CauseNetwork]:
    """Return the networks with these names, causes or kinds.

    Raises:
        OptionError: If a name is unknown.
    """
    if names is None:
        return list(every)
    names = [names] if isinstance(names, str) else names
    known = dict.fromkeys(word for network in every for word in (network.cause, network.kind, network.name))
    wanted = {one_of(name, tuple(known), "network") for name in names}
    return [network for network in every if {network.cause, network.kind, network.name} & wanted]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """Numbers of a method on a network: for each scene, by name."""

    map: str
    source: str
    network: str
    grid: tuple[int, ...]
    numbers: dict[str, list[float]]
    left_out: str

    def __post_init__(self) -> None:
        """Check that a line of a file is whole.

        Raises:
            ValueError: If numbers are missing.
        """
        names, lengths = set(self.numbers), {len(values) for values in self.numbers.values()}
        is_whole = {"auroc", "touches"} <= names <= {"auroc", "touches", *CONTROLS} and len(lengths) == 1 and min(lengths) > 1
        if not self.left_out and not (is_whole and len(self.grid) == 2):
            raise ValueError("numbers of scenes are missing")


# A map of a case by a network; with `other`, that where the cause has no effect, which may be missing.
Drawing: TypeAlias = Callable[[CauseNetwork, Case, CauseNetwork | None], AttentionMap | None]


def _drawing(method: Method) -> Drawing:
    """Return a function that draws the maps of a method.

    Raises:
        OptionError: If the method or an option of it is unknown, the folder does not exist, or it is none of these.
    """
    if isinstance(method, (str, Mapping)):
        options: dict[str, Any] = {"method": method} if isinstance(method, str) else dict(method)
        own = {name: value for name, value in options.items() if name not in ("method", "target")}
        asked_of(str(options.get("method")), options.get("target"), own, 0)  # refuses what is unknown
        targeted = METHODS[name_of(str(options.get("method")))].targeted

        def by_method(network: CauseNetwork, case: Case, other: CauseNetwork | None) -> AttentionMap:
            model, image = _asked(network, case, other)
            target = case.label if targeted else None
            panel = explain(model, image, **{"target": target, **options}).panel
            if panel.axes:
                raise OptionError(f"its maps have several {panel.axes[0]}s, which are no one map")
            return panel

        return by_method
    if isinstance(method, Path):
        if not is_folder(method):
            raise OptionError(f"{method}: no such folder with maps.")
        return lambda network, case, other: _stored(method, network, case, other)

    if not callable(method):
        raise OptionError(f"a method must be a name, options, a function or a folder, got {brief_of(method)}.")
    copies = dict[str, nn.Module]()  # of the networks, as the function may change what it is given

    def by_function(network: CauseNetwork, case: Case, other: CauseNetwork | None) -> AttentionMap:
        model, image = _asked(network, case, other)
        prepared, name = prepare(image, model), (other or network).name
        own = copies[name] if name in copies else copies.setdefault(name, deepcopy(model))
        return on_input(method(own, prepared.pixels, case.label), prepared.geometry)

    return by_function


def _asked(network: CauseNetwork, case: Case, other: CauseNetwork | None) -> tuple[nn.Module, Any]:
    """Return the network that is asked, and the image; for a patch, the other one is the same, and the image is without it."""
    without = case.without if other is not None and case.without is not None else case.image
    return (other or network).model, without


def _stored(folder: Path, network: CauseNetwork, case: Case, other: CauseNetwork | None) -> AttentionMap | None:
    """Read the map of a scene from a folder; the one without effect is missing if its folder is."""
    place = folder / network.name if other is None else folder / network.name / WITHOUT
    if other is not None and not is_folder(place):
        return None
    geometry = prepare(case.image, network.model).geometry
    return on_input(map_of(stored(Path(f"{case.number}.png"), place, MAPS)), geometry)


def _measured(
    name: str, source: str, shown: Drawing, network: CauseNetwork, other: CauseNetwork, scenes: int, seed: int
) -> _Line:
    """Return the numbers of a method on a network; a method that does not apply to it is left out."""
    numbers, grid = dict[str, list[float]](), tuple[int, ...]()
    for case in network.cases(scenes, seed):
        try:
            own, without = shown(network, case, None), shown(network, case, other)
        except (OptionError, NoAttentionCaptured) as error:
            return _Line(name, source, network.name, (), {}, str(error))
        except (MapError, ShapeError) as error:
            raise type(error)(f"{name} on {network.name}, scene {case.number}: {error}") from error
        assert own is not None  # noqa: S101 - only the map without effect may be missing
        grid = own.layout.grid
        for number, value in scene_numbers(own, without, case).items():
            numbers.setdefault(number, []).append(value)
    if len(numbers.get("auroc", ())) < 2:
        return _Line(name, source, network.name, (), {}, "fewer than two scenes show the cause")
    return _Line(name, source, network.name, grid, numbers, "")


def _findings(line: _Line, network: CauseNetwork) -> Findings:
    about = line.map, network.cause, network.kind, network.name
    if line.left_out:
        return Findings(*about, left_out=line.left_out)
    numbers = {name: np.array(values) for name, values in line.numbers.items()}
    return Findings(*about, line.grid, numbers.pop("auroc"), numbers.pop("touches"), numbers)
