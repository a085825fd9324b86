"""One line per event of interest, to stderr: for people, or one JSON object each."""

from __future__ import annotations

import json
import logging
import sys
import time


class HumanFormatter(logging.Formatter):
    """`12:00:01 warning stream failed rid=r1 edge=a:b:0`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = " ".join(f"{name}={value}" for name, value in getattr(record, "facts", {}).items())
        line = _printable(f"{clock} {record.levelname.lower()} {record.getMessage()} {facts}".rstrip())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _printable(text: str) -> str:
    """Line breaks, escapes and the like written out: a rid must not forge a line, nor a terminal's colour."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class JsonFormatter(logging.Formatter):
    """One object a line, with the facts beside time, level and text."""

    def format(self, record: logging.LogRecord) -> str:
        told = {"time": round(record.created, 6), "level": record.levelname.lower(), "text": record.getMessage()}
        told |= {name: value for name, value in getattr(record, "facts", {}).items() if name not in told}
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def set_up(level: str, form: str) -> None:
    """Send this process's `connector` logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    root = logging.getLogger("connector")
    root.handlers[:] = [handler]
    root.setLevel(getattr(logging, level.upper()))
    root.propagate = False
