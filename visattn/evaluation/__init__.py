"""Whether a map can be trusted.

What heads, gates and sinks do in numbers, and how much of a map lies on the object, beside what chance and habit would reach.
"""

from visattn.evaluation.baselines import center_prior, shifted_copies, smooth_random
from visattn.evaluation.gates import GateStatistics, gate_statistics
from visattn.evaluation.heads import HeadStatistics, head_divergence, statistics
from visattn.evaluation.importance import head_ablation, head_importance
from visattn.evaluation.localization import lift, mass_on
from visattn.evaluation.pointing import pointing_game
from visattn.evaluation.ranking import auroc, average_precision
from visattn.methods.sinks import column_scores, find_sinks, sink_mass

__all__ = [
    "GateStatistics",
    "HeadStatistics",
    "auroc",
    "average_precision",
    "center_prior",
    "column_scores",
    "find_sinks",
    "gate_statistics",
    "head_ablation",
    "head_divergence",
    "head_importance",
    "lift",
    "mass_on",
    "pointing_game",
    "shifted_copies",
    "sink_mass",
    "smooth_random",
    "statistics",
]
