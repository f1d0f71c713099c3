"""Command `visattn train`: training of a classifier or a captioner, in a run folder that records how it was made."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from visattn._support.checks import printable
from visattn.core.command_line.faults import complain
from visattn.core.command_line.late import LateCommand
from visattn.core.command_line.shared_options import talk_options


@click.group("train")
def train_command() -> None:
    """Train a classifier, with or without attention, or a captioner."""


def _settings(kind: str) -> list[click.Option]:
    """Create an option for every setting of a training run."""
    from visattn import training

    return [_option(setting) for setting in fields(getattr(training, kind))]


def _option(setting: Field[Any]) -> click.Option:
    default = setting.default if setting.default is not MISSING else None
    flag = f"--{setting.name.replace('_', '-')}"
    usual = " ".join(map(str, default)) if isinstance(default, tuple) else default
    text = f"{setting.metadata['help']}  [default: {usual}]" if default not in (None, "", ()) else setting.metadata["help"]
    if isinstance(default, bool):
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=text)
    kind: Any = setting.metadata["each"]
    if isinstance(default, tuple) and default:
        return click.Option([flag], type=kind, nargs=len(default), default=None, help=text)
    if isinstance(default, tuple) or setting.name == "model_kwargs":
        metavar = "KEY=VALUE" if default is None else "N" if kind is int else "NAME"
        return click.Option([flag], type=str if default is None else kind, multiple=True, metavar=metavar, help=text)
    choices = setting.metadata["choices"]
    return click.Option([flag], type=click.Choice(choices) if choices else type(default), default=None, help=text)


def _run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every training run that are not settings of its recipe."""
    for option in reversed(
        (
            click.option(
                "--config",
                type=click.Path(path_type=Path),
                help="Read settings from this TOML file; command-line options override them.",
            ),
            click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the run."),
            click.option("--force", is_flag=True, help="Resume a run even if its settings or data have changed."),
            click.option("--overwrite", is_flag=True, help="Delete an earlier run in this folder first."),
            click.option("--dry-run", is_flag=True, help="Print all settings as TOML and exit."),
        )
    ):
        command = option(command)
    return command


@train_command.command("classify", cls=LateCommand, late=partial(_settings, "Config"))
@_run_options
@click.option(
    "--compare",
    help="Train and compare variants: comma-separated attention modules, alone or with their start (se-identity); gain-0.5 for a network "
    "without attention whose residual branches start at this weight; wide_baseline for a wider one.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of runs per variant of --compare, each with its own seed.",
)
@talk_options
def classify_command(
    config: Path | None,
    output: Path,
    compare: str | None,
    seeds: int,
    **options: Any,  # noqa: ANN401 - settings, options of the run and of messages
) -> int:
    """Train a classifier: any CNN or ViT from timm, torchvision or your own file, with the attention modules that you choose.

    If a run was interrupted, the same command resumes it and gives the same result.

    \b
    visattn train classify --data fashion-mnist --attention cbam -o runs/cbam
    visattn train classify --data photos --model resnet18 --weights auto --attention se -o runs/se
    visattn train classify --data fashion-mnist --compare se,cbam,wide_baseline --seeds 5 -o runs/comparison
    torchrun --nproc-per-node 2 -m visattn train classify --data photos -o runs/two
    """  # noqa: D301 - \b keeps click from wrapping the examples
    from visattn._support.tables import to_json
    from visattn.training.config import Config

    recipe = _recipe(Config, config, options)
    if options["dry_run"]:
        click.echo(recipe.toml(), nl=False)
        return 0
    _check_together(compare, seeds, recipe.attention, beginning=options["force"] or options["overwrite"])
    if compare is not None:
        from visattn.training.report.compared_runs import compare_runs

        names = [name.strip() for name in compare.split(",") if name.strip()]
        table = compare_runs(recipe, output, names, seeds, quiet=options["quiet"])
        click.echo(to_json(table) if options["as_json"] else (output / "comparison.md").read_text())
        return 0
    return _trained(recipe, output, options)


@train_command.command("caption", cls=LateCommand, late=partial(_settings, "CaptionConfig"))
@_run_options
@talk_options
def caption_command(
    config: Path | None,
    output: Path,
    **options: Any,  # noqa: ANN401 - settings, options of the run and of messages
) -> int:
    """Train an image captioner with soft or hard attention (Show, Attend and Tell).

    If a run was interrupted, the same command resumes it and gives the same result. Use visattn caption to caption images with it.

    \b
    visattn train caption --data scenes --attention soft -o runs/soft
    visattn train caption --data dataset_flickr8k.json --root Flicker8k_Dataset --model resnet50 --weights auto --freeze -o runs/flickr
    torchrun --nproc-per-node 2 -m visattn train caption --data coco --root coco -o runs/two
    """  # noqa: D301 - \b keeps click from wrapping the examples
    from visattn.training.tasks.caption_config import CaptionConfig

    recipe = _recipe(CaptionConfig, config, options)
    if options["dry_run"]:
        click.echo(recipe.toml(), nl=False)
        return 0
    return _trained(recipe, output, options)


def _recipe(kind: type[Any], config: Path | None, options: dict[str, Any]) -> Any:  # noqa: ANN401 - an instance of `kind`
    """Build the recipe from a config file and command-line options; options override the file."""
    from visattn.training.config import checked, read_config

    given = read_config(config, kind) if config else {}
    own = checked(_given({setting.name: options[setting.name] for setting in fields(kind)}), "options", kind)
    _check_no_code(config, {name: value for name, value in given.items() if name not in own})
    return kind(**given | own)


def _check_no_code(config: Path | None, given: dict[str, Any]) -> None:
    """Check that a file, which may come from somebody else, names no code to run.

    Raises:
        OptionError: If it does.
    """
    from visattn._support.own_code import is_function
    from visattn.errors import OptionError

    for name, value in given.items():
        if isinstance(value, str) and is_function(value):
            raise OptionError(
                f"{printable(str(config))}: {name} names Python code, which a configuration does not run. If you trust it, pass "
                f"--{name.replace('_', '-')} {printable(value)} too."
            )


def _trained(recipe: Any, output: Path, options: dict[str, Any]) -> int:  # noqa: ANN401
    """Train, and print the result."""
    from visattn._support.tables import to_json
    from visattn.errors import OptionError
    from visattn.training.loop import train

    force, overwrite = options["force"], options["overwrite"]
    if force and overwrite:
        raise OptionError("--overwrite starts a new run and --force resumes one, so they cannot be combined. Leave one out.")
    result = train(recipe, output, force=force, overwrite=overwrite, quiet=options["quiet"])
    for message in result.bad:
        complain(message)
    if result.stopped:
        click.echo(
            f"visattn: stopped at step {result.steps}; run the same command{' without --overwrite' * overwrite} to resume",
            err=True,
        )
        return 128 + result.stopped
    if os.environ.get("RANK", "0") == "0":  # only the main process prints
        click.echo(
            to_json(asdict(result)) if options["as_json"] else f"{printable(str(output))}: test accuracy {result.accuracy:.4f}"
        )
    return 1 if result.bad else 0


def _check_together(compare: str | None, seeds: int, attention: str, *, beginning: bool) -> None:
    """Check that the options can be combined."""
    from visattn.errors import OptionError

    if seeds > 1 and compare is None:
        raise OptionError("--seeds needs --compare. Pass the variants to compare, or leave --seeds out.")
    if compare is not None and attention != "none":
        raise OptionError(f"--compare names the attention of each variant, got --attention {attention} too. Leave one out.")
    if compare is not None and (beginning or os.environ.get("WORLD_SIZE", "1") != "1"):
        raise OptionError("--compare always resumes, in a single process. Leave out --force, --overwrite and torchrun.")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the user gave, by name."""
    from visattn.errors import OptionError

    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None and value != ()}
    if "model_kwargs" in given:
        pairs = {}
        for text in given["model_kwargs"]:
            key, equals, value = text.partition("=")
            if not equals:
                raise OptionError(f"--model-kwargs must be KEY=VALUE, got '{text}'.")
            pairs[key] = _value(value)
        given["model_kwargs"] = pairs
    return given


def _value(text: str) -> Any:  # noqa: ANN401
    """Parse a text as a JSON value (number, boolean, list); return it unchanged if it is none."""
    from visattn._support.json_files import Anything, decoded

    try:
        return decoded(text, Anything, lax=True)
    except ValueError:
        return text
