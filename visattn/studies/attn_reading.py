"""Reading of `.attn` files. Nothing in a file is executed, and everything is checked before it is used."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from visattn._support.checks import printable
from visattn._support.files import regular
from visattn._support.language import worded
from visattn._support.reprs import in_pixels
from visattn._support.typed import typed
from visattn.core.geometry import Geometry
from visattn.core.images import MAX_PIXELS, ImageFacts, decode, stating
from visattn.core.maps.map_files import layout_of, map_of
from visattn.core.pipeline.outputs import PredictedClass
from visattn.core.provenance import Provenance
from visattn.core.records import AttentionRecord, FeatureRecord, Readout, Recording, TokenLayout, UnseenAttention
from visattn.errors import StudyError
from visattn.studies.attn_schema import (
    FORMAT,
    MOST_PIXELS,
    VERSION,
    ContributionsFacts,
    FeatureFacts,
    ImportanceFacts,
    RecordFacts,
    StudyFacts,
    ViewFacts,
    study_of,
)
from visattn.studies.operands import MASKS, operator_of
from visattn.studies.sequence import Study
from visattn.studies.views import Contributions, Importance, LayerContributions, View

_Read = Callable[[str], Tensor]


@typed()
def load_study(path: str | os.PathLike[str]) -> Study:
    """Load a study from an `.attn` file, written by `Study.save` or by another tool.

    Loading never executes code from the file, so files from untrusted sources are safe to read.

    Args:
        path: Path of the file.

    Returns:
        The study; overlays and pages of heads are made from it without the model.

    Raises:
        StudyError: If the file is not a study, is of a later version, or its content is invalid.
    """
    name = printable(os.fspath(path))
    try:
        with safe_open(str(regular(Path(path))), framework="pt") as file:
            facts = _description(file.metadata() or {})
            tensors = _File(file.get_tensor)
            return Study(tuple(_view(view, tensors) for view in facts["views"]))
    except Exception as error:  # safetensors, json and torch raise many types for damaged files
        cause = printable(" ".join(str(error).split()))[:160] or type(error).__name__
        raise StudyError(
            f"{name}: not a study ({cause}); make one with {worded('visattn.study(...).save(path)', 'visattn view IMAGE -o NAME.attn')}"
        ) from error


def _description(said: dict[str, str]) -> StudyFacts:
    """Return the description in the header of the file.

    Raises:
        ValueError: If there is none, it is of another version, too long, or has another shape.
    """
    if said.get("format") != FORMAT:
        raise ValueError(f"its header does not state the format '{FORMAT}'")
    if said.get("version") != str(VERSION):
        raise ValueError(f"it is of version {said.get('version')}, and this visattn reads version {VERSION}")
    return study_of(said.get("study", ""))


class _File:
    """Tensors and photos of a file; each is read once, however often it is named."""

    def __init__(self, stored: _Read) -> None:
        self._stored, self._tensors, self._photos, self._pixels = stored, dict[str, Tensor](), dict[str, Image.Image](), 0

    def raw(self, name: str) -> Tensor:
        """Return a tensor in memory of its own: aligned, and safe from changes of the file."""
        if name not in self._tensors:
            self._tensors[name] = self._stored(name).clone()
        return self._tensors[name]

    def tensor(self, name: str, masks: bool = False) -> Tensor:
        """Return a tensor after checking that its values are finite, or -inf where they mask keys."""
        found = self.raw(name)
        sound = ~(found.isnan() | (found == math.inf)) if masks else found.isfinite()
        if not bool(sound.all()):
            raise ValueError(f"tensor {name} holds NaN or infinite values")
        return found

    def photo(self, name: str) -> Image.Image:
        """Return a copy of a photo."""
        if name not in self._photos:
            content = self.raw(name)
            if content.dtype != torch.uint8 or content.ndim != 1:
                raise ValueError(f"a photo must be bytes, got {content.dtype} {tuple(content.shape)}")
            self._photos[name] = decode(content.numpy().tobytes(), max_pixels=min(MAX_PIXELS, MOST_PIXELS - self._pixels))
            self._pixels += self._photos[name].width * self._photos[name].height
        return self._photos[name].copy()


def _view(facts: ViewFacts, file: _File) -> View:
    read = file.tensor
    provenance = Provenance.from_dict(facts["provenance"])
    photo = file.photo(facts["photo"])
    if provenance.image is not None and provenance.image_sha256 is not None:
        stating(photo, ImageFacts(printable(provenance.image), provenance.image_sha256))
    geometry = Geometry.from_dict(facts["geometry"])
    if geometry.photo != (photo.height, photo.width):
        raise ValueError(f"its photo has {photo.width} x {photo.height} pixels, not {in_pixels(geometry.photo)}")
    layouts = [layout_of(layout) for layout in facts["layouts"]]
    recording = Recording(
        records=[_record(record, layouts, read) for record in facts["records"]],
        features=[_feature(feature, layouts, read) for feature in facts.get("features", ())],
        input_size=geometry.input,
        readout=facts.get("readout", ""),
        readouts=_readouts(facts, layouts, read),
        captured=facts.get("captured", "*"),
        provenance=provenance,
        unseen=[UnseenAttention(layer, 0, reason) for layer, reason in facts.get("unseen", ())],
    )
    maps = {name: map_of(shown, file.raw(shown["values"])) for name, shown in facts.get("maps", {}).items()}
    classes = tuple(PredictedClass(one["class"], one.get("name"), one["probability"]) for one in facts.get("classes", ()))
    importance = _importance(facts.get("importance"), recording)
    contributions = _contributions(facts.get("contributions"), layouts, read)
    texts, called = facts.get("texts", {}), facts.get("name", "")
    return View(photo, geometry, recording, maps, classes, texts, importance, contributions, called)


def _readouts(facts: ViewFacts, layouts: Sequence[TokenLayout], read: Callable[[str], Tensor]) -> dict[int, Readout]:
    if "shares" not in facts:
        return {}
    layout, shares = layouts[facts["shares"]["layout"]], read(facts["shares"]["values"])
    if shares.shape != (len(layout),) or bool((shares < 0).any()):
        raise ValueError(f"shares must be {len(layout)} numbers that are not negative, got {tuple(shares.shape)}")
    return {0: Readout("read", layout, shares.double()[None])}


def _contributions(
    facts: ContributionsFacts | None, layouts: Sequence[TokenLayout], read: Callable[[str], Tensor]
) -> Contributions | None:
    if facts is None:
        return None
    layers = []
    for one in facts["layers"]:
        layout, values = layouts[one["layout"]], read(one["values"])
        if values.ndim != 2 or values.shape[1] != len(layout) or not len(values):
            raise ValueError(f"contributions of {one['layer']} must be heads x {len(layout)}, got {tuple(values.shape)}")
        layers.append(LayerContributions(one["layer"], layout, values.float(), one["bias"]))
    return Contributions(facts["target"], facts["score"], tuple(layers), tuple(facts["rest"]))


def _importance(facts: ImportanceFacts | None, recording: Recording) -> Importance | None:
    if facts is None:
        return None
    heads = tuple(map(tuple, facts["heads"]))
    for record, numbers in zip(recording, heads, strict=True):
        if len(numbers) != record.operator.shape[1]:
            raise ValueError(f"{record.layer}: importance must be given for {record.operator.shape[1]} heads, got {len(numbers)}")
    return Importance(facts["target"], heads)


def _record(facts: RecordFacts, layouts: list[TokenLayout], read: Callable[..., Tensor]) -> AttentionRecord:
    def operand(name: str) -> Tensor | None:
        held = facts["operator"].get(name)
        return None if held is None else read(held, name == MASKS)

    value, weight, residual = (
        None if facts.get(name) is None else read(facts[name]) for name in ("value", "output_weight", "residual")
    )
    return AttentionRecord(
        facts["layer"],
        facts.get("call", 0),
        0,
        facts["kind"],
        operator_of(facts["operator"], operand),
        layouts[facts["queries"]],
        layouts[facts["keys"]],
        None if value is None else value[None],
        weight,
        None if residual is None else residual[None],
        facts.get("follows"),
        facts.get("reason"),
    )


def _feature(facts: FeatureFacts, layouts: list[TokenLayout], read: Callable[..., Tensor]) -> FeatureRecord:
    number = facts.get("layout")
    layout = None if number is None else layouts[number]
    return FeatureRecord(facts["layer"], 0, facts["role"], read(facts["value"])[None], layout=layout)
