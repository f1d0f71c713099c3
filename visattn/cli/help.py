"""Table of commands and the page of `visattn --help`. It is made without click, whose import takes longer than Python's own start."""

from __future__ import annotations

# name -> one line of help; a command `x` is the function `x_command` of visattn.cli.x
COMMANDS = {
    "demo": "Draw what DINOv2 and a classifier see in four sample photos.",
    "overlay": "Draw a model's attention over photos.",
    "heads": "Draw all heads, all layers, or the query x key matrix of one head.",
    "view": "Write a page that shows every head for the patch under the pointer.",
    "batch": "Draw maps of many images; a run that is interrupted goes on.",
    "video": "Draw maps over the frames of a film.",
    "embed": "Write a page that shows queries and keys of every head in one space.",
    "train": "Train a classifier, with or without attention, or a captioner.",
    "caption": "Caption images, and draw where the decoder attends for each word.",
    "stats": "Compute statistics of every head over a folder of photos.",
    "inspect": "Show the attention layers of a model, and which methods apply to it.",
    "list": "List models, methods or color maps.",
    "doctor": "Check the installation.",
}
ABOUT = "Show where a vision model looks, and check whether you can believe it."
VERSION = "Print the version and exit."


def page() -> str:
    """Return the page."""
    room = max(map(len, COMMANDS))
    return "\n".join(
        [
            "Usage: visattn [OPTIONS] COMMAND [ARGS]...",
            "",
            f"  {ABOUT}",
            "",
            "Options:",
            f"  --version   {VERSION}",
            "  -h, --help  Show this message and exit.",
            "",
            "Commands:",
            *(f"  {name:{room}}  {text}" for name, text in COMMANDS.items()),
        ]
    )
