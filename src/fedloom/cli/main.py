"""The command line: one module for each command; nothing else in fedloom prints."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
import traceback
from functools import cache
from typing import Annotated

import click
import typer

from fedloom import __version__
from fedloom.cli import (
    check,
    collect,
    compare,
    data,
    deploy,
    describe,
    doctor,
    evaluate,
    export,
    partition,
    peers,
    predict,
    report,
    resume,
    run,
    show,
    tune,
    watch,
)
from fedloom.cli import list as listing
from fedloom.cli.console import harmless
from fedloom.cli.help import repair
from fedloom.cli.ranks import follows
from fedloom.cli.startup import wait_passively
from fedloom.core.errors import FedloomError
from fedloom.core.own_line import own_line, own_lines, remedy
from fedloom.runs.launch import follow_parent

repair()
app = typer.Typer(
    name="fedloom",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(run.run)
app.command()(resume.resume)
app.command()(predict.predict)
app.command()(evaluate.evaluate)
app.command()(export.export)
app.command()(compare.compare)
app.command()(tune.tune)
app.command()(collect.collect)
app.command()(show.show)
app.command()(report.report)
app.command()(watch.watch)
app.command()(partition.partition)
app.command("list")(listing.list_)
app.command()(describe.describe)
app.command()(check.check)
app.command()(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")
app.add_typer(peers.app, name="peers")


@cache
def command() -> click.Command:
    """The commands with all their options; to build them takes as long as a short run."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line; every expected error is one message and an exit code, never a traceback."""
    follow_parent()
    wait_passively()
    _print_what_is_possible()
    try:
        code = command()(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        advice = _setting_meant(error.option_name) if isinstance(error, click.NoSuchOption) else ""
        if isinstance(error, click.NoSuchOption) and advice:  # in place of the options that click finds near it
            click.NoSuchOption(error.option_name, ctx=error.ctx).show()
            print(advice, file=sys.stderr)
        else:
            error.show()
        sys.exit(error.exit_code)
    except FedloomError as error:
        if not follows():  # rank 0 reports for all
            print(harmless(f"error: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if not follows():
            print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os._exit(0)
    except Exception as error:
        sys.exit(_unexpected(error))
    sys.exit(code if isinstance(code, int) else 0)


def _print_what_is_possible() -> None:
    """Print ? for a character that the terminal's encoding lacks: a run must not end for want of a dot."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def _setting_meant(option: str) -> str:
    """How to write a setting that was given as an option, such as ``--rounds 5``; empty where it is none."""
    from fedloom.runs.settings import full_name

    meant = full_name(option.lstrip("-").replace("-", "_"))
    if not meant:
        return ""
    words = [*sys.argv, "VALUE"]
    at = next(i for i, word in enumerate(words) if word.startswith(option))
    value = words[at].partition("=")[2] or words[at + 1]
    return f"settings are written KEY=VALUE, as in {meant}={value}"


def _unexpected(error: Exception) -> int:
    """Print what is known about an error that fedloom did not raise, the user's own line first; the exit code."""
    whole = os.environ.get(_WHOLE, "") not in ("", "0")
    if whole:
        traceback.print_exc()
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY):
        print(f"error: there is not enough memory ({str(error).splitlines()[0]})", file=sys.stderr)
        return 2
    if said := _unusable_path(error):
        print(harmless(f"error: {said}"), file=sys.stderr)
        return 2
    if said := remedy(error):
        print(harmless(f"error: {said}"), file=sys.stderr)
        return 2
    if lines := own_lines(error):
        print(harmless("\n".join([f"error: {type(error).__name__}: {error}", *_shortened(lines)])), file=sys.stderr)
        print(f"({_WHOLE}=1 prints the whole traceback){_of_rank()}", file=sys.stderr)
        return 2
    if not whole:
        traceback.print_exc()
    print(_advice(), file=sys.stderr)
    return 1


_WHOLE = "FEDLOOM_TRACEBACK"  # the environment variable that asks for whole tracebacks
_MOST_LINES = 8  # of the user's code; a recursion has thousands


def _shortened(lines: list[str]) -> list[str]:
    """The lines of the user's code in a traceback, without those in the middle of many."""
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more ...", *lines[-half:]]
    return [f"  {line}" for line in lines]


def _of_rank() -> str:
    return f"\nthis was rank {os.environ['RANK']}" if follows() else ""


_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "not enough memory",
    "Cannot allocate memory",
    "Storage size calculation overflowed",
)


_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM)


def _unusable_path(error: Exception) -> str:
    """Which path the system does not accept, and why; empty for other errors, and for those of the user's code."""
    if not isinstance(error, OSError) or error.errno not in _UNUSABLE or not error.filename or own_line(error):
        return ""
    return f"{os.fsdecode(error.filename)}: {os.strerror(error.errno)}"


def _advice() -> str:
    """What to do about an unexpected error."""
    if follows():
        return _of_rank()
    return (
        "\nthis is a bug in fedloom or in your code;\n"
        "if you wrote the algorithm, `fedloom check FILE.py` shows which law it breaks"
    )


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedloom {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning for unequal data: simulate, compare and reproduce."""


if __name__ == "__main__":
    main()
