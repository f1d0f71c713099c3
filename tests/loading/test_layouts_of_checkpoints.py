"""Checkpoints as training code writes them: each loads with the outputs of the model that was saved, or names what is refused.

Where the library of a layout is installed, its own code writes the file.
"""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import decimal
import pathlib
import pickle
import re
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

import accelerate  # type: ignore[import-untyped]
import lightning
import numpy as np
import pytest
import safetensors.torch
import timm
import timm.utils
import torch
import torchvision
from torch import Tensor, nn

from tests.samples import sampled
from visattn import load_model
from visattn.core.families import provenance_of
from visattn.core.loading.translation import as_float32, unwrap
from visattn.core.loading.weight_formats import START
from visattn.core.loading.weights import read_checkpoint
from visattn.errors import WeightsError

MODEL = "test_vit"
PIXELS = torch.randn(1, 3, 160, 160, generator=torch.Generator().manual_seed(0))
Write = Callable[[nn.Module, Path], Path | None]
Weights = dict[str, Tensor]


def trained(seed: int = 3, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = timm.create_model(MODEL, **{"num_classes": 5, **options}).eval()
        return model


def other(prefix: str = "", seed: int = 4, **options: Any) -> Weights:
    """Weights of another model of this architecture, which must not be loaded."""
    return {prefix + key: value.clone() for key, value in trained(seed, **options).state_dict().items()}


def prefixed(model: nn.Module, prefix: str) -> Weights:
    return {prefix + key: value.clone() for key, value in model.state_dict().items()}


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose state has been filled by a step that changes no weight."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(PIXELS).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Holder(nn.Module):
    """A network that holds the model under a name of its own."""

    def __init__(self, **parts: nn.Module) -> None:
        """Hold each part under its name."""
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def file_of(content: Callable[[nn.Module], Any]) -> Write:
    """Return a plain loop that saves what `content` returns with torch.save."""

    def write(model: nn.Module, folder: Path) -> None:
        torch.save(content(model), folder / "checkpoint.pth")

    return write


# ---- code that people use ----------------------------------------------------------------------------------------------------


def timm_saver(averaged: bool) -> Write:
    def write(model: nn.Module, folder: Path) -> Path:
        plain = model if not averaged else trained(seed=5)
        mean = timm.utils.ModelEmaV3(model) if averaged else None
        args = argparse.Namespace(model=MODEL, lr=0.1, data_dir=pathlib.Path("data"), opt_betas=[0.9, 0.99])
        saver = timm.utils.CheckpointSaver(plain, stepped(plain), args=args, model_ema=mean, checkpoint_dir=str(folder))
        saver.save_checkpoint(3, metric=np.float64(71.25))
        return folder / "last.pth.tar"

    return write


def lightning_trainer(attribute: str, loss: nn.Module | None = None) -> Write:
    def write(model: nn.Module, folder: Path) -> Path:
        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self, lr: float = 0.0, root: Path = Path("data")) -> None:
                super().__init__()
                self.save_hyperparameters()
                setattr(self, attribute, copy.deepcopy(model))
                self.loss = loss

            def training_step(self, batch: Any, _: int) -> Tensor:
                return getattr(self, attribute)(batch[0]).sum()  # type: ignore[no-any-return]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.9)

        trainer = lightning.Trainer(
            max_steps=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            enable_checkpointing=False,
        )
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(PIXELS))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Module(), loader)
            trainer.save_checkpoint(folder / "last.ckpt")
        return folder / "last.ckpt"

    return write


def accelerate_state(safe: bool) -> Write:
    def write(model: nn.Module, folder: Path) -> Path:
        accelerator = accelerate.Accelerator(cpu=True)
        prepared, _ = accelerator.prepare(model, stepped(model))
        accelerator.save_state(str(folder / "state"), safe_serialization=safe)
        accelerator.free_memory()
        assert prepared is not None
        return folder / "state" / ("model.safetensors" if safe else "pytorch_model.bin")

    return write


def accelerate_model(model: nn.Module, folder: Path) -> Path:
    accelerate.Accelerator(cpu=True).save_model(model, str(folder / "model"))
    return folder / "model" / "model.safetensors"


def torchvision_reference(averaged: bool) -> Write:
    """Save as `references/classification/train.py` of torchvision."""

    def content(model: nn.Module) -> dict[str, Any]:
        raw = trained(seed=5) if averaged else model
        args = argparse.Namespace(model=MODEL, output_dir=".", lr=0.5, auto_augment=None, ra_magnitude=9)
        optimizer = stepped(raw)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        checkpoint: dict[str, Any] = {
            "model": raw.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": schedule.state_dict(),
        }
        checkpoint |= {"epoch": 2, "args": args, "scaler": torch.amp.GradScaler("cpu").state_dict()}
        if averaged:
            checkpoint["model_ema"] = torch.optim.swa_utils.AveragedModel(model).state_dict()
        return checkpoint

    return file_of(content)


def wrapped(model: nn.Module) -> Weights:
    return dict(nn.DataParallel(model).state_dict())


def compiled(model: nn.Module) -> Weights:
    whole: Any = torch.compile(model)
    return dict(whole.state_dict())


def compiled_and_averaged(model: nn.Module) -> Weights:
    whole: Any = torch.compile(model)
    return dict(torch.optim.swa_utils.AveragedModel(whole).state_dict())


def compiled_blocks(model: nn.Module) -> Weights:
    whole: Any = copy.deepcopy(model)
    for index, block in enumerate(whole.blocks):
        whole.blocks[index] = torch.compile(block)
    return dict(whole.state_dict())


def sharded_names(model: nn.Module) -> Weights:
    inner = {
        re.sub(r"(blocks\.\d+\.)", r"\1_fsdp_wrapped_module._checkpoint_wrapped_module.", key): value
        for key, value in model.state_dict().items()
    }
    return {"_fsdp_wrapped_module." + key: value for key, value in inner.items()}


def older_archive(model: nn.Module, folder: Path) -> None:
    torch.save({"state_dict": model.state_dict()}, folder / "checkpoint.pth", _use_new_zipfile_serialization=False)


def other_ending(model: nn.Module, folder: Path) -> Path:
    safetensors.torch.save_file(dict(model.state_dict()), folder / "weights.pt")
    return folder / "weights.pt"


def arrays(model: nn.Module) -> dict[str, Any]:
    """Save as detectron2's converters."""
    named = {key: value.numpy() for key, value in model.state_dict().items()}
    named["head.weight"] = np.asfortranarray(named["head.weight"])
    return {"model": named, "__author__": "somebody", "matching_heuristics": True}


def metrics(model: nn.Module) -> dict[str, Any]:
    """Values of many types beside the weights."""
    counts = collections.defaultdict(list, {"accuracy": [np.float32(0.5), np.float64(0.25)]})
    return {
        "model": model.state_dict(),
        "best": np.float64(71.25),
        "seen": np.int64(9),
        "ok": np.bool_(True),
        "name": np.str_("run"),
        "when": np.datetime64("2024-01-01"),
        "curve": np.linspace(0, 1, 5),
        "names": np.array(["a", None], dtype=object),
        "type": np.dtype("float32"),
        "kind": np.float64,
        "path": pathlib.Path("runs"),
        "pure": [PurePosixPath("/a"), PureWindowsPath("C:/a")],
        "date": datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
        "took": datetime.timedelta(seconds=3),
        "day": [datetime.date(2024, 1, 1), datetime.time(3)],
        "args": argparse.Namespace(lr=0.1, device=torch.device("cpu"), path=pathlib.Path("x")),
        "history": counts,
        "last": collections.deque([1.0, 2.0], maxlen=5),
        "classes": collections.Counter("abca"),
        "order": collections.OrderedDict(a=1),
        "dtype": torch.float32,
        "size": torch.Size([1, 2]),
        "set": {1, 2},
        "frozen": frozenset({1}),
        "range": range(3),
        "complex": 1j,
        "price": decimal.Decimal("0.5"),
        "random": {
            "numpy": np.random.RandomState(0).get_state(),
            "torch": torch.get_rng_state(),
            "python": (3, tuple(range(5)), None),
        },
    }


def with_heads(model: nn.Module, prefix: str) -> Weights:
    """Weights of a backbone, and of a projection that training adds."""
    return {**prefixed(model, prefix), "projection.0.weight": torch.zeros(4, 4), "projection.0.bias": torch.zeros(4)}


def dino(model: nn.Module) -> dict[str, Any]:
    head = {"module.head.mlp.0.weight": torch.zeros(4, 4), "module.head.last_layer.weight_g": torch.ones(4, 1)}
    teacher, student = prefixed(model, "module.backbone."), other("module.backbone.", num_classes=0)
    return {"student": student | head, "teacher": teacher | head, "epoch": 3, "args": argparse.Namespace(arch="vit")}


def moco(model: nn.Module) -> dict[str, Any]:
    queue = {"module.queue": torch.zeros(8, 16), "module.queue_ptr": torch.zeros(1, dtype=torch.long)}
    weights = other("module.encoder_k.") | queue | prefixed(model, "module.encoder_q.")
    return {"epoch": 1, "arch": MODEL, "state_dict": weights, "optimizer": {}}


def byol(model: nn.Module) -> Weights:
    return other("target_network.") | prefixed(model, "online_network.") | {"predictor.0.weight": torch.zeros(4, 4)}


def fastai(model: nn.Module) -> dict[str, Any]:
    """Save as `Learner.save(with_opt=True)`."""
    return {"model": model.state_dict(), "opt": {"state": [{"mom": torch.zeros(3)}], "hypers": [{"lr": 0.1}]}}


def mmcv(model: nn.Module) -> dict[str, Any]:
    meta = {"epoch": 3, "iter": 100, "time": "Mon Jan 1", "config": "model = dict(type='ViT')", "CLASSES": ("a", "b")}
    return {
        "meta": meta,
        "state_dict": collections.OrderedDict(prefixed(model, "backbone.")),
        "optimizer": stepped(model).state_dict(),
    }


def under(nest: str) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {nest: model.state_dict(), "acc": 91.5, "epoch": 3}


HEADLESS = {"num_classes": 0}
LAYOUTS: dict[str, tuple[Write, dict[str, Any]]] = {
    "plain": (file_of(lambda model: model.state_dict()), {}),
    "timm": (timm_saver(averaged=False), {}),
    "timm, averaged": (timm_saver(averaged=True), {}),
    "lightning, net": (lightning_trainer("net"), {}),
    "lightning, classifier, loss with weights": (lightning_trainer("classifier", nn.Linear(2, 2)), {}),
    "lightning, _forward_module": (lightning_trainer("_forward_module"), {}),
    "accelerate, save_state": (accelerate_state(safe=True), {}),
    "accelerate, save_state, pickle": (accelerate_state(safe=False), {}),
    "accelerate, save_model": (accelerate_model, {}),
    "torchvision": (torchvision_reference(averaged=False), {}),
    "torchvision, averaged": (torchvision_reference(averaged=True), {}),
    "AveragedModel": (file_of(lambda model: torch.optim.swa_utils.AveragedModel(model).state_dict()), {}),
    "AveragedModel of a compiled model": (
        file_of(compiled_and_averaged),
        {},
    ),
    "DataParallel": (file_of(wrapped), {}),
    "torch.compile": (file_of(compiled), {}),
    "torch.compile of blocks": (file_of(compiled_blocks), {}),
    "FSDP": (file_of(sharded_names), {}),
    "before archives": (older_archive, {}),
    "safetensors named .pt": (other_ending, {}),
    **{
        f"nest {nest}": (file_of(under(nest)), {})
        for nest in ("net", "model_state", "weights", "params", "ema", "network", "anything at all")
    },
    "params and params_ema": (file_of(lambda model: {"params": other(), "params_ema": model.state_dict()}), {}),
    "ema_state_dict": (file_of(lambda model: {"model_state_dict": other(), "ema_state_dict": model.state_dict()}), {}),
    "four levels": (file_of(lambda model: {"run": {"fold": {0: model.state_dict()}}}), {}),
    "own attribute": (file_of(lambda model: Holder(vit=model, aux=nn.Linear(2, 2)).state_dict()), {}),
    "two attributes": (file_of(lambda model: {"state_dict": Holder(outer=Holder(inner=model)).state_dict()}), {}),
    "attribute without a head": (file_of(lambda model: with_heads(model, "feature_extractor.")), HEADLESS),
    "mmcv": (file_of(mmcv), {}),
    "arrays (detectron2)": (file_of(arrays), {}),
    "fastai": (file_of(fastai), {}),
    "MoCo": (file_of(moco), {}),
    "SimCLR": (file_of(lambda model: {"state_dict": with_heads(model, "encoder.")}), HEADLESS),
    "DINO": (file_of(dino), HEADLESS),
    "MAE": (file_of(lambda model: {"model": model.state_dict(), "args": argparse.Namespace(blr=1e-3), "epoch": 8}), HEADLESS),
    "BYOL": (file_of(byol), {}),
    "metrics, paths, dates and options": (file_of(metrics), {}),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 3))
def test_a_layout_gives_the_outputs_of_the_model_that_was_saved(layout: str, tmp_path: Path) -> None:
    write, options = LAYOUTS[layout]
    model = trained(**options)
    with torch.no_grad():
        expected = model(PIXELS)
    file = write(copy.deepcopy(model), tmp_path) or tmp_path / "checkpoint.pth"
    loaded = load_model(MODEL, weights=file)
    with torch.no_grad():
        assert torch.equal(loaded(PIXELS), expected)


def notes(content: Any, folder: Path) -> str:
    torch.save(content, folder / "w.pth")
    return "; ".join(provenance_of(load_model(MODEL, weights=folder / "w.pth")).notes)


def test_two_equally_good_fits_are_told_in_a_note(tmp_path: Path) -> None:
    said = notes(moco(trained()), tmp_path)
    assert "the prefix 'module.encoder_q.' of the checkpoint's names was removed" in said
    assert "the names with the prefix 'module.encoder_k.' fit as well and were not used" in said
    same = prefixed(trained(), "a.") | prefixed(trained(), "b.")
    assert "fit as well" not in notes(same, tmp_path)
    assert "read from 'net' of the checkpoint; 'other' not used" in notes(
        {"net": trained().state_dict(), "other": other()}, tmp_path
    )


@pytest.mark.parametrize("turned", [False, True])
def test_the_choice_between_equal_fits_does_not_depend_on_the_order(tmp_path: Path, turned: bool) -> None:
    weights = moco(trained())["state_dict"]
    torch.save(dict(reversed(weights.items())) if turned else weights, tmp_path / "w.pth")
    assert torch.equal(load_model(MODEL, weights=tmp_path / "w.pth")(PIXELS), trained()(PIXELS))


def test_an_unknown_prefix_is_kept_where_two_layers_are_missing(tmp_path: Path) -> None:
    weights = {key: value for key, value in prefixed(trained(), "net.").items() if not re.search(r"norm1|attn", key)}
    torch.save(weights, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"does not fit the model: 80 missing: cls_token.* unexpected: net\.cls_token"):
        load_model(MODEL, weights=tmp_path / "w.pth")


def test_a_tensor_too_many_under_an_unknown_prefix_is_refused(tmp_path: Path) -> None:
    torch.save(prefixed(trained(), "net.") | {"net.stray": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"does not fit the model: 1 unexpected: stray;"):
        load_model(MODEL, weights=tmp_path / "w.pth")


@pytest.mark.parametrize("shared", [False, True])
def test_thousands_of_dictionaries_and_prefixes_are_searched_at_once(shared: bool) -> None:
    wanted = {key: value.shape for key, value in trained().state_dict().items()}
    small = {f"{'a.' * 30}{key}": torch.zeros(0) for key in wanted}
    content: Any = {str(index): small if shared else dict(small) for index in range(3000)}
    for _ in range(2):
        content = {str(index): content for index in range(50)} if shared else {"0": content}
    started = time.perf_counter()
    unwrap(content, wanted, "w.pth")
    assert time.perf_counter() - started < 20


def test_a_dictionary_that_holds_itself_is_searched_once() -> None:
    content: dict[str, Any] = {"w": torch.zeros(1)}
    content["again"] = content
    assert unwrap(content, {"w": torch.Size([1])}, "w.pth")[0].keys() == {"w"}


# ---- what runs code ----------------------------------------------------------------------------------------------------------


class Options:
    """Options of a class of the user's own."""


class Settings(argparse.Namespace):
    """A subclass, which may do anything."""


def refusal(content: Any, folder: Path, **options: Any) -> str:
    torch.save(content, folder / "w.pth", **options)
    with pytest.raises(WeightsError) as caught:
        load_model(MODEL, weights=folder / "w.pth")
    line = str(caught.value)
    assert "\n" not in line
    return line


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "whole model": (lambda model: model, "timm.models.vision_transformer.VisionTransformer"),
    "whole model in a dictionary (ultralytics)": (lambda model: {"model": Holder(net=model), "ema": None}, f"{__name__}.Holder"),
    "options of an own class": (
        lambda model: {"hyper_parameters": Options(), "state_dict": model.state_dict()},
        f"{__name__}.Options",
    ),
    "a subclass of Namespace": (lambda model: {"args": Settings(), "state_dict": model.state_dict()}, f"{__name__}.Settings"),
    "a function": (lambda model: {"criterion": trained, "state_dict": model.state_dict()}, f"{__name__}.trained"),
    "a builtin function": (lambda model: {"f": eval, "state_dict": model.state_dict()}, "eval"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_with_lines_that_save_the_tensors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, named = REFUSED[name]
    model = trained()
    line = refusal(content(model), tmp_path)
    assert f"refused, because loading it would run code: it holds {named}; if you trust the file" in line
    lines = re.search(r"save its tensors alone: (import torch; .*)\.$", line)
    assert lines is not None
    monkeypatch.chdir(tmp_path)
    exec(lines[1], {})  # as the user would
    assert torch.equal(load_model(MODEL, weights=tmp_path / "tensors.pth")(PIXELS), model(PIXELS))


class Hostile:
    """An object whose pickle calls a function with arguments, and then sets its state."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        """Keep what is called."""
        self.called = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what is called."""
        return self.called


def test_stand_ins_call_nothing_of_numpy_or_pathlib(tmp_path: Path) -> None:
    """Load calls that would unpickle, allocate or touch something if the named function itself was called."""
    scalar, rebuild = np.float64(1).__reduce__()[0], np.zeros(1).__reduce__()[0]
    inner = pickle.dumps(Hostile(pathlib.Path.touch, tmp_path / "canary"))
    hostile = [
        Hostile(scalar, np.dtype("O"), inner),
        Hostile(scalar, Hostile(np.dtype, "O", False, True, state=(3, "|", None, None, None, -1, -1, 63)), inner),
        Hostile(scalar, np.dtype("f8"), b"short"),
        Hostile(rebuild, np.ndarray, (2**40,), b"d"),
        Hostile(rebuild, np.ndarray, (0,), b"b", state=(1, (2**39, 2**39), np.dtype("f8"), False, b"")),
        Hostile(rebuild, np.ndarray, (0,), b"b", state=(1, (2,), np.dtype("O"), False, [1, 2])),
        Hostile(rebuild, np.ndarray, (0,), b"b", state=(1, (-1,), np.dtype("f8"), False, b"12345678")),
        Hostile(rebuild, np.ndarray, (0,), b"b", state=7),
        Hostile(np.dtype, {"names": ["a"], "formats": ["O"], "offsets": [10**9]}),
        Hostile(np.dtype, "f8", False, True, state=(3, "<", ("O", (2**31,)), None, None, -1, -1, 0)),
        Hostile(pathlib.PosixPath, 1, None, "\0", state={"__class__": int}),
        Hostile(datetime.datetime, "not a date"),
        Hostile(decimal.Decimal, "1" * 10_000, state={"a": 1}),
        Hostile(list, range(10**12)),
        Hostile(int, "9" * 10_000),
        Hostile(bytes, 2**45),
    ]
    weights = trained().state_dict()
    torch.save({"state_dict": weights, **{str(index): value for index, value in enumerate(hostile)}}, tmp_path / "w.pth")
    before = set(torch.serialization.get_safe_globals())
    read = read_checkpoint(tmp_path / "w.pth")
    assert torch.equal(load_model(MODEL, weights=tmp_path / "w.pth")(PIXELS), trained()(PIXELS))
    assert read.pop(str(len(hostile) - 1)) == b""
    assert {type(read[str(index)]).__module__ for index in range(len(hostile) - 1)} == {"visattn.core.loading.stand_ins"}
    assert not (tmp_path / "canary").exists()
    assert set(torch.serialization.get_safe_globals()) == before


NAMES = {  # as other versions of NumPy and Python write them
    b"cnumpy._core.multiarray\n": b"cnumpy.core.multiarray\n",
    b"cpathlib\nPosixPath\n": b"cpathlib._local\nPosixPath\n",
}


def test_names_of_other_versions_are_understood(tmp_path: Path) -> None:
    torch.save(metrics(trained()) | arrays(trained()), tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as read, zipfile.ZipFile(tmp_path / "other.pth", "w") as write:
        for name in read.namelist():
            content = read.read(name)
            for own, others in NAMES.items():
                assert own in content or not name.endswith("data.pkl")
                content = content.replace(own, others) if name.endswith("data.pkl") else content
            write.writestr(name.replace("w/", "other/", 1), content)
    assert torch.equal(load_model(MODEL, weights=tmp_path / "other.pth")(PIXELS), trained()(PIXELS))


FUNCTIONS = [pathlib.Path.touch, np.load, np.frombuffer, pickle.loads, torch.load, getattr, exec, copy.deepcopy, type, super, map]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_functions_that_stand_for_nothing_are_refused(function: Any, tmp_path: Path) -> None:
    line = refusal({"x": Hostile(function, "canary"), **trained().state_dict()}, tmp_path)
    assert "refused, because loading it would run code: it holds" in line


@pytest.mark.parametrize("code", ["f8", "f4", "f2", "i8", "i1", "u1", "b1"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("columns_first", [False, True])
def test_arrays_of_numbers_are_read_exactly(code: str, order: Literal["<", ">"], columns_first: bool, tmp_path: Path) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(np.dtype(code).newbyteorder(order), order="F" if columns_first else "C")
    torch.save({"a": values, "one": np.array(3.0), "none": np.zeros((0, 2))}, tmp_path / "w.pth")
    wanted = {"a": torch.Size([2, 3, 4]), "one": torch.Size([]), "none": torch.Size([0, 2])}
    tensors, said = unwrap(read_checkpoint(tmp_path / "w.pth"), wanted, "w.pth")
    assert np.array_equal(tensors["a"].numpy(), values)
    assert {key: value.shape for key, value in tensors.items()} == wanted
    assert said == ("arrays of NumPy were read as tensors",)


# ---- other formats -----------------------------------------------------------------------------------------------------------


def scripted(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace: Any = torch.jit.trace
        torch.jit.save(trace(trained(), PIXELS, check_trace=False), folder / "file")


def protocol(folder: Path) -> None:
    torch.save(trained().state_dict(), folder / "file", pickle_protocol=4)


def zipped(folder: Path, *names: str) -> None:
    with zipfile.ZipFile(folder / "file", "w") as archive:
        for name in names:
            archive.writestr(name, "content")


FORMATS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "TorchScript": (
        scripted,
        r"is a TorchScript archive \(torch\.jit\.save\), which holds code; if you trust it, save its tensors",
    ),
    "protocol 4": (protocol, r"its pickle is damaged, or has operations of a protocol above 2, which PyTorch"),
    "zip": (
        lambda folder: zipped(folder, "a/model.pth", "readme"),
        r"a zip archive that torch\.save did not write \(it holds a/model",
    ),
    "empty zip": (lambda folder: zipped(folder, "a"), "a zip archive that torch.save did not write"),
    "Keras 3": (lambda folder: zipped(folder, "config.json", "model.weights.h5"), "HDF5 weights, as Keras writes them"),
    "npz": (lambda folder: np.savez((folder / "file").open("wb"), a=np.zeros(3)), r"an archive of NumPy arrays \(npz\)"),
    "npy": (lambda folder: np.save((folder / "file").open("wb"), np.zeros(3)), "is one array of NumPy"),
    "HDF5": (
        lambda folder: (folder / "file").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)),
        "is an HDF5 file, as Keras writes them",
    ),
    "GGUF": (lambda folder: (folder / "file").write_bytes(b"GGUF" + bytes(99)), "is a GGUF file"),
    "gzip": (
        lambda folder: (folder / "file").write_bytes(b"\x1f\x8b\x08" + bytes(99)),
        "is compressed with gzip; unpack|gzip, not a",
    ),
    "pickle": (
        lambda folder: (folder / "file").write_bytes(pickle.dumps({"a": [1] * 40})),
        r"is a pickle \(protocol 4\) that torch",
    ),
    "ONNX": (
        lambda folder: (folder / "file").write_bytes(b"\x08\x07\x12\x07pytorch\x1a\x05" + bytes(99)),
        "looks like an ONNX graph",
    ),
    "tar": (lambda folder: (folder / "file").write_bytes(b"a" + bytes(256) + b"ustar\x0000" + bytes(START)), "is a tar archive"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("suffix", [".pth", ".bin", ".safetensors"])
@pytest.mark.parametrize("name", FORMATS)
def test_another_format_is_told_what_it_is(name: str, suffix: str, tmp_path: Path) -> None:
    write, said = FORMATS[name]
    write(tmp_path)
    file = (tmp_path / "file").rename(tmp_path / f"file{suffix}")
    if name == "protocol 4" and suffix == ".safetensors":
        said = "is a file of torch.save, not safetensors as its name says; give it the ending .pth"
    with pytest.raises(WeightsError, match=said) as caught:
        load_model(MODEL, weights=file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert "download it again" not in str(caught.value)


def test_a_checkpoint_of_torchvision_in_a_lightning_module(tmp_path: Path) -> None:
    model = torchvision.models.resnet18(num_classes=7).eval()
    torch.save({"state_dict": prefixed(model, "classifier_net.")}, tmp_path / "w.ckpt")
    assert torch.equal(load_model("tv:resnet18", weights=tmp_path / "w.ckpt")(PIXELS), model(PIXELS))


class Own(Tensor):
    """A tensor with code of its own, like those of torch.distributed."""


def test_a_tensor_with_code_of_its_own_is_named() -> None:
    with pytest.raises(WeightsError, match=r"w\.pth: a is a Own; save plain float tensors\."):
        as_float32({"a": torch.zeros(2).as_subclass(Own)}, "w.pth")
