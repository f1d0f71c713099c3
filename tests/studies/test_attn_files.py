"""Files of studies: those that other tools write open with equal numbers, and damaged or hostile ones are refused in one line."""

from __future__ import annotations

import io
import json
import os
import random
import runpy
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import transformers
from PIL import Image
from torch import Tensor

import visattn
from visattn.errors import OptionError, StudyError
from visattn.studies import attn_writing as writing, load_study
from visattn.studies.attn_schema import MOST_TEXT

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
Facts = dict[str, Any]
Tensors = dict[str, Tensor]


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.effect_noise((90, 60), 80).convert("RGB").save(path)
    return path


def pixels_of(photo: Path, side: int = 224) -> Tensor:
    with Image.open(photo) as image:
        return (torch.from_numpy(np.array(image.resize((side, side)))).permute(2, 0, 1) / 127.5 - 1)[None]


def test_eager_attention_of_transformers_opens_with_equal_numbers(photo: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.ViTConfig(num_hidden_layers=3, num_attention_heads=2, hidden_size=32)
    model: Any = transformers.ViTModel(config, add_pooling_layer=False)
    model.eval()
    model.save_pretrained(tmp_path / "model")
    target = tmp_path / "out.attn"
    runpy.run_path(str(EXAMPLES / "attn_from_transformers.py"))["main"](str(photo), str(target), str(tmp_path / "model"))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(pixels_of(photo), output_attentions=True).attentions
    view = load_study(target)[0]
    assert len(view.recording) == 3
    for record, weights in zip(view.recording, eager, strict=True):
        assert torch.equal(record.operator.dense(), weights)
    shown = view.explain("attention", head=1, query="patch:3,9")
    assert torch.equal(shown.map.values, eager[-1][0, 1, 1 + 3 * 14 + 9, 1:].view(14, 14))
    assert shown.overlay(normalize="minmax").size == (90, 60)


def test_queries_and_keys_of_hooks_open_with_the_weights_of_the_model(photo: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.attn"
    runpy.run_path(str(EXAMPLES / "attn_from_hooks.py"))["main"](str(photo), str(target))
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224").eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixels_of(photo))
    view = load_study(target)[0]
    assert [record.layer for record in view.recording] == [record.layer for record in recording]
    for record, own in zip(view.recording, recording, strict=True):
        assert torch.allclose(record.operator.dense(), own.operator.dense(), atol=1e-6)
    assert torch.allclose(view.explain("rollout").map.values, visattn.methods.rollout(recording).values[0], atol=1e-6)


def base() -> tuple[Facts, Tensors]:
    """Return a study of one view with every kind of tensor."""
    torch.manual_seed(0)
    stream = io.BytesIO()
    Image.new("RGB", (6, 4), (200, 10, 30)).save(stream, "PNG")
    tensors = {
        "photo": torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8),
        "q": torch.randn(2, 3, 2, 5),
        "k": torch.randn(2, 3, 2, 5),
        "bias": torch.zeros(2, 3, 2, 2),
        "index": torch.arange(6).view(3, 2),
        "weights": torch.rand(2, 6, 6),
        "cells": torch.randint(6, (2, 6, 3)),
        "shares": torch.rand(2, 6, 3),
        "shares of heads": torch.randn(2, 6),
        "tokens": torch.randn(6, 8),
        "map": torch.rand(2, 3),
    }
    layout = {"space": "tokens", "prefix": [], "grid": [2, 3], "box": [0, 0, 32, 48]}
    whole = {"photo": [4, 6], "input": [32, 48], "window": [0, 0, 4, 6], "rule": "whole"}
    softmax = {"kind": "softmax", "query": "q", "key": "k", "bias": "bias", "query_index": "index", "key_index": "index"}
    record = {"kind": "self", "queries": 0, "keys": 0}
    view = {
        "photo": "photo",
        "geometry": whole,
        "provenance": {"model": "mine"},
        "layouts": [layout],
        "records": [
            record | {"layer": "a", "operator": softmax},
            record | {"layer": "b", "operator": {"kind": "weights", "weights": "weights"}},
            record
            | {"layer": "c", "kind": "sampled", "operator": {"kind": "sampled", "cells": "cells", "shares": "shares", "keys": 6}},
        ],
        "features": [{"layer": "c", "role": "tokens", "value": "tokens", "layout": 0}],
        "unseen": [["d", "runs outside Python"]],
        "maps": {
            "rollout": {
                "axes": [],
                "layout": layout,
                "labels": {},
                "meaning": "rollout",
                "provenance": {"geometry": whole},
                "values": "map",
            }
        },
        "classes": [{"class": 3, "name": "cat", "probability": 0.5}],
        "texts": {"word0": "a"},
        "importance": {"target": "cat", "heads": [[0.5, 0.25]] * 3},
        "contributions": {
            "target": "cat",
            "score": 1.5,
            "layers": [{"layer": "a", "layout": 0, "values": "shares of heads", "bias": 0.5}],
            "rest": [["embedding", 0.25]],
        },
        "name": "step 3",
    }
    return {"views": [view]}, tensors


def content(facts: Any, tensors: Tensors, said: dict[str, str] | None = None) -> bytes:
    text = facts if isinstance(facts, str) else json.dumps(facts)
    made: bytes = safetensors.torch.save(tensors, {"format": "attn", "version": "1", "study": text} | (said or {}))
    return made


def changed(*path: Any) -> Callable[[], bytes]:
    """Return a file in whose JSON one value is replaced; the last item of the path is the new one."""
    *keys, last, value = path

    def made() -> bytes:
        facts, tensors = base()
        place: Any = facts["views"][0]
        for key in keys:
            place = place[key]
        place[last] = value
        return content(facts, tensors)

    return made


def without(*path: Any) -> Callable[[], bytes]:
    """Return a file in whose JSON one value is missing."""
    *keys, last = path

    def made() -> bytes:
        facts, tensors = base()
        place: Any = facts["views"][0]
        for key in keys:
            place = place[key]
        del place[last]
        return content(facts, tensors)

    return made


def tensor(name: str, other: Callable[[Tensor], Tensor]) -> Callable[[], bytes]:
    """Return a file in which one tensor is replaced."""

    def made() -> bytes:
        facts, tensors = base()
        return content(facts, tensors | {name: other(tensors[name])})

    return made


def whole(edit: Callable[[bytes], bytes]) -> Callable[[], bytes]:
    return lambda: edit(content(*base()))


def stated(**said: str) -> Callable[[], bytes]:
    return lambda: content(*base(), said)


def spot(value: float) -> Callable[[Tensor], Tensor]:
    """Return a copy with one value replaced."""

    def made(one: Tensor) -> Tensor:
        other = one.clone()
        other.flatten()[1] = value
        return other

    return made


def bomb(_: Tensor) -> Tensor:
    """Return a PNG whose header states a huge picture."""
    stream = io.BytesIO()
    Image.new("RGB", (6, 4)).save(stream, "PNG")
    data = bytearray(stream.getvalue())
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    return torch.frombuffer(data, dtype=torch.uint8)


def jpeg_bomb(_: Tensor) -> Tensor:
    """Return a JPEG whose frame states a huge picture."""
    stream = io.BytesIO()
    Image.new("RGB", (6, 4)).save(stream, "JPEG")
    data = stream.getvalue().replace(struct.pack(">HH", 4, 6), struct.pack(">HH", 60_000, 60_000), 1)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


NAN, DEEP = float("nan"), "[" * 100_000 + "]" * 100_000
LAYOUT, RECORD = ("layouts", 0), ("records", 0)
MUTANTS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "a line of text": lambda: b"not a study\n",
    "a pickle": lambda: b"\x80\x04cos\nsystem\n(S'echo hacked'\ntR.",
    "a zip": lambda: b"PK\x03\x04" + bytes(100),
    "cut in the header": whole(lambda data: data[:100]),
    "cut in the tensors": whole(lambda data: data[:-7]),
    "bytes after the end": whole(lambda data: data + bytes(9)),
    "a header of 2^62 bytes": whole(lambda data: struct.pack("<Q", 2**62) + data[8:]),
    "a header of no bytes": whole(lambda data: bytes(8) + data[8:]),
    "tensors that overlap": whole(lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[8,', 1)),
    "no header text": lambda: safetensors.torch.save(base()[1]),
    "another format": stated(format="pt"),
    "a later version": stated(version="2"),
    "version one and a half": stated(version="1.5"),
    "no JSON": lambda: content("nonsense", base()[1]),
    "JSON of a number": lambda: content("3", base()[1]),
    "JSON of a list": lambda: content("[]", base()[1]),
    "JSON with NaN": lambda: content('{"views": NaN}', base()[1]),
    "deep JSON": lambda: content('{"views": ' + DEEP + "}", base()[1]),
    "long JSON": lambda: content('{"views": []}' + " " * MOST_TEXT, base()[1]),
    "no views": lambda: content({"views": []}, base()[1]),
    "views of another type": lambda: content({"views": {"a": 1}}, base()[1]),
    "too many views": lambda: content({"views": [{}] * 5000}, base()[1]),
    "no photo": without("photo"),
    "photo of another tensor": changed("photo", "q"),
    "photo that is missing": changed("photo", "nowhere"),
    "photo that is no picture": tensor("photo", lambda one: one + 1),
    "photo of billions of pixels": tensor("photo", bomb),
    "JPEG of billions of pixels": tensor("photo", jpeg_bomb),
    "JPEG cut in its frame": tensor("photo", lambda one: jpeg_bomb(one)[:100].clone()),
    "photo of another size": changed("geometry", "photo", [5, 6]),
    "photo of floats": tensor("photo", lambda one: one.float() + 0.5),
    "no geometry": without("geometry"),
    "window without area": changed("geometry", "window", [0, 0, 0, 6]),
    "window upside down": changed("geometry", "window", [4, 0, 0, 6]),
    "window of huge numbers": changed("geometry", "window", [0, 0, 1e40, 6]),
    "input of no pixels": changed("geometry", "input", [0, 48]),
    "negative input": changed("geometry", "input", [-32, 48]),
    "no layouts": without("layouts"),
    "layout out of range": changed(*RECORD, "keys", 1),
    "negative layout": changed(*RECORD, "queries", -1),
    "layout as text": changed(*RECORD, "queries", "0"),
    "grid of another size": changed(*LAYOUT, "grid", [2, 4]),
    "huge grid": changed(*LAYOUT, "grid", [2**20, 2**20]),
    "grid of no rows": changed(*LAYOUT, "grid", [0, 3]),
    "grid with four axes": changed(*LAYOUT, "grid", [1, 1, 2, 3]),
    "grid of fractions": changed(*LAYOUT, "grid", [2.5, 3]),
    "box without area": changed(*LAYOUT, "box", [0, 0, 0, 48]),
    "hole outside of the grid": changed(*LAYOUT, "holes", [6]),
    "holes twice": changed(*LAYOUT, "holes", [1, 1]),
    "more names than tokens": changed(*LAYOUT, "prefix", ["cls"]),
    "a record without operator": without(*RECORD, "operator"),
    "unknown kind of attention": changed(*RECORD, "kind", "magic"),
    "unknown kind of operator": changed(*RECORD, "operator", "kind", "pickle"),
    "operator without query": without(*RECORD, "operator", "query"),
    "operator with one index": without(*RECORD, "operator", "key_index"),
    "scale that is infinite": changed(*RECORD, "operator", "scale", float("inf")),
    "scale as text": changed(*RECORD, "operator", "scale", "1"),
    "tensor that is missing": changed(*RECORD, "operator", "key", "nowhere"),
    "tensor named by a number": changed(*RECORD, "operator", "key", 3),
    "queries of another width": tensor("q", lambda one: one[..., :4].contiguous()),
    "queries of another rank": tensor("q", lambda one: one[0].contiguous()),
    "queries with NaN": tensor("q", spot(NAN)),
    "infinite keys": tensor("k", spot(float("inf"))),
    "bias with NaN": tensor("bias", spot(NAN)),
    "bias of another shape": tensor("bias", lambda one: one[:, :2].contiguous()),
    "index past the tokens": tensor("index", lambda one: one + 1),
    "index of huge numbers": tensor("index", lambda one: one * 2**40),
    "index below -1": tensor("index", lambda one: one - 2),
    "index of floats": tensor("index", lambda one: one.float()),
    "weights with NaN": tensor("weights", spot(NAN)),
    "weights of other tokens": tensor("weights", lambda one: one[:, :5].contiguous()),
    "weights of whole numbers": tensor("weights", lambda one: (one * 10).long()),
    "weights of no heads": tensor("weights", lambda one: one[:0].contiguous()),
    "queries of whole numbers": tensor("q", lambda one: (one * 10).int()),
    "bias that is infinite": tensor("bias", spot(float("inf"))),
    "cells past the keys": tensor("cells", lambda one: one + 6),
    "negative cells": tensor("cells", lambda one: one - 6),
    "cells of floats": tensor("cells", lambda one: one.float()),
    "shares of another shape": tensor("shares", lambda one: one[..., :2].contiguous()),
    "features of other tokens": tensor("tokens", lambda one: one[:5].contiguous()),
    "unknown role": changed("features", 0, "role", "weapon"),
    "features without a value": without("features", 0, "value"),
    "map of another shape": tensor("map", lambda one: one.T.contiguous()),
    "map with NaN": tensor("map", spot(NAN)),
    "map without a meaning": without("maps", "rollout", "meaning"),
    "map with an unknown fact": changed("maps", "rollout", "provenance", "geometry", "window", [0, 0, 0, 0]),
    "probability above 1": changed("classes", 0, "probability", 1.5),
    "class as text": changed("classes", 0, "class", "cat"),
    "importance of too few records": changed("importance", "heads", [[0.5, 0.25]]),
    "importance of too few heads": changed("importance", "heads", [[0.5]] * 3),
    "importance as a number": changed("importance", 3),
    "importance without a target": without("importance", "target"),
    "contributions of other tokens": tensor("shares of heads", lambda one: one[:, :5].contiguous()),
    "contributions of no heads": tensor("shares of heads", lambda one: one[:0].contiguous()),
    "contributions of one axis": tensor("shares of heads", lambda one: one.flatten()),
    "contributions with NaN": tensor("shares of heads", spot(NAN)),
    "contributions to no target": without("contributions", "target"),
    "contributions on a layout that is not there": changed("contributions", "layers", 0, "layout", 9),
    "contributions of layers as a number": changed("contributions", "layers", 3),
    "terms without a share": changed("contributions", "rest", [["embedding"]]),
    "name that is a list": changed("name", ["a"]),
    "words that are lists": changed("texts", "word0", ["a"]),
    "unseen with a number": changed("unseen", [["d", 3]]),
    "model as a list": changed("provenance", "model", ["a"]),
    "score without a name": changed("maps", "rollout", "provenance", "scores", [{"class": 3}]),
    "score of a class in words": changed("maps", "rollout", "provenance", "scores", [{"class": "cat", "name": None}]),
    "score that is infinite": changed("maps", "rollout", "provenance", "scores", [{"class": 3, "name": None, "score": 1e99}]),
    "unknown fact of provenance": changed("provenance", "__class__", "os.system"),
}


def test_the_file_that_is_mutated_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "a.attn"
    path.write_bytes(content(*base()))
    view = load_study(path)[0]
    assert [record.layer for record in view.recording] == ["a", "b", "c"]
    assert len(MUTANTS) >= 50


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.attn"
    path.write_bytes(MUTANTS[name]())
    with pytest.raises(StudyError) as caught:
        load_study(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert len(text) < len(str(path)) + 300


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bytes_are_refused_or_change_numbers_only(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    data = bytearray(content(*base()))
    for _ in range(generator.choice([1, 3, 30])):
        data[generator.randrange(len(data))] = generator.randrange(256)
    path = tmp_path / "flipped.attn"
    path.write_bytes(data)
    try:
        loaded = load_study(path)
    except StudyError:
        return
    for record in loaded[0].recording:
        assert bool(record.operator.dense().isfinite().all())


def test_files_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.attn")
    for path in (tmp_path / "none.attn", tmp_path, tmp_path / "pipe.attn"):
        with pytest.raises(StudyError, match="not a study"):
            load_study(path)


def test_a_tensor_that_is_named_often_is_read_once(tmp_path: Path) -> None:
    facts, tensors = base()
    facts["views"] *= 300
    path = tmp_path / "often.attn"
    path.write_bytes(content(facts, tensors))
    views = load_study(path).views
    assert len(views) == 300
    queries = {view.recording[0].operator.query.data_ptr() for view in views}  # type: ignore[attr-defined]
    assert len(queries) == 1


def test_photos_of_a_file_have_a_common_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn.studies.attn_reading.MOST_PIXELS", 40)
    facts, tensors = base()
    facts["views"].append({**facts["views"][0], "photo": "other"})
    path = tmp_path / "two.attn"
    path.write_bytes(content(facts, tensors | {"other": tensors["photo"].clone()}))
    with pytest.raises(StudyError, match="exceed the limit"):
        load_study(path)


def test_what_could_not_be_read_is_not_written(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = visattn.study("scenes_vit", [photo], methods=["attention"])
    both = made + made
    tensors = safetensors.torch.load(writing.attn_content(both.views))
    assert sum(name.endswith(".photo") for name in tensors) == 1  # views of one photo share it
    monkeypatch.setattr(writing, "MAX_PIXELS", 90 * 60 - 1)
    with pytest.raises(OptionError, match=r"a study holds photos of at most .* the largest of these has 0.0"):
        writing.attn_content(made.views)
    monkeypatch.undo()
    monkeypatch.setattr(writing, "MOST_VIEWS", 1)
    with pytest.raises(OptionError, match="a study holds at most 1 views"):
        writing.attn_content(both.views)
