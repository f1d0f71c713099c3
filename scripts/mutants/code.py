"""Statements of a source file, and the parts of it that no mutant changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Position = tuple[int, int]  # line from 1, column from 0
_Headed = ast.stmt | ast.ExceptHandler | ast.match_case


class Code:
    """A source file: what may be mutated in it, and which lines run together."""

    def __init__(self, text: str) -> None:
        """Parse the text."""
        self._lines = text.split("\n")
        self._tree = ast.parse(text)
        self._spared = [self._span(node) for node in _spared(self._tree)] + [*self._stars()]

    def may_change(self, start: Position, end: Position) -> bool:
        """Return whether a place is no annotation, `__all__`, text of an error or warning, code for type checkers or `*` of a signature."""
        return not any(first <= start and end <= last for first, last in self._spared)

    def statement(self, line: int) -> range:
        """Return the lines of the innermost statement around a line; of a compound one, such as `if`, those of its head."""
        heads = [head for node in ast.walk(self._tree) if line in (head := _head(node))]
        return min(heads, key=len, default=range(line, line + 1))

    def is_imported(self, line: int) -> bool:
        """Return whether a line runs when the module is imported: in the body of no function, decorators and defaults included."""
        return not any(
            node.body[0].lineno <= line <= (node.end_lineno or 0)
            for node in ast.walk(self._tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        )

    def function(self, line: int) -> range:
        """Return the lines in the body of the innermost function around a line or whose head the line is in; else none."""
        inside = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _first(node) <= line <= (node.end_lineno or 0)
        ]
        if not inside:
            return range(0)
        node = min(inside, key=lambda node: (node.end_lineno or 0) - node.lineno)
        return range(node.body[0].lineno, (node.end_lineno or 0) + 1)

    def _span(self, node: ast.AST) -> tuple[Position, Position]:
        """Return where a node begins, decorators included, and ends; in characters, as `ast` counts bytes."""
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        before, until = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        start = (_first(node), 0) if getattr(node, "decorator_list", ()) else (first, self._column(first, before))
        return start, (last, self._column(last, until))

    def _stars(self) -> Iterator[tuple[Position, Position]]:
        """Yield the place of the `*` before the parameters that are given by name alone; with `/`, other calls fail, and none differs."""
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.args.kwonlyargs and not node.args.vararg:
                before = [*node.args.posonlyargs, *node.args.args, *node.args.defaults]
                start = max((self._span(part)[1] for part in before), default=(node.lineno, 0))
                yield start, self._span(node.args.kwonlyargs[0])[0]

    def _column(self, line: int, offset: int) -> int:
        return len(self._lines[line - 1].encode()[:offset].decode())


def _first(node: ast.AST) -> int:
    """Return the first line of a statement, decorators included."""
    lines: list[int] = [node.lineno]  # type: ignore[attr-defined]
    lines += [part.lineno for part in getattr(node, "decorator_list", ())]
    return min(lines)


def _head(node: ast.AST) -> range:
    if isinstance(node, ast.match_case):
        return range(node.pattern.lineno, node.body[0].lineno)
    if not isinstance(node, (ast.stmt, ast.ExceptHandler)):
        return range(0)
    body = getattr(node, "body", None)
    last = max(node.lineno, _first(body[0]) - 1) if body else node.end_lineno or node.lineno
    return range(_first(node), last + 1)


def _spared(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes in which nothing is mutated."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.returns is not None:
                    yield node.returns
                if any(ast.unparse(part).endswith("overload") for part in node.decorator_list):
                    yield node
            case ast.Assign() if any(ast.unparse(target) == "__all__" for target in node.targets):
                yield node
            case ast.If() if ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield node
            case ast.Raise(exc=ast.Call() as call):
                yield from _arguments(call)
            case ast.Call() if ast.unparse(node.func).endswith("warn"):
                yield from _arguments(node)


def _arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    for keyword in call.keywords:
        yield keyword.value
