"""Check the project's English: spelling and words that readers stumble over. Part of `make lint`.

`python scripts/words.py [PATH ...]` prints each fault as `file:line: fault` and exits 1 if there is one. Long sentences and first words of
docstrings are only counted; `--remarks` prints them. Checked are all files that git tracks, or those given.

`--ease` prints the Flesch reading ease of README and docs instead.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LONGEST = 35  # words of a sentence in docs
HARD = {"what", "how", "whether", "where", "of", "as"}  # first words of no docstring
_ARTICLES_AND_SUCH = """
the a an all any and another are at both by each either every few for from if in is it its likewise many more most no none not nothing
on one only or other part same several some such that their there these they this those three to two when which who why with without
"""
NOT_VERBS = HARD | {*_ARTICLES_AND_SUCH.split()}  # first words of no function's docstring
BRITISH = re.compile(
    r"(?i)(?:colour|centre(?!d)|centred|grey|licence|behaviour|neighbour|favour|flavour|labell|modelled|modelling|catalogue|artefact"
    r"|judgement|whilst|learnt|honour|(?:normal|regular|local|initial|optim|summar|recogn|visual|organ|serial|minim|maxim|general|quant"
    r"|standard|util|emphas|penal|special|synchron|parallel|vector|discret|equal|categor|memor|character|custom|token|analy)is(?:e|ed|es"
    r"|er|ing|ation)s?\b)\w*\b(?!=)"  # another library may have such an argument
)
PLAIN = {  # what is written -> what to write instead
    r"speaks? (?:for|against)": "is evidence for, is evidence against",
    r"ways? back": "backward pass",
    r"slopes?": "gradient",
    r"in the place of": "instead of",
    r"goes? by": "relies on",
    r"goes? on with": "continues with",
    r"gone on from": "resumed",
    r"for the while": "temporarily",
    r"blind to": "does not depend on",
    r"by as much as": "in proportion to",
    r"of like": "similar",
    r"with all of them": "with these",
    r"wants? (?:its|their) pixels": "expects its input",
    r"laid out otherwise": "has another layout",
    r"as the random state is": "from the current random state",
    r"cannot be meant": "is invalid",
    r"whoever listens": "the listeners",
    r"have for oneself": "lock",
}
_ANY = re.compile(rf"(?i)\b(?:{'|'.join(PLAIN)})\b")
_PROSE = {".md", ".py", ".toml", ".json"}


class Text(NamedTuple):
    """A piece of prose, the line where it begins, and whether it is a paragraph or list item (not a heading or a table cell)."""

    line: int
    words: str
    running: bool = True


def tracked() -> list[Path]:
    """Return the text files of the project."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in names if Path(name).suffix in _PROSE]


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield every docstring with its owner and line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            yield node, text, node.body[0].lineno


def is_property(node: ast.AST) -> bool:
    """Check whether a function is a property, whose docstring is a noun phrase."""
    names = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
    return any("property" in name for name in names)


def first_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings that begin with the wrong kind of word."""
    for node, text, line in docstrings(tree):
        first = re.sub(r"[^a-z]", "", text.split()[0].lower())
        verb = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_property(node)
        if first in (NOT_VERBS if verb else HARD) or text.lower().startswith("the same"):
            yield line, f"docstring begins with '{text.split()[0]}'; begin with {'a verb' if verb else 'a noun'}"


def comments_and_strings(source: str, tree: ast.Module) -> Iterator[Text]:
    """Yield docstrings, messages and comments of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(node.lineno, node.value)
    for number, line in enumerate(source.split("\n"), 1):
        if (at := line.find("# ")) >= 0:
            yield Text(number, line[at:])


def paragraphs(markdown: str) -> Iterator[Text]:
    """Yield the prose of a Markdown page: paragraphs, list items and table cells, without code and link targets."""
    lines, inside, start, block = markdown.split("\n"), False, 1, list[str]()
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("```"):
            inside = not inside
            line = ""
        row = line.strip()
        begins = not row or re.match(r"([-*] |\d+\. |#|\||<)", row)
        if (inside or begins) and block:
            yield Text(start, _plain(" ".join(block)), not block[0].startswith("#"))
            block = []
        if inside or not row or row.startswith("<"):
            continue
        if row.startswith("|"):
            yield from (Text(number, _plain(cell), False) for cell in re.split(r"(?<!\\)\|", row) if cell.strip(" -:"))
            continue
        start = start if block else number
        block.append(re.sub(r"^([-*] |\d+\. )", "", row))


def _plain(markdown: str) -> str:
    """Return Markdown without markup; code becomes one word."""
    text = re.sub(r"`[^`]*`", "code", markdown)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,2}([^*_]+)[*_]{1,2}", r"\1", text).strip("# ")


def sentences(text: str) -> list[str]:
    """Split prose into sentences; quotes count as one word."""
    text = re.sub(r"\"[^\"]*\"", "Quote", text)
    return re.split(r"(?<=[.!?])\s+(?=[A-Z\d`(*])", text)


def long_sentences(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield sentences of more than `LONGEST` words."""
    for line, text, _ in paragraphs(markdown):
        for sentence in sentences(text):
            if (count := len(re.findall(r"[^\W_][\w'-]*", sentence))) > LONGEST:
                yield line, f"a sentence of {count} words; at most {LONGEST}: {sentence[:60]} ..."


def remarks(path: Path) -> Iterator[tuple[int, str]]:
    """Yield long sentences and first words of one file."""
    if path.suffix == ".py":
        yield from first_words(ast.parse(path.read_text()))
    elif path.suffix == ".md" and path.name != "CHANGELOG.md":
        yield from long_sentences(path.read_text())


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and fault of one file."""
    source = path.read_text()
    own = path == Path(__file__)  # which lists the words
    if not own and path.name != "other_words.py":  # which knows other spellings
        for number, line in enumerate(source.split("\n"), 1):
            if found := BRITISH.search(line):
                yield number, f"'{found[0]}' is not American spelling"
    if path.suffix == ".py":
        tree = ast.parse(source)
        texts = [] if own else list(comments_and_strings(source, tree))
    elif path.suffix == ".md":
        texts = list(paragraphs(source))
    else:
        texts = []
    for begins, text, _ in texts:
        for found in _ANY.finditer(text):
            better = next(better for pattern, better in PLAIN.items() if re.fullmatch(f"(?i){pattern}", found[0]))
            yield begins, f"'{found[0]}' reads badly; write '{better}'"


def ease(pages: list[Path]) -> None:
    """Print the Flesch reading ease of each page and of all words together."""
    import textstat

    every = []
    for page in pages:
        prose = " ".join(
            text if text[-1:] in ".!?" else f"{text}." for _, text, running in paragraphs(page.read_text()) if running
        )
        every.append(prose)
        print(f"{textstat.flesch_reading_ease(prose):6.1f}  {page.relative_to(ROOT)}")
    print(f"{textstat.flesch_reading_ease(' '.join(every)):6.1f}  all")


def main() -> int:
    """Run the checks; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--remarks", action="store_true", help="print long sentences and first words of docstrings too")
    parser.add_argument("--ease", action="store_true", help="print the Flesch reading ease of README and docs")
    options = parser.parse_args()
    if options.ease:
        ease([ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
        return 0
    every = [file for path in options.paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])] or tracked()
    found, remarked = (
        [f"{path.resolve().relative_to(ROOT)}:{line}: {text}" for path in every for line, text in check(path.resolve())]
        for check in (faults, remarks)
    )
    print("\n".join(found + remarked * options.remarks) or f"words: no fault, {len(remarked)} remarks")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
