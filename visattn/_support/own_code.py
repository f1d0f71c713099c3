"""Functions in the user's Python files: `file.py:factory`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from visattn._support.checks import first_line, printable, suggest
from visattn._support.files import exists, is_file
from visattn.errors import VisattnError


def is_function(name: str) -> bool:
    """Check whether a name has the form `file.py:factory`. What exists as a file is a file, whatever its name looks like."""
    file, _, factory = name.rpartition(":")
    return file.endswith(".py") and factory.isidentifier() and not exists(Path(name))


def made(name: str, kind: type[VisattnError], **arguments: Any) -> Any:  # noqa: ANN401
    """Run the file of `file.py:factory`, and return what the function returns for these arguments.

    Args:
        name: File and function.
        kind: Class of the error if the file fails to run, or the function is missing or fails.
        **arguments: Keyword arguments for the function.
    """
    make, factory = function_of(name, kind), name.rpartition(":")[2]
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    fix = f"it is called {f'with {given}' if given else 'without arguments'}"
    with running(Path(name.rpartition(":")[0]).parent, f"{printable(name)}: {factory}()", fix, kind):
        return make(**arguments)


def function_of(name: str, kind: type[VisattnError]) -> Callable[..., Any]:
    """Run the file of `file.py:function`, and return the function.

    Args:
        name: File and function.
        kind: Class of the error if the file fails to run, or the function is missing.
    """
    file, _, function = name.rpartition(":")
    path, shown = Path(file), printable(name)
    if not is_file(path):
        raise kind(f"{shown}: no such file; pass path/to/file.py:{printable(function)}.")
    spec = importlib.util.spec_from_file_location(f"visattn file {path.stem}", path)
    assert spec is not None  # noqa: S101 - it ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look the module up there
    with running(path.parent, f"{shown}: the file", "run it yourself to debug it", kind):
        spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = suggest(function, known)
        told = f"did you mean {' or '.join(near)}?" if near else f"it has: {', '.join(known[:5]) or 'none'}."
        raise kind(f"{shown}: the file has no function '{printable(function)}'; {told}")
    chosen: Callable[..., Any] = found
    return chosen


def files_of(file: Path) -> list[Path]:
    """Return what a user's file may depend on: Python files beside it, and modules that were imported from below its folder."""
    folder = file.resolve().parent
    paths = {Path(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]}
    below = {
        path.resolve() for path in paths if path.is_absolute() and path.suffix == ".py" and "site-packages" not in path.parts
    }
    return sorted({*folder.glob("*.py"), *(path for path in below if path.is_relative_to(folder))})


@contextmanager
def running(folder: Path, what: str, fix: str, kind: type[VisattnError]) -> Iterator[None]:
    """Run the user's code and turn its errors into errors of `kind`.

    Modules beside the file can be imported; no bytecode is written. Output goes to stderr, since stdout holds results. Only Ctrl-C is
    passed on.

    Yields:
        Nothing.

    Raises:
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
        raise kind(f'{what} exits the program; put the code that runs it under if __name__ == "__main__".') from error
    except BaseException as error:
        failed = kind(f"{what} fails: {type(error).__name__}: {first_line(error)}; {fix}.")
        # contextlib would unwrap an error caused by StopIteration and raise that StopIteration
        raise failed from (None if isinstance(error, StopIteration) else error)
    finally:
        sys.dont_write_bytecode = writes
        if beside in sys.path:
            sys.path.remove(beside)
