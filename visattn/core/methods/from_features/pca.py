"""Principal components of patch features."""

from __future__ import annotations

import torch

from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.method import Method, needs
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import features_refusal, tokens_of
from visattn.core.records import Recording
from visattn.errors import OptionError


@in_own_modes
def pca(recording: Recording, *, layer: int | str = -1, components: int = 3) -> AttentionMap:
    """Compute principal components of the patch features, fitted jointly on all patches of all images in the batch.

    Args:
        recording: Recording with token features.
        layer: Index or dotted name among the layers with token features.
        components: Number of components.

    Returns:
        Map with axes `batch` and `component`; signed scores. The sign of a component, which is arbitrary, makes its loading of largest
        magnitude positive. The notes give the explained variance.

    Raises:
        OptionError: If the features do not exist or have fewer components.

    Reference:
        Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision", arXiv:2304.07193, figure 1. Differs: the
        first component is not thresholded to remove the background.
    """
    feature = tokens_of(recording, layer)
    layout = feature.layout
    assert layout is not None  # noqa: S101 - tokens always have one
    patches = feature.value[:, len(layout.prefix) :].double()
    batch, cells, width = patches.shape
    if not 1 <= components <= min(width, batch * cells):
        raise OptionError(f"components must lie in [1, {min(width, batch * cells)}], got {components}.")
    rows = patches.reshape(-1, width)
    centered = rows - rows.mean(0)
    variances, vectors = torch.linalg.eigh(centered.T @ centered / len(rows))  # ascending
    vectors = vectors.flip(1)[:, :components]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    scores = centered @ (vectors * largest.sign())
    shares = (variances.flip(0)[:components] / variances.sum().clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    notes = ("components explain " + ", ".join(f"{share:.0%}" for share in shares) + " of the variance of the patch features",)
    return to_map(
        recording,
        "pca",
        "principal component",
        scores.float().reshape(batch, cells, components).transpose(1, 2),
        layout,
        {"layer": feature.name, "components": components},
        axes=["component"],
        labels={"component": tuple(str(i) for i in range(components))},
        signed=True,
        notes=notes,
    )


METHODS = {
    "pca": Method(function=pca, needs=needs("features"), accepts=features_refusal),
}
