"""The broker's configuration: every field, its type, its range and its meaning. The only home of these.

docs/config.md is made from this schema (config_docs.py), and configs/broker.yaml is held equal to its defaults by a
test. Where values come from is config.py's part.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from connector.core.endpoint import check_run_dir, default_run_dir
from connector.core.errors import ConfigError, InvalidPayload
from connector.core.names import MAX_INDEX, Edge, check_edge

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {"TiB": 1 << 40, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}
#: The most that a process of this architecture can map.
MAX_SIZE = 1 << 47
#: About 31 years; beyond it a deadline overflows the system's timers.
MAX_SECONDS = 1e9
#: One source of values at a time is checked with this context: rules between fields wait for the whole.
ONE_SOURCE = "one source"

_SIZE = re.compile(r"([0-9]{1,20}) ?(B|KiB|MiB|GiB|TiB)")


def parse_size(value: object) -> object:
    """`"64MiB"` -> bytes. Anything that is not text is left to the type check."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise PydanticCustomError(
            "size", "a size is a number of bytes or text such as 512KiB, 64MiB or 1GiB (units: {units})", _units()
        )
    return int(match[1]) * UNITS[match[2]]


def format_size(size: int) -> str:
    """Bytes in the largest unit that divides them: 1073741824 -> `1GiB`."""
    unit = next(unit for unit, factor in UNITS.items() if size % factor == 0 and (size or unit == "B"))
    return f"{size // UNITS[unit]}{unit}"


def _units() -> dict[str, Any]:
    return {"units": ", ".join(reversed(UNITS))}


def _run_dir(path: str) -> str:
    try:
        return check_run_dir(path)
    except ConfigError as error:
        raise PydanticCustomError("run_dir", "{problem}", {"problem": error.message}) from error


def _kind(kind: str) -> dict[str, Any]:
    """What the documentation calls this type."""
    return {"kind": kind}


Size = Annotated[int, BeforeValidator(parse_size), Field(le=MAX_SIZE, json_schema_extra=_kind("size"))]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False, json_schema_extra=_kind("seconds"))]
Share = Annotated[float, Field(le=1, allow_inf_nan=False, json_schema_extra=_kind("share"))]
RunDir = Annotated[str, AfterValidator(_run_dir), Field(json_schema_extra=_kind("path"))]


class EdgeConfig(BaseModel):
    """Settings of one edge; edges that are not listed work with the defaults."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    from_stage: str = Field(alias="from", description="The stage that writes.")
    to_stage: str = Field(alias="to", description="The stage that reads.")
    replica: int = Field(default=0, ge=0, le=MAX_INDEX, description="The replica's number.")
    unclaimed_after: Seconds | None = Field(
        default=None, description="`unclaimed_after` of this edge alone; null: that of the broker."
    )

    @property
    def edge(self) -> Edge:
        """The edge that these settings are for."""
        return Edge(self.from_stage, self.to_stage, self.replica)

    @model_validator(mode="after")
    def _names(self) -> Self:
        try:
            check_edge(self.edge)
        except InvalidPayload as error:
            raise PydanticCustomError("edge", "{problem}", {"problem": str(error)}) from error
        return self


class BrokerConfig(BaseModel):
    """A broker's settings. Sizes in bytes, durations in seconds, shares from 0 to 1.

    Made by `config.load`, which raises ConfigError; made directly, pydantic's ValidationError comes out.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    run_dir: RunDir = Field(
        default_factory=lambda: default_run_dir(os.getuid(), os.environ),
        validate_default=True,
        description="Directory of the broker's sockets and locks. Absolute; with `/lifeline.sock` behind it at most "
        "107 bytes. Default: `/run/tensor-connector` for root, `$XDG_RUNTIME_DIR/tensor-connector` otherwise, "
        "`/tmp/tensor-connector-UID` when that is unset. Clients find the broker here.",
    )
    pool: Size = Field(
        default=GIB,
        ge=MIB,
        description="Shared memory for payloads, reserved in full at the start.",
    )
    max_blocks: int | None = Field(
        default=None,
        ge=1,
        le=1 << 24,
        description="Blocks that can live at once; each costs 64 bytes of table. null: one for every 4096 bytes of the "
        "pool, at least 4096 and at most 262144.",
    )
    group: str | None = Field(
        default=None,
        min_length=1,
        description="Sockets and segments get mode 0660 and this group. null: mode 0600.",
    )
    put_timeout: Seconds = Field(
        default=30.0,
        description="How long a put waits for room when its caller names no time-out; then `PoolFull`.",
    )
    unclaimed_after: Seconds = Field(
        default=600.0,
        description="How long a payload waits for a reader that has not come; then the writer gets `Unclaimed`.",
    )
    suspect_after: Seconds = Field(
        default=10.0,
        description="Silence after which a live session is shown as suspect. It loses nothing by it. Longer than "
        "`heartbeat`.",
    )
    heartbeat: Seconds = Field(default=5.0, description="How often an idle session is asked for a sign of life.")
    deadlock_after: Seconds = Field(
        default=1.0,
        description="How long waiters must block each other before the youngest is refused with `PoolDeadlock`.",
    )
    window: int = Field(
        default=256,
        ge=1,
        le=1 << 20,
        description="Descriptors of one edge that a reader may have been sent and not yet taken; more wait in the "
        "broker.",
    )
    direct: bool = Field(
        default=True,
        description="Writers tell readers of chunks by themselves, over a socket between the two, once a stream has "
        "begun; the broker stands beside. false: every chunk goes through the broker. The variable goes for private "
        "brokers, too.",
    )
    ahead_session: Size | None = Field(
        default=None,
        ge=4 * KIB,
        description="Room that one session may hold reserved ahead of its puts, at most the pool. null: 1/16 of the "
        "pool, at most 64MiB.",
    )
    ahead_total: Share = Field(
        default=0.25, gt=0, description="Share of the pool that all sessions together may hold reserved ahead."
    )
    edge_guard: Share = Field(
        default=0.125,
        ge=0,
        lt=1,
        description="Share of the pool that an edge above its fair share may not take, so that the others find room.",
    )
    max_sessions: int = Field(default=1024, ge=1, le=65_536, description="Client processes that can be connected.")
    max_request_bytes: Size = Field(
        default=8 * MIB, ge=64 * KIB, le=GIB, description="Largest control message; tensors do not travel in these."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )
    log_format: Literal["human", "json"] = Field(
        default="human", description="Log lines to read, or one JSON object each."
    )
    stop_grace: Seconds = Field(
        default=2.0, description="How long a stopping broker waits for its answers to leave before it closes."
    )
    edges: list[EdgeConfig] = Field(
        default_factory=list, description="Settings of single edges. An edge needs no entry to be used."
    )

    @property
    def block_limit(self) -> int:
        """`max_blocks`, or what null stands for."""
        return self.max_blocks if self.max_blocks is not None else min(max(self.pool // 4096, 4096), 262_144)

    @property
    def ahead_limit(self) -> int:
        """`ahead_session` in bytes, or what null stands for."""
        return self.ahead_session if self.ahead_session is not None else min(self.pool // 16, 64 * MIB)

    def unclaimed_after_of(self, edge: Edge) -> float:
        """Seconds that a payload of this edge waits for a reader that has not come."""
        own = (e.unclaimed_after for e in self.edges if e.edge == edge and e.unclaimed_after is not None)
        return next(own, self.unclaimed_after)

    @model_validator(mode="after")
    def _together(self, info: ValidationInfo) -> Self:
        if info.context == ONE_SOURCE:
            return self
        if self.suspect_after <= self.heartbeat:
            problem = f"suspect_after ({self.suspect_after}) must be longer than heartbeat ({self.heartbeat})"
            raise _conflict(problem, ("suspect_after",), ("heartbeat",))
        if self.ahead_limit > self.pool:
            sizes = f"{format_size(self.ahead_limit)}, {format_size(self.pool)}"
            raise _conflict(f"ahead_session must not be larger than pool ({sizes})", ("ahead_session",), ("pool",))
        seen: set[Edge] = set()
        for i, entry in enumerate(self.edges):
            if entry.edge in seen:
                raise _conflict(f"the edge {entry.edge} stands twice", ("edges", i))
            seen.add(entry.edge)
        return self


def _conflict(problem: str, *paths: tuple[str | int, ...]) -> PydanticCustomError:
    """A rule between values is broken; config.py moves the refusal to the first of `paths` that was given."""
    return PydanticCustomError("conflict", "{problem}", {"problem": problem, "paths": list(paths)})
