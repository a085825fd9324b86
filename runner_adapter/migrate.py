"""An old stage config rewritten: what a stage sends stands in its own `transfer_config`. No torch, no files.

Before, what crosses an edge was said by the code of hooks. This reads a vLLM-Omni stage config (`stages:`, the older
`stage_args:`, or one stage's `engine_args:`), and puts in what payload keys, known hooks or the known pipeline tell.
It edits the text: lines are put in and old keys renamed, and all else, comments included, stays as it was. Whatever
it cannot tell it does not guess: that is listed, with its line.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Any, NamedTuple

from yaml.nodes import ScalarNode

from connector import errors
from runner_adapter import phases
from runner_adapter.hops import HOOKS, PIPELINES
from runner_adapter.naming import key_part
from runner_adapter.stagetext import ALIKE, Stage, StageText, edges_of, stages_of

_SENDER_HOOKS = ("custom_process_next_stage_input_func", "async_chunk_process_next_stage_input_func")
_READER_HOOKS = ("custom_process_input_func", "sync_process_input_func")
_HOOK = re.compile(r"(?:.*\.)?(\w+\.\w+)_(?:async_chunk|full_payload|token_only)")
_TEMPLATES = {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"}
_FILTERS = {"hidden_states": "hidden_state_layers", "ids": "id_types"}
#: A config lets names pass; the code of a hook, which made them, runs no more.
_MADE = "; what its hook made of the output, the runner gives beside it"


class Note(NamedTuple):
    """Something about a line of the old file."""

    line: int
    text: str


class Migrated(NamedTuple):
    """The new file's text, what was put into it, and what it could not be told."""

    text: str
    written: list[Note]
    unsaid: list[Note]


def migrate(text: str, name: str, *, pipeline: str | None = None) -> Migrated:
    """The stage config `text` for `model_intermediate_buffer`; `name` is its file, for messages.

    `pipeline` is the pipeline that the config deploys, where it does not say so itself. A stage that has a
    `transfer_config` keeps it.

    ConfigError, with file and line: no strict YAML, or no stage config. UsageError: a pipeline that is not known.
    """
    if pipeline is not None and pipeline not in PIPELINES:
        raise errors.UsageError("this pipeline is not known", pipeline=pipeline, known=sorted(PIPELINES))
    work = _Work(StageText(text, name), [], [])
    file = work.file
    _rename(work)
    stages = stages_of(file)
    base = file.value.get("base_config")
    if base is not None:
        note = f"what the stages of {base} send is said there: that file is migrated by itself"
        work.unsaid.append(Note(file.lines["base_config",], note))
    elif pipeline is None:
        named = [file.value.get("pipeline"), PurePath(name).stem]
        pipeline = next((found for found in named if isinstance(found, str) and found in PIPELINES), None)
    hops = PIPELINES[pipeline] if pipeline is not None else {}
    readers = _readers(file, stages, chain=base is None)
    reading = {reader for found in readers.values() for reader in found}
    for stage in stages:
        behind = readers[stage.number]
        if _explain(work, stage, [other for other in stages if other.number in behind], hops.get(stage.number)):
            continue
        if base is None and behind:
            note = f"{_who(stage)}: nothing says what it sends: name the pipeline, or write a transfer_config"
            work.unsaid.append(Note(file.lines[stage.path], note))
        elif base is None and stage.number in reading:
            _put(work, stage, _config(work, []), "place: it only reads")
    return Migrated(file.edited(), sorted(work.written), sorted(work.unsaid))


class _Work(NamedTuple):
    """The file, and what was found out about its lines so far."""

    file: StageText
    written: list[Note]
    unsaid: list[Note]


def _readers(file: StageText, stages: list[Stage], *, chain: bool) -> dict[int, set[int]]:
    """By stage, those it sends to. `chain`: where nothing else is said, as vLLM-Omni has it, the next one."""
    edges = edges_of(file, stages)
    found = {stage.number: {end for start, end in edges if start == stage.number} for stage in stages}
    for stage, behind in zip(stages, stages[1:], strict=False):
        if chain and not found[stage.number]:
            found[stage.number] = {behind.number}
    return found


def _rename(work: _Work) -> None:
    """Old keys get the new name where that is certain; the others are told."""
    sure: list[ScalarNode] = []
    for node in work.file.mappings:
        keys = {key.value: key for key, _ in node.value if isinstance(key, ScalarNode)}
        alike = [name for name in keys if name in ALIKE]
        for name, key in keys.items():
            if alike == [name] and name != phases.NEW_NAME:
                sure.append(key)
            elif name in phases.OLD_NAMES or phases.REQUEST_FIELD in name:
                work.unsaid.append(Note(_line(key), f"{name} goes, and nothing says what takes its place here"))
    left = work.file.rename(sure)
    for key in sure:
        told = f"{key.value} is {phases.NEW_NAME} now"
        if key in left:
            work.unsaid.append(Note(_line(key), f"{told}: rename it, and what it is laid over or shared with"))
        else:
            work.written.append(Note(_line(key), told))


def _line(node: ScalarNode) -> int:
    return int(node.start_mark.line) + 1


def _explain(work: _Work, stage: Stage, readers: list[Stage], hop: str | None) -> bool:
    """Put in what the stage sends. True if that is said somewhere, be it in words that are not understood here."""
    args = stage.value.get("engine_args")
    if isinstance(args, dict) and "transfer_config" in args:
        return True
    file = work.file
    said, source = _payload_keys(file, stage, readers), "payload keys"
    hooks = [] if said else _hooks(file, stage, readers)
    lost = [(hook, at) for hook, at in hooks if _hop(hook) not in HOOKS]
    for hook, at in lost:
        work.unsaid.append(Note(at, f"{_who(stage)}: what {hook} hands over is not known: write a transfer_config"))
    if hooks and not lost:
        said, source = [(name, at) for hook, at in hooks for name in HOOKS[_hop(hook)]], f"hooks{_MADE}"
    elif not said and not lost and hop is not None:
        said, source = [(name, file.lines[stage.path]) for name in HOOKS[hop]], f"pipeline{_MADE}"
    if said:
        _put(work, stage, _config(work, said), source)
    return bool(said or lost)


def _who(stage: Stage) -> str:
    return f"stage {stage.number}" if stage.path else "the stage"


def _put(work: _Work, stage: Stage, config: dict[str, Any], source: str) -> None:
    line = work.file.lines[stage.path]
    problem = work.file.put(stage, config)
    if problem is None:
        work.written.append(Note(line, f"{_who(stage)}: a transfer_config, from its {source}"))
    else:
        told = f"{_who(stage)}: {problem} transfer_config: {json.dumps(config)}"
        work.unsaid.append(Note(line, told))


def _payload_keys(file: StageText, stage: Stage, readers: list[Stage]) -> list[tuple[str, int]]:
    """Names that the stage says it gives; else those that its readers say they take; with the lines."""
    own = [file.field(stage, "stage_output_payload_keys")]
    theirs = [file.field(reader, "stage_input_payload_keys") for reader in readers]
    for found in (own, theirs):
        names = [(name, at) for held, at in filter(None, found) if isinstance(held, list) for name in held]
        if names:
            return [(phases.renamed(str(name)), at) for name, at in names]
    return []


def _hooks(file: StageText, stage: Stage, readers: list[Stage]) -> list[tuple[str, int]]:
    """The hooks that make what the stage gives; else those that make its readers' inputs; with the lines."""
    own = [file.field(stage, key) for key in _SENDER_HOOKS]
    theirs = [file.field(reader, key) for reader in readers for key in _READER_HOOKS]
    return [(str(hook), at) for hook, at in filter(None, own)] or [(str(hook), at) for hook, at in filter(None, theirs)]


def _hop(hook: str) -> str:
    found = _HOOK.fullmatch(hook)
    return found[1] if found else ""


def _config(work: _Work, said: list[tuple[str, int]]) -> dict[str, Any]:
    """The transfer_config that lets these names pass and no others.

    It is enabled and has its templates for no names, too: a stage that only reads must know the keys that arrive.
    """
    parts: dict[str, list[Any]] = {category: [] for category in _TEMPLATES}
    for name, at in said:
        # A name without a category is the id type of that name.
        found = key_part(name) or key_part(f"ids.{name}")
        if found is None:
            work.unsaid.append(Note(at, f"{name} can be no id type: the model must give it another name"))
            continue
        part = int(found[1]) if found[0] == "hidden_states" else found[1]
        if part not in parts[found[0]]:
            parts[found[0]].append(part)
    items = [category for category, given in parts.items() if given]
    filters = {_FILTERS[category]: parts[category] for category in items}
    return {"enabled": True, "items": items, "key_templates": dict(_TEMPLATES), **filters}
