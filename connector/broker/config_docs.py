"""docs/config.md, made from the schema: `python -m connector.broker.config_docs > docs/config.md`."""

from __future__ import annotations

import sys
from typing import Any

from connector.broker.config import DEFAULT_FILE, variable
from connector.broker.config_schema import UNITS, BrokerConfig, format_size

_HEAD = f"""<!-- Made from the schema by `python -m connector.broker.config_docs`; a test compares. -->
# Configuration of the broker

Every field below can stand in a YAML file, in an environment variable and on the command line of `connector serve`.
The stronger source wins: **command line > environment > file > default**. `connector config show` tells each value's
source.

- The file is the one named by `--config`, else by `$CONNECTOR_CONFIG`, else
  `{DEFAULT_FILE}` if it exists. An empty file means all defaults. An example with every field:
  `configs/broker.yaml`.
- A variable is `CONNECTOR_` and the field's name in capitals; an empty variable counts as unset. Variables with this
  prefix that are not known are reported as warnings.
- Nothing is coerced: `"30"` is not a number, `yes` is not a bool, `1:30` is not a duration and `true` is not a number.
  Unknown fields and duplicate keys are refused with file, line and the nearest valid name.
- A **size** is a number of bytes or text with a unit ({", ".join(reversed(UNITS))}), such as `64MiB`. **Seconds** are
  finite and above 0, with or without a fraction. A **share** is a part of 1. `null` means what the field says of it.
"""


def render() -> str:
    """The page's text, with a final newline."""
    schema = BrokerConfig.model_json_schema()
    edge = schema["$defs"]["EdgeConfig"]
    parts = [_HEAD, "## Fields\n", _table(schema, with_variable=True)]
    parts += ["## Fields of an entry of `edges`\n", _table(edge, with_variable=False)]
    return "\n".join(parts)


def _table(schema: dict[str, Any], with_variable: bool) -> str:
    names = ["field", "type", "default"] + (["variable"] if with_variable else []) + ["meaning"]
    rows = [names, ["---"] * len(names)]
    required = schema.get("required", [])
    for name, entry in schema["properties"].items():
        default = "required" if name in required else _default(entry)
        own = [f"`{variable(name)}`"] if with_variable else []
        rows.append([f"`{name}`", _type(entry), default, *own, entry["description"]])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _plain(entry: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The type without its `null`, and whether it had one."""
    if "anyOf" not in entry:
        return entry, False
    return next(part for part in entry["anyOf"] if part["type"] != "null"), True


def _type(entry: dict[str, Any]) -> str:
    plain, nullable = _plain(entry)
    if "enum" in plain:
        text = ", ".join(f"`{choice}`" for choice in plain["enum"])
    else:
        names = {"integer": "integer", "number": "number", "string": "text", "array": "list", "boolean": "boolean"}
        text = plain.get("kind") or names[plain["type"]]
        text += _range(plain)
    return text + ("; or `null`" if nullable else "")


def _range(plain: dict[str, Any]) -> str:
    """Bounds in words; the schema calls them `ge` and `le` where a validator stands before the type."""
    bounds = [
        ("from", plain.get("minimum", plain.get("ge"))),
        ("above", plain.get("exclusiveMinimum")),
        ("to", plain.get("maximum", plain.get("le")) if "exclusiveMaximum" not in plain else None),
        ("below", plain.get("exclusiveMaximum")),
    ]
    told = [f"{word} {_number(value, plain)}" for word, value in bounds if value is not None]
    return ", " + " ".join(told) if told else ""


def _number(value: float, plain: dict[str, Any]) -> str:
    return format_size(int(value)) if plain.get("kind") == "size" else f"{value:.15g}"


def _default(entry: dict[str, Any]) -> str:
    if "default" not in entry:
        # Made anew for each broker: an empty list, or the run directory, whose rule its description tells.
        return "`[]`" if entry["type"] == "array" else "see there"
    value = entry["default"]
    if value is None:
        return "`null`"
    return f"`{value if isinstance(value, str) else _number(value, _plain(entry)[0])}`"


if __name__ == "__main__":
    sys.stdout.write(render())
