"""Runs on a cluster of Ray: the work of an actor, what is refused, and deaths of actors and nodes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests import tiny
from tests.batch import cluster
from tests.batch.cluster import SIZE
from tests.batch.kills import files_of
from visattn.batch import Batches, Entry, Item, Journal, Ledger
from visattn.batch.cluster import Actors, Explainer, actor_count, run_on_ray
from visattn.core.loading.weights import state_digest
from visattn.errors import ModelError, OptionError, OutputError, VisattnError


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[Item]:
    return cluster.photos(tmp_path_factory.mktemp("cluster") / "photos", 3 * SIZE + 1)


def answered(explainer: Explainer, items: list[Item], folder: Path) -> tuple[list[list[Entry]], VisattnError | None]:
    """Let an actor work on all batches, which reach it as Ray carries them."""
    with Journal(folder.with_suffix(".jsonl"), {}) as journal:
        batches = list(Ledger(items, journal, Batches(SIZE)).left())
    rows = {"batch": np.array([pickle.dumps(batch) for batch in batches], dtype=object)}
    found: tuple[list[list[Entry]], VisattnError | None] = pickle.loads(explainer(rows)["told"][0])
    return found


def explainer(folder: Path, digest: str | None = None, place: Path | None = None) -> Explainer:
    return Explainer(
        tiny.vit, digest or state_digest(tiny.vit()), cluster.work(folder), folder.parent / "spare", str(place or Path.cwd())
    )


def test_an_actor_gives_the_files_and_entries_of_a_local_run(items: list[Item], tmp_path: Path) -> None:
    cluster.locally(items, tmp_path / "local")
    (tmp_path / "ray").mkdir()
    entries, ended = answered(explainer(tmp_path / "ray"), items, tmp_path / "ray")
    assert ended is None
    assert [entry.number for batch in entries for entry in batch] == list(range(len(items)))
    assert [len(batch) for batch in entries] == [SIZE, SIZE, SIZE, 1]
    assert "truncated" in entries[cluster.BAD // SIZE][cluster.BAD % SIZE].error
    here, there = (files_of(tmp_path / name) for name in ("ray", "local"))
    assert here == there
    assert list((tmp_path / "spare").iterdir()) == []


def test_an_actor_refuses_other_weights_and_missing_folders(items: list[Item], tmp_path: Path) -> None:
    for name, wrong, kind, message in (
        ("a", {"digest": "other"}, ModelError, "has other weights"),
        ("b", {"place": tmp_path / "nowhere"}, OutputError, "nowhere: is not on every machine"),
        ("c", {}, OutputError, "c: is not on every machine"),
    ):
        if name != "c":
            (tmp_path / name).mkdir()
        entries, ended = answered(explainer(tmp_path / name, **wrong), items, tmp_path / name)
        assert entries == []
        assert isinstance(ended, kind)
        assert message in str(ended)


def no_model() -> nn.Module:
    raise RuntimeError("the driver is too old")


def test_an_actor_tells_an_error_of_other_code_in_one_line(items: list[Item], tmp_path: Path, capsys: Any) -> None:
    failing = Explainer(no_model, "", cluster.work(tmp_path), tmp_path / "spare", str(Path.cwd()))
    entries, ended = answered(failing, items, tmp_path / "out")
    assert entries == []
    assert str(ended) == "a process of the cluster failed: RuntimeError: the driver is too old. See the logs of Ray."
    assert "in no_model" in capsys.readouterr().err


def test_a_cluster_that_fails_is_told_in_one_line(items: list[Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """Stands for Ray, whose cluster has gone."""

        class exceptions:
            RayError = ConnectionError

        def cluster_resources(self) -> None:
            raise ConnectionError("no connection to the head\nof the cluster")

    monkeypatch.setattr("visattn.batch.cluster._connected", lambda: (Failing(), False))
    monkeypatch.setattr("visattn.batch.cluster.need", lambda *names: None)
    with (
        Journal(tmp_path / "journal.jsonl", {}) as journal,
        pytest.raises(ModelError, match=r"^the cluster failed: no connection to the head\. See the logs of Ray\.$"),
    ):
        run_on_ray(tiny.vit, "", Ledger(items, journal, Batches(SIZE)), cluster.work(tmp_path), Actors())


def test_a_cluster_that_cannot_be_reached_is_told_in_one_line(
    items: list[Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_options: Any) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr("ray.init", fail)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with (
        Journal(tmp_path / "journal.jsonl", {}) as journal,
        pytest.raises(ModelError, match=r"no cluster of Ray can be reached at 10.0.0.1:6379 \(no answer\). Check RAY_ADDRESS"),
    ):
        run_on_ray(tiny.vit, "", Ledger(items, journal, Batches(SIZE)), cluster.work(tmp_path), Actors())


def test_the_number_of_actors() -> None:
    assert actor_count({"CPU": 8}, Actors(), 1) == 8
    assert actor_count({"CPU": 8}, Actors(), 3) == 2
    assert actor_count({"CPU": 8, "GPU": 2}, Actors(gpus=0.5), 1) == 4
    assert actor_count({"CPU": 3, "GPU": 2}, Actors(gpus=0.5), 1) == 3
    assert actor_count({"CPU": 8}, Actors(5), 1) == 5
    for found, actors, threads in (({"CPU": 8}, Actors(gpus=0.5), 1), ({"CPU": 1}, Actors(), 2), ({}, Actors(), 1)):
        with pytest.raises(OptionError, match="no place for an actor"):
            actor_count(found, actors, threads)


def test_without_ray_the_extra_is_named(items: list[Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda module: None)
    with (
        Journal(tmp_path / "journal.jsonl", {}) as journal,
        pytest.raises(VisattnError, match=r'needs ray, which is not installed.*"\.\[ray\]"'),
    ):
        run_on_ray(tiny.vit, "", Ledger(items, journal, Batches(SIZE)), cluster.work(tmp_path), Actors())


def other_weights() -> nn.Module:
    return tiny.vit(seed=1)


@pytest.mark.full
def test_a_run_on_a_cluster_goes_on_from_a_local_one_and_ends_with_the_error_of_an_actor(tmp_path: Path) -> None:
    items = cluster.photos(tmp_path / "photos", 4 * SIZE)
    whole = cluster.locally(items, tmp_path / "whole")
    cluster.locally(items[: 2 * SIZE], tmp_path / "part")
    with cluster.two_nodes():
        with Journal(tmp_path / "part" / "journal.jsonl", {}) as journal:
            ledger, work = Ledger(items, journal, Batches(SIZE)), cluster.work(tmp_path / "part")
            with pytest.raises(ModelError, match="has other weights"):
                run_on_ray(other_weights, state_digest(tiny.vit()), ledger, work, Actors(2))
        outcome = cluster.on_ray(items, tmp_path / "part")
    assert outcome.kept == 2 * SIZE - 1  # all but the file that is no image
    assert outcome.written == whole.written - outcome.kept
    assert files_of(tmp_path / "part") == files_of(tmp_path / "whole")
