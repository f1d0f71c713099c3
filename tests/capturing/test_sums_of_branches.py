"""Ways in which a branch is added to the stream: a term equals what the score loses without its branch, or the way is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn.core.methods.from_attention.contributions import parts_of
from visattn.core.pipeline.summing import with_terms
from visattn.errors import OptionError

WIDTH, HEADS, GRID = 24, 3, 4


class Adding(nn.Module):
    """One attention, which a function adds to the tokens, then another branch and a norm; the latter two can keep their values."""

    def __init__(self, add: Callable[[Adding, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.add = add
        self.stem, self.norm, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.qkv, self.out, self.other = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both, self.local = nn.Linear(2 * WIDTH, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.scale, self.token = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.kept: tuple[Tensor, Tensor] | None = None
        self.without = False
        self.last: tuple[Tensor, Tensor] = torch.empty(0), torch.empty(0)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(images), -1, -1), self.stem(images).flatten(2).mT], 1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        x = self.add(self, x, attended * 0 if self.without else attended)
        branch = self.other(x.tanh()) if self.kept is None else self.kept[0]
        x = x + branch
        if self.kept is None:
            self.last = branch, (x.var(-1, correction=0, keepdim=True) + self.norm.eps).sqrt()
            x = self.norm(x)
        else:
            x = (x - x.mean(-1, keepdim=True)) / self.kept[1] * self.norm.weight + self.norm.bias
        scores: Tensor = self.head(x[:, 0] + x[:, 1:].mean(1))
        return scores


def _locally(model: Adding, x: Tensor, a: Tensor) -> Tensor:
    cells = a[:, 1:].mT.reshape(len(a), WIDTH, GRID, GRID)
    return torch.cat([x[:, :1] + a[:, :1], x[:, 1:] + model.local(cells).flatten(2).mT], 1)


def _resized(model: Adding, x: Tensor, a: Tensor) -> Tensor:
    small = F.interpolate(a[:, 1:].mT.reshape(len(a), WIDTH, GRID, GRID), scale_factor=0.5, mode="bilinear")
    return x + F.pad(F.interpolate(small, size=(GRID, GRID), mode="bicubic").flatten(2).mT, (0, 0, 1, 0))


def _in_place(model: Adding, x: Tensor, a: Tensor) -> Tensor:
    x = x.clone()
    x += a
    return x


def _without_graph(model: Adding, x: Tensor, a: Tensor) -> Tensor:
    with torch.no_grad():
        return x + a


SUMS: dict[str, Callable[[Adding, Tensor, Tensor], Tensor]] = {
    "plus": lambda _, x, a: x + a,
    "minus": lambda _, x, a: x - a,
    "scaled": lambda _, x, a: x * 0.5 + 2 * a,
    "scaled by channel": lambda model, x, a: x + model.scale * a,
    "lerp": lambda _, x, a: torch.lerp(x, a, 0.3),
    "alpha": lambda _, x, a: torch.add(x, a, alpha=0.7),
    "stacked": lambda _, x, a: torch.stack([x, a]).sum(0),
    "concatenated": lambda model, x, a: x + model.both(torch.cat([x, a], -1)),
    "baddbmm": lambda _, x, a: torch.baddbmm(x, a, torch.eye(WIDTH, dtype=x.dtype)[None]),
    "einsum": lambda model, x, a: x + torch.einsum("bnd,ed->bne", a, model.both.weight[:, :WIDTH]),
    "convolution": _locally,
    "resized": _resized,
    "rolled": lambda _, x, a: x + a.roll(1, 1),
    "flipped": lambda _, x, a: x + a.flip(1),
    "cumulated": lambda _, x, a: x + a.cumsum(1),
    "in place": _in_place,
    "without a graph": _without_graph,
    "detached": lambda _, x, a: x + a.detach(),
    "both detached": lambda _, x, a: (x + a).detach(),
}
REFUSED: dict[str, Callable[[Adding, Tensor, Tensor], Tensor]] = {
    "maximum": lambda _, x, a: torch.maximum(x, a),
    "fft": lambda _, x, a: x + torch.fft.irfft(torch.fft.rfft(a, dim=-1), n=WIDTH, dim=-1),
    "activation": lambda _, x, a: x + a.relu(),
    "signs": lambda _, x, a: x + (a > 0).to(a.dtype),
    "largest": lambda _, x, a: x + F.one_hot(a.argmax(-1), WIDTH).to(a.dtype),
    "square": lambda _, x, a: x + a * a,
}


def made(add: Callable[[Adding, Tensor, Tensor], Tensor]) -> tuple[Adding, Tensor]:
    torch.manual_seed(0)
    model = Adding(add).double().eval().requires_grad_(requires_grad=False)
    return model, torch.rand(1, 3, 8 * GRID, 8 * GRID, dtype=torch.float64)


@pytest.mark.parametrize("name", SUMS)
def test_a_term_is_what_the_score_loses_without_its_branch(name: str) -> None:
    model, images = made(SUMS[name])
    plain = model(images)
    recording, output = with_terms(model, lambda: model(images))
    assert torch.equal(output, plain)
    terms, parts = parts_of(recording.gradients(output[0, 1]))
    assert abs(terms.difference) <= 1e-13 * terms.absolute
    (attention,) = (term for term in terms.terms if term.kind == "attention")
    branch, deviation = model.last
    model.kept, model.without = (branch.detach(), deviation.detach()), True
    loss = float(plain[0, 1] - model(images)[0, 1])
    assert attention.total == pytest.approx(loss, abs=1e-12)
    assert sum(float(part.patches.sum() + part.tokens.sum()) + part.bias for part in parts) == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_to_be_linear_is_refused(name: str) -> None:
    model, images = made(REFUSED[name])
    recording, output = with_terms(model, lambda: model(images))
    with pytest.raises(OptionError, match="not known to be linear and has no way around it"):
        parts_of(recording.gradients(output[0, 1]))
