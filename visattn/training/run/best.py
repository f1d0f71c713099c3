"""The best epoch of a run on its validation images, and the number of epochs since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from visattn.training.run.run_progress import count


@dataclass
class Best:
    """Epoch with the highest accuracy on the validation images.

    Attributes:
        accuracy: Its accuracy; -1 before the first test.
        step: Number of optimizer steps taken then.
        waited: Number of epochs tested since.
        tensors: Weights and buffers at that time, on the CPU, if they are kept.
    """

    accuracy: float = -1.0
    step: int = 0
    waited: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def note(self, accuracy: float, step: int, model: nn.Module | None) -> None:
        """Take in a test. If it is the best one, copy the weights of `model`; None: keep no weights."""
        if accuracy <= self.accuracy:
            self.waited += 1
            return
        self.accuracy, self.step, self.waited = accuracy, step, 0
        if model is not None:
            self.tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint stores besides the tensors."""
        return {"accuracy": self.accuracy, "step": self.step, "waited": self.waited}

    @staticmethod
    def of(facts: dict[str, Any], tensors: dict[str, Tensor], *, kept: bool) -> Best:
        """Restore the best epoch from a checkpoint. One that lacks it, or its weights where they are `kept`, starts anew.

        Raises:
            KeyError: If a fact is missing.
            ValueError: If a fact is invalid.
        """
        found = facts.get("best")
        if found is None or (kept and not tensors):
            return Best()
        if not isinstance(found, dict) or type(found.get("accuracy")) not in (int, float) or not -1 <= found["accuracy"] <= 1:
            raise ValueError("'best' must have an accuracy from -1 to 1")
        return Best(float(found["accuracy"]), count(found, "step"), count(found, "waited"), dict(tensors) if kept else {})
