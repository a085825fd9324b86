"""Names of a stage file's sections, and names that were meant to be one. No torch.

What else stands in an engine's file is the engine's, and not judged. But a section whose name is misspelled would be
passed over in silence, and the stage hand nothing on: so a name that is nearly a section's is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from connector import ConfigSource

Path = tuple[str | int, ...]

#: Lists of stages: today's name, and the older one.
LISTS = ("stages", "stage_args")
#: A file that names another has that one's stages beneath its own.
BASE = "base_config"
#: A file that holds one of these is a stage file.
FIELDS = ("engine_args", *LISTS)

#: What a section is; a value of another kind is not a misspelled section's.
_KINDS: Mapping[str, type] = {
    "transfer_config": dict,
    "runner_adapter": dict,
    "engine_args": dict,
    "stages": list,
    "stage_args": list,
    BASE: str,
}
_IN_ARGS = ("transfer_config", "runner_adapter")
_IN_STAGE = ("engine_args", *_IN_ARGS)
#: The share of letters that two names have in common, in order, when one is taken for the other: two slips in ten.
_NEAR = 0.9


def meant(name: str, value: object, known: tuple[str, ...]) -> str | None:
    """The section that is nearly called so; None for a section's own name and for names that are like none.

    A name that ends with a section's is another one (vLLM's `kv_transfer_config`).
    """
    plain = name.lower().replace("-", "_")
    if name in known or any(plain.endswith(f"_{other}") for other in _KINDS):
        return None
    fitting = [other for other in known if isinstance(value, _KINDS[other])]
    return next(iter(difflib.get_close_matches(plain, fitting, n=1, cutoff=_NEAR)), None)


def is_stage_file(values: Mapping[str, object]) -> bool:
    """Whether a file with these values holds stages, or was meant to, or names a file that does: it is no broker's."""
    known = (*FIELDS, BASE)
    return any(name in known or meant(name, value, known) for name, value in values.items())


def misnamed(source: ConfigSource) -> list[tuple[str, str]]:
    """A line for each section whose name is misspelled, as a refusal says it, and the name that was meant."""
    slips = [
        (path, near) for path, value, known in _places(source.values) if (near := meant(str(path[-1]), value, known))
    ]
    found = [(path, f"there is no such section; did you mean {near!r}?", near) for path, near in slips]
    told = "it is not read here: it stands under the stage's engine_args"
    found += [(path, told, str(path[-1])) for path in _elsewhere(source.values)]
    return [
        (f"{source.place(path).removeprefix('file ')}: {'.'.join(map(str, path))}: {what}", near)
        for path, what, near in found
    ]


def _elsewhere(values: Mapping[str, Any]) -> Iterator[Path]:
    """Sections in places that vLLM-Omni merges into a stage's engine_args, where nobody looks for them here."""
    platforms = values.get("platforms")
    trees: list[tuple[Path, Any]] = [((), values)]
    trees += [(("platforms", name), tree) for name, tree in (platforms.items() if isinstance(platforms, dict) else ())]
    for at, tree in trees:
        for name in LISTS if isinstance(tree, dict) else ():
            entries = tree.get(name)
            for i, entry in enumerate(entries if isinstance(entries, list) else ()):
                for part in ("engine_extras", *(("engine_args",) if at else ())):
                    held = entry.get(part) if isinstance(entry, dict) else None
                    sections = held if isinstance(held, dict) else {}
                    yield from ((*at, name, i, part, section) for section in _IN_ARGS if section in sections)


def _places(values: Mapping[str, Any]) -> Iterator[tuple[Path, object, tuple[str, ...]]]:
    """Each name that could be a section's: its path, its value, and the sections that can stand there."""
    yield from _fields((), values, (*FIELDS, BASE, *_IN_ARGS))
    yield from _fields(("engine_args",), values.get("engine_args"), _IN_ARGS)
    for name in LISTS:
        entries = values.get(name)
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            yield from _fields((name, i), entry, _IN_STAGE)
            if isinstance(entry, dict):
                yield from _fields((name, i, "engine_args"), entry.get("engine_args"), _IN_ARGS)


def _fields(at: Path, held: object, known: tuple[str, ...]) -> Iterator[tuple[Path, object, tuple[str, ...]]]:
    yield from (((*at, name), value, known) for name, value in (held.items() if isinstance(held, dict) else ()))
