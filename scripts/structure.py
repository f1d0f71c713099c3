"""Structure of the package, from its imports: rooms, arrows between them, and checks.

A room is a file or folder at the top of the package. Part of `make lint`. Exits 1 if one of these is found: an import cycle, imports for
annotations included; an import from another room of a name that is not in the `__all__` of its module; an import inside a function without
a listed reason; an import of another module's private name; a module with the same name as a public function of its folder (importing the
module would replace the function); or choices of an option that are repeated outside their declaration. Long files and functions with many
arguments are only listed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "visattn"
MANY_ARGUMENTS, MANY_LINES = 9, 300  # more are listed
OPEN = f"{PACKAGE}._support", f"{PACKAGE}.errors"  # helpers that any room may take any public name from
LATE = {  # modules that may import inside functions, and the reason; so may every module of a command, `..._command`
    "visattn.cli": "a command imports what it runs, so that --help is quick",
    "visattn.core.command_line": "as commands do, which share it",
    "visattn.core.drawing.colormaps": "names are listed without OpenCV",
    "visattn.evaluation.survey_output": "matplotlib is an extra",
    "visattn.training.report": "matplotlib is an extra",
}


@dataclass(frozen=True)
class Import:
    """Import of one name by a module."""

    by: str
    of: str
    name: str
    line: int
    late: bool
    for_types: bool


def modules() -> dict[str, ast.Module]:
    """Parse every module of the package; return the trees by dotted name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(ROOT / PACKAGE).with_suffix("").parts)
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


def imports(name: str, tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[Import]:
    """Yield a module's imports from the package."""

    def visit(node: ast.AST, late: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            types = for_types or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == PACKAGE:
                home = str(child.module)
                for alias in child.names:
                    whole = f"{home}.{alias.name}"
                    of, taken = (whole, "") if whole in known else (home, alias.name)
                    yield Import(name, of, taken, child.lineno, late, types)
            elif isinstance(child, ast.Import):
                yield from (
                    Import(name, alias.name, "", child.lineno, late, types)
                    for alias in child.names
                    if alias.name.split(".")[0] == PACKAGE
                )
            elif isinstance(child, ast.Call) and ast.unparse(child.func) == "import_module" and child.args:
                target = child.args[0]
                if isinstance(target, ast.Constant) and str(target.value) in known:
                    yield Import(name, str(target.value), "", child.lineno, True, types)
            yield from visit(child, late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)), types)

    yield from visit(tree, late=False, for_types=False)


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return import cycles as groups of modules (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(arrows):
        if node not in index:
            visit(node)
    return found


def room(module: str) -> str:
    """Return the room of a module."""
    return ".".join(module.split(".")[:2])


def excused(module: str) -> bool:
    """Check whether a module may import inside functions."""
    return module.endswith("_command") or any(module == name or module.startswith(f"{name}.") for name in LATE)


def public(tree: ast.Module) -> set[str]:
    """Return the names in a module's `__all__`; of one made by `face`, what type checkers import there."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}
        if isinstance(node, ast.If) and any("face(" in ast.unparse(part) for part in node.orelse):
            return {alias.name for part in node.body if isinstance(part, ast.ImportFrom) for alias in part.names}
    return set()


def crossing(every: list[Import], known: dict[str, ast.Module]) -> list[str]:
    """Return the imports from another room of names that its modules do not state as public."""
    stated = {module: public(tree) for module, tree in known.items()}
    return [
        f"{one.by}, line {one.line}: takes {one.name} from {one.of}, whose __all__ does not have it"
        for one in every
        if one.name
        and one.by != PACKAGE
        and one.of != PACKAGE
        and room(one.by) != room(one.of)
        and not one.of.startswith(OPEN)
        and one.name not in stated[one.of]
    ]


def shadowing(known: dict[str, ast.Module]) -> list[str]:
    """Return modules that have the name of a public function of their folder."""
    functions = {
        f"{module}.{node.name}" for module, tree in known.items() for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    found = []
    for package, tree in known.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                public = {alias.asname or alias.name for alias in node.names if f"{node.module}.{alias.name}" in functions}
                found += [f"{package}.{name}" for name in sorted(public) if f"{package}.{name}" in known]
    return found


def crowded(module: str, tree: ast.Module) -> list[str]:
    """Return public functions with many arguments. Methods, networks, and functions that pass on options are exempt.

    A method takes a recording first and returns a map; its arguments are those of its paper. A network is a constructor in `models` or
    `nn`. Options are passed on by `**name: Unpack[...]`.
    """
    found = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                visit(node.body, f"{prefix}{node.name}.")
            if not isinstance(node, ast.FunctionDef) or (node.name.startswith("_") and node.name != "__init__"):
                continue
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            own = [name for name in given if name not in ("self", "cls")]
            network = node.name == "__init__" and room(module) in (f"{PACKAGE}.models", f"{PACKAGE}.nn")
            method = own[:1] == ["recording"] and node.returns is not None and ast.unparse(node.returns) == "AttentionMap"
            more = node.args.kwarg
            passes = more is not None and more.annotation is not None and ast.unparse(more.annotation).startswith("Unpack[")
            if len(own) > MANY_ARGUMENTS and not (network or method or passes):
                found.append(f"{module}, line {node.lineno}: {prefix}{node.name} takes {len(own)} arguments")

    visit(tree.body, "")
    return found


def spelled_again(known: dict[str, ast.Module]) -> list[str]:
    """Return choices that are repeated outside one `Literal`: in a second one, or as strings in calls that check or offer them."""
    declared: dict[frozenset[str], str] = {}
    found = []
    for module, tree in known.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal" and isinstance(node.slice, ast.Tuple):
                words = _words(node.slice)
                if words and words in declared:
                    found.append(f"{module}, line {node.lineno}: Literal of {sorted(words)} stands in {declared[words]} already")
                elif words:
                    declared[words] = module
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("one_of", "click.Choice", "setting"):
                given = [*node.args, *(word.value for word in node.keywords if word.arg == "choices")]
                if any(isinstance(one, (ast.Tuple, ast.List)) and len(_words(one)) > 1 for one in given):
                    found.append(f"{module}, line {node.lineno}: choices are written out; declare a Literal and use get_args")
    return found


def _words(node: ast.Tuple | ast.List) -> frozenset[str]:
    return frozenset(one.value for one in node.elts if isinstance(one, ast.Constant) and isinstance(one.value, str))


def main() -> int:
    """Print rooms, arrows, late imports and errors."""
    known = modules()
    every = [one for name, tree in known.items() for one in imports(name, tree, known)]
    rooms = sorted({room(name) for name in known} - {PACKAGE})
    arrows: dict[str, set[str]] = {name: set() for name in known}
    between = set()
    for one in every:
        if one.by != PACKAGE and one.of != one.by:
            arrows[one.by].add(one.of)
        if not one.for_types and PACKAGE not in (one.by, one.of) and room(one.by) != room(one.of):
            between.add((room(one.by), room(one.of)))
    late = [one for one in every if one.late and not one.for_types]
    faults = [f"circle: {' - '.join(group)}" for group in circles(arrows)]
    faults += [f"{one.by}, line {one.line}: imports {one.of} inside of a function" for one in late if not excused(one.by)]
    faults += [
        f"{one.by}, line {one.line}: takes {one.name}, which is private, from {one.of}"
        for one in every
        if one.name.startswith("_") and not one.name.startswith("__")
    ]
    faults += [f"{name}: bears the name of a function that is public in its folder" for name in shadowing(known)]
    faults += crossing(every, known)
    faults += spelled_again(known)
    print(f"{len(known)} modules in {len(rooms)} rooms, {len(between)} arrows between rooms")
    print(f"{len(late)} late imports: " + ", ".join(f"{sum(one.by.startswith(name) for one in late)} in {name}" for name in LATE))
    lengths = {name: max(node.end_lineno or 0 for node in tree.body) for name, tree in known.items() if tree.body}
    print(f"{sum(length > MANY_LINES for length in lengths.values())} files of more than {MANY_LINES} lines; ", end="")
    print("many arguments: " + ("; ".join(line for name, tree in known.items() for line in crowded(name, tree)) or "none"))
    print("\n".join(faults) or "no fault", file=sys.stderr if faults else sys.stdout)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
