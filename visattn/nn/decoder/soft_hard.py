"""Where a decoder looks at each step: at a mean of all places, or at one.

In: features `(B, L, D)` of L places and a state `(B, n)`. Out: a context `(B, D)` and the weights `(B, L)`. Words are not known here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.types import How
from visattn.errors import OptionError, ShapeError
from visattn.nn.shapes import at_least, check_tokens, is_traced, shape_text

Reduction = Literal["paper", "arctic", "mean"]

Evaluation = Literal["expected", "argmax"]


class _Alignment(nn.Module):
    """The network that scores places; see `SoftAttention`."""

    def __init__(self, channels: int, state_width: int, *, width: int | None = None) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        self.channels, self.state_width = at_least("channels", channels), at_least("state_width", state_width)
        width = channels if width is None else at_least("width", width)
        self.feature = nn.Linear(channels, width)
        self.state = nn.Linear(state_width, width, bias=False)
        self.score = nn.Linear(width, 1)

    def keys(self, features: Tensor) -> Tensor:
        """What of the features the scores need: `(B, L, width)`."""
        check_tokens(self, features, self.channels)
        keys: Tensor = self.feature(features)
        return keys

    def _log_alpha(self, features: Tensor, state: Tensor, keys: Tensor | None) -> Tensor:
        check_tokens(self, features, self.channels)
        if not is_traced(state) and (
            state.ndim != 2 or state.shape[1] != self.state_width or state.shape[0] != features.shape[0]
        ):
            wanted = f"({features.shape[0]}, {self.state_width})"
            raise ShapeError(
                f"the state of {type(self).__name__} must be {wanted}, got {shape_text(state)}. One step is given at a time."
            )
        keys = self.keys(features) if keys is None else keys
        scores: Tensor = self.score((keys + self.state(state)[:, None]).tanh()).squeeze(-1)  # (B, L)
        return scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))  # sums of alpha count


class SoftAttention(_Alignment):
    """Soft attention: the context is the mean of all places, weighted by how they fit the state.

    `e_i = u . tanh(W_a a_i + W_h h + b) + c`, `alpha = softmax(e)`, `z = sum_i alpha_i a_i`.

    Args:
        channels: D, of the features.
        state_width: n, of the decoder's state.
        width: Of the hidden layer, by default D.

    Shape:
        Features `(B, L, D)` and state `(B, n)` to the context, `(B, D)`, and `alpha`, `(B, L)`. What `keys(features)` gives may be
        passed as `keys`, so that a decoder makes it once for all its steps.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward, if a shape is another.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044. Differs: the authors' script for COCO has one more layer
        with a tanh in the network of the scores. The gate on the context belongs to the decoder.
    """

    def forward(self, features: Tensor, state: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Look everywhere."""
        alpha = self._log_alpha(features, state, keys).exp()
        return _mean(alpha, features), alpha


class Glimpse(NamedTuple):
    """What hard attention took in one step.

    Attributes:
        context: `(B, D)`.
        alpha: `(B, L)`, the probabilities of the places.
        taken: `(B, L)`, 1 at the place that was taken; `alpha` itself where the mean was. No gradient.
        log_probability: `(B,)`, of what was taken, `sum_i taken_i log alpha_i`; of a mean its gradient is 0.
        entropy: `(B,)`, of `alpha`.
    """

    context: Tensor
    alpha: Tensor
    taken: Tensor
    log_probability: Tensor
    entropy: Tensor


HOWS: tuple[How, ...] = get_args(How)


class HardAttention(_Alignment):
    """Hard attention: the context is one place, drawn with the probabilities `alpha` of soft attention.

    No gradient flows through the draw: `reinforce` makes one of the log-probabilities. With `how="gumbel"` the draw is that of the
    largest `log alpha + noise`, which has the same probabilities, and its gradient is that of `softmax((log alpha + noise) / temperature)`:
    biased, but of little noise.

    Args:
        channels: D, of the features.
        state_width: n, of the decoder's state.
        width: Of the hidden layer, by default D.
        evaluation: What is taken in evaluation mode: the `expected` context, that of soft attention, or the place of the largest
            `alpha`.
        temperature: Of `gumbel`, above 0.

    Shape:
        Features `(B, L, D)` and state `(B, n)` to a `Glimpse`, whose first two are context and `alpha`. `how` chooses for one step;
        the authors take the mean in the place of a draw for half of all sequences. `places`, `(B,)`, are taken in the place of a draw.

    Raises:
        OptionError: If a width is below 1, `evaluation` or `how` is unknown, or the temperature not positive.
        ShapeError: In the forward, if a shape is another.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044. `gumbel`: Jang et al., "Categorical Reparameterization with
        Gumbel-Softmax", ICLR 2017, arXiv:1611.01144.
    """

    def __init__(
        self,
        channels: int,
        state_width: int,
        *,
        width: int | None = None,
        evaluation: Evaluation = "expected",
        temperature: float = 1.0,
    ) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__(channels, state_width, width=width)
        one_of(evaluation, get_args(Evaluation), "evaluation of HardAttention")
        if not temperature > 0:
            raise OptionError(f"the temperature of HardAttention must be above 0, got {temperature:g}. The usual one is 1.")
        self.evaluation: How = evaluation
        self.temperature = temperature

    def forward(
        self,
        features: Tensor,
        state: Tensor,
        keys: Tensor | None = None,
        how: How | None = None,
        places: Tensor | None = None,
    ) -> Glimpse:
        """Look at one place."""
        how = how or ("sample" if self.training else self.evaluation)
        one_of(how, HOWS, "way to take a place")
        log_alpha = self._log_alpha(features, state, keys)
        alpha = log_alpha.exp()
        if places is not None:
            taken = _one_hot(places, alpha)
        elif how == "gumbel":
            taken = F.gumbel_softmax(log_alpha, self.temperature, hard=True)
        elif how == "expected":
            taken = alpha
        else:
            taken = _one_hot(torch.multinomial(alpha.detach(), 1)[:, 0] if how == "sample" else alpha.argmax(-1), alpha)
        log_probability = (taken.detach() * log_alpha).sum(-1)
        entropy = -(alpha * log_alpha).sum(-1)
        return Glimpse(_mean(taken, features), alpha, taken.detach(), log_probability, entropy)


def reinforce(
    cost: Tensor,
    log_probability: Tensor,
    entropy: Tensor,
    *,
    baseline: Tensor | float = 0.0,
    steps: Tensor | None = None,
    strength: float = 1.0,
    entropy_strength: float = 0.0,
) -> Tensor:
    """A loss whose gradient, on average over draws, is that of the expected cost with respect to where hard attention looks.

    `mean_B sum_T [strength (cost - baseline) log p(s_t) - entropy_strength H(s_t)]`; add it to the cost itself, which trains what
    comes behind the context. Any baseline that does not depend on the draw leaves the mean of the gradient as it is; the running
    mean of costs makes it much less noisy.

    Args:
        cost: `(B,)`, of each sequence, such as the negative log-likelihood of its words. No gradient is sent into it.
        log_probability: `(B, T)`, of the places taken.
        entropy: `(B, T)`.
        baseline: A number, one for each sequence, `(B,)`, or for each of its steps, `(B, T)`. The authors' is
            `0.9 b + 0.1 mean(cost)`, from batch to batch.
        steps: Boolean, `(B, T)`, True where a step counts; all by default.
        strength: The paper's `lambda_r`; 0.1 in the authors' code.
        entropy_strength: The paper's `lambda_e`; 0.002 in the authors' code.

    Returns:
        A number.

    Raises:
        OptionError: If the steps are not boolean.
        ShapeError: If a shape is another.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044. Differs: the authors' code averages each cost over steps,
        padding among them.
    """
    shape = log_probability.shape
    if log_probability.ndim != 2 or entropy.shape != shape or cost.shape != shape[:1]:
        got = f"{shape_text(cost)}, {shape_text(log_probability)} and {shape_text(entropy)}"
        raise ShapeError(f"costs must be (B,), log-probabilities and entropies (B, T), got {got}. Stack steps in axis 1.")
    if isinstance(baseline, Tensor) and baseline.shape not in ((), shape[:1], shape):
        raise ShapeError(f"the baseline must be a number, (B,) or (B, T) = {tuple(shape)}, got {shape_text(baseline)}.")
    _check_steps(steps, shape)
    expected = baseline[:, None] if isinstance(baseline, Tensor) and baseline.ndim == 1 else baseline
    advantage = (cost[:, None] - expected).detach()  # (B, 1) or (B, T)
    terms = strength * advantage * log_probability - entropy_strength * entropy
    if steps is not None:
        terms = terms.masked_fill(~steps, 0)
    return terms.sum(1).mean()


def doubly_stochastic(alphas: Tensor, steps: Tensor | None = None, *, reduction: Reduction = "paper") -> Tensor:
    """How far a decoder is from looking at every place equally often: `sum_i (1 - sum_t alpha_ti)^2`.

    Args:
        alphas: `(B, T, L)`.
        steps: Boolean, `(B, T)`, True where a step counts; all by default, as in the authors' code, which counts padding too.
        reduction: `paper`: the sum over places, and the mean over the batch. `arctic`, the authors' code: the mean over places and the
            sum over the batch, so it grows with the batch. `mean`: the mean over both, as other implementations.

    Returns:
        A number, at least 0; the paper adds it to the loss once.

    Raises:
        OptionError: If the reduction is unknown or the steps are not boolean.
        ShapeError: If a shape is another.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044.
    """
    one_of(reduction, get_args(Reduction), "reduction of doubly_stochastic")
    if alphas.ndim != 3:
        raise ShapeError(f"alphas must be (B, T, L), got {shape_text(alphas)}. Stack the weights of each step in axis 1.")
    _check_steps(steps, alphas.shape[:2])
    if steps is not None:
        alphas = alphas.masked_fill(~steps[..., None], 0)
    missing = (1 - alphas.sum(1)).square()  # (B, L)
    if reduction == "mean":
        return missing.mean()
    return missing.sum(1).mean() if reduction == "paper" else missing.mean(1).sum()


def _one_hot(places: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter(1, places[:, None], 1.0)


def _mean(weights: Tensor, features: Tensor) -> Tensor:
    return (weights.to(features.dtype)[:, None] @ features)[:, 0]


def _check_steps(steps: Tensor | None, shape: torch.Size) -> None:
    if steps is None:
        return
    if steps.dtype != torch.bool:
        raise OptionError(f"steps must be boolean, True where a step counts, got {steps.dtype}. Use steps.bool().")
    if steps.shape != shape:
        raise ShapeError(
            f"steps must be (B, T) = {tuple(shape)}, got {shape_text(steps)}. One number is for each step of a sequence."
        )
