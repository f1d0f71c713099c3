"""Survey of a model's heads over many photos: means over photos and their confidence intervals, as table rows.

Photos are added one by one, and only a few numbers per head are kept. The results are rows for heads, layers and photos.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
from PIL import Image
from torch import Tensor, nn

from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.tables import Row
from visattn.core.images import image_facts
from visattn.core.methods.from_attention.contributions import parts_of
from visattn.core.methods.selection import chain, chain_refusal
from visattn.core.methods.sinks import attention_received, sink_mass, sinks_of_scores
from visattn.core.pipeline.inputs import Prepared, prepare
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.preprocessing import PreprocessingOptions
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import Recording
from visattn.errors import OptionError, UnsupportedModel
from visattn.evaluation.heads import head_divergence, statistics
from visattn.evaluation.intervals import mean_interval
from visattn.evaluation.statistics_of_gates import gate_statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEW = 10  # with fewer photos an interval is clearly too narrow
_BESIDE = {  # table names of the reference values of each layer
    "keys": "keys",
    "distance_if_uniform_px": "uniform_distance",
    "distance_nearest_px": "nearest_distance",
}


class LayerNumbers(NamedTuple):
    """Numbers of one attention call on one photo.

    Attributes:
        names: Names of the columns of `heads`.
        heads: `(heads, names)`.
        whole: Divergence of the heads, and share of attention that goes to sinks.
        beside: Reference values, see `_BESIDE`.
    """

    names: list[str]
    heads: Array
    whole: Array
    beside: Array


class PhotoNumbers(NamedTuple):
    """Statistics of one photo.

    Attributes:
        photo: Row of the table of photos.
        layers: Numbers of each attention call.
        gates: Numbers of each gate, by layer and role; see `GateStatistics.numbers`.
        left_out: Reason, layer.
        provenance: Provenance of the recording.
    """

    photo: Row
    layers: dict[str, LayerNumbers]
    gates: dict[tuple[str, str], dict[str, float]]
    left_out: list[tuple[str, str]]
    provenance: Provenance


class _Layer:
    """Values of one attention call, one entry per photo."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.heads: list[Array] = []
        self.whole: list[Array] = []
        self.beside: list[Array] = []


class Survey:
    """Statistics of the heads of one model over many photos, which are added one by one.

    Attributes:
        photos: One row per photo: its name, digest and size, the size of the model's input, sinks, and means over all heads.
    """

    @with_options(PreprocessingOptions)
    def __init__(self, model: nn.Module | None = None, *, seed: int = 0, **options: Unpack[PreprocessingOptions]) -> None:
        """Create an empty survey.

        Args:
            model: The model; None if statistics are only entered.
            seed: Seed of the bootstrap.
            options: See `prepare`.
        """
        self.photos: list[Row] = []
        self._model, self._options, self._seed = model, options, seed
        self._layers: dict[str, _Layer] = {}
        self._gates: dict[tuple[str, str], list[dict[str, float]]] = {}
        self._left_out: dict[str, dict[str, None]] = {}
        self._provenance = Provenance()

    def add(self, photo: Image.Image, name: str) -> None:
        """Run the model on a photo and add its statistics. If this raises, the survey is unchanged.

        Args:
            photo: Upright photo, as returned by `load_image`.
            name: Name of the photo in the table.

        Raises:
            OptionError: If the survey has no model.
            ImageError: If the photo is too narrow for the model.
            UnsupportedModel: If no layer has distributions over tokens.
        """
        if self._model is None:
            raise OptionError("the survey has no model. Pass one to Survey(...).")
        prepared = prepare(photo, self._model, **self._options)
        self.enter(photo_numbers(look(self._model, prepared, gates=True), prepared, name))

    def enter(self, found: PhotoNumbers) -> None:
        """Add the statistics of a photo."""
        for name, numbers in found.layers.items():
            layer = self._layers.setdefault(name, _Layer(numbers.names))
            missing = np.full(len(numbers.heads), math.nan)
            columns = {key: numbers.heads[:, place] for place, key in enumerate(numbers.names)}
            layer.heads.append(np.stack([columns.get(key, missing) for key in layer.names], axis=1))
            layer.whole.append(numbers.whole)
            layer.beside.append(numbers.beside)
        for place, gate in found.gates.items():
            self._gates.setdefault(place, []).append(gate)
        for why, name in found.left_out:
            self._left_out.setdefault(why, {})[name] = None
        self.photos.append(found.photo)
        self._provenance = found.provenance.but(notes=self._provenance.notes)

    def heads(self) -> list[Row]:
        """Return one row per layer and head: means over photos, and bounds of 95 % intervals if there are at least two photos."""
        rows = []
        for name, layer in self._complete().items():
            tables = _columns(np.stack(layer.heads), layer.names, self._seed)
            rows += [{"layer": name, "head": head, **_beside(layer), **row} for head, row in enumerate(tables)]
        return _aligned(rows)

    def layers(self) -> list[Row]:
        """Return one row per layer: means over heads and photos, the divergence of its heads, and attention to sinks."""
        rows = []
        for name, layer in self._complete().items():
            values = np.concatenate([np.stack(layer.heads).mean(1), np.stack(layer.whole)], axis=1)[:, None]
            (row,) = _columns(values, [*layer.names, "head_divergence", "to_sinks"], self._seed)
            rows.append({"layer": name, "heads": len(layer.heads[0]), **_beside(layer), **row})
        return _aligned(rows)

    def gates(self) -> list[Row]:
        """Return one row per gate of every photo: means over photos of its numbers, with 95 % intervals."""
        rows: list[Row] = []
        for (name, role), photos in self._gates.items():
            if len(photos) == len(self.photos):
                names = list(photos[0])
                values = np.array([[[numbers[key] for key in names]] for numbers in photos])
                rows.append({"layer": name, "gate": role, **_columns(values, names, self._seed)[0]})
        return rows

    def provenance(self, image: str) -> Provenance:
        """Return the provenance: model, weights, preprocessing, layers left out, and reasons why the numbers may mislead.

        Args:
            image: Name for all photos together.
        """
        count = len(self.photos)
        notes = [f"left out, as {why}: {', '.join(layers)}" for why, layers in self._left_out.items()]
        changing = [name for name in self._layers if name not in self._complete()]
        if changing:
            notes.append(f"left out, as not every photo has these attention calls: {', '.join(changing)}")
        if all(row["sinks"] is None for row in self.photos):
            notes.append("sinks are not counted: that needs consecutive layers over one set of tokens")
        few = {1: "one photo says little about these heads and has no interval"}
        warning = few.get(count, f"intervals of {count} photos are too narrow; take {FEW} or more")
        return self._provenance.but(
            image=image,
            method="statistics",
            parameters={
                "photos": count,
                "resize": self._options.get("resize", "auto"),
                "confidence": 0.95,
                "resamples": 2000,
                "seed": self._seed,
            },
            notes=tuple(notes),
            warnings=(warning,) if count < FEW else (),
        )

    def _complete(self) -> dict[str, _Layer]:
        return {name: layer for name, layer in self._layers.items() if len(layer.heads) == len(self.photos)}


@in_own_modes
def photo_numbers(recording: Recording, prepared: Prepared, name: str) -> PhotoNumbers:
    """Compute the statistics of a photo.

    Args:
        recording: Recording of the photo.
        prepared: The photo.
        name: Name of the photo in the table.

    Raises:
        UnsupportedModel: If no layer has distributions over tokens, and there are no gates.
    """
    kept, left_out = _with_distributions(recording)
    gates: dict[tuple[str, str], dict[str, float]] = {}
    for gate in gate_statistics(recording):
        call = sum(layer.partition(" #")[0] == gate.layer and role == str(gate.role) for layer, role in gates)
        place = f"{gate.layer} #{call}" if call else gate.layer  # a module may be called several times
        gates[place, str(gate.role)] = {key: float(value[0]) for key, value in gate.numbers().items()}
    if not kept and not gates:
        raise UnsupportedModel(f"nothing to measure: {_reasons(left_out) or 'no attention and no gates'}. Use another model.")
    direct = _direct(recording)
    sinks, shares = _sinks(recording)
    layers: dict[str, LayerNumbers] = {}
    ratios, entropies = [], []
    for one in statistics(kept) if kept else ():
        heads = {key: _array(value[0]) for key, value in one.numbers().items()}
        if one.distance is not None and one.uniform_distance:
            heads["distance_of_uniform"] = heads["distance_px"] / one.uniform_distance
            ratios.append(heads["distance_of_uniform"].mean())
        heads |= direct.get(one.name, {})
        entropies.append(heads["entropy"].mean())
        apart = head_divergence(kept, layer=one.layer, call=one.call)[0]
        count = len(apart)
        mean = float(apart.sum()) / (count * (count - 1)) if count > 1 else math.nan
        layers[one.name] = LayerNumbers(
            list(heads),
            np.stack(list(heads.values()), axis=1),
            np.array([mean, shares.get(one.name, math.nan)]),
            np.array([getattr(one, key) for key in _BESIDE.values()], dtype=np.float64),  # None is NaN
        )
    photo, seen = prepared.photo, prepared.geometry.input
    source = image_facts(photo)
    row = {
        "photo": name,
        "sha256": source.sha256,
        "height": photo.height,
        "width": photo.width,
        "input_height": seen[0],
        "input_width": seen[1],
        "sinks": None if sinks is None else len(sinks),
        "highest_sink": sinks[0].score if sinks else None,
        "entropy": float(np.mean(entropies)) if entropies else None,
        "distance_of_uniform": float(np.mean(ratios)) if ratios else None,
        "notes": "; ".join(source.notes),
    }
    return PhotoNumbers(row, layers, gates, left_out, prepared.noted(recording.provenance))


def _direct(recording: Recording) -> dict[str, dict[str, Array]]:
    """Return the direct contributions of each head to the score whose terms were recorded, by layer."""
    if recording.terms is None:
        return {}
    _, parts = parts_of(recording)
    return {
        part.layer: {
            "direct": _array(part.heads),
            "direct_through_patches": _array(part.patches.sum(1)),
        }
        for part in parts
    }


def _with_distributions(recording: Recording) -> tuple[Recording, list[tuple[str, str]]]:
    """Keep the records whose rows are distributions over tokens; return the others' layers with the reason."""
    kept, left_out = [], []
    for record in recording:
        why = None if record.probability else "rows do not sum to 1"
        why = "channels attend to channels" if record.kind == "channel" else why
        why = "there are no tokens" if 0 in record.operator.shape else why
        if why is None:
            kept.append(record)
        else:
            left_out.append((why, record.layer))
    return replace(recording, records=kept), left_out


def _reasons(left_out: list[tuple[str, str]]) -> str:
    """Return why layers were left out, in one sentence."""
    layers: dict[str, dict[str, None]] = {}
    for why, name in left_out:
        layers.setdefault(why, {})[name] = None
    found = "; ".join(f"{why} in {', '.join(name or 'the model itself' for name in names)}" for why, names in layers.items())
    return f"no layer has distributions over tokens ({found})" if found else ""


def _sinks(recording: Recording) -> tuple[tuple[Sink, ...] | None, dict[str, float]]:
    """Return the photo's sinks, None if layers do not compose, and the share of each layer's attention that goes to them."""
    if chain_refusal(recording) is not None:
        return None, {}
    scores = attention_received(recording)
    records = chain(recording)
    found = sinks_of_scores(scores, records)
    shares = sink_mass(recording, found, scores)[0]
    return found[0], {record.layer: float(share) for record, share in zip(records, shares, strict=True)}


def _columns(values: Array, names: list[str], seed: int) -> list[dict[str, Any]]:
    """Return one row for each of `(photos, rows, names)` values, with means and the bounds of their intervals."""
    mean = values.mean(0)
    low, high = mean_interval(values, seed=seed) if len(values) > 1 else (np.full_like(mean, math.nan),) * 2
    return [
        {
            name + end: _number(column)
            for name, columns in zip(names, zip(*parts, strict=True), strict=True)
            for end, column in zip(("", "_low", "_high"), columns, strict=True)
        }
        for parts in zip(mean, low, high, strict=True)
    ]


def _beside(layer: _Layer) -> dict[str, float | None]:
    return dict(zip(_BESIDE, map(_number, np.mean(layer.beside, axis=0)), strict=True))


def _aligned(rows: list[dict[str, Any]]) -> list[Row]:
    """Give all rows the same columns, in order of first appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _array(values: Tensor) -> Array:
    found: Array = values.detach().double().cpu().numpy()
    return found
