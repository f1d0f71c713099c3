"""Terms of a score, against small transformers that are run again with one branch left out and the statistics of the plain run.

These transformers are written out, so that the second run can keep the statistics of its norms, the weights of its pooling and the values
of its gates. The result is then linear in the branches, and a term is what its branch changes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from visattn.core.methods.from_attention.contributions import parts_of
from visattn.core.pipeline.summing import with_terms
from visattn.core.records.terms import ScoreTerms, Term
from visattn.errors import OptionError

WIDTH, HEADS, DEPTH, CELLS = 12, 3, 3, 16
FORMS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean": {"readout": "mean"},
    "class token and mean": {"readout": "both"},
    "attention pooling": {"readout": "pool"},
    "norms behind the branches": {"norm": "behind"},
    "norms of the stream": {"norm": "stream"},
    "rms norms, written out": {"kind": "written rms"},
    "rms norms": {"kind": "rms"},
    "layer norms, written out": {"kind": "written layer"},
    "group norms": {"kind": "group"},
    "layer scale": {"scaled": True},
    "parallel branches": {"parallel": True},
    "gated attention": {"gate": "attention"},
    "a gate for each token": {"gate": "token"},
    "gated MLP": {"mlp": "gated"},
    "two activations": {"mlp": "deep"},
    "residual in place": {"in_place": True},
    "attention written out": {"written": True},
    "positions by convolution": {"convolved": True},
    "normalized output": {"output": "unit"},
    "normalized output, written out": {"output": "written unit"},
    "a stem with activations": {"stem": True},
    "separate tokens for values": {"readout": "mean", "registers": 2},
}


class Small(nn.Module):
    """Transformer whose branches can be left out, with statistics that can be kept."""

    def __init__(
        self,
        *,
        readout: str = "cls",
        norm: str = "before",
        kind: str = "layer",
        mlp: str = "plain",
        gate: str = "",
        output: str = "",
        registers: int = 0,
        scaled: bool = False,
        parallel: bool = False,
        in_place: bool = False,
        written: bool = False,
        convolved: bool = False,
        stem: bool = False,
    ) -> None:
        super().__init__()
        self.form = readout, norm, kind, mlp, gate, output
        self.scaled, self.parallel, self.in_place, self.written, self.convolved = scaled, parallel, in_place, written, convolved
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1), nn.ReLU()) if stem else nn.Identity()
        self.patches = nn.Conv2d(6 if stem else 3, WIDTH, 4, 4)
        self.registers = registers + 1
        self.cls, self.places = (
            nn.Parameter(torch.randn(1, registers + 1, WIDTH)),
            nn.Parameter(torch.randn(1, CELLS + registers + 1, WIDTH)),
        )
        self.blocks = nn.ModuleList(Block(self.scaled, gate, mlp) for _ in range(DEPTH))
        self.local = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.query, self.pool = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.left_out: str = ""
        self.kept: dict[str, Tensor] | None = None
        self.seen: dict[str, Tensor] = {}

    def keep(self, name: str, value: Tensor) -> Tensor:
        """Return a statistic: that of the plain run, if it is kept."""
        self.seen[name] = value.detach()
        return value if self.kept is None else self.kept[name]

    def branch(self, name: str, value: Tensor) -> Tensor:
        return torch.zeros_like(value) if name == self.left_out else value

    def norm(self, name: str, x: Tensor) -> Tensor:
        kind = self.form[2]
        again = self.kept is not None
        if kind in ("layer", "group") and not again:
            scale = (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
            self.keep(name, scale)
            if kind == "layer":
                return F.layer_norm(x, (WIDTH,))
            return F.group_norm(x.reshape(-1, WIDTH), 1).view_as(x)
        if kind == "rms" and not again:
            self.keep(name, (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
            return F.rms_norm(x, (WIDTH,), eps=1e-6)
        if kind in ("layer", "group", "written layer"):
            centered = x - x.mean(-1, keepdim=True)
            return centered * self.keep(name, (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
        return x * self.keep(name, (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())

    def forward(self, images: Tensor) -> Tensor:
        readout, norm, _, _, _, output = self.form
        x = self.patches(self.stem(images)).flatten(2).mT
        x = self.branch("embedding", torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places)
        if self.convolved:
            grid = x[:, self.registers :].mT.reshape(-1, WIDTH, 4, 4)
            x = torch.cat([x[:, : self.registers], (grid + self.local(grid)).flatten(2).mT], 1)
        for number, block in enumerate(self.blocks):
            x = block(self, number, x, norm)
        x = self.norm("last", x)
        if readout == "pool":
            key, value = self.pool(x).chunk(2, -1)
            weights = self.keep("pool", (self.query @ key.mT * WIDTH**-0.5).softmax(-1)) if self.kept is not None else None
            read = (
                F.scaled_dot_product_attention(self.query.expand(len(x), -1, -1), key, value)
                if weights is None
                else weights @ value
            )
            self.keep("pool", (self.query @ key.mT * WIDTH**-0.5).softmax(-1))
            read = read[:, 0]
        else:
            mean = x[:, self.registers :].mean(1)
            read = {"cls": x[:, 0], "mean": mean, "both": x[:, 0] + 2 * mean}[readout]
        if output:
            size = self.keep("size", read.norm(dim=-1, keepdim=True).clamp_min(1e-12))
            read = F.normalize(read, dim=-1) if output == "unit" and self.kept is None else read / size
        return self.head(read)  # type: ignore[no-any-return]


def changeable(kind: type) -> Any:
    """Return a class whose methods are exchanged for a while."""
    return kind


class Block(nn.Module):
    attn: Any
    mlp: Any

    def __init__(self, scaled: bool, gate: str, mlp: str) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn.gate = nn.Linear(WIDTH, WIDTH if gate == "attention" else 1)
        self.mlp = nn.Module()
        self.mlp.first, self.mlp.second, self.mlp.third = (
            nn.Linear(WIDTH, 20),
            nn.Linear(WIDTH if mlp == "gated" else 20, 20),
            nn.Linear(20, WIDTH),
        )
        self.scales = [torch.rand(WIDTH) + 0.5 if scaled else torch.ones(WIDTH) for _ in range(2)]
        self.first, self.second = (nn.Parameter(scale) for scale in self.scales)
        self.gate, self.kind, self.scaled = gate, mlp, scaled

    def attention(self, model: Small, name: str, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attn.qkv(x).chunk(3, -1))
        if model.written:
            mixed = (query @ key.mT * (WIDTH // HEADS) ** -0.5).softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.gate:
            mixed = mixed * model.keep(f"{name} gate", self.attn.gate(x).sigmoid())
        out = self.attn.proj(mixed)
        return model.branch(name, out * self.first if self.scaled else out)

    def feed(self, model: Small, name: str, x: Tensor) -> Tensor:
        if self.kind == "gated":
            hidden = F.silu(self.mlp.first(x)) * self.mlp.second(x)
        else:
            hidden = F.gelu(self.mlp.first(x))
            hidden = F.gelu(self.mlp.second(hidden)) if self.kind == "deep" else hidden
        out = self.mlp.third(hidden)
        return model.branch(name, out * self.second if self.scaled else out)

    def forward(self, model: Small, number: int, x: Tensor, norm: str) -> Tensor:
        names = f"blocks.{number}.attn", f"blocks.{number}.mlp"
        if model.parallel:
            y = model.norm(names[0], x)
            return x + self.attention(model, names[0], y) + self.feed(model, names[1], y)
        for name, branch in zip(names, (self.attention, self.feed), strict=True):
            y = branch(model, name, model.norm(name, x) if norm == "before" else x)
            y = model.norm(name, y) if norm == "behind" else y
            if model.in_place:
                x = x.clone()
                x += y
            else:
                x = x + y
            x = model.norm(name, x) if norm == "stream" else x
        return x


def left_out(model: Small, images: Tensor) -> dict[str, float]:
    """Return what each branch changes in output 2, with all statistics, weights and gates of the plain run."""
    with torch.no_grad():
        plain = model(images)
        branches = ["embedding", *(f"blocks.{number}.{part}" for number in range(DEPTH) for part in ("attn", "mlp"))]
        model.kept = dict(model.seen)
        first = float(model(images)[0, 2])
        assert first == pytest.approx(float(plain[0, 2]), abs=1e-9)
        changes = {}
        for name in branches:
            frozen = _Frozen(model, name)
            changes[name] = first - float(frozen(images)[0, 2])
        model.kept, model.left_out = None, ""
    return changes


class _Frozen:
    """Run in which one branch is left out, and the others keep their outputs of the plain run."""

    def __init__(self, model: Small, name: str) -> None:
        self.model, self.name = model, name

    def __call__(self, images: Tensor) -> Tensor:
        outputs: dict[str, Tensor] = {}
        model, own = self.model, Small.branch

        def note(_: Small, name: str, value: Tensor) -> Tensor:
            outputs[name] = value
            return value

        try:
            changeable(Small).branch = note
            model(images)
            changeable(Small).branch = lambda _, name, value: torch.zeros_like(value) if name == self.name else outputs[name]
            result: Tensor = model(images)
        finally:
            changeable(Small).branch = own
        return result


def made(form: str) -> tuple[Small, Tensor]:
    torch.manual_seed(0)
    model = Small(**FORMS[form]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64))
    return model.requires_grad_(requires_grad=False), torch.rand(1, 3, 16, 16, dtype=torch.float64)


def terms_of(model: nn.Module, images: Tensor, at: int = 2) -> tuple[ScoreTerms, list[Any]]:
    with torch.no_grad():
        plain = model(images)
    recording, output = with_terms(model, lambda: model(images))
    assert torch.equal(plain, output)
    return parts_of(recording.gradients(output[0, at]))


@pytest.mark.parametrize("form", FORMS)
def test_terms_are_what_their_branches_change(form: str) -> None:
    model, images = made(form)
    expected = left_out(model, images)
    terms, parts = terms_of(model, images)
    assert abs(terms.difference) <= 1e-13 * terms.absolute
    found: dict[str, float] = {}
    for term in terms.terms:
        if term.kind != "bias":
            name = "embedding" if term.kind == "embedding" else _branch(term, model)
            found[name] = found.get(name, 0.0) + term.total
    for name, change in expected.items():
        assert found.get(name, 0.0) == pytest.approx(change, abs=1e-12 * terms.absolute), name
    assert all(abs(part.difference) <= 1e-13 * terms.absolute for part in parts)
    assert [len(part.patches) for part in parts] == [HEADS] * DEPTH


def _branch(term: Term, model: Small) -> str:
    """Return the branch of a term: attention is named by its module, an MLP follows its attention."""
    if term.kind == "attention":
        return f"{term.layer}.attn" if term.layer.count(".") == 1 else term.layer
    return f"{term.layer}.mlp" if term.layer.count(".") == 1 else term.layer


@pytest.mark.parametrize("form", ["class token", "mean", "gated attention", "attention pooling", "norms of the stream"])
def test_shares_of_patches_are_those_of_loops(form: str) -> None:
    """`A_ij (v_j . g_i)` in loops, where `g_i` is how the score changes with the head's output, from the change of one number at a time."""
    model, images = made(form)
    _, parts = terms_of(model, images)
    gradients, weights, values = _by_differences(model, images)
    for number, part in enumerate(parts):
        prefix = len(part.names)
        for head in range(HEADS):
            for key in range(CELLS + prefix):
                share = sum(
                    float(weights[number][head, query, key]) * float(values[number][head, key] @ gradients[number][head, query])
                    for query in range(CELLS + prefix)
                )
                known = part.tokens[head, key] if key < prefix else part.patches[head, key - prefix]
                assert float(known) == pytest.approx(share, abs=1e-6)


def _by_differences(model: Small, images: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return gradients, weights and values of each attention, `(heads, tokens, ...)`, with all that is not attention kept."""
    with torch.no_grad():
        model(images)
        model.kept = dict(model.seen)
        calls: list[tuple[Tensor, Tensor, Tensor]] = []
        outputs: dict[str, Tensor] = {}
        attend, own = Block.attention, Small.branch

        def note(_: Small, name: str, value: Tensor) -> Tensor:
            outputs[name] = value
            return value

        changeable(Small).branch = note
        try:
            changeable(Block).attention = _noting(calls)
            model(images)
            gradients = []
            for number in range(DEPTH):
                shape = calls[number][2].shape
                gradient = torch.zeros(shape, dtype=torch.float64)
                for index in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
                    ends = []
                    for step in (0.5, -0.5):
                        changed = calls[number][2].clone()
                        changed[tuple(index)] += step
                        name = f"blocks.{number}.attn"
                        block: Any = model.blocks[number]
                        mixed = changed.transpose(0, 1).flatten(1)[None]
                        if block.gate:
                            mixed = mixed * model.kept[f"{name} gate"]
                        replaced = block.attn.proj(mixed) * (block.first if block.scaled else 1)
                        fixed = outputs | {name: replaced}
                        changeable(Small).branch = lambda _, name, value, fixed=fixed: fixed[name]
                        ends.append(float(model(images)[0, 2]))
                    gradient[tuple(index)] = ends[0] - ends[1]
                gradients.append(gradient)
        finally:
            changeable(Block).attention, changeable(Small).branch, model.kept = attend, own, None
    return gradients, [weights for weights, _, _ in calls], [value for _, value, _ in calls]


def _noting(calls: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    def attention(self: Block, model: Small, name: str, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attn.qkv(x).chunk(3, -1))
        weights = (query @ key.mT * (WIDTH // HEADS) ** -0.5).softmax(-1)
        if len(calls) < DEPTH:
            calls.append((weights[0], value[0], (weights @ value)[0]))
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        if self.gate:
            mixed = mixed * model.keep(f"{name} gate", self.attn.gate(x).sigmoid())
        out = self.attn.proj(mixed)
        return model.branch(name, out * self.first if self.scaled else out)

    return attention


class Ending(nn.Module):
    """A transformer with something behind its readout, or between its blocks."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.small, self.what = Small(), what

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.small(images)
        if self.what == "tanh":
            return out.tanh()
        return out.softmax(-1) if self.what == "softmax" else out * out


@pytest.mark.parametrize("what", ["tanh", "softmax", "square"])
def test_a_score_behind_something_that_is_not_linear_is_refused(what: str) -> None:
    torch.manual_seed(0)
    model = Ending(what).double().eval()
    with pytest.raises(
        OptionError, match=r"which is not known to be linear and has no way around it, so blocks\.0|so small\.blocks\.0"
    ):
        terms_of(model, torch.rand(1, 3, 16, 16, dtype=torch.float64))


def test_a_score_that_is_no_linear_function_of_the_output_is_refused() -> None:
    model, images = made("mean")
    recording, output = with_terms(model, lambda: model(images))
    with pytest.raises(OptionError, match="is no linear function of the output"):
        parts_of(recording.gradients(output[0].softmax(-1)[2]))


def test_a_model_that_caches_what_it_computed_is_run_once_more() -> None:
    class Caching(Small):
        bias: Tensor | None = None

        def forward(self, images: Tensor) -> Tensor:
            if self.bias is None:
                self.bias = torch.ones(1, 5, dtype=torch.float64) * self.head.bias
            return super().forward(images) + self.bias

    torch.manual_seed(0)
    model = Caching().double().eval()
    terms, _ = terms_of(model, torch.rand(1, 3, 16, 16, dtype=torch.float64))
    assert abs(terms.difference) <= 1e-13 * terms.absolute


def test_a_plain_capture_afterward_is_as_before() -> None:
    model, images = made("class token")
    with visattn.capture(model, values=True) as before:
        model(images)
    terms_of(model, images)
    with visattn.capture(model, values=True) as after:
        model(images)
    assert len(before) == len(after)
    assert all(torch.equal(one.operator.dense(), other.operator.dense()) for one, other in zip(before, after, strict=True))
    assert all(first.layer < second.layer for first, second in pairwise(after))


class Choosing(nn.Module):
    """A transformer whose outputs go through a mask or an index that the image decides."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.small, self.what = Small(), what

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.small(images)
        if self.what == "product with a mask":
            return out * (out > 0)
        if self.what == "product with numbers of a mask":
            return out * (out > 0).to(out.dtype)
        if self.what == "where":
            return torch.where(out > 0, out, torch.zeros_like(out))
        if self.what == "masked fill":
            return out.masked_fill(out < 0, 0)
        if self.what == "masked fill in place":
            out = out + 0
            out[out < 0] = 0
            return out
        return out.gather(1, out.topk(5).indices)


def choosing(what: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Choosing(what).double().eval(), torch.rand(1, 3, 16, 16, dtype=torch.float64)


@pytest.mark.parametrize("what", ["product with a mask", "where", "masked fill", "the largest"])
def test_masks_and_choices_of_the_image_are_frozen_and_named(what: str) -> None:
    terms, _ = terms_of(*choosing(what))
    assert "a mask or choice in the model itself" in terms.frozen
    assert abs(terms.difference) <= 1e-13 * terms.absolute


@pytest.mark.parametrize("what", ["product with numbers of a mask", "masked fill in place"])
def test_numbers_of_masks_and_assignments_are_refused(what: str) -> None:
    with pytest.raises(OptionError, match="not known to be linear and has no way around it"):
        terms_of(*choosing(what))


def test_a_mask_that_the_image_does_not_decide_freezes_nothing() -> None:
    class Fixed(Small):
        def forward(self, images: Tensor) -> Tensor:
            out: Tensor = super().forward(images)
            return out * torch.tensor([True, False, True, True, False])

    torch.manual_seed(0)
    terms, _ = terms_of(Fixed().double().eval(), torch.rand(1, 3, 16, 16, dtype=torch.float64))
    assert not any("mask" in text for text in terms.frozen)
