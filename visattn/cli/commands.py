"""The table of commands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from importlib import import_module

import click

from visattn._support.checks import printable
from visattn.errors import VisattnError, VisattnWarning

# name -> one line of help; a command `x` is the function `x_command` of visattn.cli.x
COMMANDS = {
    "demo": "Look at four photos through DINOv2: heads, features, similarity, rollout.",
    "overlay": "Lay a model's attention over photos.",
    "heads": "A page of all heads, all layers, or the query x key matrix of one head.",
    "train": "Train a network, with or without attention, or a captioner.",
    "caption": "Tell what photos show, and where each word looked.",
    "stats": "Every head in numbers, over a folder of photos.",
    "inspect": "What a model is made of, and which methods apply to it.",
    "list": "Models, methods or color maps.",
    "doctor": "Check the installation.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"visattn.cli.{cmd_name}"), f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import visattn

        click.echo(f"visattn {visattn.__version__}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "VISATTN"})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version and exit.")
def cli() -> None:
    """Where does a vision model look, and can you believe it?"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file name that is no text must not stop its own error message
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    if not debug:
        warnings.simplefilter("ignore")
    warnings.simplefilter("always", VisattnWarning)
    sys.exit(_run(given, debug))


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def _run(arguments: list[str], debug: bool) -> int:
    try:
        code = cli.main(arguments, prog_name="visattn", standalone_mode=False)
        if sys.stdout is None:
            complain("stdout is closed: what was to be printed is lost, files are whole; print elsewhere")
            return 5
        sys.stdout.flush()
        return int(code or 0)
    except VisattnError as error:
        if debug:
            traceback.print_exc()
        complain(str(error))
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        return 2
    except click.ClickException as error:
        complain(f"{error.format_message()} See --help.")
        return error.exit_code
    except BrokenPipeError:  # the reader has gone: be quiet, and let the interpreter's own flush at exit be quiet too
        _drop_output()
        return 141
    except (KeyboardInterrupt, click.Abort):
        return 130
    except MemoryError:
        complain("out of memory; choose a smaller --img-size")
        return 5
    except OSError as error:
        if error.errno not in FULL:
            return _fault(error, debug)
        if _is_of_print(error):
            _drop_output()
            cause = (error.strerror or str(error)).lower()
            complain(f"what is printed cannot be written ({cause}); make room, or print elsewhere")
        else:
            complain(no_room(error))
        return 5
    except Exception as error:
        return _fault(error, debug)


def _fault(error: Exception, debug: bool) -> int:
    """One line that asks for a report."""
    if debug:
        traceback.print_exc()
    complain(fault(error))
    return 70


def fault(error: Exception) -> str:
    """Return the sentence about an error that nobody thought of."""
    what = str(error).strip().split("\n")[0]
    return f"a fault of visattn's own ({type(error).__name__}: {what}). Please report it with what --debug prints."


def no_room(error: OSError) -> str:
    """Return the sentence about a disk that is full or fails."""
    cause = (error.strerror or str(error)).lower()
    return f"{error.filename or 'a file on the way'}: {cause}; make room, here or in TMPDIR"


def _is_of_print(error: OSError) -> bool:
    """Return whether an error was met while printing: in click's `echo`, or in the flush at the end."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name == _run.__name__ or any(frame.name == "echo" for frame in frames)


def _drop_output() -> None:
    """Let go of what was printed, so that the interpreter's own flush at its end is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str) -> None:
    """One line on stderr, as every error is told."""
    click.echo(f"visattn: error: {_line(message)}", err=True)


def _show_warning(message: Warning | str, *_details: object) -> None:
    click.echo(f"visattn: warning: {_line(str(message))}", err=True)


def _line(message: str) -> str:
    return printable(" ".join(message.split("\n")))
