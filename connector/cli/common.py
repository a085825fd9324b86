"""Options that several verbs share, and the way to a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from connector.cli.naming import EDGE, EDGE_HELP, INDEX
from connector.core.endpoint import parse_endpoint
from connector.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from connector.client.node import Node

Command = TypeVar("Command", bound=Callable[..., Any])

#: The stage that the command joins as.
STAGE = "connector-command"
TIMEOUT = 5.0


class EndpointType(click.ParamType):
    """A run directory, or ipc://RUN_DIR/broker.sock."""

    name = "endpoint"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return parse_endpoint(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def json_option(help_text: str = "Print JSON.") -> Callable[[Command], Command]:
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def client_options(command: Command) -> Command:
    """--endpoint, --timeout and --json of a verb that asks a broker."""
    command = json_option()(command)
    command = click.option(
        "--timeout",
        type=click.FloatRange(0.0, 1e6, min_open=True),
        default=TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        help="How long to look for the broker, and to wait for each of its answers.",
    )(command)
    return click.option(
        "--endpoint",
        type=EndpointType(),
        metavar="RUN_DIR",
        help="The broker's run directory. Else $CONNECTOR_ENDPOINT, $CONNECTOR_RUN_DIR, the configuration file, "
        "the default directory.",
    )(command)


def target_options(command: Command) -> Command:
    """KEY, or --edge, --rid and --index."""
    command = click.option("--index", type=INDEX, metavar="N", help="Chunk number; all chunks if left out.")(command)
    command = click.option("--rid", metavar="RID", help="Request id, where KEY would be ambiguous.")(command)
    command = click.option("--edge", type=EDGE, metavar="EDGE", help=EDGE_HELP)(command)
    return click.argument("key", required=False)(command)


def config_options(command: Command) -> Command:
    """--config, --run-dir, --pool and --set: the command line's part of the configuration."""
    command = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="FIELD=VALUE",
        help="Any field of the configuration (docs/config.md), written as in its variable. May be given again.",
    )(command)
    command = click.option("--pool", metavar="SIZE", help="Shared memory for payloads, such as 4GiB.")(command)
    command = click.option("--run-dir", metavar="DIR", help="Directory of the broker's sockets and locks.")(command)
    return click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Configuration file. Else $CONNECTOR_CONFIG, else /etc/tensor-connector/config.yaml if it exists.",
    )(command)


def overrides(run_dir: str | None, pool: str | None, settings: tuple[str, ...]) -> dict[str, object]:
    """What the command line sets, by field. UsageError: a field twice, or no `=`."""
    found: dict[str, object] = {}
    given = [("run_dir", run_dir), ("pool", pool)]
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UsageError("--set is written FIELD=VALUE", given=setting)
        given.append((name, value))
    for name, text in given:
        if text is None:
            continue
        if name in found:
            raise UsageError("the command line sets a field twice", field=name)
        found[name] = text
    return found


@contextmanager
def broker(endpoint: str | None, timeout: float) -> Iterator[Node]:
    """A session for one command. BrokerLost, with the path tried, if no broker answers in time."""
    from connector.client.connecting import connect

    node = connect(stage=STAGE, endpoint=endpoint, timeout=timeout)
    node.answer_timeout = timeout
    try:
        yield node
    finally:
        # Nothing that the command asked for is still under way: only the good-bye is.
        node.close(timeout=min(timeout, 1.0))
