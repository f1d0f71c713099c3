"""Edits of weights, callbacks of modules, and inputs of forward passes."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visattn.core.capturing import watching
from visattn.core.capturing.hooks import ModuleCalls, with_first
from visattn.core.capturing.interventions import _edited, _in_heads, masked, permuted, scaled
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout
from visattn.errors import LayoutError, OptionError, ShapeError

BATCH, HEADS, BLOCKS, QUERIES, KEYS = 2, 3, 4, 5, 7


def weights(*sizes: int) -> Tensor:
    return torch.arange(torch.Size(sizes).numel(), dtype=torch.float32).reshape(sizes) + 1


def layout(count: int) -> TokenLayout:
    return TokenLayout("tokens", tuple(f"token{i}" for i in range(count)), (), Box(0, 0, 1, 1))


# --- edits


def attended(key_index: Tensor, keys: int = KEYS) -> Any:
    return SimpleNamespace(keys=layout(keys), key_index=key_index)


def test_scaled_weights_are_multiplied() -> None:
    given = weights(1, 1, 1, 2, 3)
    assert torch.equal(scaled(0.5)(given, attended(torch.zeros(1))), given / 2)


def test_masked_keys_have_no_weight() -> None:
    index = torch.tensor([[0, 3, 6], [1, 3, 5]])  # two blocks
    given = weights(BATCH, HEADS, 2, QUERIES, 3)
    changed = masked([3, 5], renormalize=False)(given, attended(index))
    expected = given.clone()
    expected[:, :, :, :, 1] = 0
    expected[:, :, 1, :, 2] = 0
    assert torch.equal(changed, expected)
    kept = masked([3, 5], renormalize=True)(given, attended(index))
    assert torch.allclose(kept.sum(-1), given.sum(-1))
    assert torch.allclose(kept[..., 0, :, 0] / kept[..., 0, :, 2], given[..., 0, :, 0] / given[..., 0, :, 2])
    hidden = masked([0, 3, 6], renormalize=True)(given, attended(index))
    assert not hidden[:, :, 0].any()
    assert torch.allclose(hidden[:, :, 1].sum(-1), given[:, :, 1].sum(-1))


@pytest.mark.parametrize(("token", "exists"), [(-1, False), (0, True), (6, True), (7, False)])
def test_masked_token_must_be_a_key(token: int, exists: bool) -> None:
    given = weights(1, 1, 1, 2, KEYS)
    if exists:
        assert not masked([token], renormalize=False)(given, attended(torch.arange(KEYS)[None]))[..., token].any()
        return
    with pytest.raises(OptionError, match=rf"\[0, 6\], got {token}\."):
        masked([token], renormalize=False)(given, attended(torch.arange(KEYS)[None]))


def test_permuted_queries_get_the_rows_of_others() -> None:
    given = weights(BATCH, HEADS, BLOCKS, 3, KEYS)
    assert torch.equal(permuted([2, 0, 1])(given, attended(torch.zeros(1))), given[..., [2, 0, 1], :])
    for order in ([0, 1], [0, 1, 1], [1, 2, 3], [0, 1, 2, 3]):
        with pytest.raises(OptionError, match="each of the 3 queries"):
            permuted(order)(given, attended(torch.zeros(1)))


def test_only_chosen_heads_change() -> None:
    old, new = weights(BATCH, HEADS, BLOCKS, QUERIES, KEYS), -weights(BATCH, HEADS, BLOCKS, QUERIES, KEYS)
    for chosen in ([0], [1, 2], [-1], [-3], []):
        expected = old.clone()
        expected[:, chosen] = new[:, chosen]
        assert torch.equal(_in_heads(chosen, new, old), expected)
    for head in (3, -4):
        with pytest.raises(OptionError, match=rf"\[-3, 2\], got 0, {head}\."):
            _in_heads([0, head], new, old)


def edited(arrangement: Arrangement, given: Tensor, edits: Any, lead: tuple[int, ...] = (BATCH, HEADS)) -> Tensor:
    call: Any = SimpleNamespace(weigh=lambda: given, rows=given.shape[-2], columns=given.shape[-1], lead=lead)
    return _edited("layer", 0, call, arrangement, None, edits)


def test_edits_are_applied_in_order_and_see_the_tokens() -> None:
    seen: list[Any] = []
    plain = Arrangement("cross", layout(QUERIES), layout(KEYS))
    given = weights(BATCH, HEADS, QUERIES, KEYS)

    def see(changed: Tensor, call: Any) -> Tensor:
        seen.append((changed, call))
        return changed + 1

    assert torch.equal(edited(plain, given, [see, scaled(2.0)]), (given + 1) * 2)
    ((first, call),) = seen
    assert first.shape == (BATCH, HEADS, 1, QUERIES, KEYS)
    assert (call.layer, call.call, call.queries, call.keys) == ("layer", 0, layout(QUERIES), layout(KEYS))
    assert call.query_index.tolist() == [list(range(QUERIES))]
    assert call.key_index.tolist() == [list(range(KEYS))]
    with pytest.raises(ShapeError, match=r"2, 3, 1, 5, 7.*, got .*2, 3, 1, 5, 6"):
        edited(plain, given, [lambda changed, _: changed[..., 1:]])


def test_edited_windows_come_back_in_the_order_of_the_call() -> None:
    order = torch.randperm(BATCH * HEADS * BLOCKS, generator=torch.Generator().manual_seed(0)).view(BATCH, HEADS, BLOCKS)
    index = torch.arange(KEYS).expand(BLOCKS, KEYS)
    windows = Arrangement("cross", layout(QUERIES), layout(KEYS), order, index[:, :QUERIES], index)
    lead = (BATCH * BLOCKS, HEADS)
    given = weights(*lead, QUERIES, KEYS)
    assert torch.equal(edited(windows, given, [scaled(3.0)], lead), given * 3)


def test_weights_without_tokens_are_not_edited() -> None:
    given = weights(BATCH, HEADS, QUERIES, KEYS)
    with pytest.raises(LayoutError, match="points"):
        edited(Arrangement("sampled", layout(QUERIES), layout(KEYS)), given, [])
    with pytest.raises(LayoutError, match="cannot be located"):
        edited(Arrangement("unplaced", layout(QUERIES), layout(KEYS), reason="they move"), given, [])


# --- callbacks of modules


def test_backward_pass_and_other_threads_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ModuleCalls()
    answers = [calls.elsewhere()]
    thread = threading.Thread(target=lambda: answers.append(calls.elsewhere()))
    thread.start()
    thread.join()
    for number in (-1, 0, 1):
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda number=number: number)
        answers.append(calls.elsewhere())
    assert answers == [False, True, False, True, True]


def test_callbacks_run_around_a_module_and_replace_its_output() -> None:
    calls, module, seen = ModuleCalls(), nn.Identity(), []
    calls.before[module] = [lambda _module, args: seen.append(("before", args[0]))]
    calls.after[module] = [
        lambda _module, _args, output: seen.append(("first", output)),
        lambda _module, _args, output: output + 1,
        lambda _module, _args, output: seen.append(("third", output)),
        lambda _module, _args, output: output * 10,
    ]
    with calls.watched():
        for follow in (calls.follow, calls.follow_part):
            seen.clear()
            follow()
            assert module(3) == 40
            assert nn.Identity()(3) == 3
            assert seen == [("before", 3), ("first", 3), ("third", 4)]
        calls.wait()
        seen.clear()
        assert module(3) == 3
        assert seen == [("before", 3)]
    assert module(3) == 3
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_callbacks_of_a_part_run_only_while_no_forward_pass_of_the_model_is_followed() -> None:
    calls, part, seen = ModuleCalls(), nn.Identity(), []
    calls.outside[part] = [lambda _module, args: seen.append(args[0])]
    with calls.watched():
        part(1)
        calls.follow()
        part(2)
        calls.follow_part()
        part(3)
        calls.wait()
        part(4)
    part(5)
    assert seen == [1, 3, 4]


def test_hooks_stay_behind_a_module_that_fails_until_the_next_pass() -> None:
    """PyTorch reads the hooks of a failing module while they run, so none of them may be removed there."""

    class Failing(nn.Module):
        def forward(self, x: int) -> None:
            raise ValueError(x)

    calls, module, seen = ModuleCalls(), Failing(), []

    def ended(_module: nn.Module, _args: Any, output: Any) -> None:
        seen.append(output)
        calls.wait(after_failure=output is None)

    calls.after[module] = [ended]
    with calls.watched():
        for number in range(3):
            calls.follow()
            with pytest.raises(ValueError, match=str(number)):
                module(number)
        assert module._forward_hooks
    assert (seen, len(module._forward_hooks)) == ([None] * 3, 0)


def test_copy_of_a_module_in_a_forward_pass_has_no_callbacks() -> None:
    calls, module, seen = ModuleCalls(), nn.Identity(), []
    calls.before[module] = [lambda _module, args: seen.append(args[0])]
    calls.after[module] = [lambda _module, args, _output: seen.append(args[0])]
    with calls.watched():
        calls.follow()
        copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        assert [copied(3) for copied in copies] == [3, 3]
    assert seen == []


def test_first_tensor_of_an_output_is_replaced() -> None:
    pair = namedtuple("pair", "a b")
    old, new, other = torch.zeros(1), torch.ones(1), torch.ones(2)
    assert with_first(old, new) is new
    assert with_first((old, other), new) == (new, other)
    assert with_first([old], new) == [new]
    replaced = with_first(pair(old, other), new)
    assert isinstance(replaced, pair)
    assert replaced.a is new
    assert replaced.b is other


# --- inputs of forward passes


def test_images_are_found_among_the_inputs() -> None:
    image, clip, other = torch.zeros(2, 3, 5, 7), torch.zeros(2, 4, 3, 5, 7), torch.zeros(2, 1, 5, 7)
    assert watching._pixels([("a", image), ("b", clip)]) is image
    assert watching._pixels([("a", clip), ("b", image)]) is clip
    assert watching._pixels([("mask", other), ("pixel_values", image)]) is image
    assert watching._pixels([(0, torch.zeros(2, 5, 7)), (1, image.long()), (2, torch.zeros(1, 2, 4, 3, 5, 7))]) is None


def test_packed_patches_are_found_by_their_grids() -> None:
    grid, patches = torch.tensor([[1, 2, 3], [2, 1, 4]]), torch.zeros(14, 6)
    packed = watching._packed([("x", torch.zeros(13, 6)), ("pixels", patches), ("grid_thw", grid)])
    assert packed is not None
    assert packed[0] is patches
    assert packed[1] == ((1, 2, 3), (2, 1, 4))
    for inputs in (
        [("pixels", patches[1:]), ("grid_thw", grid)],
        [("pixels", patches.long()), ("grid_thw", grid)],
        [("pixels", patches[None]), ("grid_thw", grid)],
        [("pixels", patches), ("grid_thw", grid.float())],
        [("pixels", patches), ("grid_thw", grid[None])],
        [("pixels", patches), ("other", grid)],
    ):
        assert watching._packed(inputs) is None


@pytest.mark.parametrize(("shape", "fits"), [((2, 6, 4), True), ((2, 7, 4), True), ((2, 5, 4), False), ((3, 6, 4), False)])
def test_padded_patches_are_as_many_as_the_largest_grid(shape: tuple[int, ...], fits: bool) -> None:
    sizes, patches = torch.tensor([[2, 3], [1, 4]]), torch.zeros(shape)
    packed = watching._packed([("pixels", patches), ("spatial_shapes", sizes)])
    assert (packed is not None) == fits
    assert packed is None or packed[1] == ((1, 2, 3), (1, 1, 4))
    assert watching._packed([("pixels", patches.long()), ("spatial_shapes", sizes)]) is None
    assert watching._packed([("pixels", patches[0]), ("spatial_shapes", sizes)]) is None
