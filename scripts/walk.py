"""Call trace of a photo, an attention call and a training batch through the package: which files call which.

`walk.py [CHECKOUT] [--returns] [--only WAY]` can trace another checkout, for comparison; of this one, it exits 1 if a way is
longer than its budget. A *move* is a pair of rooms, or of files, of which
one calls the other. A *return* is a move that also occurs in the other direction, so that a reader has to go back and forth.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

HERE = Path(__file__).parents[1]
PHOTO = HERE / "visattn" / "core" / "shipped" / "photos" / "astronaut.png"


class Budget(NamedTuple):
    """Largest counts of a way, which no change may exceed."""

    functions: int
    files: int
    deepest: int


BUDGETS = {
    "a photo through overlay": Budget(1066, 132, 41),
    "an attention call, first forward": Budget(650, 73, 23),
    "an attention call, third forward": Budget(217, 43, 14),
    "a training batch": Budget(351, 50, 19),
}


class Walk:
    """Recorder of calls between the files of a package."""

    def __init__(self, root: Path, *, shows: bool = False) -> None:
        """Record calls in files below `root`; `shows` prints the names of returns."""
        self._root, self._shows = str(root) + os.sep, shows
        self.functions: set[tuple[str, int]] = set()
        self.calls: set[tuple[str, str]] = set()
        self.deepest = 0

    @contextmanager
    def walked(self) -> Iterator[None]:
        """Record every call inside a `with` block."""
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _arg: Any) -> None:  # noqa: ANN401
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(self._root):
            return
        self.functions.add((name, frame.f_code.co_firstlineno))
        depth, caller, back = 1, None, frame.f_back
        while back is not None:
            if back.f_code.co_filename.startswith(self._root):
                caller = caller or back.f_code.co_filename
                depth += 1
            back = back.f_back
        self.deepest = max(self.deepest, depth)
        if caller is not None and caller != name:
            self.calls.add((self._file(caller), self._file(name)))

    def _file(self, name: str) -> str:
        return name.removeprefix(self._root).removesuffix(".py").replace(os.sep, ".")

    @property
    def counts(self) -> Budget:
        """Counts to compare with a budget."""
        return Budget(len(self.functions), len({name for name, _ in self.functions}), self.deepest)

    def told(self, way: str) -> str:
        """Format the counts as one line."""
        rooms = {(a.split(".")[0], b.split(".")[0]) for a, b in self.calls}
        rooms = {(a, b) for a, b in rooms if a != b}
        parts = [f"{len(self.functions)} functions in {len({name for name, _ in self.functions})} files"]
        parts.append(f"deepest chain {self.deepest}")
        back = []
        for what, moves in (("rooms", rooms), ("files", self.calls)):
            returns = sorted({tuple(sorted(move)) for move in moves if move[::-1] in moves})
            parts.append(f"{len(moves)} moves between {what}, {len(returns)} returns")
            back += [f"\n    {a} <-> {b}" for a, b in returns] if self._shows else []
        return f"{way}: " + "; ".join(parts) + "".join(back)


def photo(main: Callable[[list[str]], None], folder: Path) -> Callable[[], None]:
    """Return a function that draws rollout over a photo."""
    arguments = [
        "overlay",
        str(PHOTO),
        "--model",
        "vit_tiny_patch16_224",
        "--weights",
        "none",
        "--method",
        "rollout",
        "--overwrite",
    ]
    return lambda: quiet(main, [*arguments, "-o", str(folder / "out.png")])


def batch(main: Callable[[list[str]], None], folder: Path) -> Callable[[], None]:
    """Return a function that trains a small network on one batch of scenes."""
    arguments = ["train", "classify", "--data", "scenes", "--model", "visattn_resnet20", "--epochs", "0.01", "--batch-size", "4"]
    return lambda: quiet(main, [*arguments, "--overwrite", "-q", "-o", str(folder / "run")])


def quiet(main: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run a command without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main(arguments)


def main() -> int:
    """Print one line per trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=HERE)
    parser.add_argument("--returns", action="store_true", help="print the names of the returns")
    parser.add_argument("--only", choices=BUDGETS, action="append", help="trace this way alone; may be repeated")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    sys.path.insert(0, str(checkout))
    import timm
    import torch

    import visattn
    from visattn.cli import main as command

    package = Path(visattn.__file__).parent
    assert package.is_relative_to(checkout), package  # noqa: S101
    model, pixels = timm.create_model("vit_tiny_patch16_224").eval(), torch.rand(1, 3, 224, 224)

    def attention() -> None:
        with torch.no_grad(), visattn.capture(model, features="none"):
            model(pixels)

    longer: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for way, walk_it in {
            "a photo through overlay": photo(command, Path(folder)),
            "an attention call, first forward": attention,
            "an attention call, third forward": attention,
            "a training batch": batch(command, Path(folder)),
        }.items():
            if options.only and way not in options.only:
                continue
            if "first" not in way:
                walk_it()  # warm-up: imports and caches
            walk = Walk(package, shows=options.returns)
            with walk.walked():
                walk_it()
            print(walk.told(way), flush=True)
            if checkout == HERE and any(count > most for count, most in zip(walk.counts, BUDGETS[way], strict=True)):
                print(f"    longer than its budget: {BUDGETS[way]}", flush=True)
                longer.append(way)
    return int(bool(longer))


if __name__ == "__main__":
    sys.exit(main())
