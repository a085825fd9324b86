"""Names that each migration phase reads and writes, and warnings that come once. No torch.

| phase | reads old names | writes old names |
|---|---|---|
| 1 COMPAT | yes, and warns | yes, beside the new ones |
| 2 SWITCH | yes, and warns | no |
| 3 CLEAN | no: `UsageError` by name | no |
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from connector import errors


class Phase(IntEnum):
    """How far the migration has come (RFC, "Migration Plan")."""

    COMPAT = 1
    SWITCH = 2
    CLEAN = 3


class Old(NamedTuple):
    """What stands in an old name's place, and the last phases that read and write it; None: no phase does."""

    new: str
    read_until: Phase | None
    written_until: Phase | None


#: The field of a new request, and of the step's cached requests.
REQUEST_FIELD = "additional_information"
#: The kwarg of a model's forward.
FORWARD_KWARG = "runtime_additional_information"
#: The attribute of the engine's own state of a request.
REQUEST_MIRROR = "additional_information_cpu"
#: The field of a new request whose rows are laid over its prompt's embeddings.
PROMPT_FIELD = "prompt_embeds"
#: The one name that took their places.
NEW_NAME = "model_intermediate_buffer"

OLD_NAMES: Mapping[str, Old] = {
    REQUEST_FIELD: Old(NEW_NAME, read_until=Phase.SWITCH, written_until=None),
    FORWARD_KWARG: Old(NEW_NAME, read_until=Phase.SWITCH, written_until=Phase.COMPAT),
    REQUEST_MIRROR: Old(NEW_NAME, read_until=None, written_until=Phase.COMPAT),
    PROMPT_FIELD: Old(NEW_NAME, read_until=Phase.SWITCH, written_until=None),
}

#: A layer of hidden states, as old payloads and configs spell it.
_OLD_LAYER = re.compile(r"\Ahidden_states\.layer_(0|[1-9][0-9]*)\Z")

_logger = logging.getLogger("runner_adapter")
#: Names that are warned of, at most: a model may make up new ones for ever.
MOST_WARNED = 1000
#: Old name -> the call that warned. `setdefault` decides between threads.
_warned: dict[str, object] = {}


def phase_of(phase: object) -> Phase:
    """A Phase, or its number; UsageError otherwise."""
    try:
        return Phase(phase)  # type: ignore[arg-type]
    except ValueError:
        raise errors.UsageError("`phase` is a Phase, or 1, 2 or 3", given=repr(phase)[:40]) from None


def renamed(name: str) -> str:
    """A tensor's name as it is spelled now."""
    return _OLD_LAYER.sub(r"hidden_states.layers[\1]", name)


def reads(old: str, phase: Phase) -> bool:
    """Whether the phase takes values under this old name."""
    until = OLD_NAMES[old].read_until
    return until is not None and phase <= until


def writes(old: str, phase: Phase) -> bool:
    """Whether the phase gives values under this old name, beside the new one."""
    until = OLD_NAMES[old].written_until
    return until is not None and phase <= until


def met(old: str, phase: Phase, **facts: Any) -> None:
    """A value came under this old name: a warning, once, or UsageError with the facts if the phase knows it no more."""
    new = OLD_NAMES[old].new
    if not reads(old, phase):
        raise errors.UsageError(
            f"{old} is not read in migration phase {int(phase)}: use {new}", name=old, new=new, **facts
        )
    warn_once(old, new)


def warn_once(old: str, new: str) -> None:
    """Log, once per process and old name, that it is deprecated and what to use; of MOST_WARNED names at most."""
    mine = object()
    if len(_warned) < MOST_WARNED and _warned.setdefault(old, mine) is mine:
        _logger.warning("%s is deprecated: use %s", old, new)


def forget_warnings() -> None:
    """Warn again. For tests."""
    _warned.clear()
