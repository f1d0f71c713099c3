"""Queries and keys of a head in one space, in which tokens lie close together if one attends to the other.

The space is that of AttentionViz (Yeh et al. 2023, arXiv:2305.03210): keys are translated and both are scaled, which changes no attention.
"""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.embedding.components import Moments as Moments, joint_axes as joint_axes
    from visattn.embedding.correlations import (
        row_pearson as row_pearson,
        row_spearman as row_spearman,
        weighted_correlation as weighted_correlation,
    )
    from visattn.embedding.crops import crops_of as crops_of
    from visattn.embedding.dimensions import lay_out as lay_out, lay_out_images as lay_out_images
    from visattn.embedding.gathering import gather as gather
    from visattn.embedding.joint import Joint as Joint, factor_of as factor_of, joined as joined
    from visattn.embedding.numbers_of_heads import head_numbers as head_numbers
    from visattn.embedding.saving import save_html as save_html, save_npz as save_npz
    from visattn.embedding.space import LayerStates as LayerStates, Projection as Projection, Space as Space, Tokens as Tokens
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".components": ["Moments", "joint_axes"],
            ".correlations": ["row_pearson", "row_spearman", "weighted_correlation"],
            ".crops": ["crops_of"],
            ".gathering": ["gather"],
            ".joint": ["Joint", "factor_of", "joined"],
            ".dimensions": ["lay_out", "lay_out_images"],
            ".numbers_of_heads": ["head_numbers"],
            ".saving": ["save_html", "save_npz"],
            ".space": ["LayerStates", "Projection", "Space", "Tokens"],
        },
    )
