"""Retina of the recurrent attention model (RAM)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.publish import publish
from visattn.errors import ShapeError
from visattn.nn.positions import exact, sample, wide
from visattn.nn.shape_checks import check_maps, is_traced, shape_text


class Retina(nn.Module):
    """Retina of the recurrent attention model: concentric square patches around a location, each wider and coarser than the last.

    Patch `s` is `patch_size * scale_factor^s` pixels wide. Average pooling over `scale_factor^s` x `scale_factor^s` pixels reduces it to
    `patch_size` x `patch_size`. Pixels outside the image are 0. Patches are sampled bilinearly, so the location gets a gradient.

    Args:
        patch_size: Side of each patch in the output.
        num_scales: Number of patches.
        scale_factor: Ratio between the widths of successive patches.

    Shape:
        Images `(B, C, H, W)` and locations `(B, 2)` as (x, y), where -1 and 1 are the outer edges of the image and (0, 0) is its center, to
        `(B, num_scales * C, patch_size, patch_size)`, the finest patch first.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward pass, if the images are not `(B, C, H, W)` or the locations are not `(B, 2)`.

    Reference:
        Mnih et al., "Recurrent Models of Visual Attention", NeurIPS 2014, arXiv:1406.6247. The paper does not specify how patches are
        reduced. A widespread port truncates locations to whole pixels.
    """

    def __init__(self, patch_size: int, num_scales: int, scale_factor: int = 2) -> None:
        """Build the module; it has no parameters."""
        super().__init__()
        self.patch_size, self.num_scales = at_least("patch_size", patch_size), at_least("num_scales", num_scales)
        self.scale_factor = at_least("scale_factor", scale_factor)

    def forward(self, images: Tensor, locations: Tensor) -> Tensor:
        """Extract the patches of each image at its location."""
        check_maps(self, images, None)
        if not is_traced(images) and (locations.shape[0] != images.shape[0] or locations.shape[1:] != (2,)):
            raise ShapeError(f"locations must be ({images.shape[0]}, 2), one (x, y) for each image, got {shape_text(locations)}.")
        publish(self, "glimpse", lambda: self.boxes(locations, (images.shape[2], images.shape[3])), images)
        with exact(images):
            patches = [self._patch(images, locations, self.scale_factor**scale) for scale in range(self.num_scales)]
        return torch.cat(patches, 1)

    def boxes(self, locations: Tensor, size: tuple[int, int]) -> Tensor:
        """Compute where the patches lie on an image, for figures.

        Args:
            locations: Locations `(B, 2)`, as in the forward pass.
            size: Size `(height, width)` of the image in pixels.

        Returns:
            `(B, scales, 4)`: top, left, bottom and right in continuous pixels, the finest patch first. They may extend beyond the image.
        """
        center = (wide(locations).flip(1) + 1) / 2 * wide(locations).new_tensor(size)  # (B, 2), (y, x)
        halves = [self.patch_size * self.scale_factor**scale / 2 for scale in range(self.num_scales)]
        return torch.stack([torch.cat((center - half, center + half), 1) for half in halves], 1)

    def _patch(self, images: Tensor, locations: Tensor, coarse: int) -> Tensor:
        """Extract one patch, `(B, C, size, size)`; each of its pixels is the mean of `coarse` x `coarse` image pixels."""
        height, width = images.shape[2], images.shape[3]
        side = self.patch_size * coarse
        center = wide(locations)
        steps = torch.arange(side, device=center.device, dtype=center.dtype) * 2 - side + 1  # in half pixels
        x, y = center[:, :1] + steps / width, center[:, 1:] + steps / height  # (B, side)
        positions = torch.stack((x[:, None, :].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)), 3)  # (B, side, side, 2)
        return F.avg_pool2d(sample(images, positions), coarse)
