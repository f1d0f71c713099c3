"""Several captures, captures of some layers only, and refusals."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.capturing.written_out import run, write_out
from visattn.core import methods
from visattn.core.operators import MatrixOperator
from visattn.core.records import Recording
from visattn.errors import CaptureError, NoAttentionCaptured, OptionError


def test_nested_captures_of_one_model_both_record() -> None:
    model = tiny.vit()
    with torch.no_grad(), visattn.capture(model) as outer:
        model(tiny.pixels())
        with visattn.capture(model) as inner:
            model(tiny.pixels(seed=1))
    assert (len(outer), len(inner)) == (4, 2)
    assert outer.forwards == [0, 1]
    assert torch.equal(outer[3].operator.dense(), inner[1].operator.dense())


def test_nested_captures_of_two_models_record_their_own() -> None:
    first, second = tiny.vit(), tiny.vit(1, depth=3)
    with torch.no_grad(), visattn.capture(first) as outer, visattn.capture(second) as inner:
        first(tiny.pixels())
        second(tiny.pixels())
    assert outer.layers == ["blocks.0.attn", "blocks.1.attn"]
    assert inner.layers == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert torch.equal(outer[0].operator.dense(), run(first, tiny.pixels())[1][0].operator.dense())


def test_another_model_run_inside_is_not_recorded() -> None:
    model, other = tiny.vit(), tiny.vit(1)
    with torch.no_grad(), visattn.capture(model) as recording:
        other(tiny.pixels())
        model(tiny.pixels())
        other(tiny.pixels())
    assert len(recording) == 2
    assert torch.equal(recording[1].operator.dense(), run(model, tiny.pixels())[1][1].operator.dense())


def test_attention_called_directly_in_the_with_block_is_not_recorded() -> None:
    model = tiny.vit()
    with torch.no_grad(), visattn.capture(model) as recording:
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 7, 8))
        model(tiny.pixels())
    assert len(recording) == 2


@pytest.mark.parametrize("shared", [True, False], ids=["one model", "a model each"])
def test_three_threads_record_their_own_forwards(shared: bool) -> None:
    models_of = [tiny.vit(0 if shared else i) for i in range(3)]
    used = [models_of[0] if shared else model for model in models_of]
    expected = [run(models_of[i], tiny.pixels(seed=i))[1][1].operator.dense() for i in range(3)]
    found: dict[int, list[Recording]] = {0: [], 1: [], 2: []}
    ready = threading.Barrier(3)

    def work(i: int) -> None:
        ready.wait()
        found[i] = [run(used[i], tiny.pixels(seed=i))[1] for _ in range(8)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(recordings) for recordings in found.values()] == [8, 8, 8]
    assert {len(recording) for recordings in found.values() for recording in recordings} == {2}
    assert all(torch.equal(recording[1].operator.dense(), expected[i]) for i in found for recording in found[i])
    assert not used[0].get_submodule("patch_embed")._forward_pre_hooks


def test_forward_of_the_same_model_in_another_thread_is_not_recorded() -> None:
    model = tiny.vit()
    elsewhere = threading.Thread(target=model, args=(tiny.pixels(seed=1),))
    with torch.no_grad(), visattn.capture(model, features="all") as recording:
        elsewhere.start()
        elsewhere.join()
        model(tiny.pixels())
    alone = run(model, tiny.pixels(), features="all")[1]
    assert recording.forwards == [0]
    assert (len(recording), len(recording.features)) == (len(alone), len(alone.features))
    assert torch.equal(recording.features[0].value, alone.features[0].value)


def test_explicit_attention_is_captured_like_fused_attention() -> None:
    model, eager = tiny.vit(), tiny.vit()
    write_out(eager)
    (_, fused), (_, plain) = run(model, tiny.pixels()), run(eager, tiny.pixels())
    for one, other in zip(fused, plain, strict=True):
        assert isinstance(other.operator, MatrixOperator)
        assert (one.queries, one.keys, one.kind, other.probability) == (other.queries, other.keys, other.kind, True)
        torch.testing.assert_close(other.operator.dense(), one.operator.dense(), rtol=0, atol=1e-5)


def test_model_without_layers_captures_nothing() -> None:
    with pytest.raises(NoAttentionCaptured, match="no layer of VisionTransformer multiplied a softmax with values"):
        run(tiny.vit(depth=0), tiny.pixels())


def test_model_must_be_run() -> None:
    with pytest.raises(CaptureError, match="the model was not run inside the capture"), visattn.capture(tiny.vit()):
        pass


def test_running_only_a_submodule_is_refused() -> None:
    model = tiny.vit()
    with pytest.raises(CaptureError, match=r"blocks\.0\.attn ran before the model received an image"), visattn.capture(model):
        model.get_submodule("blocks")(torch.zeros(1, 7, 32))


@pytest.mark.parametrize("features", ["last", "all", "none"])
@pytest.mark.parametrize("layer", [0, 1])
def test_nan_in_the_weights_names_the_layer(layer: int, features: Any) -> None:
    model = tiny.vit()
    with torch.no_grad():
        model.get_parameter(f"blocks.{layer}.attn.qkv.weight")[3, 5] = torch.nan
    with pytest.raises(CaptureError, match=rf"blocks\.{layer}\.attn: \d+ of \d+ query values are NaN"):
        run(model, tiny.pixels(), features=features)


def test_nan_after_the_last_attention_is_found() -> None:
    model = tiny.vit()
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.fc2.weight")[0, 0] = torch.inf
    with pytest.raises(CaptureError, match=r"norm: \d+ .*token values are NaN or infinite"):
        run(model, tiny.pixels())


def test_nan_in_the_pooling_head_is_found() -> None:
    model = tiny.vit(class_token=False, global_pool="map")
    with torch.no_grad():
        model.get_parameter("attn_pool.q.weight")[0, 0] = torch.nan
    with pytest.raises(CaptureError, match=r"attn_pool: \d+ of \d+ query values are NaN"):
        run(model, tiny.pixels())


def run_twice(model: nn.Module, first: Tensor, second: Tensor) -> None:
    with torch.no_grad(), visattn.capture(model):
        model(first)
        model(second)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["second forward", "first forward"])
def test_nan_in_any_forward_is_found(order: tuple[int, int]) -> None:
    inputs = tiny.pixels(), tiny.pixels() * torch.nan
    model = tiny.vit()
    with pytest.raises(CaptureError, match="NaN"):
        run_twice(model, inputs[order[0]], inputs[order[1]])


def test_dropped_patches_are_sampled_again_in_each_forward_pass() -> None:
    """Check that nothing is reused from the first forward pass: the dropped patches depend on random data."""
    model = tiny.vit(patch_drop_rate=0.5).train()
    for seed in range(4):
        torch.manual_seed(seed)
        run(model, tiny.pixels())
    model.patch_drop = nn.Identity()
    assert {record.kind for record in run(model, tiny.pixels())[1]} == {"self"}


def test_chosen_layers_equal_those_of_a_full_capture() -> None:
    model = tiny.vit()
    whole_out, whole = run(model, tiny.pixels())
    out, recording = run(model, tiny.pixels(), layers="blocks.1.*")
    assert recording.layers == ["blocks.1.attn"]
    assert torch.equal(out, whole_out)
    torch.testing.assert_close(recording[0].operator.dense(), whole[1].operator.dense(), rtol=0, atol=0)


def test_rollout_of_a_subset_of_layers_is_refused() -> None:
    _, recording = run(tiny.vit(), tiny.pixels(), layers="blocks.1.*")
    with pytest.raises(OptionError, match=r"only the layers blocks\.1\.\* were captured.*Capture without layers="):
        methods.rollout(recording)


def test_layer_pattern_without_a_match_lists_the_layers() -> None:
    with pytest.raises(
        NoAttentionCaptured, match=r"'blocks\.7\.\*'\. The model's attention layers: blocks\.0\.attn, blocks\.1\.attn"
    ):
        run(tiny.vit(), tiny.pixels(), layers="blocks.7.*")
