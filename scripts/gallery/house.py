"""Drawing of the package: its parts, what each stands on, and their lines of code."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "visattn"
PARTS = ("nn", "models", "data", "training", "captioning", "batch", "evaluation", "studies", "embedding", "viewer")
CORE = (
    "images",
    "loading",
    "families",
    "pipeline",
    "capturing",
    "records",
    "operators",
    "methods",
    "maps",
    "drawing",
    "command_line",
)
WIDTH, EDGE, GAP, HIGH = 980, 12, 8, 52
_STYLE = (
    ".part { fill: #f6f8fa; stroke: #57606a; } .core { fill: #ddf4ff; stroke: #0969da; } .inside { fill: #ffffff; stroke: #0969da; } "
    "text { fill: #1f2328; text-anchor: middle; } .soft { fill: #57606a; font-size: 12px; } .side { text-anchor: start; }"
)


def house() -> str:
    """Return the drawing as SVG: a box stands on those below it, and imports no other box of its own row."""
    label = "The command stands on ten parts, which stand on the core alone; the core stands on its helpers"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 400" width="{WIDTH}" height="400" '
        f'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="14" role="img" aria-label="{label}">'
    )
    middle = (len(CORE) + 1) // 2
    rows = [
        *_row(("cli",), 12, "part"),
        *_row(PARTS, 12 + HIGH + 26, "part"),
        f'<rect class="core" x="{EDGE}" y="168" width="{WIDTH - 2 * EDGE}" height="160" rx="6"/>',
        f'<text class="side" x="{EDGE + 12}" y="190">core: one forward pass, one file, one model</text>',
        *_row(tuple(f"core/{name}" for name in CORE[:middle]), 200, "inside", EDGE + 10),
        *_row(tuple(f"core/{name}" for name in CORE[middle:]), 200 + HIGH + 8, "inside", EDGE + 10),
        *_row(("_support",), 336, "part"),
        _words(78, "commands are found by name"),
        _words(158, "a part takes public names of the core, and of another part only what its package lists"),
    ]
    return "\n".join([head, f"<style>{_STYLE}</style>", '<rect width="100%" height="100%" fill="#ffffff"/>', *rows, "</svg>", ""])


def _row(names: tuple[str, ...], top: int, kind: str, edge: int = EDGE) -> list[str]:
    """Return boxes of equal width, with name and lines."""
    width = (WIDTH - 2 * edge - GAP * (len(names) - 1)) / len(names)
    drawn = []
    for number, name in enumerate(names):
        left = edge + number * (width + GAP)
        center = left + width / 2
        drawn += [
            f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{HIGH}" rx="4"/>',
            f'<text x="{center:.1f}" y="{top + 22}">{name.removeprefix("core/")}</text>',
            f'<text class="soft" x="{center:.1f}" y="{top + 40}">{_lines(PACKAGE / name):,} lines</text>',
        ]
    return drawn


def _words(top: int, text: str) -> str:
    return f'<text class="soft" x="{WIDTH / 2:.0f}" y="{top}">{text}</text>'


def _lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))
