"""Training of classifiers and captioners: a plain loop, resumable checkpoints, fair comparisons, and attention maps during training."""

from visattn.training.attention_logger import AttentionLogger
from visattn.training.config import Config, checked, read_config
from visattn.training.loop import train
from visattn.training.report.compared_runs import compare_runs
from visattn.training.run.checkpoints import Checkpoints, State
from visattn.training.run.folder import Result
from visattn.training.tasks.caption_config import CaptionConfig

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
