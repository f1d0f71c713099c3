"""Tracing for `attach`: trails, axes and sites on small networks whose sizes all differ."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visattn.errors import OptionError, ShapeError
from visattn.nn import SqueezeExcite, attach
from visattn.nn.attaching import forwards, insertion, sites
from visattn.nn.attaching.sites import Maps, Place
from visattn.nn.attaching.skips import Skips
from visattn.nn.attaching.trail import Trail

HEIGHT, WIDTH = 14, 10


def image(channels: int = 3, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))


# trails


def test_a_trail_knows_its_number_and_whether_it_was_given() -> None:
    assert Trail(0b10110).serial == 4
    assert not Trail(0b10110).given
    assert Trail(0b10000).given
    tensor = torch.zeros(2, 3, 5, 7)
    assert Trail(1, layout="NHWC").size(tensor) == (3, 5)
    assert Trail(1, layout="NCHW").size(tensor) == Trail(1).size(tensor) == (5, 7)


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize(
    ("order", "before", "after"),
    [
        ((0, 3, 1, 2), "NHWC", "NCHW"),
        ((0, 2, 3, 1), "NCHW", "NHWC"),
        ((0, 3, 1, 2), "NCHW", None),
        ((0, 2, 3, 1), "NHWC", None),
        ((0, 1, 3, 2), "NCHW", None),
        ((0, 3, 1, 2), None, None),
        ((0, 2, 3, 1), None, None),
    ],
)
def test_a_permutation_turns_the_axes_that_are_known(order: Any, before: Any, after: Any, as_tuple: bool) -> None:
    trails = [Trail(1, layout=before)]
    tensor = torch.zeros(2, 3, 5, 7)
    assert forwards._layout("permute", (tensor, order) if as_tuple else (tensor, *order), {}, trails) == after
    assert forwards._layout("permute", (tensor,), {"dims": order}, trails) == after


@pytest.mark.parametrize(
    ("name", "layouts", "found"),
    [
        ("conv2d", ["NHWC"], "NCHW"),
        ("linear", ["NCHW"], "NHWC"),
        ("reshape", ["NCHW"], None),
        ("relu", ["NCHW"], "NCHW"),
        ("relu", ["NHWC"], "NHWC"),
        ("relu", [None], None),
        ("add", ["NCHW", None], "NCHW"),
        ("add", ["NCHW", "NHWC"], None),
        ("add", ["NHWC", "NHWC"], "NHWC"),
    ],
)
def test_the_axes_of_a_result_follow_from_the_function_or_its_inputs(name: str, layouts: list[Any], found: Any) -> None:
    assert forwards._layout(name, (), {}, [Trail(1, layout=layout) for layout in layouts]) == found


def upsampled(numbers: tuple[int, ...], first: tuple[int, ...], name: str = "interpolate") -> bool:
    made = Skips().made(name, Trail(0b11), [(torch.empty(first), Trail(0b1))], torch.empty(numbers))
    return made.grown


def test_a_map_grows_if_it_gets_more_positions() -> None:
    assert upsampled((2, 8, 6, 10), (2, 8, 3, 5))
    assert upsampled((2, 2, 6, 10), (2, 8, 3, 5)), "pixel shuffling gives channels away"
    assert not upsampled((2, 8, 3, 5), (2, 8, 3, 5))
    assert not upsampled((2, 8, 3, 5), (2, 8, 6, 10))
    assert not upsampled((2, 16, 3, 5), (2, 8, 3, 5)), "more channels are not more positions"
    assert not upsampled((2, 8, 6, 10), (2, 8, 3, 5), "relu")


def test_the_first_map_that_was_upsampled_is_the_turn() -> None:
    skips, first = Skips(), Trail(0b1)
    small, large = torch.empty(2, 8, 3, 5), torch.empty(2, 8, 6, 10)
    once = skips.made("interpolate", Trail(0b11), [(small, first)], large)
    assert once.turn is first
    again = skips.made("interpolate", Trail(0b111), [(large, once)], torch.empty(2, 8, 12, 20))
    assert again.turn is first


def test_modules_that_return_one_tensor_are_the_same() -> None:
    skips = Skips()
    tensor, other = Trail(0b10), Trail(0b110)
    for name, trail in (("block", tensor), ("block.last", tensor), ("next", other)):
        skips.gave(name, (0, 1), torch.empty(2, 3, 5, 7), trail)
    assert skips.same("block", "block.last")
    assert skips.same("nowhere", "nowhere")
    assert not skips.same("block", "next")
    assert not skips.same("block", "nowhere")
    assert not skips.same("nowhere", "block")
    assert skips.sizes == {"block": (5, 7), "block.last": (5, 7), "next": (5, 7)}


# flows


class Turned(nn.Module):
    """Branch in channels-last axes that is turned back and added."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.stem, self.mlp, self.call = nn.Conv2d(3, 6, 1), nn.Linear(6, 6), call

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.mlp(x.permute(0, 2, 3, 1))
        y = y.permute(dims=(0, 3, 1, 2)) if self.call == "named" else y.permute((0, 3, 1, 2))
        return x + F.relu(y)


@pytest.mark.parametrize("call", ["named", "plain"])
def test_a_branch_that_was_turned_back_ends_at_its_layer(call: str) -> None:
    handle = attach(Turned(call), "se", example=image(), dry_run=True)
    assert [(site.name, site.channels, site.size, site.layout) for site in handle.sites] == [("mlp", 6, (HEIGHT, WIDTH), "NHWC")]


def test_the_first_run_gives_the_size_of_a_site() -> None:
    assert Maps(4, "NCHW", ((2, 4, 5, 7), (2, 4, 3, 6))).size == (5, 7)
    assert Maps(4, "NCHW").size is None


def traced(model: nn.Module, *inputs: Tensor) -> forwards.Flow:
    flow = forwards.Flow(dict(model.named_children()))
    flow.follow(model, inputs, {})
    return flow


def test_outputs_are_listed_by_run_and_hooks_are_removed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.both = nn.Conv2d(3, 3, 3, padding=1), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            once: Tensor = self.conv(x)
            self.both((once, once))
            again: Tensor = self.conv(once[:, :, ::2])
            return again

    model = Twice()
    flow = traced(model, image())
    assert flow.outputs == {"conv": [(2, 3, 14, 10), (2, 3, 7, 10)], "both": [None]}
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert flow.layout_of("conv", None) == "NCHW"


@pytest.mark.parametrize(
    ("shape", "channels", "layout"),
    [
        ((2, 6, 5, 7), 6, "NCHW"),
        ((2, 5, 7, 6), 6, "NHWC"),
        ((2, 6, 5, 6), 6, None),
        ((2, 6, 5, 7), 9, None),
        ((2, 6, 5, 7), None, None),
    ],
)
def test_declared_channels_tell_the_axis_unless_both_have_that_length(shape: Any, channels: Any, layout: Any) -> None:
    flow = forwards.Flow({})
    flow.outputs["one"] = [shape]
    assert flow.layout_of("one", channels) == layout


def test_sizes_of_layers_tell_the_axis() -> None:
    flow = forwards.Flow({})
    flow._sizes = {(5, 7)}
    flow.outputs |= {"first": [(2, 6, 5, 7)], "last": [(2, 5, 7, 6)], "none": [(2, 7, 5, 6)], "odd": [None]}
    assert [flow.layout_of(name, None) for name in flow.outputs] == ["NCHW", "NHWC", None, None]


# sites


ORDER = ("stem", "layer1", "layer1.conv", "layer1.norm", "head")


def network() -> nn.Module:
    inner = nn.Sequential()
    inner.add_module("conv", nn.Conv2d(4, 6, 3, padding=1))
    inner.add_module("norm", nn.BatchNorm2d(6))
    model = nn.Sequential()
    for name, part in (("stem", nn.Conv2d(3, 4, 1)), ("layer1", inner), ("head", nn.Conv2d(6, 5, 1))):
        model.add_module(name, part)
    return model.eval()


def test_places_are_all_modules_with_their_parents() -> None:
    model = network()
    model.register_module("nothing", None)
    known = list(sites.places(model))
    assert tuple(place.name for place in known) == ORDER
    assert [place.key for place in known] == ["stem", "layer1", "conv", "norm", "head"]
    assert all(place.parent._modules[place.key] is place.module for place in known)


def test_examples_are_the_first_two_modules_with_parameters_and_the_last() -> None:
    known = list(sites.places(network()))
    assert sites._examples(known) == "'stem', 'layer1.conv', 'head'"
    assert sites._examples(known[:1]) == "'stem'"
    assert sites._examples(known[1:2]) == "'layer1'", "without parameters, any name"
    flow = forwards.Flow({})
    flow.outputs |= {"stem": [(2, 4, 5)], "layer1.norm": [(2, 6, 5, 7)], "head": [None]}
    assert sites._examples(known, flow) == "'layer1.norm'"


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("layer?.conv", "layer1.conv", "layer12.conv"),
        ("layer*.bn3", "layer4.bn3", "layer4.0.bn3"),
        ("layer4.*.bn3", "layer4.1.bn3", "layer4.1.2.bn3"),
        ("**.bn3", "layer4.1.2.bn3", "layer4.bn33"),
        ("**.bn3", "bn3", "xbn3"),
        ("layer**", "layer4.1.bn", "Layer4"),
        ("layer[12]", "layer2", "layer3"),
        ("layer[!12]", "layer3", "layer2"),
        ("a.b", "a.b", "axb"),
    ],
)
def test_a_pattern_matches_within_or_across_parts_of_a_name(pattern: str, yes: str, no: str) -> None:
    made = sites._compiled(pattern)
    assert made.fullmatch(yes)
    assert not made.fullmatch(no)


def test_a_range_that_runs_backward_is_refused() -> None:
    with pytest.raises(OptionError, match=r"got 'layer\[9-1\]'"):
        sites._compiled("layer[9-1]")


def site(name: str, module: nn.Module) -> Place:
    return Place(name, nn.Module(), name, module)


def flown(name: str, *shapes: Any) -> forwards.Flow:
    flow = forwards.Flow({})
    flow.outputs[name] = list(shapes)
    return flow


def test_maps_of_a_site_are_its_shapes_with_the_channels_in_front() -> None:
    flow = flown("one", (2, 5, 7, 6), (3, 4, 8, 6))
    found = sites.maps_of(site("one", nn.Linear(9, 6)), flow, "auto")
    assert found == Maps(6, "NHWC", ((2, 6, 5, 7), (3, 6, 4, 8)))
    first = sites.maps_of(site("one", nn.Conv2d(9, 5, 1)), flow, "NCHW")
    assert first == Maps(5, "NCHW", ((2, 5, 7, 6), (3, 4, 8, 6)))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 6, 5, 7), None], "got no single tensor. Choose"),
        ([(2, 35, 6)], r"got \(2, 35, 6\). Those are tokens"),
        ([(2, 6)], r"got \(2, 6\). Choose"),
        ([(2, 6, 5, 7, 4)], r"got \(2, 6, 5, 7, 4\). Choose"),
    ],
)
def test_a_site_must_return_maps_in_each_run(shapes: list[Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        sites.maps_of(site("one", nn.Conv2d(3, 6, 1)), flown("one", *shapes), "auto")


def test_a_layer_that_returns_other_channels_than_it_declares_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"must return 6 channels, got 5 in \(2, 5, 7, 6\) as NCHW"):
        sites.maps_of(site("one", nn.Linear(9, 6)), flown("one", (2, 5, 7, 6)), "NCHW")
    block = nn.Module()
    block.out_channels = 6  # type: ignore[assignment]
    assert sites.maps_of(site("one", block), flown("one", (2, 5, 7, 6)), "NCHW").channels == 5, "a block may declare anything"


def test_an_axis_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(OptionError, match=r"ambiguous for 'one': in \(2, 6, 5, 6\)"):
        sites.maps_of(site("one", nn.Identity()), flown("one", (2, 6, 5, 6)), "auto")


@pytest.mark.parametrize("flow", [Exception("it failed"), forwards.Flow({})], ids=["failed", "did not run"])
def test_a_site_without_a_run_is_known_from_its_attributes(flow: Any) -> None:
    assert sites.maps_of(site("one", nn.Conv2d(3, 6, 1)), flow, "auto") == Maps(6, "NCHW")
    assert sites.maps_of(site("one", nn.GroupNorm(2, 8)), flow, "auto") == Maps(8, "NCHW")
    assert sites.maps_of(site("one", nn.Linear(3, 6)), flow, "NHWC") == Maps(6, "NHWC")
    why = "it failed" if isinstance(flow, Exception) else "it did not run in the forward pass"
    for module, layout in ((nn.Linear(3, 6), "auto"), (nn.ReLU(), "auto"), (nn.ReLU(), "NCHW")):
        with pytest.raises(OptionError, match=rf"the channels of 'one' are unknown: {why}"):
            sites.maps_of(site("one", module), flow, layout)  # type: ignore[arg-type]


def test_the_input_size_of_a_model_is_that_of_its_attributes() -> None:
    model = nn.Module()
    assert sites._size(model) == (224, 224)
    model.pretrained_cfg = {"other": 1}  # type: ignore[assignment]
    assert sites._size(model) == (224, 224)
    model.pretrained_cfg = {"input_size": (3, 96, 64)}  # type: ignore[assignment]
    assert sites._size(model) == (96, 64)
    model.patch_embed = SimpleNamespace(img_size=(40, 56))  # type: ignore[assignment]
    assert sites._size(model) == (40, 56)


@pytest.mark.parametrize(("first", "channels"), [(nn.Conv2d(5, 2, 1), [5, 3]), (nn.Conv2d(3, 2, 1), [3]), (nn.ReLU(), [3])])
def test_default_inputs_have_the_channels_of_the_first_convolution_or_three(first: nn.Module, channels: list[int]) -> None:
    model = nn.Sequential(first, nn.Conv2d(2, 7, 1))
    model.pretrained_cfg = {"input_size": (3, 9, 8)}  # type: ignore[assignment]
    given = list(sites._defaults(model)) if not isinstance(first, nn.ReLU) else list(sites._defaults(nn.Sequential(first)))
    assert [tuple(one.shape[:2]) for one in given if isinstance(one, Tensor)] == [(1, count) for count in channels]
    assert all(isinstance(one, Tensor) and len(set(one.flatten().tolist())) > 5 for one in given)


def test_a_failure_is_told_by_its_first_line_without_a_stop() -> None:
    assert sites._line(ValueError("a number is wrong.\nmore")) == "a number is wrong"
    assert sites._line(ValueError("x" * 200)) == "x" * 160
    assert sites._line(KeyError()) == "KeyError"


def test_a_key_that_attaching_added_has_no_plain_name() -> None:
    model = network()
    attach(model, "se", where="layer1.conv", example=image())
    assert sites.plain_name(model, "layer1.conv.base.weight") == "layer1.conv.weight"
    assert sites.plain_name(model, "layer1.conv.gate") is None
    assert sites.plain_name(model, "layer1.conv.attention.fc1.weight") is None
    assert sites.plain_name(model, "head.bias") == "head.bias"


# insertion


def test_names_are_counted_behind_the_first() -> None:
    assert insertion._some(["a"]) == "'a'"
    assert insertion._some(["a", "b"]) == "'a' and 1 more"
    assert insertion._some(["a", "b", "c"]) == "'a' and 2 more"


class Seen(nn.Module):
    """Attention that notes what it is given, and multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.given = factor, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        return x * self.factor


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        (((1, 3, 5, 7),), (5, 7)),
        (((1, 3, 32, 32),), (32, 32)),
        (((1, 3, 25, 41),), (14, 15)),
        (((1, 3, 41, 25), (1, 3, 2, 2)), (14, 15)),
        ((), (14, 15)),
    ],
)
def test_the_factor_of_attention_is_probed_on_two_images_of_its_size_or_a_smaller(shapes: Any, size: Any) -> None:
    for factor, found in ((1.0, 1.0), (0.5, 0.5), (0.25, None), (0.0, None)):
        module = Seen(factor)
        assert insertion._factor(module, Maps(3, "NCHW", shapes)) == found
        assert tuple(module.given.shape) == (2, 3, *size)
        assert len(set(module.given[0, 0].flatten().tolist())) == size[0] * size[1]
        assert not torch.equal(module.given[0], module.given[1])


def test_flags_of_training_are_restored_after_a_probe() -> None:
    norm, drop = nn.BatchNorm2d(3), nn.Dropout()
    module = nn.Sequential(norm, drop)
    drop.eval()
    insertion._still(module, image())
    assert [part.training for part in module.modules()] == [True, True, False]
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 0


def test_sites_with_fewer_channels_are_left_out_and_those_with_as_many_are_kept() -> None:
    for least, expected in ((4, ["stem", "layer1.conv", "head"]), (5, ["layer1.conv", "head"]), (6, ["layer1.conv"])):
        handle = attach(network(), "se", where=["stem", "layer1.conv", "head"], example=image(), min_channels=least, dry_run=True)
        assert [one.name for one in handle.sites] == expected
    with pytest.raises(OptionError, match=r"min_channels must be at most 6, .* got 7"):
        attach(network(), "se", where=["stem", "layer1.conv", "head"], example=image(), min_channels=7)


def test_options_of_attaching_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        attach(network(), "se", "stem", "paper")  # type: ignore[call-arg]


@pytest.mark.parametrize("init", [float("inf"), float("nan")])
def test_a_start_value_must_be_finite(init: float) -> None:
    with pytest.raises(OptionError, match="init must be a name or a finite number"):
        attach(network(), "se", "stem", init=init, example=image())


def test_an_option_that_attention_lacks_is_told_with_the_nearest_and_the_known() -> None:
    with pytest.raises(
        OptionError, match=re.escape("se has no option 'reductions'; did you mean 'reduction'? Known: reduction, w")
    ):
        attach(network(), "se", "stem", example=image(), reductions=2)
    with pytest.raises(ShapeError, match=re.escape("the attention must keep (2, 4, 14, 10) at 'stem', got (2, 9, 14, 10)")):
        attach(network(), lambda channels: nn.Conv2d(channels, 9, 1), "stem", example=image())
    with pytest.raises(OptionError, match="cannot be built from channels"):
        attach(network(), lambda: SqueezeExcite(4), "stem", example=image())
