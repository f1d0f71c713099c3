"""Every error the library raises, and the exit code that the command line gives it.

    VisattnError                        1
    ├─ ImageError(ValueError)           3   a photo that cannot be used
    ├─ MapError(ValueError)             4   a map that may not be drawn: not finite, wrong shape, out of range
    ├─ ShapeError(ValueError)           2   an argument of the wrong rank or size
    ├─ OptionError(ValueError)          2   an unknown name or a value out of range
    ├─ DataError(ValueError)            2   a data set that cannot be learned from
    ├─ OutputError(OSError)             2   an output that may not be written there
    ├─ ResourceError(OSError)           5   disk full, out of memory
    ├─ ModelError(RuntimeError)         4   a model or a checkpoint that cannot be used
    │  ├─ UnsupportedModel(TypeError)       no family knows this model
    │  ├─ WeightsError                      weights unreachable, damaged or of another model
    │  ├─ CheckpointError                   a training state that cannot be gone on from
    │  ├─ TrainingError                     a training that cannot go on
    │  ├─ CaptureError                      the forward pass could not be recorded
    │  │  └─ NoAttentionCaptured            no softmax attention ran
    │  └─ LayoutError                       the tokens cannot be put back on the image
    └─ MissingExtra(ImportError)        2   an optional dependency is not installed

`VisattnWarning` is for results that may mislead. Each error also derives from the builtin in parentheses. A message is one
sentence: what must be *expected*, got *actual*; then what to do.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CheckpointError",
    "DataError",
    "ImageError",
    "LayoutError",
    "MapError",
    "MissingExtra",
    "ModelError",
    "NoAttentionCaptured",
    "OptionError",
    "OutputError",
    "ResourceError",
    "ShapeError",
    "TrainingError",
    "UnsupportedModel",
    "VisattnError",
    "VisattnWarning",
    "WeightsError",
]


class VisattnError(Exception):
    """Base of all errors of visattn; `exit_code` is what the command line ends with."""

    exit_code = 1


class ImageError(VisattnError, ValueError):
    """A photo cannot be read or used."""

    exit_code = 3


class MapError(VisattnError, ValueError):
    """A map may not be drawn: it is not finite, has the wrong shape or lies out of range."""

    exit_code = 4


class ShapeError(VisattnError, ValueError):
    """An argument has the wrong rank or size."""

    exit_code = 2


class OptionError(VisattnError, ValueError):
    """An option is unknown or out of range."""

    exit_code = 2


class DataError(VisattnError, ValueError):
    """A data set cannot be learned from."""

    exit_code = 2


class OutputError(VisattnError, OSError):
    """An output may not be written where it was asked for."""

    exit_code = 2


class ResourceError(VisattnError, OSError):
    """The machine ran out of disk or memory."""

    exit_code = 5


class ModelError(VisattnError, RuntimeError):
    """A model or a checkpoint cannot be used."""

    exit_code = 4


class UnsupportedModel(ModelError, TypeError):
    """No family knows how this model lays out its tokens."""


class WeightsError(ModelError):
    """Weights are unreachable, damaged or belong to another model."""


class CheckpointError(ModelError):
    """A training state is damaged, of another version or of another run."""


class TrainingError(ModelError):
    """A training cannot go on: its loss is no number, or a worker died."""


class CaptureError(ModelError):
    """A forward pass could not be recorded."""


class NoAttentionCaptured(CaptureError):
    """No softmax attention ran inside the capture."""


class LayoutError(ModelError):
    """Tokens cannot be put back on the image without guessing."""


class MissingExtra(VisattnError, ImportError):
    """An optional dependency is not installed; the message holds the install line."""

    exit_code = 2


class VisattnWarning(UserWarning):
    """A result that may mislead, or that shows nothing; never chatter."""
