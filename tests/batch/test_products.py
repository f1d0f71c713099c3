"""Products of a run beside pictures: maps of a batch in one file, statistics over all images, and studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import visattn
from tests import tiny
from tests.batch import kills
from tests.batch.kills import COUNT
from visattn.batch import Asked, Batches, Entry, Journal, Ledger, Wanted, Work, items_of, run
from visattn.batch.statistics import collected
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask
from visattn.errors import OptionError, OutputError

SIZE = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Entry]]:
    """Run with all products; return the output folder and the entries."""
    folder = tmp_path_factory.mktemp("products")
    (folder / "photos").mkdir()
    items = items_of([kills.photos(folder / "photos")])
    (folder / "out").mkdir()
    entries: list[Entry] = []
    wanted = Wanted(folder / "out", "rollout", picture=False, packed=True, study=True, statistics=True)
    with Journal(folder / "out" / "journal.jsonl", {}) as journal:
        run(
            tiny.vit(),
            Ledger(items, journal, Batches(SIZE), entries.append),
            Work(Asked(ask("rollout"), Preprocessing()), wanted),
        )
    return folder / "out", entries


def good(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if not entry.error]


def test_each_entry_names_the_files_of_its_batch(made: tuple[Path, list[Entry]]) -> None:
    for entry in good(made[1]):
        first = entry.number // SIZE * SIZE
        name = Path(entry.image).stem
        assert list(entry.outputs) == [f"{name}.attn", f"maps/{first:08}.rollout.tar", f"statistics/{first:08}.json"]
        assert all((made[0] / output).is_file() for output in entry.outputs)
    assert len(good(made[1])) == COUNT - 1


def test_packed_maps_are_those_of_explain(made: tuple[Path, list[Entry]]) -> None:
    found = {
        name: (one, geometry) for file in sorted((made[0] / "maps").iterdir()) for name, one, geometry in visattn.load_maps(file)
    }
    assert len(found) == COUNT - 1
    for entry in good(made[1]):
        one, geometry = found[Path(entry.image).stem]
        alone = visattn.explain(tiny.vit(), entry.image, method="rollout")
        assert torch.allclose(one.values, alone.map.values, atol=1e-6)
        assert geometry == alone.geometry
        assert one.provenance.image_sha256 == entry.sha256


def test_statistics_are_those_of_a_survey_of_the_photos(made: tuple[Path, list[Entry]]) -> None:
    here = collected(made[0], [entry.image for entry in made[1]], 0)
    there = visattn.Survey(tiny.vit())
    for entry in good(made[1]):
        there.add(visattn.load_image(entry.image), entry.image)
    assert [row["photo"] for row in here.photos] == [entry.image for entry in good(made[1])]
    for one, other in ((here.heads(), there.heads()), (here.layers(), there.layers()), (here.photos, there.photos)):
        assert len(one) == len(other)
        for row, known in zip(one, other, strict=True):
            assert row.keys() == known.keys()
            for name, value in known.items():
                assert row[name] == (pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value), name


def test_studies_are_read(made: tuple[Path, list[Entry]]) -> None:
    entry = good(made[1])[0]
    study = visattn.load_study(made[0] / next(iter(entry.outputs)))
    alone = visattn.explain(tiny.vit(), entry.image, method="rollout")
    assert torch.allclose(study[0].explain("rollout").map.values, alone.map.values, atol=1e-6)


def test_damaged_statistics_are_named(made: tuple[Path, list[Entry]], tmp_path: Path) -> None:
    (tmp_path / "statistics").mkdir()
    whole, source = (made[0] / "statistics" / "00000000.json").read_text(), made[1][0].image
    changed: Any = json.loads(whole)
    changed[0].pop("layers")
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        journal.add([Entry(0, source, "00", "", {"statistics/00000000.json": ""})])
    for content in (whole[:-9], "[1]", json.dumps(changed), "\x00"):
        (tmp_path / "statistics" / "00000000.json").write_text(content)
        with pytest.raises(OutputError, match=r"00000000.json: is damaged"):
            collected(tmp_path, [source], 0)


def test_numbers_that_are_missing_stay_missing(made: tuple[Path, list[Entry]]) -> None:
    rows = collected(made[0], [entry.image for entry in made[1]], 0).layers()
    told = json.loads((made[0] / "statistics" / "00000000.json").read_text())
    layer = next(iter(told[0]["layers"].values()))
    assert all(value is None or np.isfinite(value) for row in layer["heads"] for value in row)
    assert all(row["entropy"] is not None for row in rows)


def test_one_image_at_fault_leaves_the_products_of_the_others(tmp_path: Path) -> None:
    for name, size in (("a", (60, 40)), ("b", (60, 400)), ("c", (60, 40))):
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    items = items_of([tmp_path])
    (tmp_path / "out").mkdir()
    entries: list[Entry] = []
    wanted = Wanted(tmp_path / "out", "attention", picture=False, packed=True, statistics=True)
    asked = Asked(ask("attention", {"query": "pixel:30,5"}), Preprocessing(resize="model"))
    with Journal(tmp_path / "out" / "journal.jsonl", {}) as journal:
        run(tiny.vit(), Ledger(items, journal, Batches(3), entries.append), Work(asked, wanted))
    assert [bool(entry.error) for entry in entries] == [False, True, False]
    assert [name for name, _, _ in visattn.load_maps(tmp_path / "out" / "maps" / "00000000.attention.tar")] == ["a", "c"]
    assert [Path(row["photo"]).name for row in collected(tmp_path / "out", [item.source for item in items], 0).photos] == [
        "a.png",
        "c.png",
    ]


def test_statistics_of_images_that_are_gone_are_left_out(made: tuple[Path, list[Entry]]) -> None:
    sources = [entry.image for entry in made[1]]
    assert len(collected(made[0], sources[:SIZE], 0).photos) == SIZE
    assert not collected(made[0], [f"{source}.other" for source in sources], 0).photos


def test_a_survey_without_a_model_takes_no_photo() -> None:
    with pytest.raises(OptionError, match=r"has no model. Pass one to Survey"):
        visattn.Survey().add(visattn.load_image("scene:1"), "a")
