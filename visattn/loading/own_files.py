"""Models that a function of a Python file makes."""

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
from visattn.provenance import Provenance


def load(name: str) -> tuple[nn.Module, Provenance]:
    """Build a model by `file.py:factory`, a function of that file that takes no arguments.

    Returns:
        The model in evaluation mode, and its name.

    Raises:
        UnsupportedModel: If the file cannot be run, or the factory is missing or gives no module.
    """
    file, _, function = name.rpartition(":")
    model = built(name)
    with _running(Path(file).parent, f"{printable(name)}: model.eval()", "call it by itself; no module may hold itself"):
        model.eval()
    return model, Provenance(model=f"{Path(file).name}:{function}", weights="given by the file")


def built(name: str, **arguments: Any) -> nn.Module:  # noqa: ANN401
    """What the function of a file makes of these arguments.

    Raises:
        UnsupportedModel: If the file cannot be run, or the factory is missing or gives no module.
    """
    file, _, factory = name.rpartition(":")
    path, shown = Path(file), printable(name)
    if not is_file(path):
        raise UnsupportedModel(f"{shown}: no such file; pass path/to/file.py:factory.")
    spec = importlib.util.spec_from_file_location(f"visattn file {path.stem}", path)
    assert spec is not None  # noqa: S101 - it ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    with _running(path.parent, f"{shown}: the file", "run it by itself"):
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
        raise UnsupportedModel(f"{shown}: {factory}() gives a {type(model).__name__}; return a torch.nn.Module.")
    return model


@contextmanager
def _running(folder: Path, what: str, fix: str) -> Iterator[None]:
    """Run somebody's code: modules beside it can be imported, what it prints is no result, and only Ctrl-C ends more than itself."""
    beside = str(folder.resolve())
    sys.path.insert(0, beside)
    try:
        with redirect_stdout(sys.stderr), chdir("."):  # outputs are named from the folder that is the current one now
            yield
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise UnsupportedModel(f'{what} ends the program; put what it runs under if __name__ == "__main__".') from error
    except BaseException as error:
        failed = UnsupportedModel(f"{what} fails: {type(error).__name__}: {first_line(error)}; {fix}.")
        # contextlib takes a RuntimeError from a StopIteration for one that Python made of it, and raises the StopIteration
        raise failed from (None if isinstance(error, StopIteration) else error)
    finally:
        if beside in sys.path:
            sys.path.remove(beside)
