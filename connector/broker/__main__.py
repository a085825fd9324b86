"""`python -m connector.broker OVERRIDES OWNER READY_FD`: an embedded broker. Not for hands; see `connector serve`."""

from __future__ import annotations

import json
import os
import sys

from connector.broker import config, serve
from connector.core.errors import ConnectorError

#: Of the environment, what means every broker. All else of it is a node's, and none of a private broker's.
SWITCHES = ("CONNECTOR_DIRECT",)


def main(arguments: list[str]) -> int:
    overrides, owner, ready_fd = json.loads(arguments[0]), int(arguments[1]), int(arguments[2])

    def ready() -> None:
        os.write(ready_fd, b"ready\n")
        os.close(ready_fd)

    try:
        loaded = config.load(None, {name: os.environ[name] for name in SWITCHES if name in os.environ}, overrides)
        serve.run(loaded.config, owner=owner, ready=ready)
    except ConnectorError as error:
        os.write(ready_fd, json.dumps([type(error).__name__, error.message, error.facts], default=str).encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
