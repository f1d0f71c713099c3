"""Exceptions that the library raises, with the exit codes of the command line.

    VisattnError                        1
    ├─ ImageError(ValueError)           3   a photo that cannot be used
    ├─ MapError(ValueError)             4   a map that cannot be drawn: not finite, wrong shape, out of range
    ├─ StudyError(ValueError)           4   an .attn file that is not a study
    ├─ ShapeError(ValueError)           2   an argument of the wrong rank or size
    ├─ OptionError(ValueError)          2   an unknown name or a value out of range
    ├─ DataError(ValueError)            2   a data set that cannot be used for training
    ├─ OutputError(OSError)             2   an output that cannot be written there
    ├─ ResourceError(OSError)           5   disk full, out of memory
    ├─ ModelError(RuntimeError)         4   a model or a checkpoint that cannot be used
    │  ├─ UnsupportedModel(TypeError)       no family supports this model
    │  ├─ WeightsError                      weights that are unreachable, damaged or for another model
    │  ├─ CheckpointError                   a checkpoint that cannot be resumed
    │  ├─ TrainingError                     a training run that cannot continue
    │  ├─ CaptureError                      the forward pass could not be recorded
    │  │  └─ NoAttentionCaptured            no softmax attention ran
    │  └─ LayoutError                       tokens that cannot be mapped onto the image
    └─ MissingExtra(ImportError)        2   an optional dependency is not installed

`VisattnWarning` is issued for results that may mislead, `VisattnNote` for choices made for the caller. Each error also derives from the
built-in exception in parentheses. Messages state what was expected and what was given, followed by what to do.
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
    "StudyError",
    "TrainingError",
    "UnsupportedModel",
    "VisattnError",
    "VisattnNote",
    "VisattnWarning",
    "WeightsError",
]


class VisattnError(Exception):
    """Base class of all errors of visattn; `exit_code` is the exit code of the command line."""

    exit_code = 1


class ImageError(VisattnError, ValueError):
    """A photo cannot be read or used."""

    exit_code = 3


class MapError(VisattnError, ValueError):
    """A map cannot be drawn: it is not finite, has the wrong shape or lies out of range."""

    exit_code = 4


class StudyError(VisattnError, ValueError):
    """An `.attn` file is not a study, or its content is invalid."""

    exit_code = 4


class ShapeError(VisattnError, ValueError):
    """An argument has the wrong rank or size."""

    exit_code = 2


class OptionError(VisattnError, ValueError):
    """An option is unknown or out of range."""

    exit_code = 2


class DataError(VisattnError, ValueError):
    """A data set cannot be used for training."""

    exit_code = 2


class OutputError(VisattnError, OSError):
    """An output cannot be written to the given path."""

    exit_code = 2


class ResourceError(VisattnError, OSError):
    """The machine ran out of disk or memory."""

    exit_code = 5


class ModelError(VisattnError, RuntimeError):
    """A model or a checkpoint cannot be used."""

    exit_code = 4


class UnsupportedModel(ModelError, TypeError):
    """No family supports this model, so the layout of its tokens is unknown."""


class WeightsError(ModelError):
    """Weights are unreachable, damaged or made for another model."""


class CheckpointError(ModelError):
    """A checkpoint is damaged, or belongs to another version or another run."""


class TrainingError(ModelError):
    """A training run cannot continue: its loss is NaN or infinite."""


class CaptureError(ModelError):
    """A forward pass could not be recorded."""


class NoAttentionCaptured(CaptureError):
    """No softmax attention ran inside the capture."""


class LayoutError(ModelError):
    """Tokens cannot be mapped onto the image without guessing."""


class MissingExtra(VisattnError, ImportError):
    """An optional dependency is not installed; the message gives the install command."""

    exit_code = 2


class VisattnWarning(UserWarning):
    """A result that may mislead, or that shows nothing."""


class VisattnNote(UserWarning):
    """A choice made for the caller: another source of weights, or what an unusual spelling stands for."""
