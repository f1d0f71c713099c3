"""Skip connections put together from trails by hand, and residual branches of networks of a few layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nn.small import example
from visattn.errors import ShapeError, WeightsError
from visattn.nn import SqueezeExcite, attach, load_checkpoint
from visattn.nn.attaching import foreign_weights, forwards
from visattn.nn.attaching.skips import Skips, _Level
from visattn.nn.attaching.trail import Trail

LARGE, SMALL = torch.empty(2, 8, 6, 10), torch.empty(2, 8, 3, 5)

# tensors: 0 is the image, 1 the encoder's map, 2 the bottom, 3 what is upsampled, 4 a map beside them, 5 and up what is merged
IMAGE, ENCODED, BOTTOM, BESIDE = Trail(0b1), Trail(0b11, "encoder"), Trail(0b111, "bottom"), Trail(0b10001, "beside")


def decoder() -> tuple[Skips, Trail]:
    skips = Skips()
    grown = skips.made("interpolate", Trail(0b1111), [(SMALL, BOTTOM)], LARGE)
    return skips, grown


def merged(skips: Skips, name: str, serial: int, *sources: Trail) -> Trail:
    past = 1 << serial
    for source in sources:
        past |= source.past
    return skips.made(name, Trail(past), [(LARGE, source) for source in sources], LARGE)


def always(_name: str) -> bool:
    return True


@pytest.mark.parametrize("name", ["cat", "concatenate", "add", "__iadd__"])
def test_a_merge_with_an_earlier_map_is_a_skip_connection(name: str) -> None:
    skips, grown = decoder()
    made = merged(skips, name, 5, ENCODED, grown)
    assert made.grown
    assert made.turn is BOTTOM
    assert skips.ends(always) == ["encoder", "bottom"]
    assert skips.ends(lambda module: module != "encoder") == [None, "bottom"], "a module that runs elsewhere does not count"


@pytest.mark.parametrize(("name", "other"), [("cat", BESIDE), ("cat", IMAGE), ("mul", ENCODED), ("stack", ENCODED)])
def test_other_maps_and_functions_make_no_skip_connection(name: str, other: Trail) -> None:
    skips, grown = decoder()
    merged(skips, name, 5, other, grown)
    assert skips.ends(always) == []


def test_a_map_that_the_decoder_scales_is_still_that_of_the_encoder() -> None:
    skips, grown = decoder()
    gated = merged(skips, "mul", 5, ENCODED, grown)
    assert gated.scaled is ENCODED
    assert not gated.grown
    again = merged(skips, "mul", 6, gated, grown)
    assert again.scaled is ENCODED
    merged(skips, "cat", 7, again, grown)
    assert skips.ends(always) == ["encoder", "bottom"]


def test_a_map_without_a_grown_source_stays_as_it_is() -> None:
    skips, _ = decoder()
    made = merged(skips, "add", 5, ENCODED, IMAGE)
    assert (made.grown, made.turn, made.scaled) == (False, None, None)


def test_a_level_that_is_only_upsampled_counts_until_a_map_of_its_size_is_merged() -> None:
    skips, grown = decoder()
    first = merged(skips, "cat", 5, ENCODED, grown)
    assert first.turn is BOTTOM
    huge = torch.empty(2, 8, 12, 20)
    again = skips.made("interpolate", Trail(first.past | 1 << 6), [(LARGE, first)], huge)
    assert [(level.size, len(level.sources)) for level in skips._levels] == [((6, 10), 1), ((12, 20), 0)]
    fine = Trail(0b10000001, "fine")  # tensor 7 comes from the image
    made = skips.made("cat", Trail(again.past | fine.past | 1 << 8), [(huge, fine), (huge, again)], huge)
    assert [len(level.sources) for level in skips._levels] == [1, 0], "that map is not in the decoder's past"
    assert made.grown
    early = Trail(0b11, "early")
    skips.made("cat", Trail(again.past | 1 << 9), [(huge, early), (huge, again)], huge)
    assert [(level.size, len(level.sources)) for level in skips._levels] == [((6, 10), 1), ((12, 20), 1)]


def test_what_is_upsampled_before_anything_is_merged_is_no_level() -> None:
    skips, grown = decoder()
    skips.made("interpolate", Trail(grown.past | 1 << 5), [(LARGE, grown)], torch.empty(2, 8, 12, 20))
    assert skips._levels == []


def test_a_level_is_taken_by_the_first_module_with_parameters_after_it() -> None:
    skips, grown = decoder()
    skips.begun("early", nn.Linear(1, 1))
    merged(skips, "cat", 5, ENCODED, grown)
    assert skips._levels[0].taker == ""
    for name, module in (("act", nn.ReLU()), ("up.conv", nn.Conv2d(1, 1, 1)), ("later", nn.Linear(1, 1))):
        skips.begun(name, module)
    assert skips._levels[0].taker == "up.conv"


def test_the_newest_source_of_a_level_has_the_highest_number() -> None:
    assert _Level(Trail(0b1000), (3, 5), [Trail(0b101), Trail(0b11)]).newest == 2
    assert _Level(Trail(0b1000), (3, 5), []).newest == 0


MADE = Trail(1 << 10)  # tensor 10 is what was merged


@pytest.mark.parametrize(
    ("spans", "sizes", "found"),
    [
        ({"up": (8, 14), "up.conv": (10, 13)}, {"up": (6, 10), "up.conv": (6, 10)}, "up"),
        ({"up": (8, 14), "up.conv": (10, 13)}, {"up": (3, 5), "up.conv": (6, 10)}, "up.conv"),
        ({"up": (2, 14), "up.conv": (10, 13)}, {"up": (6, 10), "up.conv": (6, 10)}, "up.conv"),
        ({"up": (3, 14), "up.conv": (10, 13)}, {"up": (6, 10), "up.conv": (6, 10)}, "up"),
        ({"up": (8, 25), "up.conv": (10, 13)}, {"up": (6, 10), "up.conv": (6, 10)}, "up.conv"),
        ({"up": (8, 19), "up.conv": (10, 13)}, {"up": (6, 10), "up.conv": (6, 10)}, "up"),
        ({"up": (10, 25), "up.conv": (10, 13)}, {"up": (6, 10), "up.conv": (6, 10)}, "up.conv"),
        ({"up": (8, 14)}, {"up": (3, 5)}, "join"),
    ],
)
def test_a_level_is_decoded_by_the_largest_module_of_its_size_that_holds_no_other_level(
    spans: dict[str, tuple[int, int]], sizes: dict[str, tuple[int, ...]], found: str
) -> None:
    skips = Skips()
    level = _Level(MADE, (6, 10), [Trail(0b1001)], "up.conv")  # its source is tensor 3
    other = _Level(Trail(1 << 20), (12, 20), [Trail(0b11)])
    skips.gave("join", (9, 10), LARGE, MADE)
    skips._spans |= spans
    skips.sizes |= sizes
    assert skips._decoded(level, [level, other]) == found


def test_a_merge_inside_a_module_that_returns_a_map_of_the_encoder_is_a_gate() -> None:
    skips = Skips()
    level = _Level(MADE, (6, 10), [Trail(0b1001)])
    for span, grown, gates in (((9, 10), False, True), ((9, 10), True, False), ((10, 12), False, False), ((5, 9), False, False)):
        skips._spans, skips._given = {}, {}
        skips.gave("gate", span, LARGE, Trail(1 << 11, grown=grown))
        assert skips._gates(level) is gates


# residual branches


class Block(nn.Module):
    """Three convolutions of 6 channels, combined by a function."""

    def __init__(self, combine: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(6, 6, 1) for _ in range(3))
        self.act, self.combine = nn.ReLU(), combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x)


BRANCHES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "one layer on its input": (lambda m, x: x + m.one(x), ["one"]),
    "the branch first": (lambda m, x: m.one(x) + x, ["one"]),
    "two layers beside one": (lambda m, x: m.two(m.one(x)) + m.three(x), ["two"]),
    "two layers beside one, turned": (lambda m, x: m.three(x) + m.two(m.one(x)), ["two"]),
    "one layer beside one": (lambda m, x: m.one(x) + m.three(x), []),
    "two layers beside a function": (lambda m, x: m.two(m.one(x)) + F.relu(x), ["two"]),
    "one layer beside a function": (lambda m, x: m.one(x) + F.relu(x), []),
    "scaled at the end": (lambda m, x: x + 0.5 * m.one(x), ["one"]),
    "three added": (lambda m, x: x + m.one(x) + m.two(x), []),
    "two in a row": (lambda m, x: (y := x + m.one(x)) + m.two(y), ["one", "two"]),
    "an activation that runs twice": (lambda m, x: m.act(x) + m.act(m.one(x)), []),
    "broadcast": (lambda m, x: x + m.one(x).mean((2, 3), keepdim=True), []),
    "tokens": (lambda m, x: (x.flatten(2) + m.one(x).flatten(2)).unflatten(2, x.shape[2:]), []),
    "multiplied": (lambda m, x: x * m.one(x), []),
    "split": (lambda m, x: x[:, :3].repeat(1, 2, 1, 1) + m.one(x).chunk(1, 1)[0], []),
}


@pytest.mark.parametrize("name", list(BRANCHES))
def test_the_ends_of_residual_branches(name: str) -> None:
    combine, ends = BRANCHES[name]
    model = Block(combine).eval()
    flow = forwards.Flow(dict(model.named_modules()))
    flow._modules.pop("")  # type: ignore[attr-defined]
    flow.follow(model, (torch.randn(2, 6, 7, 5),), {})
    assert flow.ends == ends


def test_an_addition_of_what_was_computed_before_the_module_began_is_no_branch() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.sum = nn.Conv2d(6, 6, 1), Sum()

        def forward(self, x: Tensor) -> Tensor:
            return self.sum(x, self.one(x))  # type: ignore[no-any-return]

    model = Outer().eval()
    flow = forwards.Flow(dict(model.named_children()))
    flow.follow(model, (torch.randn(2, 6, 7, 5),), {})
    assert flow.ends == []


def test_the_first_norm_behind_a_convolution_is_its_norm() -> None:
    model = nn.Sequential(nn.Conv2d(6, 6, 1, groups=6), nn.BatchNorm2d(6), nn.GroupNorm(2, 6)).eval()
    flow = forwards.Flow(dict(model.named_children()))
    flow.follow(model, (torch.randn(2, 6, 7, 5),), {})
    assert flow.normed == {"0": "1", "1": "2"}


# checkpoints


def test_at_most_five_names_are_listed() -> None:
    names = ["a", "b", "c", "d", "e"]
    assert foreign_weights._listed(names[:1]) == "a"
    assert foreign_weights._listed(names) == "a, b, c, d, e"
    assert foreign_weights._listed([*names, "f"]) == "a, b, c, d, e, ..."


def test_only_two_axes_of_length_one_at_the_end_are_added_or_removed() -> None:
    for given, wanted, found in (
        ((3, 6), (3, 6, 1, 1), (3, 6, 1, 1)),
        ((3, 6, 1, 1), (3, 6), (3, 6)),
        ((3, 6), (3, 6), (3, 6)),
        ((3, 6, 1, 1), (3, 6, 1, 1), (3, 6, 1, 1)),
        ((6, 3), (3, 6, 1, 1), (6, 3)),
        ((3, 6), (3, 6, 3, 3), (3, 6)),
        ((3, 6, 1), (3, 6), (3, 6, 1)),
    ):
        assert foreign_weights._shaped(torch.zeros(given), torch.zeros(wanted)).shape == found


def test_a_prefix_that_all_names_share_is_named() -> None:
    module = SqueezeExcite(16, width=2)
    state = {f"module.net.{name}": tensor for name, tensor in module.state_dict().items()}
    with pytest.raises(WeightsError, match=r"got 4 missing: .* 4 unexpected: .* Remove the prefix 'module\.' from its names"):
        load_checkpoint(module, state)
    state["other.fc1.weight"] = torch.zeros(1)
    with pytest.raises(WeightsError, match="Build it with the settings of the checkpoint"):
        load_checkpoint(module, state)


def test_a_wrong_shape_is_told_with_how_many_more() -> None:
    module, wide = SqueezeExcite(16, width=2), SqueezeExcite(16, width=3)
    with pytest.raises(WeightsError, match=r"must be given fc1.weight of 2x16x1x1, got 3x16x1x1 \(and 2 more\)"):
        load_checkpoint(module, wide.state_dict())
    one = module.state_dict() | {"fc2.bias": torch.zeros(5)}
    with pytest.raises(WeightsError, match=r"must be given fc2.bias of 16, got 5\. Build"):
        load_checkpoint(module, one)


# what attaching counts and refuses


@pytest.mark.parametrize("rows", [1, 2])
def test_attention_that_changes_the_shape_is_refused_with_both_shapes(rows: int) -> None:
    class Cut(nn.Module):
        def __init__(self, _channels: int) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, :-rows]

    model = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    height, width = example().shape[2:]
    wanted = rf"must keep \(\d+, 4, {height}, {width}\) at '0', got \(\d+, 4, {height - rows}, {width}\)"
    with pytest.raises(ShapeError, match=wanted):
        attach(model, Cut, where="0", example=example())
