"""Formats of files that people take for checkpoints: told by their first bytes, with the reason why a file cannot be loaded."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from visattn._support.checks import printable

START = 512  # bytes that tell a format
_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"  # a number at the start of files that torch.save wrote before it wrote archives
_ZIP = b"PK\x03\x04"
_UNPACK = "unpack it, and pass the checkpoint in it"
_TENSORS = "save its tensors with safetensors.torch.save_file"
_STARTS = {
    b"\x89HDF\r\n\x1a\n": ("is an HDF5 file, as Keras writes them", "pass weights of PyTorch, or convert it"),
    b"GGUF": ("is a GGUF file, for llama.cpp", "pass the weights from which it was converted"),
    b"\x93NUMPY": ("is one array of NumPy", _TENSORS),
    b"\x1f\x8b": ("is compressed with gzip", _UNPACK),
    b"BZh": ("is compressed with bzip2", _UNPACK),
    b"\xfd7zXZ": ("is compressed with xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("is compressed with zstandard", _UNPACK),
    b"7z\xbc\xaf": ("is a 7-Zip archive", _UNPACK),
    b"Rar!": ("is a RAR archive", _UNPACK),
}


def is_safetensors(start: bytes) -> bool:
    """Check whether the first bytes of a file are those of safetensors: the length of a JSON header, and the header."""
    return start[5:9] == b"\0\0\0{"


def is_archive(start: bytes) -> bool:
    """Check whether the first bytes of a file are those of a zip archive, which torch.save writes."""
    return start.startswith(_ZIP)


def is_pickle(start: bytes) -> bool:
    """Check whether the first bytes of a file are those that torch.save writes, today or before it wrote archives."""
    return is_archive(start) or _MAGIC in start[:64]


def foreign(path: Path, start: bytes) -> str | None:
    """Return what a file is and what to do, if it is of a format that cannot be loaded; None if it may be a checkpoint.

    Args:
        path: The file.
        start: Its first bytes.
    """
    shown = printable(str(path))
    for magic, (what, fix) in _STARTS.items():
        if start.startswith(magic):
            return f"{what}, not a checkpoint of PyTorch; {fix}."
    if start[257:262] == b"ustar":
        return f"is a tar archive, not a checkpoint; {_UNPACK}."
    if start[4:8] == b"TFL3":
        return "is a TensorFlow Lite file, not a checkpoint of PyTorch; pass weights of PyTorch, or convert it."
    if is_archive(start):
        return _archive(path, shown)
    if start[:1] == b"\x80" and start[1:2] <= b"\x05" and len(start) > 16 and _MAGIC not in start[:64]:
        return (
            f"is a pickle (protocol {start[1]}) that torch.save did not write, and loading it could run code; "
            f"if you trust it, {_TENSORS}."
        )
    if path.suffix.lower() == ".onnx" or re.match(rb"\x08[\x01-\x20]\x12[\x01-\x40][\x20-\x7e]", start):
        return "looks like an ONNX graph, which holds no checkpoint; export the weights with state_dict() where it was made."
    return None


def _archive(path: Path, shown: str) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, LookupError, EOFError):
        return None  # damaged; reported when it is loaded
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner or "bytecode.pkl" in inner:
        return (
            "is a TorchScript archive (torch.jit.save), which holds code; if you trust it, save its tensors alone: import torch; "
            f"model = torch.jit.load({shown!r}, map_location='cpu'); torch.save(model.state_dict(), 'tensors.pth')."
        )
    if "archive_format" in inner:
        return (
            "is an archive of torch.export, which holds a program; save its tensors alone: import torch; "
            f"torch.save(torch.export.load({shown!r}).state_dict, 'tensors.pth')."
        )
    if "data.pkl" in inner:
        return None
    if any(name.endswith(".h5") for name in names):
        return "is a zip archive with HDF5 weights, as Keras writes them; pass weights of PyTorch, or convert it."
    if names and all(name.endswith(".npy") for name in names):
        return f"is an archive of NumPy arrays (npz), not a checkpoint of PyTorch; {_TENSORS}."
    listed = printable(", ".join(names[:3])[:100]) + (", ..." if len(names) > 3 else "")
    return f"is a zip archive that torch.save did not write (it holds {listed or 'nothing'}); {_UNPACK}."
