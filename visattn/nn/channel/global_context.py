"""Global context blocks (GCNet)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.publish import publish
from visattn.errors import OptionError
from visattn.nn.shapes import at_least, bottleneck, check_maps

Fusion = Literal["add", "scale"]


class GlobalContext(nn.Module):
    """Global context: one attention over all places gives a mean of the map, which is transformed and added to every place.

    `a = softmax_n(w x_n + b)`, `c = sum_n a_n x_n`, `t = W2 relu(LN(W1 c + b1)) + b2`, `y = x + t`, or `y = x sigmoid(t)`. It belongs
    behind the last 1 x 1 convolution of a block, before the addition.

    The last layer starts at zero: `add` changes nothing at first, and `scale` halves.

    Args:
        channels: C.
        reduction: The bottleneck has `C // reduction` channels, at least 2: the layer norm of one number is a constant.
        width: The bottleneck's channels, in the place of `reduction`.
        fusion: `add` the context, or `scale` by its gate.
        eps: What the layer norm adds to the variance; timm's is 1e-6.

    Shape:
        `(B, C, H, W)` to the same; with `need_weights` also `a`, `(B, 1, 1, H * W)`, which sums to 1.

    Publishes:
        With `scale`: `channel_gate`, `(B, C)`, in `(0, 1)`. With `add` nothing is multiplied, so nothing is published.

    Raises:
        OptionError: If the width is below 2, the fusion unknown or `eps` not above 0.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`.

    Reference:
        Cao et al., "GCNet: Non-local Networks Meet Squeeze-Excitation Networks and Beyond", ICCVW 2019, arXiv:1904.11492, whose
        best results on COCO have a reduction of 4. timm's scales by default, norms with an epsilon of 1e-6 (`eps`), and does not
        start at the identity, since a bias remains.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        width: int | None = None,
        fusion: Fusion = "add",
        eps: float = 1e-5,
    ) -> None:
        """Build with zeros in the last layer, and PyTorch's initial values of a convolution elsewhere."""
        super().__init__()
        one_of(fusion, get_args(Fusion), "fusion of GlobalContext")
        if not eps > 0:
            raise OptionError(f"eps of GlobalContext must be above 0, got {eps!r}. The authors' is 1e-5, timm's 1e-6.")
        hidden = bottleneck(channels, reduction, width)
        hidden = max(2, hidden) if width is None else at_least("the width of the bottleneck", hidden, 2)
        self.channels, self.fusion = channels, fusion
        self.score = nn.Conv2d(channels, 1, 1)
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.norm = nn.LayerNorm((hidden, 1, 1), eps=eps)
        self.act = nn.ReLU()
        self.fc2 = nn.Conv2d(hidden, channels, 1)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Add the context to every place, or scale the channels by its gate."""
        check_maps(self, x, self.channels)
        weights = self.score(x).flatten(2).softmax(-1)  # (B, 1, H * W)
        context = (weights @ x.flatten(2).transpose(1, 2)).transpose(1, 2).unsqueeze(3)  # (B, C, 1, 1)
        change: Tensor = self.fc2(self.act(self.norm(self.fc1(context))))
        if self.fusion == "add":
            y = x + change
        else:
            gate = change.sigmoid()
            publish(self, "channel_gate", gate)
            y = x * gate
        return (y, weights.unsqueeze(1)) if need_weights else y
