"""Table of commands and the page of `visattn --help`. It is made without click, whose import takes longer than Python's own start."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """Command of the part of the package that it belongs to.

    Attributes:
        module: Module of the command; a command `x` is its function `x_command`.
        help: One line of help.
    """

    module: str
    help: str


COMMANDS = {
    "demo": Command("visattn.cli.demo_command", "Draw what DINOv2 and a classifier see in four sample photos."),
    "overlay": Command("visattn.cli.overlay_command", "Draw a model's attention over photos."),
    "heads": Command("visattn.cli.heads_command", "Draw all heads, all layers, or the query x key matrix of one head."),
    "view": Command("visattn.studies.view_command", "Write a page that shows every head for the patch under the pointer."),
    "batch": Command("visattn.batch.batch_command", "Draw maps of many images; a run that is interrupted goes on."),
    "video": Command("visattn.batch.video_command", "Draw maps over the frames of a film."),
    "embed": Command("visattn.embedding.embed_command", "Write a page that shows queries and keys of every head in one space."),
    "train": Command("visattn.training.train_command", "Train a classifier, with or without attention, or a captioner."),
    "caption": Command("visattn.captioning.caption_command", "Caption images, and draw where the decoder attends for each word."),
    "stats": Command("visattn.evaluation.stats_command", "Compute statistics of every head over a folder of photos."),
    "evaluate": Command("visattn.evaluation.evaluate_command", "Measure how well maps tell what a score depends on."),
    "causes": Command("visattn.evaluation.causes.causes_command", "Measure whether a method finds what a network decides by."),
    "inspect": Command("visattn.cli.inspect_command", "Show the attention layers of a model, and which methods apply to it."),
    "list": Command("visattn.cli.list_command", "List models, methods or color maps."),
    "doctor": Command("visattn.cli.doctor_command", "Check the installation."),
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
            *(f"  {name:{room}}  {command.help}" for name, command in COMMANDS.items()),
        ]
    )
