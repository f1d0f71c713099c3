"""The recurrent attention model to read from top to bottom: it looks at an image through a few glimpses and chooses where to look.

Mnih et al., "Recurrent Models of Visual Attention", NeurIPS 2014, arXiv:1406.6247. What is seen is learned by backpropagation; where to
look is sampled, so it is learned by REINFORCE, from whether the class was right in the end. No gradient goes through a location.
Differs from the paper: the mean of a location passes a tanh, so that it lies on the image; the first location is what the location
network says of the empty state, so that every location is chosen by it and evaluation is deterministic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from visattn.errors import OptionError
from visattn.nn import Retina, reinforce as score_function


class Looked(NamedTuple):
    """What a forward pass gives, with T glimpses."""

    logits: Tensor  # (B, classes), after the last glimpse
    log_probabilities: Tensor  # (B, T): log-density of each location under the policy that chose it
    locations: Tensor  # (B, T, 2): (x, y) in [-1, 1], (0, 0) the center; glimpse t was taken at locations[:, t]
    baselines: Tensor  # (B, T): the reward that was expected before each location was chosen


class RAM(nn.Module):
    """Image `(B, C, H, W)` of any size to class scores, in `glimpses` steps.

    `l_t ~ N(tanh(W h_{t-1}), deviation^2)`, `g_t = relu(W relu(W retina(x, l_t)) + W relu(W l_t))`, `h_t = relu(W h_{t-1} + W g_t)`.
    In evaluation mode `l_t` is the mean.
    """

    def __init__(
        self,
        size: int = 8,
        scales: int = 1,
        *,
        factor: int = 2,
        glimpses: int = 6,
        hidden: int = 256,
        deviation: float = 0.1,
        num_classes: int = 10,
        in_channels: int = 1,
    ) -> None:
        """Build with PyTorch's initial values.

        Args:
            size: Side of a glimpse in pixels.
            scales: Patches in a glimpse, each `factor` times as wide as the one before and brought to the same size.
            factor: See `scales`.
            glimpses: T.
            hidden: Width of the state and of a glimpse; what was seen and where have half of it each.
            deviation: Standard deviation of a location while training, in half sides of the image. Fixed, not learned.
            num_classes: Length of the output.
            in_channels: C.

        Raises:
            OptionError: If there is no glimpse, or the deviation is not positive.
        """
        super().__init__()
        if glimpses < 1 or deviation <= 0:
            raise OptionError(f"RAM must have 1 glimpse or more and a deviation above 0, got {glimpses} and {deviation:g}.")
        self.glimpses, self.hidden, self.deviation, self.num_classes = glimpses, hidden, deviation, num_classes
        self.glimpse = GlimpseNetwork(size, scales, factor=factor, hidden=hidden, in_channels=in_channels)
        self.core = Core(hidden)
        self.location = nn.Linear(hidden, 2)
        self.baseline = nn.Linear(hidden, 1)
        self.action = nn.Linear(hidden, num_classes)

    def forward(self, images: Tensor) -> Looked:
        """Look `glimpses` times, then say the class."""
        state = images.new_zeros(len(images), self.hidden)
        locations, log_probabilities, baselines = [], [], []
        for _ in range(self.glimpses):
            read = state.detach()  # the classification alone shapes the state
            mean = self.location(read).tanh()  # (B, 2)
            noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
            chosen = (mean + self.deviation * noise).detach()  # else the classification would move the policy
            locations.append(chosen.clamp(-1, 1))
            log_probabilities.append(self._log_density(chosen, mean))  # of what was drawn, though the image ends at 1
            baselines.append(self.baseline(read).squeeze(1))
            state = self.core(self.glimpse(images, locations[-1]), state)
        stacked = (torch.stack(values, dim=1) for values in (log_probabilities, locations, baselines))
        return Looked(self.action(state), *stacked)

    def _log_density(self, chosen: Tensor, mean: Tensor) -> Tensor:
        """Of locations `(B, 2)` under the policy, `(B,)`."""
        distance = ((chosen - mean) / self.deviation).square().sum(1)
        return -distance / 2 - math.log(2 * math.pi * self.deviation**2)


class GlimpseNetwork(nn.Module):
    """What is seen at a location, and the location, as one vector."""

    def __init__(self, size: int, scales: int, *, factor: int, hidden: int, in_channels: int) -> None:
        """Build the retina and its four layers."""
        super().__init__()
        self.retina = Retina(size, scales, factor=factor)
        self.what = nn.Linear(scales * in_channels * size * size, hidden // 2)
        self.where = nn.Linear(2, hidden // 2)
        self.from_what = nn.Linear(hidden // 2, hidden)
        self.from_where = nn.Linear(hidden // 2, hidden)

    def forward(self, images: Tensor, locations: Tensor) -> Tensor:
        """Images `(B, C, H, W)` and locations `(B, 2)` to glimpses `(B, hidden)`."""
        patches = self.retina(images, locations).flatten(1)  # (B, scales * C * size * size)
        what, where = self.what(patches).relu(), self.where(locations).relu()
        glimpse: Tensor = self.from_what(what) + self.from_where(where)
        return glimpse.relu()


class Core(nn.Module):
    """The state after one more glimpse, of the state before it."""

    def __init__(self, hidden: int) -> None:
        """Build both layers."""
        super().__init__()
        self.from_state = nn.Linear(hidden, hidden)
        self.from_glimpse = nn.Linear(hidden, hidden)

    def forward(self, glimpse: Tensor, state: Tensor) -> Tensor:
        """Both `(B, hidden)` to a state `(B, hidden)`."""
        new: Tensor = self.from_state(state) + self.from_glimpse(glimpse)
        return new.relu()


def loss(looked: Looked, labels: Tensor, *, reinforce: float = 1.0) -> Tensor:
    """The paper's hybrid loss, a mean over the batch: each of its three terms reaches parameters of its own.

    Cross-entropy reaches glimpse, core and action network; REINFORCE, `-sum_t log p(l_t) (R - b_t)`, the location network; the squared
    error of `b_t` the baseline. The reward R is 1 if the likeliest class is right, else 0.

    Args:
        looked: What the model gave in training mode.
        labels: The right classes, `(B,)`.
        reinforce: Weight of the second term: a factor of the location network's learning rate and nothing else.
    """
    reward = (looked.logits.detach().argmax(1) == labels).to(looked.baselines.dtype)[:, None].expand_as(looked.baselines)
    policy = score_function(
        -reward[:, 0],
        looked.log_probabilities,
        torch.zeros_like(looked.log_probabilities),  # the entropy of a fixed deviation cannot be learned
        baseline=-looked.baselines,  # what was expected anyway teaches nothing, and is noise
    )
    return (
        nn.functional.cross_entropy(looked.logits, labels) + reinforce * policy + nn.functional.mse_loss(looked.baselines, reward)
    )
