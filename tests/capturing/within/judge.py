"""Judge of the claims of a record, by the dense oracle of `influence`.

A record claims for each key (and query) vector that it is the token of a grid cell, a rectangle of pixels, or a named token that is
none. The truth is the influence of each patch on the key. A claim is wrong

- if the key is claimed for a cell, but some patch outside the cell has more than 1.25 times the influence on it of every patch that
  the cell overlaps (of all patches of all inputs; the cell means its place in any of the input images). So a mix is placed rightly
  if its cell has the largest share, as in a transformer, whose tokens are mixes too.
- if the key depends on one patch alone, or the program resamples the grid by a local kernel, and the center of the claimed cell is
  further from the center of influence than half a cell, which the documentation allows, or half a patch.
- if the key is claimed for a cell, and depends on a further input whose patches count at least a tenth of the cell, and mostly by a
  patch elsewhere than in the cell, unless this input has the same influence on all keys.
- if keys of one grid come from different inputs: most of the influence is the image's for some, and another input's for others.
- if the key is claimed for a cell of one image of the batch, and most of its influence is another image's.
- if the key is claimed to be learned (`cls`, `register0`, ...) and depends on pixels.
- if the key is called `mean`, and one patch has more than half of the influence; or `foreign`, and the image has more than half.

Keys that depend on no pixel but are claimed for a cell are counted as `blank` keys of a right record: masked tokens are such.

A program is refused although it is placeable if each key depends on one patch of its own image or on none, on different ones, and on
the same for two seeds, whatever other patches contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import visattn
from tests.capturing.moving import GRID, PATCH
from tests.capturing.within.influence import MIDDLE, WEAK, Influence, alike, bijective, influence
from tests.capturing.within.model import Mover, Program, inputs_of, quietly
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import CaptureError

MARGIN = 1.25
LONG = 1200  # longer sequences take long
SEEDS = (0, 1)
OUTCOMES = ("right", "wrong", "refused", "refused although placeable", "missed", "failed", "changed", "unknown")
_BY_WEIGHT = ("right", "unknown", "refused", "changed", "missed", "failed", "wrong")
BAD = ("wrong", "missed", "failed", "changed")


class Claim(NamedTuple):
    """Claim of a record about one key vector: its name, or its cell as top, left, bottom and right in pixels."""

    name: str
    cell: tuple[float, float, float, float] | None


@dataclass(frozen=True)
class Said:
    """Result of one forward pass; see `Verdict`."""

    outcome: str
    detail: str = ""
    blank: int = 0
    off: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Result of a program.

    Attributes:
        family: Family of the program.
        name: Its name; with a residual it ends in ` + residual`.
        outcome: One of `OUTCOMES`.
        detail: What is wrong, or the reason of the refusal.
        placeable: Whether the oracle proves where each key lies.
        blank: Keys that depend on nothing and are claimed for a cell.
        off: Largest distance of a cell's center from the center of influence, in cells, where it is judged.
    """

    family: str
    name: str
    outcome: str
    detail: str = ""
    placeable: bool = False
    blank: int = 0
    off: float = 0.0


def verdict(program: Program, residual: bool = False) -> Verdict | None:
    """Run a program without and with a capture and judge the records; None if it does not run or makes no tokens."""
    name = program.name + " + residual" * residual
    model = Mover(program, residual)
    try:
        plain = [quietly(model, *inputs_of(program, seed)) for seed in SEEDS]
        fit = all(bool(out.isfinite().all()) and out.ndim == 3 for out in plain)
    except Exception:
        if program.written and not residual:
            raise
        return None
    if plain[0].ndim == 3 and plain[0].shape[1] > LONG:
        return None
    if not fit or (residual and plain[0].shape != (program.batch, GRID[0] * GRID[1], plain[0].shape[2])):
        return None
    truths = [influence(model, SEEDS[0])]
    if truths[0] is not None and truths[0].own is not None:
        truths.append(influence(model, SEEDS[1]))
    one, other = (*truths, None)[:2]
    placeable = one is not None and other is not None and bijective(one, other)
    found = [_captured(program, residual, seed, *pair) for seed, *pair in zip(SEEDS, plain, truths, strict=False)]
    if found[0].outcome == "wrong" and not placeable:
        found = [_confirmed(found[0], model, residual, plain)]
    worst = max(found, key=lambda one: _BY_WEIGHT.index(one.outcome))
    outcome = "refused although placeable" if worst.outcome == "refused" and placeable else worst.outcome
    blank, off = max(one.blank for one in found), max(one.off for one in found)
    return Verdict(program.family, name, outcome, worst.detail[:400], placeable, blank, off)


def _confirmed(first: Said, model: Mover, residual: bool, plain: Sequence[Tensor]) -> Said:
    """Judge a wrong record again, with another image and by a stronger light, and return `unknown` if one of them disagrees.

    Orders may depend on the image, and weak light is lost in types of low precision.
    """
    program = model.program[0]
    for seed, strength in ((SEEDS[0], MIDDLE), (SEEDS[1], WEAK)):
        again = _captured(program, residual, seed, plain[SEEDS.index(seed)], influence(model, seed, strength))
        if again.outcome != "wrong":
            return replace(first, outcome="unknown", detail=f"wrong or not: {first.detail}; {again.outcome} by another light")
    return first


def _captured(program: Program, residual: bool, seed: int, plain: Tensor, truth: Influence | None) -> Said:
    """Capture a forward pass of a fresh model and judge the recording."""
    model, inputs = Mover(program, residual), inputs_of(program, seed)
    try:
        with visattn.capture(model, values=True) as recording:
            out = quietly(model, *inputs)
    except CaptureError as error:  # a refusal of the whole recording
        return Said("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Said("failed", f"{type(error).__name__}: {error}")
    said = judged(recording, truth, program)
    if said.outcome != "wrong" and not (out.shape == plain.shape and torch.equal(out.nan_to_num(), plain.nan_to_num())):
        return replace(said, outcome="changed", detail="the output under a capture differs from the output without")
    return said


def judged(recording: Recording, truth: Influence | None, program: Program) -> Said:
    """Judge a recording of one forward pass."""
    seen = len(recording) + len(recording.unseen)
    if seen < program.attention:
        told = f"{len(recording)} records and {len(recording.unseen)} unseen of {program.attention} attention calls"
        return Said("missed", told)
    if not len(recording):
        return Said("refused", f"unseen: {recording.unseen[-1].reason}")
    record = recording[len(recording) - 1]
    if record.reason is not None:
        return Said("refused", record.reason)
    if not record.keys.grid and record.kind == "channel":
        return Said("refused", "recorded as attention of channels")
    if truth is None:
        return Said("unknown", "the oracle cannot tell: what exists depends on the pixels")
    said = compared(record, truth, program.resamples)
    if said.outcome == "wrong" and program.attention > 1:
        return Said("unknown", f"what attention mixed counts as its queries: {said.detail}")
    return said


def compared(record: AttentionRecord, truth: Influence, resamples: bool = False) -> Said:
    """Compare the claims of a located record with the truth; see `judged`."""
    operator = record.operator
    if not isinstance(operator, SoftmaxOperator):
        return Said("unknown", f"operator {type(operator).__name__}")
    most, sides = Said("right"), [("key", operator.key, operator.key_index, record.keys)]
    if record.queries != record.keys or not _equal(operator.query_index, operator.key_index):
        sides.append(("query", operator.query, operator.query_index, record.queries))
    for side, vectors, index, layout in sides:
        rows = _rows(vectors[:, 0].flatten(1, 2), truth.keys)
        if rows is None:
            return Said("wrong", f"the {side} vectors are not those that attention got")
        batch, count = rows.shape
        claims = claims_of(layout, index, count)
        said: list[Claim | None] = [None] * truth.keys.shape[0] * truth.keys.shape[1]
        images = [-1] * len(said)
        for image in range(batch):
            for column in range(count):
                row = int(rows[image, column])
                said[row] = claims[column]
                images[row] = image if batch == len({place.image for place in truth.places}) else -1
        fault, blank, off = fault_of(said, images, truth, resamples)
        most = Said("right", "", max(most.blank, blank), max(most.off, off))
        if fault:
            return Said("wrong", f"{side} {fault}", blank, off)
    return most


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _rows(recorded: Tensor, keys: Tensor) -> Tensor | None:
    """Return for each recorded vector, `(B', K, d)`, the row of the oracle's keys; None if they are other vectors."""
    flat = keys.flatten(0, 1)
    mine = recorded.double().flatten(0, 1)
    if mine.shape == flat.shape and torch.equal(mine, flat):
        return torch.arange(len(flat)).view(recorded.shape[:2])
    if mine.shape[1] != flat.shape[1]:
        return None
    distances = torch.cdist(mine, flat, compute_mode="donot_use_mm_for_euclid_dist")
    rows = distances.argmin(1)
    return rows.view(recorded.shape[:2]) if bool((distances.amin(1) == 0).all()) else None


def claims_of(layout: TokenLayout, index: Tensor | None, count: int) -> list[Claim | None]:
    """Return what a layout claims for each vector in the model's order; None for padding."""
    rows, columns = layout.grid[-2:] if layout.grid else (1, 1)
    box = layout.box
    height, width = box.height / rows, box.width / columns
    order = list(range(count)) if index is None else index.flatten().tolist()
    claims: list[Claim | None] = []
    for token in order:
        if token < 0:
            claims.append(None)
        elif token < len(layout.prefix):
            claims.append(Claim(layout.prefix[token], None))
        else:
            row, column = divmod(layout.present[token - len(layout.prefix)] % (rows * columns), columns)
            top, left = box.top + row * height, box.left + column * width
            claims.append(Claim(f"cell {row},{column} of {rows} x {columns}", (top, left, top + height, left + width)))
    return claims


@cache
def _overlap(cell: tuple[float, float, float, float]) -> Tensor:
    """Return which patches a cell overlaps, by more than a thousandth of the smaller side."""
    y, x = torch.arange(GRID[0] * GRID[1]) // GRID[1], torch.arange(GRID[0] * GRID[1]) % GRID[1]
    high = (PATCH * (y + 1)).clamp(max=cell[2]) - (PATCH * y).clamp(min=cell[0])
    broad = (PATCH * (x + 1)).clamp(max=cell[3]) - (PATCH * x).clamp(min=cell[1])
    return (high > 1e-3 * min(cell[2] - cell[0], PATCH)) & (broad > 1e-3 * min(cell[3] - cell[1], PATCH))


class Truth:
    """Influences, with the input, image and patch of each source, and the inputs that count.

    An input that has the same influence on all keys does not count: it says nothing of where a key lies.
    """

    def __init__(self, found: Influence) -> None:
        self.amount, self.places = found.amount, found.places
        self.input, self.image, self.patch = torch.tensor(found.places).unbind(1)
        totals = self.amount.sum(1)
        self.usual = float(totals[totals > 0].median()) if bool((totals > 0).any()) else 1.0
        further = set(self.input.tolist()) - {0}
        same = {number for number in further if not found.images[number] or alike(found, number)}
        self.further = sorted(further - same)
        self.counts = torch.tensor([number not in same for number in self.input.tolist()])

    def told(self, source: int) -> str:
        place = self.places[source]
        of = "" if not place.input else f" of input {place.input}"
        return f"patch {place.patch // GRID[1]},{place.patch % GRID[1]}{of} of image {place.image}"


def fault_of(
    said: Sequence[Claim | None], images: Sequence[int], found: Influence, resamples: bool = False
) -> tuple[str, int, float]:
    """Return the first claim that the influences refute, the number of blank keys and the largest distance of a center.

    Args:
        said: Claim for each row of the influences; None for vectors that are padding or not recorded.
        images: Image of the batch to which the record counts each row; -1 for any.
        found: The influences.
        resamples: Whether centers of keys that depend on several patches are judged too.
    """
    truth = Truth(found)
    for row, claim in enumerate(said):
        if claim is not None and claim.cell is None:
            fault = _fault_of_name(claim.name, truth.amount[row], truth)
            if fault:
                return f"vector {row}, claimed for {claim.name}, {fault}", 0, 0.0
    cells = [(row, claim.cell) for row, claim in enumerate(said) if claim is not None and claim.cell is not None]
    mine = truth.amount * truth.counts
    located = [(row, cell) for row, cell in cells if float(mine[row].sum()) > 0]
    blank, off = len(cells) - len(located), 0.0
    for row, _ in cells:
        if float(mine[row].sum()) <= 0 < float(truth.amount[row].sum()):
            return f"vector {row}, claimed for {_name(said[row])}, depends on another input alone", blank, off
    if not located:
        return "", blank, off
    rows = [row for row, _ in located]
    mine = mine[rows]
    inside = torch.stack([_overlap(cell) for _, cell in located])[:, truth.patch.clamp(min=0)] & (truth.patch >= 0)
    image = torch.tensor([images[row] for row in rows])[:, None]
    inside &= (truth.image == image) | (image < 0)
    away, single = _away(torch.tensor([cell for _, cell in located]), mine, truth.patch), (mine > 0).sum(1) == 1
    if resamples and not bool(single.all()):
        faults = _faults_of_kernels(torch.tensor([cell for _, cell in located]), mine, away, truth)
        off = float((away * _inner(mine, truth.patch)).max())
    else:
        faults, away = _faults(mine, inside, truth), away * single
        off = float(away.max())
        for i, (_, cell) in enumerate(located):
            # a token of a cell that is larger than a patch may be that of any patch in it
            if float(away[i]) > (0.51 if max(cell[2] - cell[0], cell[3] - cell[1]) <= PATCH else 0.67):
                faults.setdefault(i, f"has its center of influence {float(away[i]):.2f} cells from there")
    if faults:
        i = min(faults)
        return f"vector {rows[i]}, claimed for {_name(said[rows[i]])}, {faults[i]}", blank, off
    shares = torch.stack([mine[:, truth.input == number].sum(1) for number in range(int(truth.input.max()) + 1)], 1)
    sources = sorted({int(one.argmax()) for one in shares if float(one.max()) > 0.99 * float(one.sum())})
    return f"vectors of one grid come from the inputs {sources}" if len(sources) > 1 else "", blank, off


def _name(claim: Claim | None) -> str:
    return "nothing" if claim is None else claim.name


def _faults(mine: Tensor, inside: Tensor, truth: Truth) -> dict[int, str]:
    """Return what is wrong with claims that keys are cells, for those that are wrong, by index."""
    here, most = (mine * inside).amax(1), mine.amax(1)
    found = {}
    for i in (most > MARGIN * here).nonzero().flatten().tolist():
        times = float(most[i]) / max(float(here[i]), 1e-300)
        found[i] = f"depends on {truth.told(int(mine[i].argmax()))} {f'{times:.3g} times as much' if times < 1e9 else 'alone'}"
    for number in truth.further:
        second = mine * (truth.input == number)
        top = second.amax(1)
        for i in ((top > 0.1 * here) & (top > MARGIN * (second * inside).amax(1))).nonzero().flatten().tolist():
            found.setdefault(i, f"depends also on {truth.told(int(second[i].argmax()))}")
    return found


def _fault_of_name(name: str, amount: Tensor, truth: Truth) -> str:
    """Return what is wrong with a claim that a key is no cell."""
    total = float(amount.sum())
    if total <= 1e-3 * truth.usual:
        return ""
    own = float(amount[truth.input == 0].sum()) / total
    if name.startswith("mean"):
        top = float(amount.max()) / total
        return f"depends on one patch by {top:.0%}" if top > 0.5 else ""
    if name.startswith("foreign"):
        return f"depends on the image by {own:.0%}" if own > 0.5 else ""
    return f"depends on {'the image' if own > 1e-3 else 'another input'}"


def _faults_of_kernels(cells: Tensor, mine: Tensor, away: Tensor, truth: Truth) -> dict[int, str]:
    """Return what is wrong with cells whose keys depend on neighbors, by index.

    The center of influence lies within half a cell, or, where the image cuts off the kernel, the cell's center is at most one cell
    or patch outside of the patches on which the key depends.
    """
    inner, found = _inner(mine, truth.patch), {}
    for i in range(len(cells)):
        if inner[i]:
            if float(away[i]) > 0.51:
                found[i] = f"has its center of influence {float(away[i]):.2f} cells from there"
            continue
        met = truth.patch[mine[i] > 1e-3 * mine[i].max()]
        for low, high, side in ((0, 2, met // GRID[1]), (1, 3, met % GRID[1])):
            center, size = float(cells[i, low] + cells[i, high]) / 2, max(float(cells[i, high] - cells[i, low]), PATCH)
            if not int(side.min()) * PATCH - size <= center <= (int(side.max()) + 1) * PATCH + size:
                found[i] = "lies beyond all patches on which it depends"
    return found


def _inner(mine: Tensor, patch: Tensor) -> Tensor:
    """Return which keys have a kernel that lies in the image: they depend on no patch at its border.

    A kernel with gaps may reach over the border from patches that lie inside; see `_reaches_over`.
    """
    met = mine > 1e-3 * mine.amax(1, keepdim=True)
    lines = (patch // GRID[1], GRID[0]), (patch % GRID[1], GRID[1])
    border = torch.stack([(side == 0) | (side == length - 1) for side, length in lines]).any(0)
    return ~((met & border).any(1) | torch.stack([_reaches_over(met, *line) for line in lines]).any(0))


def _reaches_over(met: Tensor, side: Tensor, length: int) -> Tensor:
    """Return which keys depend on fewer lines than others, so that a kernel with gaps that is as large as theirs leaves the image.

    Rows 1 and 3, where others depend on 1, 3 and 5, are those of a kernel that is centered on row 1 and cut off above row 0.
    """
    used = torch.stack([(met & (side == line)).any(1) for line in range(length)], 1)
    low, high = used.int().argmax(1), length - 1 - used.flip(1).int().argmax(1)
    extent = high - low + 1
    largest = extent == extent.max()
    if not bool((used.sum(1) < extent)[largest].any()):  # a kernel without gaps depends on the border if it is cut off there
        return torch.zeros_like(largest)
    missing = extent.max() - extent
    return ~largest & ((low < missing) | (high + missing >= length))


def _away(cells: Tensor, mine: Tensor, patch: Tensor) -> Tensor:
    """Return the distance of each cell's center from the center of influence, in cells or patches, whichever is larger."""
    shares = mine / mine.sum(1, keepdim=True)
    distances = []
    for low, high, side in ((0, 2, patch // GRID[1]), (1, 3, patch % GRID[1])):
        center = (shares * (PATCH * (side + 0.5))).sum(1)
        distances.append(
            ((cells[:, low] + cells[:, high]) / 2 - center).abs() / (cells[:, high] - cells[:, low]).clamp(min=PATCH)
        )
    return torch.stack(distances).amax(0)


def as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [asdict(one) for one in verdicts]
