"""Attached attention in checkpoints, optimizers, distributed training and model transformations; detaching."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import visattn
from tests.conftest import Figures
from tests.nn.attaching import names
from tests.nn.small import Net, example
from tests.nn.sweep import difference, logits
from visattn.errors import ModelError, OptionError, VisattnWarning
from visattn.nn import WithAttention, attach


def test_plain_checkpoint_loads_and_its_missing_keys_are_listed(net: Net) -> None:
    state = {key: torch.randn_like(value) if value.is_floating_point() else value for key, value in net.state_dict().items()}
    handle = attach(net, "cbam", example=example(), init=0.5)
    kept = {key: value.clone() for key, value in handle.state_dict().items()}
    net.load_state_dict(state, strict=True)
    assert list(handle.supplied) == list(handle.state_dict())
    assert all(torch.equal(value, state[key]) for key, value in handle.base_state_dict().items())
    assert list(handle.base_state_dict()) == list(state)
    assert all(torch.equal(value, kept[key]) for key, value in handle.state_dict().items())


def test_a_checkpoint_of_the_attached_model_loads_into_one_freshly_attached(net: Net) -> None:
    handle = attach(net, "cbam", example=example(), init=0.5)
    state, expected = net.state_dict(), net(example())
    other = Net().eval()
    fresh = attach(other, "cbam", example=example(), strict_attention=True)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(example()), expected)
    assert fresh.supplied == () == handle.supplied
    alone = Net().eval()
    alone.load_state_dict(handle.base_state_dict(), strict=True)
    attach(alone, "cbam", example=example())
    assert alone.load_state_dict(handle.state_dict(), strict=False).unexpected_keys == []
    assert torch.equal(alone(example()), expected)


def test_base_state_dict_keeps_the_version_metadata(net: Net) -> None:
    plain = net.state_dict()._metadata  # type: ignore[attr-defined]
    state: Any = attach(net, "se", example=example()).base_state_dict()
    assert state._metadata == plain


def test_strict_attention_refuses_a_plain_checkpoint(net: Net) -> None:
    state = net.state_dict()
    attach(net, "se", example=example(), strict_attention=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*layer1\.0\.bn2\.attention\.fc1\.weight"):
        net.load_state_dict(state, strict=True)


@pytest.mark.parametrize("lost", [0, 1, 2, [0, 1], [1, 2]], ids=str)
def test_a_checkpoint_that_lacks_some_of_the_sites_is_incomplete(net: Net, lost: int | list[int]) -> None:
    handle = attach(net, "cbam", example=example())
    gone = [names(handle)[index] for index in ([lost] if isinstance(lost, int) else lost)]
    state = {key: value for key, value in net.state_dict().items() if not any(f"{name}.attention" in key for name in gone)}
    state = {key: value for key, value in state.items() if key not in {f"{name}.gate" for name in gone}}
    expected = [key for key in handle.state_dict() if any(key.startswith(f"{name}.") for name in gone)]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{re.escape(expected[0])}"'):
        net.load_state_dict(state, strict=True)
    assert sorted(net.load_state_dict(state, strict=False).missing_keys) == sorted(expected)
    assert list(handle.supplied) == expected
    outer = nn.ModuleDict({"backbone": net})
    told = outer.load_state_dict({f"backbone.{key}": value for key, value in state.items()}, strict=False)
    assert sorted(told.missing_keys) == sorted(f"backbone.{key}" for key in expected)


def test_consecutive_loads_are_checked_independently(net: Net) -> None:
    plain = copy.deepcopy(net.state_dict())
    handle = attach(net, "se", example=example())
    whole, copied = copy.deepcopy(net.state_dict()), copy.deepcopy(net)
    for model in (net, copied, pickle.loads(pickle.dumps(net))):
        for state in (whole, plain, whole, handle.base_state_dict()):
            model.load_state_dict(state, strict=True)
    inner = attach(net, "eca", where=["stem"], example=example())
    net.load_state_dict(whole, strict=True)  # to attention attached later, it is an original checkpoint
    assert handle.supplied == ()
    assert list(inner.supplied) == [key for key in inner.state_dict() if key.startswith("stem.")]


def test_nested_attention_loads_a_plain_checkpoint(net: Net) -> None:
    state = copy.deepcopy(net.state_dict())
    expected = net(example())
    attach(net, "se", where="stage", example=example())
    inner = attach(net, "se", example=example())
    for parameter in net.parameters():
        parameter.data.add_(1)
    net.load_state_dict(state, strict=True)
    for key, parameter in net.named_parameters():
        if key.endswith("gate"):
            parameter.data.zero_()
    assert torch.equal(net(example()), expected)
    assert list(inner.base_state_dict()) == list(state)


def test_detaching_restores_the_same_module_objects(net: Net) -> None:
    objects, before = list(net.named_modules()), net(example())
    handle = attach(net, "cbam", example=example(), init=0.5)
    assert not torch.equal(net(example()), before)
    assert handle.detach() is net
    assert [name for name, _ in objects] == [name for name, _ in net.named_modules()]
    assert all(one is two for (_, one), two in zip(objects, net.modules(), strict=True))
    assert torch.equal(net(example()), before)
    with pytest.raises(ModelError, match="nothing is attached: it was already detached"):
        handle.detach()


def test_nothing_is_detached_from_a_model_that_was_changed(net: Net) -> None:
    handle = attach(net, "se", example=example())
    net.layer1[0].bn2 = nn.BatchNorm2d(8)
    with pytest.raises(ModelError, match=r"'layer1\.0\.bn2' has been replaced since attach, so nothing was detached"):
        handle.detach()
    assert isinstance(net.layer2[0].bn2, WithAttention)


def test_a_step_trains_the_attention(net: Net) -> None:
    handle = attach(net, "cbam", example=example())
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    before = {key: value.clone() for key, value in handle.named_parameters()}
    for _ in range(2):  # the gate learns in the first step, the attention from the second
        optimizer.zero_grad()
        net(example()).square().sum().backward()
        optimizer.step()
    moved = {key.rsplit(".", 1)[-1] for key, value in handle.named_parameters() if not torch.equal(value, before[key])}
    assert {"gate", "weight"} <= moved


def test_join_adds_the_parameters_once_and_detach_removes_them(net: Net) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    groups = len(optimizer.param_groups)
    handle = attach(net, "se", example=example())
    handle.join(optimizer)
    handle.check(optimizer)
    handle.join(optimizer)
    assert len(optimizer.param_groups) == groups + 1
    assert len(optimizer.param_groups[-1]["params"]) == 5 * len(handle.sites)
    net(example()).sum().backward()
    optimizer.step()
    handle.detach()
    assert len(optimizer.param_groups) == groups
    assert set(optimizer.state) <= set(net.parameters())


def test_an_optimizer_without_the_attention_parameters_is_refused(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = attach(net, "se", example=example())
    with pytest.raises(OptionError, match=r"SGD lacks 15 parameters of the attention, such as 'layer1\.0\.bn2\.gate'"):
        handle.check(optimizer)
    handle.check(torch.optim.SGD(net.parameters(), lr=0.1))


def test_join_refuses_what_is_not_an_optimizer(net: Net) -> None:
    handle = attach(net, "se", example=example())
    with pytest.raises(OptionError, match=r"optimizer must be a torch\.optim\.Optimizer, got str"):
        handle.join("sgd")  # type: ignore[arg-type]


def test_an_optimizer_with_a_scheduler_is_refused(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    handle = attach(net, "se", example=example())
    with pytest.raises(OptionError, match="optimizer must not have a scheduler yet"):
        handle.join(optimizer)


def test_warns_if_norms_stay_in_evaluation_mode_during_training(net: Net) -> None:
    net.train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    with pytest.warns(VisattnWarning, match=r"'layer1\.0\.bn2' and 2 more stay in evaluation mode while the model trains"):
        attach(net, "cbam", example=example())


def test_warns_if_a_module_did_not_run_in_the_forward_pass() -> None:
    class Helped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.helper = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return x + self.helper(x).mean() if self.training else x

    with pytest.warns(VisattnWarning, match="'helper' did not run in the forward pass, so attention there may never run"):
        handle = attach(Helped(), "se", where=["helper"], example=torch.randn(1, 3, 4, 4))
    assert handle.sites[0].channels == 2


def test_attached_model_trains_with_distributed_data_parallel(net: Net, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        handle = attach(net, "cbam", example=example())
        parallel = nn.parallel.DistributedDataParallel(net.train())
        for _ in range(2):  # a second forward pass fails if a parameter got no gradient in the first
            parallel(example()).square().sum().backward()
        assert all(parameter.grad is not None for parameter in handle.parameters())
        with pytest.raises(ModelError, match=r"must not be wrapped or compiled yet, got DistributedDataParallel"):
            attach(parallel, "se", example=example())
    finally:
        torch.distributed.destroy_process_group()


def opened(net: Net) -> tuple[Net, visattn.nn.Attachment, Tensor]:
    """Set gates to 1/2, so that lost attention changes the output."""
    before = net(example())
    handle = attach(net, "cbam", example=example(), init=0.5)
    after = net(example()).detach()
    assert not torch.allclose(before, after, atol=1e-3)
    return net, handle, after


def test_fusing_convolutions_with_norms_keeps_the_attention(net: Net, figures: Figures) -> None:
    from torch.fx.experimental.optimization import fuse

    model, _, expected = opened(net)
    fused = fuse(model)
    assert not any(isinstance(module, nn.BatchNorm2d) and module.num_features > 1 for module in fused.modules())
    worst = difference([expected], logits(fused, example()))
    figures("conv-norm fusion of an attached model", worst, "1e-5")
    assert worst <= 1e-5


def test_fusing_keeps_the_attention_of_resnet() -> None:
    from torch.fx.experimental.optimization import fuse

    model = torchvision.models.resnet18().eval()
    x = torch.randn(1, 3, 64, 64)
    plain = logits(model, x)
    attach(model, "se", example=x, init="paper")
    attached = logits(model, x)
    fused = logits(fuse(model), x)
    assert difference(attached, fused) <= 1e-5 * float(attached[0].abs().max())
    assert difference(plain, fused) > 1e-2 * float(plain[0].abs().max())


def test_attached_model_compiles_in_one_graph(net: Net) -> None:
    model, _, expected = opened(net)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(example()), expected)
    with pytest.raises(ModelError, match=r"must not be wrapped or compiled yet, got OptimizedModule"):
        attach(compiled, "se", example=example())


def test_attached_model_is_exported(net: Net) -> None:
    model, _, expected = opened(net)
    assert torch.equal(torch.export.export(model, (example(),)).module()(example()), expected)


def test_traced_by_fx_with_its_attention(net: Net) -> None:
    model, _, expected = opened(net)
    graph = torch.fx.symbolic_trace(model)
    assert any(".attention" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(example()), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_attached_model_is_copied_and_saved(net: Net, how: str) -> None:
    model, _, expected = opened(net)
    if how == "save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)  # our own bytes
    else:
        other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(other(example()), expected)
    assert not {id(parameter) for parameter in other.parameters()} & {id(parameter) for parameter in model.parameters()}


def test_norms_are_synchronized_after_attaching(net: Net) -> None:
    _, handle, _ = opened(net)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # type: ignore[no-untyped-call]
    assert isinstance(converted.layer1[0].bn2.base, nn.SyncBatchNorm)
    handle.detach()
    assert isinstance(converted.layer1[0].bn2, nn.SyncBatchNorm)


def test_timm_finds_the_last_norm_of_a_block() -> None:
    model = timm.create_model("resnet18", zero_init_last=False)
    handle = attach(model, "se", example=torch.randn(1, 3, 64, 64))
    model.init_weights(zero_init_last=True)
    assert all((model.get_submodule(name).base.weight == 0).all() for name in names(handle))


def test_features_of_timm_and_torchvision_pass_through_the_attention() -> None:
    x = torch.randn(1, 3, 64, 64)
    stages = timm.create_model("resnet18", features_only=True, zero_init_last=False).eval()
    plain = logits(stages, x)
    assert len(attach(stages, "se", example=x, init=0.5).sites) == 8
    assert difference(plain, logits(stages, x)) > 0
    model = torchvision.models.resnet18().eval()
    attach(model, "se", example=x, init=0.5)
    extractor = torchvision.models.feature_extraction.create_feature_extractor(model, ["layer4"])
    assert any(".attention" in name for name, _ in extractor.named_modules())


def test_gates_of_attached_attention_are_published(net: Net) -> None:
    from visattn._support.publish import listening

    handle = attach(net, "cbam", example=example())
    heard: list[tuple[nn.Module, str]] = []
    with listening(lambda module, role, *_: heard.append((module, role))):
        net(example())
    assert [module for module, role in heard if role == "channel_gate"] == [site.module for site in handle.sites]
