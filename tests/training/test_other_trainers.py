"""AttentionLogger in the training loops of Lightning and transformers: maps are written, and the training is not changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests import tiny
from visattn.training import AttentionLogger

pytestmark = pytest.mark.full
Log = Callable[[int], None]
IMAGES = tiny.pixels(8).clamp(-1, 1)
LABELS = torch.arange(8) % 2


@pytest.fixture(autouse=True)
def _own_warnings() -> None:
    """Let these libraries warn about their own settings."""
    warnings.simplefilter("ignore")


def by_lightning(model: nn.Module, log: Log, folder: Path) -> None:
    import lightning

    class Maps(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            log(trainer.global_step)

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader: Any = DataLoader(list(zip(IMAGES, LABELS, strict=True)), batch_size=4)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Maps()],
        default_root_dir=folder,
    )
    trainer.fit(Net(), loader)


def by_transformers(model: nn.Module, log: Log, folder: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Maps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            log(state.global_step)

    class Labeled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.model(pixel_values)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    data = [{"pixel_values": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    how = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(Labeled(), how, train_dataset=data, callbacks=[Maps()]).train()


@pytest.mark.parametrize("train", [by_lightning, by_transformers])
def test_maps_are_written_and_weights_are_those_without_them(
    train: Callable[[nn.Module, Log, Path], None], tmp_path: Path
) -> None:
    weights = []
    for logged in (True, False):
        torch.manual_seed(0)
        model = tiny.vit()
        logger = AttentionLogger(model, IMAGES, every=2, to=tmp_path / "maps") if logged else None
        train(model, logger or (lambda _: None), tmp_path / "run")
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["step_00000002.png", "step_00000004.png"]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert any(not torch.equal(value, tiny.vit().state_dict()[name]) for name, value in weights[0].items())
