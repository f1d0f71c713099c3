"""Attention inside `torch.func`, on nested tensors, under other modes, in recomputed layers and of `flex_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.capturing.watched import Model, Seen, image, tokens, watched
from visattn.core.capturing.intercept import mode
from visattn.core.capturing.trace.tracer import Tracer

SDPA = F.scaled_dot_product_attention
FUNC, NESTED = "runs inside torch.func", "runs on nested tensors"


def fused(x: Tensor) -> Tensor:
    q = tokens(x)
    return SDPA(q, q, q)


def written(x: Tensor) -> Tensor:
    q = tokens(x)
    return (q @ q.mT).softmax(-1) @ q


def observed(run: Callable[..., Any], *args: Any, times: int = 1) -> tuple[Seen, dict[str, str], Any]:
    """Run a function as a layer; return what was seen, the layers that are hidden, and the last output."""
    model = Model(run)
    seen = Seen(model)
    with seen.watch.watching():
        for _ in range(times):
            out = model(*args)
        hidden = dict(seen.watch.hidden)
    return seen, hidden, out


# --- tensors whose values cannot be read


@pytest.mark.parametrize("run", [fused, written])
def test_attention_inside_functional_transforms_is_hidden(run: Any) -> None:
    mapped = torch.func.vmap(lambda one: run(one[None])[0])
    seen, hidden, out = observed(mapped, image())
    assert (seen.calls, hidden) == ([], {"attn": FUNC})
    assert torch.allclose(out, run(image()), atol=1e-6)
    assert not seen.tape().whole


def test_product_inside_functional_transforms_hides_nothing() -> None:
    mapped = torch.func.vmap(lambda one: tokens(one[None])[0] @ tokens(one[None])[0].mT)
    seen, hidden, _ = observed(mapped, image())
    assert (seen.calls, hidden) == ([], {})
    assert not seen.tape().whole


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_of_nested_tensors_is_hidden() -> None:
    def run(x: Tensor, nested: Any) -> Tensor:
        SDPA(nested, nested, nested)
        return x + 1

    parts = [torch.randn(1, size, 4) for size in (2, 3)]
    seen, hidden, _ = observed(run, image(), torch.nested.nested_tensor(parts))
    assert (seen.calls, hidden, seen.tape().whole) == ([], {"attn": NESTED}, True)


def test_reason_is_known_for_each_kind_of_tensor() -> None:
    asked: list[str] = []

    def ask(x: Tensor) -> Tensor:
        asked.append(mode._why_unreadable(x))
        return x

    torch.func.vmap(ask)(torch.zeros(2))
    asked.append(mode._why_unreadable(torch.zeros(2)))
    asked.append(mode._why_unreadable(torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)))
    assert asked == [FUNC, "", NESTED]


# --- modes that are not PyTorch's


class Doubling(TorchFunctionMode):
    """Mode that doubles the result of attention by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is SDPA or getattr(func, "__name__", "") == "matmul":
            return out * self.factor
        return out


class Dispatching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def matmul(x: Tensor) -> Tensor:
    q = tokens(x)
    return torch.matmul((q.sin() * 2)[..., :2].softmax(-1), q[..., :2, :])


@pytest.mark.parametrize("run", [fused, matmul])
@pytest.mark.parametrize(("factor", "is_seen"), [(1.0, True), (2.0, False)])
def test_attention_that_a_mode_changes_is_hidden(run: Any, factor: float, is_seen: bool) -> None:
    with Doubling(factor):
        model = Model(run)
        seen = Seen(model)
        with seen.watch.watching():
            out = model(image())
            found, counts = dict(seen.watch.hidden), dict(seen.watch._mode.calls)
    assert len(seen.calls) == is_seen
    assert found == ({} if is_seen else {"attn": mode._CHANGED})
    assert counts == {"attn": int(is_seen)}
    assert torch.equal(out, run(image()) * factor)
    assert not seen.tape().whole
    names = [entry.operation.name for entry in seen.tape().entries]
    noted = "matmul" if run is matmul else "scaled_dot_product_attention"
    assert (noted in names) == (is_seen or run is matmul)


def test_dispatch_mode_that_changes_nothing_hides_nothing() -> None:
    model = Model(fused)
    seen = Seen(model)
    with seen.watch.watching(), Dispatching():  # type: ignore[no-untyped-call]
        out = model(image())
        assert not seen.watch.hidden
    assert seen.layers == [("attn", 0)]
    assert torch.equal(out, fused(image()))
    assert not seen.tape().whole


def test_forward_pass_without_strange_modes_may_be_relied_on() -> None:
    seen, hidden, _ = observed(written, image())
    assert (seen.tape().whole, hidden) == (True, {})


def test_query_of_a_size_is_trusted_under_strange_modes() -> None:
    class Sub(Tensor):
        pass

    def run(x: Tensor) -> int:
        return mine.dim() + mine.ndim

    mine = torch.zeros(2, 3).as_subclass(Sub)
    seen, _, out = observed(run, image())
    assert out == 4
    assert seen.tape().whole
    seen, _, _ = observed(lambda x: mine + 1, image())
    assert not seen.tape().whole


def test_result_is_pytorchs_own_if_it_is_repeated_exactly() -> None:
    q = torch.randn(1, 1, 3, 4)
    out = SDPA(q, q, q)
    own = mode._is_own
    assert own(SDPA, (q, q, q), {}, out)
    assert own(SDPA, (q, q, q, None), {}, out)
    assert own(SDPA, (q, q, q, None, 0.0), {}, out)
    assert own(SDPA, (q, q, q), {"dropout_p": 0.0}, out)
    assert not own(SDPA, (q, q, q), {}, out + 1)
    weights = out.softmax(-1)
    assert own(torch.matmul, (weights, q.mT), {}, weights @ q.mT)
    torch.manual_seed(0)
    dropped = SDPA(q, q, q, None, 0.5)
    for args, kwargs in (((q, q, q, None, 0.5), {}), ((q, q, q), {"dropout_p": 0.5})):
        torch.manual_seed(0)
        assert not own(SDPA, args, kwargs, dropped)
    many = torch.stack([q] * 3), q, q, q, True  # of another function, the fifth argument is no dropout
    assert own(lambda first, *_: first[0], many, {}, q)

    assert not own(lambda x: x, (torch.zeros(2).to_sparse(),), {}, torch.zeros(2))


# --- layers that run again


@pytest.mark.parametrize(("number", "is_seen"), [(-1, True), (0, False), (1, False)])
def test_attention_in_a_backward_pass_is_not_seen(monkeypatch: pytest.MonkeyPatch, number: int, is_seen: bool) -> None:
    def run(x: Tensor) -> Tensor:
        q = tokens(x)
        with monkeypatch.context() as patched:
            patched.setattr(torch._C, "_current_graph_task_id", lambda: number)
            return SDPA(q, q, q)

    seen, (out,) = watched(run, image())
    assert len(seen.calls) == is_seen
    assert torch.equal(out, fused(image()))


def test_layer_that_is_recomputed_inside_the_forward_pass_is_seen_once() -> None:
    def run(x: Tensor) -> Tensor:
        out = checkpoint(fused, x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        result: Tensor = out + gradient.sum()
        return result

    seen, _ = watched(run, image().requires_grad_())
    assert seen.layers == [("attn", 0)]


# --- flex_attention

flex_warns = pytest.mark.filterwarnings("ignore:flex_attention called without")


@flex_warns
def test_flexible_attention_keeps_its_result() -> None:
    def run(x: Tensor) -> Any:
        q = tokens(x)
        return flex_attention(q, q, q, score_mod=lambda score, _b, _h, _q, k: score + k, scale=0.5)

    seen, outputs = watched(run, image(), times=2)
    assert seen.layers == [("attn", 0)] * 2
    assert seen.attention.fused
    (entry,) = (entry for entry in seen.tape().entries if entry.attention is not None)
    assert (entry.func, len(entry.args), entry.kwargs) == (SDPA, 3, {})
    assert torch.equal(outputs[0], run(image()))
    assert torch.equal(outputs[1], outputs[0])
    for _, _, call, _ in seen.calls:
        assert torch.allclose(call.mix(call.weigh()), outputs[0], atol=1e-5)


@flex_warns
def test_flexible_attention_may_be_replaced() -> None:
    given = torch.full((2, 1, 6, 3), 7.0)

    def run(x: Tensor) -> Any:
        q = tokens(x)
        return flex_attention(q, q, q, return_aux=AuxRequest(lse=True))

    seen, ((out, sums),) = watched(run, image(), replace=lambda *_: given)
    assert out is given
    assert torch.equal(sums.lse, run(image())[1].lse)
    assert seen.call.out is given


@flex_warns
def test_flexible_attention_under_a_strange_mode_is_hidden() -> None:
    def run(x: Tensor) -> Any:
        q = tokens(x)
        return flex_attention(q, q, q)

    with Doubling(1.0):
        model = Model(run)
        seen = Seen(model)
        with seen.watch.watching():
            out = model(image())
            found, counts = dict(seen.watch.hidden), dict(seen.watch._mode.calls)
    assert (seen.calls, found, counts) == ([], {"attn": mode._CHANGED}, {"attn": 0})
    assert torch.equal(out, run(image()))


# --- numbers that a model reads


def test_tensors_whose_length_is_read_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(Tracer, "read_length", lambda _, tensor: read.append(tensor))

    def run(x: Tensor) -> Tensor:
        given.append(x)
        assert (x.size(0), x.dim(), x.ndim, torch.numel(x), len(x)) == (2, 4, 4, 36, 2)
        assert x.shape[1] == 3
        return x + 1

    given: list[Tensor] = []
    watched(run, image())
    assert [tensor is given[0] for tensor in read] == [True] * 4


def test_steps_of_a_selection_are_noted_again_if_the_selection_changes() -> None:
    def run(x: Tensor, index: Tensor) -> Tensor:
        return x.flatten(1)[:, index] * 2

    model = Model(run)
    seen = Seen(model)
    with seen.watch.watching():
        for index in ([0, 1], [2, 1], [0, 1], [2, 1]):
            model(image(), torch.tensor(index))
    tapes = [seen.tape(number) for number in range(4)]
    assert [tapes[0] is tapes[2], tapes[1] is tapes[3], tapes[0] is tapes[1]] == [True, True, False]
    for tape in tapes:
        assert [len(entry.steps) > 0 for entry in tape.entries] == [True] * 3
