"""Forward passes that repeat a known tape are not traced again; their recordings must be the same as if they were."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.checkpoint import checkpoint

import visattn
from tests import tiny
from tests.capturing import own
from tests.samples import sampled
from tests.zoo import FAMILIES
from visattn.core.records import Recording
from visattn.errors import CaptureError, NoAttentionCaptured

READ = 2  # forward passes after which the next is certainly compared with a tape


def mode_on() -> object:
    return _get_current_function_mode()  # type: ignore[no-untyped-call]


def run(model: nn.Module, x: Tensor, **options: Any) -> Recording:
    with torch.no_grad(), visattn.capture(model, **options) as recording:
        model(x)
    return recording


def known(model: nn.Module, x: Tensor) -> Recording:
    """Capture a model until its tape is known; return the last recording."""
    for _ in range(READ + 1):
        recording = run(model, x)
    return recording


def weights(recording: Recording) -> list[Tensor]:
    return [record.operator.block(number) for record in recording for number in range(_blocks(record))]


def _blocks(record: visattn.AttentionRecord) -> int:
    index = record.operator.query_index
    return 1 if index is None else len(index)


def facts(recording: Recording) -> list[object]:
    return [(r.layer, r.call, r.forward, r.kind, r.queries, r.keys, r.follows, r.reason) for r in recording]


@pytest.mark.parametrize("name", sampled(FAMILIES, 3))
def test_every_later_capture_equals_the_first(name: str, followed: list[None]) -> None:
    family = FAMILIES[name]
    size = family.sizes[-1]
    torch.manual_seed(0)
    model, x = family.build(size).eval(), tiny.pixels(2, size)
    with torch.no_grad(), visattn.capture(model) as first:
        out = model(x)
    for _ in range(3):
        with torch.no_grad(), visattn.capture(model) as later:
            again = model(x)
        torch.testing.assert_close(again, out, rtol=0, atol=0)
        assert facts(later) == facts(first)
        assert all(map(torch.equal, weights(later), weights(first)))
    assert len(followed) <= 2  # the second pass differs if biases are cached in the first


class Shared(nn.Module):
    """Model that reuses one block and one identity, and also attends in its own `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.same = nn.Conv2d(3, 32, tiny.PATCH, tiny.PATCH), nn.Identity()
        self.block = own.Attention(F.scaled_dot_product_attention, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(self.stem(x)).flatten(2).mT
        for _ in range(3):
            x = self.same(x) + self.same(self.block(self.same(x)))
        x = F.scaled_dot_product_attention(x, x, x)
        x = F.softmax(self.same(x) @ x.mT, -1) @ x
        out: Tensor = self.same(x).mean(1)
        return out


def test_calls_of_a_module_that_runs_several_times_are_distinguished(followed: list[None]) -> None:
    model, x = Shared().eval(), tiny.pixels(2)
    first = run(model, x)
    last = known(model, x)
    assert len(followed) == 1
    assert [(r.layer, r.call) for r in last] == [("block", 0), ("block", 1), ("block", 2), ("", 0), ("", 1)]
    assert facts(last) == facts(first)
    assert all(map(torch.equal, weights(last), weights(first)))


class Flag:
    """Global state that a capture cannot observe."""

    ways = ("fused", "written", "none", "turned", "twice", "longer")
    way = "fused"


def by_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if Flag.way == "written":
        return torch.matmul((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), v)
    if Flag.way == "none":
        return v
    if Flag.way == "turned":
        q = q.mT.mT
    if Flag.way == "twice":
        v = F.scaled_dot_product_attention(q, k, v)
    if Flag.way == "longer":
        k, v = (torch.cat([x, x], -2) for x in (k, v))
    out: Tensor = F.scaled_dot_product_attention(q, k, v)
    return out


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("way", Flag.ways[1:])
def test_changes_of_a_global_are_noticed(way: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = own.vit(by_flag), tiny.pixels(2)
    monkeypatch.setattr(Flag, "way", "fused")
    for _ in range(stage + 1):
        run(model, x)
    monkeypatch.setattr(Flag, "way", way)
    for _ in range(2):
        if way == "none":
            with pytest.raises(NoAttentionCaptured):
                run(model, x)
        else:
            recording, anew = run(model, x), run(copy.deepcopy(model), x)
            assert facts(recording) == facts(anew)
            assert all(map(torch.equal, weights(recording), weights(anew)))
    assert mode_on() is None
    monkeypatch.setattr(Flag, "way", "fused")
    assert facts(run(model, x)) == facts(run(copy.deepcopy(model), x))


class Rolled(nn.Module):
    """One call whose arguments have the same values in the same order, by name or by position, and other meanings."""

    by_name = True

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        cells = self.patches(x)[0]
        cells = torch.roll(cells, dims=1, shifts=2) if self.by_name else torch.roll(cells, 1, 2)
        tokens = cells[:, :2, :2].flatten(1).mT[None, None]
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)


def test_arguments_that_lose_their_names_are_another_call() -> None:
    model, x = Rolled().eval(), torch.randn(1, 3, 20, 20)
    layouts = []
    for by_name in (True, False):
        model.by_name = by_name
        with torch.no_grad(), visattn.capture(model) as known:
            model(x)
        fresh = Rolled().eval()
        fresh.by_name = by_name
        with torch.no_grad(), visattn.capture(fresh) as first:
            fresh(x)
        assert known[0].keys == first[0].keys
        layouts.append(known[0].keys)
    assert layouts[0] != layouts[1]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["blocks.0.attend", "blocks.1"])
def test_failed_forward_pass_leaves_no_state(error: type[BaseException], where: str) -> None:
    model, x = tiny.vit(), tiny.pixels()
    expected = facts(known(model, x))
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    fail = [True]
    attention = model.get_submodule("blocks.0.attn")

    def failing(*_: object) -> None:
        if fail:
            raise error

    part = attention.get_submodule("proj") if where.endswith("attend") else model.get_submodule(where)
    part.register_forward_pre_hook(failing)
    fail.clear()
    known(model, x)
    fail.append(True)
    with pytest.raises(error):
        run(model, x)
    assert mode_on() is None
    fail.clear()
    left = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert sum(left) == sum(hooks) + 1
    assert facts(run(model, x)) == expected


def test_failed_forward_pass_within_a_capture_leaves_no_records() -> None:
    model, x = tiny.vit(), tiny.pixels()
    known(model, x)
    with torch.no_grad(), visattn.capture(model) as recording:
        hook = model.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        hook.remove()
        model(x)
    assert {record.forward for record in recording} == {1}
    assert [r.layer for r in recording] == ["blocks.0.attn", "blocks.1.attn"]


def test_other_torch_function_modes_stay_active() -> None:
    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, x = tiny.vit(), tiny.pixels()
    expected = facts(known(model, x))
    with Other() as outer:
        assert facts(run(model, x)) == expected
        assert mode_on() is outer
    with torch.no_grad(), visattn.capture(model) as recording, Other() as inner:
        model(x)
        assert mode_on() is inner
    assert facts(recording) == expected


def test_known_captures_and_interventions_can_be_nested() -> None:
    model, x = tiny.vit(), tiny.pixels()
    expected = weights(known(model, x))
    for _ in range(READ + 1):
        with torch.no_grad(), visattn.capture(model) as outer, visattn.capture(model) as inner:
            model(x)
        with torch.no_grad(), visattn.capture(model) as recording, visattn.intervene(model, "blocks.1.*", head=0, scale=0):
            model(x)
        assert all(map(torch.equal, weights(outer), expected))
        assert all(map(torch.equal, weights(inner), expected))
        assert float(weights(recording)[1][:, 0].abs().max()) == 0
        torch.testing.assert_close(weights(recording)[1][:, 1], expected[1][:, 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"layers": "blocks.1.*"}, {"values": True}, {"features": "all"}, {"features": ["blocks.0.*"]}]
)
def test_requested_options_are_kept_in_a_known_forward_pass(options: dict[str, Any]) -> None:
    model, x = tiny.vit(), tiny.pixels(2)
    expected = run(copy.deepcopy(model), x, **options)
    known(model, x)
    for _ in range(READ + 1):
        recording = run(model, x, **options)
        assert facts(recording) == facts(expected)
        assert all(map(torch.equal, weights(recording), weights(expected)))
        assert [feature.layer for feature in recording.features] == [feature.layer for feature in expected.features]
        for record, other in zip(recording, expected, strict=True):
            torch.testing.assert_close(record.value, other.value, rtol=0, atol=0)


def test_masks_are_copied_in_a_known_forward_pass() -> None:
    """Check that masks are copied: the model may overwrite its mask after the call."""
    mask = torch.zeros(1, 1, 26, 26)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask.zero_()[..., 3] = -5
        out = F.scaled_dot_product_attention(q, k, v, mask[..., : q.shape[-2], : k.shape[-2]])
        mask.zero_()
        return out

    model, x = own.vit(masked), tiny.pixels(2)
    first = run(model, x)
    assert all(map(torch.equal, weights(known(model, x)), weights(first)))


def test_values_that_are_not_finite_are_refused_in_a_known_forward_pass() -> None:
    model, x = tiny.vit(), tiny.pixels()
    known(model, x)
    with torch.no_grad():
        model.get_parameter("blocks.1.attn.qkv.weight")[0, 0] = float("nan")
    with pytest.raises(CaptureError, match=r"blocks\.1\.attn: .* query values are NaN"):
        run(model, x)


def test_training_mode_is_recorded_too() -> None:
    model, x = tiny.vit().train(), tiny.pixels(2)
    assert facts(known(model, x)) == facts(run(tiny.vit(), x))


def scripted() -> nn.Module:
    return torch.jit.script(nn.LayerNorm(32))


def traced() -> nn.Module:
    return torch.jit.trace(nn.LayerNorm(32), torch.randn(2, 26, 32))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("make", [scripted, traced])
def test_model_with_a_compiled_part_is_captured(make: Callable[[], nn.Module]) -> None:
    model, x = own.vit(), tiny.pixels(2)
    first = run(copy.deepcopy(model), x)
    part = make()
    part.load_state_dict(model.get_submodule("blocks.0.norm").state_dict())
    model.get_submodule("blocks.0").norm = part
    for _ in range(READ + 1):
        recording = run(model, x)
        assert [record.layer for record in recording] == own.LAYERS
        for mine, theirs in zip(weights(recording), weights(first), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("whole_first", [True, False])
def test_captures_of_a_model_and_its_submodule_can_be_nested(whole_first: bool) -> None:
    part = tiny.vit()
    whole, x = nn.Sequential(nn.Identity(), part, nn.Identity()), tiny.pixels()
    expected = weights(run(part, x))
    for _ in range(READ + 2):
        first, second = (whole, part) if whole_first else (part, whole)
        with torch.no_grad(), visattn.capture(first) as outer, visattn.capture(second) as inner:
            whole(x)
        assert mode_on() is None
        for recording in (outer, inner):
            assert all(map(torch.equal, weights(recording), expected))
            assert len(recording) == 2
        for model in (whole, part):
            assert all(map(torch.equal, weights(run(model, x)), expected))


class Strided(nn.Module):
    """Model in which a call returns its argument or a copy, depending on the strides of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 16, 16)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = torch.sin(pixels).contiguous()
        tokens = self.embed(pixels).flatten(2).mT
        return self.attention(tokens, tokens, tokens)[0].mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "layouts", [(torch.contiguous_format, torch.channels_last), (torch.channels_last, torch.contiguous_format)]
)
def test_a_call_that_copies_in_one_forward_pass_and_not_in_another_keeps_places(
    layouts: tuple[torch.memory_format, ...], checkpointed: bool
) -> None:
    torch.manual_seed(0)
    model = Strided().eval()
    for layout in (*layouts, *layouts):
        pixels = tiny.pixels(2).contiguous(memory_format=layout).requires_grad_()
        with visattn.capture(model) as recording:
            out = checkpoint(model, pixels, use_reentrant=False) if checkpointed else model(pixels)
        assert [record.kind for record in recording] == ["self"]
        assert recording.reads == "mean"
        out.sum().backward()
        fresh = Strided().eval()
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(weights(recording), weights(run(fresh, pixels.detach())), rtol=0, atol=0)


def into_slice(y: Tensor, x: Tensor) -> Tensor:
    y[:, :2] = x[:, :2]
    return y


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "y += x": operator.iadd,
    "add_": lambda y, x: y.add_(x),
    "slice": into_slice,
    "inplace=True": lambda y, _: F.relu(y, inplace=True),
    "inplace by position": lambda y, _: F.hardtanh(y, 0.0, 6.0, True),
}


class Overwritten(nn.Module):
    """CNN that writes into the output of a layer."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, 5)
        self.write = [write]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            x = self.write[0](self.block(x), x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", list(WRITES))
def test_kept_layers_that_are_written_into_and_passes_without_them_take_turns(how: str) -> None:
    """Keeping a layer adds calls to the tape, so the passes agree up to the write, which is then compared before it runs."""
    torch.manual_seed(0)
    model, x = Overwritten(WRITES[how]).eval().requires_grad_(False), torch.rand(1, 3, 32, 32)
    for layers in (["block"], ["head"]) * 3:
        with visattn.capture(model, features=layers, gradients=True) as recording:
            model(x)
        assert recording.unseen == []
        if layers == ["block"]:
            assert [feature.layout is not None for feature in recording.features] == [True, True]
