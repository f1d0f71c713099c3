"""Global context blocks (GCNet)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from visattn._support.checks import at_least, one_of
from visattn._support.publish import publish
from visattn.errors import OptionError
from visattn.nn.shape_checks import bottleneck, check_maps

Fusion = Literal["add", "scale"]


class GlobalContext(nn.Module):
    """Global context block: attention pools the map into one context vector, which is transformed and added to every position.

    `a = softmax_n(w x_n + b)`, `c = sum_n a_n x_n`, `t = W2 relu(LN(W1 c + b1)) + b2`; `y = x + t`, or `y = x sigmoid(t)`. Place it after
    the last 1 x 1 convolution of a block, before the addition.

    The last layer is initialized to zero: at first `add` is the identity and `scale` halves its input.

    Args:
        channels: Number of channels, C.
        reduction: Reduction ratio. The bottleneck has `C // reduction` channels, at least 2: the layer norm of one number is constant.
        width: Number of channels in the bottleneck; overrides `reduction`.
        fusion: `add`: add the context. `scale`: multiply by the sigmoid of the context.
        eps: Epsilon of the layer norm; timm uses 1e-6.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`; with `need_weights` also `a`, `(B, 1, 1, H * W)`, which sums to 1.

    Publishes:
        With `scale`: `channel_gate`, `(B, C)`, in `(0, 1)`. With `add`: nothing, because there is no gate.

    Raises:
        OptionError: If the width is below 2, `fusion` is unknown or `eps` is not above 0.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`.

    Reference:
        Cao et al., "GCNet: Non-local Networks Meet Squeeze-Excitation Networks and Beyond", ICCVW 2019, arXiv:1904.11492, whose best
        results on COCO use a reduction of 4. timm's module uses `scale` by default and an epsilon of 1e-6 (`eps`). It does not start as the
        identity, because it keeps a bias.
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
        """Build with zeros in the last layer and PyTorch's default initialization elsewhere."""
        super().__init__()
        one_of(fusion, get_args(Fusion), "fusion of GlobalContext")
        if not eps > 0:
            raise OptionError(f"eps of GlobalContext must be above 0, got {eps!r}. The authors use 1e-5, timm uses 1e-6.")
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
        """Add the context to every position, or scale the channels by its gate."""
        check_maps(self, x, self.channels)
        weights = self.score(x).flatten(2).softmax(-1)  # (B, 1, H * W)
        context = (weights @ x.flatten(2).transpose(1, 2)).transpose(1, 2).unsqueeze(3)  # (B, C, 1, 1)
        change: Tensor = self.fc2(self.act(self.norm(self.fc1(context))))  # (B, C, 1, 1)
        if self.fusion == "add":
            y = x + change
        else:
            gate = change.sigmoid()
            publish(self, "channel_gate", gate)
            y = x * gate
        return (y, weights.unsqueeze(1)) if need_weights else y
