"""A stage's sections in an engine's YAML file. No torch.

    engine_args:            a file of one stage
      transfer_config: …
      runner_adapter: …

    stages:                 or `stage_args:`, a file of many
      - stage_id: 0
        engine_args:
          transfer_config: …

All other fields are the engine's and are not judged, but the file must be strict YAML (connector/config/reader.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from connector import ConfigSource, check_config, config_conflicts, errors, read_config
from runner_adapter.config import AdapterConfig, TransferConfig
from runner_adapter.sections import BASE, FIELDS, is_stage_file, misnamed

StageId = int | str
_KINDS = {int: "an int", str: "text"}


class Stage(NamedTuple):
    """One stage's sections, at their defaults where the file has none. `stage_id`: None in a file of one stage."""

    stage_id: StageId | None
    transfer: TransferConfig
    adapter: AdapterConfig


class StageFile(NamedTuple):
    """The stages of a file by id, in its order; one without id for a file of one stage. `base`: the file that it
    lies over (`base_config`). That one's stages and sections are not read: they are its own."""

    stages: dict[StageId | None, Stage]
    base: str | None


def read_file(path: str | Path) -> StageFile:
    """What a stage file holds.

    ConfigError: the file cannot be read, is no stage file, or a section is refused or misnamed: every problem with
    FILE:LINE, dotted field and nearest valid name. UsageError: that is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise errors.UsageError("a stage file is named by its path", type=type(path).__name__)
    source = read_config(Path(path))
    if not is_stage_file(source.values):
        raise errors.ConfigError(f"{path}: this is no stage file: it holds none of {', '.join((*FIELDS, BASE))}")
    file = _checked(source)
    base = source.values.get(BASE)
    found = {entry.stage_id: _stage(entry.stage_id, entry.engine_args) for _, entry in file.entries}
    if file.stages is None and file.stage_args is None and (base is None or file.engine_args is not None):
        found = {None: _stage(None, file.engine_args)}
    return StageFile(found, None if base is None else str(base)[:200])


def read_stages(path: str | Path) -> dict[StageId | None, Stage]:
    """The stages of a file by id. Raises as `read_file` does."""
    return read_file(path).stages


def load_stages(path: str | Path) -> dict[StageId | None, TransferConfig]:
    """The transfer config of each stage of a file, disabled where there is none. Raises as `read_stages` does."""
    return {stage_id: stage.transfer for stage_id, stage in read_stages(path).items()}


def stage_of(path: str | Path, stage_id: StageId | None = None) -> Stage:
    """The stage with this id; None: the only one. ConfigError, with those that there are, if it is not there.

    UsageError: an id that is neither an int nor text.
    """
    if isinstance(stage_id, bool) or not isinstance(stage_id, int | str | None):
        raise errors.UsageError("a stage's id is an int or text", type=type(stage_id).__name__)
    stages, base = read_file(path)
    if stage_id in stages:
        return stages[stage_id]
    if stage_id is None and len(stages) == 1:
        return next(iter(stages.values()))
    told = f"it has {len(stages)} stages: name one" if stage_id is None else f"there is no stage {stage_id!r}"
    # 0 and "0" are two ids.
    twin = [known for known in stages if known is not None and str(known) == str(stage_id)]
    told += f"; did you mean {twin[0]!r}, {_KINDS[type(twin[0])]}?" if twin else ""
    told += f"; the stages of its base_config, {base}, are not read: name that file" if base else ""
    raise errors.ConfigError(
        f"{path}: {told}", stages=["one without an id" if found is None else found for found in stages]
    )


def handed_on(stage: Stage) -> str:
    """What may leave the stage, in words, or why nothing does."""
    config = stage.transfer
    if not config.model_fields_set:
        return "hands nothing on and knows no key: it has no transfer_config"
    if not config.enabled:
        return "hands nothing on and knows no key: enabled: false"
    if not config.sends:
        empty = [name for name in ("items", "hidden_state_layers", "id_types") if getattr(config, name) == ()]
        return "hands nothing on: " + ", ".join(f"{name}: []" for name in empty)
    words = {"hidden_states": "layers", "ids": "id types"}
    given = {"hidden_states": config.hidden_state_layers, "ids": config.id_types}
    return "hands on " + "; ".join(
        f"all {words[item]}" if (names := given[item]) is None else f"{words[item]} {', '.join(map(str, names))}"
        for item in config.items
        if given[item] != ()
    )


def _checked(source: ConfigSource) -> _File:
    """A misspelled name is told beside all other problems: it may be the cause of some."""
    missed = misnamed(source)
    try:
        file = check_config(_File, source)
    except errors.ConfigError as error:
        if not missed:
            raise
        lines = [line for line, _ in missed]
        raise errors.ConfigError("\n".join([*lines, error.message]), **error.facts) from error
    if missed:
        raise errors.ConfigError("\n".join(line for line, _ in missed), nearest=missed[0][1])
    return file


def _stage(stage_id: StageId | None, found: _EngineArgs | None) -> Stage:
    sections = found or _EngineArgs()
    return Stage(stage_id, sections.transfer_config or TransferConfig(), sections.runner_adapter or AdapterConfig())


def _misplaced(value: object) -> object:
    raise PydanticCustomError("misplaced", "this stands under engine_args")


def _stage_id(value: object) -> object:
    if type(value) is int or (isinstance(value, str) and value):
        return value
    raise PydanticCustomError("stage_id", "a stage's id is an int or text")


Misplaced = Annotated[Any, BeforeValidator(_misplaced)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _EngineArgs(_Part):
    transfer_config: TransferConfig | None = None
    runner_adapter: AdapterConfig | None = None


class _Entry(_Part):
    stage_id: Annotated[Any, AfterValidator(_stage_id)]
    engine_args: _EngineArgs | None = None
    transfer_config: Misplaced = None
    runner_adapter: Misplaced = None


class _File(_Part):
    engine_args: _EngineArgs | None = None
    stages: list[_Entry] | None = None
    stage_args: list[_Entry] | None = None
    transfer_config: Misplaced = None
    runner_adapter: Misplaced = None

    @property
    def entries(self) -> list[tuple[tuple[str | int, ...], _Entry]]:
        """The entries of both lists, each with its path."""
        lists = {"stages": self.stages, "stage_args": self.stage_args}
        return [((name, i), entry) for name, found in lists.items() for i, entry in enumerate(found or ())]

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        top = self.engine_args or _EngineArgs()
        if self.entries and (top.transfer_config or top.runner_adapter):
            problems.append((("engine_args",), "a file of stages has its sections in each stage's engine_args"))
        seen: set[StageId] = set()
        for path, entry in self.entries:
            if entry.stage_id in seen:
                problems.append(((*path, "stage_id"), f"the stage {entry.stage_id!r} stands twice"))
            seen.add(entry.stage_id)
        if problems:
            raise config_conflicts(*problems)
        return self
