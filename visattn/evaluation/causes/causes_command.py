"""Command `visattn causes`: whether a method finds what a network decides by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from visattn._support.checks import printable
from visattn._support.files import base_name
from visattn._support.own_code import files_of, function_of, is_function, running
from visattn._support.tables import to_csv, to_json, to_text
from visattn._support.whole_files import write_whole
from visattn.core.command_line.late import Command
from visattn.core.command_line.run_folders import prepared_folder
from visattn.core.command_line.shared_options import talk_options
from visattn.core.command_line.talk import note
from visattn.errors import MapError, OptionError

if TYPE_CHECKING:
    from visattn.evaluation.causes.bench import Function, Method

_JOURNAL = "causes.jsonl"
_SHOWN = "map", "cause", "kind", "networks", "worst auroc", "least touches", "verdict"


@click.command("causes", cls=Command)
@click.option(
    "--method", "methods", multiple=True, help="A method, or your function as file.py:function (model, pixels, class); repeat it."
)
@click.option("--maps", multiple=True, type=click.Path(path_type=Path), help="Folder of maps, as --export lists them; repeat it.")
@click.option("--only", default="", help="Networks, causes or kinds, separated by commas: mark_cnn_0, mark, vit. By default all.")
@click.option("--scenes", type=click.IntRange(2), default=60, show_default=True, help="Scenes of each network.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=2, show_default=True, help="Seed of the scenes.")
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    help="Write the scenes, and the list of maps to draw, to a new folder; measure nothing.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("causes"), show_default=True, help="Folder to write to."
)
@click.option("--overwrite", is_flag=True, help="Forget the results of an earlier run.")
@talk_options
def causes_command(
    methods: tuple[str, ...],
    maps: tuple[Path, ...],
    only: str,
    scenes: int,
    seed: int,
    export: Path | None,
    output: Path,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> int:
    """Measure whether methods find what a network decides by, on shipped networks whose one cause is known.

    A run that was interrupted goes on where it stopped.

    \b
    visattn causes --method gradcam --only mark
    visattn causes --method my_method.py:saliency -o mine
    """  # noqa: D301 - \b keeps click from wrapping the examples
    from visattn.evaluation.causes.bench import chosen_of, find_causes
    from visattn.evaluation.causes.causes_page import causes_page
    from visattn.evaluation.causes.exporting import export_scenes
    from visattn.evaluation.causes.networks import cause_networks

    names = [name.strip() for name in only.split(",") if name.strip()] or None
    if export is not None:
        path = export_scenes(export, chosen_of(cause_networks(), names), scenes, seed)
        click.echo(to_json({"output": [printable(str(path))]}) if as_json else printable(str(path)))
        return 0
    asked = _asked(methods, maps)
    journal = prepared_folder(output, _JOURNAL)
    causes = find_causes(asked, networks=names, scenes=scenes, seed=seed, journal=journal, anew=overwrite, quiet=quiet)
    rows, verdicts = causes.rows(), causes.verdicts()
    left_out = [f"{one.map} is left out on {one.network}: {one.left_out}" for one in causes.findings if one.left_out]
    whole: dict[str, Any] = {"scenes": scenes, "seed": seed, "verdicts": verdicts, "networks": rows, "left_out": left_out}
    written = [
        write_whole(output / "causes.csv", to_csv(rows).encode()),
        write_whole(output / "causes.json", to_json(whole).encode()),
        write_whole(output / "causes.html", causes_page(causes, scenes, seed).encode()),
    ]
    paths = [printable(str(path)) for path in written]
    shown = [{name: row[name] for name in _SHOWN} for row in verdicts]
    click.echo(to_json({"output": paths, **whole}) if as_json else to_text(shown))
    note(quiet, *left_out, *(f"wrote {path}" for path in paths))
    return int(not rows)


def _asked(methods: tuple[str, ...], maps: tuple[Path, ...]) -> dict[str, Method]:
    """Return methods by name: functions by theirs, and folders by theirs.

    Raises:
        OptionError: If there is none, or if two have one name.
    """
    asked: list[tuple[str, Method]] = []
    asked += [
        (base_name(name) if is_function(name) else name, _function(name) if is_function(name) else name) for name in methods
    ]
    asked += [(printable(base_name(str(folder))), folder) for folder in maps]
    if not asked:
        raise OptionError("no method. Pass --method or --maps.")
    if len({name for name, _ in asked}) < len(asked):
        raise OptionError(f"two methods have one name: {', '.join(name for name, _ in asked)}. Rename a file or folder.")
    return dict(asked)


def _function(name: str) -> Function:
    """Return the user's function, whose errors are told in one line.

    Raises:
        OptionError: If the file fails to run, or has no such function.
    """
    function, file = function_of(name, OptionError), Path(name.rpartition(":")[0])

    def guarded(*given: Any) -> Any:  # noqa: ANN401 - a map
        with running(
            file.parent, printable(name), "it is called with the network, one input (1, 3, 64, 64) and the class", MapError
        ):
            return function(*given)

    guarded.source = "".join(path.read_text(errors="replace") for path in files_of(file))  # type: ignore[attr-defined]
    return guarded
