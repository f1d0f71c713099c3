"""Saved maps that were edited, damaged or made up, drawn over a photo."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.hostile.driver import Case
from tests.hostile.values import damaged, edit, value
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, save_map
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import TokenLayout

KINDS = ("float32", "float64", "float16", "int8", "uint64", "bool", "complex64", "U3", "S4", "datetime64[s]", "f4,f4", ">f4")


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    for number in range(count):
        yield Case(f"map {seed}.{number}", _Prepared(f"{seed} map {number}"), ("o.png",))


class _Prepared:
    def __init__(self, seed: str) -> None:
        self.seed = seed

    def __call__(self, folder: Path) -> list[str]:
        rng = random.Random(self.seed)
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(folder / "p.png")
        name = rng.choice(["m.npz", "m.npz", "m.npz", "m.npy", "m"])
        make = rng.choice([_edited, _edited, _edited, _edited, _damaged, _plain, _odd_values, _odd_archive])
        (folder / name).write_bytes(make(rng))
        more = [] if rng.random() < 0.6 else ["--mass", "0.6", "--interpolation", rng.choice(["nearest", "bicubic"])]
        more += ["--normalize", rng.choice(["minmax", "percentile", "symmetric", "none"])] if rng.random() < 0.5 else []
        more += ["--json"] if rng.random() < 0.5 else []
        return ["overlay", "p.png", "--map", name, "-o", "o.png", *more]


def _saved(rng: random.Random) -> bytes:
    """Return a valid map of one of several kinds."""
    kind = rng.choice(["attention", "principal component", "glimpses", "cosine similarity"])
    lead, axes = {"attention": ((2,), ("head",)), "principal component": ((3,), ("component",))}.get(kind, ((), ()))
    parameters: dict[str, Any] = {"layer": 3}
    if kind == "glimpses":
        parameters |= {"path": [[16.0, 24.0], [10.0, 30.0]], "patches": [[8.0, 8.0], [16.0, 16.0]]}
    provenance = Provenance(
        model="vit", sinks=((Sink(0, 1, 20.0, "b"),),), notes=("x",), parameters=parameters, method="attention"
    )
    holes = (4,) if rng.random() < 0.3 else ()
    values = torch.rand(*lead, 2, 3, generator=torch.Generator().manual_seed(3))
    if holes:
        values.view(-1, 6)[:, 4] = torch.nan
    layout = TokenLayout("tokens", ("cls",), (2, 3), Box(0, 0, 32, 48), holes)
    labels = {"head": ("a", "b")} if axes == ("head",) else {}
    geometry = Geometry((60, 90), (32, 48), Box(0, 0, 60, 90), "the whole photo")
    return save_map(AttentionMap(values, axes, layout, labels, kind, provenance), geometry)


def _parts(content: bytes) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    with np.load(io.BytesIO(content)) as whole:
        return json.loads(str(whole["facts"])), whole["values"]


def _packed(facts: str, values: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, values=values, facts=np.array(facts))
    return stream.getvalue()


def _edited(rng: random.Random) -> bytes:
    facts, values = _parts(_saved(rng))
    return _packed(json.dumps(edit(rng, facts, rng.randrange(1, 4))), values)


def _damaged(rng: random.Random) -> bytes:
    return damaged(rng, _saved(rng))


def _array(rng: random.Random) -> Any:
    shape = rng.choice([(2, 3), (6,), (), (0, 3), (1, 1), (2, 2, 3), (1, 2, 2, 3), (3, 2), (2000, 1), (2, 2, 3, 0)])
    kind = rng.choice(KINDS)
    drawn = np.random.default_rng(rng.randrange(100)).normal(size=shape) * rng.choice([1, 1e30, 1e-40, 0])
    with np.errstate(all="ignore"):
        array = np.zeros(shape, kind) if kind in KINDS[-4:-1] else np.asarray(drawn).astype(kind)
    if array.dtype.kind == "f" and array.size and rng.random() < 0.3:
        array.flat[rng.randrange(array.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return array


def _plain(rng: random.Random) -> bytes:
    stream = io.BytesIO()
    np.save(stream, _array(rng))
    content = stream.getvalue()
    return damaged(rng, content) if rng.random() < 0.3 else content


def _odd_values(rng: random.Random) -> bytes:
    return _packed(json.dumps(_parts(_saved(rng))[0]), _array(rng))


def _odd_archive(rng: random.Random) -> bytes:
    """Return archives with other members, invalid metadata, or headers that announce too much data."""
    stream, inner = io.BytesIO(), io.BytesIO()
    np.save(inner, np.array(json.dumps(value(rng)) if rng.random() < 0.6 else rng.choice(["", "{", "[[[", "\ud800", "null"])))
    facts = _packed("{}", np.zeros((2, 3)))
    with zipfile.ZipFile(stream, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])) as archive:
        for name in rng.sample(
            ["facts.npy", "values.npy", "../values.npy", "facts", "values.npy.npy", "/etc/x"], rng.randrange(1, 5)
        ):
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**20, 2**20)})
            archive.writestr(name, rng.choice([inner.getvalue(), header.getvalue() + bytes(99), facts, b"", rng.randbytes(50)]))
    return stream.getvalue()
