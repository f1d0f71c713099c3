"""JSON of files: each bound and each kind of damage gives one line, and every declared file is read or refused by its own error."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st

from tests.captioning.test_folder import plan
from tests.hostile.values import edit, value
from tests.maps.test_files import saved
from tests.studies.test_attn_files import base, content
from visattn._support import json_files
from visattn._support.json_files import SIDE, Amount, Anything, Count, Finite, Free, Number, Share, Whole, converted, decoded
from visattn.batch import statistics
from visattn.captioning import captioner_folders as captioners
from visattn.core.loading import model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.core.maps import load_map
from visattn.core.provenance import Provenance
from visattn.data.captions.caption_files import read_file
from visattn.embedding.one_image import OneImage
from visattn.errors import CheckpointError, DataError, MapError, OutputError, StudyError, WeightsError
from visattn.evaluation.survey import LayerNumbers, PhotoNumbers
from visattn.studies import load_study
from visattn.training.report import comparison
from visattn.training.run import checkpoints
from visattn.training.run.folder import Result, finished
from visattn.training.run.log import Log


class _Known(TypedDict):
    size: tuple[Whole, Whole]
    note: NotRequired[str]


class _Open(Free):
    known = _Known


class _Whole(TypedDict, total=False):
    whole: Whole
    count: Count
    number: Number
    share: Share
    amount: Amount
    finite: Finite
    texts: dict[str, list[str]]
    free: Free
    open: _Open


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    "text",
    [
        f'{{"whole": {SIDE}}}',
        f'{{"whole": {-SIDE}}}',
        '{"count": 9223372036854775807}',
        '{"number": 9.9e29}',
        '{"share": 1}',
        '{"amount": 0}',
        '{"finite": -1e300}',
        '{"free": {"a": ' + deep(19) + "}}",
        '{"free": {"a": null, "b": [true, "x", 1e29]}}',
        '{"open": {"size": [1, 2], "other": 3}}',
        '{"unknown": NaN, "whole": 1}',
        '{"texts": {"a": ["b"], "a": ["c"]}}',
    ],
)
def test_values_within_the_bounds_are_read(text: str) -> None:
    read = json.dumps(decoded(text, _Whole, lax=True))  # tuples are lists again, and 1 is 1.0 where a float is declared
    assert json.loads(read) == {key: value for key, value in json.loads(text).items() if key != "unknown"}


BEYOND = {
    f'{{"whole": {SIDE + 1}}}': "whole must be a whole number <= 1048576",
    f'{{"whole": {-SIDE - 1}}}': "whole must be a whole number >= -1048576",
    '{"whole": 2.0}': "whole must be a whole number, got a number",
    '{"whole": true}': "whole must be a whole number, got true or false",
    '{"count": 9223372036854775808}': "count must be a whole number <= 9223372036854775807",
    '{"count": -1}': "count must be a whole number >= 0",
    '{"number": 1e30}': "number must be a number < 1e+30",
    '{"number": -Infinity}': "number must be a number > -1e+30",
    '{"number": NaN}': "number must be a number > -1e+30",
    '{"number": "1"}': "number must be a number, got text",
    '{"number": ' + "1" * 400 + "}": "number must be a whole number <= 9223372036854775807",
    '{"share": 1.5}': "share must be a number <= 1.0",
    '{"amount": -1}': "amount must be a number >= 0.0",
    '{"finite": Infinity}': "finite must be a number <= ",
    '{"texts": {"a": ["b", 3]}}': "texts[...][1] must be text, got a whole number",
    '{"free": []}': "free must be an object",
    '{"free": {"a": ' + deep(20) + "}}": "free is nested too deeply",
    '{"free": {"a": [1e30]}}': "free must hold finite numbers",
    '{"free": {"a": NaN}}': "free must hold finite numbers",
    '{"open": {"size": [1]}}': "open.size must be a list of length 2, got 1",
    '{"open": {}}': "open.size is missing",
    '{"open": {"size": [1, 2], "other": ' + deep(20) + "}}": "open is nested too deeply",
    "[]": "the file must be an object, got a list",
    "": "the file must be valid JSON, got an error (expecting value: line 1 column 1 (char 0))",
    '{"whole": 1': "the file must be valid JSON, got an error (expecting ',' delimiter: line 1 column 12",
    '{"whole": 1}}': "the file must be valid JSON, got an error (extra data",
    '{"other": ' + deep(100_000) + "}": "the file is nested too deeply",
    '{"other": ' + "1" * 5000 + ", }": "the file must be valid JSON, got an error (exceeds the limit",
    '{"whole": 1e999}': "has a number that is too large",
}


@pytest.mark.parametrize("text", BEYOND, ids=lambda text: text[:40])
def test_values_beyond_a_bound_are_refused_in_one_line(text: str) -> None:
    for whole in (text, text.encode()):
        with pytest.raises(ValueError, match=r"^(\w|the file)") as caught:
            decoded(whole, _Whole, "the file", lax=True)
        assert BEYOND[text] in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["NaN", '{"a": [-Infinity]}', '"\\ud800"', '{"\\udcff": 1}', '"\ud800"'], ids=ascii)
def test_extensions_of_python_are_read_only_where_visattn_writes_them(text: str) -> None:
    assert repr(decoded(text, Anything, lax=True)) == repr(json.loads(text))
    with pytest.raises(ValueError, match=r"^the file must be valid JSON, got NaN, infinity or half a character$"):
        decoded(text, Anything, "the file")


@pytest.mark.parametrize("raw", [b"\xff", b'"\x01"', b"\x00", b"01", "\ufeff1".encode("utf-16")[:-1]])
def test_bytes_that_are_no_text_are_refused(raw: bytes) -> None:
    for lax in (False, True):
        with pytest.raises(ValueError, match=r"^the file must be valid JSON"):
            decoded(raw, Anything, "the file", lax=lax)


def test_larger_files_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(ValueError, match=r"^the file takes 1,001 bytes, more than 1,000$"):
        decoded("[" * 1001, Anything, "the file", most=1000)
    assert json_files.MOST == 2**30


def test_values_that_python_nested_are_refused() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match=r"is nested too deeply$"):
        converted({"free": {"a": nested}}, _Whole, "the value")


def test_names_of_files_that_are_not_utf_8_stay(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    blueprint = Blueprint("visattn_resnet20", ("a\udcff", "b"), 1, (32, 32), (0.5,), (0.2,))
    folders.save(model, blueprint, tmp_path / "final", {"loss": float("nan")})
    told = folders.read_facts(tmp_path / "final")
    assert folders.read_blueprint(told, "model.json") == blueprint


def test_losses_that_diverged_stay_in_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.add(step=1, loss=float("nan"), epoch=0.5)
    log.add(step=2, loss=float("inf"), mean=None)
    assert log.check(None, "step") == log.length
    assert [row["step"] for row in log.rows()] == [1, 2]


class _Case(NamedTuple):
    valid: Any
    read: Callable[[Path, str], object]  # reads the text that a file of this kind holds
    error: type[Exception] | None  # None: anything is read


def _map(folder: Path, text: str) -> object:
    np.savez(folder / "map.npz", values=_parts()["values"], facts=np.array(text))
    return load_map(folder / "map.npz")


def _parts() -> dict[str, Any]:
    with np.load(io.BytesIO(saved())) as whole:
        return {name: whole[name] for name in whole}


def _study(folder: Path, text: str) -> object:
    (folder / "a.attn").write_bytes(content(text, base()[1]))
    return load_study(folder / "a.attn")


def _classifier(folder: Path, text: str) -> object:
    (folder / "model.json").write_text(text)
    return folders.read_blueprint(folders.read_facts(folder), "model.json")


def _captioner(folder: Path, text: str) -> object:
    (folder / "model.json").write_text(text)
    return captioners._read(folders.read_facts(folder), "model.json")


def _result(folder: Path, text: str) -> object:
    (folder / "result.json").write_text(text)
    return finished(folder)


def _outcome(folder: Path, text: str) -> object:
    (folder / "result.json").write_text(text)
    return comparison._read(folder / "result.json", comparison.Outcome)


def _state(folder: Path, text: str) -> object:
    with contextlib.suppress(ValueError, RecursionError):  # signed, so that more than the digest is checked
        if isinstance(told := json.loads(text), dict):
            own = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
            text = json.dumps(told | {"own_sha256": own})
    (folder / "state.json").write_text(text)
    return checkpoints.read(folder)


def _log(folder: Path, text: str) -> object:
    (folder / "log.jsonl").write_text(text.replace("\n", " ") + "\n")
    return Log(folder / "log.jsonl").check(None, "step"), Log(folder / "log.jsonl").to_csv(folder / "log.csv")


def _statistics(folder: Path, text: str) -> object:
    (folder / "0.json").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        entry = SimpleNamespace(number=0, image="a.png", outputs=("statistics/../0.json",))
        patch.setattr(statistics, "journals_in", lambda _: [folder])
        patch.setattr(statistics, "entries_of", lambda _: {0: entry})
        (folder / "statistics").mkdir(exist_ok=True)
        return statistics.collected(folder, ["a.png"], 0)


def _kept(folder: Path, text: str) -> object:
    tensors = {"picture": torch.zeros(3, dtype=torch.uint8), "code": torch.zeros(2)}
    (folder / "0.safetensors").write_bytes(safetensors.torch.save(tensors, {"visattn": text}))
    return OneImage.load(folder / "0.safetensors", "k")


def _captions(ending: str) -> Callable[[Path, str], object]:
    def read(folder: Path, text: str) -> object:
        (folder / f"a{ending}").write_text(text)
        return read_file(folder / f"a{ending}", "train")

    return read


def _photo() -> Any:
    layer = LayerNumbers(["entropy"], np.array([[0.5], [0.25]]), np.array([0.1, np.nan]), np.array([4.0, 2.0, np.nan]))
    row = {"photo": "a.png", "sinks": None, "entropy": 0.5}
    found = PhotoNumbers(row, {"a": layer}, {("b", "gate"): {"mean": 0.5}}, [("why", "c")], Provenance(model="vit"))
    return json.loads(statistics.serialized([found]))


CASES = {
    "map": _Case(json.loads(str(_parts()["facts"])), _map, MapError),
    "study": _Case(base()[0], _study, StudyError),
    "classifier": _Case(
        {"format": 1} | vars(Blueprint("visattn_resnet20", ("a", "b"), 1, (32, 32), (0.5,), (0.2,))), _classifier, WeightsError
    ),
    "captioner": _Case({"format": 1} | vars(plan()) | {"encoder": vars(plan().encoder)}, _captioner, WeightsError),
    "result": _Case(vars(Result(0.5, 1.0, 9.0, 3, 2)), _result, None),
    "outcome": _Case(vars(Result(0.5, 1.0, 9.0, 3, 2)), _outcome, CheckpointError),
    "state": _Case({"format": 1, "made_by": "1", "step": 3, "facts": {"seen": 1}, "sha256": {}}, _state, CheckpointError),
    "log": _Case({"step": 1, "loss": 0.5}, _log, CheckpointError),
    "statistics": _Case(_photo(), _statistics, OutputError),
    "kept": _Case(
        {
            "name": "a",
            "sha256": "0",
            "window": [0, 0, 4, 6],
            "words": [],
            "sinks": [[1, 2]],
            "left_out": ["b"],
            "heads": [["a", 0]],
            "layers": [],
            "scores": [],
            "key": "k",
        },
        _kept,
        ValueError,
    ),
    "COCO": _Case(
        {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1, "caption": "a dog"}] * 9},
        _captions(".json"),
        DataError,
    ),
    "Karpathy": _Case(
        {"images": [{"filename": "a", "sentences": [{"raw": "a"}, {"tokens": ["b"]}], "split": "train"}]},
        _captions(".json"),
        DataError,
    ),
    "lines": _Case({"image": "a.jpg", "captions": ["a dog"], "split": "train"}, _captions(".jsonl"), DataError),
}


def told(case: _Case, folder: Path, text: str) -> str:
    """Read a file; return the message with which it was refused, or nothing."""
    try:
        case.read(folder, text)
    except Exception as error:
        if case.error is None or not isinstance(error, case.error):
            raise
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_the_file_that_is_edited_is_valid(name: str, tmp_path: Path) -> None:
    if name != "COCO":  # a hash of the name decides the split
        assert told(CASES[name], tmp_path, json.dumps(CASES[name].valid)) == ""
    assert CASES[name].read(tmp_path, json.dumps(CASES[name].valid)) is not None


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(seed=st.integers(0, 2**32), times=st.integers(0, 4))
def test_any_json_is_read_or_refused_by_the_error_of_its_file(
    name: str, tmp_path_factory: pytest.TempPathFactory, seed: int, times: int
) -> None:
    case, rng = CASES[name], random.Random(seed)
    facts = edit(rng, copy.deepcopy(json.loads(json.dumps(case.valid))), times) if times else value(rng)
    message = told(case, tmp_path_factory.getbasetemp(), json.dumps(facts))
    assert "\n" not in message
    assert message.isascii() or message.isprintable()


def test_a_case_reads_each_file(tmp_path: Path) -> None:
    damaged = {name: told(case, tmp_path, "nonsense") for name, case in CASES.items()}
    assert [name for name, message in damaged.items() if not message] == ["result"]


@pytest.mark.parametrize(
    ("path", "wrong", "message"),
    [
        (("layers", "a", "heads"), [[1], [1, 2]], "inhomogeneous"),
        (("layers", "a", "heads"), [[1, 2], [3, 4]], "each head must have 1 numbers"),
        (("layers",), [], r"\[0\]\.layers must be an object, got a list"),
        (("photo",), [], r"\[0\]\.photo must be an object"),
        (("provenance",), "x", r"\[0\]\.provenance must be an object"),
        (("gates",), [["b", "gate", {"mean": "x"}]], r"gates\[0\]\[2\]\[\.\.\.\] must be a number, got text"),
    ],
)
def test_statistics_of_other_types_are_refused_by_name(tmp_path: Path, path: tuple[str, ...], wrong: Any, message: str) -> None:
    whole = _photo()
    place = whole[0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = wrong
    with pytest.raises(OutputError, match=rf"0\.json: is damaged \(.*{message}.*\)\. Remove it"):
        _statistics(tmp_path, json.dumps(whole))
