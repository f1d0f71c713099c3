"""AttentionLogger: figures, destinations, and no effect on the training."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.utils import ModelEmaV3
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import start_processes
from torch.optim.swa_utils import AveragedModel

import visattn
from tests import tiny
from visattn import nn as ours
from visattn._support.publish import publish
from visattn.core.drawing.colormaps import table
from visattn.core.families.wrappers import unwrapped
from visattn.core.pipeline.tensors import prepare_tensor
from visattn.errors import OptionError, OutputError, ShapeError, UnsupportedModel, VisattnWarning
from visattn.training import attention_logger
from visattn.training.attention_logger import AttentionLogger

HEIGHT, WIDTH = tiny.INPUT
PANEL = 48
Log = Callable[[int], object]


def nothing(step: int, page: Image.Image) -> None:
    """Discard a figure."""


def images(count: int = 2) -> Tensor:
    return torch.rand(count, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(5))


def logger_of(model: nn.Module, *, every: int = 1, to: Any = nothing, **options: Any) -> AttentionLogger:
    shown = {name: options.pop(name) for name in ("photos", "mean", "std") if name in options}
    given = options.pop("images", images())
    seen = prepare_tensor(given, unwrapped(model), **shown) if shown else given
    style = {"panel": PANEL} | options.pop("style", {})
    return AttentionLogger(model, seen, every, to=to, style=style, **options)


def plain() -> nn.Sequential:
    """Build a CNN for which only Grad-CAM can be drawn."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Restless(nn.Module):
    """CNN with gates that uses every random number generator and counts its calls in buffers, even in evaluation mode."""

    calls: Tensor
    again: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), ours.CBAM(8, reduction=2), nn.Dropout(0.5)
        )
        self.head = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.again = self.again + 1
        noise = torch.rand(()) + random.random() + float(np.random.rand())  # noqa: NPY002
        logits: Tensor = self.head(self.body(x).mean((2, 3)))
        return logits * (1 + 0.1 * noise + 0.01 * self.calls + 0.01 * self.again)


def dropping() -> nn.Module:
    model = tiny.vit(drop_rate=0.2, attn_drop_rate=0.2, drop_path_rate=0.2)
    next(iter(model.parameters())).requires_grad_(False)
    return model


TRAINED: dict[str, Callable[[], nn.Module]] = {"plain": plain, "restless": Restless, "vit": dropping}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def train(build: Callable[[], nn.Module], make: Callable[[nn.Module], Log], *, amp: bool = False) -> list[Tensor]:
    """Train, and return gradients after each micro-batch, weights, buffers, averages, and the generators' next values."""
    seed(1)
    model = build().train()
    log = make(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-2)
    left = []
    for step in range(4):
        pixels, labels = torch.randn(4, 3, HEIGHT, WIDTH), torch.randint(4, (4,))
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(model(pixels).float(), labels)
            log(step)  # the autograd graph still exists
        torch.autograd.backward(loss)
        log(step)  # between micro-batches
        left += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        log(step)
    left += [value for state in optimizer.state.values() for value in state.values()]
    return [*left, *model.state_dict().values(), torch.rand(3), torch.tensor([random.random(), np.random.rand()])]  # noqa: NPY002


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("amp", [False, True], ids=["full", "autocast"])
@pytest.mark.parametrize("name", TRAINED)
def test_training_with_the_logger_is_bit_identical(name: str, amp: bool) -> None:
    pages: list[int] = []
    without = train(TRAINED[name], lambda model: lambda step: None, amp=amp)
    assert same(without, train(TRAINED[name], lambda model: lambda step: None, amp=amp))
    logged = train(TRAINED[name], lambda model: logger_of(model, to=lambda step, page: pages.append(step)), amp=amp)
    assert pages == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert same(without, logged)


@pytest.mark.parametrize("name", TRAINED)
def test_plain_forward_pass_during_training_would_change_weights(name: str) -> None:
    without = train(TRAINED[name], lambda model: lambda step: None)
    assert not same(without, train(TRAINED[name], lambda model: lambda step: model(images())))


def facts(model: nn.Module) -> list[Any]:
    """Return the state besides tensor values on which a training depends."""
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    hooks = [[list(part._forward_hooks), list(part._forward_pre_hooks), list(part._backward_hooks)] for part in model.modules()]
    flags = [part.training for part in model.modules()], [each.requires_grad for each in model.parameters()]
    gradients = [(id(each.grad), each.grad if each.grad is None else each.grad.tolist()) for each in model.parameters()]
    buffers = [(name, id(each), each.tolist()) for name, each in model.named_buffers()]
    streams = torch.get_rng_state().tolist(), random.getstate(), [*map(str, np.random.get_state())]  # noqa: NPY002
    return [modes, hooks, flags, gradients, buffers, streams]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fails", [False, True], ids=["drawn", "failed"])
def test_model_state_is_restored(fails: bool, mode: Callable[[], Any]) -> None:
    model, failing = Restless().train(), [False]
    model.body[1].eval()
    model.head.bias.requires_grad_(False)
    model(images()).sum().backward()

    def fail(*_: object) -> None:
        if failing[0]:
            raise RuntimeError("so it goes")

    model.body[3].register_forward_hook(fail)
    logger = logger_of(model, method="gradcam", layer="body.2")
    failing[0] = fails
    before = facts(model)
    with mode(), torch.autocast("cpu", torch.bfloat16):
        inside = facts(model)
        if fails:
            with pytest.raises(RuntimeError, match="so it goes"):
                logger.draw(0)
        else:
            logger.draw(0)
        assert facts(model) == inside
    assert facts(model) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: its random stream is put back")
def test_gpu_random_state_is_restored() -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, training=True)

    logger = logger_of(nn.Sequential(Always(), *plain()).cuda())
    before = torch.cuda.get_rng_state()
    logger.draw(0)
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.fixture
def frozen() -> Iterator[None]:
    """Count only what is made from here on: `gc.get_objects` does not list the frozen objects of other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.full
@pytest.mark.parametrize("build", [plain, tiny.vit])
def test_no_memory_is_kept_between_pages(
    build: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: None
) -> None:
    pages: list[weakref.ref[Any]] = []
    record = AttentionLogger._recorded

    def recorded(logger: AttentionLogger) -> Any:
        found = record(logger)
        pages.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(AttentionLogger, "_recorded", recorded)
    logger = logger_of(build().train(), to=[tmp_path, lambda step, page: pages.append(weakref.ref(page))])

    def alive() -> tuple[int, int]:
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        return len(tensors), sum(each.nbytes for each in tensors)

    for step in range(3):  # token positions are cached
        logger(step)
    before = alive()
    for step in range(30):
        logger(step)
    assert alive() == before
    assert len(pages) == 34 + 33  # recordings, including the initial one, and figures
    assert not [page for page in pages if page() is not None]


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
def test_compiled_model_is_not_recompiled(in_place: bool) -> None:
    torch.compiler.reset()
    graphs: list[object] = []

    def backend(graph: Any, _example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    pages: list[int] = []
    model: Any = plain().train()
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    model(images()).sum().backward()
    compiled = len(graphs)
    if in_place and not compiled:
        pytest.skip(f"torch {torch.__version__} compiles nothing by model.compile()")
    logger = logger_of(model, to=lambda step, page: pages.append(step))
    for step in range(3):
        logger(step)
        model(images()).sum().backward()
    assert pages == [0, 1, 2]
    assert len(graphs) == compiled > 0
    model.eval()(images())
    assert len(graphs) > compiled  # another mode would compile another graph, which would be counted


def train_in_process(rank: int, folder: Path) -> None:
    """Train in one of two processes, and write the results to `RANK.json`."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    group: Any = distributed.group.WORLD
    steps: list[int] = []
    calls, weights = [], []
    for logged in (False, True):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Restless())
        seed(1 + rank)
        before = group._get_sequence_number_for_group()
        logger = logger_of(model, to=[folder / "maps", lambda step, page: steps.append(step)]) if logged else None
        calls.append(group._get_sequence_number_for_group() - before)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            pixels = torch.randn(2, 3, HEIGHT, WIDTH)
            before = group._get_sequence_number_for_group()
            model(pixels).square().sum().backward()
            trained = group._get_sequence_number_for_group() - before
            if logger is not None:
                logger(step)
            calls.append(group._get_sequence_number_for_group() - before - trained)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([value.tolist() for value in model.state_dict().values()])
    (folder / f"{rank}.json").write_text(json.dumps({"steps": steps, "calls": calls, "weights": weights, "trained": trained}))
    distributed.destroy_process_group()


@pytest.mark.full
def test_main_process_draws_without_waiting_for_others(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload([__name__])  # imported once for both processes
    start_processes(train_in_process, (tmp_path,), nprocs=2, start_method="forkserver")  # type: ignore[no-untyped-call]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [first["steps"], second["steps"]] == [[0, 1, 2], []]
    assert len(list((tmp_path / "maps").iterdir())) == 3
    for found in (first, second):
        assert found["trained"] > 0  # every collective operation is counted
        assert not any(found["calls"])
        assert found["weights"][0] == found["weights"][1]


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "average": AveragedModel,
    "timm's average": ModelEmaV3,
    "parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled average": lambda model: torch.compile(AveragedModel(model), backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_model_inside_a_wrapper_is_drawn(name: str) -> None:
    model = plain()
    bare = np.asarray(logger_of(model).draw(7))
    assert (np.asarray(logger_of(WRAPPERS[name](model)).draw(7)) == bare).all()


def test_sharded_parameters_are_refused() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Class with the name that PyTorch uses."""

    with pytest.raises(UnsupportedModel, match=r"FullyShardedDataParallel: its parameters are sharded"):
        logger_of(FullyShardedDataParallel(plain()))


Sheets = list[tuple[Any, dict[str, Any]]]


@pytest.fixture
def sheets(monkeypatch: pytest.MonkeyPatch) -> Sheets:
    """Record the cells and the texts of each figure."""
    found: Sheets = []
    draw = attention_logger.sheet  # type: ignore[attr-defined]

    def sheet(cells: Any, **options: Any) -> Image.Image:
        found.append((cells, options))
        return draw(cells, **options)

    monkeypatch.setattr(attention_logger, "sheet", sheet)
    return found


class Around(nn.Module):
    """Wrapper that belongs to no known family of models."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def with_module(module: nn.Module) -> nn.Module:
    return nn.Sequential(*plain()[:3], module, *plain()[4:])


def total(output: Tensor) -> Tensor:
    return output.sum(1)


CHOICES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "classifier": (tiny.vit, {}, "relevance"),
    "classifier inside an unknown model": (lambda: Around(tiny.vit()), {}, "relevance"),
    "no head": (lambda: tiny.vit(num_classes=0), {}, "attention"),
    "no head but a target": (lambda: tiny.vit(num_classes=0), {"target": total}, "relevance"),
    "a layer": (tiny.vit, {"layer": 0}, "attention"),
    "spatial gates": (lambda: with_module(ours.CBAM(8, reduction=2)), {}, "gate"),
    "channel gates": (lambda: with_module(ours.SqueezeExcite(8, reduction=2)), {}, "Grad-CAM"),
    "no attention": (plain, {}, "Grad-CAM"),
    "by name": (tiny.vit, {"method": "rollout"}, "rollout"),
    "class activation map without a class": (lambda: plain()[:-1], {"method": "eigencam"}, "Eigen-CAM"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_auto_selects_a_method_that_fits_the_model(name: str, sheets: Sheets) -> None:
    build, options, expected = CHOICES[name]
    model = build()
    logger_of(model, **options).draw(100)
    assert sheets[-1][1]["title"] == f"{type(model).__name__}, step 100: {expected}"
    assert [len(row) for row in sheets[-1][0]] == [2, 2]


class Lamps(nn.Module):
    """Model whose logits are the mean brightness of each color, so Grad-CAM of a class is that color channel on the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.AvgPool2d(16)
        self.features = nn.Conv2d(3, 3, 1, bias=False)
        nn.init.eye_(self.features.weight[:, :, 0, 0])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.features(self.cells(x)).mean((2, 3))
        return logits


def lit(*places: tuple[int, int, int]) -> Tensor:
    """Draw one bright cell in each image, with a color, row and column."""
    pictures = torch.zeros(len(places), 3, HEIGHT, WIDTH)
    for picture, (color, row, column) in zip(pictures, places, strict=True):
        picture[color, row * 16 : row * 16 + 16, column * 16 : column * 16 + 16] = 1
    return pictures


def test_map_highlights_the_location_of_the_evidence(sheets: Sheets) -> None:
    places = [(0, 0, 0), (1, 1, 2), (2, 0, 1)]
    logger_of(Lamps(), images=lit(*places), style={"opacity": 1.0})
    photos, maps = sheets[-1][0]
    for (color, row, column), photo, panel in zip(places, photos, maps, strict=True):
        expected = np.zeros((2, 3), bool)
        expected[row, column] = True
        large = expected.repeat(16, 0).repeat(16, 1)  # panels have the width of the images
        assert ((np.asarray(panel.picture) == table("inferno")[-1]).all(-1) == large).all()
        assert (np.asarray(photo.picture)[..., color] == 255 * large).all()
        assert panel.caption == f"0 to {1 / 6:.2g}"


def test_target_is_explained_instead_of_the_top_class(sheets: Sheets) -> None:
    two = lit((0, 0, 0), (1, 1, 2))
    two[:, 2, 16:, :16] = 0.5  # a dim cell of the third class in both
    model, names = Lamps(), ("red", "green", "blue")
    logger_of(model, images=two, labels=names)
    shares = model(two).softmax(1)
    assert [cell.caption for cell in sheets[-1][0][0]] == [f"red, {shares[0, 0]:.0%}", f"green, {shares[1, 1]:.0%}"]
    for target in (2, [2, 2], torch.tensor([2, 2])):
        logger_of(model, images=two, target=target, task="classes", style={"opacity": 1.0})
        told = [f"class 2, {share:.0%}\npredicted: class {best}" for best, share in enumerate(shares[:, 2])]
        assert [cell.caption for cell in sheets[-1][0][0]] == told
        for panel in sheets[-1][0][1]:
            hot = np.argwhere((np.asarray(panel.picture) == table("inferno")[-1]).all(-1))
            assert hot.min(0).tolist() == [16, 0]
            assert hot.max(0).tolist() == [31, 15]


class Gated(nn.Module):
    """Module that records its own gate."""

    def __init__(self, gate: Tensor) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        publish(self, "spatial_gate", self.gate.expand(len(x), 1, *self.gate.shape), x)
        return x * self.gate


def test_last_gate_of_each_grid_gets_a_row(sheets: Sheets) -> None:
    gates = [torch.rand(size) for size in ((16, 24), (16, 24), (8, 12))]
    fine, last, coarse = map(Gated, gates)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), fine, last, nn.MaxPool2d(2), coarse, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    logger_of(model)
    cells, words = sheets[-1]
    assert words["row_labels"] == ["photo", "2", "4"]
    assert [row[1].caption for row in cells[1:]] == [f"{gate.min():.2g} to {gate.max():.2g}" for gate in gates[1:]]
    logger_of(model, layer="1")
    assert sheets[-1][1]["row_labels"] == ["photo", "1"]
    last.gate = torch.linspace(0.5001, 0.5003, 16 * 24).view(16, 24)
    logger_of(model)
    assert [cell.caption for cell in sheets[-1][0][1]] == ["nearly even, 0.5001 to 0.5003"] * 2
    assert sheets[-1][0][1][0].picture == sheets[-1][0][0][0].picture
    assert "scale of 2: 0.5001 to 0.5003" in sheets[-1][1]["notes"]
    last.gate = torch.full((16, 24), 0.25)
    logger_of(model)
    assert [cell.caption for cell in sheets[-1][0][1]] == ["constant 0.25"] * 2
    assert sheets[-1][0][1][0].picture == sheets[-1][0][0][0].picture


def test_images_of_a_row_share_one_scale(sheets: Sheets) -> None:
    class ByImage(nn.Module):
        """Gate whose values differ by image."""

        def forward(self, x: Tensor) -> Tensor:
            gate = torch.linspace(0.1, 0.4, 16 * 24).view(1, 1, 16, 24) * torch.tensor([1.0, 2.0])[:, None, None, None]
            publish(self, "spatial_gate", gate, x)
            return x * gate

    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), ByImage(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    logger_of(model, style={"opacity": 1.0, "interpolation": "nearest", "colormap": "inferno", "normalize": "minmax"})
    cells, words = sheets[-1]
    assert [cell.caption for cell in cells[1]] == ["0.1 to 0.4", "0.2 to 0.8"]
    assert "scale of 1: 0.1 to 0.8" in words["notes"]
    ends = [np.asarray(cell.picture)[-1, -1].tolist() for cell in cells[1]]
    colors = table("inferno")
    assert ends[1] == colors[255].tolist()
    level = round(255 * (0.4 - 0.1) / 0.7)
    assert np.abs(np.array(ends[0]) - colors[level]).max() <= 6  # one step of the color map


def test_layers_get_rows_and_many_images_are_wrapped(sheets: Sheets) -> None:
    logger_of(tiny.vit(num_classes=0), images=images(10), layer="all")
    cells, words = sheets[-1]
    assert words["row_labels"] == ["photo", "blocks.0.attn", "blocks.1.attn"] * 2
    assert [len(row) for row in cells] == [8, 8, 8, 2, 2, 2]


def test_later_changes_to_the_images_do_not_reach_the_model() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(0.5)

    given = images()
    logger = logger_of(nn.Sequential(InPlace(), *plain()), images=given, method="eigencam")
    first = logger.draw(0).tobytes()
    given.zero_()  # a loader may reuse the memory of its batch
    assert logger.draw(0).tobytes() == first


def shown(sheets: Sheets) -> Any:
    return np.stack([np.asarray(cell.picture) for cell in sheets[-1][0][0]])


def test_normalization_is_undone(sheets: Sheets) -> None:
    raw = (images() * 255).round() / 255
    expected = (raw * 255).round().permute(0, 2, 3, 1).numpy()
    mean, std = torch.tensor([0.4, 0.5, 0.6])[:, None, None], torch.tensor([0.2, 0.3, 0.4])[:, None, None]
    imagenet = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    logger_of(plain(), images=raw)
    assert (shown(sheets) == expected).all()
    logger_of(plain(), images=(raw - mean) / std, mean=mean.flatten().tolist(), std=std.flatten().tolist())
    assert (shown(sheets) == expected).all()
    logger_of(plain(), images=(raw - imagenet[0]) / imagenet[1])
    assert (shown(sheets) == expected).all()
    logger_of(plain(), images=(raw - 0.5) / 0.5, mean=[0.5], std=[0.5])
    assert (shown(sheets) == expected).all()


def test_gray_images_are_shown_gray(sheets: Sheets) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    gray = images()[:, :1]
    logger_of(model, images=gray)
    assert (shown(sheets) == (gray * 255).round().permute(0, 2, 3, 1).numpy()).all()


def test_full_photos_are_shown_instead_of_model_inputs(sheets: Sheets) -> None:
    photos = [Image.new("RGB", (2 * WIDTH, 2 * HEIGHT), color) for color in ("red", "blue")]
    photos[1] = photos[1].resize((90, 90))
    logger_of(Lamps(), images=lit((0, 1, 2), (1, 0, 0)) * 5 - 1, photos=photos, style={"opacity": 1.0})
    assert [cell.picture.getpixel((5, 5)) for cell in sheets[-1][0][0]] == [(255, 0, 0), (0, 0, 255)]
    hot = [np.argwhere((np.asarray(cell.picture) == table("inferno")[-1]).all(-1)) for cell in sheets[-1][0][1]]
    assert [each.min(0).tolist() + each.max(0).tolist() for each in hot] == [[16, 32, 31, 47], [0, 0, 23, 15]]


def test_prepared_photos_keep_their_crop(sheets: Sheets) -> None:
    model = tiny.vit(dynamic_img_size=True)
    photo = Image.fromarray((images(1)[0].permute(1, 2, 0) * 255).byte().numpy()).resize((120, 60))
    prepared = visattn.prepare(photo, model, resize="model")
    logger_of(model, images=prepared)
    photo_cell, map_cell = (row[0].picture for row in sheets[-1][0])
    seen = prepared.geometry.resized((24, 48)).seen()
    assert (seen.left, seen.right) != (0, 48)
    changed = (np.asarray(photo_cell) != np.asarray(map_cell)).any((0, 2))
    assert np.flatnonzero(changed)[[0, -1]].tolist() == [seen.left, seen.right - 1]


def test_page_is_drawn_every_n_steps(tmp_path: Path) -> None:
    logger = logger_of(plain(), every=3, to=tmp_path / "run" / "maps")
    assert not list((tmp_path / "run" / "maps").iterdir())  # the initial figure is discarded
    for step in range(1, 8):
        logger(step)
    names = ["step_00000003.png", "step_00000006.png"]
    assert sorted(path.name for path in (tmp_path / "run" / "maps").iterdir()) == names


def test_logger_counts_steps_if_the_loop_does_not() -> None:
    pages: list[int] = []
    logger = logger_of(plain(), every=2, to=lambda step, page: pages.append(step))
    for _ in range(5):
        logger.step()
    assert pages == [0, 2, 4]


class Board:
    """Stand-in for `torch.utils.tensorboard.SummaryWriter`."""

    def __init__(self) -> None:
        self.pages: list[tuple[str, Any, int | None, str]] = []

    def add_image(
        self, tag: str, img_tensor: Any, global_step: int | None = None, walltime: float | None = None, dataformats: str = "CHW"
    ) -> None:
        self.pages.append((tag, img_tensor, global_step, dataformats))


def test_same_page_is_written_to_folder_tensorboard_and_function(tmp_path: Path) -> None:
    board, pages = Board(), []
    logger = logger_of(plain(), to=[str(tmp_path), board, lambda step, page: pages.append((step, page))], tag="where it looks")
    logger(12)
    ((step, page),) = pages
    ((tag, array, numbered, order),) = board.pages
    assert (step, tag, numbered, order) == (12, "where it looks", 12, "HWC")
    assert (array == np.asarray(page)).all()
    with Image.open(tmp_path / "step_00000012.png") as written:
        assert written.tobytes() == page.tobytes()
        told = json.loads(written.text["visattn"])  # type: ignore[attr-defined]
    assert (told["weights"], told["method"], told["parameters"]["layer"]) == ("in training, step 12", "gradcam", "2")
    assert told["target"][0].startswith("output ")


@pytest.mark.filterwarnings("default")  # ignore warnings from its own imports
def test_tensorboard_stores_the_page(tmp_path: Path) -> None:
    board = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed: pip install -e '.[tensorboard]'")
    with board.SummaryWriter(tmp_path) as writer:
        logger_of(plain(), to=writer)(3)
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in read.Images("attention")] == [3]


def test_failing_page_warns_and_training_continues() -> None:
    model, pages = plain(), []
    weight = next(model.parameters())
    logger = logger_of(model, to=lambda step, page: pages.append(step))
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.warns(
        VisattnWarning, match=r"step 1: attention maps were not drawn, training continues: CaptureError: .* NaN"
    ) as told:
        logger(1)
    assert told[0].filename == __file__
    with torch.no_grad():
        weight.fill_(0.1)
    logger(2)
    assert pages == [2]


def test_failing_destination_does_not_affect_the_others(tmp_path: Path) -> None:
    pages: list[int] = []
    logger = logger_of(plain(), to=[tmp_path / "maps", lambda step, page: pages.append(step)])
    (tmp_path / "maps").rmdir()
    with pytest.warns(VisattnWarning, match=r"step 1: attention maps were not written, training continues: OutputError"):
        logger(1)
    assert pages == [1]


def test_keyboard_interrupt_is_not_caught() -> None:
    def interrupted(step: int, page: Image.Image) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        logger_of(plain(), to=interrupted)(1)


def headless() -> nn.Module:
    return plain()[:-2]


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "every": (plain, {"every": 0}, OptionError, "every must be a whole number of steps, 1 or more, got 0"),
    "method": (plain, {"method": "gradcamm"}, OptionError, "did you mean 'gradcam'"),
    "many passes": (
        plain,
        {"method": "scorecam"},
        OptionError,
        "'scorecam' is not available during training. Choose auto or one of: att",
    ),
    "method that does not apply": (
        plain,
        {"method": "rollout"},
        visattn.VisattnError,
        "no layer of Sequential multiplied a softmax",
    ),
    "parameter": (plain, {"method": "gradcam", "lair": 1}, OptionError, "method 'gradcam' has no parameter 'lair'"),
    "parameter of auto": (plain, {"lair": 1}, OptionError, "method 'auto' has no parameters lair"),
    "layer": (plain, {"method": "gradcam", "layer": "no"}, OptionError, "no module's name matches 'no'"),
    "layer by number": (
        plain,
        {"method": "gradcam", "layer": 30},
        OptionError,
        r"layer 30 is an index of attention layers.* Pass a layer name: layer=",
    ),
    "no class": (headless, {}, OptionError, "Pass target=a function of its output, or method='eigencam'"),
    "no class of a method": (
        headless,
        {"method": "gradcam"},
        OptionError,
        r"a class target needs outputs \(B, classes\), the model returned",
    ),
    "features": (
        lambda: tiny.vit(num_classes=0),
        {"method": "relevance"},
        OptionError,
        "has no classification head, so there is no class to explain",
    ),
    "targets": (plain, {"target": [0]}, ShapeError, r"target must be one class, or 2 \(one per image\), got 1"),
    "target": (plain, {"target": 4}, OptionError, r"target must be a class from 0 to 3, got 4"),
    "labels": (plain, {"labels": ["one"]}, OptionError, "labels must name 4 classes, got 1"),
    "images": (
        plain,
        {"images": images()[0]},
        ShapeError,
        r"images must be floats \(B, C, H, W\), got torch.float32 \(3, 32, 48\)",
    ),
    "bytes": (plain, {"images": images().byte()}, ShapeError, "images must be floats .* got torch.uint8"),
    "photos": (plain, {"photos": [Image.new("RGB", (9, 9))]}, ShapeError, r"photos must be one per image \(2\), got 1"),
    "range": (
        plain,
        {"images": images() * 9 - 4},
        OptionError,
        r"cannot be shown: they are .* after mean .* are undone, outside of \[0, 1\]",
    ),
    "mean": (
        plain,
        {"mean": [0.5, 0.5], "std": [1]},
        OptionError,
        r"mean and std must have 1 value or 3 \(one per channel\), got 2",
    ),
    "NaN": (plain, {"images": images() * torch.nan}, OptionError, "pixels with NaN cannot be shown"),
    "channels": (
        lambda: nn.Sequential(nn.Conv2d(5, 4, 3), nn.Flatten()),
        {"images": torch.rand(2, 5, 9, 9)},
        OptionError,
        "1 or 3 channels",
    ),
    "to": (plain, {"to": 3}, OptionError, "to must be a folder, a SummaryWriter or a function, or a list of these, got int"),
    "style": (plain, {"style": {"opacity": 2}}, OptionError, "opacity must be a number from 0 to 1, got 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_before_training(name: str) -> None:
    build, options, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        logger_of(build(), **options)


def test_invalid_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        logger_of(plain(), to=tmp_path / "file")


@pytest.mark.parametrize("target", ["box:0", "output:1", "similar:photo:coffee"])
def test_a_target_that_a_step_completes_is_refused(target: str) -> None:
    with pytest.raises(OptionError, match=f"'{target}' is not available during training"):
        logger_of(tiny.vit(), target=target)
