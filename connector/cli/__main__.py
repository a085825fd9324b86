"""`python -m connector.cli`: the `connector` command."""

from __future__ import annotations

import sys

from connector.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
