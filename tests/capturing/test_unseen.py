"""Attention that cannot be recorded is reported, and no attention is assigned to tokens that it does not weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.capturing.moving import Moving, image, see
from visattn.errors import NoAttentionCaptured, OptionError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value (B, heads, N, d)


class Part(nn.Module):
    """Module with a custom attention function."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, t: Tensor) -> Tensor:
        return self.attend(t, t, t)


class Two(nn.Module):
    """Model with a fused attention call and then a custom one."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embed, self.second = nn.Conv2d(3, 16, 4, 4), Part(attend)

    def forward(self, x: Tensor) -> Tensor:
        t = self.embed(x).flatten(2).mT.unflatten(-1, (2, 8)).transpose(1, 2)
        t = t + F.scaled_dot_product_attention(t, t, t)
        t = t + self.second(t)
        return t.transpose(1, 2).flatten(2).mean(1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.1


def divided(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = [[scores(q[b, h], k[b, h]).softmax(-1) @ v[b, h] for h in range(2)] for b in range(len(q))]
    return torch.stack([torch.stack(heads) for heads in out])


def _scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


class Scripted(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    script = torch.jit.script(_scripted)

GATE = torch.linspace(0.5, 1, 96 * 96).view(96, 96)
WRITINGS: dict[str, Attend] = {
    "softmax and matmul": lambda q, k, v: scores(q, k).softmax(-1) @ v,
    "exp and sum": lambda q, k, v: divided(scores(q, k).exp()) @ v,
    "exp, divided after the product": lambda q, k, v: (scores(q, k).exp() @ v) / scores(q, k).exp().sum(-1, keepdim=True),
    "log_softmax and exp": lambda q, k, v: scores(q, k).log_softmax(-1).exp() @ v,
    "special softmax": lambda q, k, v: torch.special.softmax(scores(q, k), -1) @ v,
    "logsumexp": lambda q, k, v: (scores(q, k) - scores(q, k).logsumexp(-1, keepdim=True)).exp() @ v,
    "gumbel softmax": lambda q, k, v: F.gumbel_softmax(scores(q, k), dim=-1) @ v,
    "sigmoid": lambda q, k, v: scores(q, k).sigmoid() @ v,
    "relu": lambda q, k, v: divided(scores(q, k).relu() + 1e-3) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
    "einsum with ellipses": lambda q, k, v: torch.einsum(
        "... i j, ... j d -> ... i d", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v
    ),
    "einsum without an arrow": lambda q, k, v: torch.einsum("ij,jk", scores(q[0, 0], k[0, 0]).softmax(-1), v[0, 0])[
        None, None
    ].expand_as(v),
    "bmm": lambda q, k, v: torch.bmm(scores(q, k).softmax(-1).flatten(0, 1), v.flatten(0, 1)).view_as(v),
    "baddbmm": lambda q, k, v: torch.baddbmm(
        torch.zeros_like(v).flatten(0, 1), scores(q, k).softmax(-1).flatten(0, 1), v.flatten(0, 1)
    ).view_as(v),
    "baddbmm and sum": lambda q, k, v: (
        torch.baddbmm(torch.zeros_like(v).flatten(0, 1), scores(q, k).softmax(-1).flatten(0, 1), v.flatten(0, 1))
        .sum(1, keepdim=True)
        .view(len(v), 2, 1, 8)
        .expand_as(v)
    ),
    "addbmm": lambda q, k, v: torch.addbmm(torch.zeros(96, 8), scores(q, k).softmax(-1)[0], v[0])[None, None].expand_as(v),
    "tensordot": lambda q, k, v: torch.tensordot(scores(q[0, 0], k[0, 0]).softmax(-1), v[0, 0], 1)[None, None].expand_as(v),
    "matrices by image and head": by_heads,
    "multiply and sum": lambda q, k, v: (scores(q, k).softmax(-1)[..., None] * v[:, :, None]).sum(-2),
    "values first": lambda q, k, v: (v.mT @ scores(q, k).softmax(-1).mT).mT,
    "a factor after the softmax": lambda q, k, v: (scores(q, k).softmax(-1) * GATE) @ v,
    "a data-dependent gate after the softmax": lambda q, k, v: (scores(q, k).softmax(-1) * scores(k, q).sigmoid()) @ v,
    "a power of the weights": lambda q, k, v: scores(q, k).softmax(-1).square() @ v,
    "the largest weight": lambda q, k, v: F.one_hot(scores(q, k).argmax(-1), 96).float() @ v,
    "topk": lambda q, k, v: (
        scores(q, k).masked_fill(scores(q, k) < scores(q, k).topk(9, -1).values[..., -1:], -9e9).softmax(-1) @ v
    ),
    "a scripted function": lambda q, k, v: script(q, k, v),
    "vmap": lambda q, k, v: torch.vmap(_scripted)(q, k, v),
    "softmax that is not multiplied": lambda q, k, v: v + 0 * scores(q, k).softmax(-1).sum(-1, keepdim=True),
}
RECORDED = {
    "softmax and matmul",
    "log_softmax and exp",
    "special softmax",
    "gumbel softmax",
    "einsum",
    "einsum with ellipses",
    "bmm",
    "multiply and sum",
    "values first",
}

WEIGHTED = {"a factor after the softmax", "a data-dependent gate after the softmax", "topk"}  # positive factors, and masks
FLAT = {"einsum without an arrow", "matrices by image and head"}  # the attention of one image in each call


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", list(WRITINGS))
def test_attention_is_recorded_or_reported_as_unseen(name: str, batch: int) -> None:
    model = Two(WRITINGS[name]).eval()
    for seed in range(3):
        recording = see(model, image(seed, batch))
        found = [record.layer for record in recording]
        told = {unseen.layer for unseen in recording.unseen}
        assert found[0] == ""
        if "second" in found:
            some = "it holds only some images of the batch"
            assert recording[found.index("second")].reason == (some if name in FLAT and batch > 1 else None)
            assert name in RECORDED | FLAT | WEIGHTED
        else:
            assert name not in RECORDED | FLAT
            assert told, "missed in silence"
            with pytest.raises(OptionError, match="which was not recorded, so layers cannot be combined"):
                visattn.methods.rollout(recording, query="mean")


def test_a_torchscript_submodule_is_reported_as_unseen() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = torch.jit.script(Scripted())
    model = Two(lambda q, k, v: v)
    model.second.attend = part  # type: ignore[assignment]
    recording = see(model.eval(), image())
    assert ("second.attend", "is compiled by TorchScript") in [(unseen.layer, unseen.reason) for unseen in recording.unseen]


def test_a_model_without_recordable_attention_is_refused_with_the_reason() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attend = nn.Conv2d(3, 16, 4, 4), Part(WRITINGS["sigmoid"])

        def forward(self, x: Tensor) -> Tensor:
            t = self.embed(x).flatten(2).mT[:, None]
            return (t + self.attend(t)).mean((1, 2))  # type: ignore[no-any-return]

    with pytest.raises(NoAttentionCaptured, match="attend multiplies scores by values with matmul, which cannot be recorded"):
        see(One(), image())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (lambda t: t.flip(2), "its keys and values belong to different tokens"),
        (lambda t: torch.ones_like(t), "its values belong to no image tokens"),
        (lambda t: t.sort(2).values, "its values could not be traced from the pixels beyond sort"),
    ],
)
def test_values_that_do_not_belong_to_the_keys_are_unplaced(values: Callable[[Tensor], Tensor], reason: str) -> None:
    model = Moving()
    model.forward = lambda x: F.scaled_dot_product_attention(  # type: ignore[method-assign]
        t := model.tokens(x)[:, None], t, values(t)
    ).mean((1, 2))
    assert see(model, image())[0].reason == reason


class Siamese(nn.Module):
    """Model of two images whose tokens attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)

    def forward(self, template: Tensor, search: Tensor) -> Tensor:
        t = torch.cat([self.embed(z).flatten(2).mT for z in (template, search)], 1)[:, None]
        return F.scaled_dot_product_attention(t, t, t).mean((1, 2))


def test_tokens_of_another_input_are_foreign_prefix_tokens() -> None:
    recording = see(Siamese().eval(), torch.randn(1, 3, 16, 16), image())
    record = recording[0]
    assert record.keys.grid == (4, 4)
    assert record.keys.prefix == tuple(f"foreign{i}" for i in range(96))
    with pytest.raises(OptionError, match="the model itself also attends to tokens of another input of the model"):
        visattn.methods.rollout(recording, query="mean")
    assert visattn.methods.attention(recording).provenance.parameters["query"] == "all"


def test_keys_of_another_input_are_tokens_that_lie_nowhere_in_the_image() -> None:
    class Text(Moving):
        def forward(self, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]
            t = self.tokens(x)[:, None]
            words = self.part(text)[:, None]
            return F.scaled_dot_product_attention(t, words, words).mean((1, 2))

    recording = see(Text(), image(), text=torch.randn(1, 5, 16))
    record = recording[0]
    assert (record.kind, record.queries.grid, record.keys.grid) == ("cross", (8, 12), ())
    assert record.keys.prefix == tuple(f"foreign{i}" for i in range(5))
    with pytest.raises(OptionError, match="another input of the model"):
        visattn.methods.rollout(recording)


class Parts(nn.Module):
    """Model with a part that reads a map computed from the image."""

    def __init__(self, lose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.mask, self.lose = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(1, 16, 2, 2), lose

    def features(self, x: Tensor) -> Tensor:
        t = self.embed(x).flatten(2).mT
        u = self.mask(self.lose(t.mean(-1)).view(-1, 1, 8, 12)).flatten(2).mT[:, None]
        return F.scaled_dot_product_attention(u, u, u)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


@pytest.mark.parametrize(
    "lose", [lambda m: torch.sort(m, 1).values, lambda m: torch.from_numpy(m.numpy()[:, ::-1].copy())], ids=["sort", "numpy"]
)
def test_a_submodule_call_does_not_start_a_new_forward_pass(lose: Callable[[Tensor], Tensor]) -> None:
    model = Parts(lose).eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model.features(image())
        model.features(image(1))
    assert [record.forward for record in recording] == [0, 1]
    assert all(record.reason is not None and "could not be traced" in record.reason for record in recording)
    assert see(model, image())[0].reason == recording[0].reason


def test_images_of_many_channels_are_traced_through_submodule_calls() -> None:
    model = Parts(lambda m: m).eval()
    model.embed = nn.Conv2d(7, 16, 4, 4)
    with torch.no_grad(), visattn.capture(model) as recording:
        model.features(torch.randn(1, 7, 32, 48))
    assert recording[0].keys.grid == (4, 6)
    assert tuple(recording[0].keys.box) == (0, 0, 32, 48)


class Branches(nn.Module):
    """Model with two branches over one grid, of which one attends to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(3, 16, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (embed(x).flatten(2).mT[:, None] for embed in (self.first, self.second))
        a = a + F.scaled_dot_product_attention(a, a, a)
        b = b + F.scaled_dot_product_attention(b, b, b)
        a = a + F.scaled_dot_product_attention(a, b, b)
        return a.mean((1, 2))


def test_branches_over_one_grid_are_distinguished() -> None:
    recording = see(Branches().eval(), image())
    assert [record.kind for record in recording] == ["self", "self", "cross"]
    with pytest.raises(OptionError, match="its queries and its keys come from different branches"):
        visattn.methods.rollout(recording, query="mean")
    with visattn.capture(model := Branches().eval(), gradients=True) as recording:
        out = model(image())
    with pytest.raises(OptionError, match="its queries and its keys come from different branches"):
        visattn.methods.relevance(recording.gradients(out[:, 0].sum()), query="mean")


def test_a_key_that_is_never_a_query_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 16, 16), nn.Flatten(2))
    attention = nn.MultiheadAttention(16, 2, add_zero_attn=True, batch_first=True)

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attention = model, attention

        def forward(self, x: Tensor) -> Tensor:
            t = self.embed(x).mT
            return (t + self.attention(t, t, t)[0]).mean(1)  # type: ignore[no-any-return]

    recording = see(Zero().eval(), image())
    with pytest.raises(OptionError, match=r"attention: some of its keys are never queries \(token0\)"):
        visattn.methods.rollout(recording)


@pytest.mark.parametrize("written", [False, True])
def test_learned_queries_pool_with_fused_and_explicit_attention(written: bool) -> None:
    class Pooling(Moving):
        def __init__(self) -> None:
            super().__init__()
            self.latent = nn.Parameter(torch.randn(1, 3, 16))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            t = self.tokens(x)
            q = self.latent.expand(len(x), -1, -1)
            for _ in range(2):
                q = q + (
                    (q @ t.mT).softmax(-1) @ t
                    if written
                    else F.scaled_dot_product_attention(q[:, None], t[:, None], t[:, None])[:, 0]
                )
            return q.mean(1)

    recording = see(Pooling(), image())
    assert [(record.kind, record.reason, record.keys.grid) for record in recording] == [("pool", None, (8, 12))] * 2


def test_attention_among_learned_queries_is_a_set_of_its_own() -> None:
    class Among(Moving):
        def __init__(self) -> None:
            super().__init__()
            self.latent = nn.Parameter(torch.randn(1, 1, 3, 16))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            t, q = self.tokens(x)[:, None], self.latent
            q = q + F.scaled_dot_product_attention(q, q, q)
            return F.scaled_dot_product_attention(q, t, t).mean((1, 2))

    first, second = see(Among(), image())
    assert (first.kind, first.reason, first.keys.grid) == ("self", None, ())
    assert (second.kind, second.keys.grid) == ("pool", (8, 12))
    assert first.queries == first.keys == second.queries
    assert second.follows == (first.layer, first.call)
