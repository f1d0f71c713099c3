"""The log of a run for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visattn._support.extras import need
from visattn._support.language import option


class Board:
    """Writer of the rows of a log as scalars of TensorBoard. A resumed run continues them."""

    def __init__(self, folder: Path) -> None:
        """Check that TensorBoard is installed. Nothing is written yet.

        Raises:
            MissingExtra: If it is not.
        """
        need("tensorboard", "tensorboard", option("tensorboard", True))
        self._folder = folder
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Open the files. Later scalars than those of this step, of an interrupted run, are purged."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of a row of the log, at its step."""
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()
