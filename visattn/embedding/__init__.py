"""Queries and keys of a head in one space, in which tokens lie close together if one attends to the other.

The space is that of AttentionViz (Yeh et al. 2023, arXiv:2305.03210): keys are translated and both are scaled, which changes no attention.
"""

from visattn.embedding.components import Moments, joint_axes
from visattn.embedding.correlations import row_pearson, row_spearman, weighted_correlation
from visattn.embedding.crops import crops_of
from visattn.embedding.gathering import gather
from visattn.embedding.joint import Joint, factor_of, joined
from visattn.embedding.layouts import lay_out, lay_out_images
from visattn.embedding.numbers import head_numbers
from visattn.embedding.saving import save_html, save_npz
from visattn.embedding.space import LayerStates, Projection, Space, Tokens

__all__ = [
    "Joint",
    "LayerStates",
    "Moments",
    "Projection",
    "Space",
    "Tokens",
    "crops_of",
    "factor_of",
    "gather",
    "head_numbers",
    "joined",
    "joint_axes",
    "lay_out",
    "lay_out_images",
    "row_pearson",
    "row_spearman",
    "save_html",
    "save_npz",
    "weighted_correlation",
]
