"""Records of attention calls by hand: which calls are recorded, what they hold, and which tokens the output is computed from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from visattn.core.capturing.description import ModelDescription
from visattn.core.capturing.following.tape_readouts import APART, VALUES
from visattn.core.capturing.recorder import _Session, _Stream
from visattn.core.capturing.tokens.arrangement import Arrangement, Tokens
from visattn.core.geometry import Box
from visattn.core.operators import MatrixOperator
from visattn.core.records import AttentionRecord, Source, TokenLayout
from visattn.errors import CaptureError

BOX = Box(0.0, 0.0, 8.0, 12.0)
GRID = TokenLayout("tokens", (), (2, 3), BOX)
CLASS = TokenLayout("tokens", ("cls",), (2, 3), BOX)
QUERIES = TokenLayout("tokens", ("query",), (), BOX)
WEIGHT, WEIGHTS, VALUE = torch.ones(4, 4), torch.full((2, 1, 6, 6), 1 / 6), torch.ones(2, 1, 6, 4)
SELF, SOURCE = Arrangement("self", GRID, GRID), Source(WEIGHTS, lambda gradient: gradient)


class Called:
    """Attention call that notes what is asked of it."""

    rows = columns = 4

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def keep(self, wanted: bool, *, values: bool, graph: bool) -> None:
        self.asked["keep"] = wanted, values, graph

    def sources(self) -> tuple[Tensor, ...]:
        self.asked["sources"] = True
        return (torch.ones(3),)

    def operator(self, _: Arrangement, vectors: Any) -> MatrixOperator:
        self.asked["vectors"] = vectors
        return MatrixOperator(WEIGHTS, None, None)

    def values(self, _: Arrangement) -> Tensor:
        return VALUE

    def source(self, _: Arrangement) -> Source:
        return SOURCE


def session(*, layers: str = "*", values: bool = False, gradients: bool = False, **facts: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2))
    return _Session(model, ModelDescription({}, "cls", **facts), layers, values, gradients, True)


def attention(layer: str = "attn", *, doubtful: bool = False) -> Any:
    return SimpleNamespace(layer=layer, call=3, doubtful=doubtful, fused=True)


def forward(located: Any = (SELF, ("before", 1)), **facts: Any) -> Any:
    asked: list[Any] = []

    def arrangement(*args: Any) -> Any:
        asked.append(args)
        return located

    given = {
        "asked": asked,
        "number": 2,
        "normalizes": False,
        "inputs": ((8, 12), 2),
        "arrangement": arrangement,
        "conclusions": lambda: None,
        "readouts_fit": None,
        "vectors": lambda _: "vectors",
        "output_weight": lambda *_: WEIGHT,
        "tokens": lambda slot: Tokens(GRID, 2, None) if slot == 7 else None,
    }
    return SimpleNamespace(**(given | facts))


def recorded(made: Any, call: Any = None, *, pass_: Any = None, of: Any = None, stream: Any = None) -> AttentionRecord | None:
    """Return the record of a call, or None."""
    made._record(pass_ or forward(), nn.Identity(), call or Called(), of or attention(), stream, False)
    return made.recording.records[0] if made.recording.records else None


# --- during the forward pass


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("layers", ["*", "attn", "a*", "b*"])
def test_operands_of_wanted_layers_are_copied(values: bool, gradients: bool, layers: str) -> None:
    made, call, owner = session(layers=layers, values=values, gradients=gradients), Called(), nn.Identity()
    note = attention()
    made._receive("attn", owner, call, note)
    is_wanted = layers != "b*"
    assert call.asked == {"keep": (is_wanted, values or gradients, gradients)} | ({"sources": True} if is_wanted else {})
    assert made._calls == [(owner, call, note, None, False)]


def test_input_of_a_block_belongs_to_its_first_attention() -> None:
    made, stream = session(values=True, adds_to=lambda _: "block"), _Stream(VALUE, 7)
    made._stream = {"block": stream, "other": _Stream(VALUE, 8)}
    for _ in range(2):
        made._receive("attn", nn.Identity(), Called(), attention())
    assert [call[3] for call in made._calls] == [stream, None]
    assert list(made._stream) == ["other"]
    apart = session(values=True)
    apart._stream = {"block": stream}
    apart._receive("attn", nn.Identity(), Called(), attention())
    assert apart._calls[0][3] is None
    without_values = session(adds_to=lambda _: "block")
    without_values._stream = {"block": stream}
    without_values._receive("attn", nn.Identity(), Called(), attention())
    assert without_values._calls[0][3] is None


def test_call_without_a_graph_is_refused_only_if_gradients_are_needed() -> None:
    with torch.no_grad():
        session()._receive("attn", nn.Identity(), Called(), attention())
        for layer, name in (("attn", "but attn runs"), ("", "but Identity runs")):
            with pytest.raises(CaptureError, match=name):
                session(gradients=True)._receive(layer, nn.Identity(), Called(), attention())


def test_failed_forward_pass_leaves_nothing() -> None:
    made = session(values=True)
    made._receive("attn", nn.Identity(), Called(), attention())
    made._features.append(lambda _: None)
    made._stream["block"] = _Stream(VALUE, 7)
    made._drop()
    assert (made._calls, made._features, made._stream) == ([], [], {})


# --- records


def test_record_holds_what_is_known_of_the_call() -> None:
    record = recorded(session())
    assert record is not None
    assert (record.layer, record.call, record.forward, record.kind) == ("attn", 3, 2, "self")
    assert (record.queries, record.keys, record.follows) == (GRID, GRID, ("before", 1))
    assert (record.value, record.output_weight, record.residual, record.source) == (None, None, None, None)


def test_values_come_with_vectors_output_weight_and_residual_stream() -> None:
    call, made = Called(), session(values=True)
    record = recorded(made, call, stream=_Stream(VALUE[:, 0], 7))
    assert record is not None
    assert record.value is VALUE
    assert record.output_weight is WEIGHT
    assert record.residual is not None
    assert torch.equal(record.residual, VALUE[:, 0])
    assert record.source is None
    assert call.asked["vectors"] == "vectors"
    without_values = Called()
    recorded(session(), without_values)
    assert without_values.asked["vectors"] is None


def test_described_output_weight_comes_first() -> None:
    other = torch.zeros(4, 4)
    for values in (False, True):
        record = recorded(session(values=values, output_weight=lambda _: other))
        assert record is not None
        assert record.output_weight is (other if values else None)


def test_gradients_come_with_a_source() -> None:
    record = recorded(session(gradients=True))
    assert record is not None
    assert record.source is SOURCE
    assert record.value is None


@pytest.mark.parametrize(
    ("layers", "doubtful", "is_located", "is_recorded", "is_passed_by"),
    [
        ("*", False, True, True, False),
        ("*", True, True, True, False),
        ("*", True, False, False, False),
        ("*", False, False, False, False),
        ("other", False, True, False, True),
        ("other", True, True, False, True),
        ("other", True, False, False, False),
    ],
)
def test_call_is_recorded_unless_it_is_a_gate_or_of_another_layer(
    layers: str, doubtful: bool, is_located: bool, is_recorded: bool, is_passed_by: bool
) -> None:
    made, pass_ = session(layers=layers), forward((SELF, None) if is_located else None)
    record = recorded(made, pass_=pass_, of=attention(doubtful=doubtful))
    assert (record is not None) == is_recorded
    assert list(made._passed_by) == (["attn"] if is_passed_by else [])
    assert len(pass_.asked) == (layers == "*" or doubtful)


# --- the end of a forward pass


def ended(made: Any, conclusions: Any = None, hidden: Any = None, stated: bool = False) -> Any:
    made._description = ModelDescription({}, "cls", stated=stated)
    made.watch = SimpleNamespace(hidden=hidden or {})
    made._ended(forward(conclusions=lambda: conclusions))
    return made.recording


def test_calls_are_recorded_in_order_and_then_forgotten() -> None:
    made = session()
    order: list[str] = []
    for layer in ("a", "b", "c"):
        made._receive(layer, nn.Identity(), Called(), attention(layer))
    made._features.append(lambda pass_: order.append(f"feature of {pass_.number}"))
    recording = ended(made)
    assert [record.layer for record in recording.records] == ["a", "b", "c"]
    assert order == ["feature of 2"]
    assert (made._calls, made._features) == ([], [])
    assert (recording.input_size, recording.images) == ((8, 12), 2)
    assert (recording.unseen, recording.readouts) == ([], {})


@pytest.mark.parametrize(
    ("hidden", "unseen"),
    [
        ({}, [("", "is lost"), ("a", "is fused")]),
        ({"b": "is scripted"}, [("a", "is fused"), ("b", "is scripted")]),
        ({"a": "is scripted"}, [("a", "is scripted")]),
    ],
)
def test_hidden_layers_explain_the_tensors_of_unknown_origin(hidden: Any, unseen: Any) -> None:
    conclusions = SimpleNamespace(unseen={"": "is lost", "a": "is fused"}, cut=None, readouts=None)
    recording = ended(session(), conclusions, hidden)
    assert [(one.layer, one.reason) for one in recording.unseen] == unseen
    assert {one.forward for one in recording.unseen} == {2}
    assert list(recording.readouts) == [2]


def test_stated_readout_is_not_read() -> None:
    conclusions = SimpleNamespace(unseen={}, cut=None, readouts=None)
    assert ended(session(), conclusions, stated=True).readouts == {}


def test_only_the_last_tokens_are_kept_if_asked() -> None:
    for keeps_last in (False, True):
        made, kept = session(), list[int]()
        made.keeps_last = keeps_last
        made._keep_last = lambda pass_, kept=kept: kept.append(pass_.number)
        ended(made)
        assert kept == ([2] if keeps_last else [])


# --- readouts


def read(layouts: Any, shares: Any = None, *, pools: bool, kinds: Any = (), kept: Any = None) -> Any:
    """Return the readout of an output that is computed from tensors with these layouts."""

    def take(activation: Tensor, images: int) -> Tensor:
        return activation * images

    parts = [SimpleNamespace(slot=slot, layout=layout, take=take) for slot, layout in enumerate(layouts)]
    calls = {number: None if kind is None else (Arrangement(kind, QUERIES, GRID), None) for number, kind in enumerate(kinds)}
    conclusions = SimpleNamespace(
        cut=SimpleNamespace(pools=pools, parts=parts),
        readouts=SimpleNamespace(images=2, named={}, shares=lambda _: shares),
        calls=calls,
    )
    return session()._read(forward(kept=lambda slot: (kept or {}).get(slot)), cast(Any, conclusions))


def test_output_of_unknown_tokens_has_no_readout() -> None:
    cut, readouts = SimpleNamespace(pools=True, parts=[]), SimpleNamespace(images=2, named={}, shares=lambda _: None)
    for known in ((None, None), (cut, None), (None, readouts)):
        readout = session()._read(forward(), SimpleNamespace(cut=known[0], readouts=known[1], calls={}))
        assert (readout.query, readout.layout, readout.reason) == ("", None, "")


def test_shares_name_the_tokens_that_are_read() -> None:
    first = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0]])
    readout = read([CLASS], [first], pools=True)
    assert (readout.query, readout.layout, readout.reason, readout.source) == ("cls", CLASS, "", None)
    assert readout.shares is first
    assert read([GRID], [torch.full((1, 6), 1 / 6)], pools=True).query == "mean"


def test_tokens_without_shares_have_the_reason() -> None:
    pooled = read([CLASS], pools=True)
    assert (pooled.query, pooled.shares, pooled.reason) == ("", None, VALUES)
    apart = read([CLASS], [torch.ones(1, 7)], pools=False)
    assert (apart.query, apart.shares, apart.reason) == ("cls", None, APART)


def test_several_sets_of_tokens_have_one_readout_if_they_have_one_name() -> None:
    first, mean = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0]]), torch.full((1, 6), 1 / 6)
    other = torch.tensor([[2.0, 0, 0, 0, 0, 0, 0]])
    same = read([CLASS, CLASS, CLASS], [first, first, other], pools=True)
    assert same.query == "cls"
    assert same.shares is other
    assert read([CLASS, GRID], [first, mean], pools=True).reason == "the output is computed from several sets of tokens"


@pytest.mark.parametrize(("kinds", "pools"), [(("pool",), True), (("cross",), False), ((), False), ((None, "pool"), True)])
def test_results_of_pooling_queries_are_marked(kinds: Any, pools: bool) -> None:
    assert read([QUERIES], [torch.ones(1, 1)], pools=True, kinds=kinds).pools == pools
    assert not read([GRID], [torch.full((1, 6), 1 / 6)], pools=True, kinds=kinds).pools


def test_tensor_behind_the_last_attention_is_a_source() -> None:
    tensor = torch.ones(2, 7, 4)
    source = read([CLASS], pools=True, kept={0: tensor}).source
    assert source.tensor is tensor
    assert torch.equal(source.gradient(torch.ones(3)), torch.full((3,), 2.0))
