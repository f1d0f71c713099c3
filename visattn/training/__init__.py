"""Training of classifiers, with and without attention, and of captioners: a plain loop, states that survive, fair comparisons, maps."""

from visattn.training._attention_logger import AttentionLogger
from visattn.training._caption_config import CaptionConfig
from visattn.training._checkpoint import Checkpoints, State
from visattn.training._compare_runs import compare_runs
from visattn.training._config import Config, checked, read_config
from visattn.training._folder import Result
from visattn.training._loop import train

__all__ = [
    "AttentionLogger",
    "CaptionConfig",
    "Checkpoints",
    "Config",
    "Result",
    "State",
    "checked",
    "compare_runs",
    "read_config",
    "train",
]
