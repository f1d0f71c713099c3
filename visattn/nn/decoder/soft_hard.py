"""Soft and hard attention for decoders: at each step, the context is a weighted mean of all locations or a single location.

Inputs are features `(B, L, D)` of L locations and a hidden state `(B, n)`. Outputs are a context `(B, D)` and the weights `(B, L)`. The
modules do not depend on words.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least, one_of
from visattn._support.types import Sampling
from visattn.errors import OptionError, ShapeError
from visattn.nn.shape_checks import check_tokens, is_traced, shape_text

Reduction = Literal["paper", "arctic", "mean"]

EvalMode = Literal["expected", "argmax"]


class _Alignment(nn.Module):
    """Network that scores locations; see `SoftAttention`."""

    def __init__(self, feature_dim: int, hidden_dim: int, *, attention_dim: int | None = None) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        self.feature_dim, self.hidden_dim = at_least("feature_dim", feature_dim), at_least("hidden_dim", hidden_dim)
        attention_dim = feature_dim if attention_dim is None else at_least("attention_dim", attention_dim)
        self.feature = nn.Linear(feature_dim, attention_dim)
        self.state = nn.Linear(hidden_dim, attention_dim, bias=False)
        self.score = nn.Linear(attention_dim, 1)

    def keys(self, features: Tensor) -> Tensor:
        """Project the features for scoring, `(B, L, attention_dim)`."""
        check_tokens(self, features, self.feature_dim)
        keys: Tensor = self.feature(features)
        return keys

    def _log_alpha(self, features: Tensor, state: Tensor, keys: Tensor | None) -> Tensor:
        check_tokens(self, features, self.feature_dim)
        if not is_traced(state) and (state.ndim != 2 or state.shape[1] != self.hidden_dim or state.shape[0] != features.shape[0]):
            wanted = f"({features.shape[0]}, {self.hidden_dim})"
            raise ShapeError(
                f"the hidden state for {type(self).__name__} must be {wanted}, got {shape_text(state)}. Pass one step at a time."
            )
        keys = self.keys(features) if keys is None else keys
        scores: Tensor = self.score((keys + self.state(state)[:, None]).tanh()).squeeze(-1)  # (B, L)
        return scores.log_softmax(
            -1, dtype=torch.promote_types(scores.dtype, torch.float32)
        )  # in float32: later terms sum alpha over steps


class SoftAttention(_Alignment):
    """Soft attention: the context is the mean of all locations, weighted by how well they match the hidden state.

    `e_i = u . tanh(W_a a_i + W_h h + b) + c`, `alpha = softmax(e)`, `z = sum_i alpha_i a_i`.

    Args:
        feature_dim: Width of the features, D.
        hidden_dim: Width of the decoder's hidden state, n.
        attention_dim: Width of the hidden layer of the scoring network, D by default.

    Shape:
        Features `(B, L, D)` and hidden state `(B, n)` to the context `(B, D)` and `alpha`, `(B, L)`. Optionally pass `keys=keys(features)`,
        which a decoder computes once for all steps.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward pass, if a shape is wrong.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044. Differs: the authors' script for COCO has one more layer with a
        tanh in the scoring network. The gate on the context is part of the decoder.
    """

    def forward(self, features: Tensor, state: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the context and the attention weights."""
        alpha = self._log_alpha(features, state, keys).exp()
        return _mean(alpha, features), alpha


class Glimpse(NamedTuple):
    """Output of one step of hard attention.

    Attributes:
        context: Context, `(B, D)`.
        alpha: Probabilities of the locations, `(B, L)`.
        taken: One-hot selected location, `(B, L)`; `alpha` itself if the expected context was taken. It has no gradient.
        log_probability: Log-probability of the selection, `sum_i taken_i log alpha_i`, `(B,)`. For the expected context its gradient is 0.
        entropy: Entropy of `alpha`, `(B,)`.
    """

    context: Tensor
    alpha: Tensor
    taken: Tensor
    log_probability: Tensor
    entropy: Tensor


SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)


class HardAttention(_Alignment):
    """Hard attention: the context is a single location, sampled with the probabilities `alpha` of soft attention.

    Sampling has no gradient; `reinforce` estimates one from the log-probabilities. `sampling="gumbel"` takes the location with the largest
    `log alpha + noise`, which has the same probabilities. Its gradient is that of `softmax((log alpha + noise) / temperature)`, which is
    biased but has low variance.

    Args:
        feature_dim: Width of the features, D.
        hidden_dim: Width of the decoder's hidden state, n.
        attention_dim: Width of the hidden layer of the scoring network, D by default.
        eval_mode: Context in evaluation mode. `expected`: the weighted mean, as in soft attention. `argmax`: the location with the largest
            `alpha`.
        temperature: Temperature of `gumbel`, above 0.

    Shape:
        Features `(B, L, D)` and hidden state `(B, n)` to a `Glimpse`, whose first two fields are the context and `alpha`. `sampling`
        overrides the mode of one step; the authors use the expected context instead of a sample for half of all sequences. `locations`,
        `(B,)`, prescribes the locations instead of sampling them.

    Raises:
        OptionError: If a width is below 1, `eval_mode` or `sampling` is unknown, or the temperature is not positive.
        ShapeError: In the forward pass, if a shape is wrong.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044. `gumbel`: Jang et al., "Categorical Reparameterization with
        Gumbel-Softmax", ICLR 2017, arXiv:1611.01144.
    """

    def __init__(
        self,
        feature_dim: int,
        hidden_dim: int,
        *,
        attention_dim: int | None = None,
        eval_mode: EvalMode = "expected",
        temperature: float = 1.0,
    ) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__(feature_dim, hidden_dim, attention_dim=attention_dim)
        one_of(eval_mode, get_args(EvalMode), "eval_mode of HardAttention")
        if not temperature > 0:
            raise OptionError(f"the temperature of HardAttention must be above 0, got {temperature:g}. The usual one is 1.")
        self.eval_mode: Sampling = eval_mode
        self.temperature = temperature

    def forward(
        self,
        features: Tensor,
        state: Tensor,
        keys: Tensor | None = None,
        sampling: Sampling | None = None,
        locations: Tensor | None = None,
    ) -> Glimpse:
        """Select one location and return its features as the context."""
        sampling = sampling or ("sample" if self.training else self.eval_mode)
        one_of(sampling, SAMPLINGS, "sampling")
        log_alpha = self._log_alpha(features, state, keys)  # (B, L)
        alpha = log_alpha.exp()
        if locations is not None:
            taken = _one_hot(locations, alpha)
        elif sampling == "gumbel":
            taken = F.gumbel_softmax(log_alpha, self.temperature, hard=True)
        elif sampling == "expected":
            taken = alpha
        else:
            taken = _one_hot(torch.multinomial(alpha.detach(), 1)[:, 0] if sampling == "sample" else alpha.argmax(-1), alpha)
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
    """Compute the REINFORCE loss of hard attention: averaged over samples, its gradient is that of the expected cost.

    `mean_B sum_T [strength (cost - baseline) log p(s_t) - entropy_strength H(s_t)]`. Add it to the cost itself, which trains the layers
    after the context. A baseline that does not depend on the sample leaves the expected gradient unchanged. The running mean of the costs
    reduces its variance a lot.

    Args:
        cost: Cost of each sequence, `(B,)`, such as the negative log-likelihood of its words. It gets no gradient.
        log_probability: Log-probabilities of the selected locations, `(B, T)`.
        entropy: Entropies of the location probabilities, `(B, T)`.
        baseline: Baseline of the cost: one number, one per sequence, `(B,)`, or one per step, `(B, T)`. The authors update theirs as
            `0.9 b + 0.1 mean(cost)` after each batch.
        steps: Boolean mask, `(B, T)`, True where a step counts; all steps by default.
        strength: Weight of the REINFORCE term, the paper's `lambda_r`; 0.1 in the authors' code.
        entropy_strength: Weight of the entropy term, the paper's `lambda_e`; 0.002 in the authors' code.

    Returns:
        The loss, a scalar.

    Raises:
        OptionError: If `steps` is not boolean.
        ShapeError: If a shape is wrong.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044. Differs: the authors' code averages each cost over its steps,
        padding included.
    """
    shape = log_probability.shape
    if log_probability.ndim != 2 or entropy.shape != shape or cost.shape != shape[:1]:
        got = f"{shape_text(cost)}, {shape_text(log_probability)} and {shape_text(entropy)}"
        raise ShapeError(f"costs must be (B,), log-probabilities and entropies (B, T), got {got}. Stack the steps along axis 1.")
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
    """Compute the doubly stochastic penalty, which encourages equal total attention on all locations: `sum_i (1 - sum_t alpha_ti)^2`.

    Args:
        alphas: Attention weights of all steps, `(B, T, L)`.
        steps: Boolean mask, `(B, T)`, True where a step counts. By default all steps count, as in the authors' code, which includes
            padding.
        reduction: `paper`: sum over locations, mean over the batch. `arctic`, the authors' code: mean over locations, sum over the batch,
            so it grows with the batch size. `mean`: mean over both, as in other implementations.

    Returns:
        The penalty, a scalar of at least 0. The paper adds it to the loss with weight 1.

    Raises:
        OptionError: If `reduction` is unknown or `steps` is not boolean.
        ShapeError: If a shape is wrong.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044.
    """
    one_of(reduction, get_args(Reduction), "reduction of doubly_stochastic")
    if alphas.ndim != 3:
        raise ShapeError(f"alphas must be (B, T, L), got {shape_text(alphas)}. Stack the weights of the steps along axis 1.")
    _check_steps(steps, alphas.shape[:2])
    if steps is not None:
        alphas = alphas.masked_fill(~steps[..., None], 0)
    missing = (1 - alphas.sum(1)).square()  # (B, L)
    if reduction == "mean":
        return missing.mean()
    return missing.sum(1).mean() if reduction == "paper" else missing.mean(1).sum()


def _one_hot(locations: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter(1, locations[:, None], 1.0)


def _mean(weights: Tensor, features: Tensor) -> Tensor:
    return (weights.to(features.dtype)[:, None] @ features)[:, 0]


def _check_steps(steps: Tensor | None, shape: torch.Size) -> None:
    if steps is None:
        return
    if steps.dtype != torch.bool:
        raise OptionError(f"steps must be boolean, True where a step counts, got {steps.dtype}. Use steps.bool().")
    if steps.shape != shape:
        raise ShapeError(f"steps must be (B, T) = {tuple(shape)}, got {shape_text(steps)}. Pass one flag per step.")
