"""Model files and weights that misbehave, loaded by several commands."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from tests.hostile.driver import Case
from tests.hostile.values import TEXTS, damaged, value

FILE = """
import math, os, sys, warnings
import torch
from torch import nn

{top}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
        self.patches = nn.Conv2d({channels}, 8, 16, {stride})
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, pixels):
        {begin}
        tokens = self.patches(pixels).flatten(2).transpose(1, 2)
        {before}
        tokens = self.attention(tokens, tokens, tokens)[0]
        {after}
        out = self.head(tokens.mean(1))
        {end}
        return out

def make({arguments}):
    {make}
    return Model()
"""
RAISED = (
    "raise RuntimeError('a\\nb')",
    "raise KeyError",
    "raise StopIteration",
    "raise GeneratorExit",
    "raise SystemExit(0)",
    "sys.exit()",
    "raise KeyError('\\x1b[31m')",
    "raise BaseException('x')",
    "raise MemoryError",
    "raise RecursionError('deep')",
    "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')",
    "raise OSError(28, 'No space left on device')",
    "raise BrokenPipeError(32, 'Broken pipe')",
    'raise RuntimeError("[enforce fail] DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 99 bytes")',
    "assert False",
    "1 / 0",
    "undefined_name",
    "import no_such_module",
    "warnings.warn('w\\nw')",
    "print('noise')",
    "sys.stdout.write('noise')",
    "torch.manual_seed(3)",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_grad_enabled(False)",
    "torch.empty(2 ** 50)",
    "(lambda f: f(f))(lambda f: f(f))",
)
EFFECTS = (
    "os.chdir('/')",
    "sys.path.clear()",
    "sys.argv.clear()",
    "os.environ.clear()",
    "warnings.simplefilter('error')",
    "sys.stdout = None",
)
RETURNED = (
    "return None",
    "return 'text'",
    "return {'logits': out}",
    "return (out, out)",
    "return []",
    "return out.sum()",
    "return out * float('nan')",
    "return out * float('inf')",
    "return out[:0]",
    "return out[:, :0]",
    "return out.long()",
    "return out.half()",
    "return out.bfloat16()",
    "return out.to(torch.complex64)",
    "return out.bool()",
    "return out.detach()",
    "return out[None, None]",
    "return out.to('meta')",
    "return type('Out', (), {'logits': out})()",
    "return out.numpy(force=True)",
    "return pixels",
    "return self",
)
TOKENS = (
    "tokens = tokens[:, :0]",
    "tokens = tokens[:, torch.randperm(tokens.shape[1])]",
    "tokens = tokens * float('nan')",
    "tokens = tokens.detach()",
    "tokens = tokens.double().float()",
    "tokens = tokens[:, tokens[0, :, 0] > 1e9]",
    "tokens.data.fill_(3)",
    "tokens.resize_(1, 4, 8)",
    "tokens = torch.from_numpy(tokens.numpy(force=True))",
    "tokens = tokens.to_sparse().to_dense()",
    "tokens.grad_fn.undefined",
)
STARTS = (
    "self.patches = 3",
    "self.register_buffer('b', torch.zeros(3))",
    "self.__class__.__repr__ = lambda self: 1 / 0",
    "self.__class__.parameters = lambda self, recurse=True: iter(())",
    "self.__class__.eval = lambda self: None",
    "self.__class__.image_size = 'big'",
    "self.img_size = -3",
    "self.img_size = 10 ** 9",
    "self.img_size = (1, 2, 3)",
    "self.image_size = float('nan')",
    "self.preprocess_cfg = {'mean': 'x', 'std': 3}",
    "self.preprocess_cfg = {'mean': (0, 0, 0), 'std': (0, 0, 0)}",
    "self.preprocess_cfg = {'interpolation': 'odd'}",
    "self.pretrained_cfg = {'mean': None, 'input_size': 'x'}",
    "self.pretrained_cfg = 3",
    "self.visual = self",
)
COMMANDS = ("overlay", "overlay", "overlay", "heads", "inspect", "stats")
METHODS = (
    "auto",
    "attention",
    "rollout",
    "relevance",
    "gradcam",
    "legrad",
    "captum.integrated_gradients",
    "similarity",
    "pca",
    "gates",
)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    for number in range(count):
        rng = random.Random(f"{seed} model {number}")
        make = _weights if rng.random() < 0.4 else _file
        command = rng.choice(COMMANDS if make is _file else COMMANDS[:4])
        output = {"overlay": ("o.png",), "heads": ("o.png",), "stats": ("out",)}.get(command, ())
        yield Case(f"model {seed}.{number}", partial(make, rng, command), output, prints=not output)


def _command(rng: random.Random, command: str, folder: Path) -> list[str]:
    (folder / "photos").mkdir()
    for i in range(2):
        picture = Image.fromarray(np.random.default_rng(i).integers(0, 256, (50, 60, 3), dtype=np.uint8))
        picture.save(folder / "photos" / f"{i}.png")
    photo = "photos/0.png"
    if command == "inspect":
        return ["inspect"]
    if command == "stats":
        return ["stats", "photos", "-o", "out"]
    if command == "heads":
        return ["heads", photo, "-o", "o.png"]
    method = rng.choice(METHODS)
    few = ["--steps" if method == "captum.integrated_gradients" else "--samples", "5"]
    more = ["--query", "pixel:20,20"] if method == "similarity" else few if method.startswith("captum") else []
    return ["overlay", photo, "-o", "o.png", "--method", method, *more, *(["--target", "1"] if rng.random() < 0.2 else [])]


def _file(rng: random.Random, command: str, folder: Path) -> list[str]:
    parts = {"top": "", "init": "pass", "begin": "pass", "before": "pass", "after": "pass", "end": "pass", "make": "pass"}
    parts |= {"channels": "3", "stride": "16", "arguments": ""}
    for _ in range(rng.choice([1, 1, 1, 2])):
        where = rng.choice(
            ["top", "init", "begin", "before", "after", "end", "make", "tokens", "tokens", "end", "numbers", "starts"]
        )
        if where == "tokens":
            parts[rng.choice(["before", "after"])] = rng.choice(TOKENS)
        elif where == "end" and rng.random() < 0.8:
            parts["end"] = rng.choice(RETURNED)
        elif where == "numbers":
            parts |= {"channels": rng.choice(["1", "4", "17", "0"]), "stride": rng.choice(["16", "8", "300", "1"])}
            parts["arguments"] = rng.choice(["", "x", "*a", "x=1"])
        elif where == "effects":
            parts[rng.choice(["top", "init", "make"])] = rng.choice(EFFECTS)
        elif where == "starts":
            parts["init"] = rng.choice(STARTS)
        elif where == "make":
            parts["make"] = rng.choice([*RAISED, "return 3", "return Model", "return nn.Identity()", "return Model().to('meta')"])
        else:
            parts[where] = rng.choice(RAISED)
    text = FILE.format(**parts)
    content = damaged(rng, text.encode()) if rng.random() < 0.1 else text.encode()
    (folder / "own.py").write_bytes(content)
    name = rng.choice(
        ["own.py:make"] * 12 + ["own.py:no", "own.py:", "own.py", "own.py:nn", "own.py:math", "own.py:__name__", "./own.py:make"]
    )
    size = ["--img-size", rng.choice(["32", "64", "48", "7"])] if rng.random() < 0.7 else []
    called = _command(rng, command, folder)
    return [*called, *([name] if command == "inspect" else ["--model", name, *size])]


def _weights(rng: random.Random, command: str, folder: Path) -> list[str]:
    """Write a file of weights for a small timm model: damaged, of another model, or no checkpoint at all."""
    sound = {f"blocks.{i}.norm1.weight": torch.rand(192) for i in range(3)} | {"head.weight": torch.rand(1000, 192)}
    kind = rng.randrange(6)
    if kind == 0:
        content = damaged(rng, safetensors.torch.save(sound))
    elif kind == 1:
        header = json.dumps(value(rng), default=str).encode()
        content = struct.pack("<Q", rng.choice([len(header), 2**63, 0, 10**6])) + header + bytes(rng.randrange(99))
    elif kind == 2:
        stream = io.BytesIO()
        torch.save(
            rng.choice([sound, {"state_dict": sound}, {"model": value(rng)}, [1, 2], {"a": {"b": 3}}, torch.zeros(3)]), stream
        )
        content = stream.getvalue() if rng.random() < 0.5 else damaged(rng, stream.getvalue())
    elif kind == 3:
        content = safetensors.torch.save({rng.choice(TEXTS[4:6]) + name: tensor for name, tensor in sound.items()})
    elif kind == 4:
        odd = {
            name: rng.choice([tensor.half(), tensor[:3], tensor * float("nan"), tensor.long(), tensor[..., None]])
            for name, tensor in sound.items()
        }
        content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in odd.items()})
    else:
        content = rng.choice([b"", b"\0", rng.randbytes(200), b"PK\3\4", b"<html>", (folder.name * 9).encode()])
    name = rng.choice(["w.safetensors", "w.pth", "w.bin", "w"])
    (folder / name).write_bytes(content)
    called = _command(rng, command, folder)
    return [*called, "--model", "vit_tiny_patch16_224", "--weights", name]
