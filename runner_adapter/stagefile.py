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

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from connector import check_config, config_conflicts, errors, read_config
from runner_adapter.config import AdapterConfig, TransferConfig

StageId = int | str
#: A file that holds one of these is a stage file.
FIELDS = ("engine_args", "stages", "stage_args")


class Stage(NamedTuple):
    """One stage's sections, at their defaults where the file has none. `stage_id`: None in a file of one stage."""

    stage_id: StageId | None
    transfer: TransferConfig
    adapter: AdapterConfig


def is_stage_file(values: Mapping[str, object]) -> bool:
    """Whether a file with these values holds stages, so that it is no broker's."""
    return any(field in values for field in FIELDS)


def read_stages(path: str | Path) -> dict[StageId | None, Stage]:
    """The stages of a file by id, in its order; one without id for a file of one stage.

    ConfigError: the file cannot be read, is no stage file, or a section is refused: every problem with FILE:LINE,
    dotted field and nearest valid name.
    """
    source = read_config(Path(path))
    if not is_stage_file(source.values):
        raise errors.ConfigError(f"{path}: this is no stage file: it holds none of {', '.join(FIELDS)}")
    file = check_config(_File, source)
    if file.stages is None and file.stage_args is None:
        return {None: _stage(None, file.engine_args)}
    return {entry.stage_id: _stage(entry.stage_id, entry.engine_args) for _, entry in file.entries}


def load_stages(path: str | Path) -> dict[StageId | None, TransferConfig]:
    """The transfer config of each stage of a file, disabled where there is none. Raises as `read_stages` does."""
    return {stage_id: stage.transfer for stage_id, stage in read_stages(path).items()}


def stage_of(path: str | Path, stage_id: StageId | None = None) -> Stage:
    """The stage with this id; None: the only one. ConfigError, with those that there are, if it is not there."""
    stages = read_stages(path)
    if stage_id in stages:
        return stages[stage_id]
    if stage_id is None and len(stages) == 1:
        return next(iter(stages.values()))
    told = f"it has {len(stages)} stages: name one" if stage_id is None else f"there is no stage {stage_id!r}"
    known = ["one without an id" if known is None else repr(known) for known in stages]
    raise errors.ConfigError(f"{path}: {told}", stages=known)


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
