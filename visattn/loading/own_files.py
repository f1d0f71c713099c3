"""Models built by a function in the user's Python file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from torch import nn

from visattn._support.checks import first_line, printable, suggest
from visattn._support.files import is_file
from visattn.errors import UnsupportedModel
from visattn.loading.translation import fill, shapes_of
from visattn.loading.weights import digest, read_tensors
from visattn.provenance import Provenance


def load(name: str, weights: Path | None = None) -> tuple[nn.Module, Provenance]:
    """Build a model with `file.py:factory`, where `factory` is a function without arguments.

    Args:
        name: File and function.
        weights: Checkpoint to load into the model; it must hold every tensor. None: the file loads its own weights.

    Returns:
        The model in evaluation mode, and its provenance.

    Raises:
        UnsupportedModel: If the file fails to run, or the function is missing or does not return a module.
        WeightsError: If the weights are damaged, or belong to another model.
    """
    file, _, function = name.rpartition(":")
    model = built(name)
    with _running(
        Path(file).parent, f"{printable(name)}: model.eval()", "call it yourself to debug it; no module may contain itself"
    ):
        model.eval()
    title = f"{Path(file).name}:{function}"
    if weights is None:
        return model, Provenance(model=title, weights="given by the file")
    tensors, notes = read_tensors(weights, shapes_of(model))
    notes += fill(model, tensors, printable(str(weights)))
    return model, Provenance(model=title, weights=printable(weights.name), weights_sha256=digest(weights), notes=notes)


def built(name: str, **arguments: Any) -> nn.Module:  # noqa: ANN401
    """Build a model with `file.py:factory` and these arguments.

    Raises:
        UnsupportedModel: If the file fails to run, or the function is missing or does not return a module.
    """
    file, _, factory = name.rpartition(":")
    path, shown = Path(file), printable(name)
    if not is_file(path):
        raise UnsupportedModel(f"{shown}: no such file; pass path/to/file.py:factory.")
    spec = importlib.util.spec_from_file_location(f"visattn file {path.stem}", path)
    assert spec is not None  # noqa: S101 - it ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look the module up there
    with _running(path.parent, f"{shown}: the file", "run it yourself to debug it"):
        spec.loader.exec_module(module)
    make = getattr(module, factory, None)
    if not callable(make):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = ", ".join(suggest(factory, known) or known[:5]) or "none"
        raise UnsupportedModel(f"{shown}: the file has no function '{printable(factory)}'; it has: {near}.")
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    with _running(path.parent, f"{shown}: {factory}()", f"it is called {f'with {given}' if given else 'without arguments'}"):
        model = make(**arguments)
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"{shown}: {factory}() returns a {type(model).__name__}; return a torch.nn.Module.")
    return model


@contextmanager
def _running(folder: Path, what: str, fix: str) -> Iterator[None]:
    """Run the user's code and turn its errors into `UnsupportedModel`.

    Modules beside the file can be imported; no bytecode is written. Output goes to stderr, since stdout holds results. Only Ctrl-C is
    passed on.

    Yields:
        Nothing.

    Raises:
        UnsupportedModel: If the code fails or exits.
        KeyboardInterrupt: If the user presses Ctrl-C.
    """
    beside = str(folder.resolve())
    sys.path.insert(0, beside)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # leave no __pycache__ in the user's folder
    try:
        with redirect_stdout(sys.stderr), chdir("."):  # restore the working directory, which relative output paths depend on
            yield
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise UnsupportedModel(f'{what} exits the program; put the code that runs it under if __name__ == "__main__".') from error
    except BaseException as error:
        failed = UnsupportedModel(f"{what} fails: {type(error).__name__}: {first_line(error)}; {fix}.")
        # contextlib would unwrap an error caused by StopIteration and raise that StopIteration
        raise failed from (None if isinstance(error, StopIteration) else error)
    finally:
        sys.dont_write_bytecode = writes
        if beside in sys.path:
            sys.path.remove(beside)
