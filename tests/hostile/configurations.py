"""Folders of models, recipes and studies that were changed to mislead: code beside them, pickles, sizes, types, paths."""

from __future__ import annotations

import atexit
import functools
import json
import os
import pickle
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from tests.hostile import folders
from tests.hostile.driver import Case
from tests.hostile.folders import RAW, VALUES
from tests.hostile.journals import finished
from tests.hostile.photos import OUT, canary, place_of
from tests.hostile.values import damaged

MODELS = ("vit", "detr", "timm")
CONFIG, PROCESSOR, WEIGHTS, INDEX = "config.json", "preprocessor_config.json", "model.safetensors", "model.safetensors.index.json"
PICKLE, MODULE = "PICKLE", "evil"  # in values: the path of a pickle that leaves a trace; a module that does
HUGE = (10**6, 10**9, 2**63, 10**30)
SIZES: tuple[Any, ...] = (0, -1, 1, 3, 7, 0.5, float("nan"), float("inf"), "16", None, [16], [], {}, True, *HUGE)
NAMED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (
        "architectures",
        (
            7,
            [],
            [7],
            [["ViTModel"]],
            "ViTForImageClassification",
            ["../x"],
            ["PreTrainedModel"],
            ["AutoModel"],
            ["os"],
            [None],
            {"a": 1},
            ["BertModel"],
        ),
    ),
    (
        "auto_map",
        (
            {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForImageClassification": "evil.Model"},
            {"AutoConfig": "../outside/evil.Config"},
        ),
    ),
    (
        "auto_map",
        ({"AutoConfig": "x/y--evil.Config"}, 7, [], {"AutoConfig": ["evil.Config", None]}, {"AutoConfig": 7}, "evil.Config"),
    ),
    ("trust_remote_code", (True, "yes")),
    ("model_type", ("evil", 7, None, [], "../x", "bert", "vit\0", "custom", "timm_wrapper", "auto", "vision-encoder-decoder")),
    (
        "model_args",
        (
            {"checkpoint_path": PICKLE},
            {"pretrained": True},
            {"pretrained_cfg": {"file": PICKLE}},
            {"pretrained_cfg_overlay": {"file": PICKLE}, "pretrained": True},
        ),
    ),
    (
        "model_args",
        (
            7,
            [],
            {"img_size": 10**9},
            {"depth": 10**6},
            {"embed_dim": 0},
            {"cache_dir": "../outside"},
            {"scriptable": True},
            {"evil": 1},
            {"act_layer": "evil"},
        ),
    ),
    ("architecture", ("hf-hub:evil/x", "local-dir:OUTSIDE", "local-dir:.", "../x", 7, "", "resnet18.evil", "hf_hub:x/y")),
    (
        "pretrained_cfg",
        (
            {"url": "file://PICKLE"},
            {"file": PICKLE, "custom_load": True},
            {"hf_hub_id": "evil/x"},
            7,
            {"input_size": [3, -1, 0]},
            {"mean": "x"},
        ),
    ),
    ("backbone", ("resnet18", PICKLE, "../outside", 7, "hf-hub:evil/x", "evil/x")),
    ("backbone_kwargs", ({"checkpoint_path": PICKLE}, {"out_indices": [99]}, 7, {"pretrained": True})),
    ("use_timm_backbone", (True, "x")),
    ("use_pretrained_backbone", (True,)),
    ("pretrained_backbone", (True, PICKLE)),
    (
        "backbone_config",
        (7, {}, {"model_type": "evil"}, {"model_type": "timm_backbone", "backbone": "resnet18", "use_pretrained_backbone": True}),
    ),
    (
        "quantization_config",
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            {"quant_method": "gptq", "bits": 4},
            {"quant_method": "evil"},
            7,
            {},
        ),
    ),
    (
        "quantization_config",
        (
            {"quant_method": "quanto"},
            {"quant_method": "torchao", "quant_type": "int8_weight_only"},
            {"quant_method": "fp8"},
            {"quant_method": ["awq"]},
        ),
    ),
    ("attn_implementation", ("evil/kernel", "flash_attention_2", 7, "kernels-community/flash-attn")),
    ("_attn_implementation", ("evil/kernel", "flash_attention_2", 7, "flex_attention")),
    ("dtype", ("evil", "os.system", "float16", 7, "auto")),
    ("torch_dtype", ("evil", "os.system", "bfloat16", 7)),
    ("hidden_act", ("evil", 7, "", "gelu_python", "__import__('os')", None)),
    ("num_hidden_layers", SIZES),
    ("hidden_size", SIZES),
    ("num_attention_heads", SIZES),
    ("intermediate_size", SIZES),
    ("image_size", (*SIZES, [32, 0], [10**6, 10**6], [1, 2, 3])),
    ("patch_size", (*SIZES, [16, 0])),
    ("num_channels", SIZES),
    ("num_labels", SIZES),
    ("num_queries", SIZES),
    ("d_model", SIZES),
    ("encoder_layers", SIZES),
    ("num_classes", SIZES),
    (
        "id2label",
        (
            {str(i): "x" for i in range(100_000)},
            {"0": "\x1b]0;x\a"},
            {"x": "y"},
            7,
            [],
            {"0": ["a"]},
            {"-1": "a"},
            {"0": "a" * 10**6},
        ),
    ),
    ("label2id", (7, {"\ud800": 0}, {})),
    ("label_names", (7, ["\x1b]0;x\a"] * 3, [], ["a"] * 10**5)),
    ("layer_norm_eps", (float("nan"), -1, "x", 10**400)),
    ("initializer_range", (float("nan"), -1, "x", 10**400)),
    ("torchscript", (True, "x")),
    ("return_dict", (False, "x")),
    ("output_attentions", (True, "x")),
    ("use_cache", ("x",)),
    ("is_encoder_decoder", (True,)),
    ("chunk_size_feed_forward", (-1, 10**9, "x")),
    ("name_or_path", ("../outside", 7)),
    ("_commit_hash", (7, "../x")),
    ("transformers_version", (7, "99.0", "../x")),
    ("peft_config", ({"base_model_name_or_path": "evil/x"}, 7)),
    ("custom_pipelines", ({"x": {"impl": "evil.Pipeline"}},)),
)
PROCESSING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (
        "image_processor_type",
        ("evil.Processor", 7, None, "ViTFeatureExtractor", "os", "BertModel", "DetrImageProcessor", "TimmWrapperImageProcessor"),
    ),
    ("feature_extractor_type", ("evil", 7, "ViTFeatureExtractor")),
    ("processor_class", ("evil", 7, "CLIPProcessor")),
    (
        "auto_map",
        (
            {"AutoImageProcessor": "evil.Processor"},
            {"AutoImageProcessor": ["evil.A", "evil.B"]},
            {"AutoProcessor": "evil.Processor"},
            7,
        ),
    ),
    (
        "size",
        (
            0,
            -1,
            10**9,
            {"height": 0, "width": 32},
            {"shortest_edge": 10**9},
            {"height": 10**6, "width": 10**6},
            "x",
            [],
            {},
            {"longest_edge": 1},
            {"height": "x", "width": None},
        ),
    ),
    ("crop_size", (0, -1, 10**9, {"height": 10**6, "width": 10**6}, "x")),
    ("do_resize", ("x", False, None, 7)),
    ("do_center_crop", (True, "x")),
    ("do_pad", (True, "x")),
    ("pad_size", ({"height": 10**6, "width": 10**6}, {"height": -1, "width": 1}, 7)),
    ("do_normalize", (False, "x")),
    ("image_mean", ([float("nan")] * 3, [0.5], "x", [], [10**400] * 3, None)),
    ("image_std", ([0, 0, 0], [float("nan")] * 3, [0.5], "x", [-1, -1, -1], None)),
    ("rescale_factor", (0, float("nan"), 10**400, "x", -1)),
    ("resample", (99, -1, "x", None)),
    ("size_divisor", (0, -1, 10**9)),
    ("patch_size", (0, -1, 10**9)),
    ("device", ("cuda", "evil", "meta")),
)
BESIDE = (
    "evil.py",
    "modeling_evil.py",
    "configuration_evil.py",
    "__init__.py",
    "transformers.py",
    "torch.py",
    "timm.py",
    "safetensors.py",
    "sitecustomize.py",
    "custom_generate/generate.py",
    "modeling_vit.py",
)
PICKLES = (
    "pytorch_model.bin",
    "pytorch_model-00001-of-00001.bin",
    "model.pt",
    "adapter_model.bin",
    "training_args.bin",
    "optimizer.pt",
    "tf_model.h5",
    "flax_model.msgpack",
)

Prepare = Callable[[Path], list[str]]
Edit = Callable[[Path], None]


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    for number in range(count):
        dice = random.Random(f"{seed} configuration {number}")
        make = dice.choice([_of_a_model, _of_a_model, _of_a_model, _of_a_model, _of_visattn, _of_a_study])
        case = make(dice)
        yield replace(case, name=f"configuration {seed}.{number} {case.name}")


class _Trace:
    """An object whose pickle leaves a trace when it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._file), "w"))


@functools.cache
def _saved() -> Path:
    """Write a folder for each model."""
    place, mine = Path(tempfile.mkdtemp(prefix="hostile-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(place) if os.getpid() == mine else None)  # not when a forked child exits
    library: Any = transformers  # whose types lack names that its classes take
    library.utils.logging.disable_progress_bar()
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    vit = library.ViTConfig(**small, image_size=32, patch_size=16, num_labels=3)
    library.ViTForImageClassification(vit).save_pretrained(place / "vit")
    library.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(place / "vit")
    features = library.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"])
    sizes = {
        f"{part}_{name}": number
        for part in ("encoder", "decoder")
        for name, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    detr = library.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=features,
        d_model=16,
        num_queries=3,
        num_labels=3,
        **sizes,
    )
    library.DetrForObjectDetection(detr).save_pretrained(place / "detr")
    library.DetrImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(place / "detr")
    timm = library.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224", model_args={"img_size": 32, "depth": 2, "embed_dim": 48}, num_labels=3
    )
    library.TimmWrapperForImageClassification(timm).save_pretrained(place / "timm")
    return place


def _of_a_model(dice: random.Random) -> Case:
    model = dice.choice(MODELS)
    edits = [dice.choice(_EDITS)(dice, model) for _ in range(dice.choice([1, 1, 2]))]
    beside = [*dice.sample(BESIDE, 3), "evil.py"]
    pickles = dice.sample(PICKLES, 2) if dice.random() < 0.5 else []
    words = dice.choice([["overlay", "photo.png"], ["overlay", "photo.png"], ["inspect"], ["batch", "photo.png"]])
    weights = ["--weights", "none"] if dice.random() < 0.15 else []
    output: list[str] = {"overlay": ["-o", "o.png"], "batch": ["-o", OUT], "inspect": []}[words[0]]

    def prepare(folder: Path) -> list[str]:
        outside = place_of(folder)
        place = folder / "model"
        shutil.copytree(_saved() / model, place)
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / "photo.png")
        for name in pickles:
            (place / name).write_bytes(pickle.dumps(_Trace(folder.parent / "canaries" / name)))
        (outside / "evil.pth").write_bytes(pickle.dumps(_Trace(folder.parent / "canaries" / "pickle")))
        shutil.copy(_saved() / model / WEIGHTS, outside / WEIGHTS)
        for edit in edits:
            edit(place)
        for name in beside:
            for where in (place, folder, outside):
                (where / name).parent.mkdir(exist_ok=True)
                (where / name).write_text(
                    canary(folder, name.replace("/", "-")) + "class Config: pass\nclass Model: pass\nclass Processor: pass\n"
                )
        named = ["hf:model"] if words[0] == "inspect" else ["--model", "hf:model", *weights, "-q"]
        return [*words, *named, *output]

    outputs = tuple(output[1:])
    kind = " ".join(edit.__doc__ or "" for edit in edits)
    return Case(f"{words[0]} {model} {kind[:80]}", prepare, outputs, prints=words[0] != "overlay", clear=True)


def _told(edit: Edit, name: str) -> Edit:
    edit.__doc__ = name
    return edit


def _path(value: Any, place: Path) -> Any:
    """Insert the path of the pickle in a value."""
    outside = place.parent.parent / "outside"
    return json.loads(json.dumps(value).replace(PICKLE, str(outside / "evil.pth")).replace("OUTSIDE", str(outside)))


def _changed(file: Path, change: Callable[[Any], Any]) -> None:
    try:
        told = change(json.loads(file.read_text()) if file.is_file() else {})
    except (ValueError, RecursionError):  # another change has damaged it
        return
    file.write_bytes(folders._text(told).encode("utf-8", "surrogatepass"))


def _field(dice: random.Random, _model: str) -> Edit:
    name, values = dice.choice(NAMED)
    value = dice.choice(values)

    def edit(place: Path) -> None:
        _changed(place / CONFIG, lambda told: {**told, name: _path(value, place)} if isinstance(told, dict) else told)

    return _told(edit, f"{name}={str(value)[:40]!a}")


def _processing(dice: random.Random, _model: str) -> Edit:
    name, values = dice.choice(PROCESSING)
    value = dice.choice(values)
    file = dice.choice([PROCESSOR, PROCESSOR, PROCESSOR, "processor_config.json"])

    def edit(place: Path) -> None:
        _changed(place / file, lambda told: {**told, name: value} if isinstance(told, dict) else told)

    return _told(edit, f"{file} {name}={str(value)[:40]!a}")


def _any_value(dice: random.Random, model: str) -> Edit:
    file, key = dice.choice([CONFIG, CONFIG, PROCESSOR if model != "timm" else CONFIG]), dice.randrange(2**32)

    def edit(place: Path) -> None:
        def change(told: Any) -> Any:
            if isinstance(told, dict) and told:
                folders._change(told, random.Random(key))
            return told

        _changed(place / file, change)

    return _told(edit, f"{file} {key}")


def _text(dice: random.Random, model: str) -> Edit:
    """Write a file that is no object of JSON, or has a key twice."""
    file = dice.choice(
        [CONFIG, CONFIG, PROCESSOR, "processor_config.json", "generation_config.json", "adapter_config.json", "tokenizer.json"]
    )
    text = dice.choice(
        [
            b"",
            b"[]",
            b"null",
            b"7",
            b'"x"',
            b"{",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"\xff\xfe{}",
            b"\xef\xbb\xbf{}",
            b"\0" * 999,
            b'{"model_type": NaN}',
            b"9" * 5000,
        ]
    )
    twice = dice.choice(
        [
            b'{"architectures": ["Evil"], ',
            b'{"model_type": "evil", ',
            b'{"image_size": 0, ',
            b'{"auto_map": {"AutoConfig": "evil.Config"}, ',
        ]
    )
    double = dice.random() < 0.3

    def edit(place: Path) -> None:
        path = place / file
        path.write_bytes(twice + path.read_bytes().lstrip()[1:] if double and path.is_file() else text)

    return _told(edit, f"{file} {'twice' if double else str(text[:20])}")


def _weights(dice: random.Random, _model: str) -> Edit:
    """Damage the tensors, or put something else in their place."""
    kind, key = dice.randrange(7), dice.randrange(2**32)
    header = folders._text({"x": dice.choice(VALUES), "__metadata__": dice.choice(VALUES)}).encode("utf-8", "surrogatepass")
    size = dice.choice([len(header), 0, 2**63, 10**9])

    def edit(place: Path) -> None:
        file, outside = place / WEIGHTS, place.parent.parent / "outside"
        content = file.read_bytes() if file.is_file() else b""
        if kind == 0:
            file.write_bytes(damaged(random.Random(key), content))
        elif kind == 1:
            file.write_bytes(struct.pack("<Q", size) + header)
        elif kind == 2:
            shutil.copy(outside / "evil.pth", file)
        elif kind == 3:
            file.write_bytes(content[: key % (len(content) + 1)])
        else:
            file.unlink(missing_ok=True)
            if kind == 4:
                os.mkfifo(file)
            elif kind == 5:
                file.symlink_to("/dev/zero")
            else:
                file.mkdir()

    return _told(edit, f"weights {kind}")


def _index(dice: random.Random, _model: str) -> Edit:
    """Replace the tensors by a list of files, which may name any file."""
    part = dice.choice(
        [
            f"../../outside/{WEIGHTS}",
            f"OUTSIDE/{WEIGHTS}",
            "../../outside/evil.pth",
            PICKLE,
            "/dev/zero",
            "/etc/passwd",
            "x" * 5000,
            "",
            ".",
            "a\0b",
            7,
            None,
            ["x"],
            "pytorch_model.bin",
            "http://127.0.0.1:1/x.safetensors",
            WEIGHTS,
        ]
    )
    whole: Any = dice.choice(
        [
            None,
            None,
            None,
            None,
            7,
            [],
            {},
            {"weight_map": 7},
            {"weight_map": []},
            {"weight_map": {}},
            {"weight_map": {str(i): f"{i}.safetensors" for i in range(20_000)}},
        ]
    )

    def edit(place: Path) -> None:
        file = place / WEIGHTS
        names = ["x"]
        if file.is_file() and not file.is_symlink():
            with suppress(ValueError, struct.error, RecursionError, OverflowError, AttributeError), file.open("rb") as stream:
                found = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
                names = [name for name in found if name != "__metadata__"]
            file.rename(place / "part.safetensors")
        parts = {name: "part.safetensors" if number else part for number, name in enumerate(names)}
        told = {"metadata": {"total_size": 9}, "weight_map": parts} if whole is None else whole
        (place / INDEX).write_text(json.dumps(_path(told, place)))

    return _told(edit, f"index {str(part)[:30]!a}")


def _adapter(dice: random.Random, _model: str) -> Edit:
    told = dice.choice(
        [
            {"base_model_name_or_path": "evil/x", "peft_type": "LORA"},
            {"base_model_name_or_path": "../outside", "auto_mapping": {"base_model_class": "Model", "parent_library": "evil"}},
            7,
            {"peft_type": "evil"},
        ]
    )

    def edit(place: Path) -> None:
        (place / "adapter_config.json").write_text(json.dumps(told))
        shutil.copy(place.parent.parent / "outside" / "evil.pth", place / "adapter_model.bin")

    return _told(edit, "adapter")


def _special(dice: random.Random, _model: str) -> Edit:
    name = dice.choice([CONFIG, PROCESSOR, INDEX, "adapter_config.json", "generation_config.json", "processor_config.json"])
    make = dice.choice([folders._pipe, folders._folder, folders._device, folders._itself, folders._empty])

    def edit(place: Path) -> None:
        path = place / name
        path.unlink(missing_ok=True)
        make(path, place.parent)

    return _told(edit, f"{name} {make.__name__}")


_EDITS: tuple[Callable[[random.Random, str], Edit], ...] = (
    *(_field,) * 8,
    *(_processing,) * 4,
    *(_any_value,) * 3,
    *(_text, _weights, _weights, _index, _index, _adapter, _special),
)


# folders and files of visattn


def _of_visattn(dice: random.Random) -> Case:
    name, prepare = dice.choice([folders._of_facts, folders._of_a_caption, folders._of_a_recipe, _of_paths])(dice)
    return Case(name, prepare, judge=folders._judge)


def _of_paths(dice: random.Random) -> tuple[str, folders.Prepare]:
    """Let a model's folder name the place of its weights, of another model, or of code."""
    key = dice.choice(
        ["model", "weights", "kind", "factory", "module", "checkpoint", "class", "model_kwargs", "vocabulary", "architecture"]
    )
    value = dice.choice(
        [
            "../../outside/evil.pth",
            "own.py:make",
            "own.py",
            "hf:evil/x",
            "hf:../outside",
            "tv:evil",
            {"checkpoint_path": "../evil.pth"},
            {"pretrained": True},
            ["own.py:make"],
            "os:system",
        ]
    )
    draw = dice.choice([folders._draw, folders._tell])

    def prepare(folder: Path) -> list[str]:
        arguments = draw(folder)
        file = folder / "trained" / "final" / "model.json"
        told = json.loads(file.read_text())
        told[key] = value
        file.write_text(json.dumps(told))
        code = f"open({str(folder / 'outside' / 'canary')!r}, 'w').close()\n"
        for where in (folder, file.parent):
            (where / "own.py").write_text(code)
        (folder / "evil.pth").write_bytes(pickle.dumps(_Trace(folder / "outside" / "canary")))
        return arguments

    return f"model.json {key} {str(value)[:30]!a}", prepare


def _of_a_study(dice: random.Random) -> Case:
    """Change a value in the description of a study, or the header of its tensors."""
    key, kind = dice.randrange(2**32), dice.choice(["facts", "facts", "facts", "header", "bytes"])

    def prepare(folder: Path) -> list[str]:
        content = next((finished(("--studies",)) / OUT).glob("*.attn")).read_bytes()
        own = random.Random(key)
        (folder / "s.attn").write_bytes(damaged(own, content) if kind == "bytes" else _study(content, kind, own))
        return ["view", "s.attn", "-o", "o.html", "-q"]

    return Case(f"study {kind} {key}", prepare, ("o.html",), clear=True)


def _study(content: bytes, kind: str, own: random.Random) -> bytes:
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    if kind == "header":
        folders._change(header, own)
    else:
        metadata = header["__metadata__"]
        name = own.choice([name for name, text in metadata.items() if text[:1] in "{["] or list(metadata))
        try:
            told = json.loads(metadata[name])
            folders._change(told, own)
            metadata[name] = folders._text(told)
        except (ValueError, TypeError):
            metadata[name] = own.choice([value for value in VALUES if isinstance(value, str) and not value.startswith(RAW)])
    text = folders._text(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + content[8 + size :]
