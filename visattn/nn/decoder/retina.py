"""The retina of the recurrent attention model (RAM)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.errors import ShapeError
from visattn.nn.feature_maps import exact, sample, wide
from visattn.nn.shapes import at_least, check_maps, is_traced, shape_text


class Retina(nn.Module):
    """The retina of recurrent attention: square patches around a point, each wider and coarser than the one before.

    Patch `s` is `size * factor^s` pixels wide and is brought to `size` x `size` by means of `factor^s` x `factor^s` pixels. What lies
    beyond the image is 0. A center between pixels is read between pixels, so that a gradient reaches the location.

    Args:
        size: Side of each patch as it is given.
        scales: Number of patches.
        factor: How much wider each is than the one before.

    Shape:
        `(B, C, H, W)` and locations `(B, 2)`, (x, y), with -1 and 1 the outer edges of the image and (0, 0) its center, to
        `(B, scales * C, size, size)`, the finest first.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward, if the images are not `(B, C, H, W)` or the locations not `(B, 2)`.

    Reference:
        Mnih et al., "Recurrent Models of Visual Attention", NeurIPS 2014, arXiv:1406.6247. The paper does not say how patches are
        made smaller. A widespread port cuts off fractions of a pixel.
    """

    def __init__(self, size: int, scales: int, factor: int = 2) -> None:
        """Build; nothing is learned."""
        super().__init__()
        self.size, self.scales = at_least("size", size), at_least("scales", scales)
        self.factor = at_least("factor", factor)

    def forward(self, images: Tensor, locations: Tensor) -> Tensor:
        """Look at each image at its location."""
        check_maps(self, images, None)
        if not is_traced(images) and (locations.shape[0] != images.shape[0] or locations.shape[1:] != (2,)):
            raise ShapeError(f"locations must be ({images.shape[0]}, 2), one (x, y) for each image, got {shape_text(locations)}.")
        publish(self, "glimpse", lambda: self.boxes(locations, (images.shape[2], images.shape[3])), images)
        with exact(images):
            patches = [self._patch(images, locations, self.factor**scale) for scale in range(self.scales)]
        return torch.cat(patches, 1)

    def boxes(self, locations: Tensor, size: tuple[int, int]) -> Tensor:
        """Where the patches lie on an image, for pictures.

        Args:
            locations: `(B, 2)`, as given to the forward.
            size: `(height, width)` of the image in pixels.

        Returns:
            `(B, scales, 4)`: top, left, bottom and right in continuous pixels, the finest patch first; they may reach beyond the image.
        """
        center = (wide(locations).flip(1) + 1) / 2 * wide(locations).new_tensor(size)  # (B, 2), (y, x)
        halves = [self.size * self.factor**scale / 2 for scale in range(self.scales)]
        return torch.stack([torch.cat((center - half, center + half), 1) for half in halves], 1)

    def _patch(self, images: Tensor, locations: Tensor, coarse: int) -> Tensor:
        """`(B, C, size, size)`, each pixel a mean of `coarse` x `coarse`."""
        height, width = images.shape[2], images.shape[3]
        side = self.size * coarse
        center = wide(locations)
        steps = torch.arange(side, device=center.device, dtype=center.dtype) * 2 - side + 1  # in half pixels
        x, y = center[:, :1] + steps / width, center[:, 1:] + steps / height  # (B, side)
        positions = torch.stack((x[:, None, :].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)), 3)
        return F.avg_pool2d(sample(images, positions), coarse)
