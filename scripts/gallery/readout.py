"""Gallery picture of the readout: the patches from which a model with max pooling computes its output."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from PIL import Image
from torch import nn

import visattn
from visattn import data
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.pipeline.answering import answer
from visattn.core.pipeline.passes import look, with_readout
from visattn.core.pipeline.question import ask

PHOTOS = "coffee", "chelsea", "rocket"


def readout_sheet(model: nn.Module) -> Image.Image:
    """Draw the shares of the patches under max pooling, and the attention of the query that they are, beside that of the mean.

    Args:
        model: timm's DINOv2 with its published weights.
    """
    pooling: Any = copy.deepcopy(model)
    pooling.global_pool = "max"
    rows, notes = [], []
    for name in PHOTOS:
        prepared = visattn.prepare(visattn.load_image(data.photo_path(name)), pooling)
        recording = with_readout(pooling, prepared, look(pooling, prepared))
        reading = recording.reading
        assert reading.layout is not None  # noqa: S101 - the tape of this model is known
        assert reading.shares is not None  # noqa: S101
        shares = reading.layout.on_grid(reading.shares[0, len(reading.layout.prefix) :])
        largest = float(shares.max()) * shares.numel()
        read, mean = (
            answer(recording, prepared, ask("attention", {"query": query, "fusion": "mean"})) for query in ("read", "mean")
        )
        drawn = replace(read, map=replace(read.map, values=shares.float().expand_as(read.map.values)))
        rows.append([Cell(prepared.photo), *(Cell(found.overlay(marks=False)) for found in (drawn, read, mean))])
        notes.append(f"{name}: the largest share is {largest:.1f} times the mean.")
    titles = ["photo", "share of each patch in the output", "attention, query read", "attention, query mean"]
    return sheet(rows, panel=300, column_labels=titles, notes=tuple(notes))
