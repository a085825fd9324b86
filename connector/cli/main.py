"""The `connector` command: its verbs, its outermost door, its exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

import click

from connector.cli import acting, benching, configuring, exits, looking, serve, showing, sweeping
from connector.cli.tables import note, printable
from connector.core.errors import ConnectorError

_EXITS = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {text}" for code, text in exits.MEANINGS.items())


class Shared:
    """What the verbs' parent knows."""

    debug = False


def _version() -> str:
    try:
        return metadata.version("tensor-connector")
    except metadata.PackageNotFoundError:
        return "0 (run from its sources)"


@click.group(epilog=_EXITS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Print the traceback of an unexpected error.")
@click.version_option(_version(), message="%(prog)s %(version)s")
@click.pass_obj
def cli(shared: Shared, debug: bool) -> None:
    """Start a broker of this node, look at it, and act on what it holds."""
    shared.debug = debug


for _verb in (
    serve.serve,
    looking.status,
    looking.ls,
    showing.show,
    acting.rm,
    acting.abort,
    sweeping.sweep,
    configuring.config,
    benching.bench,
):
    cli.add_command(_verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Prints every error as `error: …` to stderr, raises none."""
    shared = Shared()
    try:
        _take_any_text()
        code = _run(list(sys.argv[1:] if arguments is None else arguments), shared)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ConnectorError as error:
        _tell(str(error))
        return exits.code_of(error)
    except (KeyboardInterrupt, click.Abort):
        note("interrupted")
        return exits.INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return exits.CLOSED
    except Exception as error:
        _tell(f"unexpected {type(error).__name__}: {error}; this is a bug, please report it (--debug shows where)")
        if shared.debug:
            traceback.print_exc()
        return exits.BUG


def _run(arguments: list[str], shared: Shared) -> int:
    try:
        with cli.make_context("connector", arguments, obj=shared) as context:
            code = cli.invoke(context)
            return code if isinstance(code, int) else exits.OK
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return exits.USAGE
    except click.ClickException as error:
        where = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (see `{where.command_path} --help`)" if where else ""
        _tell(error.format_message() + hint)
        return exits.USAGE if isinstance(error, click.UsageError) else exits.NO


def _tell(text: str) -> None:
    """A line for each problem; nearly always one."""
    for line in text.splitlines() or [""]:
        click.echo(f"error: {printable(line)}", err=True)


def _take_any_text() -> None:
    """A rid that the terminal's encoding has no character for is printed with escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """The reader went away (`ls | head`): what is still buffered goes nowhere, and quietly."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
