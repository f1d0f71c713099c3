# mypy: disable-error-code="no-untyped-call"
"""Attention without a softmax, in many spellings, beside a softmax layer: it is listed as unseen. Gates and learned mixings are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.capturing.moving import image
from tests.samples import sampled
from visattn.core.capturing.following.sums import LINEAR, UNTRACED
from visattn.errors import OptionError

N, D = 96, 16


class Part(nn.Module):
    """Layer whose body is a function of itself and its tokens `(B, N, D)`."""

    def __init__(self, body: Callable[[Part, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = [body]
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.tokens, self.few, self.back, self.one = nn.Linear(N, N), nn.Linear(D, 4), nn.Linear(4, D), nn.Linear(D, 1)
        self.depthwise, self.spatial = nn.Conv2d(D, D, 3, padding=1, groups=D), nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, t: Tensor) -> Tensor:
        return self.body[0](self, t)


class Hybrid(nn.Module):
    """Model with a softmax layer before or behind another layer."""

    def __init__(self, body: Callable[[Part, Tensor], Tensor], softmax_first: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.second = nn.Conv2d(3, D, 4, 4), Part(body)
        self.softmax_first = softmax_first

    def attend(self, t: Tensor) -> Tensor:
        h = heads(t)
        return t + joined(F.scaled_dot_product_attention(h, h, h))

    def forward(self, x: Tensor) -> Tensor:
        t = self.embed(x).flatten(2).mT
        for layer in (self.attend, self.mixed) if self.softmax_first else (self.mixed, self.attend):
            t = layer(t)
        return t.mean(1)  # type: ignore[no-any-return]

    def mixed(self, t: Tensor) -> Tensor:
        return t + self.second(t)  # type: ignore[no-any-return]


def heads(t: Tensor) -> Tensor:
    split: Tensor = t.unflatten(-1, (2, D // 2))
    return split.transpose(1, 2)


def joined(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(2)


def each(of_one: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a product that is computed for each image and head apart."""

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [[of_one(q[b, h], k[b, h], v[b, h]) for h in range(2)] for b in range(len(q))]
        return torch.stack([torch.stack(row) for row in rows])

    return product


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": torch.relu,
    "exp": torch.exp,
    "identity": lambda x: x,
    "unit": lambda x: F.normalize(x, dim=-1),
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k, v: q @ (k.mT @ v),
    "values first": lambda q, k, v: ((v.mT @ k) @ q.mT).mT,
    "einsum": lambda q, k, v: torch.einsum("bhnd,bhde->bhne", q, torch.einsum("bhnd,bhne->bhde", k, v)),
    "einsum of three": lambda q, k, v: torch.einsum("bhnd,bhmd,bhme->bhne", q, k, v),
    "einsum of three, keys first": lambda q, k, v: torch.einsum("bhmd,bhme,bhnd->bhne", k, v, q),
    "bmm": lambda q, k, v: torch.bmm(q.flatten(0, 1), torch.bmm(k.flatten(0, 1).mT, v.flatten(0, 1))).view_as(v),
    "baddbmm": lambda q, k, v: torch.baddbmm(
        torch.zeros(1), q.flatten(0, 1), torch.baddbmm(torch.zeros(1), k.flatten(0, 1).mT, v.flatten(0, 1), beta=0)
    ).view_as(v),
    "tensordot": each(lambda q, k, v: torch.tensordot(q, torch.tensordot(k, v, dims=([0], [0])), 1)),
    "addmm": each(lambda q, k, v: torch.addmm(torch.zeros(8), q, torch.addmm(torch.zeros(8), k.mT, v))),
    "a linear layer": each(lambda q, k, v: F.linear(q, v.mT @ k)),
    "a convolution": each(lambda q, k, v: F.conv1d(q.mT[None], (v.mT @ k)[..., None])[0].mT),
    "a chain": each(lambda q, k, v: torch.linalg.multi_dot([q, k.mT, v])),
    "inner": each(lambda q, k, v: torch.inner(q, torch.inner(v.mT, k.mT))),
    "outer products and sum": lambda q, k, v: (q[..., None] * (k[..., None] * v[..., None, :]).sum(2, keepdim=True)).sum(-2),
    "outer products and mean": lambda q, k, v: (q[..., None] * (k[..., None] * v[..., None, :]).mean(2, keepdim=True)).sum(-2),
    "cumulative sums": lambda q, k, v: (q[..., None] * (k[..., None] * v[..., None, :]).cumsum(2)).sum(-2),
    "cumulative sums by einsum": lambda q, k, v: torch.einsum(
        "bhnd,bhnde->bhne", q, torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(2)
    ),
    "cumulative sums by matmul": lambda q, k, v: (q[..., None, :] @ (k[..., None] @ v[..., None, :]).cumsum(2))[..., 0, :],
    "chunks of tokens": lambda q, k, v: (
        q @ torch.stack([a.mT @ b for a, b in zip(k.split(24, 2), v.split(24, 2), strict=True)]).sum(0)
    ),
}
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scores": lambda q, k, v: (q @ k.mT) @ v,
    "squared relu": lambda q, k, v: ((q @ k.mT).relu().square() / N) @ v,
    "sigmoid": lambda q, k, v: (q @ k.mT).sigmoid() @ v,
    "scores by einsum": lambda q, k, v: torch.einsum("bhnm,bhme->bhne", torch.einsum("bhnd,bhmd->bhnm", q, k), v),
    "scores times values": lambda q, k, v: ((q @ k.mT)[..., None] * v[:, :, None]).sum(-2),
    "differences": lambda q, k, v: (-(q[:, :, :, None] - k[:, :, None]).square().sum(-1)).exp() @ v,
    "additive": lambda q, k, v: torch.einsum("bhnm,bhme->bhne", (q[:, :, :, None] + k[:, :, None]).tanh().sum(-1), v),
}


def attention(
    product: Callable[[Tensor, Tensor, Tensor], Tensor], feature: Callable[[Tensor], Tensor], divide: bool
) -> Callable[[Part, Tensor], Tensor]:
    def body(part: Part, t: Tensor) -> Tensor:
        q, k, v = feature(heads(part.q(t))), feature(heads(part.k(t))), heads(part.v(t))
        out = product(q, k, v)
        out = out / ((q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1) if divide else out / N
        return part.out(joined(out))  # type: ignore[no-any-return]

    return body


def padded(part: Part, t: Tensor) -> Tensor:
    """Normalize as EfficientViT does: by a column of ones beside the values."""
    q, k, v = heads(part.q(t)).relu(), heads(part.k(t)).relu(), F.pad(heads(part.v(t)), (0, 1), value=1.0)
    out = q @ (k.mT @ v)
    return part.out(joined(out[..., :-1] / (out[..., -1:] + 1e-6)))  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[Part, Tensor], Tensor], str]] = {
    **{
        f"{name}, {kind}": (attention(product, FEATURES[kind], True), "")
        for name, product in PRODUCTS.items()
        for kind in FEATURES
    },
    **{f"{name}, by the number": (attention(product, FEATURES["identity"], False), "") for name, product in PRODUCTS.items()},
    **{
        name: (attention(product, FEATURES["identity"], False), "multiplies scores by values") for name, product in SCORES.items()
    },
    "distances": (attention(lambda q, k, v: (-torch.cdist(q, k)).exp() @ v, FEATURES["identity"], False), UNTRACED),
    "values with ones": (padded, LINEAR),
}


def mixes(layer: nn.Module) -> bool:
    """Check whether other tokens change when one does."""
    t = torch.randn(1, N, D, generator=torch.Generator().manual_seed(0))
    lit = t.clone()
    lit[:, 5] += 1
    with torch.no_grad():
        change = (layer(lit) - layer(t)).abs().amax((0, 2))
    return bool(change[6:].max() > 1e-7)


@pytest.mark.parametrize("softmax_first", [True, False])
@pytest.mark.parametrize("name", sampled(CASES, 3))
def test_attention_without_a_softmax_is_listed(name: str, softmax_first: bool) -> None:
    body, reason = CASES[name]
    for batch in (1, 2):
        model = Hybrid(body, softmax_first).eval()
        assert mixes(model.second)
        for _ in range(2):
            with torch.no_grad(), visattn.capture(model) as recording:
                model(image(0, batch))
            told = {unseen.layer: unseen.reason for unseen in recording.unseen}
            assert told.keys() == {"second"}
            assert told["second"].startswith(reason or (LINEAR, "multiplies scores by values"))
            with pytest.raises(OptionError, match=r"second .*, which was not recorded, so layers cannot be combined"):
                visattn.methods.rollout(recording, query="mean")


def test_methods_that_combine_layers_refuse_linear_attention_in_one_line() -> None:
    model = Hybrid(CASES["matmul, elu"][0], softmax_first=True).eval()
    with visattn.capture(model, gradients=True, values=True) as recording:
        out = model(image())
    recording = recording.gradients(out[:, 0].sum())
    for method in (visattn.methods.rollout, visattn.methods.relevance, visattn.methods.attention_flow):
        with pytest.raises(OptionError) as error:
            method(recording, query="mean")
        assert str(error.value).startswith(f"second {LINEAR}")
        assert "\n" not in str(error.value)


def on_map(change: Callable[[Part, Tensor], Tensor]) -> Callable[[Part, Tensor], Tensor]:
    return lambda part, t: change(part, t.mT.unflatten(-1, (8, 12))).flatten(2).mT


OTHERS: dict[str, Callable[[Part, Tensor], Tensor]] = {
    "a learned mixing of tokens": lambda part, t: part.tokens(t.mT).mT,
    "a multilayer mixing": lambda part, t: part.tokens(part.tokens(t.mT).relu()).mT,
    "a learned matrix": lambda part, t: part.tokens.weight @ t,
    "a gated mixing": lambda part, t: torch.cat([t[..., :8] * part.tokens(t[..., 8:].mT).mT] * 2, -1),
    "a channel gate": lambda part, t: t * part.back(part.few(t.mean(1, keepdim=True)).relu()).sigmoid(),
    "a channel gate behind a swish": lambda part, t: t * part.back(part.few((t * t.sigmoid()).mean(1, keepdim=True))).sigmoid(),
    "a spatial gate": lambda part, t: t * part.one(t).sigmoid(),
    "a gate of both": on_map(lambda part, m: m * part.spatial(torch.stack([m.mean(1), m.amax(1)], 1)).sigmoid()),
    "a channel gate times a spatial gate": lambda part, t: t * (part.q(t.mean(1, keepdim=True)) * part.one(t)).sigmoid(),
    "a gate from the variance": lambda part, t: t * ((t - t.mean(1, keepdim=True)).square() / t.var(1, keepdim=True)).sigmoid(),
    "a gate from second-order statistics": lambda part, t: t * (t.mT @ t / N).mean(-1).sigmoid()[:, None],
    "a response normalization": lambda part, t: (
        t * t.norm(2, 1, keepdim=True) / t.norm(2, 1, keepdim=True).mean(-1, keepdim=True)
    ),
    "a gated unit": lambda part, t: part.q(t) * part.k(t).sigmoid(),
    "a product of channels": lambda part, t: (part.q(t) * part.k(t)).sum(-1, keepdim=True) * part.v(t),
    "the mean of all tokens": lambda _, t: t.mean(1, keepdim=True).expand_as(t),
    "a layer norm": lambda _, t: F.layer_norm(t, (D,)),
    "an instance norm": lambda _, t: F.instance_norm(t.mT).mT,
    "a depthwise convolution": on_map(lambda part, m: part.depthwise(m)),
    "a pooling": on_map(lambda _, m: F.avg_pool2d(m, 3, 1, 1) - m),
    "attention of channels": lambda _, t: ((F.normalize(t.mT, dim=-1) @ F.normalize(t, dim=1)).softmax(-1) @ t.mT).mT,
}


@pytest.mark.parametrize("softmax_first", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_gates_and_learned_mixings_are_not_listed(name: str, softmax_first: bool) -> None:
    for batch in (1, 2):
        with torch.no_grad(), visattn.capture(model := Hybrid(OTHERS[name], softmax_first).eval()) as recording:
            model(image(0, batch))
        assert not recording.unseen
        assert "" in {record.layer for record in recording}


class Summing(nn.Module):
    """Tokens that are multiplied by a matrix between channels, and added to themselves."""

    def __init__(self, matrix: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.q, self.k, self.v = nn.Conv2d(3, D, 4, 4), *(nn.Linear(D, D) for _ in range(3))
        self.matrix, self.behind = [matrix], nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        t = self.embed(x).flatten(2).mT
        t = self.behind(t + self.q(t).relu() @ self.matrix[0](self.k(t).relu(), self.v(t)))
        return t.mean(1)  # type: ignore[no-any-return]


SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "linear attention": (lambda k, v: k.mT @ v, True),
    "scaled": (lambda k, v: (k.mT @ v) * 0.1, True),
    "softmax over channels": (lambda k, v: (k.mT @ v).softmax(-1), True),
    "of other tokens": (lambda k, v: k.flip(1).mT @ v, False),
    "times one token": (lambda k, v: (k.mT @ v) * v[:, 5, None], False),
    "of one token": (lambda k, v: k[:, 5:6].mT @ v[:, 5:6], False),
}


@pytest.mark.parametrize("name", list(SUMS))
def test_tokens_behind_linear_attention_stay_where_their_queries_are(name: str) -> None:
    matrix, placed = SUMS[name]
    model = Summing(matrix).eval()
    with visattn.capture(model, features=["behind"]) as recording:
        model(image())
    (feature,) = recording.features
    assert (feature.layout is not None) is placed
