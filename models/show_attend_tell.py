"""Show, attend and tell, to read from top to bottom: a caption is written word by word, and each word looks at the picture first.

Xu et al., "Show, Attend and Tell: Neural Image Caption Generation with Visual Attention", ICML 2015, arXiv:1502.03044. With `soft`
attention a word sees the mean of all places, weighted by `alpha`, and all is learned by backpropagation. With `hard` attention it sees one
place, drawn with the probabilities `alpha`, and where to look is learned by REINFORCE, or through a Gumbel straight-through draw. `uniform`
is the baseline that cannot choose. Captions go through the decoder packed: a caption that is over takes no further step.

Follows the authors' code where it differs from the paper: a tanh and dropout before the last layer. Differs from both: one layer each in
the networks of the first state and of the scores, and learned coordinates are added to the features where `grid` is given (the authors'
VGG sees most of the picture from every place; features of a small field cannot say where they are).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from visattn._support.checks import one_of
from visattn.errors import OptionError, ShapeError
from visattn.nn import HardAttention, SoftAttention, doubly_stochastic, reinforce
from visattn.nn.decoder.soft_hard import Reduction

Attention = Literal["soft", "hard", "uniform"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
Estimator = Literal["reinforce", "gumbel"]
Cost = Literal["mean", "sum"]
END, UNKNOWN = 0, 1  # the first two words of every vocabulary
State = tuple[Tensor, Tensor]  # h and c of the LSTM, each (B, state)


class Seen(NamedTuple):
    """A picture as the decoder sees it; L places."""

    features: Tensor  # (B, L, D)
    keys: Tensor  # (B, L, width): what the attention needs of them at every step
    grid: tuple[int, int]  # rows and columns of the places


class Step(NamedTuple):
    """What one step gives."""

    logits: Tensor  # (B, words)
    alpha: Tensor  # (B, L): where the word looked
    beta: Tensor  # (B,): how much of what it saw was let through
    taken: Tensor  # (B, L): what was seen: one place of hard attention, else alpha
    log_probability: Tensor  # (B,): of the place taken
    entropy: Tensor  # (B,): of alpha, in nats


class Told(NamedTuple):
    """A whole caption: the fields of `Step` with an axis T, 0 behind a caption's end, and which steps count."""

    logits: Tensor  # (B, T, words)
    alpha: Tensor  # (B, T, L)
    beta: Tensor  # (B, T)
    taken: Tensor  # (B, T, L)
    log_probability: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    steps: Tensor  # (B, T), boolean
    grid: tuple[int, int]


class ShowAttendTell(nn.Module):
    """Image `(B, C, H, W)` and words so far to the next word.

    `alpha_t` of features `a` and `h_{t-1}`; `z_t = beta_t sum_i alpha_ti a_i` with the gate `beta_t = sigmoid(w . h_{t-1} + b)`, a scalar;
    `h_t = LSTM([E y_{t-1}; z_t], h_{t-1})`; `p(y_t) = softmax(L_o dropout(tanh(E y_{t-1} + L_h h_t + L_z z_t)))`; `h_0` and `c_0` are each
    `tanh(W mean_i a_i + b)`.
    """

    baseline: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        channels: int,
        words: int,
        *,
        attention: Attention = "soft",
        embedding: int = 512,
        state: int = 512,
        width: int | None = None,
        dropout: float = 0.5,
        word_dropout: float = 0.0,
        grid: tuple[int, int] | None = None,
        temperature: float = 1.0,
    ) -> None:
        """Build with PyTorch's initial values.

        Args:
            encoder: From images to features `(B, D, rows, columns)`.
            channels: D.
            words: Size of the vocabulary, `END` and `UNKNOWN` among them.
            attention: `soft`, `hard` or `uniform`.
            embedding: Width of a word, and of the layer before the last.
            state: Width of the LSTM's state.
            width: Of the hidden layer of the scores, by default D.
            dropout: Before the last layer.
            word_dropout: Probability, in training, that the word before is hidden: what is said next must then be seen, not guessed
                from the words so far (Bowman et al., "Generating Sentences from a Continuous Space", CoNLL 2016, arXiv:1511.06349).
            grid: Rows and columns of the features, for learned coordinates; none by default.
            temperature: Of Gumbel draws.

        Raises:
            OptionError: If the attention is unknown.
        """
        super().__init__()
        one_of(attention, ATTENTIONS, "attention")
        self.attention, self.words, self.channels = attention, words, channels
        self.encoder, self.word_dropout = encoder, word_dropout
        self.row = nn.Parameter(0.02 * torch.randn(channels, grid[0], 1)) if grid else None
        self.column = nn.Parameter(0.02 * torch.randn(channels, 1, grid[1])) if grid else None
        self.first_h, self.first_c = nn.Linear(channels, state), nn.Linear(channels, state)
        self.look = (
            HardAttention(channels, state, width=width, evaluation="argmax", temperature=temperature)
            if attention == "hard"
            else SoftAttention(channels, state, width=width)
            if attention == "soft"
            else None
        )
        self.gate = nn.Linear(state, 1)
        self.embed = nn.Embedding(words + 1, embedding, padding_idx=words)  # the last is 0: before the first word there is none
        self.lstm = nn.LSTMCell(embedding + channels, state)
        self.from_state, self.from_seen = nn.Linear(state, embedding), nn.Linear(channels, embedding, bias=False)
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(embedding, words)
        self.register_buffer("baseline", torch.zeros(()))  # running mean of costs, for REINFORCE

    @property
    def start(self) -> int:
        """What stands for the word before the first."""
        return self.words

    def encode(self, images: Tensor) -> Seen:
        """The features of images, and what the attention needs of them.

        Raises:
            ShapeError: If the encoder gives another shape.
        """
        return self.look_at(self.encoder(images))

    def look_at(self, maps: Tensor) -> Seen:
        """The same of what the encoder gave, `(B, D, rows, columns)`.

        Raises:
            ShapeError: If the shape is another.
        """
        if maps.ndim != 4 or maps.shape[1] != self.channels:
            raise ShapeError(f"the encoder must give (B, {self.channels}, rows, columns), got {tuple(maps.shape)}.")
        if self.row is not None and self.column is not None:
            if maps.shape[2:] != (self.row.shape[1], self.column.shape[2]):
                grid = f"{self.row.shape[1]} x {self.column.shape[2]}"
                raise ShapeError(
                    f"coordinates are of {grid} places, the encoder gave {tuple(maps.shape[2:])}. Keep the input's size."
                )
            maps = maps + self.row + self.column
        features = maps.flatten(2).mT
        return Seen(features, self.look.keys(features) if self.look else features, (maps.shape[2], maps.shape[3]))

    def begin(self, seen: Seen) -> State:
        """The state before the first word."""
        mean = seen.features.mean(1)
        return self.first_h(mean).tanh(), self.first_c(mean).tanh()

    def step(
        self, seen: Seen, state: State, before: Tensor, *, how: str | None = None, places: Tensor | None = None
    ) -> tuple[Step, State]:
        """One word.

        Args:
            seen: Of B images.
            state: Before the word.
            before: The words before it, `(B,)`; `start` for the first.
            how: What hard attention takes, see `HardAttention`; by default a draw in training, else the likeliest place.
            places: The places that hard attention takes, `(B,)`, in the place of that.
        """
        context, *looked = self._looked(seen, state[0], how, places)
        beta = self.gate(state[0]).sigmoid()  # (B, 1)
        context = beta * context
        word = self.embed(before)
        state = self.lstm(torch.cat((word, context), 1), state)
        hidden = (word + self.from_state(state[0]) + self.from_seen(context)).tanh()
        alpha, taken, log_probability, entropy = looked
        return Step(self.last(self.dropout(hidden)), alpha, beta[:, 0], taken, log_probability, entropy), state

    def _looked(self, seen: Seen, h: Tensor, how: str | None, places: Tensor | None) -> tuple[Tensor, ...]:
        """Context, alpha, what was taken, its log-probability and the entropy."""
        if isinstance(self.look, HardAttention):
            return tuple(self.look(seen.features, h, seen.keys, how, places))
        if self.look is not None:
            context, alpha = self.look(seen.features, h, seen.keys)
        else:
            context, alpha = seen.features.mean(1), torch.full_like(seen.features[..., 0], 1 / seen.features.shape[1])
        entropy = -torch.special.xlogy(alpha.detach(), alpha.detach()).sum(1)
        return context, alpha, alpha.detach(), torch.zeros_like(entropy), entropy

    def forward(
        self, images: Tensor, captions: Tensor, lengths: Tensor, *, how: str | None = None, places: Tensor | None = None
    ) -> Told:
        """Tell captions that are given: each word is predicted from the true ones before it.

        Args:
            images: `(B, C, H, W)`.
            captions: Words, `(B, T)`, each caption with `END` at its end and anything behind it.
            lengths: Words of each caption with its `END`, `(B,)`, 1 to T.
            how: See `step`; one choice for the whole batch.
            places: `(B, T)`: the places that hard attention takes.
        """
        return self.tell(self.encode(images), captions, lengths, how=how, places=places)

    def tell(
        self, seen: Seen, captions: Tensor, lengths: Tensor, *, how: str | None = None, places: Tensor | None = None
    ) -> Told:
        """As `forward`, of pictures that were encoded."""
        lengths = lengths.cpu()
        packed = pack_padded_sequence(captions, lengths, batch_first=True, enforce_sorted=False)
        order, sizes = packed.sorted_indices, packed.batch_sizes.tolist()  # captions from the longest to the shortest
        seen = Seen(seen.features[order], seen.keys[order], seen.grid)
        before = F.pad(captions[order, :-1], (1, 0), value=self.start)
        if self.training and self.word_dropout:
            before = before.masked_fill(torch.rand(before.shape, device=before.device) < self.word_dropout, self.start)
        places = places[order] if places is not None else None
        state, steps = self.begin(seen), []
        for t, running in enumerate(sizes):
            seen = Seen(seen.features[:running], seen.keys[:running], seen.grid)
            state = state[0][:running], state[1][:running]
            given = places[:running, t] if places is not None else None
            step, state = self.step(seen, state, before[:running, t], how=how, places=given)
            steps.append(step)
        total = captions.shape[1]

        def whole(parts: tuple[Tensor, ...]) -> Tensor:
            sequence = PackedSequence(torch.cat(parts), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
            return pad_packed_sequence(sequence, batch_first=True, total_length=total)[0]

        counted = torch.arange(total) < lengths[:, None]
        fields = {name: whole(tuple(getattr(step, name) for step in steps)) for name in Step._fields}
        return Told(**fields, steps=counted.to(captions.device), grid=seen.grid)


@dataclass(frozen=True)
class Objective:
    """The constants of the loss; the defaults are the authors' code's.

    All terms are means over the batch, as in the paper. A batch is what one process takes at once: accumulated parts and several
    processes each choose `how`, know their own longest caption and `B` of `arctic`, and move the running mean. The authors' code leaves
    `1 / B` out of what REINFORCE sends to `alpha`: multiply `reward` and `entropy` by the batch for that.

    Attributes:
        regularizer: Weight of the doubly stochastic term.
        reduction: Its normalization, see `visattn.nn.doubly_stochastic`; that of the paper.
        estimator: How hard attention learns where to look: `reinforce` or `gumbel`.
        semi_sampling: Probability, for a whole batch, that hard attention takes the expected context in the place of a draw.
        reward: Weight `lambda_r` of REINFORCE.
        entropy: Weight `lambda_e` of the entropy of `alpha`.
        decay: Of the running mean of costs that is the baseline; 1 keeps it at 0.
        cost: Of a caption in REINFORCE: the `mean` over the batch's longest caption, as in the authors' code, or the `sum` over its words,
            for which REINFORCE, with `reward=1`, `entropy=0`, `semi_sampling=0` and `regularizer=0`, has no bias.
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
        """Refuse what cannot be meant."""
        one_of(self.reduction, get_args(Reduction), "reduction")
        one_of(self.estimator, get_args(Estimator), "estimator")
        one_of(self.cost, get_args(Cost), "cost")
        if not (0 <= self.semi_sampling <= 1 and 0 <= self.decay <= 1):
            raise OptionError(f"semi_sampling and decay must lie in [0, 1], got {self.semi_sampling:g} and {self.decay:g}.")

    def how(self) -> str:
        """What hard attention takes in the next batch; one draw for all of it."""
        if float(torch.rand(())) < self.semi_sampling:
            return "expected"
        return "gumbel" if self.estimator == "gumbel" else "sample"


def loss(model: ShowAttendTell, told: Told, captions: Tensor, objective: Objective) -> Tensor:
    """The loss of a batch: a mean over captions of the negative log-likelihood of their words, and what steers the attention.

    In training the running mean of costs takes this batch in, after it was used.

    Args:
        model: What told.
        told: Of this batch.
        captions: `(B, T)`, as the model was given.
        objective: The constants.
    """
    cost = costs(told, captions)
    total = cost.mean() + objective.regularizer * doubly_stochastic(told.alpha, told.steps, reduction=objective.reduction)
    if model.attention != "hard":
        return total
    rewarded = cost.detach() / (told.steps.sum(1).max() if objective.cost == "mean" else 1)
    learned = objective.reward if objective.estimator == "reinforce" else 0.0
    total = total + reinforce(
        rewarded,
        told.log_probability,
        told.entropy,
        baseline=model.baseline.clone(),
        steps=told.steps,
        strength=learned,
        entropy_strength=objective.entropy,
    )
    if model.training:
        model.baseline.lerp_(rewarded.mean().to(model.baseline), 1 - objective.decay)
    return total


def costs(told: Told, captions: Tensor) -> Tensor:
    """The negative log-likelihood of each caption, `(B,)`, in nats."""
    logits = told.logits if told.logits.dtype == torch.float64 else told.logits.float()
    words = captions.masked_fill(~told.steps, END)  # what stands behind an end may be anything
    each = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none").view_as(captions)
    return each.masked_fill(~told.steps, 0).sum(1)
