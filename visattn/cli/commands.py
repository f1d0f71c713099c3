"""Commands by name, and conversion of errors to an error line and an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import click

from visattn._support.checks import printable, suggest
from visattn._support.language import in_shell
from visattn._support.progress import silence
from visattn._support.whole_files import remove_unfinished
from visattn.cli.help import ABOUT, COMMANDS, VERSION, page
from visattn.cli.sign_of_life import sign_of_life
from visattn.cli.usage import command_of, told
from visattn.cli.without_command import tour
from visattn.core.command_line.faults import FULL, complain, fault, no_room, one_line
from visattn.errors import VisattnError, VisattnNote, VisattnWarning


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = suggest(cmd_name, COMMANDS)
            raise click.UsageError(f"no command '{printable(cmd_name)}'{f'; did you mean {near[0]}?' if near else '.'}", ctx)
        return command_of(cmd_name)

    def get_help(self, ctx: click.Context) -> str:
        return page()


def _version(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import visattn

        click.echo(f"visattn {visattn.__version__}")
        ctx.exit()


@click.group(
    cls=_LazyGroup,
    help=ABOUT,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "VISATTN"},
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help=VERSION)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run one of the commands; without one, say which fit the folder."""
    if ctx.invoked_subcommand is None:
        click.echo(tour(Path.cwd()))


_COUNTING = "triton._C.libtriton"  # counts its objects at exit, and prints those that were not collected
_COLLECT = 10_000  # objects between two garbage collections: the imports make a million objects, and all of them stay


_ENDING = signal.SIGTERM, signal.SIGHUP


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """End the command at a signal as at Ctrl-C, so that no temporary file stays.

    Yields:
        List of the signals, which the exit code tells.
    """
    ended: list[int] = []

    def end(number: int, _frame: object) -> None:
        ended.append(number)
        raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _ENDING if mine and signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores one
    for number in numbers:
        signal.signal(number, end)
    try:
        yield ended
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if arguments is None:  # the process runs this command alone
        gc.set_threshold(_COLLECT)
    debug = "--debug" in given
    quiet = "-q" in given or "--quiet" in given
    silence(quiet)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # an undecodable file name must not break its own error message
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = partial(_show_warning, set())
    if not debug:
        warnings.simplefilter("ignore")
    warnings.simplefilter("always", VisattnWarning)
    warnings.simplefilter("always", VisattnNote)
    with sign_of_life() if arguments is None and not (quiet or debug) else nullcontext():
        code = _run(given, debug)
    if arguments is None and _COUNTING not in sys.modules:
        gc.freeze()  # no search for garbage at exit
    sys.exit(code)


def _run(arguments: list[str], debug: bool) -> int:
    with in_shell(), _ended_by_signals() as ended:
        try:
            code = _coded(arguments, debug)
        except KeyboardInterrupt:  # a signal while an error was told
            code = 128 + signal.SIGINT
        if ended or code == 128 + signal.SIGINT:
            remove_unfinished()
    return 128 + ended[0] if ended else code


def _coded(arguments: list[str], debug: bool) -> int:
    """Run a command, and return its exit code; an error becomes one line."""
    try:
        code = cli.main(arguments, prog_name="visattn", standalone_mode=False)
        if sys.stdout is None:
            complain("stdout is closed: printed output is lost, but files are complete; redirect stdout")
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
        complain(f"{told(error)} See --help.")
        return error.exit_code
    except BrokenPipeError:  # the reader has closed the pipe: print nothing, not even at the interpreter's own flush at exit
        _drop_output()
        return 141
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except MemoryError:
        complain("out of memory; choose a smaller --img-size")
        return 5
    except OSError as error:
        if error.errno not in FULL:
            return _fault(error, debug)
        if _is_of_print(error):
            _drop_output()
            cause = (error.strerror or str(error)).lower()
            complain(f"stdout cannot be written ({cause}); free disk space, or redirect stdout")
        else:
            complain(no_room(error))
        return 5
    except Exception as error:
        return _fault(error, debug)


def _fault(error: Exception, debug: bool) -> int:
    """Print an internal error and return its exit code."""
    if debug:
        traceback.print_exc()
    complain(fault(error))
    return 70


def _is_of_print(error: OSError) -> bool:
    """Check whether an error was raised while printing: in click's `echo`, or in the flush at the end."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name == _coded.__name__ or any(frame.name == "echo" for frame in frames)


def _drop_output() -> None:
    """Discard unwritten output, so that the interpreter's own flush at exit prints no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(told: set[str], message: Warning | str, *_details: object) -> None:
    """Print a warning, or a note that was not told before."""
    text = one_line(str(message))
    if not isinstance(message, VisattnNote):
        click.echo(f"visattn: warning: {text}", err=True)
    elif text not in told:
        click.echo(f"visattn: {text}", err=True)
        told.add(text)
