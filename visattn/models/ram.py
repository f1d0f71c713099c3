"""Recurrent attention model (RAM): it classifies an image from a few glimpses and chooses where to look next.

Mnih et al., "Recurrent Models of Visual Attention", NeurIPS 2014, arXiv:1406.6247. Backpropagation trains the features of a glimpse.
Locations are sampled, so REINFORCE trains them, with the correctness of the final class as reward. No gradient flows through a location.
Differs from the paper: the mean of a location passes through a tanh, so it lies on the image. The location network also chooses the first
location, from the zero state, so evaluation is deterministic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from visattn.errors import OptionError
from visattn.nn import Retina, reinforce as score_function


class RAMOutput(NamedTuple):
    """Output of a forward pass with T glimpses."""

    logits: Tensor  # (B, classes), after the last glimpse
    log_probabilities: Tensor  # (B, T): log-density of each location under the policy
    locations: Tensor  # (B, T, 2): (x, y) in [-1, 1], center (0, 0); glimpse t is taken at locations[:, t]
    baselines: Tensor  # (B, T): expected reward before each location is chosen


class RAM(nn.Module):
    """Recurrent attention model: image `(B, C, H, W)` of any size to class scores, in `num_glimpses` steps.

    `l_t ~ N(tanh(W h_{t-1}), deviation^2)`, `g_t = relu(W relu(W retina(x, l_t)) + W relu(W l_t))`, `h_t = relu(W h_{t-1} + W g_t)`.
    In evaluation mode `l_t` is the mean.
    """

    def __init__(
        self,
        glimpse_size: int = 8,
        num_scales: int = 1,
        *,
        scale_factor: int = 2,
        num_glimpses: int = 6,
        hidden_dim: int = 256,
        std: float = 0.1,
        num_classes: int = 10,
        in_channels: int = 1,
    ) -> None:
        """Build with PyTorch's default initialization.

        Args:
            glimpse_size: Side of a glimpse in pixels.
            num_scales: Number of patches in a glimpse, each `scale_factor` times as wide as the one before and resized to `glimpse_size`.
            scale_factor: Ratio between the widths of successive patches.
            num_glimpses: Number of glimpses, T.
            hidden_dim: Width of the hidden state and of a glimpse vector. Patches and location are encoded to half of it each.
            std: Standard deviation of a location in training, where 1 is half the side of the image. It is fixed, not learned.
            num_classes: Number of classes.
            in_channels: Number of input channels, C.

        Raises:
            OptionError: If `num_glimpses` is below 1, or `std` is not positive.
        """
        super().__init__()
        if num_glimpses < 1 or std <= 0:
            raise OptionError(f"RAM must have num_glimpses of at least 1 and std above 0, got {num_glimpses} and {std:g}.")
        self.num_glimpses, self.hidden_dim, self.std, self.num_classes = num_glimpses, hidden_dim, std, num_classes
        self.glimpse = GlimpseNetwork(
            glimpse_size, num_scales, scale_factor=scale_factor, hidden_dim=hidden_dim, in_channels=in_channels
        )
        self.core = Core(hidden_dim)
        self.location = nn.Linear(hidden_dim, 2)
        self.baseline = nn.Linear(hidden_dim, 1)
        self.action = nn.Linear(hidden_dim, num_classes)

    def forward(self, images: Tensor) -> RAMOutput:
        """Take `num_glimpses` glimpses, then classify."""
        state = images.new_zeros(len(images), self.hidden_dim)  # (B, hidden)
        locations, log_probabilities, baselines = [], [], []
        for _ in range(self.num_glimpses):
            read = state.detach()  # only the classification loss trains the state
            mean = self.location(read).tanh()  # (B, 2)
            noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
            chosen = (mean + self.std * noise).detach()  # else the classification loss would train the policy
            locations.append(chosen.clamp(-1, 1))
            log_probabilities.append(self._log_density(chosen, mean))  # of the unclamped sample
            baselines.append(self.baseline(read).squeeze(1))
            state = self.core(self.glimpse(images, locations[-1]), state)
        stacked = (torch.stack(values, dim=1) for values in (log_probabilities, locations, baselines))  # (B, T, ...)
        return RAMOutput(self.action(state), *stacked)

    def _log_density(self, chosen: Tensor, mean: Tensor) -> Tensor:
        """Compute the log-density of locations `(B, 2)` under the policy, `(B,)`."""
        distance = ((chosen - mean) / self.std).square().sum(1)
        return -distance / 2 - math.log(2 * math.pi * self.std**2)


class GlimpseNetwork(nn.Module):
    """Glimpse network: encodes the patches at a location, and the location itself, as one vector."""

    def __init__(self, glimpse_size: int, num_scales: int, *, scale_factor: int, hidden_dim: int, in_channels: int) -> None:
        """Build the retina and its four layers."""
        super().__init__()
        self.retina = Retina(glimpse_size, num_scales, scale_factor=scale_factor)
        self.what = nn.Linear(num_scales * in_channels * glimpse_size * glimpse_size, hidden_dim // 2)
        self.where = nn.Linear(2, hidden_dim // 2)
        self.from_what = nn.Linear(hidden_dim // 2, hidden_dim)
        self.from_where = nn.Linear(hidden_dim // 2, hidden_dim)

    def forward(self, images: Tensor, locations: Tensor) -> Tensor:
        """Encode images `(B, C, H, W)` at locations `(B, 2)` as glimpses `(B, hidden)`."""
        patches = self.retina(images, locations).flatten(1)  # (B, scales * C * size * size)
        what, where = self.what(patches).relu(), self.where(locations).relu()  # each (B, hidden / 2)
        glimpse: Tensor = self.from_what(what) + self.from_where(where)  # (B, hidden)
        return glimpse.relu()


class Core(nn.Module):
    """Core network: updates the hidden state with one glimpse."""

    def __init__(self, hidden_dim: int) -> None:
        """Build both layers."""
        super().__init__()
        self.from_state = nn.Linear(hidden_dim, hidden_dim)
        self.from_glimpse = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, glimpse: Tensor, state: Tensor) -> Tensor:
        """Compute the new state `(B, hidden)` from a glimpse and the last state, both `(B, hidden)`."""
        new: Tensor = self.from_state(state) + self.from_glimpse(glimpse)
        return new.relu()


def loss(output: RAMOutput, labels: Tensor, *, reinforce: float = 1.0) -> Tensor:
    """Compute the paper's hybrid loss, averaged over the batch. Each of its three terms trains different parameters.

    Cross-entropy trains the glimpse, core and action networks. REINFORCE, `-sum_t log p(l_t) (R - b_t)`, trains the location network. The
    squared error of `b_t` trains the baseline. The reward R is 1 if the top-1 class is correct, else 0.

    Args:
        output: Output of the model in training mode.
        labels: Ground-truth classes, `(B,)`.
        reinforce: Weight of the REINFORCE term, which only scales the gradient of the location network.
    """
    reward = (output.logits.detach().argmax(1) == labels).to(output.baselines.dtype)[:, None].expand_as(output.baselines)
    policy = score_function(
        -reward[:, 0],
        output.log_probabilities,
        torch.zeros_like(output.log_probabilities),  # the entropy is constant for a fixed std
        baseline=-output.baselines,  # reduces the variance
    )
    return (
        nn.functional.cross_entropy(output.logits, labels) + reinforce * policy + nn.functional.mse_loss(output.baselines, reward)
    )
