"""Starts of attention in trained networks: identity, paper, and the control without attention whose branches start small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visattn.core.loading import model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.errors import OptionError
from visattn.models.resnet import BasicBlock, Bottleneck, resnet50
from visattn.nn import SqueezeExcite
from visattn.training.config import Config, differences
from visattn.training.report.comparison import planned

SHAPE = (3, 16, 16)


def blueprint(attention: str, start: str = "auto", **options: Any) -> Blueprint:
    return Blueprint(
        "visattn_resnet20", ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.5,) * 3, attention, {"widths": (4, 8, 8), **options}, start
    )


def built(*args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return blueprint(*args, **options).build()


def of(config: Config) -> nn.Module:
    return blueprint(config.attention, config.attention_init, **config.model_kwargs).build()


def logits(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    out: Tensor = model.train()(torch.randn(4, *SHAPE))
    return out


@pytest.mark.parametrize(
    ("attention", "start"), [("se", "identity"), ("cbam", "identity"), ("se", "two_sigmoid"), ("eca", "two_sigmoid")]
)
def test_attention_that_starts_as_the_identity_changes_nothing_at_first(attention: str, start: str) -> None:
    model = built(attention, start)
    assert torch.equal(logits(model), logits(built("none")))
    assert all(part.isfinite().all() for part in torch.autograd.grad(logits(model).square().sum(), list(model.parameters())))


def test_attention_as_in_its_paper_is_the_default_of_our_networks() -> None:
    for start in ("auto", "paper"):
        model = built("se", start)
        assert isinstance(model.get_submodule("layer1.0.attention"), SqueezeExcite)
        assert not torch.allclose(logits(model), logits(built("none")), atol=1e-3)


def test_a_gate_of_one_half_is_a_gain_of_one_half() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    half, gain = built("none"), built("none", branch_gain=0.5)
    for part in half.modules():
        if isinstance(part, BasicBlock):
            part.attention = Half()
    assert torch.allclose(logits(half), logits(gain), atol=1e-6)
    assert not torch.allclose(logits(gain), logits(built("none")), atol=1e-3)
    deep = [
        part for part in resnet50(widths=(2, 2, 2, 2), num_classes=2, branch_gain=0.25).modules() if isinstance(part, Bottleneck)
    ]
    assert len(deep) == 16
    assert all(bool((part.bn3.weight == 0.25).all()) and bool((part.bn2.weight == 1).all()) for part in deep)


@pytest.mark.parametrize("start", ["auto", "identity", "two_sigmoid"])
def test_a_saved_network_keeps_its_start(start: str, tmp_path: Path) -> None:
    model, made = built("se", start), blueprint("se", start)
    folders.save(model, made, tmp_path / "net")
    again, _ = folders.load(tmp_path / "net")
    assert torch.equal(logits(again), logits(model))
    facts = json.loads((tmp_path / "net" / "model.json").read_text())
    assert facts.pop("attention_init") == start
    if start == "auto":
        (tmp_path / "net" / "model.json").write_text(json.dumps(facts))  # as versions before wrote it
        again, _ = folders.load(tmp_path / "net")
        assert torch.equal(logits(again), logits(model))


def test_variants_of_a_comparison_name_their_start() -> None:
    config = Config(data="scenes", widths=(4, 8, 8))
    made = planned(config, ["none", "se", "se-identity", "cbam-identity", "gain-0.5"], of, SHAPE)
    told = {name: (one.config.attention, one.config.attention_init, one.config.model_kwargs) for name, one in made.items()}
    assert told == {
        "none": ("none", "auto", {}),
        "se": ("se", "auto", {}),
        "se-identity": ("se", "identity", {}),
        "cbam-identity": ("cbam", "identity", {}),
        "gain-0.5": ("none", "auto", {"branch_gain": 0.5}),
    }
    assert made["gain-0.5"].cost.parameters == made["none"].cost.parameters < made["se"].cost.parameters
    assert made["se-identity"].cost.parameters == made["se"].cost.parameters + 9  # one scalar per block
    assert made["gain-0.5"].note == "gain-0.5: the plain network, whose residual branches start at 0.5 times their weight."


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: planned(Config(data="scenes"), ["none", "gain-half"], of, SHAPE), "such as gain-0.5, got 'gain-half'"),
        (lambda: planned(Config(data="scenes"), ["none", "se-none"], of, SHAPE), "attention_init"),
        (lambda: planned(Config(data="scenes"), ["none", "nothing-paper"], of, SHAPE), "unknown attention 'nothing'"),
        (lambda: Config(attention_init="identity"), "attention_init needs an attention"),
        (lambda: built("bam", "identity"), "bam is between the stages"),
        (lambda: built("cbam", "two_sigmoid"), "Use init='identity'"),
    ],
    ids=range(6),
)
def test_starts_that_make_no_sense_are_refused(call: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_runs_of_before_are_resumed() -> None:
    before = Config(attention="se").digest()
    del before["attention_init"]
    assert differences(before, Config(attention="se")) == []
    assert differences(before, Config(attention="se", attention_init="identity")) == ["attention_init auto -> identity"]
