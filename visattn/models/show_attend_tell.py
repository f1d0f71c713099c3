"""Show, attend and tell: an image captioner that generates word by word and attends to the image before each word.

Xu et al., "Show, Attend and Tell: Neural Image Caption Generation with Visual Attention", ICML 2015, arXiv:1502.03044. With `soft`
attention the context is the mean of all locations, weighted by `alpha`, and backpropagation trains everything. With `hard` attention the
context is a single location, sampled with the probabilities `alpha`; REINFORCE or a Gumbel straight-through estimator trains the choice.
`local` attention is soft attention in a window around a location that the decoder predicts (Luong et al., arXiv:1508.04025).
`uniform` attention is a baseline without a choice: all weights are equal. Captions are packed: a finished caption takes no further steps.

Where the authors' code differs from the paper, this follows the code: a tanh and dropout before the last layer. Differs from both: the
networks of the initial state and of the scores have one layer each. Two options are ours. With `first="learned"` the initial state does not
depend on the image, so that all the decoder knows of it comes from where it looks. Learned coordinates are added to the features if `grid`
is given, because features with a small receptive field do not encode their location. The authors' VGG does not need them: there the
receptive field of every location covers most of the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from visattn._support.checks import one_of
from visattn.errors import OptionError, ShapeError
from visattn.nn import HardAttention, LocalPredictive, Reduction, SoftAttention, doubly_stochastic, reinforce

__all__ = [
    "ATTENTIONS",
    "END",
    "FIRSTS",
    "UNKNOWN",
    "Attention",
    "Cost",
    "DecoderOutput",
    "EncodedImage",
    "Estimator",
    "First",
    "LocalAttention",
    "Objective",
    "ShowAttendTell",
    "loss",
]

Attention = Literal["soft", "hard", "local", "uniform"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
First = Literal["mean", "learned"]
FIRSTS: tuple[First, ...] = get_args(First)
Estimator = Literal["reinforce", "gumbel"]
Cost = Literal["mean", "sum"]
END, UNKNOWN = 0, 1  # the first two tokens of every vocabulary
State = tuple[Tensor, Tensor]  # h and c of the LSTM, each (B, hidden)


class EncodedImage(NamedTuple):
    """Encoded images, the input of the decoder, with L locations each."""

    features: Tensor  # (B, L, D)
    keys: Tensor  # (B, L, attention): projected features, reused at every step
    grid: tuple[int, int]  # rows and columns of the feature map


class Step(NamedTuple):
    """Output of one decoder step."""

    logits: Tensor  # (B, words)
    alpha: Tensor  # (B, L): attention weights of the word
    beta: Tensor  # (B,): gate on the context
    taken: Tensor  # (B, L): one-hot location of hard attention, else alpha
    log_probability: Tensor  # (B,): of the selected location
    entropy: Tensor  # (B,): of alpha, in nats
    center: Tensor  # (B, 2): row and column around which local attention looks, as indices from 0; NaN for other attention


class DecoderOutput(NamedTuple):
    """Output for whole captions: the fields of `Step` with an axis T (0 after the end of a caption), and a mask of valid steps."""

    logits: Tensor  # (B, T, words)
    alpha: Tensor  # (B, T, L)
    beta: Tensor  # (B, T)
    taken: Tensor  # (B, T, L)
    log_probability: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    center: Tensor  # (B, T, 2)
    steps: Tensor  # (B, T), boolean
    grid: tuple[int, int]


class LocalAttention(SoftAttention):
    """Soft attention in a window around a location that the hidden state predicts.

    `alpha` is proportional to `exp(e_i - |i - p|^2 / (2 (D / 2)^2))` for locations at most D away from the center `p` along each axis, and
    0 elsewhere, with the scores `e` of `SoftAttention` and the center of `visattn.nn.LocalPredictive`. So `alpha` sums to 1.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025 (local-p). Differs:
        the paper does not renormalize, and scores by products.
    """

    def __init__(self, feature_dim: int, hidden_dim: int, radius: int, *, attention_dim: int | None = None) -> None:
        """Build with PyTorch's default initialization; the windows start near the middle."""
        super().__init__(feature_dim, hidden_dim, attention_dim=attention_dim)
        self.near = LocalPredictive(hidden_dim, radius, renormalize=True)

    def around(
        self, features: Tensor, state: Tensor, keys: Tensor | None, grid: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the context `(B, D)`, the weights `(B, L)` and the center `(B, 2)` for one hidden state `(B, n)`."""
        scores = self._log_alpha(features, state, keys)[:, None]  # logarithms of weights are scores, too
        centers = self.near.centers(state[:, None], grid)
        context, alpha = self.near.attend(scores, features, centers, grid)
        return context[:, 0], alpha[:, 0], centers[:, 0]


class ShowAttendTell(nn.Module):
    """Image captioner: predicts the next word from an image `(B, C, H, W)` and the words so far.

    The attention weights `alpha_t` depend on the features `a` and on `h_{t-1}`. The context is `z_t = beta_t sum_i alpha_ti a_i`, with the
    scalar gate `beta_t = sigmoid(w . h_{t-1} + b)`. Then `h_t = LSTM([E y_{t-1}; z_t], h_{t-1})` and
    `p(y_t) = softmax(L_o dropout(tanh(E y_{t-1} + L_h h_t + L_z z_t)))`. `h_0` and `c_0` are each `tanh(W mean_i a_i + b)`, or with
    `first="learned"` each `tanh(b)`.
    """

    baseline: Tensor
    first_h: Any  # a layer, or a parameter
    first_c: Any

    def __init__(
        self,
        encoder: nn.Module,
        feature_dim: int,
        vocab_size: int,
        *,
        attention: Attention = "soft",
        embed_dim: int = 512,
        hidden_dim: int = 512,
        attention_dim: int | None = None,
        dropout: float = 0.5,
        word_dropout: float = 0.0,
        grid: tuple[int, int] | None = None,
        temperature: float = 1.0,
        first: First = "mean",
        radius: int = 2,
    ) -> None:
        """Build with PyTorch's default initialization.

        Args:
            encoder: Module from images to features `(B, D, rows, columns)`.
            feature_dim: Number of channels of the features, D.
            vocab_size: Size of the vocabulary, including `END` and `UNKNOWN`.
            attention: Type of attention: `soft`, `hard`, `local` or `uniform`.
            embed_dim: Width of a word embedding, and of the layer before the last.
            hidden_dim: Width of the LSTM's hidden state.
            attention_dim: Width of the hidden layer of the scoring network, D by default.
            dropout: Dropout probability before the last layer.
            word_dropout: Probability, in training, that the previous word is replaced by the start token. This forces the decoder to use
                the image rather than the previous words (Bowman et al., "Generating Sentences from a Continuous Space", CoNLL 2016,
                arXiv:1511.06349).
            grid: Rows and columns of the features, for learned coordinates; none by default.
            temperature: Temperature of Gumbel sampling.
            first: Initial state: from the mean of the features as in the paper, or `learned`, the same for every image, which begins at 0.
            radius: Half width of the window of local attention, in cells.

        Raises:
            OptionError: If the attention or `first` is unknown, or a number is too small.
        """
        super().__init__()
        one_of(attention, ATTENTIONS, "attention")
        one_of(first, FIRSTS, "first")
        self.attention, self.vocab_size, self.feature_dim = attention, vocab_size, feature_dim
        self.encoder, self.word_dropout = encoder, word_dropout
        self.row = nn.Parameter(0.02 * torch.randn(feature_dim, grid[0], 1)) if grid else None
        self.column = nn.Parameter(0.02 * torch.randn(feature_dim, 1, grid[1])) if grid else None
        self.first_h, self.first_c = (
            nn.Linear(feature_dim, hidden_dim) if first == "mean" else nn.Parameter(torch.zeros(hidden_dim)) for _ in "hc"
        )
        self.look = (
            HardAttention(feature_dim, hidden_dim, attention_dim=attention_dim, eval_mode="argmax", temperature=temperature)
            if attention == "hard"
            else SoftAttention(feature_dim, hidden_dim, attention_dim=attention_dim)
            if attention == "soft"
            else LocalAttention(feature_dim, hidden_dim, radius, attention_dim=attention_dim)
            if attention == "local"
            else None
        )
        self.gate = nn.Linear(hidden_dim, 1)
        self.embed = nn.Embedding(vocab_size + 1, embed_dim, padding_idx=vocab_size)  # the last row, of the start token, stays 0
        self.lstm = nn.LSTMCell(embed_dim + feature_dim, hidden_dim)
        self.from_state, self.from_seen = nn.Linear(hidden_dim, embed_dim), nn.Linear(feature_dim, embed_dim, bias=False)
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(embed_dim, vocab_size)
        self.register_buffer("baseline", torch.zeros(()))  # running mean of costs, for REINFORCE

    @property
    def start_token(self) -> int:
        """Index of the start token, the input of the first step."""
        return self.vocab_size

    def encode(self, images: Tensor) -> EncodedImage:
        """Encode images: compute their features and the projections that the attention needs.

        Raises:
            ShapeError: If the encoder returns another shape.
        """
        return self.encode_features(self.encoder(images))

    def encode_features(self, maps: Tensor) -> EncodedImage:
        """Prepare encoder outputs `(B, D, rows, columns)` for the decoder.

        Raises:
            ShapeError: If the shape is wrong.
        """
        if maps.ndim != 4 or maps.shape[1] != self.feature_dim:
            raise ShapeError(f"the encoder must return (B, {self.feature_dim}, rows, columns), got {tuple(maps.shape)}.")
        if self.row is not None and self.column is not None:
            if maps.shape[2:] != (self.row.shape[1], self.column.shape[2]):
                grid = f"{self.row.shape[1]} x {self.column.shape[2]}"
                raise ShapeError(
                    f"the coordinates are for a grid of {grid}, but the encoder returned {tuple(maps.shape[2:])}. Keep the input size."
                )
            maps = maps + self.row + self.column
        features = maps.flatten(2).mT  # (B, D, rows, columns) -> (B, L, D)
        return EncodedImage(features, self.look.keys(features) if self.look else features, (maps.shape[2], maps.shape[3]))

    def initial_state(self, encoded: EncodedImage) -> State:
        """Compute the initial hidden state from the mean of the features, or return the learned one for each image."""
        if isinstance(self.first_h, nn.Parameter):
            count = len(encoded.features)
            return self.first_h.tanh().expand(count, -1), self.first_c.tanh().expand(count, -1)
        mean = encoded.features.mean(1)
        return self.first_h(mean).tanh(), self.first_c(mean).tanh()

    def step(
        self,
        encoded: EncodedImage,
        state: State,
        previous: Tensor,
        *,
        sampling: str | None = None,
        locations: Tensor | None = None,
    ) -> tuple[Step, State]:
        """Run one decoder step.

        Args:
            encoded: Encoded images, B of them.
            state: Hidden state before the step.
            previous: Previous words, `(B,)`; `start_token` in the first step.
            sampling: Mode of hard attention, see `HardAttention`. By default it samples in training, and takes the most probable location
                otherwise.
            locations: Locations for hard attention, `(B,)`, instead of selecting them.
        """
        context, *looked = self._looked(encoded, state[0], sampling, locations)
        beta = self.gate(state[0]).sigmoid()  # (B, 1)
        context = beta * context  # (B, D)
        word = self.embed(previous)  # (B, embed)
        state = self.lstm(torch.cat((word, context), 1), state)
        hidden = (word + self.from_state(state[0]) + self.from_seen(context)).tanh()  # (B, embed)
        alpha, taken, log_probability, entropy, center = looked
        return Step(self.last(self.dropout(hidden)), alpha, beta[:, 0], taken, log_probability, entropy, center), state

    def _looked(self, encoded: EncodedImage, h: Tensor, sampling: str | None, locations: Tensor | None) -> tuple[Tensor, ...]:
        """Attend: return the context, alpha, the selection, its log-probability, the entropy and the center."""
        center = torch.full_like(encoded.features[:, 0, :1], torch.nan).expand(-1, 2)
        if isinstance(self.look, HardAttention):
            return *self.look(encoded.features, h, encoded.keys, sampling, locations), center
        if isinstance(self.look, LocalAttention):
            context, alpha, center = self.look.around(encoded.features, h, encoded.keys, encoded.grid)
        elif self.look is not None:
            context, alpha = self.look(encoded.features, h, encoded.keys)
        else:
            context, alpha = encoded.features.mean(1), torch.full_like(encoded.features[..., 0], 1 / encoded.features.shape[1])
        entropy = -torch.special.xlogy(alpha.detach(), alpha.detach()).sum(1)
        return context, alpha, alpha.detach(), torch.zeros_like(entropy), entropy, center

    def forward(
        self, images: Tensor, captions: Tensor, lengths: Tensor, *, sampling: str | None = None, locations: Tensor | None = None
    ) -> DecoderOutput:
        """Predict each word of given captions from the ground-truth words before it (teacher forcing).

        Args:
            images: Images, `(B, C, H, W)`.
            captions: Words, `(B, T)`. Each caption ends with `END`; what follows is ignored.
            lengths: Length of each caption including `END`, `(B,)`, from 1 to T.
            sampling: Mode of hard attention for the whole batch, see `step`.
            locations: Locations for hard attention, `(B, T)`, instead of selecting them.
        """
        return self.teacher_forcing(self.encode(images), captions, lengths, sampling=sampling, locations=locations)

    def teacher_forcing(
        self,
        encoded: EncodedImage,
        captions: Tensor,
        lengths: Tensor,
        *,
        sampling: str | None = None,
        locations: Tensor | None = None,
    ) -> DecoderOutput:
        """Run `forward` with images that are already encoded."""
        lengths = lengths.cpu()
        packed = pack_padded_sequence(captions, lengths, batch_first=True, enforce_sorted=False)
        order, sizes = packed.sorted_indices, packed.batch_sizes.tolist()  # longest caption first
        encoded = EncodedImage(encoded.features[order], encoded.keys[order], encoded.grid)
        previous = F.pad(captions[order, :-1], (1, 0), value=self.start_token)  # (B, T), shifted by one
        if self.training and self.word_dropout:
            previous = previous.masked_fill(
                torch.rand(previous.shape, device=previous.device) < self.word_dropout, self.start_token
            )
        locations = locations[order] if locations is not None else None
        state, steps = self.initial_state(encoded), []
        for t, running in enumerate(sizes):  # only the captions that are not finished
            encoded = EncodedImage(encoded.features[:running], encoded.keys[:running], encoded.grid)
            state = state[0][:running], state[1][:running]
            given = locations[:running, t] if locations is not None else None
            step, state = self.step(encoded, state, previous[:running, t], sampling=sampling, locations=given)
            steps.append(step)
        total = captions.shape[1]

        def whole(parts: tuple[Tensor, ...]) -> Tensor:
            sequence = PackedSequence(torch.cat(parts), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
            return pad_packed_sequence(sequence, batch_first=True, total_length=total)[0]

        counted = torch.arange(total) < lengths[:, None]
        fields = {name: whole(tuple(getattr(step, name) for step in steps)) for name in Step._fields}
        return DecoderOutput(**fields, steps=counted.to(captions.device), grid=encoded.grid)


@dataclass(frozen=True)
class Objective:
    """Hyperparameters of the loss; the defaults are those of the authors' code.

    All terms are means over the batch, as in the paper. A batch is what one process takes at once. With gradient accumulation or several
    processes, each micro-batch has its own `sampling`, longest caption and batch size for `arctic`, and each updates the running mean. The
    authors' code omits the factor `1 / B` in the REINFORCE gradient of `alpha`; multiply `reward` and `entropy` by the batch size to
    reproduce it.

    Attributes:
        regularizer: Weight of the doubly stochastic term.
        reduction: Normalization of that term, see `visattn.nn.doubly_stochastic`; the paper's by default.
        estimator: Gradient estimator of hard attention: `reinforce` or `gumbel`.
        semi_sampling: Probability, for a whole batch, that hard attention takes the expected context instead of sampling.
        reward: Weight of the REINFORCE term, `lambda_r`.
        entropy: Weight of the entropy of `alpha`, `lambda_e`.
        decay: Decay of the running mean of costs, which is the baseline; 1 keeps it at 0.
        cost: Cost of a caption in REINFORCE. `mean`: the sum over its words divided by the longest caption of the batch, as in the authors'
            code. `sum`: the sum over its words, for which REINFORCE is unbiased if `reward=1`, `entropy=0`, `semi_sampling=0` and
            `regularizer=0`.
    """

    regularizer: float = 1.0
    reduction: Reduction = "paper"
    estimator: Estimator = "reinforce"
    semi_sampling: float = 0.5
    reward: float = 0.1
    entropy: float = 0.002
    decay: float = 0.9
    cost: Cost = "mean"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        one_of(self.reduction, get_args(Reduction), "reduction")
        one_of(self.estimator, get_args(Estimator), "estimator")
        one_of(self.cost, get_args(Cost), "cost")
        if not (0 <= self.semi_sampling <= 1 and 0 <= self.decay <= 1):
            raise OptionError(f"semi_sampling and decay must lie in [0, 1], got {self.semi_sampling:g} and {self.decay:g}.")

    def sampling(self) -> str:
        """Draw the mode of hard attention for the next batch, the same for all its captions."""
        if float(torch.rand(())) < self.semi_sampling:
            return "expected"
        return "gumbel" if self.estimator == "gumbel" else "sample"


def loss(model: ShowAttendTell, decoded: DecoderOutput, captions: Tensor, objective: Objective) -> Tensor:
    """Compute the loss of a batch: the mean negative log-likelihood of its captions, and the terms that train the attention.

    In training, the running mean of costs is updated with this batch after it was used.

    Args:
        model: Captioner that decoded the batch. Its running mean of costs is updated in training mode.
        decoded: Output of the decoder for this batch.
        captions: Captions as passed to the model, `(B, T)`.
        objective: Hyperparameters of the loss.
    """
    cost = costs(decoded, captions)
    total = cost.mean() + objective.regularizer * doubly_stochastic(decoded.alpha, decoded.steps, reduction=objective.reduction)
    if model.attention != "hard":
        return total
    rewarded = cost.detach() / (decoded.steps.sum(1).max() if objective.cost == "mean" else 1)
    learned = objective.reward if objective.estimator == "reinforce" else 0.0
    total = total + reinforce(
        rewarded,
        decoded.log_probability,
        decoded.entropy,
        baseline=model.baseline.clone(),
        steps=decoded.steps,
        strength=learned,
        entropy_strength=objective.entropy,
    )
    if model.training:
        model.baseline.lerp_(rewarded.mean().to(model.baseline), 1 - objective.decay)
    return total


def costs(decoded: DecoderOutput, captions: Tensor) -> Tensor:
    """Compute the negative log-likelihood of each caption, `(B,)`, in nats."""
    logits = decoded.logits if decoded.logits.dtype == torch.float64 else decoded.logits.float()
    words = captions.masked_fill(~decoded.steps, END)  # the padding may hold any value
    each = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none").view_as(captions)  # (B, T)
    return each.masked_fill(~decoded.steps, 0).sum(1)
