"""DRAW: a network that paints an image stroke by stroke, and looks at a part of the image before each stroke.

Gregor et al., "DRAW: A Recurrent Neural Network For Image Generation", ICML 2015, arXiv:1502.04623. It is a variational autoencoder whose
encoder and decoder are LSTMs: `T` times, the encoder reads through a grid of Gaussian filters, a latent vector is sampled, and the decoder
adds a patch to the canvas through another grid of filters. Differs from the paper: a filter outside the image gives 0, see
`visattn.nn.DrawRead`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import ShapeError
from visattn.nn import DrawRead, DrawWrite


class DrawOutput(NamedTuple):
    """Output of a forward pass with T steps."""

    canvases: Tensor  # (B, T, C, H, W): logits of the canvas after each step; a sigmoid makes them pixels
    divergences: Tensor  # (B, T): KL divergence of the posterior of each latent vector from its prior, in nats
    read: Tensor  # (B, T, 4): top, left, bottom and right of the filters that read, in pixels
    written: Tensor  # (B, T, 4): of the filters that write


class Draw(nn.Module):
    """DRAW network with selective attention: image `(B, C, H, W)`, with pixels in [0, 1], to a `DrawOutput`.

    With `c_0 = h_0^dec = h_0^enc = 0`, each step computes `x^ = x - sigmoid(c_{t-1})`, `r = read([x; x^], h^dec_{t-1})`,
    `h^enc = LSTM([r; h^dec_{t-1}], h^enc)`, `z ~ N(W h^enc, exp(W' h^enc)^2)`, `h^dec = LSTM(z, h^dec)`, `c_t = write(c_{t-1}, h^dec)`.
    In evaluation mode `z` is the mean of the posterior.
    """

    def __init__(
        self,
        *,
        img_size: tuple[int, int] = (28, 28),
        steps: int = 10,
        read_size: int = 5,
        write_size: int = 5,
        hidden_dim: int = 256,
        latent_dim: int = 24,
        in_channels: int = 1,
    ) -> None:
        """Build with PyTorch's default initialization.

        Args:
            img_size: `(height, width)` of the images in pixels.
            steps: Number of steps, T.
            read_size: Filters per side that read.
            write_size: Filters per side that write.
            hidden_dim: Width of both LSTMs.
            latent_dim: Width of a latent vector.
            in_channels: Number of channels, C.

        Raises:
            OptionError: If a number is below 1.
        """
        super().__init__()
        height, width = img_size
        self.img_size, self.in_channels = (
            (at_least("height", height), at_least("width", width)),
            at_least("in_channels", in_channels),
        )
        self.steps, self.latent_dim = at_least("steps", steps), at_least("latent_dim", latent_dim)
        self.hidden_dim = at_least("hidden_dim", hidden_dim)
        self.read = DrawRead(hidden_dim, patch_size=read_size)
        self.encoder = nn.LSTMCell(2 * in_channels * read_size**2 + hidden_dim, hidden_dim)
        self.mean, self.log_deviation = nn.Linear(hidden_dim, latent_dim), nn.Linear(hidden_dim, latent_dim)
        self.decoder = nn.LSTMCell(latent_dim, hidden_dim)
        self.write = DrawWrite(in_channels, hidden_dim, patch_size=write_size)

    def forward(self, images: Tensor) -> DrawOutput:
        """Paint the images again.

        Raises:
            ShapeError: If the images have another size or another number of channels.
        """
        if images.shape[1:] != (self.in_channels, *self.img_size):
            wanted = f"(B, {self.in_channels}, {self.img_size[0]}, {self.img_size[1]})"
            raise ShapeError(
                f"Draw must be given {wanted}, got {tuple(images.shape)}. Resize the images, or build it with img_size."
            )
        seen = decoded = self._zeros(images)
        canvas, steps = torch.zeros_like(images), []
        for _ in range(self.steps):
            state = decoded[0]
            patch = self.read(torch.cat((images, images - canvas.sigmoid()), 1), state)  # (B, 2 C, N, N)
            seen = self.encoder(torch.cat((patch.flatten(1), state), 1), seen)
            mean, log_deviation = self.mean(seen[0]), self.log_deviation(seen[0])
            noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
            divergence = ((mean.square() + (2 * log_deviation).exp() - 1) / 2 - log_deviation).sum(1)  # (B,)
            decoded = self.decoder(mean + log_deviation.exp() * noise, decoded)
            canvas = self.write(canvas, decoded[0])
            boxes = (self.read.boxes(state, self.img_size), self.write.boxes(decoded[0], self.img_size))
            steps.append((canvas, divergence, *(box[:, 0, :4].detach() for box in boxes)))
        return DrawOutput(*(torch.stack(values, 1) for values in zip(*steps, strict=True)))

    @torch.no_grad()
    def generate(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Paint new images, from latent vectors of the prior.

        Args:
            count: Number of images, B.
            generator: Source of the random numbers; PyTorch's by default.

        Returns:
            Pixels after each step in [0, 1], `(B, T, C, H, W)`, and the boxes of the filters that write, `(B, T, 4)`.
        """
        like = self.mean.weight
        noise = torch.randn(self.steps, count, self.latent_dim, generator=generator, dtype=like.dtype).to(like.device)
        canvas = like.new_zeros(count, self.in_channels, *self.img_size)
        decoded, canvases, boxes = self._zeros(canvas), [], []
        for latent in noise:
            decoded = self.decoder(latent, decoded)
            canvas = self.write(canvas, decoded[0])
            canvases.append(canvas.sigmoid())
            boxes.append(self.write.boxes(decoded[0], self.img_size)[:, 0, :4])
        return torch.stack(canvases, 1), torch.stack(boxes, 1)

    def _zeros(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first state of an LSTM for each image."""
        zeros = images.new_zeros(len(images), self.hidden_dim)
        return zeros, zeros


def bound(output: DrawOutput, images: Tensor) -> Tensor:
    """Compute the paper's loss, an upper bound of the negative log-likelihood of binary images, in nats for each image, `(B,)`.

    The cross-entropy of the last canvas, plus the divergences of all steps. With pixels between 0 and 1 it is no bound, as in many reports.

    Args:
        output: Output of the model in training mode; in evaluation mode, without samples, the value is no bound either.
        images: The images, with pixels in [0, 1].
    """
    reconstruction = F.binary_cross_entropy_with_logits(output.canvases[:, -1], images, reduction="none")
    return reconstruction.flatten(1).sum(1) + output.divergences.sum(1)
