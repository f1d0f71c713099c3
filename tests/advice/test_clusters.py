"""Machines of a cluster: what the message says to do gives all of them the same weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch import nn

from tests import tiny
from tests.batch import cluster
from tests.batch.kills import files_of
from visattn.batch import Batches, Journal, Ledger
from visattn.batch.cluster import Explainer
from visattn.core.loading.weights import state_digest
from visattn.errors import ModelError


def from_file(file: Path) -> nn.Module:
    model = tiny.vit(seed=1)
    model.load_state_dict(load_file(file))
    return model


def test_a_cluster_whose_machines_share_the_weights_or_the_seed_works(tmp_path: Path) -> None:
    items = cluster.photos(tmp_path / "photos", 2)
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        rows = {"batch": np.array([pickle.dumps(batch) for batch in Ledger(items, journal, Batches(2)).left()], dtype=object)}
    save_file(tiny.vit(seed=2).state_dict(), tmp_path / "shared.safetensors")
    (tmp_path / "out").mkdir()

    def asked(load: Callable[[], nn.Module], digest: str) -> tuple[Any, Any]:
        actor = Explainer(load, digest, cluster.work(tmp_path / "out"), tmp_path / "spare", str(Path.cwd()))
        found: tuple[Any, Any] = pickle.loads(actor(rows)["told"][0])
        return found

    entries, ended = asked(tiny.vit, state_digest(tiny.vit(seed=2)))
    assert not entries
    assert isinstance(ended, ModelError)
    assert "has other weights. Pass a file that all machines share (--weights), or a model that is built from a seed." in str(
        ended
    )
    for build in (partial(from_file, tmp_path / "shared.safetensors"), partial(tiny.vit, seed=2)):
        entries, ended = asked(build, state_digest(tiny.vit(seed=2)))
        assert ended is None
        assert [entry.error for batch in entries for entry in batch] == ["", ""]
    assert len(files_of(tmp_path / "out"))
