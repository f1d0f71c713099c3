"""`capture` together with other tools that change how a model runs: compilers, exporters, checkpointing, threads, other captures."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import visattn
from tests import tiny
from tests.capturing import own, small
from visattn.core.records import Recording
from visattn.errors import CaptureError, OptionError, UnsupportedModel

LAYERS = ["blocks.0.attn", "blocks.1.attn"]


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[Any, Recording]:
    with torch.no_grad(), visattn.capture(model, **options) as recording:
        out = model(x)
    return out, recording


def same(one: Recording, other: Recording) -> None:
    """Check that two recordings have the same calls, layers, weights and token locations."""
    assert [(r.layer, r.call, r.kind, r.queries, r.keys) for r in one] == [
        (r.layer, r.call, r.kind, r.queries, r.keys) for r in other
    ]
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine.operator.dense(), theirs.operator.dense(), rtol=0, atol=0)


# torch.compile


class Compiler:
    """Compiler backend that runs graphs unchanged and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def whole(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def by_block(model: Any, backend: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model


def by_block_in_place(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


WAYS = [whole, in_place, by_block, by_block_in_place]


@pytest.mark.parametrize("way", WAYS)
def test_compiled_model_is_recorded_like_the_eager_model_and_stays_compiled(way: Callable[[nn.Module, Any], Any]) -> None:
    torch.compiler.reset()
    compiler, x = Compiler(), tiny.pixels(2)
    model = way(tiny.vit(), compiler)
    with torch.no_grad():
        before = model(x)
        graphs = compiler.graphs
        out, recording = run(model, x)
        after = model(x)
    assert graphs > 0
    assert compiler.graphs == graphs
    expected, eager = run(tiny.vit(), x)
    same(recording, eager)
    assert recording.layers == LAYERS
    assert torch.equal(out, expected)
    assert torch.equal(before, after)


def test_model_that_was_captured_first_is_compiled_afterward() -> None:
    torch.compiler.reset()
    compiler, x, model = Compiler(), tiny.pixels(2), tiny.vit()
    out, _ = run(model, x)
    with torch.no_grad():
        torch.testing.assert_close(whole(model, compiler)(x), out)
    assert compiler.graphs > 0


def test_compilation_is_enabled_again_after_overlapping_captures_in_threads() -> None:
    torch.compiler.reset()
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with torch.no_grad(), visattn.capture(model) as recording:
            first_in.set()
            second_in.wait()
            recordings.append((model(x), recording))
        first_out.set()

    def second() -> None:
        first_in.wait()
        with torch.no_grad(), visattn.capture(model) as recording:
            second_in.set()
            first_out.wait()
            recordings.append((model(x), recording))

    compiler, x, recordings = Compiler(), tiny.pixels(), list[tuple[Tensor, Recording]]()
    model = whole(tiny.vit(), compiler)
    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [recording.layers for _, recording in recordings] == [LAYERS, LAYERS]
    assert compiler.graphs == 0
    with torch.no_grad():
        model(x)
    assert compiler.graphs > 0


# exported and traced models

TRACED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.export": lambda model: torch.export.export(model, (tiny.pixels(2),)).module(),
    "torch.fx": torch.fx.symbolic_trace,
    "torch.fx in a model": lambda model: nn.Sequential(torch.fx.symbolic_trace(model)),
}


@pytest.mark.parametrize("name", list(TRACED))
def test_traced_model_is_recorded_with_the_names_of_its_layers(name: str) -> None:
    model, x = own.vit(), tiny.pixels(2)
    out, recording = run(TRACED[name](model), x)
    expected, eager = run(model, x)
    torch.testing.assert_close(out, expected)
    assert recording.layers == [("0." if "in a model" in name else "") + layer for layer in own.LAYERS]
    for mine, theirs in zip(recording, eager, strict=True):
        assert (mine.kind, mine.queries, mine.keys) == (theirs.kind, theirs.queries, theirs.keys)
        torch.testing.assert_close(mine.operator.dense(), theirs.operator.dense(), rtol=0, atol=1e-6)


def test_timms_exported_model_is_recorded() -> None:
    model, x = tiny.vit(), tiny.pixels(2)
    same(run(TRACED["torch.export"](model), x)[1], run(model, x)[1])


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("make", ["trace", "script"])
def test_torchscript_is_refused(make: str) -> None:
    tools: Any = torch.jit
    model = tools.trace(tiny.vit(), tiny.pixels()) if make == "trace" else tools.script(nn.Conv2d(3, 4, 1))
    with pytest.raises(UnsupportedModel, match="TorchScript model runs outside Python"):
        run(model, tiny.pixels())


def test_exported_program_itself_is_refused() -> None:
    program: Any = torch.export.export(own.vit(), (tiny.pixels(),))
    with pytest.raises(UnsupportedModel, match=r"got ExportedProgram\. Pass its \.module\(\)"):
        run(program, tiny.pixels())


# checkpointing


class Checkpointed(nn.Module):
    """Block that is recomputed in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def gradients_of(recording: Recording, score: Tensor) -> list[Tensor]:
    grads = [tile.grad for record in recording.gradients(score) for tile in record.operator.tiles()]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


def test_checkpointed_model_has_the_gradients_of_the_plain_model() -> None:
    model: Any = tiny.vit().train()
    found = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        with visattn.capture(model, gradients=True) as recording:
            logits = model(tiny.pixels(2))
        assert [(record.layer, record.call) for record in recording] == [(layer, 0) for layer in LAYERS]
        found.append(gradients_of(recording, logits[0, 3]))
        assert len(recording) == 2
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("features", ["blocks.*", "none"])
def test_layers_recomputed_in_the_backward_pass_are_recorded_once(reentrant: bool, features: str) -> None:
    plain, model = own.vit(), own.vit()
    for i in range(2):
        model.blocks[i] = Checkpointed(model.blocks[i], reentrant)
    x = tiny.pixels(2).requires_grad_()
    with visattn.capture(model, features=features) as recording:
        model(x).sum().backward()
        model(x).sum().backward()
    assert [(record.layer, record.call, record.forward) for record in recording] == [
        (f"blocks.{i}.block.attn", 0, forward) for forward in (0, 1) for i in range(2)
    ]
    names = [name for name, _ in model.named_modules() if name.startswith("blocks.")]
    assert sorted((f.layer, f.forward) for f in recording.features) == sorted(
        (name, forward) for name in (names if features != "none" else []) for forward in (0, 1)
    )
    expected = run(plain, x)[1]
    for i in range(4):
        torch.testing.assert_close(recording[i].operator.dense(), expected[i % 2].operator.dense(), rtol=0, atol=0)


# several captures at once


def test_inner_module_of_data_parallel_is_recorded() -> None:
    parallel, x = nn.DataParallel(tiny.vit()), tiny.pixels(2)
    same(run(parallel.module, x)[1], run(tiny.vit(), x)[1])
    assert run(parallel, x)[1].layers == LAYERS


def test_captures_may_be_nested_and_left_in_order() -> None:
    model, other, x = tiny.vit(), own.vit(), tiny.pixels(2)
    with torch.no_grad(), visattn.capture(model) as outer:
        model(x)
        with visattn.capture(other) as middle, visattn.capture(model) as inner:
            other(x)
            model(x)
        model(x)
    alone = run(tiny.vit(), x)[1]
    assert (outer.forwards, middle.forwards, inner.forwards) == ([0, 1, 2], [0], [0])
    for forward in outer.forwards:
        assert [r.keys for r in outer.select(forward=forward)] == [r.keys for r in alone]
    same(inner, alone)
    same(middle, run(own.vit(), x)[1])


def test_three_threads_capture_one_compiled_model() -> None:
    torch.compiler.reset()
    model = whole(tiny.vit(), Compiler())
    expected = [run(tiny.vit(), tiny.pixels(seed=i))[1] for i in range(3)]
    found: list[list[Recording]] = [[], [], []]

    def work(i: int) -> None:
        found[i] = [run(model, tiny.pixels(seed=i))[1] for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        assert len(found[i]) == 4
        for recording in found[i]:
            same(recording, expected[i])


def test_after_an_error_no_mode_is_left_and_the_next_capture_is_correct() -> None:
    model, x = tiny.vit(), tiny.pixels(2)
    expected = run(tiny.vit(), x)[1]
    with torch.no_grad(), visattn.capture(model) as recording:
        with pytest.raises(AssertionError):
            model(tiny.pixels(2, (5, 5)))
        model(x)
    assert torch._C._len_torch_function_stack() == 0
    assert [record.keys for record in recording.select(forward=-1)] == [record.keys for record in expected]
    broken = model.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, x)
    broken.remove()
    assert torch._C._len_torch_function_stack() == 0
    same(run(model, x)[1], expected)


# timm models: nothing is changed


def state_of(model: nn.Module) -> dict[str, object]:
    """Return all state of a model that a capture could change."""
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        hooks = {key: value for key, value in vars(module).items() if "hooks" in key}
        assert not any(hooks.values())
        found[name] = (sorted(vars(module)), module.training, type(module).forward)
    for name, parameter in model.named_parameters():
        found[name] = (parameter.requires_grad, parameter.grad, id(parameter), parameter._version, sorted(vars(parameter)))
    return found


@pytest.mark.parametrize("name", ["swin", "maxvit", "hiera", "cait", "xcit", "levit", "crossvit", "volo"])
@pytest.mark.parametrize("gradients", [False, True], ids=["", "with gradients"])
def test_output_and_model_are_unchanged(name: str, gradients: bool) -> None:
    model, x = small.MODELS[name]()
    with nullcontext() if gradients else torch.no_grad():
        plain = model(x)
        before = state_of(model)
        with visattn.capture(model, gradients=gradients, features="all") as recording:
            out = model(x)
    assert torch.equal(out, plain)
    assert vars(out) == vars(plain) == {}
    assert out.requires_grad == plain.requires_grad
    assert state_of(model) == before
    assert not x.requires_grad
    assert torch._C._len_torch_function_stack() == 0
    assert len(recording) > 0


class Answers(nn.Module):
    """Model that returns several tensors."""

    def __init__(self, form: type) -> None:
        super().__init__()
        self.vit, self.form = own.vit(), form

    def forward(self, x: Tensor) -> Any:
        out = self.vit(x)
        return {"logits": out, "twice": out * 2} if self.form is dict else self.form([out, out * 2])


@pytest.mark.parametrize("form", [tuple, list, dict])
def test_outputs_of_any_container_type_are_unchanged(form: Any) -> None:
    model, x = Answers(form), tiny.pixels(2)
    out, recording = run(model, x)
    with torch.no_grad():
        plain = model(x)
    assert type(out) is type(plain) is form
    second: Any = "twice" if form is dict else 1
    assert torch.equal(out[second], plain[second])
    assert recording.layers == [f"vit.{layer}" for layer in own.LAYERS]


# bias caches


@pytest.mark.parametrize("name", ["levit_128s", "efficientformer_l1", "tiny_vit_5m_224"])
def test_gradients_of_a_model_that_caches_its_biases(name: str) -> None:
    """Check models that in evaluation mode cache a bias computed from parameters, with its graph, in the first forward pass."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3).eval()
    x, found = torch.randn(1, 3, 224, 224), []
    for _ in range(2):
        with visattn.capture(model, gradients=True) as recording:
            logits = model(x)
        found.append([gradients_of(recording, logits[0, i]) for i in (1, 1)])
    torch.testing.assert_close(found[0][0], found[0][1], rtol=0, atol=0)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)


def test_gradients_without_a_graph_or_that_were_not_requested_are_refused() -> None:
    model, x = tiny.vit(), tiny.pixels()
    with pytest.raises(CaptureError, match="gradients were requested, but the model runs under no_grad"):
        run(model, x, gradients=True)
    with pytest.raises(OptionError, match="no gradients were kept"):
        run(copy.deepcopy(model), x)[1].gradients(torch.zeros(()))


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_fully_checkpointed_model_is_recorded_as_one_forward_pass(reentrant: bool) -> None:
    model, x = tiny.vit(), tiny.pixels(2).requires_grad_()
    expected = run(tiny.vit(), x)[1]
    for _ in range(2):
        with visattn.capture(model, features="all") as recording:
            out: Any = checkpoint(model, x, use_reentrant=reentrant)
            out.sum().backward()
            model(x)
        assert recording.forwards == [0, 1]
        assert (len(recording), len(recording.features)) == (4, 6)
        assert [record.keys for record in recording] == [record.keys for record in expected] * 2
