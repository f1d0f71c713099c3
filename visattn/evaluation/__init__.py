"""Quantitative evaluation of maps and attention.

Statistics of heads, gates and sinks, and scores of how well a map localizes an object, with baselines for chance and center bias.
"""

from visattn.core.methods.sinks import attention_received, find_sinks, sink_mass
from visattn.evaluation.baselines import center_prior, shifted_copies, smooth_random
from visattn.evaluation.gates import GateStatistics, gate_statistics
from visattn.evaluation.heads import HeadStatistics, head_divergence, statistics
from visattn.evaluation.importance import head_ablation, head_importance
from visattn.evaluation.localization import energy_inside, lift
from visattn.evaluation.pointing import pointing_game
from visattn.evaluation.ranking import auroc, average_precision
from visattn.evaluation.specialization import HeadScores, find_heads

__all__ = [
    "GateStatistics",
    "HeadScores",
    "HeadStatistics",
    "attention_received",
    "auroc",
    "average_precision",
    "center_prior",
    "energy_inside",
    "find_heads",
    "find_sinks",
    "gate_statistics",
    "head_ablation",
    "head_divergence",
    "head_importance",
    "lift",
    "pointing_game",
    "shifted_copies",
    "sink_mass",
    "smooth_random",
    "statistics",
]
