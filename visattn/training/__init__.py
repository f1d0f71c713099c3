"""Training of classifiers and captioners: a plain loop, resumable checkpoints, fair comparisons, and attention maps during training."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.training.attention_logger import AttentionLogger as AttentionLogger
    from visattn.training.config import Config as Config, checked as checked, read_config as read_config
    from visattn.training.loop import train as train
    from visattn.training.report.compared_runs import compare_runs as compare_runs
    from visattn.training.run.checkpoints import Checkpoints as Checkpoints, State as State
    from visattn.training.run.folder import Result as Result
    from visattn.training.tasks.caption_config import CaptionConfig as CaptionConfig
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".attention_logger": ["AttentionLogger"],
            ".config": ["Config", "checked", "read_config"],
            ".loop": ["train"],
            ".report.compared_runs": ["compare_runs"],
            ".run.checkpoints": ["Checkpoints", "State"],
            ".run.folder": ["Result"],
            ".tasks.caption_config": ["CaptionConfig"],
        },
    )
