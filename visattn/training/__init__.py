"""Training of classifiers with and without attention: a plain loop, checkpoints that survive, comparisons that are fair, maps."""

from visattn.training._attention_logger import AttentionLogger
from visattn.training._checkpoint import Checkpoints, State
from visattn.training._compare_runs import compare_runs
from visattn.training._config import Config, checked, read_config
from visattn.training._folder import Result
from visattn.training._loop import train

__all__ = ["AttentionLogger", "Checkpoints", "Config", "Result", "State", "checked", "compare_runs", "read_config", "train"]
