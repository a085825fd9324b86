"""docs/cli.md and docs/errors.md, made from the command's and the error tree's own data.

`python -m connector.cli.docs cli > docs/cli.md`, and likewise `errors`; tests hold them equal.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator

import click

from connector.cli import exits, naming
from connector.cli.main import cli
from connector.core import errors
from connector.core.errors import BY_CODE, ConnectorError

_MADE = "<!-- Made by `python -m connector.cli.docs {name}`; a test compares. -->\n"
_CLI = """# The `connector` command

Tables are drawn on a terminal, with colours unless `NO_COLOR` is set; elsewhere the same columns are plain aligned
lines. Every verb has `--json`; `ls --json` prints its array an element a line, as the pages come. Errors are lines
`error: …` on stderr, with all facts. Only `show --stats` and `show --save` load torch.

"""
_ERRORS = """# Errors

All derive from `connector.ConnectorError` and stand in `connector.errors`. `error.facts` holds what is known by name:
rid, edge, key, sizes, limits. The exit code is the one that the `connector` command ends with.

"""


def render_cli() -> str:
    """docs/cli.md with a final newline."""
    parts = [_MADE.format(name="cli"), _CLI, "## Exit codes\n\n"]
    parts.append(_table(("code", "meaning"), [(str(code), text) for code, text in exits.MEANINGS.items()]))
    parts.append("\n## Names of payloads\n\n" + _naming() + "\n")
    parts += _command(click.Context(cli, info_name="connector"))
    return "".join(parts)


def _naming() -> str:
    """The grammar as naming.py states it: its indented lines as a code block."""
    paragraphs = inspect.cleandoc(naming.__doc__ or "").split("\n\n")
    return "\n\n".join(f"```\n{inspect.cleandoc(p)}\n```" if p.startswith(" ") else p for p in paragraphs) + "\n"


def _command(context: click.Context) -> Iterator[str]:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    yield f"\n## {context.command_path}\n\n```\n{usage}\n```\n\n{text}\n\n"
    options = [option for option in command.params if isinstance(option, click.Option)]
    rows: list[tuple[str, ...]] = [(_names(option), _meaning(option)) for option in options]
    if rows:
        yield _table(("option", "meaning"), rows)
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _command(click.Context(command.commands[name], info_name=name, parent=context))


def _names(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    if option.is_flag:
        return names
    choices = "|".join(option.type.choices) if isinstance(option.type, click.Choice) else option.metavar
    return f"{names} `{choices}`" if choices else names


def _meaning(option: click.Option) -> str:
    default = f" Default: `{option.default}`." if option.show_default else ""
    return " ".join((option.help or "").split()) + default


def render_errors() -> str:
    """docs/errors.md with a final newline."""
    faults = dict(re.findall(r"[├└]── (\w+)\s+(.+)", errors.__doc__ or ""))
    rows = [_error(cls, faults) for cls in BY_CODE.values()]
    return (
        _MADE.format(name="errors") + _ERRORS + _table(("error", "is a", "whose fault", "meaning", "exit code"), rows)
    )


def _error(cls: type[ConnectorError], faults: dict[str, str]) -> tuple[str, ...]:
    fault = next((faults[base.__name__] for base in cls.__mro__ if base.__name__ in faults), "")
    parents = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
    meaning = " ".join((cls.__doc__ or "").split())
    return f"`{cls.__name__}`", parents, fault, meaning, str(exits.code_of(cls("")))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


PAGES = {"cli": render_cli, "errors": render_errors}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
