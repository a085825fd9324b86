"""The model's intermediate buffer: one map of tensors per request (RFC, "Rename runtime_additional_information")."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from connector import errors
from runner_adapter import legacy
from runner_adapter.config import TransferConfig
from runner_adapter.merge import PROCESSED_TOKENS, Blocks, MergeRules, merged
from runner_adapter.naming import Naming, flatten, name_of, nest
from runner_adapter.requests import check_rid, unknown
from runner_adapter.values import Device

#: Finished rids remembered, so that what comes late for them is dropped and not taken for a mistake.
MOST_FINISHED = 65_536


class _Held:
    """One request's map: by name, and as it is shown. Both are replaced together, never changed."""

    __slots__ = ("blocks", "given", "keys", "names", "shown", "step")

    def __init__(self) -> None:
        self.names: dict[str, torch.Tensor] = {}
        self.shown: Mapping[str, torch.Tensor] = MappingProxyType({})
        #: Name -> how it is shown: its key, or itself.
        self.keys: dict[str, str] = {}
        #: What hooks called a tensor -> its name.
        self.given: dict[str, str] = {}
        #: The last step whose payloads were merged.
        self.step: int | None = None
        #: For rows that are appended.
        self.blocks: Blocks = {}


class ModelIntermediateBuffer:
    """`dict[rid, dict[str, Tensor]]`, filled from the connector and by the model's hooks. One thread: the model's.

    A map shows a name under its connector key if the transfer config gives it one, else under the name. Updates are
    merged (see `merge.merged`) into a new map: one that was handed out never changes. An update that is refused
    changes nothing: InvalidPayload or UnsupportedTensor, with rid and name. An update for an unknown rid is
    UnknownRequest, with near matches; for a finished one it is dropped and counted.

    `plain_values`: values that are no tensors become tensors in what hooks and engines give, as `legacy.tensors` does
    it; what the connector brings is tensors in any case.
    """

    def __init__(
        self,
        config: TransferConfig | None = None,
        *,
        rules: MergeRules | None = None,
        device: Device = "cpu",
        plain_values: bool = False,
    ) -> None:
        self.rules = rules or MergeRules()
        #: Where names of `rules.gpu_resident` live; all others are on the host.
        self.device = torch.device(device)
        config = TransferConfig.disabled() if config is None else config
        self._naming, self._templates = Naming(config), config.templates
        self._plain_values = plain_values
        self._held: dict[str, _Held] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._counts = {"merged": 0, "dropped_finished": 0, "refused": 0}

    # -- lives ------------------------------------------------------------------------------------

    def add(self, rid: str, initial: Mapping[Any, Any] | None = None) -> None:
        """A new request, with a first update if it brings one. UsageError if the rid is there: finish it first."""
        held = _Held()
        with self._judged(rid):
            if check_rid(rid) in self._held:
                raise errors.UsageError("the request is in the buffer already")
            if initial is not None:
                self._store(rid, held, {}, [self._by_name(rid, held, initial)])
        self._finished.pop(rid, None)
        self._held[rid] = held

    def finish(self, rids: Iterable[str]) -> None:
        """The maps go, before the step's new requests are added (the runner, `_update_states`); unknown rids, too, are
        remembered as finished."""
        if isinstance(rids, str):
            raise errors.UsageError("finish takes several rids, not one str", rid=rids)
        for rid in [check_rid(rid) for rid in rids]:
            self._held.pop(rid, None)
            self._finished[rid] = None
            self._finished.move_to_end(rid)
        while len(self._finished) > MOST_FINISHED:
            self._finished.popitem(last=False)

    # -- updates ----------------------------------------------------------------------------------

    def receive(
        self, step: int, payloads: Mapping[str, Sequence[Mapping[str, torch.Tensor]]]
    ) -> dict[str, errors.ConnectorError]:
        """Merge the payloads that the connector brought for a step: all of a rid's in one merge, in their order.

        Each key must match a template of the transfer config; without an enabled one none does. Returned, by rid, is
        why nothing was merged: InvalidPayload, UnsupportedTensor, UnknownRequest, or UsageError if payloads of the rid
        are merged for this step or a later one (PR, "Double intermediate-buffer update"). The other rids are merged.
        """
        failed: dict[str, errors.ConnectorError] = {}
        for rid, several in payloads.items():
            try:
                self._receive(step, rid, several)
            except errors.ConnectorError as error:
                failed[rid] = _kept(error)
        return failed

    def _receive(self, step: int, rid: str, several: Sequence[Mapping[str, torch.Tensor]]) -> None:
        with self._judged(rid):
            held = self._find(rid)
            if held is not None and several:
                if held.step is not None and step <= held.step:
                    raise errors.UsageError("this step's payloads are merged already", step=step, merged=held.step)
                self._store(rid, held, held.names, [self._by_key(rid, payload) for payload in several])
                held.step = step

    def merge(self, rid: str, update: Mapping[Any, Any]) -> None:
        """Merge what a hook returned: nested, or flat under names or keys (RFC, data flow 5). `{}` changes nothing."""
        with self._judged(rid):
            held = self._find(rid)
            if held is not None:
                self._store(rid, held, held.names, [self._by_name(rid, held, update)])

    def replace(self, rid: str, snapshot: Mapping[Any, Any]) -> None:
        """Put a full snapshot in the map's place. Names of `rules.kept` that it does not hold stay."""
        with self._judged(rid):
            held = self._find(rid)
            if held is not None:
                update = self._by_name(rid, held, snapshot)
                kept = {n: t for n, t in held.names.items() if self.rules.is_kept(n) and n not in update}
                self._store(rid, held, kept, [update])

    def new_segment(self, rid: str, update: Mapping[Any, Any] | None = None) -> None:
        """A further segment of streaming input: merged, and `meta.num_processed_tokens` is 0 then (the runner,
        `_update_streaming_input_additional_info`)."""
        with self._judged(rid):
            held = self._find(rid)
            if held is not None:
                start = {PROCESSED_TOKENS: torch.zeros((), dtype=torch.int64, device="cpu")}
                given = {} if update is None else self._by_name(rid, held, update)
                self._store(rid, held, held.names, [given, start], segment=True)

    # -- reads ------------------------------------------------------------------------------------

    def __getitem__(self, rid: str) -> Mapping[str, torch.Tensor]:
        """The request's map, under keys and names; it stays as it is. UnknownRequest, also if it is finished."""
        return self._there(rid).shown

    def names(self, rid: str) -> dict[str, torch.Tensor]:
        """The same by dotted name, as a dict of the caller's. UnknownRequest as above."""
        return dict(self._there(rid).names)

    def nested(self, rid: str) -> dict[Any, Any]:
        """The same as a model's nested dicts, new at every level. UnknownRequest as above."""
        return nest(self._there(rid).names)

    def __contains__(self, rid: object) -> bool:
        return rid in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: updates `merged`, those of finished rids (`dropped_finished`), and those `refused`."""
        return dict(self._counts)

    def validate(self) -> None:
        """InvariantBroken if the tables contradict each other."""
        both = self._held.keys() & self._finished.keys()
        if both or len(self._finished) > MOST_FINISHED:
            raise errors.InvariantBroken("requests are live and finished, or too many are remembered", rids=list(both))
        for rid, held in self._held.items():
            if list(held.shown) != [held.keys[name] for name in held.names]:
                raise errors.InvariantBroken("a map does not show its names", rid=rid, keys=list(held.shown))
            if not held.blocks.keys() <= held.names.keys():
                raise errors.InvariantBroken("rows are kept that no map shows", rid=rid, names=list(held.blocks))
            for name, tensor in held.names.items():
                place = self.device.type if self.rules.is_resident(name) else "cpu"
                if tensor is not held.shown[held.keys[name]] or tensor.device.type != place or tensor.requires_grad:
                    raise errors.InvariantBroken("a tensor is not as a map keeps it", rid=rid, name=name)

    # -- within -----------------------------------------------------------------------------------

    @contextmanager
    def _judged(self, rid: str) -> Iterator[None]:
        """Count a refusal, and say whose it is."""
        try:
            yield
        except (errors.UsageError, errors.UnknownRequest) as error:
            self._counts["refused"] += 1
            raise error.anew(rid=rid) from error

    def _find(self, rid: str) -> _Held | None:
        """What an update of the rid goes to; None, counted, if the rid is finished."""
        if rid in self._finished:
            self._counts["dropped_finished"] += 1
            return None
        return self._there(rid)

    def _there(self, rid: str) -> _Held:
        held = self._held.get(rid)
        if held is None:
            raise unknown(check_rid(rid), self._held, "the request is not in the buffer")
        return held

    def _by_key(self, rid: str, payload: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not isinstance(payload, Mapping):
            raise errors.InvalidPayload(f"a payload is a dict[str, Tensor], not {type(payload).__name__}")
        return {self._naming.name(rid, key): tensor for key, tensor in payload.items()}

    def _by_name(self, rid: str, held: _Held, update: Mapping[Any, Any]) -> dict[str, Any]:
        """An update by name. What a map shows under a key, a model may give back under it."""
        if isinstance(update, Mapping):
            named = {self._given(rid, held, key): value for key, value in update.items()}
            if len(named) < len(update):
                raise errors.InvalidPayload("a name and its key are given at once", keys=[str(key) for key in update])
            update = legacy.tensors(named, rid=rid) if self._plain_values else named
        return flatten(update)

    def _given(self, rid: str, held: _Held, key: Any) -> Any:
        """The name of one of this rid's keys; anything else is flatten's to judge."""
        if self._templates is None or not isinstance(key, str):
            return key
        if key not in held.given:
            try:
                _, *found = self._templates.parse(key, rid)
                held.given[key] = name_of(*found)
            except errors.InvalidPayload:
                held.given[key] = key
        return held.given[key]

    def _store(
        self,
        rid: str,
        held: _Held,
        base: Mapping[str, torch.Tensor],
        updates: list[dict[str, Any]],
        segment: bool = False,
    ) -> None:
        """The one merge of a call; nothing is changed before all of it succeeded."""
        names = merged(base, updates, self.rules, self.device, held.blocks, segment=segment)
        for name in names.keys() - held.keys.keys():
            held.keys[name] = self._naming.key(rid, name) or name
        shown = {held.keys[name]: tensor for name, tensor in names.items()}
        if len(shown) < len(names):
            raise errors.InvalidPayload("a name is another's key", keys=list(shown))
        held.names, held.shown = names, MappingProxyType(shown)
        for name in held.blocks.keys() - names.keys():
            del held.blocks[name]
        self._counts["merged"] += 1


def _kept(error: errors.ConnectorError) -> errors.ConnectorError:
    """The error anew. The frames of the old one let go of the payloads, and with them of the connector's blocks."""
    told: BaseException | None = error
    while told is not None:
        traceback.clear_frames(told.__traceback__)
        told = told.__cause__ or told.__context__
    return error.anew()
